"""Synthetic clips with questions whose answers are known, for the demo and the tests.

Every clip is an mp4 file (H.264 picture, AAC sound) of one fixed length with three events in it:

    flash   the whole picture takes one of six saturated colours
    tone    one of six pitches sounds over soft noise
    shape   a light or dark square or disc stands in the picture; nothing is asked about it, it is there so that
            "something changed" is not what tells a flash

and questions of five kinds: `color`, `tone`, `order` (flash or tone first), `when` (the second at which the flash
began), and `text`, a control that needs no media. Colours, pitches, orders and times are dealt so that every answer is
equally frequent and none tells anything of another, but that order and times describe the same events.

Everything is a function of (seed, split, clip index), so clips may be written from several processes.
"""

import fractions
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import av
import numpy as np
from av.video.reformatter import VideoReformatter

Split = Literal["train", "heldout"]

MEDIA_TASKS = ("color", "tone", "order", "when")

# Six corners of the RGB cube; their names start with different letters.
COLORS: dict[str, tuple[int, int, int]] = {
    "red": (230, 20, 20),
    "green": (20, 200, 20),
    "blue": (20, 20, 230),
    "yellow": (230, 220, 20),
    "magenta": (220, 20, 220),
    "cyan": (20, 220, 220),
}
# Octaves, in Hz; their names start with different letters too.
TONES: dict[str, float] = {
    "deep": 200.0,
    "low": 400.0,
    "middle": 800.0,
    "high": 1600.0,
    "sharp": 3200.0,
    "whistle": 6400.0,
}

QUESTIONS: dict[str, str] = {
    "color": "Which color flashed?",
    "tone": "Which tone sounded?",
    "order": "Was flash or tone first?",
    "when": "When was the flash?",
    "when_tone": "When was the tone?",
}

_DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
_SPLIT_KEYS: dict[str, int] = {"train": 0, "heldout": 1}
_AAC_FRAME_SAMPLES = 1024
_DEAL_STREAM, _CLIP_STREAM, _TEXT_STREAM = 0, 1, 2


@dataclass(frozen=True, kw_only=True)
class SyntheticConfig:
    """What is written, and how much of it."""

    seed: int = 0
    """The key of everything drawn."""
    train_clips: int = 576
    """Clips in the training split. A multiple of 72 deals every combination of colour, pitch and order equally
    often; a multiple of 6, every single answer."""
    heldout_clips: int = 144
    """Clips in the held-out split, each asked every media question once; likewise."""
    train_text_documents: int = 96
    """Text-only training conversations, of `questions_per_text_document`."""
    questions_per_text_document: int = 5
    """Questions in each of them."""
    heldout_text_questions: int = 114
    """Text-only held-out rows, of one question each."""
    duration_s: int = 6
    """Length of every clip's picture, in seconds; the sound ends up to 64 ms earlier."""
    frame_rate: int = 8
    """Frames per second of the file."""
    picture_size: int = 64
    """Height and width of the picture, in pixels (even)."""
    sample_rate: int = 16000
    """Sound samples per second (mono)."""
    event_s: float = 1.5
    """How long each event lasts, in seconds."""
    first_start_s: float = 0.5
    """Earliest start of an event, in seconds."""
    time_step_s: float = 0.5
    """Starts are multiples of this many seconds."""
    minimum_gap_s: float = 1.5
    """Least distance between the starts of flash and tone, in seconds."""
    keyframe_interval: int = 16
    """Frames between key frames."""
    crf: int = 23
    """Constant rate factor of libx264 (higher is smaller and coarser)."""
    audio_bit_rate: int = 48000
    """Bits per second of the AAC stream."""

    def __post_init__(self) -> None:
        if self.picture_size % 2:
            raise ValueError(f"picture_size must be even for yuv420p, got {self.picture_size}")
        starts = self.start_times_s()
        if len(starts) < 2 or starts[-1] - starts[0] < self.minimum_gap_s:
            raise ValueError(f"duration_s={self.duration_s} leaves no two starts {self.minimum_gap_s} s apart")

    def start_times_s(self) -> tuple[float, ...]:
        """Every start an event may have, in seconds: it ends at least one step before the clip."""
        last = self.duration_s - self.event_s - self.time_step_s
        count = int(np.floor((last - self.first_start_s) / self.time_step_s + 1e-6)) + 1
        return tuple(self.first_start_s + self.time_step_s * i for i in range(count))


@dataclass(frozen=True, kw_only=True)
class ClipPlan:
    """What happens in one clip."""

    split: Split
    """The split it belongs to."""
    index: int
    """Its index in that split."""
    color: str
    """A key of `COLORS`."""
    tone: str
    """A key of `TONES`."""
    flash_start_s: float
    """Start of the flash, in seconds from the start of the clip."""
    tone_start_s: float
    """Start of the tone, in seconds."""
    shape_start_s: float
    """Start of the shape, in seconds."""

    @property
    def name(self) -> str:
        """File name without its ending."""
        return f"{self.split}_{self.index:05d}"

    def answer(self, question: str) -> str:
        """The answer to a key of `QUESTIONS`."""
        if question == "color":
            return self.color
        if question == "tone":
            return self.tone
        if question == "order":
            return "flash" if self.flash_start_s < self.tone_start_s else "tone"
        if question == "when":
            return f"{self.flash_start_s:.1f}"
        if question == "when_tone":
            return f"{self.tone_start_s:.1f}"
        raise KeyError(question)


def _deal(rng: np.random.Generator, values: int, count: int) -> np.ndarray:
    """`count` indices below `values`, each equally often (to within one), in random order."""
    return rng.permutation(np.arange(count) % values)


def plan_clips(config: SyntheticConfig, split: Split) -> list[ClipPlan]:
    """Deal colours, pitches, orders and times to every clip of a split."""
    count = config.train_clips if split == "train" else config.heldout_clips
    rng = np.random.default_rng([config.seed, _SPLIT_KEYS[split], _DEAL_STREAM])
    starts = config.start_times_s()
    pairs = [(a, b) for a in starts for b in starts if b - a >= config.minimum_gap_s - 1e-6]
    # Every run of 6 has each colour and each pitch once, every 36 each pair of them, every 72 each
    # pair in both orders.
    deal = rng.permutation(count)
    color = deal % len(COLORS)
    tone = (deal + deal // len(COLORS)) % len(TONES)
    flash_first = (deal + deal // (len(COLORS) * len(TONES))) % 2
    pair = np.empty(count, dtype=np.int64)
    for order in (0, 1):
        chosen = np.flatnonzero(flash_first == order)
        pair[chosen] = _deal(rng, len(pairs), len(chosen))
    shape = rng.integers(len(starts), size=count)
    names, pitches = list(COLORS), list(TONES)
    plans = []
    for i in range(count):
        early, late = pairs[pair[i]]
        plans.append(
            ClipPlan(
                split=split,
                index=i,
                color=names[color[i]],
                tone=pitches[tone[i]],
                flash_start_s=early if flash_first[i] else late,
                tone_start_s=late if flash_first[i] else early,
                shape_start_s=starts[shape[i]],
            )
        )
    return plans


def _clip_rng(config: SyntheticConfig, plan: ClipPlan, part: int) -> np.random.Generator:
    return np.random.default_rng([config.seed, _SPLIT_KEYS[plan.split], _CLIP_STREAM, plan.index, part])


def render_frames(config: SyntheticConfig, plan: ClipPlan) -> np.ndarray:
    """The pictures of a clip: uint8 RGB of shape (frames, height, width, 3)."""
    rng = _clip_rng(config, plan, 0)
    size, frames = config.picture_size, config.duration_s * config.frame_rate
    time = np.arange(frames, dtype=np.float32) / config.frame_rate
    axis = np.arange(size, dtype=np.float32) / size
    rows, cols = axis[:, None], axis[None, :]
    # A drifting wave of low saturation, whose tint, direction and speed differ from clip to clip.
    cycles = rng.uniform(-1.5, 1.5, size=2)
    speed, phase = rng.uniform(0.1, 0.5) * rng.choice([-1, 1]), rng.uniform()
    angle = (cycles[0] * rows + cycles[1] * cols)[None] + (speed * time + phase)[:, None, None]
    wave = np.sin(2 * np.pi * angle, dtype=np.float32)
    level, depth = rng.uniform(90, 150), rng.uniform(20, 50)
    tint = rng.uniform(-25, 25, size=3).astype(np.float32)
    picture = (level + depth * wave)[..., None] + tint
    # The shape: lighter or darker than any background.
    extent, light = rng.uniform(0.14, 0.22), rng.uniform() < 0.5
    center = rng.uniform(0.25, 0.75, size=2)
    away = np.abs(rows - center[0]), np.abs(cols - center[1])
    if rng.uniform() < 0.5:
        inside = np.maximum(*np.broadcast_arrays(*away)) < extent
    else:
        inside = away[0] ** 2 + away[1] ** 2 < extent**2
    shown = _active(time, plan.shape_start_s, config.event_s)
    picture[shown[:, None, None] & inside[None]] = 245.0 if light else 15.0
    # The flash covers everything but a trace of what is behind it.
    flashed = _active(time, plan.flash_start_s, config.event_s)
    strength = rng.uniform(0.8, 0.95)
    color = np.asarray(COLORS[plan.color], dtype=np.float32)
    picture[flashed] += strength * (color - picture[flashed])
    pixels: np.ndarray = np.clip(picture, 0, 255).astype(np.uint8)
    return pixels


def render_sound(config: SyntheticConfig, plan: ClipPlan) -> np.ndarray:
    """The sound of a clip: float32 mono of shape (samples,), within -1 and 1."""
    rng = _clip_rng(config, plan, 1)
    samples = config.duration_s * config.sample_rate
    sound = rng.uniform(0.001, 0.004) * rng.standard_normal(samples, dtype=np.float32)
    time = np.arange(samples, dtype=np.float64) / config.sample_rate
    local = time - plan.tone_start_s
    ramp_s = 0.02  # fades in and out, so that the edges do not click at every pitch
    envelope = np.clip(np.minimum(local, config.event_s - local) / ramp_s, 0.0, 1.0)
    phase = rng.uniform(0, 2 * np.pi)
    sound += rng.uniform(0.2, 0.5) * envelope * np.sin(2 * np.pi * TONES[plan.tone] * time + phase)
    clipped: np.ndarray = np.clip(sound, -1.0, 1.0).astype(np.float32)
    return clipped


def _active(time: np.ndarray, start_s: float, length_s: float) -> np.ndarray:
    return (time >= start_s - 1e-6) & (time < start_s + length_s - 1e-6)


def write_clip(config: SyntheticConfig, plan: ClipPlan, path: Path) -> None:
    """Write one clip as an mp4 file: H.264 (yuv420p) picture and mono AAC sound."""
    frames, sound = render_frames(config, plan), render_sound(config, plan)
    with av.open(str(path), "w", format="mp4") as container:
        video = container.add_stream("libx264", rate=config.frame_rate)
        video.width = video.height = config.picture_size
        video.pix_fmt = "yuv420p"
        video.gop_size = config.keyframe_interval
        video.codec_context.thread_count = 1
        # No B-frames: each frame decodes from earlier ones only.
        video.options = {"preset": "ultrafast", "crf": str(config.crf), "bf": "0"}
        audio = container.add_stream("aac", rate=config.sample_rate, layout="mono")
        audio.bit_rate = config.audio_bit_rate
        reformatter = VideoReformatter()  # one for all frames: its tables are dear
        for index, pixels in enumerate(frames):
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame = reformatter.reformat(frame, format="yuv420p")
            frame.pts = index
            frame.time_base = fractions.Fraction(1, config.frame_rate)
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        # Whole AAC frames only: a padded last one would decode to more than `duration_s`.
        step = _AAC_FRAME_SAMPLES
        for start in range(0, len(sound) - step + 1, step):
            block = av.AudioFrame.from_ndarray(sound[None, start : start + step], format="fltp", layout="mono")
            block.sample_rate = config.sample_rate
            block.pts = start
            block.time_base = fractions.Fraction(1, config.sample_rate)
            container.mux(audio.encode(block))
        container.mux(audio.encode(None))


def text_questions() -> list[tuple[str, str]]:
    """Every text-only question with its answer."""
    pairs = []
    for noun, names in (("day", _DAYS), ("month", _MONTHS)):
        for i, name in enumerate(names):
            pairs.append((f"What {noun} comes after {name}?", names[(i + 1) % len(names)]))
            pairs.append((f"What {noun} comes before {name}?", names[i - 1]))
    return pairs


def _turn(role: str, content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"role": role, "content": content}


def _messages(turns: Sequence[tuple[str, str]], media: dict[str, Any] | None) -> list[dict[str, Any]]:
    messages = []
    for position, (question, answer) in enumerate(turns):
        content: list[dict[str, Any]] = [{"type": "text", "text": question}]
        if position == 0 and media is not None:
            content.insert(0, media)
        messages.append(_turn("user", content))
        messages.append(_turn("assistant", [{"type": "text", "text": answer}]))
    return messages


def _media_item(plan: ClipPlan) -> dict[str, Any]:
    return {"type": "video", "video": f"media/{plan.name}.mp4", "audio": True}


def train_rows(config: SyntheticConfig, plans: Sequence[ClipPlan]) -> list[dict[str, Any]]:
    """One conversation per clip, every question in random order; then the text-only ones."""
    rows = []
    for plan in plans:
        rng = _clip_rng(config, plan, 2)
        questions = list(QUESTIONS)
        shuffled = [questions[i] for i in rng.permutation(len(questions))]
        turns = [(QUESTIONS[question], plan.answer(question)) for question in shuffled]
        rows.append({"id": plan.name, "messages": _messages(turns, _media_item(plan))})
    rng = np.random.default_rng([config.seed, _SPLIT_KEYS["train"], _TEXT_STREAM])
    known = text_questions()
    per_row = config.questions_per_text_document
    picks = _deal(rng, len(known), config.train_text_documents * per_row).reshape(-1, per_row)
    for index, chosen in enumerate(picks):
        turns = [known[i] for i in chosen]
        rows.append({"id": f"train_text_{index:05d}", "messages": _messages(turns, None)})
    return rows


def heldout_rows(config: SyntheticConfig, plans: Sequence[ClipPlan]) -> list[dict[str, Any]]:
    """Held-out conversations of one question each, with the task they belong to."""
    rows = []
    for task in MEDIA_TASKS:
        for plan in plans:
            turns = [(QUESTIONS[task], plan.answer(task))]
            rows.append(
                {
                    "id": f"{plan.name}_{task}",
                    "task": task,
                    "messages": _messages(turns, _media_item(plan)),
                }
            )
    rng = np.random.default_rng([config.seed, _SPLIT_KEYS["heldout"], _TEXT_STREAM])
    known = text_questions()
    for index, pick in enumerate(_deal(rng, len(known), config.heldout_text_questions)):
        rows.append(
            {
                "id": f"heldout_text_{index:05d}",
                "task": "text",
                "messages": _messages([known[pick]], None),
            }
        )
    return rows


def write_manifests(folder: Path, config: SyntheticConfig) -> list[ClipPlan]:
    """Write `train.jsonl` and `heldout.jsonl`; return the clips they name, not yet written."""
    (folder / "media").mkdir(parents=True, exist_ok=True)
    train, heldout = plan_clips(config, "train"), plan_clips(config, "heldout")
    for name, rows in (
        ("train", train_rows(config, train)),
        ("heldout", heldout_rows(config, heldout)),
    ):
        lines = [json.dumps(row) + "\n" for row in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
    return train + heldout
