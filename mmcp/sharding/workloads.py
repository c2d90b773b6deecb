"""Families of rows to plan for, drawn by seed: what recordings, archives and chats look like to a sharder.

Each family returns a row of about the length its name says; `length` scales it, so that tests can draw short ones.
"""

import math
from collections.abc import Iterable
from fractions import Fraction

import numpy as np

from mmcp.registry import Registry
from mmcp.sequence import Segment, TokenSequence, Unit, pack
from mmcp.sharding.cost import DEFAULT_RATES, CostModel, LayerCost

WORKLOADS = Registry("workload")

HD, FULL_HD, UHD, SD = (720, 1280), (1080, 1920), (2160, 3840), (360, 640)
PATCH = 28  # pixels along one side of a row of the encoder: 14-pixel patches, merged two by two
GRIDS = {16: (4, 4), 48: (6, 8), 108: (9, 12), 192: (12, 16), 432: (18, 24)}
"""Rows along height and width, by rows per frame pair."""
REFERENCE_KV_HEADS = 8
MEL_PER_SECOND, AUDIO_ROWS_PER_SECOND, SAMPLES_PER_SECOND = 100, 13, 16_000

Draw = np.random.Generator
Timed = tuple[Fraction, int, Segment]


def make_workload(name: str, *, seed: int = 0, length: float = 1.0) -> TokenSequence:
    """Draw one row of a family; the same name, seed and length give the same row in every process."""
    return WORKLOADS[name](np.random.default_rng(seed), length)


def text(count: int, *, loss: bool = False) -> Segment:
    """Make `count` text tokens."""
    return Segment(kind="text", ids=(1,) * count, loss=loss)


def video(
    seconds: int,
    *,
    grids: Iterable[int] = (108,),
    fps: int = 25,
    native: tuple[int, int] = HD,
    keys: np.ndarray | None = None,
    every: int = 1,
    source: str = "clip.mp4",
    start: int = 0,
) -> list[Timed]:
    """Make pairs of frames `every` seconds apart, each after its timestamp in text.

    grids: rows of each pair, repeated; keys: numbers of the key frames, one per 10 seconds where not given
    """
    keys = np.arange(0, seconds * fps, 10 * fps) if keys is None else keys
    choices = list(grids)
    timed = []
    for number, second in enumerate(range(0, seconds, 2 * every)):
        frames = (second * fps, min(second + every, seconds - 1) * fps)
        rows = choices[number % len(choices)]
        height, width = GRIDS[rows]
        at = Fraction(start + second)
        unit = Unit(
            num_tokens=rows,
            start=at,
            end=at + 2 * every,
            grid=(1, height, width),
            size=(2, height * PATCH, width * PATCH),
            items=frames,
            decode=(int(keys[np.searchsorted(keys, frames[0], side="right") - 1]), frames[1] + 1),
            native=native,
        )
        timed.append((at, 0, text(8)))
        timed.append((at, 1, Segment(kind="video", source=source, units=(unit,), start=at, end=unit.end)))
    return timed


def sound(seconds: int, *, source: str = "clip.mp4", start: int = 0, window: int = 2) -> list[Timed]:
    """Make windows of sound; packets of 1,024 samples at 48 kHz."""
    timed = []
    for second in range(0, seconds, window):
        at, span = Fraction(start + second), min(window, seconds - second)
        rows = AUDIO_ROWS_PER_SECOND * span
        unit = Unit(
            num_tokens=rows,
            start=at,
            end=at + span,
            grid=(rows, 1, 1),
            size=(MEL_PER_SECOND * span,),
            items=(second * SAMPLES_PER_SECOND, (second + span) * SAMPLES_PER_SECOND),
            decode=(second * 375 // 8, -(-(second + span) * 375 // 8)),
        )
        timed.append((at, 2, Segment(kind="audio", source=source, stream=1, units=(unit,), start=at, end=unit.end)))
    return timed


def image(height: int, width: int, *, source: str) -> Segment:
    """Make one image; its encoder sees it in rows of PATCH pixels, at least one."""
    grid = (1, max(1, height // PATCH), max(1, width // PATCH))
    unit = Unit(
        num_tokens=grid[1] * grid[2],
        start=Fraction(0),
        end=Fraction(0),
        grid=grid,
        size=(grid[1] * PATCH, grid[2] * PATCH),
        items=(),
        native=(height, width),
    )
    return Segment(kind="image", source=source, units=(unit,))


def in_time(*streams: list[Timed]) -> list[Segment]:
    """Merge timed segments of several streams in time order."""
    return [segment for _, _, segment in sorted((part for stream in streams for part in stream), key=lambda t: t[:2])]


def row(*segments: Segment) -> TokenSequence:
    """Make a row of one document."""
    return TokenSequence(tuple(segments))


def hour(length: float) -> int:
    """Seconds of an hour scaled by `length`, at least 20."""
    return max(20, round(3600 * length))


def scene_grids(draw: Draw, seconds: int) -> list[int]:
    """Draw the rows of each pair of frames of a clip whose resolution follows scenes of about half a minute."""
    grids: list[int] = []
    while len(grids) < seconds:
        grids += [int(draw.choice([16, 48, 108, 192, 432], p=[0.3, 0.25, 0.25, 0.15, 0.05]))] * int(
            draw.integers(4, 30)
        )
    return grids


@WORKLOADS.register("lecture_hour")
def lecture_hour(draw: Draw, length: float) -> TokenSequence:
    """A steady lecture of an hour, one question at the end."""
    return row(*in_time(video(hour(length)), sound(hour(length))), text(60), text(120, loss=True))


@WORKLOADS.register("adaptive_hour")
def adaptive_hour(draw: Draw, length: float) -> TokenSequence:
    """An hour whose resolution follows the scene: dear units and cheap frames do not coincide."""
    seconds = hour(length)
    return row(
        *in_time(video(seconds, grids=scene_grids(draw, seconds)), sound(seconds)), text(60), text(120, loss=True)
    )


@WORKLOADS.register("questions_at_end")
def questions_at_end(draw: Draw, length: float) -> TokenSequence:
    """An hour with all labels in its last one percent."""
    turns = [part for _ in range(max(2, round(40 * length))) for part in (text(20), text(60, loss=True))]
    return row(*in_time(video(hour(length)), sound(hour(length))), *turns)


@WORKLOADS.register("dense_captions")
def dense_captions(draw: Draw, length: float) -> TokenSequence:
    """An hour with a trained caption every ten seconds."""
    captions = [
        (Fraction(second), 3, text(int(draw.integers(20, 80)), loss=True)) for second in range(9, hour(length), 10)
    ]
    return row(*in_time(video(hour(length)), sound(hour(length)), captions))


@WORKLOADS.register("packed_shorts")
def packed_shorts(draw: Draw, length: float) -> TokenSequence:
    """Short clips of log-normal length, each a document of its own."""
    return pack([short_clip(draw, number) for number in range(max(3, round(120 * length)))])


def short_clip(draw: Draw, number: int) -> TokenSequence:
    """Draw one short clip with a question and an answer."""
    seconds, source = int(np.clip(draw.lognormal(3.0, 0.8), 4, 300)), f"short{number}.mp4"
    native = [SD, HD, FULL_HD][int(draw.integers(3))]
    grids = [int(draw.choice([48, 108, 192]))]
    return row(
        *in_time(video(seconds, grids=grids, native=native, source=source), sound(seconds, source=source)),
        text(int(draw.integers(10, 60))),
        text(int(draw.integers(5, 150)), loss=True),
    )


@WORKLOADS.register("long_transcript")
def long_transcript(draw: Draw, length: float) -> TokenSequence:
    """Twenty minutes of video after a transcript as long as its picture."""
    seconds = hour(length / 3)
    return row(text(60 * seconds), *in_time(video(seconds)), text(60), text(400, loss=True))


@WORKLOADS.register("podcast")
def podcast(draw: Draw, length: float) -> TokenSequence:
    """Three hours of sound alone."""
    return row(*in_time(sound(3 * hour(length))), text(60), text(600, loss=True))


@WORKLOADS.register("image_documents")
def image_documents(draw: Draw, length: float) -> TokenSequence:
    """Documents of many images, from a single pixel to a panorama."""
    sizes = [(1, 1), (64, 64), (224, 224), (448, 336), (720, 1280), (1080, 1920), (400, 6000), (2000, 300)]
    documents = []
    for number in range(max(3, round(60 * length))):
        images = [
            part
            for index in range(int(draw.integers(1, 9)))
            for part in (image(*sizes[int(draw.integers(len(sizes)))], source=f"{number}_{index}.jpg"), text(20))
        ]
        documents.append(row(*images, text(30), text(int(draw.integers(10, 200)), loss=True)))
    return pack(documents)


@WORKLOADS.register("mixed_resolutions")
def mixed_resolutions(draw: Draw, length: float) -> TokenSequence:
    """Clips of a few minutes from phone video to 4K, joined in one document."""
    parts: list[Segment] = []
    for number, native in enumerate([SD, UHD, HD, FULL_HD, UHD, SD] * max(1, round(2 * length))):
        grids = [int(draw.choice([48, 108, 192]))]
        clip = video(int(draw.integers(60, 240)), grids=grids, native=native, source=f"{number}.mp4")
        parts += [*in_time(clip), text(20)]
    return row(*parts, text(200, loss=True))


@WORKLOADS.register("text_only")
def text_only(draw: Draw, length: float) -> TokenSequence:
    """Packed documents of text."""
    return pack([row(text(int(draw.integers(50, 4000)), loss=True)) for _ in range(max(4, round(60 * length)))])


@WORKLOADS.register("few_frames")
def few_frames(draw: Draw, length: float) -> TokenSequence:
    """Fewer frames than ranks, and a long answer."""
    return row(*in_time(video(6, grids=[432])), text(40), text(max(100, round(2000 * length)), loss=True))


@WORKLOADS.register("long_group")
def long_group(draw: Draw, length: float) -> TokenSequence:
    """A screen recording with a key frame only every twenty minutes."""
    seconds = hour(length)
    keys = np.arange(0, seconds * 10, 10 * max(10, seconds // 3))
    return row(*in_time(video(seconds, keys=keys, fps=10), sound(seconds)), text(60), text(120, loss=True))


@WORKLOADS.register("late_audio")
def late_audio(draw: Draw, length: float) -> TokenSequence:
    """Sound begins at two thirds of the clip."""
    seconds = hour(length)
    late = sound(seconds // 3, start=seconds - seconds // 3)
    return row(*in_time(video(seconds), late), text(60), text(120, loss=True))


@WORKLOADS.register("silent_hour")
def silent_hour(draw: Draw, length: float) -> TokenSequence:
    """An hour without a sound track."""
    return row(*in_time(video(hour(length))), text(60), text(120, loss=True))


@WORKLOADS.register("hour_with_shorts")
def hour_with_shorts(draw: Draw, length: float) -> TokenSequence:
    """One clip of an hour packed with many short ones."""
    shorts = [short_clip(draw, number) for number in range(max(2, round(60 * length)))]
    return pack([lecture_hour(draw, length), *shorts])


@WORKLOADS.register("sports")
def sports(draw: Draw, length: float) -> TokenSequence:
    """Half an hour at 60 frames a second, a key frame each half second."""
    seconds = hour(length / 2)
    clip = video(seconds, fps=60, native=FULL_HD, keys=np.arange(0, 60 * seconds, 30))
    return row(*in_time(clip, sound(seconds)), text(60), text(120, loss=True))


@WORKLOADS.register("surveillance")
def surveillance(draw: Draw, length: float) -> TokenSequence:
    """Eight hours of 4K, a pair of frames every twenty seconds."""
    clip = video(8 * hour(length), every=10, fps=12, native=UHD, grids=[192])
    return row(*in_time(clip), text(60), text(300, loss=True))


@WORKLOADS.register("four_cameras")
def four_cameras(draw: Draw, length: float) -> TokenSequence:
    """Four cameras in step, with key frames out of step."""
    seconds = hour(length / 4)
    cameras = [
        video(seconds, source=f"camera{number}.mp4", keys=np.unique([0, *range(40 * number, seconds * 25, 250)]))
        for number in range(4)
    ]
    return row(*in_time(*cameras, sound(seconds, source="camera0.mp4")), text(60), text(120, loss=True))


@WORKLOADS.register("slideshow")
def slideshow(draw: Draw, length: float) -> TokenSequence:
    """A talk: slides as images, a minute apart, over its sound."""
    seconds = hour(length)
    slides = [(Fraction(s), 1, image(1080, 1440, source=f"slide{s}.png")) for s in range(0, seconds, 60)]
    return row(*in_time(slides, sound(seconds)), text(60), text(400, loss=True))


@WORKLOADS.register("web_pages")
def web_pages(draw: Draw, length: float) -> TokenSequence:
    """Documents of text and images in turn; all text is trained."""
    pages = []
    for number in range(max(3, round(80 * length))):
        parts: list[Segment] = [text(int(draw.integers(50, 800)), loss=True)]
        for index in range(int(draw.integers(0, 5))):
            side = int(draw.integers(100, 900))
            parts += [image(side, side, source=f"{number}_{index}.jpg"), text(int(draw.integers(20, 500)), loss=True)]
        pages.append(row(*parts))
    return pack(pages)


@WORKLOADS.register("scene_keys")
def scene_keys(draw: Draw, length: float) -> TokenSequence:
    """An hour whose key frames stand at scene cuts, two seconds to a minute apart."""
    seconds = hour(length)
    gaps = draw.integers(50, 1500, size=seconds)
    keys = np.concatenate([[0], np.cumsum(gaps)])
    return row(*in_time(video(seconds, keys=keys), sound(seconds)), text(60), text(120, loss=True))


@WORKLOADS.register("caption_pairs")
def caption_pairs(draw: Draw, length: float) -> TokenSequence:
    """Hundreds of small images, each with a short caption, each a document."""
    return pack(
        [
            row(image(224, 224, source=f"{number}.jpg"), text(int(draw.integers(5, 40)), loss=True))
            for number in range(max(4, round(1500 * length)))
        ]
    )


def reference_model(name: str) -> CostModel:
    """Return the costs of one of two reference models: `softmax`, or `hybrid` with three linear layers in four."""
    if name not in REFERENCE_MODELS:
        raise ValueError(f"unknown reference model '{name}'; choose from {', '.join(REFERENCE_MODELS)}")
    return REFERENCE_MODELS[name]


def reference_mesh(ranks: int) -> tuple[int, int]:
    """Return the mesh (ring, ulysses) of the reference models: Ulysses up to the KV heads, ring beyond.

    2 -> (1, 2)   8 -> (1, 8)   64 -> (8, 8)   12 -> (3, 4)
    Raises ValueError for less than one rank.
    """
    if ranks < 1:
        raise ValueError(f"{ranks} ranks cannot hold a row; use at least 1")
    ulysses = math.gcd(ranks, REFERENCE_KV_HEADS)
    return ranks // ulysses, ulysses


def _vision_flops(size: tuple[int, ...]) -> int:
    """Forward FLOPs of a 32-layer transformer of width 1280 over the 14-pixel patches of a unit."""
    return _transformer_flops(size[-2] * size[-1] // 196, width=1280, layers=32)


def _audio_flops(size: tuple[int, ...]) -> int:
    """Forward FLOPs of the same over mel frames taken two by two."""
    return _transformer_flops(size[0] // 2, width=1280, layers=32)


def _transformer_flops(patches: int, *, width: int, layers: int) -> int:
    return layers * (24 * patches * width * width + 4 * patches * patches * width)


def _reference(linear_layers: int, layers: int = 36) -> CostModel:
    """A backbone of 36 layers of width 4096, 32 query and 8 key-value heads of 128, gated MLP of 12288.

    Softmax layers run in a ring, linear ones pass their state; on a ring of one, both are Ulysses.
    """
    width, heads, kv_width, hidden, head = 4096, 32, 1024, 12288, 128
    softmax = LayerCost(count=layers - linear_layers, heads=heads, pair_flops=4 * head, token_flops=0, mode="ring")
    linear = LayerCost(count=linear_layers, heads=heads, pair_flops=0, token_flops=8 * head * head, mode="state")
    return CostModel(
        encoder_flops={"image": _vision_flops, "video": _vision_flops, "audio": _audio_flops},
        encoder_bytes={
            "image": lambda size: 3 * size[0] * size[1] + 30 * 2560 * (size[0] * size[1] // 196),
            "video": lambda size: 3 * size[0] * size[1] * size[2] + 30 * 2560 * (size[1] * size[2] // 196),
            "audio": lambda size: 512 * size[0] + 30 * 2560 * (size[0] // 2),
        },
        linear_flops=layers * (2 * (2 * width * width + 2 * width * kv_width) + 6 * width * hidden),
        layers=(softmax, linear) if linear_layers else (softmax,),
        label_flops=2 * width * 152_000,
        token_bytes=layers * 2 * width,
        label_bytes=2 * width,
        row_bytes=2 * width,
        call_tokens=16_384,
        rates=DEFAULT_RATES["cuda"],
    )


REFERENCE_MODELS = {"softmax": _reference(0), "hybrid": _reference(27)}
