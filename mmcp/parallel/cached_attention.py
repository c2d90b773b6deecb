"""Let a model's attention layers remember a row of prompts and read new tokens one at a time.

    with cached_attention(model, mesh, room=100) as cache:
        model(...)        # the row, split over ranks as ever: layers attend in their modes and keep what will be read
        model(...)        # new tokens, the same on all ranks: `info` is a `NewTokens`

The layers themselves do not know: what stands for attention inside them answers the same call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor, nn

from mmcp.attention.base import HeadShare, LocalAttention, RecurrentAttention, RowInfo, SoftmaxAttention, split_heads
from mmcp.parallel.collectives import Group
from mmcp.parallel.key_cache import KeyCache
from mmcp.parallel.mesh import Mesh
from mmcp.parallel.new_tokens import NewTokens
from mmcp.parallel.state_cache import StateCache
from mmcp.parallel.ulysses import Ulysses


@dataclass
class RowCache:
    """What one rank keeps of a row, over all layers."""

    room: int
    """Most new tokens of a document."""
    group: Group
    """Ranks that share the row."""
    layers: dict[int, KeyCache | StateCache] = field(default_factory=dict)
    """By number of the layer."""

    @property
    def nbytes(self) -> int:
        """Bytes of all layers on this rank."""
        return sum(layer.nbytes for layer in self.layers.values())

    def attend(
        self, layer: int, attention: LocalAttention | Ulysses, inputs: dict[str, Tensor], info: RowInfo
    ) -> Tensor:
        """Attend as `attention` does to the prompts, and keep what new tokens read; or attend from new tokens.

        inputs: one [s/cp, heads, dim] per tensor of the core -> [s/cp, h, out_dim]
        """
        if isinstance(info, NewTokens):
            return self.layers[layer].decode(inputs, info)
        out = attention(inputs, info)
        core, group = attention.core, self.group
        if isinstance(core, SoftmaxAttention):
            self.layers[layer] = KeyCache(core, inputs, info, room=self.room, group=group)
        else:
            assert isinstance(core, RecurrentAttention)
            self.layers[layer] = StateCache(core, inputs, info, heads=_all_heads(attention), group=group)
        return out


class CachedAttention(nn.Module):
    """Answers the call of a LocalAttention or Ulysses, through a cache."""

    def __init__(self, attention: LocalAttention | Ulysses, cache: RowCache, layer: int):
        super().__init__()
        self.attention, self.cache, self.layer = attention, cache, layer

    def forward(self, inputs: dict[str, Tensor], info: RowInfo) -> Tensor:
        """Attend: one [s/cp, heads, dim] per entry of the core's `tensors` -> [s/cp, h, out_dim]."""
        return self.cache.attend(self.layer, self.attention, inputs, info)


@contextmanager
def cached_attention(model: nn.Module, mesh: Mesh, *, room: int) -> Iterator[RowCache]:
    """Let every attention layer of `model` keep one row and `room` new tokens of each document; yields what is kept."""
    cache, replaced = RowCache(room, mesh.cp), []
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, LocalAttention | Ulysses):
                replaced.append((parent, name, child))
    for layer, (parent, name, child) in enumerate(replaced):
        setattr(parent, name, CachedAttention(child, cache, layer))
    try:
        yield cache
    finally:
        for parent, name, child in replaced:
            setattr(parent, name, child)


def _all_heads(attention: LocalAttention | Ulysses) -> HeadShare:
    if isinstance(attention, LocalAttention):
        return attention.heads
    return split_heads(attention.heads["query"], attention.heads["kv"], 1)[0]
