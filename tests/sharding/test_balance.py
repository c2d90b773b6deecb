"""The inspect record against a slow recount, token by token and frame by frame, from the definitions in DESIGN.md.

Run: python -m pytest tests/sharding/test_balance.py
"""

import json
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcp.sequence import KINDS
from mmcp.sharding.balance import COSTS, balance, inspect_record
from mmcp.sharding.cost import row_costs
from mmcp.sharding.ranges import as_indices
from mmcp.sharding.strategies import STRATEGIES
from tests.sharding.rows import MODEL, rows
from tests.sharding.test_pairs import dense

RATES = MODEL.rates


def slow_decode_ns(sequence, units):
    """Decode a set of units frame by frame: each frame once, a seek at each gap."""
    ns, needed = 0, {}
    for unit in units:
        segment, meta = sequence.unit_segment(unit), sequence.units[unit]
        pixels = prod(meta.native)
        if segment.kind == "image":
            ns += pixels * (RATES.image_ns_per_megapixel + RATES.convert_ns_per_megapixel) // 10**6
            continue
        each = RATES.packet_ns if segment.kind == "audio" else max(1, pixels * RATES.decode_ns_per_megapixel // 10**6)
        if segment.kind == "video":
            ns += len(meta.items) * pixels * RATES.convert_ns_per_megapixel // 10**6
        frames = needed.setdefault((segment.source, segment.stream), {})
        frames.update({frame: each for frame in range(*meta.decode)})
    for frames in needed.values():
        ns += sum(frames.values()) + RATES.seek_ns * sum(frame - 1 not in frames for frame in frames)
    return ns


def recount(sequence, plan):
    """Recount every per-rank number of the record."""
    kinds = [segment.kind for segment in sequence.segments for _ in range(segment.num_tokens)]
    allowed, per_rank, makers = dense(sequence, 0), [], {}
    for rank in range(plan.ranks):
        for unit in as_indices(plan.encode[rank]).tolist():
            for position in range(*sequence.unit_ranges[unit]):
                makers.setdefault(position, []).append(rank)
    sources = {p: int(plan.owner[p]) if plan.owner[p] in ranks else min(ranks) for p, ranks in makers.items()}
    for rank in range(plan.ranks):
        held = as_indices(plan.tokens[rank])
        encoded = as_indices(plan.encode[rank]).tolist()
        group, member = divmod(rank, plan.ulysses)
        queries = as_indices(plan.group_tokens[group])
        heads = (member + 1) * 4 // plan.ulysses - member * 4 // plan.ulysses
        per_rank.append(
            {
                "rank": rank,
                "tokens": len(held),
                "by_modality": {kind: sum(kinds[position] == kind for position in held) for kind in KINDS},
                "decode_s": slow_decode_ns(sequence, as_indices(plan.decode[rank]).tolist()) / 1e9,
                "encoder_flops": sum(7 * prod(sequence.units[unit].size) + 3 for unit in encoded),
                "linear_flops": 11_000 * len(held),
                "attention_flops": heads * (2 * 64 * int(allowed[queries].sum()) + 900 * len(queries)),
                "label_rows": len(as_indices(plan.scored[rank])),
                "routed_rows": sum(int(plan.owner[p] != rank) for p, source in sources.items() if source == rank),
                "bytes": sum(5 * prod(sequence.units[unit].size) for unit in encoded)
                + 640 * len(held)
                + 128 * len(as_indices(plan.scored[rank])),
                "fragments": sum(np.diff(held, prepend=-2) != 1) if len(held) else 0,
            }
        )
    return per_rank


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@settings(max_examples=60)
@given(sequence=rows(), mesh=st.sampled_from([(1, 1), (1, 3), (2, 2), (3, 1)]))
def test_record_equals_a_recount(name, sequence, mesh):
    costs = row_costs(sequence, MODEL)
    plan = STRATEGIES[name](sequence, mesh, costs)
    record = inspect_record(plan, balance(sequence, plan, costs), plan_ms=1.5)
    expected = recount(sequence, plan)
    assert record["per_rank"] == expected
    json.dumps(record, allow_nan=False)

    units, labels = range(len(sequence.units)), len(sequence.label_positions)
    least = {
        "decode": (slow_decode_ns(sequence, units) / 1e9, "decode_s"),
        "encode": (sum(7 * prod(sequence.units[unit].size) + 3 for unit in units), "encoder_flops"),
        "linear": (11_000 * sequence.num_tokens, "linear_flops"),
        "attention": (4 * (128 * int(dense(sequence, 0).sum()) + 900 * sequence.num_tokens), "attention_flops"),
        "labels": (labels, "label_rows"),
        "memory": (
            sum(5 * prod(sequence.units[unit].size) for unit in units) + 640 * sequence.num_tokens + 128 * labels,
            "bytes",
        ),
    }
    assert set(record["imbalance"]) == set(COSTS) == set(least)
    for cost, (total, field) in least.items():
        slowest = max(entry[field] for entry in expected)
        assert record["imbalance"][cost] == pytest.approx(slowest * plan.ranks / total if total else 1.0, rel=1e-12)
    assert record["makespan_ratio"] == pytest.approx(slow_makespan(sequence, plan, expected, least), rel=1e-6)


def slow_makespan(sequence, plan, per_rank, least):
    """Step time over least step time in seconds, from the definition; ring hops counted pair by pair."""
    second = 3 / RATES.flops_per_second
    allowed, ring = dense(sequence, 0), plan.ring
    groups = [as_indices(group) for group in plan.group_tokens]
    hops = sum(
        max(int(allowed[np.ix_(groups[i], groups[(i - hop) % ring])].sum()) for i in range(ring)) for hop in range(ring)
    )
    heads = -(-4 // plan.ulysses)
    compute = max(entry["encoder_flops"] for entry in per_rank) + max(entry["linear_flops"] for entry in per_rank)
    compute += 50_000 * max(entry["label_rows"] for entry in per_rank)
    compute += heads * (128 * hops + 900 * max(len(group) for group in groups))
    total = least["encode"][0] + least["linear"][0] + least["attention"][0] + 50_000 * least["labels"][0]
    step = max(max(entry["decode_s"] for entry in per_rank), compute * second)
    return step / max(least["decode"][0] / plan.ranks, total * second / plan.ranks) if total else 1.0
