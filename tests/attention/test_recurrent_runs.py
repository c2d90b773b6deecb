"""Every recurrent variant cut into runs, summarised, composed and finished, against its own whole row, with gradients.

This is what state passing does, without ranks. Run: python -m pytest tests/attention/test_recurrent_runs.py
"""

import numpy as np
import pytest
import torch

from mmcp.attention.base import ATTENTION, RecurrentAttention, carry, split_heads
from mmcp.masks import Mask
from tests.attention.rows import draw_inputs, relative_error, row_info

RECURRENT = [
    name for name, entry in ATTENTION.items()
    if isinstance(entry().build(heads=1, kv_heads=1, head_dim=2), RecurrentAttention)
]  # fmt: skip


def test_there_are_recurrent_variants():
    assert {"linear", "gated_delta"} <= set(RECURRENT)


def in_runs(core: RecurrentAttention, inputs, info, heads, owners: np.ndarray) -> torch.Tensor:
    """Give each owner the runs it owns; pass states along the row."""
    cuts = np.flatnonzero(np.diff(owners)) + 1
    runs = list(zip([0, *cuts.tolist()], [*cuts.tolist(), len(owners)], strict=True))
    prepared, summaries = {}, {}
    for owner in set(owners.tolist()):
        own = tuple(run for run in runs if owners[run[0]] == owner)
        local = {name: torch.cat([x[a:b] for a, b in own]) for name, x in inputs.items()}
        halo = {
            spec.name: torch.stack([_before(inputs[spec.name], a, spec.halo) for a, _ in own])
            for spec in core.tensors
            if spec.halo
        }
        prepared[owner] = own, core.prepare(local, info, heads, own, halo)
        summaries |= dict(
            zip(own, zip(*core.summarise(prepared[owner][1], info, heads, own), strict=True), strict=True)
        )
    before, state = {}, torch.zeros_like(summaries[runs[0]][1])
    for run in runs:
        transition, added = summaries[run]
        before[run], state = state, carry(transition, state) + added
    rows = {}
    for own, ready in prepared.values():
        out = core.finish(ready, info, heads, own, torch.stack([before[run] for run in own]))
        rows |= dict(zip(own, out.split([b - a for a, b in own]), strict=True))
    return torch.cat([rows[run] for run in runs])


def _before(x: torch.Tensor, start: int, halo: int) -> torch.Tensor:
    return torch.cat([x.new_full((halo, *x.shape[1:]), 7.0), x])[start : start + halo]


@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.parametrize("seed", range(6))
def test_runs_of_any_owner_are_the_whole_row(name, seed):
    rng = np.random.default_rng(seed)
    mask = Mask.causal(rng.choice([1, 2, 20, 70], int(rng.integers(1, 5))).tolist())
    owners = np.sort(rng.integers(0, 4, mask.num_tokens))
    if seed % 2:
        owners = owners[(np.arange(mask.num_tokens) // 3) % 5 * mask.num_tokens // 5]
    heads, of = split_heads(6, 3, 2)[1], (6, 3)
    torch.manual_seed(seed)
    core = ATTENTION[name](chunk=8).build(heads=of[0], kv_heads=of[1], head_dim=4).double()
    inputs, info = draw_inputs(core, mask.num_tokens, heads, seed=seed), row_info(mask)
    leaves = [*inputs.values(), *core.parameters()]
    whole, cut = core(inputs, info, heads), in_runs(core, inputs, info, heads, owners)
    pull = torch.randn_like(whole)
    wanted = torch.autograd.grad((whole * pull).sum(), leaves)
    grads = torch.autograd.grad((cut * pull).sum(), leaves)
    for got, want in zip([cut, *grads], [whole, *wanted], strict=True):
        assert relative_error(got, want, of=wanted) < 1e-10
