"""What does a training step cost here, and in the other systems of the field, on the same weights, tokens and labels?

Run:     mmcp bench peers tokens=16384 rounds=5 peers=FOLDER [dtype=bfloat16] [only='[ds-alst-lean]'] [--json]
Smoke:   mmcp bench peers tokens=512 rounds=1 warmup=0 steps=1 edges=false only='[]' peers=FOLDER
Expect:  the same loss and gradient everywhere; at 16,384 tokens at most 0.96 of the fastest peer's time and 0.75 of the
         leanest one's memory.
Result:  experiments/LOG.md, entry "peers".

FOLDER holds the drivers of the peers and their `setup.sh` (or name it by the environment variable MMCP_PEERS). Each
driver is run in turn, A B C .. A B C .., two ranks of one thread, so that what else the machine does hits all alike.
The reference, transformers on one process, runs once: its gradient is what the others are compared with.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt
from rich.table import Table

import mmcp
from experiments.step_floor import Ceilings, StepShape, floor_seconds
from mmcp.config import config
from mmcp.config.load import build
from mmcp.config.source import Source
from mmcp.report.outcome import Outcome

REPOSITORY = Path(mmcp.__file__).parents[1]
OURS, OURS_UNDER_TRAINER, REFERENCE = "mmcp", "mmcp-trainer", "reference"
DRIVERS = {
    REFERENCE: "peer_reference.py",
    "ds-alst-plain": "peer_deepspeed.py",
    "ds-alst-fused-loss": "peer_deepspeed.py --tiled-loss 8 --tiled-impl fused",
    "ds-alst-tiled-all": "peer_deepspeed.py --tiled-loss 8 --tiled-impl seq --tiled-mlp",
    "ds-alst-lean": "peer_deepspeed.py --tiled-loss 1 --tiled-impl vp --tiled-mlp",
    "ds-alst-zero3": "peer_deepspeed.py --engine --zero-stage 3",
    "yunchang-ulysses": "peer_yunchang.py",
    "yunchang-ring": "peer_yunchang.py --mode usp-ring",
    "torch-cp-ring": "peer_torch_cp.py",
    "trainer-sp-zero3": "peer_accelerate.py --mode sp --zero-stage 3",
    "trainer-cp-fsdp2": "peer_accelerate.py --mode cp",
    "veomni-ulysses": "peer_veomni.py",
    OURS: "-m experiments.peer_step",
    OURS_UNDER_TRAINER: "-m experiments.hf_peer_step",
}
PEERS = tuple(name for name in DRIVERS if name not in (OURS, OURS_UNDER_TRAINER, REFERENCE))
EDGES = {
    "1 key-value head": "--kv-heads 1",
    "7 heads": "--hidden 252 --heads 7 --kv-heads 7",
    "6 heads over 3": "--hidden 252 --heads 6 --kv-heads 3",
    "1,025 tokens": "--seq 1025",
    "no label": "--labels none",
    "labels on one rank": "--labels tail",
}
"""Cases on which some peer stops or differs, as options of a driver."""
LIMITS = {"float32": 1e-4, "bfloat16": 3e-2}
"""Largest relative L2 error of the gradient that counts as equal to the reference's."""


@config
class PeersBench:
    """What is measured."""

    peers: str = os.environ.get("MMCP_PEERS", "")
    """Folder of the peers' drivers."""
    tokens: PositiveInt = 4096
    """Of the row."""
    rounds: PositiveInt = 5
    """Alternations; medians are over all of their steps."""
    steps: PositiveInt = 1
    """Timed steps of each run."""
    warmup: NonNegativeInt = 1
    """Steps of each run before those."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    only: tuple[Annotated[str, Field(pattern="|".join(PEERS))], ...] = PEERS
    """Peers that take part."""
    edges: bool = True
    """Also run the cases on which peers stop."""


def run(overrides: Sequence[str] = ()) -> Outcome:
    """Measure ours beside the peers. Raises ValueError when their folder or what it needs is not there."""
    settings = build(PeersBench, Source(), overrides)
    drivers = Drivers(settings)
    drivers.check()
    lines: dict[str, list[dict[str, Any]]] = {}
    ceilings = Ceilings()
    for number in range(settings.rounds):
        if number < 3:
            ceilings.add(drivers.ceilings())
        for name in (*([] if number else [REFERENCE]), *settings.only, OURS):
            lines.setdefault(name, []).append(drivers.step(name, is_first=not number))
            print(f"round {number + 1} of {settings.rounds}: {name} {_told(lines[name][-1])}", file=sys.stderr)
    element_size = {"float32": 4, "bfloat16": 2}[settings.dtype]
    floor = floor_seconds(StepShape(tokens=settings.tokens), ceilings, element_size)
    rows = summary(lines, floor)
    edges = [edge(drivers, name, words) for name, words in EDGES.items()] if settings.edges else []
    limit = LIMITS[settings.dtype]
    is_ok = rows[-1]["gradient_error"] is not None and rows[-1]["gradient_error"] < limit
    record = {
        "tokens": settings.tokens,
        "dtype": settings.dtype,
        "rounds": settings.rounds,
        "floor_s": round(floor, 3),
        "rates_gflops": ceilings.best,
        "rows": rows,
        "edges": edges,
        "traffic": lines[OURS][-1].get("traffic", []),
    }
    return Outcome(
        record=record,
        tables=[_step_table(record), *([_edge_table(edges)] if edges else [])],
        is_ok=is_ok and all(found["ok"] for found in edges),
    )


class Drivers:
    """Runs drivers as programs of their own and reads the JSON line that each of them prints."""

    def __init__(self, settings: PeersBench):
        self.settings = settings
        self.folder = Path(settings.peers)
        self.state = Path(os.environ.get("PEERS_STATE", Path(os.environ.get("TMPDIR", "/var/tmp"), "mmcp-peers")))
        self.site = Path(os.environ.get("PEERS_SITE", self.state / "site"))

    def check(self) -> None:
        """Raise ValueError, with the remedy, when the drivers or the peers' packages are missing."""
        if not self.settings.peers or not (self.folder / "common.py").is_file():
            raise ValueError(
                f"peers='{self.settings.peers}' does not hold the peers' drivers (common.py is not there); "
                "give peers=FOLDER or set MMCP_PEERS"
            )
        if self.settings.only and not self.site.is_dir():
            raise ValueError(
                f"the peers are not installed in {self.site}; run setup.sh of {self.folder} with PEERS_PYTHON="
                f"{sys.executable}, or measure without them: only='[]'"
            )

    def step(self, name: str, *, is_first: bool = False, extra: str = "") -> dict[str, Any]:
        """Run one driver; its JSON line, or {"error": what it said last}."""
        settings = self.settings
        seq = [] if "--seq" in extra else ["--seq", str(settings.tokens)]
        words = [*DRIVERS[name].split(), *seq, "--dtype", {"float32": "fp32", "bfloat16": "bf16"}[settings.dtype]]
        words += ["--steps", str(settings.steps), "--warmup", str(settings.warmup), "--tag", name, *extra.split()]
        if name == REFERENCE:
            return self._run([*words, "--threads", "2", *(["--save-ref"] if is_first else [])], threads=2)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        return self._run([*launcher, *words, "--threads", "1"], threads=1)

    def ceilings(self) -> list[dict[str, Any]]:
        """Measure products and attention on both cores at once, one thread each."""
        settings = self.settings
        words = f"ceil_local.py --threads 1 --seq {settings.tokens} --reps 1 --head-dims 64 --dtypes".split()
        words.append({"float32": "fp32", "bfloat16": "bf16"}[settings.dtype])
        both = [self._start(words, threads=1) for _ in range(2)]
        return [line for process in both for line in json_lines(process.communicate()[0])]

    def _run(self, words: list[str], *, threads: int) -> dict[str, Any]:
        process = self._start(words, threads=threads)
        out, said = process.communicate()
        lines = list(json_lines(out))
        if process.returncode or not lines:
            return {"error": reason(said)}
        return {key: value for line in lines for key, value in line.items()}

    def _start(self, words: list[str], *, threads: int) -> "subprocess.Popen[str]":
        for folder in ("results/ref", "ckpt"):
            (self.state / folder).mkdir(parents=True, exist_ok=True)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (self.folder, self.site, REPOSITORY))),
            "PEERS_STATE": str(self.state),
            "VEOMNI_SRC": str(self.site),
            "OMP_NUM_THREADS": str(threads),
            "DS_ACCELERATOR": "cpu",
            "DS_BUILD_OPS": "0",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [sys.executable, *words]
        return subprocess.Popen(
            command, cwd=self.folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )


def json_lines(text: str) -> Iterable[dict[str, Any]]:
    """Read the lines of a driver's output that are JSON objects."""
    # the trainers among the drivers also print dictionaries of Python
    return (json.loads(line) for line in text.splitlines() if line.startswith('{"'))


def reason(said: str) -> str:
    """Pick the line that tells why a driver stopped: torchrun's own report comes after it."""
    told = said.strip().splitlines() or ["no message"]
    errors = [line for line in told if re.search(r"\w*(Error|Exception)\b.*: ", line) and "ChildFailed" not in line]
    return (errors or told)[-1].strip()[:200]


def summary(lines: dict[str, list[dict[str, Any]]], floor: float) -> list[dict[str, Any]]:
    """Put medians side by side, ours last: seconds a step, megabytes of the fullest rank, distance to the others.

    lines: per driver, one JSON line of each round
    """
    rows = [row_of(name, found) for name, found in lines.items()]
    others = [row for row in rows if row["name"] in PEERS and row["seconds"] is not None]
    for row in rows:
        if row["seconds"] is None:
            continue
        row["to_floor"] = round(row["seconds"] / floor, 3)
        if others:
            row["ratio_to_fastest_peer"] = round(row["seconds"] / min(other["seconds"] for other in others), 3)
            row["growth_to_leanest_peer"] = round(row["growth_mb"] / min(other["growth_mb"] for other in others), 3)
    return rows


def row_of(name: str, found: list[dict[str, Any]]) -> dict[str, Any]:
    """Sum up the lines of one driver: medians, and the last run's loss and distance from the reference."""
    done = [line for line in found if "error" not in line]
    if not done:
        return {"name": name, "seconds": None, "gradient_error": None, "error": found[-1]["error"]}
    last = done[-1]
    return {
        "name": name,
        "seconds": round(median(second for line in done for second in line["steps"]), 3),
        "runs": [line["step_s_median"] for line in done],
        "growth_mb": median(max(line["rss_grow_mb"]) for line in done),
        "loss": last["loss"],
        "gradient_norm": last["grad_norm"],
        "gradient_error": last.get("grad_rel_err"),
    }


def edge(drivers: Drivers, name: str, words: str) -> dict[str, Any]:
    """Run one case on which peers stop, and compare with transformers on one process; without a label with zero."""
    words = words if "--seq" in words else f"{words} --seq 1024"
    reference = drivers.step(REFERENCE, is_first=True, extra=words)
    ours = drivers.step(OURS, extra=words)
    if "error" in ours:
        return {"case": name, "ok": False, "error": ours["error"]}
    has_labels = math.isfinite(reference.get("loss", math.nan)) and "--labels none" not in words
    error = ours.get("grad_rel_err") if has_labels else ours["grad_norm"] + abs(ours["loss"])
    is_ok = error is not None and error < LIMITS[drivers.settings.dtype]
    return {"case": name, "ok": is_ok, "loss": ours["loss"], "gradient_error": error}


def _told(line: dict[str, Any]) -> str:
    return line["error"] if "error" in line else f"{line['step_s_median']} s, {max(line['rss_grow_mb'])} MB"


def _step_table(record: dict[str, Any]) -> Table:
    table = Table(title=f"one step of {record['tokens']:,} tokens in {record['dtype']}, floor {record['floor_s']} s")
    keys = ("seconds", "ratio_to_fastest_peer", "to_floor", "growth_mb", "growth_to_leanest_peer")
    for heading in (
        "",
        "s",
        "of the fastest peer",
        "of the floor",
        "MB grown",
        "of the leanest peer",
        "gradient error",
    ):
        table.add_column(heading)
    for row in record["rows"]:
        if row["seconds"] is None:
            table.add_row(row["name"], "stopped", "", "", "", "", row["error"][:40])
            continue
        table.add_row(row["name"], *(str(row.get(key, "")) for key in keys), str(row["gradient_error"]))
    moved = sum(entry["bytes"] for entry in record["traffic"])
    count = sum(entry["collectives"] for entry in record["traffic"])
    table.caption = f"{OURS}: {count} collectives bring {moved / 1e6:.1f} MB to a rank, FSDP2's apart"
    return table


def _edge_table(edges: list[dict[str, Any]]) -> Table:
    table = Table(title="where peers stop or differ")
    for heading in ("case", "equal", "loss", "gradient error"):
        table.add_column(heading)
    for found in edges:
        told = found.get("error", str(found.get("gradient_error")))
        table.add_row(found["case"], "yes" if found["ok"] else "NO", str(found.get("loss", "")), told)
    return table
