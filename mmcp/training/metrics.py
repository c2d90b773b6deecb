"""One line of strict JSON per step, and the same numbers as TensorBoard events."""

import json
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from torch.utils.tensorboard import SummaryWriter

FIELDS = (
    "step", "loss", "label_tokens", "tokens", "tokens_per_second", "flops_per_second", "lr", "grad_norm", "seconds",
    "seconds_by_rank", "predicted", "predicted_by_rank", "ratio", "ratio_by_rank", "imbalance", "rss_mb",
    "plan_digest", "held_out_loss",
)  # fmt: skip


class MetricsWriter:
    """Writes `metrics.jsonl` and TensorBoard events of one run; for rank 0, as a context manager.

    resume_step: the first step that will be written again; lines from it on, and a line cut short by a kill, go
    """

    def __init__(self, folder: Path, *, resume_step: int = 0):
        self._path = folder / "metrics.jsonl"
        kept = [line for line in read_metrics(folder) if line["step"] < resume_step]
        self._path.write_text("".join(_as_line(line) for line in kept), encoding="utf-8")
        self._file = self._path.open("a", encoding="utf-8")
        self._events = SummaryWriter(str(folder / "tensorboard"), purge_step=resume_step)

    def __enter__(self) -> "MetricsWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._events.close()

    def write(self, metrics: dict[str, Any]) -> None:
        """Add the line of one step; it is in the file when this returns.

        metrics: JSON values, `step` among them. A number that is not finite is written as null, and its name is added
        to the line's `not_finite`.
        Raises ValueError for a field that is not in FIELDS, on which readers rely.
        """
        unknown = metrics.keys() - set(FIELDS)
        if unknown or "step" not in metrics:
            raise ValueError(f"metrics need `step` and know {', '.join(FIELDS)}; got {', '.join(sorted(metrics))}")
        line, bad = _finite(metrics)
        self._file.write(_as_line({**line, "not_finite": bad} if bad else line))
        self._file.flush()
        for name, number in _scalars(line):
            self._events.add_scalar(name, number, metrics["step"])


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of `metrics.jsonl`; none when there is no file; a last line cut short is left out."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines[:-1]]


def rss_mb() -> float:
    """Return the resident memory of this process and all that it started, in MiB; shared pages count in each."""
    process = psutil.Process()
    total = 0
    for member in [process, *process.children(recursive=True)]:
        with suppress(psutil.Error):  # it has ended, or belongs to another user
            total += member.memory_info().rss
    return total / 2**20


def memory_mb() -> dict[str, float]:
    """Return the memory of this process and all that it started, in MiB: `rss`, and `pss`, which counts shared pages
    once (Linux; elsewhere it equals `rss`)."""
    rss = pss = 0
    process = psutil.Process()
    for member in [process, *process.children(recursive=True)]:
        try:
            memory = member.memory_full_info()
        except psutil.Error:  # it has ended, or belongs to another user
            continue
        rss += memory.rss
        pss += getattr(memory, "pss", memory.rss)
    return {"rss": rss / 2**20, "pss": pss / 2**20}


def _as_line(metrics: dict[str, Any]) -> str:
    return json.dumps(metrics, allow_nan=False) + "\n"


def _finite(value: Any, name: str = "") -> tuple[Any, list[str]]:
    """Replace what JSON cannot say by None; return the names of what was replaced."""
    if isinstance(value, float) and not math.isfinite(value):
        return None, [name]
    if isinstance(value, dict):
        parts = {key: _finite(part, f"{name}.{key}" if name else key) for key, part in value.items()}
        return {key: part for key, (part, _) in parts.items()}, [bad for _, some in parts.values() for bad in some]
    if isinstance(value, list | tuple):
        items = [_finite(part, f"{name}.{i}") for i, part in enumerate(value)]
        return [part for part, _ in items], [bad for _, some in items for bad in some]
    return value, []


def _scalars(metrics: dict[str, Any], above: str = "") -> list[tuple[str, float]]:
    """Return the numbers of a line by name, those of sections as `seconds/decode`; lists are left to the JSON."""
    found: list[tuple[str, float]] = []
    for name, value in metrics.items():
        if isinstance(value, dict):
            found += _scalars(value, f"{above}{name}/")
        elif isinstance(value, int | float) and name != "step":
            found.append((above + name, value))
    return found
