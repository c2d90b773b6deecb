"""Positions against a token-by-token count over drawn rows, and against transformers where it describes the same row.

Run: python -m pytest tests/test_positions.py
"""

import math
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest

from mmcp.positions import positions_1d, positions_mrope, positions_time_aligned
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


def omni(name: str):
    """Return transformers' get_rope_index of an Omni model, bound to the numbers it reads."""
    torch = pytest.importorskip("torch")
    module = pytest.importorskip(f"transformers.models.{name}.modeling_{name}")
    classes = {"qwen2_5_omni": "Qwen2_5Omni", "qwen3_omni_moe": "Qwen3OmniMoe"}
    theirs = getattr(module, f"{classes[name]}PreTrainedModelForConditionalGeneration")
    rate = {"qwen2_5_omni": 25, "qwen3_omni_moe": 13}[name]
    config = SimpleNamespace(
        image_token_id=101, video_token_id=102, audio_token_id=103, vision_start_token_id=104,
        audio_start_token_id=105, position_id_per_seconds=rate, seconds_per_chunk=2,
        audio_config=SimpleNamespace(n_window=50),
    )  # fmt: skip
    model = SimpleNamespace(config=config, spatial_merge_size=2)
    for method in ("get_llm_pos_ids_for_vision", "get_chunked_index"):
        if hasattr(theirs, method):
            setattr(model, method, lambda *a, _m=method, **k: getattr(theirs, _m)(model, *a, **k))

    def index(ids: list[int], grid: tuple[int, int, int], mel_frames: int, step: float) -> np.ndarray:
        return theirs.get_rope_index(
            model,
            torch.tensor([ids]),
            video_grid_thw=torch.tensor([grid]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            use_audio_in_video=True,
            audio_seqlens=torch.tensor([mel_frames]),
            second_per_grids=torch.tensor([step]),
        )[0][:, 0].numpy()

    return index


def clip_row(order: list[tuple[str, Fraction, int]], step: Fraction) -> TokenSequence:
    """A row of text, marks, a clip's pieces (kind, start, rows of sound), marks, text; groups of 2 x 3 rows."""
    segments = [Segment(kind="text", ids=(9, 9, 9, 104, 105))]
    for kind, start, rows in order:
        grid = (1, 2, 3) if kind == "video" else (rows, 1, 1)
        count = 6 if kind == "video" else rows
        size = (2, 56, 84) if kind == "video" else (100,)
        unit = Unit(num_tokens=count, start=start, end=start + step, grid=grid, size=size, items=())
        segments.append(Segment(kind=kind, source="clip", units=(unit,)))
    return TokenSequence((*segments, Segment(kind="text", ids=(106, 107, 9, 9))))


def joined(groups: int, step: Fraction, rows: int, rate: int) -> list[tuple[str, Fraction, int]]:
    """Merge groups and rows of sound by time, picture first on ties, runs of sound as one unit."""
    pieces = sorted(
        [(k * step, 0, "video") for k in range(groups)] + [(Fraction(n, rate), 1, "audio") for n in range(rows)]
    )
    order: list[tuple[str, Fraction, int]] = []
    for start, _, kind in pieces:
        if kind == "audio" and order and order[-1][0] == "audio":
            order[-1] = ("audio", order[-1][1], order[-1][2] + 1)
        else:
            order.append((kind, start, 1))
    return order


@pytest.mark.parametrize(("groups", "step"), [(4, Fraction(1)), (5, Fraction(1, 2)), (2, Fraction(7, 4))])
def test_clips_are_those_of_qwen3_omni(groups, step):
    """Exact but for its float32, where sound outlasts picture: its last piece is then the largest position too."""
    mel = 100 * (1 + int(groups * step))
    rows = 13 * mel // 100
    sequence = clip_row(joined(groups, step, rows, 13), step)
    ids = np.where(sequence.ids >= 0, sequence.ids, 102)
    kinds = [s.kind for s in sequence.segments for _ in range(s.num_tokens)]
    ids[[i for i, kind in enumerate(kinds) if kind == "audio"]] = 103
    theirs = omni("qwen3_omni_moe")(ids.tolist(), (groups, 4, 6), mel, float(step))
    ours = positions_time_aligned(sequence, Fraction(13), is_fractional=True)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def chunked(groups: int, step: Fraction, rows: int) -> list[tuple[str, Fraction, int]]:
    """Cut both streams every two seconds (50 steps), picture before sound in each piece."""
    order, last = [], max(math.floor((groups - 1) * step * 25), rows - 1) // 50
    for chunk in range(last + 1):
        order += [("video", k * step, 1) for k in range(groups) if math.floor(k * step * 25) // 50 == chunk]
        count = len(range(50 * chunk, min(rows, 50 * chunk + 50)))
        order += [("audio", Fraction(2 * chunk), count)] if count else []
    return order


@pytest.mark.parametrize(("groups", "step"), [(4, Fraction(1)), (7, Fraction(1, 2)), (3, Fraction(2))])
def test_clips_are_those_of_qwen2_5_omni(groups, step):
    mel = 100 * (1 + int(groups * step))
    rows = ((mel - 1) // 2 + 1 - 2) // 2 + 1
    sequence = clip_row(chunked(groups, step, rows), step)
    kinds = [s.kind for s in sequence.segments for _ in range(s.num_tokens)]
    ids = [{"video": 102, "audio": 103}.get(kind, id) for kind, id in zip(kinds, sequence.ids.tolist(), strict=True)]
    theirs = omni("qwen2_5_omni")(ids, (groups, 4, 6), mel, float(step))
    ours = positions_time_aligned(sequence, Fraction(25), brackets=2)
    np.testing.assert_array_equal(ours, theirs)


def test_text_after_a_clip_stands_above_all_of_it():
    """A picture of 80 columns ends above sound that is emitted last: transformers lets the text share its positions."""
    wide = Unit(num_tokens=80, start=Fraction(0), end=Fraction(1), grid=(1, 1, 80), size=(2, 28, 2240), items=())
    sound = Unit(num_tokens=25, start=Fraction(0), end=Fraction(1), grid=(25, 1, 1), size=(100,), items=())
    row = TokenSequence(
        (Segment(kind="text", ids=(1,)), Segment(kind="video", source="c", units=(wide,)),
         Segment(kind="audio", source="c", units=(sound,)), Segment(kind="text", ids=(1,)))
    )  # fmt: skip
    assert positions_time_aligned(row)[:, -1].tolist() == [81] * 3


def test_each_stream_keeps_its_start():
    """Sound that begins 0.4 s after the picture is 10 steps late."""
    order = [("video", Fraction(3), 1), ("audio", Fraction(17, 5), 25), ("video", Fraction(5), 1)]
    placed = positions_time_aligned(clip_row(order, Fraction(1)))
    assert placed[:, 5].tolist() == [5, 5, 5] and placed[:, 11].tolist() == [15] * 3 and placed[0, -5] == 55


@pytest.mark.parametrize("is_fractional", [False, True])
def test_eight_hours_do_not_drift(is_fractional):
    """Groups every 1001/15000 s, 13 steps a second: the last is where one product says."""
    step, count = Fraction(1001, 15000), 431_569
    units = tuple(
        Unit(num_tokens=1, start=k * step, end=k * step, grid=(1, 1, 1), size=(2, 28, 28), items=())
        for k in (0, 1, count // 2, count - 1)
    )
    row = TokenSequence((Segment(kind="video", source="c", units=units), Segment(kind="text", ids=(1,))))
    placed = positions_time_aligned(row, Fraction(13), is_fractional=is_fractional)[0]
    exact = [unit.start * 13 for unit in units]
    wanted = [float(x) if is_fractional else math.floor(x) for x in exact]
    np.testing.assert_allclose(placed[:4], wanted, rtol=0, atol=1e-6 if is_fractional else 0)
    assert float(exact[-1]) > 374_000 and placed[4] == placed[3] + 1


def test_text_too_short_for_its_brackets_is_refused():
    order = [("video", Fraction(0), 1), ("audio", Fraction(0), 25)]
    row = clip_row(order, Fraction(1))
    short = TokenSequence((Segment(kind="text", ids=(1,)), *row.segments[1:]))
    with pytest.raises(ValueError, match="text of 1 tokens beside a clip"):
        positions_time_aligned(short, brackets=2)
