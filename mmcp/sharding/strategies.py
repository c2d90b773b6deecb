"""Sharding strategies: one short function each, from a row and its costs to a plan."""

from typing import Protocol

import numpy as np

from mmcp.registry import Registry
from mmcp.sequence import TokenSequence
from mmcp.sharding.assign import assign_units
from mmcp.sharding.cost import RowCosts
from mmcp.sharding.plan import ShardPlan, schedule_calls
from mmcp.sharding.ranges import Ranges, as_ranges, by_rank, part_of, split, union


class Strategy(Protocol):
    """What STRATEGIES holds."""

    def __call__(self, sequence: TokenSequence, mesh: tuple[int, int], costs: RowCosts) -> ShardPlan:
        """Split `sequence` over a mesh of (ring, ulysses) ranks, ulysses innermost."""


STRATEGIES = Registry("sharding strategy")


@STRATEGIES.register("contiguous")
def contiguous(sequence: TokenSequence, mesh: tuple[int, int], costs: RowCosts) -> ShardPlan:
    """Cut the tokens into equal runs; a unit is encoded by the owner of its first token, a label scored by its owner.

    What most systems do: even in tokens, uneven in everything else.
    """
    tokens = split(((0, sequence.num_tokens),), num_ranks(mesh))
    return complete(
        sequence,
        mesh,
        costs,
        strategy="contiguous",
        tokens=tokens,
        encoders=part_of(tokens, sequence.unit_ranges[:, 0]),
        scorers=part_of(tokens, sequence.label_positions),
    )


@STRATEGIES.register("balanced")
def balanced(sequence: TokenSequence, mesh: tuple[int, int], costs: RowCosts) -> ShardPlan:
    """Even out tokens, encoding, decoding, memory and label rows at once; rows are routed from encoder to owner.

    Each ring group holds an early and a late run (zigzag), so that causal attention is even along the ring too.
    """
    ring, ulysses = mesh
    ranks = num_ranks(mesh)
    chunks = split(((0, sequence.num_tokens),), 2 * ring)
    groups = [union([chunks[index], chunks[2 * ring - 1 - index]]) for index in range(ring)]
    tokens = tuple(piece for group in groups for piece in split(group, ulysses))
    return complete(
        sequence,
        mesh,
        costs,
        strategy="balanced",
        tokens=tokens,
        encoders=assign_units(costs, ranks),
        scorers=even_scorers(part_of(tokens, sequence.label_positions), ranks),
    )


def num_ranks(mesh: tuple[int, int]) -> int:
    """Count the ranks of a mesh. Raises ValueError when an axis is below 1."""
    ring, ulysses = mesh
    if ring < 1 or ulysses < 1:
        raise ValueError(f"mesh ring={ring} ulysses={ulysses} has no rank; both must be at least 1")
    return ring * ulysses


def complete(
    sequence: TokenSequence,
    mesh: tuple[int, int],
    costs: RowCosts,
    *,
    strategy: str,
    tokens: tuple[Ranges, ...],
    encoders: np.ndarray,
    scorers: np.ndarray,
) -> ShardPlan:
    """Make the plan of a layout; each unit is decoded where it is encoded.

    tokens: per rank, the global positions it holds
    encoders: [u] int64  the rank that encodes each unit
    scorers: [labels] int64  the rank that computes the logits of each label row
    """
    ring, ulysses = mesh
    encode = by_rank(encoders, ring * ulysses)
    return ShardPlan(
        strategy=strategy,
        ring=ring,
        ulysses=ulysses,
        tokens=tokens,
        decode=encode,
        encode=encode,
        scored=by_rank(scorers, ring * ulysses),
        calls=tuple(schedule_calls(sequence, units, costs.model.call_tokens) for units in encode),
        unit_ranges=tuple(map(tuple, sequence.unit_ranges.tolist())),
        label_ranges=as_ranges(sequence.label_positions),
    )


def even_scorers(owners: np.ndarray, num_ranks: int) -> np.ndarray:
    """Give every rank an even share of the label rows, its own first: even_scorers([1, 1, 1, 1], 2) -> [1, 1, 0, 0].

    owners: [labels] int64  the rank that holds each label row
    Only rows beyond their owner's share move, so no other even split moves fewer.
    """
    held = np.bincount(owners, minlength=num_ranks)
    shares = np.full(num_ranks, len(owners) // num_ranks)
    shares[np.argsort(-held, kind="stable")[: len(owners) % num_ranks]] += 1
    order = np.argsort(owners, kind="stable")
    nth = np.empty_like(owners)
    nth[order] = np.arange(len(owners)) - np.repeat(np.cumsum(held) - held, held)
    scorers = owners.copy()
    scorers[nth >= shares[owners]] = np.repeat(np.arange(num_ranks), np.maximum(shares - held, 0))
    return scorers
