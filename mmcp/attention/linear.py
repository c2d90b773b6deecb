"""Linear attention with a fixed decay per head: cost and state do not grow with the length of what was read.

    state_i = g state_{i-1} + f(k_i) v_i^T        out_i = norm(f(q_i) state_i / sqrt(d))

Heads forget at different rates: head j of h keeps a memory of 1 / (1 - g) tokens, spaced geometrically from the
shortest to the longest. With f = identity and rotary this is retention (arXiv 2307.08621); with f = silu and no rotary
it is Lightning attention (2401.04658); f = elu + 1 keeps all weights positive.
"""

import math
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


@ATTENTION.register("linear")
@config
class LinearConfig(RecurrentVariant):
    name: Literal["linear"] = "linear"
    feature_map: Literal["identity", "silu", "elu"] = "identity"
    """f, applied to queries and keys after the rotary turn."""
    shortest_memory: float = 32.0
    """Tokens the first head remembers: its decay is 1 - 1 / shortest_memory."""
    longest_memory: float = 4096.0
    """Tokens the last head remembers."""
    norm_eps: float = 1e-6
    """Added to the mean square of a head's output before its root is divided by."""
    chunk: int = 64
    """Tokens that are multiplied at once; changes speed, not results."""
    rotary: bool = True
    """Turn queries and keys by their positions."""
    output_gate: bool = True
    """Multiply the output by sigmoid(gate(x))."""
    mode: Literal["ulysses", "state", "scan"] = "ulysses"
    """Over several ranks: trade tokens for heads, or pass the state along the ring axis, gathered or scanned."""
    chunks: int = 1
    """Mode `ulysses`: groups of heads whose exchange runs under the attention of another group."""

    def __post_init__(self):
        if not 1 < self.shortest_memory <= self.longest_memory:
            raise ValueError(
                f"shortest_memory={self.shortest_memory} and longest_memory={self.longest_memory} are tokens; "
                "they must be above 1 and in this order"
            )
        self.check_sizes()

    def build(self, *, heads: int, kv_heads: int, head_dim: int) -> "Linear":
        """Make the core; `heads` query heads in the whole layer, of `head_dim`."""
        return Linear(self, heads=heads, head_dim=head_dim)

    def token_flops(self, head_dim: int) -> int:
        """Forward FLOPs of one query head per token, in the chunked form."""
        return 4 * (self.chunk + head_dim) * head_dim

    def state_bytes(self, *, heads: int, head_dim: int) -> int:
        """Bytes of state that a run of tokens hands on to the next: a float32 matrix and a decay per query head."""
        return 4 * heads * (head_dim * head_dim + 1)

    def decays(self, num_heads: int) -> Tensor:
        """[num_heads] float64: g of each query head of the layer."""
        shortest, longest = math.log(self.shortest_memory), math.log(self.longest_memory)
        return 1 - torch.exp(-torch.linspace(shortest, longest, num_heads, dtype=torch.float64))


class Linear(RecurrentAttention):
    """Decayed linear attention; documents start with an empty state."""

    def __init__(self, settings: LinearConfig, *, heads: int, head_dim: int):
        super().__init__()
        self.settings, self.num_heads = settings, heads
        self.tensors = qkv_tensors(head_dim)
        self.out_dim = head_dim
        self.state_dim, self.transition_dim = (head_dim, head_dim), ()

    def summarise(
        self, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare, runs: Ranges
    ) -> tuple[Tensor, Tensor]:
        """k, v: [n, k, d]  ->  what is left of the state before [runs, h], what is added to it [runs, h, d, d]."""
        k, v = inputs["k"], inputs["v"]
        log_decay = self._log_decay(heads, k.device)
        state = decayed_state(
            self._features(k),
            v,
            log_decay=log_decay,
            kv_of_query=heads.kv_of_query,
            runs=runs_of(info, runs, self.settings.chunk, k),
        )
        return run_decay(info.mask, runs, log_decay).to(state.dtype), state

    def finish(
        self, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare, runs: Ranges, states: Tensor
    ) -> Tensor:
        """q: [n, h, d]  k, v: [n, k, d]  states: [runs, h, d, d]  ->  [n, h, d]."""
        q, k, v = inputs["q"], inputs["k"], inputs["v"]
        out = decayed_attention(
            self._features(q),
            self._features(k),
            v,
            states,
            log_decay=self._log_decay(heads, q.device),
            kv_of_query=heads.kv_of_query,
            runs=runs_of(info, runs, self.settings.chunk, q),
        )
        return by_blocks(lambda x: F.rms_norm(x, x.shape[-1:], eps=self.settings.norm_eps).to(q.dtype), out)

    @torch.no_grad()
    def decode(
        self, inputs: dict[str, Tensor], halo: dict[str, Tensor], states: Tensor, heads: HeadShare
    ) -> tuple[Tensor, Tensor]:
        """q: [n, h, d]  k, v: [n, k, d]  states: [n, h, d, d]  ->  [n, h, d], states after."""
        kv = list(heads.kv_of_query)
        q, k, v = self._features(inputs["q"]), self._features(inputs["k"])[:, kv], inputs["v"][:, kv]
        decay = self._log_decay(heads, q.device).exp().to(states.dtype)
        out, states = decayed_step(q, k, v, states, decay)
        return F.rms_norm(out, out.shape[-1:], eps=self.settings.norm_eps).to(inputs["q"].dtype), states

    def _features(self, x: Tensor) -> Tensor:
        name = self.settings.feature_map
        return x if name == "identity" else by_blocks(FEATURE_MAPS[name], x)

    def _log_decay(self, heads: HeadShare, device: torch.device) -> Tensor:
        """[h] float64: ln g of the query heads present."""
        return self.settings.decays(self.num_heads)[list(heads.query_heads)].log().to(device)

    def reference(self, inputs: dict[str, Tensor], mask: Mask, heads: HeadShare) -> Tensor:
        """Run `reference` with this layer's decays."""
        self.check(mask)
        return reference(inputs, mask, heads, settings=self.settings, num_heads=self.num_heads)


def reference(
    inputs: dict[str, Tensor], mask: Mask, heads: HeadShare, *, settings: LinearConfig, num_heads: int
) -> Tensor:
    """The specification: the recurrence, one token at a time, in float64; [s, h, d]."""
    q, k, v = (inputs[name].double() for name in "qkv")
    feature = FEATURE_MAPS[settings.feature_map]
    decay = settings.decays(num_heads)[list(heads.query_heads)].to(q.device)[:, None, None]
    kv = list(heads.kv_of_query)
    starts, outs, state = set(mask.bounds.tolist()), [], torch.zeros(())
    for i in range(len(q)):
        if i in starts:
            state = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
        state = decay * state + feature(k[i, kv])[:, :, None] * v[i, kv][:, None, :]
        outs.append((feature(q[i])[:, None] @ state)[:, 0] / math.sqrt(q.shape[-1]))
    out = torch.stack(outs) if outs else q + k.sum() + v.sum()
    return out * torch.rsqrt(out.square().mean(-1, keepdim=True) + settings.norm_eps)
