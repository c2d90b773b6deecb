"""Closed-form pair counts against a dense mask built token by token from the segments.

Run: python -m pytest tests/sharding/test_pairs.py
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcp.masks import Mask
from mmcp.sharding.pairs import group_pairs, slowest_hops
from mmcp.sharding.ranges import as_ranges
from tests.sharding.rows import rows


def dense(sequence, window, sink=0):
    """Say for each query and key whether it may be read, from the definition of Segment.attends."""
    s, documents = sequence.num_tokens, sequence.documents
    firsts = {document: documents.tolist().index(document) for document in set(documents.tolist())}
    allowed = np.zeros((s, s), dtype=bool)
    for q in range(s):
        for k in range(q + 1):
            is_near = not window or k > q - window or k < firsts[documents[q]] + sink
            allowed[q, k] = documents[q] == documents[k] and is_near
    for unit, (start, stop) in enumerate(sequence.unit_ranges):
        if sequence.unit_segment(unit).attends == "both":
            allowed[start:stop, start:stop] = True
    for document in set(documents.tolist()):
        tokens = []
        for segment, start in zip(sequence.segments, sequence.offsets, strict=False):
            if segment.document == document and segment.num_tokens:
                if segment.attends != "prefix":
                    break
                tokens += range(start, start + segment.num_tokens)
        allowed[np.ix_(tokens, tokens)] = True
    return allowed


def check_counts(sequence, window, sink, groups, seed):
    owner = np.random.default_rng(seed).integers(0, groups, sequence.num_tokens)
    mask, sink = Mask.of(sequence), sink if window else 0
    mask, allowed = mask.with_window(window, sink), dense(sequence, window, sink)
    assert mask.pairs() == allowed.sum()
    counted = group_pairs(mask.slices, [as_ranges(np.flatnonzero(owner == group)) for group in range(groups)])
    for i in range(groups):
        for j in range(groups):
            assert counted[i, j] == allowed[np.ix_(owner == i, owner == j)].sum()


@settings(max_examples=60)
@given(rows(), st.integers(0, 9), st.integers(0, 3), st.integers(1, 4), st.integers(0, 2**31))
def test_counts_equal_the_dense_mask(sequence, window, sink, groups, seed):
    check_counts(sequence, window, sink, groups, seed)


@pytest.mark.full
@settings(max_examples=1500)
@given(rows(max_segments=12), st.integers(0, 9), st.integers(0, 3), st.integers(1, 5), st.integers(0, 2**31))
def test_many_counts_equal_the_dense_mask(sequence, window, sink, groups, seed):
    check_counts(sequence, window, sink, groups, seed)


def test_each_hop_waits_for_its_slowest_group():
    """Group 0 has 5 pairs of its own and 2 with group 1, group 1 has 3 and 7: hops of 5 and 7."""
    assert slowest_hops(np.array([[5, 2], [7, 3]])) == 5 + 7
