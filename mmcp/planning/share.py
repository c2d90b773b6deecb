"""What one rank has of one row: counted from a plan, or an even part of a row that has no plan yet."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mmcp.attention.base import HeadShare, split_heads
from mmcp.parallel.modes import Mode
from mmcp.sequence import NO_ID, TokenSequence
from mmcp.sharding.cost import RowCosts
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import as_indices, size

UnitBytes = Mapping[str, Callable[[tuple[int, ...]], int]]
"""By kind: bytes of one decoded unit of a size."""


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """One rank's part of one row."""

    ring: int
    ulysses: int
    ring_index: int
    ulysses_index: int
    row_tokens: int
    tokens: int
    """Tokens held here, s/cp."""
    text_tokens: int
    """Of these, text."""
    runs: tuple[int, ...]
    """Lengths of the token ranges of this rank's ulysses group."""
    row_runs: int
    """Token ranges of all ulysses groups."""
    labels: int
    """Label rows scored here."""
    encoder_flops: int = 0
    """Forward FLOPs of the units encoded here."""
    encoder_bytes: int = 0
    """What encoding them keeps for backward."""
    media_bytes: int = 0
    """Decoded units of this rank."""

    @property
    def cp(self) -> int:
        return self.ring * self.ulysses

    @property
    def group_tokens(self) -> int:
        """Tokens of this rank's ulysses group."""
        return sum(self.runs)


def share_of(
    sequence: TokenSequence, plan: ShardPlan, costs: RowCosts, *, rank: int, unit_bytes: UnitBytes
) -> RankShare:
    """Count what `rank` of a plan has."""
    ring_index, ulysses_index = divmod(rank, plan.ulysses)
    groups = plan.group_tokens
    units = as_indices(plan.encode[rank])
    decoded = [
        unit_bytes[sequence.unit_segment(unit).kind](sequence.units[unit].size)
        for unit in as_indices(plan.decode[rank]).tolist()
    ]
    return RankShare(
        ring=plan.ring,
        ulysses=plan.ulysses,
        ring_index=ring_index,
        ulysses_index=ulysses_index,
        row_tokens=plan.num_tokens,
        tokens=plan.lengths[rank],
        text_tokens=int((sequence.ids[plan.positions(rank)] != NO_ID).sum()),
        runs=tuple(stop - start for start, stop in groups[ring_index]),
        row_runs=sum(map(len, groups)),
        labels=size(plan.scored[rank]),
        encoder_flops=int(costs.flops[units].sum()),
        encoder_bytes=int(costs.bytes[units].sum()),
        media_bytes=sum(decoded),
    )


@dataclass(frozen=True, kw_only=True)
class RowLoad:
    """What one row brings, whoever holds it."""

    tokens: int
    labels: int
    media_rows: int = 0
    """Tokens whose rows encoders make."""
    encoder_flops: int = 0
    encoder_bytes: int = 0
    media_bytes: int = 0
    decode_ns: int = 0
    """Nanoseconds of one decoder."""


def load_of(sequence: TokenSequence, costs: RowCosts, *, unit_bytes: UnitBytes) -> RowLoad:
    """Count what a row brings."""
    decoded = sum(unit_bytes[segment.kind](unit.size) for segment in sequence.segments for unit in segment.units)
    return RowLoad(
        tokens=sequence.num_tokens,
        labels=costs.num_labels,
        media_rows=int(costs.rows.sum()),
        encoder_flops=int(costs.flops.sum()),
        encoder_bytes=int(costs.bytes.sum()),
        media_bytes=decoded,
        decode_ns=costs.least_decoding[0],
    )


def even_share(load: RowLoad, *, ring: int, ulysses: int) -> RankShare:
    """Give the last rank, which has the most heads, an even part, rounded up, of a row laid out in zigzag."""
    ranks = ring * ulysses

    def part(total: int) -> int:
        return -(-total // ranks)

    run = -(-load.tokens // (2 * ring))
    return RankShare(
        ring=ring,
        ulysses=ulysses,
        ring_index=ring - 1,
        ulysses_index=ulysses - 1,
        row_tokens=load.tokens,
        tokens=part(load.tokens),
        text_tokens=part(load.tokens - load.media_rows),
        runs=(run, run) if ring > 1 else (load.tokens,),
        row_runs=2 * ring - 1 if ring > 1 else 1,
        labels=part(load.labels),
        encoder_flops=part(load.encoder_flops),
        encoder_bytes=part(load.encoder_bytes),
        media_bytes=part(load.media_bytes),
    )


def heads_of(share: RankShare, mode: Mode, *, heads: int, kv_heads: int) -> HeadShare:
    """Return the heads that a rank has after its group has traded. Raises ValueError when some rank gets none."""
    ranks = share.cp if mode.is_flat else share.ulysses
    index = share.ring_index * share.ulysses + share.ulysses_index if mode.is_flat else share.ulysses_index
    return split_heads(heads, kv_heads, ranks)[index]
