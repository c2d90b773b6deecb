"""What `mmcp plan` is asked about, as a job: a model of any origin, a clip or a number of tokens, devices."""

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from math import prod
from pathlib import Path

import torch

from encoders import AudioWindows, Encoder
from experiments.base import ModelConfig, RunConfig, cost_model
from experiments.inspect_source import find_row
from mmcp.masks import Mask
from mmcp.planning.architecture import Architecture, find_architecture
from mmcp.planning.choose import Job, with_mode
from mmcp.planning.devices import find_device
from mmcp.planning.share import RowLoad, UnitBytes, load_of
from mmcp.sequence import SAMPLE_RATE, Segment, TokenSequence, Unit
from mmcp.sharding.cost import CostModel, row_costs

HYPOTHETICAL = re.compile(r"(?P<number>\d+(\.\d+)?)(?P<unit>s|min|m|h)@(?P<rate>\d+(\.\d+)?)fps")
SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600}
SIDE, NATIVE, NATIVE_RATE, KEY_SECONDS = 224, (720, 1280), 25, 10
STAMP_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 8, 60, 120


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A job, and what was laid out for it."""

    job: Job
    sequence: TokenSequence | None
    """The row, where a clip was named."""
    costs: CostModel
    unit_bytes: UnitBytes
    facts: dict[str, str]


def find_job(
    settings: RunConfig,
    *,
    model: str | None,
    clip: str | None,
    tokens: int | None,
    labels: int | None,
    rows: int,
    gpus: int,
    gpu: str,
) -> Asked:
    """Turn what was asked on the command line into a job.

    Raises ValueError for what is unknown, missing or contradicts itself.
    """
    for name, number in (("--gpus", gpus), ("--rows", rows), ("--tokens", tokens or 1)):
        if number < 1:
            raise ValueError(f"{name} {number}: use at least 1")
    if (clip is None) == (tokens is None):
        raise ValueError("name what a row holds: either --clip 1h@1fps (or a file) or --tokens N")
    architecture = without_modes(find_architecture(model) if model else own_architecture(settings))
    encoders = replace(settings.model, backbone=architecture.backbone)
    dtype = torch.float64 if settings.dtype == "float64" else getattr(torch, settings.dtype)
    costs = cost_model(
        encoders,
        vocabulary=architecture.vocabulary,
        dtype=dtype,
        call_tokens=settings.sharding.call_tokens,
        rates=settings.rates,
    )
    sequence = None if clip is None else find_clip(clip, settings, encoders)
    load, mask = _row(sequence, costs, tokens, labels, sizes := unit_sizes(encoders))
    has_media = load.media_rows > 0
    counts = [_parameters(encoder, architecture.backbone.width) for encoder in encoders.encoders.values()]
    job = Job(
        architecture=architecture,
        load=load,
        mask=mask,
        rows=rows,
        device=find_device(gpu),
        devices=gpus,
        dtype=dtype,
        encoder_parameters=sum(counts) if has_media else 0,
        largest_encoder=max(counts) if has_media else 0,
        decoders=settings.rates.decoders,
    )
    facts = {
        "model": f"{architecture.name}, {architecture.parameters / 1e9:.2f}B parameters",
        "row": f"{load.tokens:,} tokens, {load.media_rows:,} of them from encoders, {load.labels:,} trained",
        "devices": f"{gpus} x {job.device.name}, {rows} rows a step",
    }
    return Asked(job=job, sequence=sequence, costs=costs, unit_bytes=sizes, facts=facts)


def without_modes(architecture: Architecture) -> Architecture:
    """Put every layer in one mode: modes are what is chosen."""
    pattern = tuple(with_mode(variant, "ulysses") for variant in architecture.backbone.pattern)
    return replace(architecture, backbone=replace(architecture.backbone, pattern=pattern))


def own_architecture(settings: RunConfig) -> Architecture:
    """Return the model of a run's config."""
    vocabulary = settings.tokenizer.build().vocab_size
    return Architecture(name=Path(settings.folder).name, backbone=settings.model.backbone, vocabulary=vocabulary)


def unit_sizes(model: ModelConfig) -> UnitBytes:
    """Bytes of a decoded unit of each kind: pixels as bytes, log-mel in float32."""
    bins = model.audio.bins
    return {"image": lambda s: 3 * prod(s), "video": lambda s: 3 * prod(s), "audio": lambda s: 4 * bins * prod(s)}


def find_clip(clip: str, settings: RunConfig, model: ModelConfig) -> TokenSequence:
    """Lay out a clip: `1h@1fps` or a file. Raises ValueError for what is neither."""
    asked = HYPOTHETICAL.fullmatch(clip)
    if asked:
        seconds = Fraction(asked["number"]) * SECONDS[asked["unit"]]
        return hypothetical_clip(seconds, Fraction(asked["rate"]), model)
    if not Path(clip).exists():
        raise ValueError(f"--clip {clip}: neither a file nor a length such as 1h@1fps, 90s@2fps or 10min@0.5fps")
    sequence = find_row(clip, settings).sequence
    assert sequence is not None, "a row that was laid out has a sequence"
    return sequence


def hypothetical_clip(seconds: Fraction, rate: Fraction, model: ModelConfig) -> TokenSequence:
    """Lay out a clip of frames of SIDE pixels with their times, sound throughout, a question and an answer."""
    video, audio = model.video, model.audio
    side = max(1, SIDE // video.multiple) * video.multiple
    size = (video.frames, side, side)
    segments: list[tuple[Fraction, int, Segment]] = []
    for number in range(max(1, int(seconds * rate) // video.frames)):
        start = Fraction(number * video.frames) / rate
        end = start + Fraction(video.frames) / rate
        first, last = (int(time * NATIVE_RATE) for time in (start, end - 1 / rate))
        unit = Unit(
            num_tokens=video.num_tokens(size),
            start=start,
            end=end,
            grid=video.grid(size),
            size=size,
            items=(first, last),
            decode=(first - first % (KEY_SECONDS * NATIVE_RATE), last + 1),
            native=NATIVE,
        )
        segments.append((start, 0, Segment(kind="text", ids=(1,) * STAMP_TOKENS)))
        segments.append((start, 1, Segment(kind="video", source="clip", units=(unit,), start=start, end=end)))
    segments += [
        (unit.start, 2, Segment(kind="audio", source="clip", stream=1, units=(unit,)))
        for unit in _windows(seconds, audio)
    ]
    timed = [segment for _, _, segment in sorted(segments, key=lambda entry: entry[:2])]
    question, answer = ((1,) * count for count in (QUESTION_TOKENS, ANSWER_TOKENS))
    return TokenSequence((*timed, Segment(kind="text", ids=question), Segment(kind="text", ids=answer, loss=True)))


def _windows(seconds: Fraction, audio: AudioWindows) -> list[Unit]:
    """Cut sound into windows of the encoder's length; 100 mel frames a second, 46.875 packets a second."""
    windows = []
    for frame in range(0, int(seconds * 100) - audio.window + 1, audio.window):
        start, end = Fraction(frame, 100), Fraction(frame + audio.window, 100)
        size = (audio.window,)
        windows.append(
            Unit(
                num_tokens=audio.num_tokens(size),
                start=start,
                end=end,
                grid=audio.grid(size),
                size=size,
                items=(int(start * SAMPLE_RATE), int(end * SAMPLE_RATE)),
                decode=(int(start * 48000 / 1024), int(end * 48000 / 1024) + 1),
            )
        )
    return windows


def _row(
    sequence: TokenSequence | None, costs: CostModel, tokens: int | None, labels: int | None, sizes: UnitBytes
) -> tuple[RowLoad, Mask]:
    if sequence is not None:
        load = load_of(sequence, row_costs(sequence, costs), unit_bytes=sizes)
        return load if labels is None else replace(load, labels=labels), Mask.of(sequence)
    assert tokens is not None, "one of clip and tokens is given"
    return RowLoad(tokens=tokens, labels=tokens if labels is None else labels), Mask.causal([tokens])


def _parameters(encoder: Encoder, width: int) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in encoder.build(width).parameters())
