"""Bring each run of tokens the few tokens before it, wherever they lie, in one uneven differentiable exchange.

Two ring ranks in zigzag over 8 tokens of one document, halo of 2:

    rank 0 holds runs 0..2 and 6..8, gets 4 5 for the second       rank 1 holds run 2..6, gets 0 1
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mmcp.attention.base import HeadTensor
from mmcp.masks import Mask
from mmcp.parallel.collectives import Group, exchange_rows
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import Ranges, as_indices, part_of


@dataclass(frozen=True, eq=False)
class Halo:
    """The exchange as one ring rank sees it."""

    length: int
    """Tokens before a run that may be read."""
    num_runs: int
    sent: Tensor
    """[sent] int64: this rank's tokens, counted from 0, in the order in which they leave."""
    send_sizes: tuple[int, ...]
    """Per ring rank: tokens that go to it."""
    receive_sizes: tuple[int, ...]
    """Per ring rank: tokens that come from it."""
    places: Tensor
    """[received] int64: where each arrival belongs among the runs x length places."""
    moves: bool
    """Whether any ring rank receives anything."""

    def bring(self, inputs: dict[str, Tensor], tensors: Sequence[HeadTensor], group: Group) -> dict[str, Tensor]:
        """Return one [runs, its halo, heads, dim] for each tensor; 0 outside of its run's document.

        inputs: one [n, heads, dim] for each tensor   the tokens of this rank's runs
        """
        chosen = [tensor.name for tensor in tensors if tensor.halo]
        brought = {name: x.new_empty((self.num_runs, 0, *x.shape[1:])) for name, x in inputs.items()}
        if not chosen:
            return brought
        leaving = torch.cat([inputs[name].index_select(0, self.sent).flatten(1) for name in chosen], dim=1)
        if self.moves:
            leaving = exchange_rows(leaving, self.send_sizes, self.receive_sizes, group=group, name="halo")
        rows = leaving.new_zeros(self.num_runs * self.length, leaving.shape[1]).index_copy(0, self.places, leaving)
        columns = rows.split([inputs[name].shape[1:].numel() for name in chosen], dim=1)
        return brought | {
            name: column.unflatten(1, inputs[name].shape[1:]).unflatten(0, (self.num_runs, self.length))
            for name, column in zip(chosen, columns, strict=True)
        }


def halo_of(plan: ShardPlan, mask: Mask, ring_index: int, length: int, device: torch.device) -> Halo:
    """Plan the halos of one ring rank's runs."""
    groups = plan.group_tokens
    needed = [before_runs(mask, runs, length) for runs in groups]  # per ring rank: positions, places
    owners = [part_of(groups, positions) for positions, _ in needed]
    held = as_indices(groups[ring_index])
    sent = [
        np.searchsorted(held, positions[owner == ring_index])
        for (positions, _), owner in zip(needed, owners, strict=True)
    ]
    places = needed[ring_index][1]
    order = np.argsort(owners[ring_index], kind="stable")
    return Halo(
        length=length,
        num_runs=len(groups[ring_index]),
        sent=torch.from_numpy(np.concatenate(sent)).to(device),
        send_sizes=tuple(len(part) for part in sent),
        receive_sizes=tuple(np.bincount(owners[ring_index], minlength=len(groups)).tolist()),
        places=torch.from_numpy(places[order]).to(device),
        moves=any(len(positions) for positions, _ in needed),
    )


def before_runs(mask: Mask, runs: Ranges, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens before each run that are of its document, and their places among runs x length, [m] int64."""
    starts = np.array([start for start, _ in runs], dtype=np.int64)
    documents = mask.bounds[mask.documents[starts]]
    positions = starts[:, None] - length + np.arange(length)
    read = positions >= documents[:, None]
    return positions[read], np.flatnonzero(read)
