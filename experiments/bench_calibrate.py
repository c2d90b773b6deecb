"""What does one rank of this machine do in a second? The `rates` that plans are priced with, measured on rank 0.

Run:     mmcp bench calibrate [base=experiments/configs/demo.yaml] [video=FILE] [--json]      (idle machine, seconds)
Smoke:   mmcp bench calibrate tokens=64 seconds=4 repeats=1
Expect:  within a factor of two of what `metrics.jsonl` of a run says in `flops_per_second` and `seconds.decode`.
Result:  printed as settings `rates.*`. Put them into a run's config: they are saved with it and hold when it resumes.

Computing is a step of the config's own model over text. Decoding is the library's own, of a clip written for it or of
`video`: the last frame of a group of pictures alone, then all of the group, then the first frame of several groups.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from pydantic import PositiveInt
from rich.table import Table

from data_pipelines.container import ClipIndex
from data_pipelines.decode import decode_frames, decode_image
from data_pipelines.demux import read_index
from data_pipelines.media import as_media_file
from data_pipelines.sound import decode_audio
from experiments.base import RunConfig
from experiments.long_clip import LongClip, write_clip
from experiments.runtime import run_runner
from experiments.train_video_lm import with_ranks
from mmcp.config import as_values, config, load
from mmcp.config.load import build
from mmcp.config.source import Source
from mmcp.parallel.launch import launch
from mmcp.parallel.mesh import build_mesh, device_type_for, process_group
from mmcp.report.outcome import Outcome
from mmcp.sequence import Segment, TokenSequence
from mmcp.sharding.cost import Rates, row_costs
from mmcp.training.run_folder import write_json
from mmcp.training.step import StageClock, StepWork

PHOTO = (1080, 1440)
MEGAPIXEL = 1_000_000


@config
class CalibrateConfig:
    """What is measured."""

    base: str = str(Path(__file__).parent / "configs" / "demo.yaml")
    """Config of the run that the rates are for."""
    folder: str = "runs/calibrate"
    """Where the clip and what was measured are written."""
    video: str = ""
    """A file with picture and sound like those to train on; empty: a clip written for it."""
    seconds: PositiveInt = 60
    """Length of that clip."""
    tokens: PositiveInt = 2048
    """Tokens of the row that is computed."""
    repeats: PositiveInt = 3
    """Times that everything is done; the quickest counts."""


def run(overrides: Sequence[str] = ()) -> Outcome:
    """Measure the rates of one rank of this machine."""
    settings = build(CalibrateConfig, Source(), overrides)
    run_settings = with_ranks(load(RunConfig, settings.base, ()), 1)
    folder = Path(settings.folder)
    folder.mkdir(parents=True, exist_ok=True)
    launch(measure_step, 1, settings, run_settings, folder)
    flops = int((folder / "flops_per_second").read_text())
    rates = Rates(flops_per_second=flops, decoders=run_settings.data.workers, **decode_rates(settings, folder))
    record = as_values(rates)
    write_json(folder / "rates.json", record)
    table = Table("setting", "measured", "default")
    for name, value in record.items():
        table.add_row(f"rates.{name}", str(value), str(getattr(run_settings.rates, name)))
    return Outcome(record=record, tables=[table, " ".join(f"rates.{name}={value}" for name, value in record.items())])


def measure_step(settings: CalibrateConfig, run_settings: RunConfig, folder: Path) -> None:
    """Time forward and backward of one row of text on this rank, and write the floating-point operations a second."""
    with process_group(device_type_for(run_settings.parameter_dtype)) as device:
        mesh = build_mesh(run_settings.mesh, device=device)
        vocabulary = run_settings.tokenizer.build().vocab_size
        runner, planner = run_runner(run_settings, mesh, vocabulary=vocabulary), run_settings.planner(vocabulary)
        row = TokenSequence((Segment(kind="text", ids=(1,) * settings.tokens, loss=True),))
        work = StepWork(planner.step([row]), {0: {}})
        seconds = quickest(lambda: runner.backward(work, StageClock(device)), settings.repeats + 1)
        flops = row_costs(row, planner.costs).total_flops * planner.costs.passes
        (folder / "flops_per_second").write_text(str(round(flops / seconds)))


def decode_rates(settings: CalibrateConfig, folder: Path) -> dict[str, int]:
    """Time decoding of a clip and of a photo: the settings of Rates in nanoseconds."""
    file = Path(settings.video) if settings.video else folder / f"clip_{settings.seconds}s.mp4"
    if not file.exists():
        write_clip(LongClip(seconds=settings.seconds), file)
    index = read_index(as_media_file(file), need=("video", "audio"))
    video = picture_rates(file, index, settings.repeats)
    return video | {
        "image_ns_per_megapixel": photo_ns(
            folder / "photo.jpg", settings.repeats, convert=video["convert_ns_per_megapixel"]
        ),
        "packet_ns": packet_ns(file, index, settings.repeats),
    }


def picture_rates(file: Path, index: ClipIndex, repeats: int) -> dict[str, int]:
    """Nanoseconds a megapixel of decoding and of conversion, and nanoseconds of a seek."""
    assert index.video is not None
    starts = np.unique(index.video.starts(np.arange(index.video.num_frames)))
    group = int(starts[1]) if len(starts) > 1 else index.video.num_frames
    size = tuple(side // 2 for side in index.video.display)
    megapixels = index.video.display[0] * index.video.display[1] / MEGAPIXEL

    def seconds(frames: Sequence[int]) -> float:
        return quickest(lambda: decode_frames(str(file), index, frames, size), repeats)

    first, last, whole = seconds([0]), seconds([group - 1]), seconds(range(group))
    decode = max(0.0, (last - first) / max(1, group - 1))
    convert = max(0.0, (whole - last) / max(1, group - 1))
    apart = starts[:: max(1, len(starts) // 16)][:16].tolist()
    seek = max(0.0, (seconds(apart) - first) / max(1, len(apart) - 1) - decode - convert)
    return {
        "decode_ns_per_megapixel": round(1e9 * decode / megapixels),
        "convert_ns_per_megapixel": round(1e9 * convert / megapixels),
        "seek_ns": round(1e9 * seek),
    }


def packet_ns(file: Path, index: ClipIndex, repeats: int) -> int:
    """Nanoseconds of one packet of sound."""
    assert index.audio is not None
    begin, end = index.audio_samples
    seconds = quickest(lambda: decode_audio(str(file), index, begin, end), repeats)
    return round(1e9 * seconds / len(index.audio.pts))


def photo_ns(file: Path, repeats: int, *, convert: int) -> int:
    """Nanoseconds a megapixel of decompressing a JPEG, those of making it the encoder's input taken off."""
    noise = np.random.default_rng(0).integers(0, 256, (PHOTO[0] // 8, PHOTO[1] // 8, 3), dtype=np.uint8)
    Image.fromarray(noise).resize(PHOTO[::-1]).save(file)
    seconds = quickest(lambda: decode_image(str(file), (PHOTO[0] // 2, PHOTO[1] // 2)), repeats)
    return max(1, round(1e9 * seconds * MEGAPIXEL / (PHOTO[0] * PHOTO[1])) - convert)


def quickest(job: Callable[[], object], repeats: int) -> float:
    """Seconds of the quickest of several calls."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
