"""What the layers of a model are told of a row: one object for one forward, passed down as an argument."""

from dataclasses import dataclass

import torch
from torch import Tensor

from mmcp.attention.base import RowInfo
from mmcp.attention.softmax import Softmax, SoftmaxConfig
from mmcp.masks import Mask
from mmcp.parallel.cached_attention import RowCache
from mmcp.parallel.mesh import Mesh
from mmcp.parallel.ulysses import Ulysses
from mmcp.sharding.plan import ShardPlan


class MaskedSoftmax(Softmax):
    """Softmax attention whose window is in the row's mask already."""

    def visible(self, mask: Mask) -> Mask:
        """Return the mask as it is."""
        return mask


class Attentions:
    """The attention of a model's layers over a mesh: one wrapper for each shape of heads."""

    def __init__(self, mesh: Mesh, mode: str):
        self.mesh, self.mode = mesh, mode
        self._made: dict[tuple[int, int, int], Ulysses] = {}

    def of_shape(self, heads: int, kv_heads: int, head_dim: int) -> Ulysses:
        """Return the wrapper for `heads` query and `kv_heads` key-value heads of `head_dim`."""
        shape = heads, kv_heads, head_dim
        if shape not in self._made:
            core = MaskedSoftmax(SoftmaxConfig(), head_dim=head_dim)
            self._made[shape] = Ulysses(core, self.mesh, num_heads=heads, num_kv_heads=kv_heads, mode=self.mode)
        return self._made[shape]


@dataclass(frozen=True, eq=False)
class LocalRow:
    """This rank's view of the row of one forward."""

    plan: ShardPlan
    infos: tuple[RowInfo, ...]
    """Per layer: its mask on the whole row; layers with one mask share one."""
    attentions: Attentions
    rank: int
    cache: RowCache | None = None
    """Keeps the row for new tokens, in `generate`."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the row that this rank holds."""
        return self.plan.lengths[self.rank]

    def without_ghost(self, x: Tensor) -> Tensor:
        """Leave what belongs to tokens of the row: [n, ...] -> [s/cp, ...].

        A rank without tokens runs its layers on one token that is in no row, as transformers' layers take no fewer.
        """
        return x[: self.num_tokens]

    def with_ghost(self, x: Tensor) -> Tensor:
        """Give that token zeros where there is one: [s/cp, ...] -> [n, ...]."""
        return x if self.num_tokens else torch.cat([x, x.new_zeros(1, *x.shape[1:])])

    def info(self, layer: int) -> RowInfo:
        """Return what layer number `layer` is told."""
        return self.infos[layer]

    def attend(self, layer: int, inputs: dict[str, Tensor], attention: Ulysses | None = None) -> Tensor:
        """Attend in layer number `layer`: one [s/cp, heads, dim] per input -> [s/cp, h, out_dim].

        attention: of the layer; None: softmax attention for the shape of the inputs
        """
        if attention is None:
            attention = self.attentions.of_shape(inputs["q"].shape[1], inputs["k"].shape[1], inputs["q"].shape[2])
        if self.cache is not None:
            return self.cache.attend(layer, attention, inputs, self.infos[layer])
        return attention(inputs, self.infos[layer])


def row_infos(masks: list[Mask], plan: ShardPlan, rank: int) -> tuple[RowInfo, ...]:
    """Make one RowInfo for each different mask object of the layers."""
    known: dict[int, RowInfo] = {}
    return tuple(known.setdefault(id(mask), RowInfo(mask, plan, rank)) for mask in masks)
