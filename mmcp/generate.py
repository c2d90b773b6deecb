"""Greedy answers of a model, exactly as token-by-token decoding gives them, in as few forwards as a guess allows."""

from collections.abc import Sequence
from dataclasses import replace

from mmcp.sequence import TokenSequence
from mmcp.sharding.step import StepPlan
from mmcp.training.stage_clock import StageClock
from mmcp.training.step import StepRunner, StepWork


def generate(
    runner: StepRunner, work: StepWork, drafts: Sequence[Sequence[Sequence[int]]], *, end: int, clock: StageClock
) -> list[list[list[int]]]:
    """Answer every document of a step; the result is the same on every rank.

    Each document ends with one text segment with loss, the room for its answer, and has no other loss. The room is
    first filled with a draft; one forward tells how far the draft is what the model would say, the first wrong token
    is replaced by the model's, and so on: at most one forward for each token of the longest answer, one in all when
    every draft is right. The layout never changes, so one plan and one decoding serve all forwards.

    drafts: by row, then document: ids that fill its room; any draft gives the same result
    end:    id that ends an answer
    Returns by row, then document: the ids before `end`, or all of the room when it never came.
    """
    texts = [[list(draft) for draft in row] for row in drafts]
    known = [[0] * len(row) for row in drafts]
    while any(not _finished(text, count, end) for row, counts in zip(texts, known, strict=True)
              for text, count in zip(row, counts, strict=True)):  # fmt: skip
        _, best = runner.score(replace(work, plan=_filled(work.plan, texts)), clock)
        for number, row in enumerate(texts):
            said = best[number].tolist()
            for document, text in enumerate(row):
                known[number][document] = _confirm(text, said[: len(text)], known[number][document], end)
                said = said[len(text) :]
    return [[text[: text.index(end)] if end in text else text for text in row] for row in _cut(texts, known)]


def _finished(text: list[int], known: int, end: int) -> bool:
    return known == len(text) or end in text[:known]


def _confirm(text: list[int], said: list[int], known: int, end: int) -> int:
    """Take over what the model says from position `known` on, up to the first token the draft had wrong."""
    while not _finished(text, known, end):
        right = text[known] == said[known]
        text[known] = said[known]
        known += 1
        if not right:
            break
    return known


def _cut(texts: list[list[list[int]]], known: list[list[int]]) -> list[list[list[int]]]:
    pairs = zip(texts, known, strict=True)
    return [[text[:count] for text, count in zip(row, counts, strict=True)] for row, counts in pairs]


def _filled(plan: StepPlan, texts: list[list[list[int]]]) -> StepPlan:
    rows = tuple(_fill(row, ids) for row, ids in zip(plan.rows, texts, strict=True))
    return replace(plan, rows=rows)


def _fill(row: TokenSequence, texts: list[list[int]]) -> TokenSequence:
    waiting = iter(texts)
    segments = []
    for segment in row.segments:
        room = segment.kind == "text" and segment.loss
        segments.append(replace(segment, ids=tuple(next(waiting))) if room else segment)
    return TokenSequence(tuple(segments))
