"""Measure what each rank of a training run really does, step by step, for experiments that check it.

Counted where it happens, not read off the plan: packets that went through the decoder, units that went into an
encoder's forward, bytes that the exchange of media rows brought from other ranks, memory while the step ran.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from mmcp.parallel.collectives import Recorder, record
from mmcp.sharding.ranges import as_ranges
from mmcp.training.metrics import memory_mb
from mmcp.training.step import StepRunner
from mmcp.training.train import LoadedStep

SAMPLE_S = 0.5  # seconds between two looks at the memory


class PeakMemory:
    """Largest PSS of this process and its workers together, in MiB, sampled by a thread every SAMPLE_S seconds.

    Use it as a context manager. A peak shorter than the samples' distance may be missed.
    """

    def __init__(self) -> None:
        self._peak = 0.0
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)

    def __enter__(self) -> "PeakMemory":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def take(self) -> float:
        """Return the peak since the last call, this moment included."""
        self._sample()
        with self._lock:
            peak, self._peak = self._peak, 0.0
        return peak

    def _watch(self) -> None:
        while not self._end.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        pss = memory_mb()["pss"]
        with self._lock:
            self._peak = max(self._peak, pss)


@contextmanager
def watch(runner: StepRunner, *, folder: Path) -> Iterator["Watch"]:
    """Watch a run; with `partial(watch, folder=...)` what `train` takes as `watch`."""
    with PeakMemory() as memory, record(runner.mesh.world) as recorder:
        watching = Watch(runner, folder, memory, recorder)
        encoders = dict.fromkeys(runner.model.encoders.values())
        hooks = [encoder.register_forward_pre_hook(watching.count_units) for encoder in encoders]
        yield watching
        for hook in hooks:
            hook.remove()


class Watch:
    """Writes one line per step of this rank to `folder/watch_RANK.jsonl`.

    Fields: step, loss, tokens; seconds {stage: s}; frames_decoded; units_encoded; rows_routed (encoder rows that came
    from other ranks); pss_mb (see PeakMemory). Of the step's first row: num_units {kind: number}; units {kind: ranges},
    those that this rank decoded, numbered within their kind; frames, the first and last that its video units show.
    """

    def __init__(self, runner: StepRunner, folder: Path, memory: PeakMemory, recorder: Recorder):
        self.runner, self.memory, self.recorder = runner, memory, recorder
        self.units_encoded = 0
        self.file = folder / f"watch_{runner.mesh.rank}.jsonl"

    def __call__(self, metrics: dict[str, Any], loaded: LoadedStep) -> None:
        """Write the line of a step that has just been done."""
        row, decoded = loaded.work.plan.rows[0], loaded.work.arrays.get(0, {})
        kinds = np.array([row.unit_segment(unit).kind for unit in range(len(row.units))])
        of_kind = {kind: np.flatnonzero(kinds == kind) for kind in sorted(set(kinds.tolist()))}
        here = {kind: np.flatnonzero(np.isin(units, list(decoded))) for kind, units in of_kind.items()}
        shown = [frame for unit in decoded if kinds[unit] == "video" for frame in row.units[unit].items]
        routed = self.recorder.total(name="route media", phase="forward").bytes
        weight = self.runner.model.embedding.weight
        line = {
            "step": loaded.step,
            "loss": metrics["loss"],
            "tokens": metrics["tokens"],
            "seconds": metrics["seconds_by_rank"][self.runner.mesh.rank],
            "frames_decoded": loaded.frames_decoded,
            "units_encoded": self.units_encoded,
            "rows_routed": routed // (weight.shape[1] * weight.element_size()),
            "pss_mb": self.memory.take(),
            "num_units": {kind: len(units) for kind, units in of_kind.items()},
            "units": {kind: as_ranges(numbers) for kind, numbers in here.items()},
            "frames": [min(shown), max(shown)] if shown else [],
        }
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
        self.units_encoded = 0
        self.recorder.traffic.clear()

    def count_units(self, encoder: object, inputs: tuple) -> None:
        """Count the units of an encoder call; a forward pre-hook."""
        self.units_encoded += len(inputs[0])


def read_watch(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Return the lines that a rank wrote, one per step."""
    lines = (folder / f"watch_{rank}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]
