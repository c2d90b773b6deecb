"""Recurrent attention on a GPU: the chunk kernels of flash-linear-attention, where it is installed.

Its kernels take sequences that lie one after the other, each with a state before it. Runs of tokens are cut into such
sequences where documents begin: the first of a run continues the state before the run, unless a document begins there.
https://github.com/fla-org/flash-linear-attention (0.4 or newer)
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmcp.masks import Mask
from mmcp.sharding.ranges import Ranges


@dataclass(frozen=True, eq=False)
class Sequences:
    """Runs cut where documents begin.

    Documents of 3 and 5 tokens in runs 1..4 and 4..8: bounds 0 2 3 7, first 0 2, last 1 2, continues yes yes
    """

    bounds: Tensor
    """[sequences + 1] int64: first row of each, then the number of rows (cu_seqlens)."""
    first: Tensor
    """[runs] int64: the first sequence of each run."""
    last: Tensor
    """[runs] int64: the last one."""
    continues: Tensor
    """[runs, 1, 1, 1] bool: whether the run goes on with the document before it."""


def uses_fla(x: Tensor) -> bool:
    """Say whether the kernels are here and take this tensor."""
    return x.is_cuda and x.numel() > 0 and x.dtype != torch.float64 and find_spec("fla") is not None


def cut_sequences(mask: Mask, runs: Ranges, device: torch.device) -> Sequences:
    """Cut runs where documents begin."""
    bounds, first, last, rows = [0], [], [], 0
    for start, stop in runs:
        first.append(len(bounds) - 1)
        inside = mask.bounds[(mask.bounds > start) & (mask.bounds < stop)]
        bounds += [rows + int(bound) - start for bound in (*inside, stop)]
        rows += stop - start
        last.append(len(bounds) - 2)
    continues = ~np.isin([start for start, _ in runs], mask.bounds)
    arrays = [np.array(bounds, dtype=np.int64), np.array(first, dtype=np.int64), np.array(last, dtype=np.int64)]
    starts, firsts, lasts = (torch.from_numpy(array).to(device) for array in arrays)
    return Sequences(starts, firsts, lasts, torch.from_numpy(continues).to(device)[:, None, None, None])


def fla_gated_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    states: Tensor,
    *,
    sequences: Sequences,
) -> tuple[Tensor, Tensor]:
    """Do what `gated_delta` and `gated_delta_state` do, a key head for each value head.

    q, k: [n, h, d_k]  ->  out [n, h, d_v], states after the runs [runs, h, d_k, d_v]
    """
    out, after = delta_kernel()(
        *(x[None] for x in (q, k, v, log_decay[..., 0], strength[..., 0])),
        initial_state=_before(states, sequences),
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=sequences.bounds,
    )
    return out[0].to(states.dtype), after[sequences.last]


def fla_decayed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    states: Tensor,
    *,
    log_decay: Tensor,
    sequences: Sequences,
) -> tuple[Tensor, Tensor]:
    """Do what `decayed_attention` and `decayed_state` do, a key-value head for each query head.

    q, k: [n, h, d_k]  v: [n, h, d_v]  ->  out [n, h, d_v], states after the runs [runs, h, d_k, d_v]
    """
    out, after = decay_kernel()(
        *(x[None] for x in (q, k.to(q.dtype), v.to(q.dtype))),
        g_gamma=log_decay.to(states.dtype),
        initial_state=_before(states, sequences),
        output_final_state=True,
        cu_seqlens=sequences.bounds,
    )
    return out[0].to(states.dtype), after[sequences.last]


def _before(states: Tensor, sequences: Sequences) -> Tensor:
    """[runs, h, d_k, d_v] -> [sequences, h, d_k, d_v]."""
    zeros = states.new_zeros((len(sequences.bounds) - 1, *states.shape[1:]))
    return zeros.index_copy(0, sequences.first, torch.where(sequences.continues, states, 0))


@cache
def delta_kernel() -> Callable[..., Any]:
    """Import the kernel of the gated delta rule."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule


@cache
def decay_kernel() -> Callable[..., Any]:
    """Import the kernel of linear attention with one fixed decay per head."""
    from fla.ops.simple_gla import chunk_simple_gla

    return chunk_simple_gla
