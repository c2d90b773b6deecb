"""Answers of a tiny model on one rank of a mesh, through caches, and the slow way: a whole forward for each token."""

from dataclasses import asdict, dataclass, field, replace

from torch import Tensor

from experiments.base import ModelConfig
from mmcp.generate import GREEDY, Sampling, generate
from mmcp.generate.answers import LastTokens, continued
from mmcp.parallel.cached_attention import RowCache
from mmcp.parallel.mesh import build_mesh
from mmcp.sequence import TokenSequence
from mmcp.training.stage_clock import StageClock
from mmcp.training.step import StepWork
from tests.training.exact_cases import Layout

END = 7


@dataclass(frozen=True)
class Asked:
    """What is generated."""

    rows: list[TokenSequence]
    room: int = 12
    sampling: Sampling = GREEDY


Logits = dict[tuple[int, ...], Tensor]
"""By row, document and token."""


@dataclass
class Answered:
    """What one rank found."""

    said: list[list[list[int]]]
    logits: Logits
    """What each choice was made from; of this rank's rows."""
    cached: list[int] = field(default_factory=list)
    """Bytes kept on this rank after each call of a layer."""


@dataclass(frozen=True)
class Noted(Sampling):
    """Notes what it chooses from."""

    seen: Logits = field(default_factory=dict)

    def choose(self, logits: Tensor, key: tuple[int, ...]) -> int:
        self.seen[key] = logits.clone()
        return super().choose(logits, key)

    @staticmethod
    def of(sampling: Sampling) -> "Noted":
        return Noted(**asdict(sampling))


def answer(model: ModelConfig, layout: Layout, asked: Asked) -> Answered:
    """Answer on this rank of the mesh, through caches."""
    runner = layout.runner(model, build_mesh(layout.mesh))
    sampling = Noted.of(asked.sampling)
    found = Answered([], sampling.seen)
    attend = RowCache.attend

    def note(cache: RowCache, layer: int, *args):
        out = attend(cache, layer, *args)
        found.cached.append(cache.nbytes)
        return out

    RowCache.attend = note
    try:
        found.said = generate(
            runner,
            layout.work(model, asked.rows),
            room=asked.room,
            end=END,
            clock=StageClock(runner.device),
            sampling=sampling,
        )
    finally:
        RowCache.attend = attend
    return found


def answer_slowly(model: ModelConfig, layout: Layout, asked: Asked) -> Answered:
    """Answer on one rank without a cache."""
    runner = layout.runner(model, build_mesh(layout.mesh))
    runner.model.eval()
    arrays = layout.work(model, asked.rows).arrays
    said = [[[] for _ in row.document_bounds[1:]] for row in asked.rows]
    ended = [[False for _ in row] for row in said]
    sampling = Noted.of(asked.sampling)
    for number in range(asked.room):
        rows = [_with(row, of_row, number) for row, of_row in zip(asked.rows, said, strict=True)]
        plan = layout.planner(model).step(rows)
        for batch in runner.micro_batches(StepWork(plan, arrays), StageClock(runner.device)):
            exchange = LastTokens(batch.exchange, batch.row.info, runner.mesh.cp)
            logits = runner.model.predict(batch.row, batch.calls, exchange)
            for document, of_document in enumerate(logits):
                if not ended[batch.number][document]:
                    new = sampling.choose(of_document, (batch.number, document, number))
                    ended[batch.number][document] = new == END
                    said[batch.number][document] += [] if new == END else [new]
    return Answered(said, sampling.seen)


def worst(found: Logits, expected: Logits) -> float:
    """Return the largest difference of logits, as a share of the largest logit."""
    assert set(found) <= set(expected), f"choices {sorted(set(found) - set(expected))} were not to be made"
    largest = max(float(x.abs().max()) for x in expected.values())
    return max((float((x - expected[key]).abs().max()) for key, x in found.items()), default=0.0) / largest


def _with(row: TokenSequence, said: list[list[int]], number: int) -> TokenSequence:
    """Append what was said to each document, filled up to `number` tokens; those that ended are no longer looked at."""
    whole = continued(row, number)
    segments, waiting = [], iter(said)
    for segment in whole.segments:
        is_new = segment.kind == "text" and segment.ids == (0,) * number and not segment.loss
        if is_new and number:
            ids = next(waiting)
            segment = replace(segment, ids=tuple([*ids, *[0] * (number - len(ids))]))
        segments.append(segment)
    return TokenSequence(tuple(segments))
