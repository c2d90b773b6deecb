"""Tiles against the dense mask: each pair once, no query of a tile without a key, counts that follow the mask.

Run: python -m pytest tests/attention/test_tiles.py
"""

import numpy as np
import pytest

from mmcp.attention.tiles import Tile, tile
from mmcp.masks import Mask
from tests.sequences import draw_sequence


def scatter(tiles: tuple[Tile, ...], num_tokens: int) -> np.ndarray:
    counts = np.zeros((num_tokens, num_tokens), dtype=int)
    for piece in tiles:
        allowed = np.ones((piece.q1 - piece.q0, piece.k1 - piece.k0), dtype=int)
        if piece.causal:
            allowed = np.tril(allowed)
        if piece.reversed:
            allowed = allowed[::-1, ::-1]
        assert allowed.size and allowed.any(axis=1).all() and allowed.any(axis=0).all()
        counts[piece.q0 : piece.q1, piece.k0 : piece.k1] += allowed
    return counts


@pytest.mark.parametrize("seed", range(100))
def test_tiles_hold_each_pair_once(seed):
    rng = np.random.default_rng(seed)
    sequence = draw_sequence(rng, segments=int(rng.integers(0, 14)))
    window = int(rng.integers(0, 12))
    mask = Mask.of(sequence).with_window(window, int(rng.integers(0, 4)) if window else 0)
    counts = scatter(tile(mask.slices).tiles, sequence.num_tokens)
    np.testing.assert_array_equal(counts, mask.dense().astype(int))


@pytest.mark.parametrize("seed", range(300))
def test_any_slice_can_be_tiled(seed):
    rng = np.random.default_rng(seed)
    q0, k0 = rng.integers(0, 10, 2)
    q1, k1 = q0 + rng.integers(1, 14), k0 + rng.integers(1, 14)
    lowest = int(rng.integers(-25, 20))
    piece = np.array([[q0, q1, k0, k1, lowest, lowest + rng.integers(0, 20)]])
    query, key = np.ogrid[:30, :30]
    inside = (q0 <= query) & (query < q1) & (k0 <= key) & (key < k1)
    expected = inside & (piece[0, 4] <= key - query) & (key - query <= piece[0, 5])
    np.testing.assert_array_equal(scatter(tile(piece).tiles, 30), expected.astype(int))


def test_packed_documents_are_one_call_each_and_merge_nothing():
    tiling = tile(Mask.causal([64] * 16).slices)
    assert len(tiling.tiles) == 16 and tiling.is_disjoint


def test_a_window_is_two_calls_per_width():
    tiling = tile(Mask.causal([1024]).with_window(128).slices)
    assert len(tiling.tiles) == 15 and not tiling.is_disjoint
