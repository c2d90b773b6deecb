"""What an attention layer moves between ranks, forward and backward: bytes received and collectives, in closed form.

A function of plan, mask and config alone; the recorder of `mmcp.parallel.collectives` counts the same, to the byte.
With n tokens here, s in the group, R ring ranks, w numbers of all inputs per token of this rank's heads (q, k, v), o of
its output, O of all heads' output, W of all heads' inputs as they are sent (key-value heads once per rank that reads
them), c = 2 k d numbers of this rank's keys and values, e bytes a number and E = max(e, 4):

    trading heads   forward  (s - n) w e + n (O - o) e        backward  n (W - w) e + (s - n) o e
    ring            forward  read c e                         backward  read c e + lent c E
    allgather       forward  (s - n) c e                      backward  (s - n) c e + (R - 1) n c E
    state           forward  runs (M + S) E + before t e      backward  runs S E + lent t e
    scan            forward  maps (M + S) E + sums S E + before t e      backward  the same with lent

For ring and later, n are the tokens of a rank's group and s those of the row; `read` are the keys of other groups that
this group's queries read, `lent` its own that others read, once per reader; `runs` the ranges of other groups, M and S
the numbers of a transition and of a state, of this rank's query heads; of the maps that a scan brings from other groups
`maps` are those with a transition and `sums` those without; `before` the tokens of other groups that a short
convolution reads before this group's runs, t its numbers per token.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from mmcp.attention.base import Attention, HeadShare, SoftmaxAttention, Variant, split_heads
from mmcp.masks import Mask, keys_of, restrict
from mmcp.parallel.collectives import Traffic
from mmcp.parallel.halo import before_runs
from mmcp.parallel.modes import MODES
from mmcp.parallel.state_passing import RunOrder
from mmcp.parallel.state_scan import hops_of
from mmcp.registry import Registry
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import part_of, size

Phases = dict[tuple[str, str], Traffic]
"""By (name of the exchange, phase), as the recorder books it; nothing that is 0 collectives."""

CROSSING = Registry("traffic between groups")
"""Name of a mode -> what it moves between ring ranks."""


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention layer and row, as one rank sees them."""

    core: Any
    plan: ShardPlan
    mask: Mask
    heads: HeadShare
    """Heads of this rank."""
    ring_index: int
    element: int
    """Bytes of a number of the inputs."""

    @property
    def wide(self) -> int:
        """Bytes of a number of partial results."""
        return max(self.element, 4)

    @property
    def tokens(self) -> list[int]:
        """Per ring rank: its tokens."""
        return [size(held) for held in self.plan.group_tokens]

    @property
    def keys_per_token(self) -> int:
        """Numbers of this rank's keys and values, per token."""
        return _numbers(self.core, self.heads, ("kv",))


def attention_traffic(
    variant: Variant,
    plan: ShardPlan,
    mask: Mask,
    *,
    rank: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    checkpointing: bool = False,
) -> Phases:
    """Say what one layer of `variant` costs `rank` of the plan on this row.

    checkpointing: the block keeps its input only, so that backward first runs its forward, and its exchanges, again;
        these are told apart, in a phase of their own
    Raises ValueError, as the layer does, when the variant's mode cannot be or some rank would get no head.
    """
    core, mode = variant.build(heads=heads, kv_heads=kv_heads, head_dim=head_dim), MODES[variant.mode]
    mode.check(core)
    ring_index, ulysses_index = divmod(rank, plan.ulysses)
    ranks = range(plan.ranks) if mode.is_flat else range(ring_index * plan.ulysses, (ring_index + 1) * plan.ulysses)
    shares = split_heads(heads, kv_heads, len(ranks))
    index = rank if mode.is_flat else ulysses_index
    phases = dict(_trading(core, plan, shares, ranks, index, element=dtype.itemsize, chunks=variant.chunks))
    layer = Layer(core, plan, mask, shares[index], ring_index, dtype.itemsize)
    if plan.ring > 1 and variant.mode in CROSSING:
        phases |= CROSSING[variant.mode](layer)
    if checkpointing:
        phases |= {
            (name, "recompute"): replace(traffic) for (name, phase), traffic in phases.items() if phase == "forward"
        }
    return {key: traffic for key, traffic in phases.items() if traffic.collectives}


def _trading(
    core: Attention,
    plan: ShardPlan,
    shares: tuple[HeadShare, ...],
    ranks: range,
    index: int,
    *,
    element: int,
    chunks: int,
) -> Iterator[tuple[tuple[str, str], Traffic]]:
    if len(ranks) == 1:
        return
    mine = plan.lengths[ranks[index]]
    others = sum(plan.lengths[rank] for rank in ranks) - mine
    inputs = [_numbers(core, share, ("query", "kv")) for share in shares]
    outputs = [len(share.query_heads) * core.out_dim for share in shares]
    there, back = sum(inputs) - inputs[index], sum(outputs) - outputs[index]
    yield ("ulysses inputs", "forward"), Traffic(chunks, others * inputs[index] * element)
    yield ("ulysses output", "forward"), Traffic(chunks, mine * back * element)
    yield ("ulysses output", "backward"), Traffic(chunks, others * outputs[index] * element)
    yield ("ulysses inputs", "backward"), Traffic(chunks, mine * there * element)


@CROSSING.register("ring")
def _ring(layer: Layer) -> Phases:
    core: SoftmaxAttention = layer.core
    plan, here, slices = layer.plan, layer.ring_index, core.visible(layer.mask).slices

    def keys(reader: int, owner: int) -> int:
        return size(keys_of(restrict(slices, plan.group_tokens[reader], plan.group_tokens[owner])))

    hops = [
        (keys(here, (here - step) % plan.ring), keys((here + step) % plan.ring, here)) for step in range(1, plan.ring)
    ]
    swaps = sum(read > 0 or lent > 0 for read, lent in hops)
    read, lent = (sum(column) * layer.keys_per_token for column in zip(*hops, strict=True))
    keys_traffic = Traffic(swaps, read * layer.element)
    return {
        ("ring keys", "forward"): keys_traffic,
        ("ring keys", "backward"): replace(keys_traffic),
        ("ring gradients", "backward"): Traffic(swaps, lent * layer.wide),
    }


@CROSSING.register("allgather")
def _allgather(layer: Layer) -> Phases:
    mine, total = layer.tokens[layer.ring_index], sum(layer.tokens)
    keys = Traffic(int(total > 0), (total - mine) * layer.keys_per_token * layer.element)
    back = (layer.plan.ring - 1) * mine * layer.keys_per_token * layer.wide
    return {
        ("gathered keys", "forward"): keys,
        ("gathered keys", "backward"): replace(keys),
        ("gathered gradients", "backward"): Traffic(1, back),
    }


@CROSSING.register("state")
def _state(layer: Layer) -> Phases:
    runs = [len(held) for held in layer.plan.group_tokens]
    others = sum(runs) - runs[layer.ring_index]
    transition, state = _state_numbers(layer)
    swaps = int(sum(runs) > 0)
    return _halo(layer) | {
        ("states", "forward"): Traffic(swaps, others * (transition + state) * layer.wide),
        ("states", "backward"): Traffic(swaps, others * state * layer.wide),
    }


@CROSSING.register("scan")
def _scan(layer: Layer) -> Phases:
    order = RunOrder.of(layer.plan, layer.ring_index)
    owners = [order.owner(run) for run in order.order]
    scans = {"forward": owners, "backward": owners[::-1]}
    return _halo(layer) | {("states", phase): _scan_traffic(layer, owners) for phase, owners in scans.items()}


def _scan_traffic(layer: Layer, owners: list[int]) -> Traffic:
    """owners: ring rank of each run, in the order of the scan."""
    (transition, state), here, traffic = _state_numbers(layer), layer.ring_index, Traffic()
    for hop in hops_of(len(owners)):
        moves = [move for move in hop if owners[move.source] != owners[move.target]]
        received = [move for move in moves if owners[move.target] == here]
        traffic.collectives += bool(received) or any(owners[move.source] == here for move in moves)
        traffic.bytes += sum(move.with_transition * transition + state for move in received) * layer.wide
    return traffic


def _state_numbers(layer: Layer) -> tuple[int, int]:
    """Numbers of a transition and of a state, of this rank's query heads."""
    core, heads = layer.core, len(layer.heads.query_heads)
    return heads * torch.Size(core.transition_dim).numel(), heads * core.state_dim[0] * core.state_dim[1]


def _halo(layer: Layer) -> Phases:
    """A short convolution's rows before each run: those read of other groups, and back the gradients of those lent."""
    tensors, count = layer.core.tensors, {"query": len(layer.heads.query_heads), "kv": len(layer.heads.kv_heads)}
    length = max(tensor.halo for tensor in tensors)
    row = sum(count[tensor.heads] * tensor.dim for tensor in tensors if tensor.halo) * layer.element
    needed = [before_runs(layer.mask, runs, length)[0] for runs in layer.plan.group_tokens]
    owners = [part_of(layer.plan.group_tokens, positions) for positions in needed]
    read = int((owners[layer.ring_index] != layer.ring_index).sum())
    lent = sum(int((of == layer.ring_index).sum()) for reader, of in enumerate(owners) if reader != layer.ring_index)
    moves = int(any(len(positions) for positions in needed))
    return {("halo", "forward"): Traffic(moves, read * row), ("halo", "backward"): Traffic(moves, lent * row)}


def _numbers(core: Attention, share: HeadShare, owners: tuple[str, ...]) -> int:
    """Numbers of a token in the tensors of a share's query or key-value heads."""
    count = {"query": len(share.query_heads), "kv": len(share.kv_heads)}
    return sum(count[tensor.heads] * tensor.dim for tensor in core.tensors if tensor.heads in owners)
