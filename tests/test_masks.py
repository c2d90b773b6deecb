"""Slices against the dense mask they must equal, and the dense mask against the rule written pair by pair.

Run: python -m pytest tests/test_masks.py
"""

import numpy as np
import pytest

from mmcp.masks import Mask, count_pairs, join, keys_of, renumber, restrict
from mmcp.sequence import Segment, TokenSequence, pack
from mmcp.sharding.ranges import as_indices, as_ranges
from tests.sequences import draw_sequence, draw_unit

SEEDS = range(150)


def scatter(slices: np.ndarray, num_tokens: int) -> np.ndarray:
    """[s, s] int: how many slices hold each pair."""
    counts = np.zeros((num_tokens, num_tokens), dtype=int)
    for q0, q1, k0, k1, lowest, highest in slices:
        assert 0 <= q0 < q1 <= num_tokens and 0 <= k0 < k1 <= num_tokens
        query, key = np.ogrid[q0:q1, k0:k1]
        counts[q0:q1, k0:k1] += (lowest <= key - query) & (key - query <= highest)
    return counts


def drawn_mask(seed: int) -> tuple[TokenSequence, Mask]:
    rng = np.random.default_rng(seed)
    sequence = draw_sequence(rng, segments=int(rng.integers(0, 9)))
    window = int(rng.integers(0, 8))
    sink = int(rng.integers(0, 4)) if window else 0
    return sequence, Mask.of(sequence).with_window(window, sink, cuts_blocks=bool(rng.integers(0, 2)))


@pytest.mark.parametrize("seed", SEEDS)
def test_slices_hold_each_pair_of_the_dense_mask_once(seed):
    sequence, mask = drawn_mask(seed)
    counts = scatter(mask.slices, sequence.num_tokens)
    np.testing.assert_array_equal(counts, mask.dense().astype(int))
    assert mask.pairs() == counts.sum()
    assert (count_pairs(mask.slices) > 0).all()


def may_read(sequence: TokenSequence, mask: Mask, query: int, key: int) -> bool:
    """The rule of the module's docstring, from the segments, one pair at a time."""
    documents = sequence.documents
    if documents[query] != documents[key]:
        return False
    start = int(np.flatnonzero(documents == documents[query])[0])
    near = not mask.window or query - key < mask.window or key - start < mask.sink
    if key <= query and near:
        return True
    if mask.window_cuts_blocks and not near:
        return False
    unit = next(((a, b) for a, b in sequence.unit_ranges if a <= query < b), (0, 0))
    segment_of = sequence.per_token(np.arange(len(sequence.segments)))
    attends = [sequence.segments[i].attends for i in segment_of]
    if attends[query] == "both" and unit[0] <= key < unit[1]:
        return True
    return all(attends[i] == "prefix" for i in range(start, max(query, key) + 1))


@pytest.mark.parametrize("seed", SEEDS[:60])
def test_dense_mask_is_the_rule(seed):
    sequence, mask = drawn_mask(seed)
    s = sequence.num_tokens
    expected = [[may_read(sequence, mask, query, key) for key in range(s)] for query in range(s)]
    np.testing.assert_array_equal(mask.dense(), np.array(expected, dtype=bool).reshape(s, s))


def test_worked_examples_of_the_docstring():
    assert Mask.causal([3, 3]).dense().astype(int).tolist()[4] == [0, 0, 0, 1, 1, 0]
    window = Mask.causal([5]).with_window(2, 1).dense().astype(int).tolist()
    assert window[2:] == [[1, 1, 1, 0, 0], [1, 0, 1, 1, 0], [1, 0, 0, 1, 1]]


def test_cost_follows_the_mask():
    one, packed = Mask.causal([16 * 64]), Mask.causal([64] * 16)
    assert len(packed.slices) == 16
    assert packed.pairs() == 16 * 64 * 65 // 2
    assert one.pairs() == 1024 * 1025 // 2


def test_packing_keeps_prefixes_of_neighbouring_documents_apart():
    prefix = TokenSequence((Segment(kind="text", ids=(1, 2), attends="prefix"),))
    np.testing.assert_array_equal(Mask.of(pack([prefix, prefix])).blocks, [[0, 2], [2, 4]])


def test_what_cannot_be_meant_is_refused():
    with pytest.raises(ValueError, match="sink=2 without a window"):
        Mask.causal([4]).with_window(0, 2)
    with pytest.raises(ValueError, match="'sideways', which is unknown"):
        Mask.of(TokenSequence((Segment(kind="text", ids=(1,), attends="sideways"),)))
    with pytest.raises(ValueError, match="no units"):
        Mask.of(TokenSequence((Segment(kind="text", ids=(1,), attends="both"),)))


def test_an_hour_is_described_in_milliseconds():
    rng = np.random.default_rng(0)
    units = tuple(draw_unit(rng, kind="video", start=i) for i in range(1800))
    mask = Mask.of(TokenSequence((Segment(kind="video", units=units, attends="both"),)))
    assert mask.pairs() > 0 and len(mask.slices) <= 1801


@pytest.mark.parametrize("seed", SEEDS)
def test_a_restricted_mask_is_the_dense_one_of_those_queries_and_keys(seed):
    rng = np.random.default_rng(seed)
    sequence, mask = drawn_mask(seed)
    chosen = [np.flatnonzero(rng.random(sequence.num_tokens) < share) for share in rng.choice([0.1, 0.5, 1.0], 2)]
    queries, keys = map(as_ranges, chosen)
    dense = mask.dense()[np.ix_(*chosen)]
    pieces = restrict(mask.slices, queries, keys)
    assert as_indices(keys_of(pieces)).tolist() == chosen[1][dense.any(axis=0)].tolist()
    numbered = renumber(pieces, queries, keys)
    for form in (numbered, join(numbered)):
        counts = np.zeros(dense.shape, dtype=int)
        for q0, q1, k0, k1, lowest, highest in form:
            query, key = np.ogrid[q0:q1, k0:k1]
            inside = (lowest <= key - query) & (key - query <= highest)
            assert inside.any(axis=1).all() and inside.any(axis=0).all()
            counts[q0:q1, k0:k1] += inside
        np.testing.assert_array_equal(counts, dense.astype(int))


def test_scattered_tokens_make_one_rectangle_of_keys_for_each_run_of_queries():
    even, odd = (tuple((i, i + 1) for i in range(start, 64, 2)) for start in (0, 1))
    pieces = renumber(restrict(Mask.causal([64]).slices, odd, even), odd, even)
    assert (len(pieces), len(join(pieces))) == (32 * 33 // 2, 32)
