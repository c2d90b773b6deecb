"""The gated delta rule, as in Qwen3-Next: a linear attention that replaces what its state says of a key.

    S_i = a_i (1 - b_i k_i k_i^T) S_{i-1} + b_i k_i v_i^T      out_i = norm(q_i^T S_i / sqrt(d))

    q, k, v = silu(short convolution), then q and k divided by their norms
    a_i = exp(-exp(log_rate) softplus(decay_i + decay_bias))    b_i = sigmoid(strength_i)

Yang et al. 2024 (arXiv 2412.06464). Each value head has a state, its gates and its output: it is what the library calls
a query head. Queries and keys come per key head (`kv`), which a group of value heads shares.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmcp.attention.base import (
    ATTENTION,
    HeadShape,
    HeadShare,
    HeadTensor,
    RecurrentAttention,
    RecurrentVariant,
    RowInfo,
)
from mmcp.attention.blocks import by_blocks
from mmcp.attention.chunks import runs_of
from mmcp.attention.delta_chunks import NORM_EPS, gated_delta, gated_delta_state, gated_delta_step
from mmcp.attention.short_convolution import convolved_step, edges_of, short_convolution
from mmcp.config import config
from mmcp.masks import Mask
from mmcp.sharding.ranges import Ranges

CONVOLVED = {"q": "kv", "k": "kv", "v": "query"}
FASTEST_RATE, SHORTEST_STEP, LONGEST_STEP = 16.0, 1e-3, 1e-1  # of new layers, as in Mamba 2


@ATTENTION.register("gated_delta")
@config
class GatedDeltaConfig(RecurrentVariant):
    name: Literal["gated_delta"] = "gated_delta"
    value_heads: int = 0
    """Heads with a state and an output; 0: as many as the backbone has query heads."""
    key_heads: int = 0
    """Heads of queries and keys, a divisor of the value heads; 0: as many as the backbone has key-value heads."""
    head_dim: int = 0
    """Size of all of these heads; 0: that of the backbone."""
    convolution: int = 4
    """Tokens that the convolution of queries, keys and values reads, the token itself included."""
    norm_eps: float = 1e-6
    """Added to the mean square of a head's output before its root is divided by."""
    chunk: int = 64
    """Tokens that are multiplied at once; changes speed, not results."""
    output_gate: bool = True
    """Multiply the output by silu(gate(x))."""
    mode: Literal["ulysses", "state", "scan"] = "ulysses"
    """Over several ranks: trade tokens for heads, or pass the state along the ring axis, gathered or scanned."""
    chunks: int = 1
    """Mode `ulysses`: groups of heads whose exchange runs under the attention of another group."""

    def __post_init__(self):
        if self.convolution < 1:
            raise ValueError(f"convolution={self.convolution} tokens; use at least 1, which reads the token itself")
        if min(self.value_heads, self.key_heads, self.head_dim) < 0:
            raise ValueError(
                f"value_heads={self.value_heads}, key_heads={self.key_heads}, head_dim={self.head_dim}; use positive "
                "numbers, or 0 for those of the backbone"
            )
        self.check_sizes()

    @property
    def rotary(self) -> bool:
        """Whether queries and keys are turned by their positions: no, the convolution and the decay tell order."""
        return False

    @property
    def qk_norm(self) -> bool:
        """Whether the backbone may norm queries and keys: no, they are divided by their norms here."""
        return False

    @property
    def gate_activation(self) -> Literal["sigmoid", "silu"]:
        """What the output gate passes through."""
        return "silu"

    def shape(self, backbone: HeadShape) -> HeadShape:
        """Take the heads of the backbone where no others are given."""
        return HeadShape(
            heads=self.value_heads or backbone.heads,
            kv_heads=self.key_heads or backbone.kv_heads,
            head_dim=self.head_dim or backbone.head_dim,
        )

    def build(self, *, heads: int, kv_heads: int, head_dim: int) -> "GatedDelta":
        """Make the core; `heads` value heads and `kv_heads` key heads in the whole layer, of `head_dim`."""
        return GatedDelta(self, heads=heads, kv_heads=kv_heads, head_dim=head_dim)

    def token_flops(self, head_dim: int) -> int:
        """Forward FLOPs of one value head per token, in the chunked form.

        Three products with the state, four of a chunk's tokens with each other, its inverse, three convolutions.
        """
        return (6 * head_dim + 8 * self.chunk + 6 * self.convolution) * head_dim + self.chunk**2

    def state_bytes(self, *, heads: int, head_dim: int) -> int:
        """Bytes of state that a run of tokens hands on to the next: two float32 matrices per value head."""
        return 4 * heads * 2 * head_dim * head_dim


class GatedDelta(RecurrentAttention):
    """Gated delta rule with its convolutions, gates and norm; documents start with an empty state."""

    def __init__(self, settings: GatedDeltaConfig, *, heads: int, kv_heads: int, head_dim: int):
        super().__init__()
        self.settings = settings
        width, count = settings.convolution, {"query": heads, "kv": kv_heads}
        self.tensors = (
            *(HeadTensor(name, owner, head_dim, halo=width - 1) for name, owner in CONVOLVED.items()),
            HeadTensor("decay", "query", 1),
            HeadTensor("strength", "query", 1),
        )
        self.out_dim = head_dim
        self.state_dim, self.transition_dim = (head_dim, head_dim), (head_dim, head_dim)
        self.filters = nn.ParameterDict(
            {
                name: nn.Parameter(torch.empty(count[owner], head_dim, width).uniform_(-1, 1) / math.sqrt(width))
                for name, owner in CONVOLVED.items()
            }
        )
        self.log_rate = nn.Parameter(torch.empty(heads).uniform_(1, FASTEST_RATE).log())
        steps = torch.empty(heads).uniform_(math.log(SHORTEST_STEP), math.log(LONGEST_STEP)).exp()
        self.decay_bias = nn.Parameter(steps.expm1().log())  # the inverse of softplus
        self.norm = nn.Parameter(torch.ones(head_dim))

    def prepare(
        self, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare, runs: Ranges, halo: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Convolve q, k, v: [n, heads, d] and turn decay, strength: [n, h, 1] into g and b."""
        width, device = self.settings.convolution, inputs["q"].device
        edges = info.once(("edges", width, runs), lambda: edges_of(info.mask, width, device, runs))
        filters = {name: self.filters[name][_present(heads, owner)] for name, owner in CONVOLVED.items()}
        ready = {name: short_convolution(inputs[name], filters[name], halo[name], edges) for name in CONVOLVED}
        return ready | self._gates(inputs, heads)

    def summarise(
        self, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare, runs: Ranges
    ) -> tuple[Tensor, Tensor]:
        """What `prepare` gave -> transition [runs, h, d, d], state [runs, h, d, d]."""
        k, v = inputs["k"], inputs["v"]
        d_k, d_v = self.state_dim
        states = torch.eye(d_k, d_k + d_v, dtype=inputs["decay"].dtype, device=v.device)
        after = gated_delta_state(
            k,
            F.pad(v, (d_k, 0)),
            inputs["decay"],
            inputs["strength"],
            states.expand(len(runs), v.shape[1], -1, -1),
            key_of_value=heads.kv_of_query,
            runs=runs_of(info, runs, self.settings.chunk, v),
        )
        transition, state = after.split([d_k, d_v], dim=-1)
        return transition, state

    def finish(
        self, inputs: dict[str, Tensor], info: RowInfo, heads: HeadShare, runs: Ranges, states: Tensor
    ) -> Tensor:
        """What `prepare` gave, states [runs, h, d, d]  ->  [n, h, d]."""
        q, k, v, log_decay, strength = (inputs[spec.name] for spec in self.tensors)
        out = gated_delta(
            q,
            k,
            v,
            log_decay,
            strength,
            states,
            key_of_value=heads.kv_of_query,
            runs=runs_of(info, runs, self.settings.chunk, v),
        )

        return by_blocks(lambda x, weight: self._normed(x, weight).to(v.dtype), out, self.norm)

    @torch.no_grad()
    def decode(
        self, inputs: dict[str, Tensor], halo: dict[str, Tensor], states: Tensor, heads: HeadShare
    ) -> tuple[Tensor, Tensor]:
        """q, k: [n, k, d]  v: [n, h, d]  gates: [n, h, 1]  states: [n, h, d, d]  ->  [n, h, d], states after."""
        mixed = {
            name: convolved_step(inputs[name], self.filters[name][_present(heads, owner)], halo[name])
            for name, owner in CONVOLVED.items()
        }
        gates = self._gates(inputs, heads)
        out, states = gated_delta_step(
            mixed["q"],
            mixed["k"],
            mixed["v"],
            gates["decay"],
            gates["strength"],
            states,
            key_of_value=heads.kv_of_query,
        )
        return self._normed(out, self.norm).to(inputs["v"].dtype), states

    def _normed(self, out: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(out, out.shape[-1:], weight.to(out.dtype), self.settings.norm_eps)

    def reference(self, inputs: dict[str, Tensor], mask: Mask, heads: HeadShare) -> Tensor:
        """Run `reference` with this layer's parameters."""
        self.check(mask)
        exact = {name: x.double() for name, x in inputs.items()}
        filters = {name: self.filters[name][_present(heads, owner)] for name, owner in CONVOLVED.items()}
        out = reference(exact | self._gates(exact, heads), mask, heads, filters)
        return out * torch.rsqrt(out.square().mean(-1, keepdim=True) + self.settings.norm_eps) * self.norm.double()

    def _gates(self, inputs: dict[str, Tensor], heads: HeadShare) -> dict[str, Tensor]:
        """[n, h, 1] each: g and b, in float32 or the inputs' type, whichever is wider."""
        wide, present = torch.promote_types(inputs["decay"].dtype, torch.float32), _present(heads, "query")
        rate, bias = (x[present, None].to(wide) for x in (self.log_rate, self.decay_bias))
        decay = -rate.exp() * F.softplus(inputs["decay"].to(wide) + bias)
        return {"decay": decay, "strength": torch.sigmoid(inputs["strength"].to(wide))}


def reference(inputs: dict[str, Tensor], mask: Mask, heads: HeadShare, filters: dict[str, Tensor]) -> Tensor:
    """The specification: the recurrence, one token at a time, in float64, before the norm; [s, h, d].

    inputs: q, k [s, k, d], v [s, h, d], decay, strength [s, h, 1] as g and b   filters: [heads, d, W] of q, k, v
    """
    start_of, key_of_value = mask.bounds[mask.documents], list(heads.kv_of_query)
    outs, state = [], torch.zeros(())
    for i, start in enumerate(start_of.tolist()):
        mixed = {}
        for name, weight in filters.items():
            window = inputs[name][max(start, i - weight.shape[-1] + 1) : i + 1]
            taps = weight.double()[..., weight.shape[-1] - len(window) :]
            mixed[name] = F.silu((window * taps.movedim(-1, 0)).sum(0))
        q, k = (
            (mixed[name] * torch.rsqrt(mixed[name].square().sum(-1, keepdim=True) + NORM_EPS))[key_of_value]
            for name in "qk"
        )
        v, decay, strength = mixed["v"], inputs["decay"][i].exp(), inputs["strength"][i]
        state = v.new_zeros(*k.shape, v.shape[-1]) if i == start else state * decay[..., None]
        news = strength * (v - (k[:, None] @ state)[:, 0])
        state = state + k[:, :, None] * news[:, None]
        outs.append((q[:, None] @ state)[:, 0] / math.sqrt(q.shape[-1]))
    if not outs:
        return inputs["v"] + sum(x.sum() for x in (*inputs.values(), *filters.values()))
    return torch.stack(outs)


def _present(heads: HeadShare, owner: str) -> slice:
    """Heads of a parameter that are here."""
    numbers = heads.query_heads if owner == "query" else heads.kv_heads
    return slice(numbers[0], numbers[-1] + 1)
