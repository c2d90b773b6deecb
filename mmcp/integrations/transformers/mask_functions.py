"""Turn the functions by which transformers describes a mask into our `Mask`, without writing out s x s pairs.

transformers composes a mask of small functions (batch, head, query, key) -> bool: `and_masks(sliding_window_overlay(4),
causal_mask_function)`. Each of them is known here by its name and read by its closure; what a composition leaves is

    causal   the pairs with key <= query inside a limit (documents, chunks, a window)
    blocks   the pairs inside one block, both ways, inside a limit

A function that is not known here is not guessed at: see `dense_masks`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import getclosurevars
from typing import Any

import numpy as np

from mmcp.masks import Mask
from mmcp.registry import Registry

MASK_FUNCTIONS = Registry("mask function")
NO_BLOCK = -1  # of a token that reads causally only


class Untranslatable(Exception):
    """A composition that is no `Mask`; says which part."""


@dataclass(frozen=True)
class Limit:
    """What an overlay leaves of all pairs: those in one group of each grouping, not further back than a window."""

    window: int = 0
    """Tokens a query sees looking back, itself included; 0: all."""
    groups: tuple[np.ndarray, ...] = ()
    """Each [s] int64: the group of each token."""

    def meet(self, other: "Limit") -> "Limit":
        """Leave what both leave."""
        windows = [window for window in (self.window, other.window) if window]
        return Limit(min(windows, default=0), self.groups + other.groups)

    def number(self, num_tokens: int) -> np.ndarray:
        """[s] int64: one number for each combination of groups, in the order of the tokens."""
        keys = np.stack([np.zeros(num_tokens, dtype=np.int64), *self.groups])
        return np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)


@dataclass(frozen=True)
class Reads:
    """What is read: causal pairs, both-ways blocks, or both."""

    causal: Limit | None = None
    blocks: np.ndarray | None = None
    """[s] int64: the block of each token, NO_BLOCK outside of blocks."""
    block_limit: Limit = Limit()


@dataclass
class Context:
    """Where a composition is read."""

    row: int
    """Number of the row in the batch."""
    index: np.ndarray
    """[s] int64: what the functions are asked about: token numbers, or positions where they have been remapped."""
    remapped: list[np.ndarray] = field(default_factory=list)
    """Each [s]: sequences inside which a remapping is meant to hold."""
    packed: list[np.ndarray] = field(default_factory=list)
    """Each [s]: sequences that the mask keeps apart."""

    def of_row(self, values: Any) -> np.ndarray:
        """Take this row of a [batch, ...] tensor."""
        return values[min(self.row, len(values) - 1)].detach().cpu().numpy()


Meaning = Limit | Reads


def mask_of_function(function: Callable, *, num_tokens: int, row: int = 0) -> Mask:
    """Read a composition of transformers' mask functions for one row of a batch.

    Raises Untranslatable, which names the function, for one that is unknown or whose composition is no `Mask`.
    """
    context = Context(row, np.arange(num_tokens))
    meaning = _read(function, context)
    kept = [group.tobytes() for group in context.packed]
    if any(group.tobytes() not in kept for group in context.remapped):
        raise Untranslatable("positions that start anew without a packed mask")
    return _as_mask(meaning, num_tokens)


def _read(function: Callable, context: Context) -> Meaning:
    name = getattr(function, "__qualname__", type(function).__name__)
    if getattr(function, "__module__", "") not in _HOMES or name not in MASK_FUNCTIONS:
        raise Untranslatable(f"{getattr(function, '__module__', '?')}.{name}")
    return MASK_FUNCTIONS[name](dict(getclosurevars(function).nonlocals), context)


_HOMES = ("transformers.masking_utils", "transformers.models.gemma3.modeling_gemma3")


@MASK_FUNCTIONS.register("causal_mask_function")
def _causal(_closure: dict[str, Any], _context: Context) -> Meaning:
    return Reads(causal=Limit())


@MASK_FUNCTIONS.register("bidirectional_mask_function")
def _everything(_closure: dict[str, Any], _context: Context) -> Meaning:
    return Limit()


@MASK_FUNCTIONS.register("sliding_window_overlay.<locals>.inner_mask")
def _window(closure: dict[str, Any], _context: Context) -> Meaning:
    return Limit(window=int(closure["sliding_window"]))


@MASK_FUNCTIONS.register("chunked_overlay.<locals>.inner_mask")
def _chunks(closure: dict[str, Any], context: Context) -> Meaning:
    start = int(context.of_row(closure["left_padding"]))
    return Limit(groups=((context.index - start) // int(closure["chunk_size"]),))


@MASK_FUNCTIONS.register("blockwise_overlay.<locals>.inner_mask")
def _blocks(closure: dict[str, Any], context: Context) -> Meaning:
    return Reads(blocks=context.of_row(closure["block_sequence_ids"])[context.index].astype(np.int64))


@MASK_FUNCTIONS.register("packed_sequence_mask_function.<locals>.inner_mask")
def _packed(closure: dict[str, Any], context: Context) -> Meaning:
    groups = context.of_row(closure["packed_sequence_mask"])[context.index].astype(np.int64)
    context.packed.append(groups)
    return Limit(groups=(groups,))


@MASK_FUNCTIONS.register("remap_positions_for_packed_sequence.<locals>.inner_mask")
def _remap(closure: dict[str, Any], context: Context) -> Meaning:
    positions = context.of_row(closure["position_ids"])[context.index].astype(np.int64)
    sequences = np.cumsum(np.diff(positions, prepend=positions[:1] - 1) != 1)
    context.remapped.append(sequences)
    return _read(closure["mask_function"], replace(context, index=positions))


@MASK_FUNCTIONS.register("and_masks.<locals>.and_mask")
def _all_of(closure: dict[str, Any], context: Context) -> Meaning:
    meaning: Meaning = Limit()
    for function in closure["mask_functions"]:
        meaning = _meet(meaning, _read(function, context))
    return meaning


@MASK_FUNCTIONS.register("or_masks.<locals>.or_mask")
def _any_of(closure: dict[str, Any], context: Context) -> Meaning:
    joined = Reads()
    for function in closure["mask_functions"]:
        joined = _join(joined, _as_reads(_read(function, context), len(context.index)))
    return joined


def _meet(one: Meaning, other: Meaning) -> Meaning:
    if isinstance(one, Limit) and isinstance(other, Limit):
        return one.meet(other)
    if isinstance(one, Limit):
        one, other = other, one
    assert isinstance(one, Reads)
    if isinstance(other, Limit):
        causal = None if one.causal is None else one.causal.meet(other)
        return Reads(causal, one.blocks, one.block_limit.meet(other))
    if one.causal and other.causal and one.blocks is None and other.blocks is None:
        return Reads(one.causal.meet(other.causal))
    raise Untranslatable("the intersection of two masks with both-ways blocks")


def _join(one: Reads, other: Reads) -> Reads:
    if (one.causal and other.causal) or (one.blocks is not None and other.blocks is not None):
        raise Untranslatable("the union of two causal or two both-ways masks")
    blocks = one if one.blocks is not None else other
    return Reads(one.causal or other.causal, blocks.blocks, blocks.block_limit)


def _as_reads(meaning: Meaning, num_tokens: int) -> Reads:
    """Read a bare overlay as what it leaves of all pairs: blocks, both ways."""
    if isinstance(meaning, Reads):
        return meaning
    if meaning.window:
        raise Untranslatable("a window that looks forward without end")
    return Reads(blocks=meaning.number(num_tokens))


def _as_mask(meaning: Meaning, num_tokens: int) -> Mask:
    reads = _as_reads(meaning, num_tokens)
    blocks = _runs_of_blocks(reads, num_tokens)
    if reads.causal is None:
        if blocks.size == 0 or int((blocks[:, 1] - blocks[:, 0]).sum()) != num_tokens or reads.block_limit.window:
            raise Untranslatable("both-ways blocks without a causal mask around them")
        return Mask(np.concatenate([blocks[:, 0], blocks[-1:, 1]]), blocks)
    bounds = _bounds(reads.causal.number(num_tokens), "documents or chunks")
    first, last = (np.searchsorted(bounds, side, "right") for side in (blocks[:, 0], blocks[:, 1] - 1))
    if not np.array_equal(first, last):
        raise Untranslatable("a both-ways block across two documents or chunks")
    window = reads.causal.window
    if len(blocks) and reads.block_limit.window not in (0, window):
        raise Untranslatable("both-ways blocks with a window of their own")
    return Mask(bounds, blocks).with_window(window, cuts_blocks=len(blocks) > 0 and reads.block_limit.window > 0)


def _runs_of_blocks(reads: Reads, num_tokens: int) -> np.ndarray:
    """[blocks, 2] int64: first and last + 1 token of each block."""
    if reads.blocks is None:
        return np.zeros((0, 2), dtype=np.int64)
    number = Limit(groups=(reads.blocks, *reads.block_limit.groups)).number(num_tokens)
    inside = reads.blocks >= 0
    bounds = _bounds(np.where(inside, number, NO_BLOCK), "a both-ways block", loose=NO_BLOCK)
    runs = np.stack([bounds[:-1], bounds[1:]], axis=1)
    return runs[inside[runs[:, 0]]] if len(runs) else runs


def _bounds(groups: np.ndarray, what: str, loose: int | None = None) -> np.ndarray:
    """First token of each run of equal numbers, then the number of tokens; no number but `loose` may come twice."""
    starts = np.flatnonzero(np.diff(groups, prepend=groups[:1] - 1)) if len(groups) else np.zeros(0, np.int64)
    numbers = groups[starts]
    tied = numbers[numbers != loose] if loose is not None else numbers
    if len(np.unique(tied)) != len(tied):
        raise Untranslatable(f"{what} in several pieces")
    return np.append(starts, len(groups)).astype(np.int64)
