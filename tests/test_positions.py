"""Positions against a token-by-token count over drawn rows, and against transformers where it describes the same row.

Run: python -m pytest tests/test_positions.py
"""

import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from mmcp.positions import positions_1d, positions_mrope
from mmcp.sequence import Segment, TokenSequence, Unit, pack
from tests.sequences import draw_sequence


def counted(sequence: TokenSequence, tokens_per_second: Fraction) -> np.ndarray:
    """The rule of the module's docstring, one token at a time."""
    rows, base, document = [], 0, None
    for segment in sequence.segments:
        if segment.document != document:
            base, document = 0, segment.document
        if segment.kind == "text":
            rows += [(base + i,) * 3 for i in range(segment.num_tokens)]
            base += segment.num_tokens
        run = []
        for unit in segment.units:
            if segment.kind == "audio":
                rows += [(base + i,) * 3 for i in range(unit.num_tokens)]
                base += unit.num_tokens
                continue
            late = math.floor((unit.start - segment.units[0].start) * tokens_per_second)
            late = late if segment.kind == "video" else 0
            t, h, w = unit.grid
            run += [(base + late + i, base + j, base + k) for i in range(t) for j in range(h) for k in range(w)]
            if segment.kind == "image":
                rows, base, run = rows + run, 1 + max(max(row) for row in run), []
        if run:
            rows, base = rows + run, 1 + max(max(row) for row in run)
    return np.array(rows, dtype=np.int64).reshape(-1, 3).T


@pytest.mark.parametrize("seed", range(100))
def test_mrope_is_the_count(seed):
    rng = np.random.default_rng(seed)
    sequence = draw_sequence(rng, segments=int(rng.integers(0, 9)))
    rate = Fraction(int(rng.integers(1, 60)), 4)
    np.testing.assert_array_equal(positions_mrope(sequence, rate), counted(sequence, rate))


@pytest.mark.parametrize("seed", range(20))
def test_1d_restarts_in_each_document(seed):
    sequence = draw_sequence(np.random.default_rng(seed))
    expected, seen = [], {}
    for document in sequence.documents.tolist():
        expected.append(seen.setdefault(document, 0))
        seen[document] += 1
    np.testing.assert_array_equal(positions_1d(sequence), np.array(expected, dtype=np.int64).reshape(1, -1))


def test_packing_moves_no_position():
    rows = [draw_sequence(np.random.default_rng(seed), documents=1) for seed in range(4)]
    for positions in (positions_1d, positions_mrope):
        alone = np.concatenate([positions(row) for row in rows], axis=1)
        np.testing.assert_array_equal(positions(pack(rows)), alone)


def test_worked_example_of_the_docstring():
    image = Unit(num_tokens=4, start=Fraction(0), end=Fraction(0), grid=(1, 2, 2), size=(56, 56), items=())
    sequence = TokenSequence(
        (Segment(kind="text", ids=(7, 7)), Segment(kind="image", units=(image,)), Segment(kind="text", ids=(7,)))
    )
    expected = [[0, 1, 2, 2, 2, 2, 4], [0, 1, 2, 2, 3, 3, 4], [0, 1, 2, 3, 2, 3, 4]]
    assert positions_mrope(sequence).tolist() == expected


def video_between_texts(stamped: bool) -> tuple[TokenSequence, list[int]]:
    """Five groups of 4 x 6 rows, two seconds apart; `stamped`: a 3-token text before each. And 0 text, 2 video."""
    groups = [
        Unit(
            num_tokens=24, start=Fraction(2 * i), end=Fraction(2 * i + 2), grid=(1, 4, 6), size=(2, 112, 168), items=()
        )
        for i in range(5)
    ]
    segments = [Segment(kind="text", ids=(9,) * 4)]
    if stamped:
        for group in groups:
            segments += [Segment(kind="text", ids=(9,) * 3), Segment(kind="video", units=(group,))]
    else:
        segments.append(Segment(kind="video", units=tuple(groups)))
    segments.append(Segment(kind="text", ids=(9,) * 5))
    sequence = TokenSequence(tuple(segments))
    return sequence, np.where(sequence.ids == 9, 0, 2).tolist()


def test_stamped_groups_are_those_of_qwen3_vl():
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl")
    sequence, types = video_between_texts(stamped=True)
    config = SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2))
    model = SimpleNamespace(config=config)
    model.get_vision_position_ids = lambda *args, **kwargs: module.Qwen3VLModel.get_vision_position_ids(
        model, *args, **kwargs
    )
    positions, _ = module.Qwen3VLModel.get_rope_index(
        model,
        torch.zeros(1, sequence.num_tokens, dtype=torch.long),
        mm_token_type_ids=torch.tensor([types]),
        video_grid_thw=torch.tensor([[5, 8, 12]]),
    )
    np.testing.assert_array_equal(positions_mrope(sequence), positions[:, 0].numpy())


def test_video_in_one_segment_is_timed_as_in_qwen2_5_vl():
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    sequence, types = video_between_texts(stamped=False)
    vision = SimpleNamespace(spatial_merge_size=2, tokens_per_second=2)
    model = SimpleNamespace(config=SimpleNamespace(vision_config=vision))
    model.get_vision_position_ids = lambda *args, **kwargs: module.Qwen2_5_VLModel.get_vision_position_ids(
        model, *args, **kwargs
    )
    positions, _ = module.Qwen2_5_VLModel.get_rope_index(
        model,
        torch.zeros(1, sequence.num_tokens, dtype=torch.long),
        mm_token_type_ids=torch.tensor([types]),
        video_grid_thw=torch.tensor([[5, 8, 12]]),
        second_per_grid_ts=torch.tensor([2.0]),
    )
    ours, video_end = positions_mrope(sequence), 4 + 5 * 24
    np.testing.assert_array_equal(ours[:, :video_end], positions[:, 0, :video_end].numpy())
    assert ours[:, video_end].tolist() == [ours[:, :video_end].max() + 1] * 3


def test_an_hour_of_200k_tokens_ends_where_counting_does():
    units = [
        Unit(
            num_tokens=108,
            start=Fraction(2 * i),
            end=Fraction(2 * i + 2),
            grid=(1, 9, 12),
            size=(2, 252, 336),
            items=(),
        )
        for i in range(1800)
    ]
    segments = [s for u in units for s in (Segment(kind="text", ids=(1,) * 8), Segment(kind="video", units=(u,)))]
    sequence = TokenSequence(tuple(segments))
    positions = positions_mrope(sequence)
    assert positions.shape == (3, 208_800)
    base = 1799 * (8 + 12) + 8  # each group: 8 tokens of text, then 12 columns
    assert positions[:, -1].tolist() == [base, base + 8, base + 11]
