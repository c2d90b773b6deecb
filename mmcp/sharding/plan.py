"""Which rank decodes, encodes, holds and scores what, and the way back. Index algebra only."""

import hashlib
import json
from dataclasses import asdict, dataclass
from functools import cached_property

import numpy as np

from mmcp.sequence import TokenSequence
from mmcp.sharding.ranges import Ranges, as_indices, as_ranges, expand, flat, size, union


@dataclass(frozen=True)
class ShardPlan:
    """One row split over the context-parallel ranks of one group; the same bytes on every rank.

    Ranks are numbered ring-major: rank = ring_index * ulysses + ulysses_index (ulysses innermost).
    Only ranges are stored; index arrays are derived when asked for. Ranges ascend, so a rank holds its tokens in
    sequence order.

    Zigzag, 8 tokens on 2 ranks:   tokens = ((0, 2), (6, 8)), ((2, 6),)
        order   0 1 6 7 | 2 3 4 5      global position of each slot, rank by rank
        inverse 0 1 4 5 6 7 2 3        slot of each global position
    """

    strategy: str
    """Name of the sharding strategy that made it."""
    ring: int
    """Ranks along the ring axis."""
    ulysses: int
    """Ranks along the Ulysses axis."""
    tokens: tuple[Ranges, ...]
    """Per rank: global positions it holds; together each position once."""
    decode: tuple[Ranges, ...]
    """Per rank: numbers of the units it decodes; a unit may be decoded on several ranks."""
    encode: tuple[Ranges, ...]
    """Per rank: numbers of the units it encodes; together each unit at least once, each among those the rank decodes.
    Of a unit encoded on several ranks (see `encoder`) the other rows are made in vain."""
    scored: tuple[Ranges, ...]
    """Per rank: numbers of the label rows whose logits it computes (0 is the first label of the row)."""
    calls: tuple[tuple[tuple[str, Ranges], ...], ...]
    """Per rank: its encoder calls in order, each (kind, numbers of the units encoded together)."""
    unit_ranges: Ranges
    """Per unit: first and last + 1 global position of its rows."""
    label_ranges: Ranges
    """Global positions that carry a label."""

    def __post_init__(self):
        ranks = self.ring * self.ulysses
        for name in ("tokens", "decode", "encode", "scored", "calls"):
            if len(getattr(self, name)) != ranks:
                raise ValueError(
                    f"{name} has {len(getattr(self, name))} entries for {self.ring} x {self.ulysses} ranks"
                )

    @property
    def ranks(self) -> int:
        return self.ring * self.ulysses

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Per rank: how many tokens it holds."""
        return tuple(size(ranges) for ranges in self.tokens)

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @cached_property
    def encoder(self) -> np.ndarray:
        """[s] int64: the rank whose encoder row a position takes, -1 where no unit lies.

        The holder's own row where it encodes the unit, else that of the first rank that does.
        """
        encoder = np.full(self.num_tokens, -1, dtype=np.int64)
        made = [self.unit_positions(rank) for rank in range(self.ranks)]
        for rank in reversed(range(self.ranks)):
            encoder[made[rank]] = rank
        for rank, positions in enumerate(made):
            encoder[positions[self.owner[positions] == rank]] = rank
        return encoder

    @property
    def num_labels(self) -> int:
        return size(self.label_ranges)

    @cached_property
    def order(self) -> np.ndarray:
        """[s] int64: global position of each slot; slots run rank by rank."""
        return np.concatenate([as_indices(ranges) for ranges in self.tokens])

    @cached_property
    def inverse(self) -> np.ndarray:
        """[s] int64: slot of each global position."""
        inverse = np.empty_like(self.order)
        inverse[self.order] = np.arange(len(self.order))
        return inverse

    @cached_property
    def owner(self) -> np.ndarray:
        """[s] int64: the rank that holds each global position."""
        owner = np.empty(self.num_tokens, dtype=np.int64)
        owner[self.order] = np.repeat(np.arange(self.ranks), self.lengths)
        return owner

    @cached_property
    def group_tokens(self) -> tuple[Ranges, ...]:
        """Per ring index: the tokens its ulysses group holds together, in global order."""
        u = self.ulysses
        return tuple(union(self.tokens[i * u : (i + 1) * u]) for i in range(self.ring))

    def positions(self, rank: int) -> np.ndarray:
        """[s/cp] int64: the global positions `rank` holds, ascending."""
        return as_indices(self.tokens[rank])

    def local(self, rank: int, positions: np.ndarray) -> np.ndarray:
        """Turn global positions held by `rank` into indices of its own [s/cp] tokens."""
        return self.inverse[positions] - sum(self.lengths[:rank])

    def unit_positions(self, rank: int) -> np.ndarray:
        """[n_r] int64: global position of each row that `rank` encodes, in the order of its encoder calls."""
        units = [as_indices(ranges) for _, ranges in self.calls[rank]]
        bounds = np.array(self.unit_ranges, dtype=np.int64).reshape(-1, 2)
        return expand(bounds[np.concatenate(units)]) if units else np.zeros(0, dtype=np.int64)

    @cached_property
    def label_positions(self) -> np.ndarray:
        """[labels] int64: global positions that carry a label, ascending."""
        return as_indices(self.label_ranges)

    @cached_property
    def scorer(self) -> np.ndarray:
        """[labels] int64: the rank that computes the logits of each label row."""
        scorer = np.empty(self.num_labels, dtype=np.int64)
        for rank, ranges in enumerate(self.scored):
            scorer[as_indices(ranges)] = rank
        return scorer

    def num_calls(self, kind: str) -> int:
        """Encoder calls of `kind` that every rank makes: the most any rank needs (the others add empty ones)."""
        return max(sum(call_kind == kind for call_kind, _ in calls) for calls in self.calls)

    def to_json(self) -> str:
        """Return the canonical JSON text: sorted keys, no spaces."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @staticmethod
    def from_json(text: str) -> "ShardPlan":
        """Rebuild a plan from `to_json`."""
        return ShardPlan(**{key: _as_tuples(value) for key, value in json.loads(text).items()})

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits of the SHA-256 of `to_json`; equal plans have equal digests on every machine."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]


def check(plan: ShardPlan, sequence: TokenSequence) -> None:
    """Raise AssertionError unless `plan` covers `sequence` exactly; tests call it on every plan made."""
    s, units, labels = sequence.num_tokens, len(sequence.units), len(sequence.label_positions)
    assert np.array_equal(np.sort(plan.order), np.arange(s)), "each token must be on exactly one rank"
    encoded, _ = flat(plan.encode)
    assert np.array_equal(np.unique(encoded), np.arange(units)), "each unit must be encoded on some rank"
    _check_partition(plan.scored, labels, "label row scored")
    assert plan.unit_ranges == tuple(map(tuple, sequence.unit_ranges.tolist())), "unit ranges differ from the row's"
    assert np.array_equal(plan.label_positions, sequence.label_positions), "label positions differ from the row's"
    for rank in range(plan.ranks):
        called = [unit for _, ranges in plan.calls[rank] for unit in as_indices(ranges).tolist()]
        assert sorted(called) == as_indices(plan.encode[rank]).tolist(), f"rank {rank}: calls differ from encode"
        missing = set(called) - set(as_indices(plan.decode[rank]).tolist())
        assert not missing, f"rank {rank} encodes units {sorted(missing)} that it does not decode"
        for kind, ranges in plan.calls[rank]:
            kinds = {sequence.unit_segment(unit).kind for unit in as_indices(ranges)}
            sizes = {sequence.units[unit].size for unit in as_indices(ranges)}
            assert kinds == {kind} and len(sizes) == 1, f"rank {rank}: one {kind} call mixes {kinds} of sizes {sizes}"


def schedule_calls(sequence: TokenSequence, encode: Ranges, max_tokens: int) -> tuple[tuple[str, Ranges], ...]:
    """Group one rank's units into encoder calls: same kind and size, at most `max_tokens` rows (or one unit) a call.

    The order of calls is fixed by the metadata: kinds by name, then sizes, then unit numbers.
    """
    units = as_indices(encode)
    units = units[np.argsort(sequence.unit_sizes[units], kind="stable")]
    calls = []
    for group in np.split(units, np.flatnonzero(np.diff(sequence.unit_sizes[units])) + 1):
        if not len(group):
            continue
        kind, rows = sequence.unit_segment(group[0]).kind, sequence.units[group[0]].num_tokens
        per_call = max(1, max_tokens // max(1, rows))
        calls += [(kind, as_ranges(group[first : first + per_call])) for first in range(0, len(group), per_call)]
    return tuple(calls)


def _check_partition(parts: tuple[Ranges, ...], total: int, what: str) -> None:
    seen = np.sort(np.concatenate([as_indices(part) for part in parts]))
    assert np.array_equal(seen, np.arange(total)), f"each {what} must be on exactly one rank"


def _as_tuples(value):
    return tuple(_as_tuples(item) for item in value) if isinstance(value, list) else value
