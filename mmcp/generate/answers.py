"""Generate: read the prompts once over all ranks, then one token of every document at a time.

The prompts are a planned step like those of training, and are read in the layers' own modes. What they leave behind
stays split over the ranks (see mmcp.parallel.key_cache and state_cache). A new token is embedded, projected and scored
on every rank of its group alike; only attention asks the others, once a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from mmcp.attention.base import RowInfo
from mmcp.generate.choose import GREEDY, Sampling
from mmcp.generate.turn import agree_on_ids, any_goes_on
from mmcp.model.vlm import RankRow, RowExchange
from mmcp.parallel.cached_attention import cached_attention
from mmcp.parallel.collectives import Group, all_reduce
from mmcp.parallel.last_tokens import last_tokens
from mmcp.parallel.mesh import Mesh
from mmcp.parallel.new_tokens import NewTokens, new_tokens
from mmcp.sequence import Segment, TokenSequence
from mmcp.training.stage_clock import StageClock
from mmcp.training.step import MicroBatch, StepRunner, StepWork

Answers = list[list[int]]


def generate(
    runner: StepRunner, work: StepWork, *, room: int, end: int, clock: StageClock, sampling: Sampling = GREEDY
) -> list[Answers]:
    """Continue every document of a step; the result is the same on every rank, and on any number of ranks.

    work:  prompts: documents whose answers are to follow
    room:  most tokens of an answer
    end:   id that ends an answer
    Returns by row, then document: the ids before `end`, or `room` of them when it never came.
    Raises ValueError for a model whose rotary table follows the length of a document.
    On a fault of any rank between two tokens, raises on all.
    """
    scaling = runner.model.backbone.settings.rope_scaling
    if scaling.by_length:
        raise ValueError(
            f"rope scaling '{scaling.name}' turns all keys anew as a document grows, and keys are kept as they are; "
            "use a model with another scaling"
        )
    said: list[Answers] = [[[] for _ in row.document_bounds[1:]] for row in work.plan.rows]
    was_training = runner.model.training
    runner.model.eval()
    try:
        for batch in runner.micro_batches(work, clock):
            clock.stretch("forward", batch.number)
            answers = Continuation(runner, batch, room=room, end=end, sampling=sampling).run()
            clock.mark("linear")
            if batch.number is not None:
                said[batch.number] = answers
    finally:
        runner.model.train(was_training)
    return _from_all_groups(said, room, runner.mesh, runner.device)


def continued(prompts: TokenSequence, room: int) -> TokenSequence:
    """Append `room` tokens of text to each document: what the row looks like when all answers are full."""
    segments: list[Segment] = []
    for document, own in groupby(prompts.segments, key=lambda segment: segment.document):
        segments += [*own, Segment(kind="text", ids=(0,) * room, document=document)]
    return TokenSequence(tuple(segments))


@dataclass(frozen=True, eq=False)
class Continuation:
    """The answers to the documents of one row, on one rank."""

    runner: StepRunner
    batch: MicroBatch
    room: int
    end: int
    sampling: Sampling

    def run(self) -> Answers:
        """Read the prompts, then go on until all documents of all groups have ended."""
        model, mesh, info = self.runner.model, self.runner.mesh, self.batch.row.info
        prompts, positions = info.mask, self._positions()
        said: Answers = [[] for _ in prompts.bounds[1:]]
        open_documents = tuple(range(len(said)))
        with torch.no_grad(), cached_attention(model.backbone, mesh, room=self.room - 1):
            logits = model.predict(self.batch.row, self.batch.calls, LastTokens(self.batch.exchange, info, mesh.cp))
            for number in range(self.room):
                ids = self._choose(logits, open_documents, number)
                for document, new in zip(open_documents, ids, strict=True):
                    if new != self.end:
                        said[document].append(new)
                going = [i for i, new in enumerate(ids) if new != self.end and number + 1 < self.room]
                open_documents = tuple(open_documents[i] for i in going)
                if not any_goes_on(bool(going), mesh=mesh, device=self.runner.device):
                    break
                row = self._row([ids[i] for i in going], positions, new_tokens(prompts, open_documents, number))
                logits = model.predict(row, [], Replicated())
        return said

    def _positions(self) -> Tensor:
        """[axes, documents, room]: rotary positions of the new tokens, as training lays them out."""
        whole = continued(self.batch.sequence, self.room)
        positions = torch.from_numpy(self.runner.positions(whole)).to(self.runner.device)
        ends = torch.from_numpy(whole.document_bounds[1:]).to(positions.device)
        return positions[:, ends[:, None] - self.room + torch.arange(self.room, device=positions.device)]

    def _choose(self, logits: Tensor, documents: Sequence[int], number: int) -> list[int]:
        """Choose the next id of each document, [documents, vocabulary]; an error of any rank is raised on all."""
        row, ids, failure = self.batch.number or 0, [-1] * len(documents), None
        try:
            ids = [
                self.sampling.choose(of_document, (row, document, number))
                for of_document, document in zip(logits, documents, strict=True)
            ]
        except Exception as error:
            failure = error
        return agree_on_ids(ids, failure, mesh=self.runner.mesh, device=self.runner.device)

    def _row(self, ids: list[int], positions: Tensor, info: NewTokens) -> RankRow:
        """Describe a step of new tokens."""
        device = self.runner.device
        nothing = torch.zeros(0, dtype=torch.int64, device=device)
        return RankRow(
            ids=torch.tensor(ids, dtype=torch.int64, device=device),
            text=torch.arange(len(ids), device=device),
            media=nothing,
            positions=positions[:, list(info.documents), info.number],
            labels=nothing,
            info=info,
        )


@dataclass(frozen=True, eq=False)
class LastTokens:
    """An exchange that scores the last token of each document, on every rank."""

    exchange: RowExchange
    info: RowInfo
    group: Group

    def to_owners(self, rows: Tensor) -> Tensor:
        """Carry encoder rows as in training."""
        return self.exchange.to_owners(rows)

    def to_scorers(self, hidden: Tensor) -> Tensor:
        """hidden: [s/cp, e] of this rank's tokens -> [documents, e] on all ranks."""
        return last_tokens(hidden, self.info, self.group)


class Replicated:
    """An exchange for tokens that every rank holds: nothing moves."""

    def to_owners(self, rows: Tensor) -> Tensor:
        """Return the rows."""
        return rows

    def to_scorers(self, hidden: Tensor) -> Tensor:
        """Return the hidden states."""
        return hidden


def _from_all_groups(said: list[Answers], room: int, mesh: Mesh, device: torch.device) -> list[Answers]:
    """Bring the answers of all data-parallel groups to every rank; this one's are filled in."""
    flat = [answer for row in said for answer in row]
    ids = torch.tensor([[*answer, *[-1] * (room - len(answer))] for answer in flat], dtype=torch.int64, device=device)
    found = iter(all_reduce(ids, "max", group=mesh.data, name="answers").tolist())
    return [[[i for i in next(found) if i >= 0] for _ in row] for row in said]
