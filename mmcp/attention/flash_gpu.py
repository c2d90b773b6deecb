"""flash-attn's varlen kernels: any mask as a few calls whose pieces read alike, merged by log-sum-exp.

A tight slice is a rectangle of which query i reads keys i + sk - sq - left .. i + sk - sq + right: the kernel's window,
aligned at the bottom right. Slices of one window with no query and no key in common are the sequences of one call.
The backward kernel takes the merged output and logsumexp, so that each call gives its share of the gradients.
Dao 2023 (arXiv 2307.08691).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from mmcp.attention.flash_cpu import HeadRun, merge_
from mmcp.attention.pairs import Pairs
from mmcp.sharding.ranges import Ranges, as_indices, union

HALF = (torch.bfloat16, torch.float16)
LARGEST_HEAD = 256
MOST_CALLS = 8  # above which one FlexAttention call is cheaper: each call reads and writes all of its queries
NO_LIMIT = -1

Rows = slice | Tensor  # a slice, or indices where rows do not follow on one another


def takes(dtype: torch.dtype, head_dim: int) -> bool:
    """Say whether flash-attn is here and has a kernel for tensors of this type and size of a head."""
    return find_spec("flash_attn") is not None and dtype in HALF and head_dim % 8 == 0 and head_dim <= LARGEST_HEAD


@dataclass(frozen=True, eq=False)
class Call:
    """One varlen call: sequences of queries and keys, all with one window."""

    queries: Ranges
    """Per sequence: its queries."""
    keys: Ranges
    """Per sequence: its keys."""
    window: tuple[int, int]
    """Keys read on the left and on the right of the bottom right diagonal; -1: all."""

    @property
    def longest(self) -> tuple[int, int]:
        """What to give as the longest queries and keys of a sequence.

        The kernel takes a right window of the longest keys for none, and none beside a left one for the longest keys,
        both wrong where queries are more than keys. It only uses them as a bound: say that keys are longer there.
        """
        longest_q, longest_k = (max(stop - start for start, stop in x) for x in (self.queries, self.keys))
        left, right = self.window
        return longest_q, max(longest_k, right + 1, longest_q if left != NO_LIMIT else 0)


@dataclass(frozen=True, eq=False)
class Placed:
    """A call with its index tensors on a device."""

    queries: Rows
    keys: Rows
    bounds: tuple[Tensor, Tensor]
    """[sequences + 1] int32 each: cumulated lengths of queries and keys."""
    longest: tuple[int, int]
    window: tuple[int, int]


def calls_of(slices: np.ndarray) -> tuple[Call, ...]:
    """Gather tight slices ([slices, 6], disjoint) into calls."""
    alike: dict[tuple[int, int], list[tuple[list[tuple[int, int]], list[tuple[int, int]]]]] = {}
    for q0, q1, k0, k1, lowest, highest in sorted(slices.tolist()):
        left, right = k1 - q1 - lowest, q1 + highest - k1
        assert left >= 0 and right >= 0, f"slice {(q0, q1, k0, k1, lowest, highest)} is not tight"
        reads_all_after = right >= max(1, q1 - q0 - 1)  # a single query counts as causal, so that it joins others
        window = NO_LIMIT if left >= k1 - k0 - 1 else left, NO_LIMIT if reads_all_after else right
        calls = alike.setdefault(window, [])
        for queries, keys in calls:
            if queries[-1][1] <= q0 and keys[-1][1] <= k0:
                queries.append((q0, q1))
                keys.append((k0, k1))
                break
        else:
            calls.append(([(q0, q1)], [(k0, k1)]))
    return tuple(
        Call(tuple(queries), tuple(keys), window) for window, calls in alike.items() for queries, keys in calls
    )


def placed_calls(pairs: Pairs, device: torch.device) -> tuple[Placed, ...]:
    """Return the calls that cover `pairs`, ready for a device; they are made once."""
    return pairs.once(("calls", device), lambda: tuple(_place(call, device) for call in calls_of(pairs.slices)))


def flash_partial(
    q: Tensor, k: Tensor, v: Tensor, calls: Sequence[Placed], runs: Sequence[HeadRun]
) -> tuple[Tensor, Tensor]:
    """Attend to the keys that are here, as `SoftmaxAttention.partial` does; out in float32 or wider."""
    from flash_attn import flash_attn_varlen_func

    wide = torch.promote_types(q.dtype, torch.float32)
    out, lse = q.new_zeros(q.shape, dtype=wide), q.new_full(q.shape[:2], -torch.inf, dtype=wide)
    for call in calls:
        for q0, q1, k0, k1 in runs:
            rows = q[call.queries, q0:q1], k[call.keys, k0:k1], v[call.keys, k0:k1]
            part, part_lse, _ = flash_attn_varlen_func(
                *rows, *call.bounds, *call.longest, window_size=call.window, return_attn_probs=True
            )
            _merge_rows(out[:, q0:q1], lse[:, q0:q1], call.queries, part, part_lse.T)
    return out, lse


def flash_partial_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, calls: Sequence[Placed],
    runs: Sequence[HeadRun],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the share of these keys in the gradients, as `SoftmaxAttention.partial_backward` does.

    The gradients are in float32 or wider.
    """
    from flash_attn.flash_attn_interface import _flash_attn_varlen_backward

    grads = [torch.zeros(x.shape, dtype=lse.dtype, device=x.device) for x in (q, k, v)]
    for call in calls:
        for q0, q1, k0, k1 in runs:
            queries, keys = (call.queries, slice(q0, q1)), (call.keys, slice(k0, k1))
            rows = [x[at].contiguous() for x, at in ((grad, queries), (q, queries), (k, keys), (v, keys))]
            parts = [torch.empty_like(x) for x in rows[1:]]
            _flash_attn_varlen_backward(
                *rows,
                out[queries].contiguous(),
                lse[queries].T.contiguous(),
                *parts,
                *call.bounds,
                *call.longest,
                dropout_p=0.0,
                softmax_scale=1 / math.sqrt(q.shape[-1]),
                causal=False,
                window_size_left=call.window[0],
                window_size_right=call.window[1],
                softcap=0.0,
                alibi_slopes=None,
                deterministic=torch.are_deterministic_algorithms_enabled(),
            )
            for total, at, part in zip(grads, (queries, keys, keys), parts, strict=True):
                total[at] += part
    grad_q, grad_k, grad_v = grads
    return grad_q, grad_k, grad_v


def _place(call: Call, device: torch.device) -> Placed:
    cumulated = [
        torch.tensor([0, *accumulate(stop - start for start, stop in x)], dtype=torch.int32, device=device)
        for x in (call.queries, call.keys)
    ]
    queries, keys = (_rows(x, device) for x in (call.queries, call.keys))
    return Placed(queries, keys, (cumulated[0], cumulated[1]), call.longest, call.window)


def _rows(ranges: Ranges, device: torch.device) -> Rows:
    joined = union([ranges])
    if len(joined) == 1:
        return slice(*joined[0])
    return torch.from_numpy(as_indices(joined)).to(device)


def _merge_rows(out: Tensor, lse: Tensor, rows: Rows, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part of some rows into the answer of all, in place; out [sq, h, d], lse [sq, h]."""
    merged, merged_lse = out[rows], lse[rows]
    merge_(merged, merged_lse, part, part_lse)
    if not isinstance(rows, slice):
        out[rows], lse[rows] = merged, merged_lse
