"""Public bug reports on context parallelism (B29 to B34, B42), each tried on ours; sources in the docstrings.

Run: python -m pytest tests/cases/test_context_parallel_cases.py
"""

from fractions import Fraction
from pathlib import Path

import pytest
import torch

from experiments.exactness import LIMITS, compare
from mmcp import cli
from mmcp.attention import LinearConfig, SoftmaxConfig
from mmcp.parallel.mesh import MeshConfig
from mmcp.parallel.shard_batch import rank_row
from mmcp.positions import positions_1d
from mmcp.sequence import NO_ID, Segment, TokenSequence, Unit, pack
from mmcp.sharding.strategies import STRATEGIES
from mmcp.training.optim import OptimConfig
from tests.training.exact_cases import Layout, drawn, run_case, tiny_model, train_case

MEDIA = "media"
CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
ONE = Layout()
SGD = OptimConfig(learning_rate=0.1, min_rate_ratio=1.0, total_steps=3)


def text(*ids: int, loss: bool = True) -> TokenSequence:
    return TokenSequence((Segment(kind="text", ids=ids, loss=loss),))


def image(rows: int = 2) -> Segment:
    unit = Unit(num_tokens=rows, start=Fraction(0), end=Fraction(0), grid=(1, 1, rows), size=(8, 8 * rows), items=())
    return Segment(kind="image", units=(unit,))


def trained_pairs(row: TokenSequence, mesh: MeshConfig, strategy: str) -> list[tuple]:
    """Return (input, target) of every label row that some rank scores, in row order, as the ranks see them."""
    plan = Layout(mesh=mesh, strategy=strategy).planner(tiny_model()).row(row)
    pairs = []
    for rank in range(mesh.cp):
        labels = rank_row(row, plan, rank=rank, positions=positions_1d(row), device=CPU).labels.tolist()
        positions = plan.label_positions[plan.scorer == rank].tolist()
        pairs += list(zip(positions, labels, strict=True))
    return [(MEDIA if row.ids[i] == NO_ID else int(row.ids[i]), label) for i, label in sorted(pairs)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("mesh", [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)], ids=str)
def test_b29_labels_are_shifted_before_the_row_is_split(mesh, strategy):
    """huggingface/transformers#36607: one target lost per shard, wrong neighbours, the next document's first token."""
    mesh = MeshConfig(ring=mesh[0], ulysses=mesh[1])
    assert trained_pairs(text(*range(1, 9)), mesh, strategy) == [(i, i + 1) for i in range(1, 8)]
    packed = pack([text(1, 2, 3), text(4, 5, 6, 7, 8)])
    assert trained_pairs(packed, mesh, strategy) == [(1, 2), (2, 3), (4, 5), (5, 6), (6, 7), (7, 8)]
    around = TokenSequence((*text(1, 2).segments, image(), *text(3, 4).segments))
    assert trained_pairs(around, mesh, strategy) == [(1, 2), (MEDIA, 3), (3, 4)], "the last media row predicts the text"


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
def test_b30_a_rank_without_a_label_is_no_division_by_zero(rank_pool, ranks):
    """allenai/OLMo-core#657 (a): 100 prompt tokens, 20 answer tokens; all labels on the last rank."""
    prompt, answer = tuple(i % 37 for i in range(100)), tuple(i % 31 for i in range(20))
    row = TokenSequence((*text(*prompt, loss=False).segments, *text(*answer).segments))
    layout = Layout(mesh=MeshConfig(ulysses=ranks), strategy="contiguous")
    scored = layout.planner(tiny_model()).row(row).scorer
    assert set(scored.tolist()) == {ranks - 1}
    assert_equal(run_case(tiny_model(), ONE, [row]), rank_pool.run(run_case, tiny_model(), layout, [row], ranks=ranks))


def assert_equal(one, many) -> None:
    for found in many:
        errors = compare(one, found)
        assert max(value for value in errors.values() if isinstance(value, float)) < LIMITS["float64"], errors


def test_b30_a_step_without_any_label_changes_nothing_and_is_counted(rank_pool):
    """allenai/OLMo-core#657 (b), (c): text without labels; media alone; then a step as usual."""
    steps = [drawn(0, [["qvq"], ["q"]]), drawn(1, [["v"]]), drawn(2, [["tvt"]])]
    skipped = steps[:2]
    layout = Layout(mesh=MeshConfig(ulysses=2))
    start = train_case(tiny_model(), ONE, [], OptimConfig()).parameters
    nothing = rank_pool.run(train_case, tiny_model(), layout, skipped, OptimConfig(), ranks=2)[0]
    assert [line["loss"] for line in nothing.metrics] == [0, 0] and nothing.counters.skipped_steps == 2
    assert all(torch.equal(nothing.parameters[name], value) for name, value in start.items())
    one = train_case(tiny_model(), ONE, steps, OptimConfig())
    many = rank_pool.run(train_case, tiny_model(), layout, steps, OptimConfig(), ranks=2)[0]
    assert one.counters.skipped_steps == many.counters.skipped_steps == 2
    assert many.metrics[2]["loss"] == pytest.approx(one.metrics[2]["loss"], rel=1e-10)
    assert [line["label_tokens"] for line in many.metrics] == [0, 0, one.metrics[2]["label_tokens"]]


HEADS = [(8, 8, 3), (8, 2, 4), (6, 3, 2), (5, 1, 2)]


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), HEADS, ids=lambda size: str(size))
def test_b31_heads_that_do_not_divide_work(rank_pool, heads, kv_heads, ranks):
    """verl-project/verl#1226."""
    model, rows = tiny_model(heads=heads, kv_heads=kv_heads), drawn(heads, [["tvt", "t"]])
    layout = Layout(mesh=MeshConfig(ulysses=ranks))
    assert_equal(run_case(model, ONE, rows), rank_pool.run(run_case, model, layout, rows, ranks=ranks))


def test_b31_more_ranks_than_heads_are_refused_before_data_is_read(tmp_path, capsys):
    config = ROOT / "tests" / "training" / "tiny.yaml"
    overrides = ["model.backbone.kv_heads=4", f"folder={tmp_path}/run", f"data.train={tmp_path}/nowhere"]
    assert cli.main(["train", str(config), "--ranks", "8", *overrides]) == 1
    error = capsys.readouterr().err
    assert "ulysses=8 ranks for 4 query heads (4 key-value heads)" in error and "at most 4" in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.full)])
@pytest.mark.parametrize("variant", [SoftmaxConfig(), LinearConfig(chunk=4)], ids=lambda variant: variant.name)
def test_b32_short_and_odd_lengths_lose_no_token(rank_pool, variant, ranks):
    """NVIDIA/TransformerEngine#1930: length 7 treated as 6, rows shorter than two tokens a rank crash."""
    lengths = (1, 2, 3, 5, 7, 10, 17)
    alone = [text(*((length + i) % 37 for i in range(length))) for length in lengths]
    rows, model = [*alone, pack(alone)], tiny_model(pattern=(variant,))
    layout = Layout(mesh=MeshConfig(ulysses=ranks))
    assert layout.work(model, rows).label_tokens == 2 * sum(length - 1 for length in lengths)
    assert layout.work(model, alone[:1]).label_tokens == 0
    assert_equal(run_case(model, ONE, rows), rank_pool.run(run_case, model, layout, rows, ranks=ranks))


MESHES = {
    "DP 2": MeshConfig(dp_replicate=2),
    "CP 2": MeshConfig(ulysses=2),
    "FSDP 2": MeshConfig(dp_shard=2),
    "FSDP 2 x CP 2": MeshConfig(dp_shard=2, ulysses=2),
}


@pytest.mark.parametrize("name", MESHES)
def test_b33_no_layout_scales_gradients_or_their_norm(rank_pool, name):
    """NVIDIA/Megatron-LM#673: three SGD steps, clipped at half the norm."""
    rows = drawn(3, [["tvt"], ["at", "t"], ["tt"]])
    norm = train_case(tiny_model(), ONE, [rows], SGD, sgd=True).metrics[0]["grad_norm"]
    clipped = OptimConfig(learning_rate=0.1, min_rate_ratio=1.0, total_steps=3, clip_norm=norm / 2)
    start = train_case(tiny_model(), ONE, [], clipped, sgd=True).parameters
    one = train_case(tiny_model(), ONE, [rows] * 3, clipped, sgd=True)
    norms = [line["grad_norm"] for line in one.metrics]
    assert norms[0] == pytest.approx(norm, rel=1e-12), "the logged norm is that before clipping"
    assert any((value - start[parameter]).abs().max() > 1e-3 for parameter, value in one.parameters.items())
    layout = Layout(mesh=MESHES[name])
    ranks = rank_pool.run(train_case, tiny_model(), layout, [rows] * 3, clipped, (), True, ranks=layout.mesh.world)
    for many in ranks:
        assert [line["grad_norm"] for line in many.metrics] == pytest.approx(norms, rel=1e-10)
        for parameter, value in one.parameters.items():
            torch.testing.assert_close(many.parameters[parameter], value, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["CP 2", "DP 2"])
def test_b34_evaluation_runs_as_training_does(rank_pool, name):
    """huggingface/transformers#46868: five rows of different length, before the first step and after two."""
    held_out = drawn(9, [["t"], ["tvt"], ["atat"], ["ttttt"], ["itvt"]])
    steps = [drawn(seed, [["tvt"], ["t"]]) for seed in (1, 2)]
    optim, layout = OptimConfig(total_steps=2), Layout(mesh=MESHES[name])
    one = train_case(tiny_model(), ONE, steps, optim, held_out)
    for many in rank_pool.run(train_case, tiny_model(), layout, steps, optim, held_out, ranks=2):
        assert many.scores == pytest.approx(one.scores, rel=1e-10)
    assert one.scores[0] != one.scores[1]
    work = layout.work(tiny_model(), held_out)
    assert len(work.plan.rows) == 5 and work.label_tokens == sum(len(row.label_positions) for row in held_out)
    if name == "CP 2":
        lengths = [plan.lengths for plan in work.plan.plans]
        assert all(abs(first - second) <= 1 for first, second in lengths), "each rank holds half a row"


KINDS = [("vt", "t"), ("t", "vt"), ("tt", "t"), ("vt", "vvt"), ("at", "t"), ("t", "it")]
"""Of the two groups, per step: video/text, text/video, text/text, video/video, sound/text, text/image."""


@pytest.mark.parametrize("name", ["FSDP 2", "DP 2", "CP 2", pytest.param("FSDP 2 x CP 2", marks=pytest.mark.full)])
def test_b42_what_a_batch_holds_decides_no_collective(rank_pool, name):
    """huggingface/transformers#37186: a rank whose batch has no picture skips the encoder while others wait in it."""
    steps = [drawn(number, [[first], [second]]) for number, (first, second) in enumerate(KINDS)]
    layout, optim = Layout(mesh=MESHES[name]), OptimConfig(learning_rate=1e-2, total_steps=len(steps))
    one = train_case(tiny_model(), ONE, steps, optim)
    for many in rank_pool.run(train_case, tiny_model(), layout, steps, optim, ranks=layout.mesh.world):
        for key in ("loss", "grad_norm"):
            assert [line[key] for line in many.metrics] == pytest.approx([line[key] for line in one.metrics], rel=1e-9)
        for parameter, value in one.parameters.items():
            torch.testing.assert_close(many.parameters[parameter], value, rtol=1e-7, atol=1e-10)


def test_b42_encoders_without_input_get_zeros_for_gradients(rank_pool):
    rows, layout = drawn(2, [["tt"], ["t"]]), Layout(mesh=MESHES["FSDP 2"])
    for computed in rank_pool.run(run_case, tiny_model(), layout, rows, ranks=2):
        unused = [grad for name, grad in computed.gradients.items() if name.startswith("encoders.")]
        assert unused and all(not grad.any() for grad in unused)
    assert_equal(run_case(tiny_model(), ONE, rows), [computed])
