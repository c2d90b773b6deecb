"""What does attention cost in each mode: time, bytes, collectives and memory, by variant and length?

Run:     mmcp bench attention [--json] [key=value ...]      (two idle cores, about three minutes)
Smoke:   mmcp bench attention smoke=true
Expect:  recurrent variants take the same time per token at any length (within 15 percent), and pass states of the same
         bytes; memory of one layer grows in proportion to its tokens; sixteen packed documents cost a sixteenth of the
         pairs of one; the gated delta rule in chunks is at least 1.5 times as fast as transformers' torch code.
Result:  experiments/LOG.md, entry "attention modes"; FOLDER/record.json and time.png.
"""

import ctypes
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from pydantic import PositiveInt
from rich.table import Table

from mmcp.attention import GatedDeltaConfig, KernelisedConfig, LinearConfig, SoftmaxConfig
from mmcp.attention.base import RowInfo, split_heads
from mmcp.attention.chunks import Runs, groups_of
from mmcp.attention.delta_chunks import gated_delta
from mmcp.config import config
from mmcp.config.load import build
from mmcp.config.source import Source
from mmcp.masks import Mask
from mmcp.parallel.collectives import Traffic, all_gather_json, all_reduce, record
from mmcp.parallel.launch import launch
from mmcp.parallel.mesh import Mesh, MeshConfig, build_mesh, process_group
from mmcp.parallel.modes import MODES
from mmcp.parallel.ulysses import Ulysses
from mmcp.report.figures import save_lines
from mmcp.report.outcome import Outcome
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import Ranges, split, union
from mmcp.training.run_folder import write_json

RECURRENT: dict[str, Any] = {
    "linear": LinearConfig(),
    "kernelised": KernelisedConfig(),
    "gated_delta": GatedDeltaConfig(),
}
LAYERS = {
    **{f"softmax {mode}": SoftmaxConfig(mode=mode) for mode in ("ulysses", "ring", "allgather")},
    "softmax ulysses in 2 groups": SoftmaxConfig(chunks=2),
    "window ring": SoftmaxConfig(mode="ring", window=1024),
    **{
        f"{name} {mode}": replace(v, mode=mode)
        for name, v in RECURRENT.items()
        for mode in ("ulysses", "state", "scan")
    },
}


@config
class AttentionBench:
    """What is measured."""

    folder: str = "runs/bench_attention"
    """Where the record and the figure are written."""
    ranks: PositiveInt = 2
    heads: PositiveInt = 4
    kv_heads: PositiveInt = 2
    head_dim: PositiveInt = 64
    lengths: tuple[PositiveInt, ...] = (4096, 8192, 16384)
    """Tokens of the row, for every layer."""
    long_lengths: tuple[PositiveInt, ...] = (65536, 262144)
    """Tokens of the row, for recurrent layers that pass their state."""
    rule_tokens: PositiveInt = 16384
    """Tokens at which the delta rule stands beside transformers'."""
    repeats: PositiveInt = 3
    """Runs of each measurement; the median is told."""
    smoke: bool = False
    """Few tokens, one run: shows that it works."""


def run(overrides: Sequence[str] = ()) -> Outcome:
    """Measure, write record and figure."""
    settings = build(AttentionBench, Source(), overrides)
    if settings.smoke:
        settings = replace(
            settings,
            lengths=(64, 128),
            long_lengths=(256,),
            rule_tokens=256,
            repeats=1,
            folder=settings.folder + "_smoke",
        )
    layers = launch(measure, settings.ranks, settings)
    rule, packed = compare_rules(settings), packed_against_one(settings)
    made = {"layers": layers, "memory_fit": memory_fit(layers), "delta_rule": rule, "packed": packed}
    folder = Path(settings.folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "record.json", made)
    save_lines(
        folder / "time.png", series_of(layers), title="attention of one layer, forward and backward",
        x_label="tokens of the row", y_label="microseconds a token",
    )  # fmt: skip
    return Outcome(record=made, tables=[_layer_table(layers), _summary_table(made)])


def measure(settings: AttentionBench) -> list[dict[str, Any]]:
    """Measure every layer at every length on this rank of the mesh."""
    with process_group("cpu") as device:
        meshes = {
            True: build_mesh(MeshConfig(ulysses=settings.ranks), device=device),
            False: build_mesh(MeshConfig(ring=settings.ranks), device=device),
        }
        rows = []
        for name, variant in LAYERS.items():
            lengths = settings.lengths + (settings.long_lengths if variant.mode == "state" else ())
            rows += [measure_layer(name, variant, s, meshes[MODES[variant.mode].is_flat], settings) for s in lengths]
        return rows


def measure_layer(name: str, variant: Any, tokens: int, mesh: Mesh, settings: AttentionBench) -> dict[str, Any]:
    """Run one layer on zigzag tokens; times, bytes and memory are those of the slowest or fullest rank."""
    plan = zigzag(tokens, mesh.ring.size, mesh.ulysses.size)
    heads = {"query": settings.heads, "kv": settings.kv_heads}
    core = variant.build(heads=settings.heads, kv_heads=settings.kv_heads, head_dim=settings.head_dim)
    layer = Ulysses(
        core, mesh, num_heads=settings.heads, num_kv_heads=settings.kv_heads, mode=variant.mode, chunks=variant.chunks
    )
    n = plan.lengths[mesh.cp.index]
    inputs = {t.name: torch.randn(n, heads[t.heads], t.dim).requires_grad_() for t in core.tensors}
    total, seconds, peaks = Traffic(), [], []
    for _ in range(settings.repeats):
        info = RowInfo(Mask.causal([tokens]), plan, mesh.cp.index)
        all_reduce(torch.zeros(()), "sum", group=mesh.cp, name="start together")
        before = reset_peak()
        start = time.perf_counter()
        with record(mesh.cp) as counted:
            torch.autograd.backward(layer(inputs, info).sum())
        seconds.append(time.perf_counter() - start)
        peaks.append(peak() - before)
        total = counted.total()
        for x in inputs.values():
            x.grad = None
    mine = [median(seconds), total.bytes, total.collectives, max(peaks)]
    of_ranks = all_gather_json(mine, group=mesh.cp, name="results")
    slowest, received, collectives, memory = (max(column) for column in zip(*of_ranks, strict=True))
    return {
        "layer": name,
        "mode": variant.mode,
        "tokens": tokens,
        "seconds": slowest,
        "us_per_token": 1e6 * slowest / tokens,
        "bytes": received,
        "collectives": collectives,
        "peak_mib": memory / 2**20,
    }


def zigzag(tokens: int, ring: int, ulysses: int) -> ShardPlan:
    """Plan a row without media: an early and a late part for each ring rank."""
    chunks = split(((0, tokens),), 2 * ring)
    groups = [union([chunks[i], chunks[2 * ring - 1 - i]]) for i in range(ring)]
    held: tuple[Ranges, ...] = tuple(piece for group in groups for piece in split(group, ulysses))
    none: tuple[Any, ...] = ((),) * (ring * ulysses)
    return ShardPlan("zigzag", ring, ulysses, held, none, none, none, none, (), ())


def compare_rules(settings: AttentionBench) -> dict[str, Any]:
    """Time the gated delta rule beside transformers' chunked torch code, in turn, forward and backward."""
    if find_spec("transformers") is None:
        return {"skipped": "transformers is not installed"}
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    n, h, d = settings.rule_tokens, settings.heads, settings.head_dim
    q, k, v = (torch.randn(n, h, d) for _ in range(3))
    decay, strength = -torch.nn.functional.softplus(torch.randn(n, h, 1) - 1), torch.rand(n, h, 1)
    for x in (q, k, v, decay, strength):
        x.requires_grad_()
    runs = Runs(groups_of(Mask.causal([n]), 64, torch.device("cpu"), ((0, n),)), None)

    def ours() -> torch.Tensor:
        return gated_delta(q, k, v, decay, strength, torch.zeros(1, h, d, d), key_of_value=range(h), runs=runs)

    def theirs() -> torch.Tensor:
        tensors = (q[None], k[None], v[None], decay[None, ..., 0], strength[None, ..., 0])
        return torch_chunk_gated_delta_rule(*tensors, use_qk_l2norm_in_kernel=True)[0]

    times = in_turn({"ours": ours, "theirs": theirs}, settings.repeats + 1)
    return {"tokens": n, **times, "ratio": times["theirs"] / times["ours"]}


def packed_against_one(settings: AttentionBench) -> dict[str, Any]:
    """Time softmax attention to sixteen packed documents beside one document of their length, on one rank."""
    n = 16 * (max(settings.lengths) // 16)
    core = SoftmaxConfig().build(heads=settings.heads, kv_heads=settings.kv_heads, head_dim=settings.head_dim)
    (heads,) = split_heads(settings.heads, settings.kv_heads, 1)
    inputs = {
        t.name: torch.randn(n, settings.heads if t.heads == "query" else settings.kv_heads, t.dim).requires_grad_()
        for t in core.tensors
    }

    def attend(lengths: list[int]) -> Callable[[], torch.Tensor]:
        return lambda: core(inputs, RowInfo(Mask.causal(lengths), zigzag(n, 1, 1), 0), heads)

    times = in_turn({"one": attend([n]), "packed": attend([n // 16] * 16)}, settings.repeats)
    pairs = Mask.causal([n]).pairs() / Mask.causal([n // 16] * 16).pairs()
    return {"tokens": n, **times, "ratio": times["one"] / times["packed"], "ratio_of_pairs": pairs}


def in_turn(jobs: dict[str, Callable[[], torch.Tensor]], repeats: int) -> dict[str, float]:
    """Run jobs forward and backward in turn; the median seconds of each."""
    seconds: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(repeats):
        for name, job in jobs.items():
            start = time.perf_counter()
            torch.autograd.backward(job().sum())
            seconds[name].append(time.perf_counter() - start)
    return {name: median(values) for name, values in seconds.items()}


def memory_fit(layers: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fit peak = a + b tokens to each layer by least squares; how much of the variation that explains."""
    fits = []
    for name in dict.fromkeys(row["layer"] for row in layers):
        points = np.array([(row["tokens"], row["peak_mib"]) for row in layers if row["layer"] == name])
        slope, constant = np.polyfit(points[:, 0], points[:, 1], 1)
        left = points[:, 1] - constant - slope * points[:, 0]
        spread = float(np.square(points[:, 1] - points[:, 1].mean()).sum())
        explained = 1 - float(np.square(left).sum()) / spread if spread else 1.0
        fits.append(
            {"layer": name, "kib_per_token": 1024 * float(slope), "mib": float(constant), "r_squared": explained}
        )
    return fits


def series_of(layers: list[dict[str, Any]]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Microseconds a token over tokens, by layer."""
    names = dict.fromkeys(row["layer"] for row in layers)
    points = {name: [(row["tokens"], row["us_per_token"]) for row in layers if row["layer"] == name] for name in names}
    return {name: (np.array(xy)[:, 0], np.array(xy)[:, 1]) for name, xy in points.items()}


def reset_peak() -> int:
    """Give free memory back, forget the highest resident size, and return the present one; bytes."""
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def peak() -> int:
    """Return the highest resident size since `reset_peak`, bytes."""
    return _status("VmHWM")


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field + ":"))


def _layer_table(layers: list[dict[str, Any]]) -> Table:
    table = Table(title="one layer, forward and backward, slowest rank")
    for heading in ("layer", "tokens", "seconds", "us/token", "MiB received", "collectives", "peak MiB"):
        table.add_column(heading, justify="left" if heading == "layer" else "right")
    for row in layers:
        table.add_row(
            row["layer"], f"{row['tokens']:,}", f"{row['seconds']:.3f}", f"{row['us_per_token']:.2f}",
            f"{row['bytes'] / 2**20:.3f}", str(row["collectives"]), f"{row['peak_mib']:.0f}",
        )  # fmt: skip
    return table


def _summary_table(made: dict[str, Any]) -> Table:
    table = Table(title="side by side")
    for heading in ("what", "value"):
        table.add_column(heading)
    rule, packed = made["delta_rule"], made["packed"]
    if "ratio" in rule:
        table.add_row(f"transformers' delta rule / ours, {rule['tokens']:,} tokens", f"{rule['ratio']:.2f}")
    table.add_row(
        f"one document / sixteen, {packed['tokens']:,} tokens",
        f"{packed['ratio']:.1f} (pairs {packed['ratio_of_pairs']:.1f})",
    )
    for fit in made["memory_fit"]:
        text = f"{fit['mib']:.0f} MiB + {fit['kib_per_token']:.2f} KiB a token, R2 {fit['r_squared']:.4f}"
        table.add_row(f"memory of {fit['layer']}", text)
    return table
