"""Grades against a recount by hand.

python -m pytest tests/training/test_evaluate.py
"""

import pytest

from mmcp.training.evaluate import Graded, grade


def test_accuracy_and_the_best_constant_answer():
    items = [Graded("color", truth, answer) for truth, answer in [("red", "red "), ("red", "blue"), ("blue", "blue")]]
    assert grade(items) == {"color": {"accuracy": 2 / 3, "chance": 2 / 3, "n": 3}}


def test_numbers_also_get_their_median_error_beside_the_middle():
    truths, answers = ["1.0", "2.0", "3.0", "6.0"], ["1.0", "2.5", "soon", "-90"]
    result = grade([Graded("when", *pair) for pair in zip(truths, answers, strict=True)])["when"]
    assert result["accuracy"] == 0.25 and result["unreadable"] == 1
    assert result["median_error"] == pytest.approx((0.5 + 5) / 2)  # errors 0, 0.5, 5 (unreadable), 5 (worst possible)
    assert result["chance_median_error"] == pytest.approx(1.0)  # of 2.5: 1.5, 0.5, 0.5, 3.5


def test_tasks_are_apart_and_none_is_no_task():
    assert grade([]) == {}
    assert list(grade([Graded("b", "x", "x"), Graded("a", "y", "x")])) == ["a", "b"]
