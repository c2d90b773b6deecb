"""Is every GPU path right, and how fast is it? Each against the CPU's slow reference in float64, then timed.

Run:     python -m experiments.check_gpu [--json]       (one GPU, under six minutes, most of it compiling kernels)
Expect:  errors near the rounding of the type: below 3e-2 in bfloat16, below 1e-2 in float32, whose GPU products may be
         of TF32 precision. What cannot run is told as skipped, with the reason; where nothing could run, or something
         is wrong, the exit code is 1.
Result:  experiments/LOG.md, entry "GPU", from a machine that has one.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.table import Table
from torch import Tensor

from experiments.in_parts import InParts
from mmcp.attention import GatedDeltaConfig, KernelisedConfig, LinearConfig, SoftmaxConfig
from mmcp.attention.base import HeadShare, RowInfo, split_heads
from mmcp.attention.gpu import uses_flash_attn
from mmcp.attention.pairs import Pairs
from mmcp.masks import Mask
from mmcp.parallel.collectives import all_reduce
from mmcp.parallel.launch import launch
from mmcp.parallel.mesh import Mesh, MeshConfig, build_mesh, process_group
from mmcp.parallel.modes import MODES
from mmcp.parallel.ulysses import Ulysses
from mmcp.report.outcome import Outcome
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import split

BOUNDS = {torch.bfloat16: 3e-2, torch.float32: 1e-2}
HEADS, KV_HEADS, HEAD_DIM = 8, 2, 64
ROW = np.array([0, 300, 301, 512])
PACKED = Mask(ROW, np.zeros((0, 2), dtype=np.int64))
UNITS = Mask(ROW, np.array([[0, 40], [100, 180], [301, 330], [400, 512]]))
TIMED_TOKENS, REPEATS = 16384, 5
NCCL_MODES = ("ulysses", "ring", "allgather")


@dataclass(frozen=True)
class Path:
    """One way through the code that needs a GPU."""

    name: str
    package: str
    """What must be installed, by the name it is imported by; empty: torch alone."""
    variant: Any
    mask: Mask
    dtype: torch.dtype
    parts: int = 1
    """Key parts whose answers are merged, as a ring does: 1 is the whole row at once."""


PATHS = (
    Path("flash-attn, packed documents", "flash_attn", SoftmaxConfig(), PACKED, torch.bfloat16),
    Path("flash-attn, window", "flash_attn", SoftmaxConfig(window=100), PACKED, torch.bfloat16),
    Path("FlexAttention, packed documents", "", SoftmaxConfig(), PACKED, torch.float32),
    Path("FlexAttention, prefix and units", "", SoftmaxConfig(), UNITS, torch.bfloat16),
    Path("FlexAttention, window and sink", "", SoftmaxConfig(window=50, sink=4), UNITS, torch.bfloat16),
    Path("flash-attn, parts", "flash_attn", SoftmaxConfig(), PACKED, torch.bfloat16, 3),
    Path("flash-attn, parts under prefix and units", "flash_attn", SoftmaxConfig(), UNITS, torch.bfloat16, 3),
    Path("flash-attn, parts, window", "flash_attn", SoftmaxConfig(window=50), PACKED, torch.bfloat16, 3),
    Path("FlexAttention, parts", "", SoftmaxConfig(), UNITS, torch.float32, 3),
    Path("FlexAttention, parts, window and sink", "", SoftmaxConfig(window=50, sink=4), UNITS, torch.float32, 3),
    Path("fla, gated delta rule", "fla", GatedDeltaConfig(), PACKED, torch.bfloat16),
    Path("fla, gated delta rule", "fla", GatedDeltaConfig(), PACKED, torch.float32),
    Path("fla, fixed decay", "fla", LinearConfig(), PACKED, torch.bfloat16),
    Path("fla, kernelised", "fla", KernelisedConfig(), PACKED, torch.float32),
    Path("chunks of our own, gated delta rule", "", GatedDeltaConfig(), PACKED, torch.float64),
)


def run() -> Outcome:
    """Check every path that can run here; a success only when one could and none is wrong."""
    rows = [check_path(path) for path in PATHS] + [check_nccl(mode) for mode in NCCL_MODES]
    ran = [row for row in rows if "skipped" not in row]
    return Outcome(record=rows, tables=[_table(rows)], is_ok=bool(ran) and all(row["ok"] for row in ran))


def check_path(path: Path) -> dict[str, Any]:
    """Compare one path with the reference and time it; a failure is told, so that the others still run."""
    said = {"path": path.name, "dtype": str(path.dtype).removeprefix("torch.")}
    reason = why_not(path)
    if reason:
        return said | {"skipped": reason}
    device = torch.device("cuda")
    try:
        error = largest_error(path.variant, path.mask, path.dtype, device, parts=path.parts)
        milliseconds = timed(path.variant, path.dtype, device, parts=path.parts)
    except Exception as failure:
        return said | {"ok": False, "error": None, "failed": f"{type(failure).__name__}: {failure}".splitlines()[0]}
    bound = BOUNDS.get(path.dtype, 1e-10)
    return said | {"ok": error < bound, "error": error, "bound": bound, "milliseconds": milliseconds}


def why_not(path: Path) -> str:
    """Say why a path cannot run here; empty when it can."""
    if not torch.cuda.is_available():
        return "no CUDA device"
    if path.package and find_spec(path.package) is None:
        return f"{path.package} is not installed"
    takes_flash = isinstance(path.variant, SoftmaxConfig) and uses_flash_attn(
        path.mask.with_window(path.variant.window, path.variant.sink), path.dtype, HEAD_DIM
    )
    if path.package == "" and path.parts == 1 and takes_flash:
        return "flash-attn takes this mask"
    return ""


def largest_error(variant: Any, mask: Mask, dtype: torch.dtype, device: torch.device, *, parts: int = 1) -> float:
    """Return the largest error, output and gradients: |a - b| / max(|b|, 1e-3 |all gradients|), L2 norms."""
    (heads,) = split_heads(HEADS, KV_HEADS, 1)
    torch.manual_seed(0)
    core = variant.build(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM).to(dtype)
    inputs = drawn(core, mask.num_tokens, dtype)
    weight = torch.randn(mask.num_tokens, HEADS, core.out_dim)
    exact = {name: x.detach().double().requires_grad_() for name, x in inputs.items()}
    expected = core.double().reference(exact, mask, heads)
    wanted = torch.autograd.grad((expected * weight.double()).sum(), list(exact.values()))
    leaves = {name: x.detach().to(device).requires_grad_() for name, x in inputs.items()}
    out = attend(core.to(device, dtype), leaves, row_of(mask), heads, parts)
    grads = torch.autograd.grad((out * weight.to(out)).sum(), list(leaves.values()))
    scale = 1e-3 * float(torch.stack([grad.norm() for grad in wanted]).norm())
    errors = [_error(out, expected, 0.0)] + [_error(*pair, scale) for pair in zip(grads, wanted, strict=True)]
    return max(errors)


def timed(
    variant: Any, dtype: torch.dtype, device: torch.device, *, tokens: int = TIMED_TOKENS, parts: int = 1
) -> float:
    """Return the milliseconds of one layer, forward and backward, on one causal document; the best of several."""
    (heads,) = split_heads(HEADS, KV_HEADS, 1)
    core = variant.build(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM).to(device, dtype)
    inputs = {name: x.detach().to(device).requires_grad_() for name, x in drawn(core, tokens, dtype).items()}
    info, best = row_of(Mask.causal([tokens])), float("inf")
    for _ in range(REPEATS):
        _wait(device)
        start = time.perf_counter()
        attend(core, inputs, info, heads, parts).sum().backward()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 1e3 * best


def attend(core: Any, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare, parts: int) -> Tensor:
    """Attend to the row at once, or to parts of its keys whose answers are merged."""
    if parts == 1:
        return core(inputs, info, heads)
    row = Pairs.whole(core.visible(info.mask))
    hops = info.once(attend, lambda: tuple(Pairs(row.mask, row.queries, keys) for keys in split(row.keys, parts)))
    return InParts.apply(inputs["q"], inputs["k"], inputs["v"], core, heads, hops)


def drawn(core: Any, tokens: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Draw what the core takes: one [tokens, heads, dim] per tensor."""
    count = {"query": HEADS, "kv": KV_HEADS}
    return {t.name: torch.randn(tokens, count[t.heads], t.dim).to(dtype) for t in core.tensors}


def row_of(mask: Mask, mesh: Mesh | None = None) -> RowInfo:
    """Describe a row on one rank, or in equal parts on those of a mesh."""
    ring, ulysses, rank = (mesh.ring.size, mesh.ulysses.size, mesh.cp.index) if mesh else (1, 1, 0)
    none: tuple[Any, ...] = ((),) * (ring * ulysses)
    tokens = tuple(split(((0, mask.num_tokens),), ring * ulysses))
    return RowInfo(mask, ShardPlan("even", ring, ulysses, tokens, none, none, none, none, (), ()), rank)


def check_nccl(mode: str) -> dict[str, Any]:
    """Run a mode over all GPUs of this machine; Ulysses on a single one is an exchange with itself."""
    gpus = min(torch.cuda.device_count(), HEADS)
    said = {"path": f"NCCL, {mode} on {gpus} GPUs", "dtype": "float32"}
    if not torch.cuda.is_available() or not dist.is_nccl_available():
        return said | {"skipped": "no CUDA device" if not torch.cuda.is_available() else "torch is built without NCCL"}
    if gpus == 1 and mode != "ulysses":
        return said | {"skipped": "one GPU is no ring"}
    try:
        error = launch(rank_error, gpus, mode, "cuda")
    except Exception as failure:
        return said | {"ok": False, "error": None, "failed": str(failure).splitlines()[0]}
    return said | {"ok": error < BOUNDS[torch.float32], "error": error, "bound": BOUNDS[torch.float32]}


def rank_error(mode: str, device_type: str) -> float:
    """Compare a mode on all ranks with the reference, output and gradients; every rank calls it."""
    with process_group(device_type) as device:
        ranks = dist.get_world_size()
        axes = {"ulysses": ranks} if MODES[mode].is_flat else {"ring": ranks}
        mesh = build_mesh(MeshConfig(**axes), device=device)
        sent = torch.arange(4.0, device=device).repeat(ranks)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent)
        assert torch.equal(received.view(ranks, 4), sent.view(ranks, 4)), "an all-to-all of equal parts brings them"
        torch.manual_seed(0)
        core = SoftmaxConfig().build(heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM)
        inputs = {name: x.requires_grad_() for name, x in drawn(core, PACKED.num_tokens, torch.float32).items()}
        expected = core.reference(inputs, PACKED, split_heads(HEADS, KV_HEADS, 1)[0])
        wanted = torch.autograd.grad(expected.square().sum(), list(inputs.values()))
        info = row_of(PACKED, mesh)
        mine = torch.from_numpy(info.plan.positions(mesh.cp.index))
        layer = Ulysses(core, mesh, num_heads=HEADS, num_kv_heads=KV_HEADS, mode=mode)
        leaves = {name: x.detach()[mine].to(device).requires_grad_() for name, x in inputs.items()}
        out = layer(leaves, info)
        grads = torch.autograd.grad(out.square().sum(), list(leaves.values()))
        errors = [_error(got, want[mine], 0.0) for got, want in zip((out, *grads), (expected, *wanted), strict=True)]
        error = torch.tensor(max(errors), device=device)
        return float(all_reduce(error, "max", group=mesh.cp, name="error"))


def _error(got: Tensor, want: Tensor, scale: float) -> float:
    difference = float((got.detach().cpu().double() - want.detach()).norm())
    return difference / max(float(want.detach().norm()), scale, 1e-300)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _table(rows: Sequence[dict[str, Any]]) -> Table:
    table = Table(title=f"GPU paths against the reference; time of one layer at {TIMED_TOKENS:,} tokens")
    for heading in ("path", "type", "error", "limit", "ms", "verdict"):
        table.add_column(heading)
    for row in rows:
        numbers = [
            _text(row.get(name), style) for name, style in (("error", ".1e"), ("bound", ".0e"), ("milliseconds", ".2f"))
        ]
        verdict = (
            f"skipped: {row['skipped']}"
            if "skipped" in row
            else row.get("failed") or ("right" if row["ok"] else "WRONG")
        )
        table.add_row(row["path"], row["dtype"], *numbers, verdict)
    return table


def _text(value: float | None, style: str) -> str:
    return "" if value is None else format(value, style)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, print, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")
    options = parser.parse_args(arguments)
    outcome = run()
    outcome.show(as_json=options.json)
    return 0 if outcome.is_ok else 1


if __name__ == "__main__":
    sys.exit(main())
