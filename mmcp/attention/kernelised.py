"""Kernelised linear attention: softmax attention with the exponential of a product replaced by a product of features.

    out_i = sum_j f(q_i) . f(k_j) v_j / sum_j f(q_i) . f(k_j)        over the keys j up to i of the same document

The sums are read off a state and a normaliser, which do not grow with the length of what was read:

    S_i = S_{i-1} + f(k_i) v_i^T      z_i = z_{i-1} + f(k_i)      out_i = f(q_i) S_i / (f(q_i) . z_i)

Katharopoulos et al. 2020 (arXiv 2006.16236). Features are positive, so the weights of a query are, and sum to 1: `elu`
is elu(x) + 1 of that paper; `softmax` is the softmax over a head's numbers (Shen et al. 2018, 1812.01243).
"""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from mmcp.attention.base import ATTENTION, HeadShare, RecurrentAttention, RecurrentVariant, RowInfo, qkv_tensors
from mmcp.attention.blocks import by_blocks
from mmcp.attention.chunks import decayed_attention, decayed_state, decayed_step, run_decay, runs_of
from mmcp.attention.feature_maps import FEATURE_MAPS
from mmcp.config import config
from mmcp.masks import Mask
from mmcp.sharding.ranges import Ranges


@ATTENTION.register("kernelised")
@config
class KernelisedConfig(RecurrentVariant):
    name: Literal["kernelised"] = "kernelised"
    feature_map: Literal["elu", "softmax"] = "elu"
    """f, applied to queries and keys after the rotary turn."""
    chunk: int = 64
    """Tokens that are multiplied at once; changes speed, not results."""
    rotary: bool = True
    """Turn queries and keys by their positions."""
    output_gate: bool = False
    """Multiply the output by sigmoid(gate(x))."""
    mode: Literal["ulysses", "state", "scan"] = "ulysses"
    """Over several ranks: trade tokens for heads, or pass the state along the ring axis, gathered or scanned."""
    chunks: int = 1
    """Mode `ulysses`: groups of heads whose exchange runs under the attention of another group."""

    def __post_init__(self):
        self.check_sizes()

    def build(self, *, heads: int, kv_heads: int, head_dim: int) -> "Kernelised":
        """Make the core; `heads` query heads in the whole layer, of `head_dim`."""
        return Kernelised(self, head_dim=head_dim)

    def token_flops(self, head_dim: int) -> int:
        """Forward FLOPs of one query head per token, in the chunked form, the normaliser among its values."""
        return 2 * self.chunk * (2 * head_dim + 1) + 4 * head_dim * (head_dim + 1)

    def state_bytes(self, *, heads: int, head_dim: int) -> int:
        """Bytes of state that a run of tokens hands on to the next: S, z and whether they live on, in float32."""
        return 4 * heads * (head_dim * (head_dim + 1) + 1)


class Kernelised(RecurrentAttention):
    """Linear attention without decay, with a normaliser; documents start with an empty state.

    The normaliser is a last column of the state: every value is followed by a 1.
    """

    def __init__(self, settings: KernelisedConfig, *, head_dim: int):
        super().__init__()
        self.settings, self.feature = settings, FEATURE_MAPS[settings.feature_map]
        self.tensors = qkv_tensors(head_dim)
        self.out_dim = head_dim
        self.state_dim, self.transition_dim = (head_dim, head_dim + 1), ()

    def summarise(
        self, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare, runs: Ranges
    ) -> tuple[Tensor, Tensor]:
        """k, v: [n, k, d]  ->  whether the state before lives on [runs, h], what is added to it [runs, h, d, d + 1]."""
        k, v = self._features(inputs["k"]), _with_one(inputs["v"])
        log_decay = _no_decay(heads, k.device)
        state = decayed_state(
            k,
            v,
            log_decay=log_decay,
            kv_of_query=heads.kv_of_query,
            runs=runs_of(info, runs, self.settings.chunk, k),
        )
        return run_decay(info.mask, runs, log_decay).to(state.dtype), state

    def finish(
        self, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare, runs: Ranges, states: Tensor
    ) -> Tensor:
        """q: [n, h, d]  k, v: [n, k, d]  states: [runs, h, d, d + 1]  ->  [n, h, d]."""
        q, k, v = self._features(inputs["q"]), self._features(inputs["k"]), _with_one(inputs["v"])
        sums = decayed_attention(
            q,
            k,
            v,
            states,
            log_decay=_no_decay(heads, q.device),
            kv_of_query=heads.kv_of_query,
            runs=runs_of(info, runs, self.settings.chunk, q),
        )
        return by_blocks(lambda block: (block[..., :-1] / block[..., -1:]).to(inputs["v"].dtype), sums)

    @torch.no_grad()
    def decode(
        self, inputs: dict[str, Tensor], halo: dict[str, Tensor], states: Tensor, heads: HeadShare
    ) -> tuple[Tensor, Tensor]:
        """q: [n, h, d]  k, v: [n, k, d]  states: [n, h, d, d + 1]  ->  [n, h, d], states after."""
        kv = list(heads.kv_of_query)
        q, k, v = self._features(inputs["q"]), self._features(inputs["k"])[:, kv], _with_one(inputs["v"])[:, kv]
        sums, states = decayed_step(q, k, v, states, torch.ones(len(kv), dtype=states.dtype, device=q.device))
        return (sums[..., :-1] / sums[..., -1:]).to(inputs["v"].dtype), states

    def _features(self, x: Tensor) -> Tensor:
        """Return f(x) in float32 or wider: one near 0 must not round to it."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return by_blocks(lambda block: self.feature(block.to(wide)), x)

    def reference(self, inputs: dict[str, Tensor], mask: Mask, heads: HeadShare) -> Tensor:
        """Run `reference` with this layer's features."""
        self.check(mask)
        return reference(inputs, mask, heads, self.feature)


def reference(inputs: dict[str, Tensor], mask: Mask, heads: HeadShare, feature: Callable[[Tensor], Tensor]) -> Tensor:
    """The specification: the recurrence, one token at a time, in float64; [s, h, d]."""
    q, k, v = (inputs[name].double() for name in "qkv")
    kv = list(heads.kv_of_query)
    starts, outs, state, normaliser = set(mask.bounds.tolist()), [], torch.zeros(()), torch.zeros(())
    for i in range(len(q)):
        if i in starts:
            state, normaliser = q.new_zeros(q.shape[1], q.shape[2], v.shape[2]), q.new_zeros(q.shape[1], q.shape[2])
        key, query = feature(k[i, kv]), feature(q[i])
        state, normaliser = state + key[:, :, None] * v[i, kv][:, None, :], normaliser + key
        outs.append((query[:, None] @ state)[:, 0] / (query * normaliser).sum(-1, keepdim=True))
    return torch.stack(outs) if outs else q + k.sum() + v.sum()


def _with_one(v: Tensor) -> Tensor:
    """[n, k, d] -> [n, k, d + 1]."""
    return F.pad(v, (0, 1), value=1.0)


def _no_decay(heads: HeadShare, device: torch.device) -> Tensor:
    return torch.zeros(len(heads.query_heads), dtype=torch.float64, device=device)
