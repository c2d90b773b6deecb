"""Closed-form pair counts against a dense mask built token by token.

Run: python -m pytest tests/sharding/test_pairs.py
"""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mmcp.sharding.pairs import bands, group_pairs, total_pairs, within_window
from mmcp.sharding.ranges import as_ranges
from tests.sharding.rows import rows


def dense(sequence, window):
    """Say for each query and key whether it may be read, from the definition of Segment.attends."""
    s, documents = sequence.num_tokens, sequence.documents
    allowed = np.zeros((s, s), dtype=bool)
    for q in range(s):
        for k in range(q + 1):
            allowed[q, k] = documents[q] == documents[k] and (not window or k > q - window)
    for unit, (start, stop) in enumerate(sequence.unit_ranges):
        if sequence.unit_segment(unit).attends == "both":
            allowed[start:stop, start:stop] |= ~np.tri(stop - start, dtype=bool)
    for document in set(documents.tolist()):
        tokens = []
        for segment, start in zip(sequence.segments, sequence.offsets, strict=False):
            if segment.document == document:
                if segment.attends != "prefix":
                    break
                tokens += range(start, start + segment.num_tokens)
        for q in tokens:
            allowed[q, [k for k in tokens if k > q]] = True
    return allowed


@settings(max_examples=60)
@given(rows(), st.integers(0, 9), st.integers(1, 4), st.integers(0, 2**31))
def test_counts_equal_the_dense_mask(sequence, window, groups, seed):
    owner = np.random.default_rng(seed).integers(0, groups, sequence.num_tokens)
    mask = within_window(bands(sequence), window)
    allowed = dense(sequence, window)
    assert total_pairs(mask) == allowed.sum()
    counted = group_pairs(mask, [as_ranges(np.flatnonzero(owner == group)) for group in range(groups)])
    for i in range(groups):
        for j in range(groups):
            assert counted[i, j] == allowed[np.ix_(owner == i, owner == j)].sum()
