"""How even a plan is: what each rank does, and the slowest rank against the least that any plan must do.

Denominators are the least total work (each needed frame decoded once, each unit encoded once, each token and label
row once) divided by the ranks, never the plan's own mean: doing things twice never looks balanced.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmcp.sequence import KINDS, TokenSequence
from mmcp.sharding.attention_work import attention_work
from mmcp.sharding.cost import RowCosts
from mmcp.sharding.plan import ShardPlan
from mmcp.sharding.ranges import flat, overlapping, pieces, size

COSTS = ("decode", "encode", "linear", "attention", "labels", "memory")


@dataclass(frozen=True, kw_only=True)
class Balance:
    """What each rank of a plan does; lists have one entry per rank and hold exact integers."""

    by_modality: list[dict[str, int]]
    """Tokens held, by kind."""
    decode_ns: list[int]
    frames: list[int]
    """Video frames decoded."""
    encoder_flops: list[int]
    linear_flops: list[int]
    attention_flops: list[int]
    attention_ns: list[int]
    """Of attention, without waiting for other ranks."""
    label_rows: list[int]
    routed: list[list[int]]
    """[ranks][ranks]: embedding rows that rank i encodes and rank j holds."""
    bytes: list[int]
    fragments: list[int]
    """Token ranges."""
    imbalance: dict[str, float]
    """Per entry of COSTS: slowest rank / (least total / ranks); 1.0 when there is no such work."""
    compute_ns: int
    """Of the compute stages, each waiting for its slowest rank."""
    step_ns: int
    """Step time of the plan: decoding of the next batch beside the compute stages, each waiting for its slowest."""
    least_step_ns: int
    """The same with every stage at its least mean."""

    @cached_property
    def routed_rows(self) -> list[int]:
        """Per rank: embedding rows that leave it."""
        return [sum(row) - row[rank] for rank, row in enumerate(self.routed)]

    @property
    def makespan_ratio(self) -> float:
        return self.step_ns / self.least_step_ns if self.least_step_ns else 1.0


def balance(sequence: TokenSequence, plan: ShardPlan, costs: RowCosts) -> Balance:
    """Price a plan of `sequence`."""
    model, ranks = costs.model, plan.ranks
    decode_units, decoders = flat(plan.decode)
    encode_units, encoders = flat(plan.encode)
    decode_ns, frames = costs.decoding(decode_units, decoders, ranks)
    encoder_flops = _sum_by(encoders, costs.flops[encode_units], ranks)
    labels = [size(part) for part in plan.scored]
    resident = costs.resident(plan.decode, plan.lengths, labels).tolist()
    attention, attention_ns, slowest_attention_ns = attention_work(costs, plan.group_tokens, plan.ulysses)
    linear = [tokens * model.linear_flops for tokens in plan.lengths]
    work = {
        "decode": (decode_ns.tolist(), costs.least_decoding[0]),
        "encode": (encoder_flops.tolist(), int(costs.flops.sum())),
        "linear": (linear, costs.num_tokens * model.linear_flops),
        "attention": (attention, costs.total_attention_flops),
        "labels": (labels, costs.num_labels),
        "memory": (resident, costs.total_bytes),
    }
    stages = sum(model.ns(max(work[name][0]), name) for name in ("encode", "linear"))
    stages += model.ns(max(labels) * model.label_flops, "loss") + slowest_attention_ns
    return Balance(
        by_modality=_tokens_by_modality(sequence, plan),
        decode_ns=decode_ns.tolist(),
        frames=frames.tolist(),
        encoder_flops=encoder_flops.tolist(),
        linear_flops=linear,
        attention_flops=attention,
        attention_ns=attention_ns,
        label_rows=labels,
        routed=_routed(plan, encode_units, encoders),
        bytes=resident,
        fragments=[len(part) for part in plan.tokens],
        imbalance={name: _ratio(max(each), least, ranks) for name, (each, least) in work.items()},
        compute_ns=stages,
        step_ns=model.rates.step_ns(int(decode_ns.max()), stages),
        least_step_ns=costs.least_step_ns(ranks),
    )


def inspect_record(plan: ShardPlan, result: Balance, *, plan_ms: float) -> dict:
    """Return what `mmcp inspect --json` prints for one plan."""
    return {
        "tokens": plan.num_tokens,
        "ranks": plan.ranks,
        "strategy": plan.strategy,
        "per_rank": [
            {
                "rank": rank,
                "tokens": plan.lengths[rank],
                "by_modality": result.by_modality[rank],
                "decode_s": result.decode_ns[rank] / 1e9,
                "encoder_flops": result.encoder_flops[rank],
                "linear_flops": result.linear_flops[rank],
                "attention_flops": result.attention_flops[rank],
                "label_rows": result.label_rows[rank],
                "routed_rows": result.routed_rows[rank],
                "bytes": result.bytes[rank],
                "fragments": result.fragments[rank],
            }
            for rank in range(plan.ranks)
        ],
        "imbalance": result.imbalance,
        "makespan_ratio": result.makespan_ratio,
        "plan_ms": plan_ms,
        "digest": plan.digest,
    }


def _tokens_by_modality(sequence: TokenSequence, plan: ShardPlan) -> list[dict[str, int]]:
    """Count the tokens of each kind that each rank holds, from ranges alone."""
    starts, stops, owners = pieces(plan.tokens)
    bounds = sequence.offsets
    counts = {}
    for kind in KINDS:
        of_kind = [segment.num_tokens if segment.kind == kind else 0 for segment in sequence.segments]
        before = np.concatenate([[0], np.cumsum(of_kind, dtype=np.int64)])
        inside = _interpolate(stops, bounds, before) - _interpolate(starts, bounds, before)
        counts[kind] = _sum_by(owners, inside, plan.ranks)
    return [{kind: int(counts[kind][rank]) for kind in KINDS} for rank in range(plan.ranks)]


def _interpolate(positions: np.ndarray, bounds: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Tokens of a kind before each position: `before` counts them at the bounds of segments."""
    segment = np.searchsorted(bounds, positions, side="right") - 1
    following = np.minimum(segment + 1, len(bounds) - 1)
    return before[segment] + np.minimum(positions - bounds[segment], before[following] - before[segment])


def _routed(plan: ShardPlan, units: np.ndarray, ranks: np.ndarray) -> list[list[int]]:
    """Count the rows that rank i encodes and rank j uses, from ranges alone (see ShardPlan.encoder)."""
    starts, stops, owners = pieces(plan.tokens)
    bounds = np.array(plan.unit_ranges, dtype=np.int64).reshape(-1, 2)
    entry, piece = overlapping(starts, stops, *bounds[units].T)
    unit, maker, holder = units[entry], ranks[entry], owners[piece]
    first = np.full(len(bounds), plan.ranks, dtype=np.int64)
    np.minimum.at(first, units, ranks)
    makes_own = np.isin(unit * plan.ranks + holder, units * plan.ranks + ranks)
    is_used = (maker == holder) | ((maker == first[unit]) & ~makes_own)
    rows = np.minimum(stops[piece], bounds[unit, 1]) - np.maximum(starts[piece], bounds[unit, 0])
    counts = np.zeros((plan.ranks, plan.ranks), dtype=np.int64)
    np.add.at(counts, (maker[is_used], holder[is_used]), rows[is_used])
    return counts.tolist()


def _sum_by(ranks: np.ndarray, values: np.ndarray, num_ranks: int) -> np.ndarray:
    sums = np.zeros(num_ranks, dtype=np.int64)
    np.add.at(sums, ranks, values)
    return sums


def _ratio(most: int, least_total: int, num_ranks: int) -> float:
    return most * num_ranks / least_total if least_total else 1.0
