"""One interleaved token sequence, described by metadata alone: no pixels, no samples, no torch.

Legend, used in every docstring of the library:

    b   batch                     h   query heads           n   tokens of one segment
    s   tokens of one row         k   key-value heads       f   frames
    cp  context-parallel ranks    d   size of a head        e   model width
    rows are packed, so b = 1 and is not written: q is [s, h, d]

A sharded axis is written as a quotient: `s/cp` is this rank's share of the tokens, `h/cp` its share of the
heads. Shares may differ between ranks and may be empty: the plan says.
"""

from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property

import numpy as np

KINDS = ("text", "image", "video", "audio")
NO_ID = -1  # id of a position that holds an encoder's row instead of a text token
SAMPLE_RATE = 16000  # samples a second of all sound: sample n of a clip is at n / SAMPLE_RATE on its clock
HOP = 160  # samples from one mel frame to the next
NO_LABEL = -100  # label of a position that is not trained; torch's cross entropy ignores it


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """The atom of decoding and encoding: one image, one group of frames, one window of sound.

    A unit is encoded whole, on one rank, independently of every other unit; its rows are contiguous in the sequence.
    """

    num_tokens: int
    """Rows the encoder makes of it."""
    start: Fraction
    """Seconds on the clip's clock at which it begins; exact."""
    end: Fraction
    """Seconds at which it ends."""
    grid: tuple[int, int, int]
    """Rows along time, height and width; their product is num_tokens. Sound: (num_tokens, 1, 1)."""
    size: tuple[int, ...]
    """Shape of what the encoder is given, without channels: image (height, width) and video (frames, height, width)
    in pixels, audio (mel frames,)."""
    items: tuple[int, ...]
    """Image: (). Video: the frames' numbers in display order. Audio: (first, last + 1) sample at 16 kHz."""
    decode: tuple[int, int] = (0, 0)
    """Video: first and last + 1 frame, in decode order, that a decoder must run through to show `items`: the safe
    start is a frame before which nothing is referred to. Audio: first and last + 1 packet."""
    native: tuple[int, int] = (0, 0)
    """Height and width of a decoded frame in pixels, before resizing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """A run of tokens of one kind from one source, in one document."""

    kind: str
    """text, image, video or audio."""
    document: int = 0
    """Documents of one row never see each other; ids do not decrease along a row."""
    ids: tuple[int, ...] = ()
    """Text: the token ids. Media: empty."""
    loss: bool = False
    """Text: whether its tokens are trained targets."""
    attends: str = "causal"
    """causal; `both`: both ways inside each unit; `prefix`: both ways inside the document's leading prefix segments."""
    source: str = ""
    """Media: the file or shard member the units come from."""
    stream: int = 0
    """Media: index of the stream inside its source."""
    units: tuple[Unit, ...] = ()
    """Media: what is encoded, in token order."""
    start: Fraction = Fraction(0)
    """Seconds on the clip's clock at which the segment begins; timed text and media only."""
    end: Fraction = Fraction(0)
    """Seconds at which it ends."""
    num_tokens: int = field(init=False)

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"segment kind '{self.kind}' is unknown; use one of {', '.join(KINDS)}")
        if self.kind == "text" and self.units:
            raise ValueError("a text segment has no units")
        if self.kind != "text" and self.ids:
            raise ValueError(f"a {self.kind} segment has no ids; its rows come from an encoder")
        count = len(self.ids) if self.kind == "text" else sum(unit.num_tokens for unit in self.units)
        object.__setattr__(self, "num_tokens", count)


@dataclass(frozen=True)
class TokenSequence:
    """One packed row: ordered segments. Everything else about the row is a function of them.

    Worked example, two documents, `V` a unit of two rows, loss on the answer `c d`:

        segments   text "a b"   video V V   text "c d" (loss) | text "x y" (loss)
        ids        a  b         -1 -1       c  d              | x  y
        labels     .  .         .  c        d  .              | y  .
        documents  0  0         0  0        0  0              | 1  1
    """

    segments: tuple[Segment, ...]

    def __post_init__(self):
        documents = [segment.document for segment in self.segments]
        if documents != sorted(documents):
            raise ValueError(f"document ids must not decrease along a row, got {documents}; pack documents in order")

    @cached_property
    def offsets(self) -> np.ndarray:
        """[segments + 1] int64: first token of each segment, then the number of tokens."""
        return np.concatenate([[0], np.cumsum([segment.num_tokens for segment in self.segments], dtype=np.int64)])

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @cached_property
    def ids(self) -> np.ndarray:
        """[s] int64: token ids; NO_ID where an encoder's row stands."""
        ids = np.full(self.num_tokens, NO_ID, dtype=np.int64)
        for segment, start in zip(self.segments, self.offsets, strict=False):
            if segment.kind == "text":
                ids[start : start + segment.num_tokens] = segment.ids
        return ids

    @cached_property
    def documents(self) -> np.ndarray:
        """[s] int64: the document of each token."""
        return self.per_token(self._segment_documents)

    @cached_property
    def _segment_documents(self) -> np.ndarray:
        return np.array([segment.document for segment in self.segments], dtype=np.int64)

    @cached_property
    def document_bounds(self) -> np.ndarray:
        """[documents + 1] int64: first token of each non-empty document, then the number of tokens (cu_seqlens)."""
        is_filled, documents = np.diff(self.offsets) > 0, self._segment_documents
        starts = self.offsets[:-1][is_filled][np.diff(documents[is_filled], prepend=-1) != 0]
        return np.concatenate([starts, [self.num_tokens]]).astype(np.int64)

    @cached_property
    def labels(self) -> np.ndarray:
        """[s] int64: the next token's id where that token is text with loss in the same document, else NO_LABEL.

        Shifted here, on the whole row, so that no split can lose a target. A label belongs to the token it names:
        a row of media may predict the text after it, and media are never predicted.
        """
        labels = np.full(self.num_tokens, NO_LABEL, dtype=np.int64)
        if self.num_tokens > 1:
            trained = self.per_token(np.array([segment.loss and segment.kind == "text" for segment in self.segments]))
            follows = trained[1:] & (self.documents[1:] == self.documents[:-1])
            labels[:-1][follows] = self.ids[1:][follows]
        return labels

    @cached_property
    def label_positions(self) -> np.ndarray:
        """[labels] int64: positions that carry a label, ascending."""
        is_trained = np.array([segment.loss and segment.kind == "text" for segment in self.segments], dtype=bool)
        is_first = np.isin(self.offsets[:-1], self.document_bounds)  # its first token follows none of its document
        spans = np.stack([self.offsets[:-1] - 1 + is_first, self.offsets[1:] - 1], axis=1)[is_trained]
        spans = spans[spans[:, 1] > spans[:, 0]]
        lengths = spans[:, 1] - spans[:, 0]
        before = np.cumsum(lengths) - lengths
        return np.repeat(spans[:, 0] - before, lengths) + np.arange(int(lengths.sum()))

    @cached_property
    def units(self) -> tuple[Unit, ...]:
        """All units in token order."""
        return tuple(unit for segment in self.segments for unit in segment.units)

    @cached_property
    def unit_segments(self) -> np.ndarray:
        """[units] int64: the segment each unit belongs to."""
        return np.repeat(np.arange(len(self.segments)), [len(segment.units) for segment in self.segments])

    @cached_property
    def unit_sizes(self) -> np.ndarray:
        """[units] int64: number of each unit's (kind, size) among the distinct ones of the row, ascending."""
        keys = [(segment.kind, unit.size) for segment in self.segments for unit in segment.units]
        numbers = {key: number for number, key in enumerate(sorted(set(keys)))}
        return np.array([numbers[key] for key in keys], dtype=np.int64)

    @cached_property
    def unit_ranges(self) -> np.ndarray:
        """[units, 2] int64: first and last + 1 token of each unit."""
        lengths = np.array([unit.num_tokens for unit in self.units], dtype=np.int64)
        before = np.cumsum(lengths) - lengths
        counts = np.array([len(segment.units) for segment in self.segments], dtype=np.int64)
        first_unit = np.cumsum(counts) - counts
        within = before - before[first_unit[self.unit_segments]] if len(lengths) else before
        starts = self.offsets[self.unit_segments] + within if len(lengths) else before
        return np.stack([starts, starts + lengths], axis=1)

    def unit_segment(self, unit: int) -> Segment:
        """Return the segment of unit number `unit`."""
        return self.segments[self.unit_segments[unit]]

    def per_token(self, values: np.ndarray) -> np.ndarray:
        """Repeat one value per segment for each of its tokens: [segments] -> [s]."""
        return np.repeat(values, np.diff(self.offsets))


def pack(documents: list[TokenSequence]) -> TokenSequence:
    """Join sequences into one row whose documents never see each other.

    Documents are renumbered 0, 1, ... in the order given; a sequence that already holds several keeps them apart.
    """
    segments: list[Segment] = []
    base = 0
    for sequence in documents:
        seen = sorted({segment.document for segment in sequence.segments})
        number = {document: base + i for i, document in enumerate(seen)}
        segments += [replace(segment, document=number[segment.document]) for segment in sequence.segments]
        base += len(seen)
    return TokenSequence(tuple(segments))
