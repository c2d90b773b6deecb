"""One sample of a manifest as one token sequence: turns of text, with each clip's tracks joined in time order."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import pairwise
from pathlib import PurePath
from typing import Literal, Protocol, TypeVar

from data_pipelines.budget import BudgetConfig, BudgetReport
from data_pipelines.chain import Cell, Chain
from data_pipelines.container import ClipIndex
from data_pipelines.examine import Media
from data_pipelines.explain import KeptUnit, kept_units
from data_pipelines.manifest import Item, Sample, Turn
from data_pipelines.media import MediaError
from data_pipelines.parts import MediaPart, image_part, scene_lead, sound_part, video_part
from data_pipelines.units import PictureRule, SoundRule
from mmcp.config import config
from mmcp.interleave import Piece, StampConfig, TimedText, Track, interleave
from mmcp.sequence import Segment, TokenSequence

R = TypeVar("R")


class TextRule(Protocol):
    """How text and the ends of turns become ids."""

    def encode(self, text: str) -> list[int]:
        """Ids of text."""

    def conversation(self, turns: Sequence[tuple[str, Sequence[str | None]]], *, prompt: bool) -> list[Piece]:
        """Lay out turns of text and media (None); raises ValueError for what cannot be laid out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What is needed of the tokenizer and the encoders; a kind of media without one is not for this model."""

    text: TextRule
    image: PictureRule | None = None
    video: PictureRule | None = None
    audio: SoundRule | None = None


@config
class ClipConfig:
    """How a sample becomes a sequence."""

    budget: BudgetConfig
    """How many tokens it may have, and the settings to choose from."""
    stamps: StampConfig = StampConfig()
    """How the time of a frame group is written before it."""
    missing_sound: Literal["allow", "refuse"] = "allow"
    """Whether a video without a sound track may be used where the model hears."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipReport:
    """What was not as full as it could have been, in one sample."""

    budget: BudgetReport
    without_sound: tuple[str, ...]
    """Videos and sounds that are to be heard and have no sound track, or less than one mel frame of sound."""
    repeated_stamps: int
    """Frame groups whose time reads the same as that of the group before: the stamps have too few decimals."""


def build_sequence(
    sample: Sample, media: Mapping[str, Media], config: ClipConfig, *, rules: Rules, prompt: bool = False
) -> tuple[TokenSequence, ClipReport]:
    """Make one sample's sequence, from metadata alone, and say what it lacks.

    media:  what is known of each media item's file, by the item's name for it
    prompt: leave out the answer that ends the conversation, and end with the opening of an assistant's turn
    Raises ValueError with the sample's id, MediaError with the file.
    """
    layout = _Layout(sample, media, config, rules, prompt, cache(rules.text.encode))
    if not any(item.kind != "text" or layout.encode(item.text) for item in layout.items):
        raise ValueError(f"sample '{sample.id}' has neither text nor media; remove the row")
    try:
        sequence, budget, silent = layout.fit()
    except MediaError:
        raise
    except ValueError as error:
        raise ValueError(f"sample '{sample.id}': {error}") from error
    return sequence, ClipReport(budget=budget, without_sound=silent, repeated_stamps=repeated_stamps(sequence))


def explain_sequence(
    sample: Sample, media: Mapping[str, Media], config: ClipConfig, *, rules: Rules
) -> tuple[KeptUnit, ...]:
    """Say why each unit of the sample's sequence is there, in token order; arguments and errors as `build_sequence`."""
    layout = _Layout(sample, media, config, rules, False, cache(rules.text.encode))
    chosen = layout.choose()
    named = [(layout.items[i].media, kind) for i, kind in chosen.parts]
    kept = kept_units(chosen.chain, list(chosen.parts.values()), list(chosen.cells.values()), room=chosen.room)
    waiting: dict[str, list[KeptUnit]] = {kind: [] for kind in ("image", "video", "audio")}
    for (source, kind), units in zip(named, kept, strict=True):
        waiting[kind] += [replace(unit, source=source, kind=kind) for unit in units]
    sequence, lists = layout.lay(chosen), {kind: iter(units) for kind, units in waiting.items()}
    found = tuple(next(lists[segment.kind]) for segment in sequence.segments for _ in segment.units)
    assert [each.unit for each in found] == list(sequence.units), "units were explained in another order"
    return found


def repeated_stamps(sequence: TokenSequence) -> int:
    """Count frame groups whose stamp is the same as that of the group before in the same clip."""
    stamped = [
        (group.source, stamp.ids)
        for stamp, group in pairwise(sequence.segments)
        if stamp.kind == "text" and group.kind == "video"
    ]
    return sum(before == after for before, after in pairwise(stamped))


Parts = dict[tuple[int, str], MediaPart]
"""(number of the item in the sample, kind of its track) -> its part."""


@dataclass(frozen=True)
class _Chosen:
    """How finely each part is seen or heard."""

    parts: Parts
    cells: dict[tuple[int, str], list[Cell]]
    chain: Chain
    words: int
    """Tokens of text."""
    used: int
    """Tokens of media and their times."""
    room: int
    """Most tokens that they may have."""
    silent: tuple[str, ...]
    """Items without sound that are to be heard."""


@dataclass(frozen=True)
class _Layout:
    """A sample that can be laid out more or less finely."""

    sample: Sample
    media: Mapping[str, Media]
    config: ClipConfig
    rules: Rules
    prompt: bool
    encode: Callable[[str], Iterable[int]]

    @property
    def turns(self) -> tuple[Turn, ...]:
        turns = self.sample.turns
        return turns[:-1] if self.prompt and turns and turns[-1][0] == "assistant" else turns

    @property
    def items(self) -> list[Item]:
        return [item for _, items in self.turns for item in items]

    @cached_property
    def pieces(self) -> list[Piece]:
        """The conversation, the same at every setting."""
        turns = [(role, [item.text if item.kind == "text" else None for item in items]) for role, items in self.turns]
        return self.rules.text.conversation(turns, prompt=self.prompt)

    def choose(self) -> _Chosen:
        """Choose how finely each part is seen or heard.

        Raises ValueError naming needed and allowed tokens when even the coarsest does not fit.
        """
        parts = self._parts()
        silent = tuple(
            self.items[i].name for (i, kind), part in parts.items() if kind == "audio" and not part.part.leaves
        )
        parts = {key: part for key, part in parts.items() if part.part.leaves}
        chain = Chain([part.part for part in parts.values()])
        words = sum(len(piece.ids) for piece in self.pieces)
        words += sum(len(caption.ids) for item in self.items for caption in self._captions(item))
        limit = self.config.budget.tokens
        if words + chain.least > limit:
            raise ValueError(_too_long(words, chain.least, self.config.budget))
        chosen, used = chain.take(limit - words)
        cells = dict(zip(parts, chosen, strict=True))
        return _Chosen(parts, cells, chain, words=words, used=used, room=limit - words, silent=silent)

    def lay(self, chosen: _Chosen) -> TokenSequence:
        """Lay out all turns."""
        sequence, tokens = self._sequence(chosen.parts, chosen.cells), chosen.words + chosen.used
        assert sequence.num_tokens == tokens, f"{tokens} tokens were counted, {sequence.num_tokens} laid"
        return sequence

    def fit(self) -> tuple[TokenSequence, BudgetReport, tuple[str, ...]]:
        """Lay out as finely as the budget allows; say what was reduced, and whose sound is missing; see `choose`."""
        chosen = self.choose()
        parts, cells, chain = chosen.parts, chosen.cells, chosen.chain
        sequence = self.lay(chosen)
        finest = dict(zip(parts, chain.take(chain.full)[0], strict=True))
        report = BudgetReport(
            limit=self.config.budget.tokens,
            tokens=sequence.num_tokens,
            full_tokens=chosen.words + chain.full,
            detail=tuple(self._words(key, part, cells[key]) for key, part in parts.items()),
            reduced=tuple(
                f"{self._words(key, part, cells[key])} instead of {part.words(finest[key])}"
                for key, part in parts.items()
                if cells[key] != finest[key]
            ),
        )
        return sequence, report, chosen.silent

    def _words(self, key: tuple[int, str], part: MediaPart, cells: list[Cell]) -> str:
        name = PurePath(self.items[key[0]].name).name
        return f"{key[1]} of '{name}': {part.words(cells) if cells else 'left out'}"

    def _parts(self) -> Parts:
        """Make the parts of all media items: pictures, and sounds that are to be heard."""
        parts: Parts = {}
        budget = self.config.budget
        for number, item in enumerate(self.items):
            if item.kind == "image":
                rule, native = _present(self.rules.image, item), self.media[item.name].image
                assert native is not None
                parts[number, "image"] = image_part(native, rule, budget.settings, view=item.view)
            if item.kind == "video":
                parts[number, "video"] = self._video(item)
            if item.kind == "audio" or (item.kind == "video" and item.audio and self.rules.audio is not None):
                parts[number, "audio"] = self._sound(item)
        return parts

    def _video(self, item: Item) -> MediaPart:
        rule, clip = _present(self.rules.video, item), self._clip(item)
        if clip.video is None:
            raise MediaError(item.name, "no video stream")
        return video_part(
            clip,
            rule,
            self.config.budget.settings,
            view=item.view,
            stamp_tokens=lambda time: len(tuple(self.encode(self.config.stamps.text(time)))),
            lead=partial(scene_lead, clip) if self.config.budget.adaptive else None,
        )

    def _sound(self, item: Item) -> MediaPart:
        """Make the part of a file's sound; empty where a video has none and need not have any."""
        rule, clip = _present(self.rules.audio, item), self._clip(item)
        if clip.audio is None and (item.kind == "audio" or self.config.missing_sound == "refuse"):
            raise MediaError(item.name, "no audio stream")
        return sound_part(clip, rule, self.config.budget.settings, view=item.view, always=item.kind == "audio")

    def _sequence(self, parts: Parts, cells: Mapping[tuple[int, str], list[Cell]]) -> TokenSequence:
        """Lay out all turns."""
        segments: list[Segment] = []
        for piece in self.pieces:
            if piece.item < 0:
                segments.append(_words(piece.ids, piece.trained))
            else:
                segments += self._media(piece.item, self.items[piece.item], parts, cells)
        return TokenSequence(tuple(segment for segment in segments if segment.num_tokens))

    def _media(
        self, number: int, item: Item, parts: Parts, cells: Mapping[tuple[int, str], list[Cell]]
    ) -> list[Segment]:
        """Lay out one image, sound or video."""
        tracks = []
        for kind in ("image", "video", "audio"):
            key = (number, kind)
            if key in parts and cells[key]:
                units = parts[key].units(cells[key])
                if kind == "image":
                    return [Segment(kind=kind, source=item.name, units=units)]
                stream = getattr(self._clip(item), kind).stream
                stamped = kind == "video" and bool(self.config.stamps.pattern)
                tracks.append(Track(kind=kind, source=item.name, stream=stream, units=units, stamped=stamped))
        return interleave(
            tracks,
            stamp=lambda time: self.encode(self.config.stamps.text(time)),
            captions=self._captions(item),
        )

    def _captions(self, item: Item) -> list[TimedText]:
        """The captions shown during the part of the clip that is seen."""
        start, end = item.view.video_start, item.view.video_end
        shown = [
            cue for cue in item.captions if (start is None or cue.end > start) and (end is None or cue.start < end)
        ]
        return [
            TimedText(ids=tuple(self.encode(cue.text)), start=cue.start, end=cue.end, trained=item.train_captions)
            for cue in shown
        ]

    def _clip(self, item: Item) -> ClipIndex:
        clip = self.media[item.name].clip
        assert clip is not None, f"{item.kind} '{item.name}' was not indexed"
        return clip


def _too_long(words: int, media: int, budget: BudgetConfig) -> str:
    """Say what is needed, what is allowed and what helps."""
    needed, how = words + media, "at the one setting" if budget.is_fixed else "at the coarsest"
    remedy = f"allow at least {needed} tokens"
    if words > budget.tokens or not media:
        remedy += ", or shorten the text"
    elif budget.is_fixed:
        remedy += ", or give settings from coarse to fine to choose between"
    return (
        f"{needed} tokens ({media} of media and their times, {words} of text) are needed {how}, "
        f"the budget allows {budget.tokens}; {remedy}"
    )


def _present(rule: R | None, item: Item) -> R:
    """Return the rule of an item's encoder, or refuse the item."""
    if rule is None:
        raise MediaError(item.name, f"is of kind {item.kind}, for which the model has no encoder; add one")
    return rule


def _words(ids: Iterable[int], trained: bool = False) -> Segment:
    return Segment(kind="text", ids=tuple(ids), loss=trained)
