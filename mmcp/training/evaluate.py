"""Grade answers by task, beside the best constant answer."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Graded:
    """One question with its reference and the model's answer."""

    task: str
    truth: str
    answer: str


def grade(graded: Iterable[Graded]) -> dict[str, dict[str, float | int]]:
    """Return per task: `accuracy`, `chance`, `n`; for tasks answered in numbers also the median error.

    accuracy: share of answers equal to the reference, blanks at the ends aside
    chance:   accuracy of the best constant answer
    median_error, chance_median_error: for tasks whose references are all numbers, in their unit (seconds for times),
        of the answers and of the constant that makes it least (the median); an answer that is no number is as wrong
        as the worst number could be
    """
    by_task: dict[str, list[Graded]] = defaultdict(list)
    for item in graded:
        by_task[item.task].append(item)
    return {task: _grade_task(items) for task, items in sorted(by_task.items())}


def _grade_task(items: list[Graded]) -> dict[str, float | int]:
    truths = [item.truth.strip() for item in items]
    right = sum(item.answer.strip() == truth for item, truth in zip(items, truths, strict=True))
    result = {"accuracy": right / len(items), "chance": max(Counter(truths).values()) / len(items), "n": len(items)}
    numbers = [number for number in map(_number, truths) if number is not None]
    if len(numbers) == len(truths):
        worst = max(numbers) - min(numbers)
        errors = [_error(item.answer, number, worst) for item, number in zip(items, numbers, strict=True)]
        middle = statistics.median(numbers)
        result["median_error"] = statistics.median(errors)
        result["chance_median_error"] = statistics.median(abs(number - middle) for number in numbers)
        result["unreadable"] = sum(_number(item.answer) is None for item in items)
    return result


def _number(text: str) -> float | None:
    """Read a plain decimal number such as `3.5`; anything else is None."""
    text = text.strip()
    return float(text) if text.replace(".", "", 1).removeprefix("-").isdecimal() else None


def _error(answer: str, truth: float, worst: float) -> float:
    number = _number(answer)
    return worst if number is None else min(worst, abs(number - truth))
