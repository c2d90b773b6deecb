"""Does our reader read an hour of 1080p in little memory and time, beside the readers others use, and keep up?

Run:     mmcp bench data [--json] [key=value ...]              (an hour; some minutes on two idle cores)
Smoke:   mmcp bench data smoke=true                            (24 seconds of 180p, no requirement checked)
Expect:  frames at one a second take at least 10 times less time and 40 times less memory than at native size in a
         float batch; log-mel in parts is at least 2 times faster than WhisperFeatureExtractor, takes 8 times less
         memory, and is within 1e-6 of it; memory does not follow the length; a step on two ranks over an hour waits
         for data less than 5 percent of its time (experiments/bench_loader.py). Anything else exits with 1.
Result:  experiments/LOG.md, entry "data"

Every reader runs in a process of its own, on one thread. Memory is the highest resident size beyond what the process
held before. Readers that are not installed are listed as such.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import PositiveFloat, PositiveInt
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table

from experiments import bench_loader
from experiments.bench_loader import LoaderBench
from experiments.bench_readers import measured, why_not
from experiments.looped_clip import LoopedClip, looped_clip
from mmcp.config import config
from mmcp.config.load import build
from mmcp.config.source import Source
from mmcp.report.outcome import Outcome
from mmcp.sequence import SAMPLE_RATE

PICTURES = (
    "mmcp",
    "mmcp through decord",
    "PyAV, float batch",
    "decord, float batch",
    "decord, resized",
    "torchcodec, float batch",
)
SOUND = ("mmcp, sound in parts", "PyAV, whole sound")
DIFFERENCE_S = 300  # of sound that is compared; transformers' float64 transform is slow
FEATURES = ("mmcp, log-mel in parts", "transformers, log-mel")


@config
class DataBench:
    """What is measured, and what is required of it."""

    folder: str = "runs/bench_data"
    """Where clips are written."""
    clip: LoopedClip = LoopedClip(sample_rate=0)
    """Whose frames are read."""
    heard: LoopedClip = LoopedClip(height=180, width=320)
    """Whose sound is read."""
    frames: PositiveInt = 300
    """Frames read, one a second."""
    height: PositiveInt = 252
    """Of the frames as the model sees them, in pixels."""
    width: PositiveInt = 448
    mel_seconds: PositiveInt = 3600
    """Length of the sound whose log-mel is computed."""
    readers: tuple[str, ...] = (*PICTURES, *SOUND, *FEATURES)
    """Which are run, by name."""
    min_time_ratio: PositiveFloat = 10.0
    """Time of PyAV's float batch / ours."""
    min_memory_ratio: PositiveFloat = 40.0
    """Memory of it / ours."""
    min_mel_time_ratio: PositiveFloat = 2.0
    min_mel_memory_ratio: PositiveFloat = 8.0
    """Working memory, the result left out."""
    max_mel_difference: PositiveFloat = 1e-6
    """Between parts and transformers' float64 transform of the whole."""
    max_mb: PositiveFloat = 300.0
    """Of our reader, above what it returns."""
    max_mb_per_hour: PositiveFloat = 5.0
    """How much more a clip of twice the length may take."""
    with_loader: bool = True
    """Measure also how fast the loader delivers, and how long training on an hour waits for it."""
    loader: LoaderBench = LoaderBench(folder="runs/bench_data/loader")
    """What of that is measured."""
    smoke: bool = False
    """Take a small clip, and require nothing."""


def run(overrides: Sequence[str] = ()) -> Outcome:
    """Measure with the settings written as key=value."""
    return bench(build(DataBench, Source(), list(overrides)))


def bench(settings: DataBench) -> Outcome:
    """Write the clips, run every reader, and check what was measured."""
    if settings.smoke:
        small = replace(settings.heard, seconds=24)
        settings = replace(settings, clip=small, heard=small, frames=20, height=90, width=160, mel_seconds=20)
    folder = Path(settings.folder)
    clip, heard = (looped_clip(source, folder) for source in (settings.clip, settings.heard))
    waveform = noise(settings.mel_seconds, folder)
    size = (settings.height, settings.width)
    inputs: dict[str, tuple[Path, dict[str, Any]]] = {
        **{name: (clip, {"frames": settings.frames, "size": size}) for name in PICTURES},
        **{name: (heard, {}) for name in SOUND},
        **{name: (waveform, {"seconds": settings.mel_seconds}) for name in FEATURES},
    }
    rows = []
    for name in settings.readers:
        file, options = inputs[name]
        reason = why_not(name)
        rows.append({"reader": name, "error": reason} if reason else measured(name, file, **options))
    found = {row["reader"]: row for row in rows if "error" not in row}
    ratios = {**_picture_ratios(found), **_feature_ratios(found, waveform, settings), **_growth(settings, clip)}
    faults = [] if settings.smoke else list(_faults(settings, ratios))
    record: dict[str, Any] = {
        "clip": settings.clip.name,
        "frames": settings.frames,
        "size": size,
        "readers": rows,
        **ratios,
    }
    tables: list[RenderableType] = [_table(rows), _ratios_table(ratios)]
    if settings.with_loader:
        loader = bench_loader.bench(replace(settings.loader, smoke=settings.smoke or settings.loader.smoke))
        record["loader"], tables = loader.record, [*tables, *loader.tables]
    is_ok = not faults and not (settings.with_loader and record["loader"]["faults"])
    return Outcome(record={**record, "faults": faults}, tables=[*tables, *faults], is_ok=is_ok)


def noise(seconds: int, folder: Path) -> Path:
    """Return a file of float32 samples whose loudness changes from second to second; write it if it is not there."""
    file = folder / f"noise_{seconds}s.f32"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        draw = np.random.default_rng(0)
        loudness = draw.uniform(0.001, 0.3, (seconds, 1)).astype(np.float32)
        (draw.standard_normal((seconds, SAMPLE_RATE), dtype=np.float32) * loudness).tofile(file)
    return file


def _picture_ratios(found: dict[str, Any]) -> dict[str, float]:
    """How much more others take than ours."""
    ours, theirs = found.get("mmcp"), found.get("PyAV, float batch")
    if not (ours and theirs):
        return {}
    return {
        "time_ratio": theirs["seconds"] / ours["seconds"],
        "memory_ratio": theirs["peak_mb"] / ours["peak_mb"],
        "mb": ours["peak_mb"] - ours["result_mb"],
    }


def _feature_ratios(found: dict[str, Any], waveform: Path, settings: DataBench) -> dict[str, float]:
    ours, theirs = (found.get(name) for name in FEATURES)
    if not (ours and theirs):
        return {}
    working = [max(0.1, row["peak_mb"] - row["result_mb"]) for row in (ours, theirs)]
    difference = measured("log-mel difference", waveform, seconds=min(DIFFERENCE_S, settings.mel_seconds))
    return {
        "mel_time_ratio": theirs["seconds"] / ours["seconds"],
        "mel_memory_ratio": working[1] / working[0],
        "mel_difference": difference["value"],
    }


def _growth(settings: DataBench, clip: Path) -> dict[str, float]:
    """How many more MB our reader takes for a clip of twice the length, an hour more or in proportion."""
    twice = looped_clip(replace(settings.clip, seconds=2 * settings.clip.seconds), clip.parent)
    options = {"frames": min(120, settings.frames), "size": (settings.height, settings.width)}
    short, long = (measured("mmcp, spread", file, **options)["peak_mb"] for file in (clip, twice))
    return {"mb_per_hour": (long - short) * 3600 / settings.clip.seconds}


def _faults(settings: DataBench, ratios: dict[str, float]) -> Iterator[str]:
    """Say what does not hold."""
    least = ("time_ratio", "memory_ratio", "mel_time_ratio", "mel_memory_ratio")
    most = ("mel_difference", "mb", "mb_per_hour")
    for name in least:
        if name in ratios and ratios[name] < getattr(settings, f"min_{name}"):
            yield f"{name} is {ratios[name]:.1f}, at least {getattr(settings, f'min_{name}'):g} is required"
    for name in most:
        if name in ratios and ratios[name] > getattr(settings, f"max_{name}"):
            yield f"{name} is {ratios[name]:.3g}, at most {getattr(settings, f'max_{name}'):g} is allowed"


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="readers", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in ("reader", "seconds", "CPU s", "peak MB", "of it the result"):
        table.add_column(heading, justify="left" if heading == "reader" else "right")
    for row in rows:
        figures = (
            [row["error"]]
            if "error" in row
            else [f"{row['seconds']:.2f}", f"{row['cpu_s']:.2f}", f"{row['peak_mb']:.0f}", f"{row['result_mb']:.0f}"]
        )
        table.add_row(row["reader"], *figures)
    return table


def _ratios_table(ratios: dict[str, float]) -> Table:
    table = Table("figure", "value", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name, value in ratios.items():
        table.add_row(name, f"{value:.3g}")
    return table


if __name__ == "__main__":
    outcome = run(sys.argv[1:])
    outcome.show(as_json=False)
    sys.exit(0 if outcome.is_ok else 1)
