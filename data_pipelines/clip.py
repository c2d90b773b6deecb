"""One sample of a manifest as one token sequence: turns of text, with each clip's tracks joined in time order."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Literal, Protocol, TypeVar

from data_pipelines.budget import BudgetConfig, BudgetReport, Setting, fit, picture_size
from data_pipelines.container import ClipIndex
from data_pipelines.examine import Media
from data_pipelines.manifest import Item, Sample, Turn
from data_pipelines.media import MediaError
from data_pipelines.units import PictureRule, SoundRule, frame_groups, image_unit, sound_windows
from mmcp.config import config
from mmcp.interleave import Piece, StampConfig, Track, interleave
from mmcp.sequence import Segment, TokenSequence, Unit

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
        sequence, budget = fit(layout.sequence, config.budget)
    except MediaError:
        raise
    except ValueError as error:
        raise ValueError(f"sample '{sample.id}': {error}") from error
    silent = tuple(name for name, windows in layout.sounds.items() if not windows)
    return sequence, ClipReport(budget=budget, without_sound=silent, repeated_stamps=repeated_stamps(sequence))


def repeated_stamps(sequence: TokenSequence) -> int:
    """Count frame groups whose stamp is the same as that of the group before in the same clip."""
    stamped = [
        (group.source, stamp.ids)
        for stamp, group in pairwise(sequence.segments)
        if stamp.kind == "text" and group.kind == "video"
    ]
    return sum(before == after for before, after in pairwise(stamped))


@dataclass(frozen=True)
class _Layout:
    """A sample that can be laid out at any setting."""

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

    @cached_property
    def sounds(self) -> dict[str, tuple[Unit, ...]]:
        """Windows of every sound that is to be heard, by the item's file."""
        rule = self.rules.audio
        heard = [item for item in self.items if item.kind == "audio" or (item.kind == "video" and item.audio)]
        return {item.media: sound_windows(self._clip(item), rule) for item in heard} if rule else {}

    def sequence(self, setting: Setting) -> TokenSequence:
        """Lay out all turns."""
        segments: list[Segment] = []
        for piece in self.pieces:
            is_text = piece.item < 0
            segments += [_words(piece.ids, piece.trained)] if is_text else self._media(self.items[piece.item], setting)
        return TokenSequence(tuple(segment for segment in segments if segment.num_tokens))

    def _media(self, item: Item, setting: Setting) -> list[Segment]:
        """Lay out one image, sound or video."""
        if item.kind == "image":
            return [self._image(item, setting)]
        tracks = [self._sound(item)] if item.kind == "audio" else self._video(item, setting)
        return interleave(tracks, stamp=lambda time: self.encode(self.config.stamps.text(time)))

    def _image(self, item: Item, setting: Setting) -> Segment:
        """Make the segment of an image."""
        rule, native = _present(self.rules.image, item), self.media[item.media].image
        assert native is not None
        size = picture_size(native, multiple=rule.multiple, pixels=setting.image_pixels)
        return Segment(kind="image", source=item.media, units=(image_unit(native, size, rule),))

    def _video(self, item: Item, setting: Setting) -> list[Track]:
        """Make the tracks of a video: its frame groups, and its sound if it has one that is to be heard."""
        rule, clip = _present(self.rules.video, item), self._clip(item)
        if clip.video is None:
            raise MediaError(item.media, "no video stream")
        size = picture_size(clip.video.display, multiple=rule.multiple, pixels=setting.frame_pixels)
        groups = frame_groups(clip, size, rule, rate=setting.rate)
        picture = Track(
            kind="video",
            source=item.media,
            stream=clip.video.stream,
            units=groups,
            stamped=bool(self.config.stamps.pattern),
        )
        heard = item.media in self.sounds and (clip.audio is not None or self.config.missing_sound == "refuse")
        sound = [self._sound(item)] if heard else []
        return [picture, *sound] if setting.sound else [picture]

    def _sound(self, item: Item) -> Track:
        """Make the track of a file's sound."""
        _present(self.rules.audio, item)
        audio = self._clip(item).audio
        if audio is None:
            raise MediaError(item.media, "no audio stream")
        return Track(kind="audio", source=item.media, stream=audio.stream, units=self.sounds[item.media])

    def _clip(self, item: Item) -> ClipIndex:
        clip = self.media[item.media].clip
        assert clip is not None, f"{item.kind} '{item.media}' was not indexed"
        return clip


def _present(rule: R | None, item: Item) -> R:
    """Return the rule of an item's encoder, or refuse the item."""
    if rule is None:
        raise MediaError(item.media, f"is of kind {item.kind}, for which the model has no encoder; add one")
    return rule


def _words(ids: Iterable[int], trained: bool = False) -> Segment:
    return Segment(kind="text", ids=tuple(ids), loss=trained)
