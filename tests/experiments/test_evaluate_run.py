"""`mmcp eval` and `mmcp ask` of a run trained on one rank, answered by one rank and by several, in float64.

Run: python -m pytest tests/experiments/test_evaluate_run.py
"""

from contextlib import contextmanager
from pathlib import Path

import pytest

from experiments import ask, evaluate
from experiments.evaluate import open_run
from mmcp.generate import Sampling
from mmcp.parallel.mesh import CPU
from mmcp.report.outcome import Outcome
from tests.training.tiny_run import tiny_settings, train_in


@pytest.fixture(scope="module")
def run(tiny_shards, tmp_path_factory, rank_pool) -> Path:
    """The folder of a run of a few steps."""
    folder = tmp_path_factory.mktemp("asked")
    train_in(rank_pool, tiny_settings(tiny_shards, folder, f"data.held_out={tiny_shards}", "optim.total_steps=6"))
    return folder


@contextmanager
def joined(_: str):
    """Stand for `process_group` on ranks that have joined already."""
    yield CPU


def evaluate_here(folder: Path, ranks: int) -> tuple[dict, list[str]]:
    evaluate.process_group = joined
    settings, saved = open_run(folder, ranks)
    return evaluate.evaluate(settings, saved, blank=False)


def answers_here(folder: Path, ranks: int, sampling: Sampling) -> list[tuple[str, str | None]]:
    """Answer what the run was trained on: (sample, answer) each."""
    evaluate.process_group = joined
    settings, saved = open_run(folder, ranks)
    shards = evaluate.ShardSet.open(settings.data.held_out)
    with evaluate.Answering(settings, saved, shards, sampling=sampling) as answering:
        return [(document.sample.id, answer) for document, answer in answering.answer_all()]


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.full)])
def test_several_ranks_answer_as_one_does(run, rank_pool, ranks):
    drawn = Sampling(temperature=1.0, seed=3)
    (one,) = rank_pool.run(answers_here, run, 1, drawn, ranks=1)
    assert len(one) == 10 and any(answer for _, answer in one)
    for found in rank_pool.run(answers_here, run, ranks, drawn, ranks=ranks):
        assert found == one


def test_eval_grades_what_was_answered(run, rank_pool):
    (one,) = rank_pool.run(evaluate_here, run, 1, ranks=1)
    assert one[0]["all"]["n"] == 10 and not one[1]
    assert rank_pool.run(evaluate_here, run, 2, ranks=2) == [one, one]


@pytest.mark.full
def test_ask_answers_a_question_about_a_clip_on_two_ranks(run, tiny_shards):
    clip = tiny_shards.parent / "loud.mp4"
    one, two = (ask.run(run, "what is shown?", video=clip, ranks=ranks, temperature=0.5) for ranks in (1, 2))
    assert isinstance(two, Outcome) and two.record["answer"] == one.record["answer"]
