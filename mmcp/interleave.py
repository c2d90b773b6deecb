"""Join pictures, sound and timed text of one clip in time order, each frame group after its time in words."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm

from mmcp.config import config
from mmcp.sequence import Segment, Unit

ORDER = {"video": 0, "image": 1, "audio": 2, "text": 3}  # which comes first of things that begin at one moment


@config
class StampConfig:
    """How the time of a frame group is written before it."""

    pattern: str = "<{seconds}>"
    """Text in which {seconds} stands for the time; empty: no stamps, as models with time-aligned positions read."""
    decimals: int = 1
    """Digits after the point; groups less than one such step apart may get the same text."""

    def __post_init__(self):
        if (self.pattern and "{seconds}" not in self.pattern) or self.decimals < 0:
            raise ValueError(
                f"pattern='{self.pattern}' with decimals={self.decimals} cannot tell a time; "
                "write {seconds} in the pattern and use decimals of at least 0"
            )

    def text(self, time: Fraction) -> str:
        """Write a time: seconds rounded to `decimals`, exactly, halves up."""
        scale = 10**self.decimals
        steps = (2 * time.numerator * scale + time.denominator) // (2 * time.denominator)
        whole, rest = divmod(abs(steps), scale)
        digits = f"{'-' if steps < 0 else ''}{whole}" + (f".{rest:0{self.decimals}}" if self.decimals else "")
        return self.pattern.replace("{seconds}", digits)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A stretch of a conversation, as a tokenizer lays it out: ids of text, or the place of a medium."""

    ids: tuple[int, ...] = ()
    trained: bool = False
    """Whether the ids are trained targets."""
    item: int = -1
    """Number of the medium that stands here, counted over the items of all turns; -1: text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Track:
    """Units of one stream of a clip, in time order."""

    kind: str
    """image, video or audio."""
    source: str
    """The file or shard member."""
    stream: int
    """Index of the stream inside its source."""
    units: Sequence[Unit]
    stamped: bool = False
    """Whether the time stands before each unit."""
    attends: str = "causal"
    """As `Segment.attends`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedText:
    """Words said or shown for a while: a caption."""

    ids: tuple[int, ...]
    start: Fraction
    """Seconds on the clip's clock."""
    end: Fraction
    trained: bool = False
    """Whether its tokens are trained targets."""


def interleave(
    tracks: Sequence[Track], *, stamp: Callable[[Fraction], Iterable[int]], captions: Sequence[TimedText] = ()
) -> list[Segment]:
    """Join the tracks and captions of one clip by the time at which each unit begins.

    stamp: ids of the text that tells a time
    Ties: video, image, audio, caption; then tracks in the order given. Units of one track that follow each other
    with nothing between them share a segment. Worked example, frame groups V every second, sound A every 0.5 s:

        <0.0> V  A A  <1.0> V  A A        text, video, audio (2 units), text, video, audio (2 units)
    """
    pieces: list[tuple[Unit | TimedText, Track | None]] = [(unit, track) for track in tracks for unit in track.units]
    pieces += [(caption, None) for caption in captions]
    scale = lcm(*(piece.start.denominator for piece, _ in pieces))
    keys = [
        (piece.start.numerator * (scale // piece.start.denominator), ORDER[track.kind if track else "text"])
        for piece, track in pieces
    ]
    segments: list[Segment] = []
    run: list[Unit] = []
    running: Track | None = None
    for number in sorted(range(len(pieces)), key=keys.__getitem__):
        piece, track = pieces[number]
        if running and (track is not running or running.stamped):
            segments.append(_media(running, run))
            run = []
        running = track
        if isinstance(piece, TimedText):
            segments.append(_words(piece.ids, piece, loss=piece.trained))
            continue
        if track and track.stamped:
            segments.append(_words(tuple(stamp(piece.start)), piece))
        run.append(piece)
    return [*segments, _media(running, run)] if running else segments


def _words(ids: tuple[int, ...], piece: Unit | TimedText, *, loss: bool = False) -> Segment:
    """Make a segment of text at the time of `piece`."""
    return Segment(kind="text", ids=ids, loss=loss, start=piece.start, end=piece.end)


def _media(track: Track, units: Sequence[Unit]) -> Segment:
    """Make one segment of consecutive units of a track."""
    return Segment(
        kind=track.kind,
        attends=track.attends,
        source=track.source,
        stream=track.stream,
        units=tuple(units),
        start=units[0].start,
        end=max(unit.end for unit in units),
    )
