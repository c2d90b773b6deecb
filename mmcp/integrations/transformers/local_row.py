"""What the layers of a model are told of a row: one object for one forward, passed down as an argument."""

from dataclasses import dataclass

from torch import nn

from mmcp.attention.base import RowInfo
from mmcp.attention.softmax import Softmax, SoftmaxConfig
from mmcp.masks import Mask
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

    def info(self, layer: int) -> RowInfo:
        """Return what layer number `layer` is told."""
        return self.infos[layer]

    def attention(self, heads: int, kv_heads: int, head_dim: int) -> nn.Module:
        """Return the attention for a shape of heads."""
        return self.attentions.of_shape(heads, kv_heads, head_dim)


def row_infos(masks: list[Mask], plan: ShardPlan, rank: int) -> tuple[RowInfo, ...]:
    """Make one RowInfo for each different mask object of the layers."""
    known: dict[int, RowInfo] = {}
    return tuple(known.setdefault(id(mask), RowInfo(mask, plan, rank)) for mask in masks)
