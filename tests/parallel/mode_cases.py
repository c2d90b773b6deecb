"""One attention layer on any ranks, mode, mask and ownership, against the same layer's reference on one rank."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmcp.attention.base import Attention, RowInfo, split_heads
from mmcp.masks import Mask
from mmcp.parallel.collectives import Traffic, record
from mmcp.parallel.mesh import MeshConfig, build_mesh
from mmcp.parallel.ulysses import Ulysses
from mmcp.planning.traffic import attention_traffic
from mmcp.sharding.plan import ShardPlan
from tests.attention.rows import relative_error
from tests.parallel.cases import plan_of_owners


@dataclass(frozen=True)
class Case:
    variant: Any
    """Config of the attention variant, its mode among its fields."""
    ring: int
    ulysses: int
    heads: int
    kv_heads: int
    head_dim: int
    owners: tuple[int, ...]
    """Rank of each token."""
    bounds: tuple[int, ...]
    """First token of each document, then the number of tokens."""
    blocks: tuple[tuple[int, int], ...] = ()
    """Both-ways blocks."""
    dtype: torch.dtype = torch.float64
    seed: int = 0
    moved: tuple[int, int] = (0, 0)
    """Tokens whose inputs are drawn again."""
    checkpointing: bool = False
    """Run the forward again in backward."""

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses

    @property
    def plan(self) -> ShardPlan:
        return plan_of_owners(list(self.owners), self.ranks, ring=self.ring)

    @property
    def mask(self) -> Mask:
        bounds = [start for start, stop in pairwise(self.bounds) if start < stop] + [len(self.owners)]
        return Mask(np.array(bounds, dtype=np.int64), np.array(self.blocks, dtype=np.int64).reshape(-1, 2))

    def core(self, dtype: torch.dtype) -> Attention:
        """Build the layer's core, with the same weights on every rank."""
        torch.manual_seed(self.seed)
        return self.variant.build(heads=self.heads, kv_heads=self.kv_heads, head_dim=self.head_dim).to(dtype)

    def inputs(self) -> tuple[dict[str, Tensor], Tensor]:
        """Draw the layer's inputs, [s, heads, dim] each, and the weight of each output in the loss."""
        core = self.core(self.dtype)
        generator = torch.Generator().manual_seed(self.seed)
        count = {"query": self.heads, "kv": self.kv_heads}

        def draw(heads: int, dim: int) -> Tensor:
            return torch.randn(len(self.owners), heads, dim, generator=generator, dtype=torch.float64)

        inputs = {tensor.name: draw(count[tensor.heads], tensor.dim) for tensor in core.tensors}
        weight = draw(self.heads, core.out_dim)
        for value in inputs.values():
            value[slice(*self.moved)] += 1.0
        return {name: value.to(self.dtype) for name, value in inputs.items()}, weight.to(self.dtype)


@dataclass
class Result:
    """What one rank computed."""

    values: dict[str, Tensor]
    """`out` and the gradient of each input, of this rank's tokens."""
    weights: dict[str, Tensor]
    """This rank's part of the gradient of each of the core's parameters."""
    counted: dict[tuple[str, str], Traffic]
    expected: dict[tuple[str, str], Traffic]
    """By closed form."""


def run_case(case: Case) -> Result | str:
    """Run the layer on this rank; the message where it refuses."""
    mesh = build_mesh(MeshConfig(ring=case.ring, ulysses=case.ulysses))
    plan, mask = case.plan, case.mask
    core = case.core(case.dtype)
    whole, weight = case.inputs()
    mine = torch.from_numpy(plan.positions(mesh.cp.index))
    local = {name: value[mine].requires_grad_() for name, value in whole.items()}
    with record(mesh.world) as recorder:
        try:
            layer = Ulysses(
                core,
                mesh,
                num_heads=case.heads,
                num_kv_heads=case.kv_heads,
                mode=case.variant.mode,
                chunks=case.variant.chunks,
            )
            info = RowInfo(mask, plan, mesh.cp.index)
            if case.checkpointing:
                ones = torch.ones((), dtype=case.dtype, requires_grad=True)  # a product keeps the output for backward
                out = checkpoint(lambda: layer(local, info).mul(ones), use_reentrant=False)
            else:
                out = layer(local, info)
        except ValueError as error:
            return f"{len(recorder.traffic)} exchanges: {error}"
        (out * weight[mine]).sum().backward()
    expected = attention_traffic(
        case.variant,
        plan,
        mask,
        rank=mesh.cp.index,
        heads=case.heads,
        kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        dtype=case.dtype,
        checkpointing=case.checkpointing,
    )
    values = {name: value.grad for name, value in local.items()} | {"out": out.detach()}
    weights = {f"weight {name}": weight.grad for name, weight in core.named_parameters()}
    return Result(values, weights, recorder.traffic, expected)


def run_cases(cases: list[Case]) -> list[Result | str]:
    """Run several cases of one number of ranks."""
    return [run_case(case) for case in cases]


def reference_of(case: Case) -> dict[str, Tensor]:
    """Compute the output and every gradient by the variant's slow reference, in float64, of weights in their type."""
    core = case.core(case.dtype).double()
    inputs, weight = case.inputs()
    exact = {name: value.double().requires_grad_() for name, value in inputs.items()}
    out = core.reference(exact, case.mask, split_heads(case.heads, case.kv_heads, 1)[0])
    named = exact | {f"weight {name}": weight for name, weight in core.named_parameters()}
    loss = (out * weight.double()).sum()
    grads = torch.autograd.grad(loss, list(named.values()), allow_unused=True, materialize_grads=True)
    return dict(zip(named, grads, strict=True)) | {"out": out.detach()}


def joined(case: Case, results: list[Result]) -> dict[str, Tensor]:
    """Put the ranks' values together in sequence order, and sum the gradients of parameters."""
    places = torch.from_numpy(case.plan.inverse)
    values = {
        name: torch.cat([result.values[name] for result in results]).index_select(0, places)
        for name in results[0].values
    }
    return values | {name: sum(result.weights[name] for result in results) for name in results[0].weights}


def check_results(case: Case, results: list[Result], tolerance: float) -> float:
    """Compare with the reference, and what was counted with the closed form; return the largest error."""
    for rank, result in enumerate(results):
        assert result.counted == result.expected, (case, rank)
    got, want = joined(case, results), reference_of(case)
    grads = [want[name] for name in want if name != "out"]
    errors = {name: relative_error(got[name], want[name], of=grads if name != "out" else ()) for name in got}
    for name, error in errors.items():
        assert error <= tolerance, (case, name, error)
    return max(errors.values())


def check_case(pool: Any, case: Case, tolerance: float = 1e-10) -> list[Result]:
    """Run one case on the pool's ranks and check it; return what the ranks computed."""
    results = pool.run(run_case, case, ranks=case.ranks)
    assert all(isinstance(result, Result) for result in results), results
    check_results(case, results, tolerance)
    return results


def with_mode(case: Case, mode: str) -> Case:
    """The same layer in another mode."""
    return replace(case, variant=replace(case.variant, mode=mode))
