"""One step of one rank: its micro-batches forward and backward, with the time of each stage."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np
import torch
from torch import Tensor, nn

from mmcp.model.block import Block
from mmcp.model.vlm import RankRow, VideoLM
from mmcp.parallel.collectives import all_reduce
from mmcp.parallel.mesh import Mesh
from mmcp.parallel.route import Router
from mmcp.parallel.shard_batch import counted_labels, rank_row
from mmcp.sequence import NO_LABEL, TokenSequence
from mmcp.sharding.step import StepPlan
from mmcp.training.kept import KeptUnits
from mmcp.training.media import NOTHING_KEPT, MediaInputs, call_counts
from mmcp.training.stage_clock import StageClock, on_first_gradient, timed_attention


@dataclass(frozen=True)
class StepWork:
    """A planned step with what this rank decoded of it."""

    plan: StepPlan
    arrays: Mapping[int, Mapping[int, np.ndarray]]
    """By row number, then unit number: the units this rank encodes."""
    void: Mapping[int, frozenset[int]] = field(default_factory=dict)
    """By row number: documents that some rank could not read; the same on every rank."""
    kept: Mapping[int, KeptUnits] = field(default_factory=dict)
    """By row number: units whose features this rank kept from an earlier step, and keys to keep others under."""

    @property
    def label_tokens(self) -> int:
        """Labelled tokens of the whole step over all rows and ranks, void documents left out."""
        labels = (counted_labels(row, self.void.get(i, frozenset())) for i, row in enumerate(self.plan.rows))
        return sum(int((row != NO_LABEL).sum()) for row in labels)


class TimedExchange:
    """An exchange that marks where stages meet, forward and, through tensor hooks, backward.

    forward:   encode | to_owners: route | linear and attention | to_scorers: route | loss
    backward:  loss | route | linear and attention | route | encode
    """

    first = "linear"
    """Stage that a backward ends in: `encode` where gradients reach rows that this rank encoded."""

    def __init__(self, router: Router, clock: StageClock):
        self.router = router
        self.clock = clock

    def to_owners(self, rows: Tensor) -> Tensor:
        self.first = "encode" if rows.requires_grad else "linear"
        return self._timed(self.router.to_owners, rows, before="encode", grad_after="linear")

    def to_scorers(self, hidden: Tensor) -> Tensor:
        return self._timed(self.router.to_scorers, hidden, before="linear", grad_after="loss")

    def _timed(self, move: Callable[..., Tensor], rows: Tensor, *, before: str, grad_after: str) -> Tensor:
        self.clock.mark(before)
        on_first_gradient([rows], lambda: self.clock.mark("route"))
        moved = move(rows, trainable=torch.is_grad_enabled())
        on_first_gradient([moved], lambda: self.clock.mark(grad_after))
        self.clock.mark("route")
        return moved


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """What one forward is given."""

    number: int | None
    """Row number in the step; None for an empty row."""
    sequence: TokenSequence
    row: RankRow
    calls: list[tuple]
    exchange: TimedExchange


class StepRunner:
    """Runs a model over the rows that the plan deals to this rank.

    positions: sequence -> [axes, s] int64, the rotary positions of a row
    """

    def __init__(
        self,
        model: VideoLM,
        mesh: Mesh,
        *,
        media: MediaInputs,
        positions: Callable[[TokenSequence], np.ndarray],
        device: torch.device,
    ):
        self.model = model
        self.mesh = mesh
        self.media = media
        self.positions = positions
        self.device = device

    @property
    def attention(self) -> list[nn.Module]:
        """The attention of each layer, as it is called over the ranks."""
        return [cast(Block, block).mixer.attention for block in self.model.backbone.blocks]

    def micro_batches(self, work: StepWork, clock: StageClock) -> Iterator[MicroBatch]:
        """Yield this rank's micro-batches; every rank yields the same number, with the same encoder calls."""
        plan, mesh = work.plan, self.mesh
        for m in range(plan.micro_batches):
            number, sequence, row_plan = plan.row(mesh.data.index, m)
            arrays = {} if number is None else work.arrays.get(number, {})
            void = frozenset() if number is None else work.void.get(number, frozenset())
            counts = call_counts(self.media.encoders, partial(plan.num_calls, micro_batch=m))
            positions = self.positions(sequence)
            row = rank_row(sequence, row_plan, rank=mesh.cp.index, positions=positions, device=self.device, void=void)
            kept = NOTHING_KEPT if number is None else work.kept.get(number, NOTHING_KEPT)
            calls = self.media.calls(
                sequence, row_plan, rank=mesh.cp.index, arrays=arrays, num_calls=counts, void=void, kept=kept
            )
            exchange = TimedExchange(Router(row_plan, mesh.cp, device=self.device), clock)
            yield MicroBatch(number, sequence, row, calls, exchange)

    def backward(self, work: StepWork, clock: StageClock) -> Tensor:
        """Accumulate the gradients of the step's mean token loss; return this rank's share of the loss sum.

        The divisor is the number of labelled tokens of the whole step, known to every rank from metadata; gradients
        are summed over ranks when the parameters' gradients are reduced.
        """
        total = work.label_tokens
        assert total > 0, "a step without labels has no mean loss; skip it"
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        for m, batch in enumerate(self.micro_batches(work, clock)):
            with timed_attention(self.attention, clock):
                clock.stretch("forward", m)
                loss = self.model(batch.row, batch.calls, batch.exchange)[0]
                clock.mark("loss")
                clock.stretch("backward", m)
                (loss / total).backward()
                clock.mark(batch.exchange.first)
            loss_sum += loss.detach()
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        return loss_sum

    def hidden(self, batch: MicroBatch) -> Tensor:
        """Return [s/cp, e], the final hidden states of this rank's tokens of a micro-batch."""
        return self.model(batch.row, batch.calls, batch.exchange)[2]

    @torch.no_grad()
    def score(self, work: StepWork, clock: StageClock) -> tuple[Tensor, dict[int, Tensor]]:
        """Evaluate a step, without gradients or dropout; the model is left in the mode it was in.

        Returns the loss sum over all ranks, and by row number the most likely id at each label of the row [labels];
        both the same on every rank.
        """
        was_training = self.model.training
        self.model.eval()
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.device)
        best = {i: torch.zeros(plan.num_labels, dtype=torch.int64) for i, plan in enumerate(work.plan.plans)}
        for batch in self.micro_batches(work, clock):
            loss, ids, _ = self.model(batch.row, batch.calls, batch.exchange)
            loss_sum += loss
            if batch.number is not None:
                best[batch.number][torch.from_numpy(batch.row.info.plan.scorer == self.mesh.cp.index)] = ids.cpu()
        self.model.train(was_training)
        loss_sum = all_reduce(loss_sum, "sum", group=self.mesh.world, name="evaluation")
        world = self.mesh.world
        return loss_sum, {i: all_reduce(ids, "sum", group=world, name="evaluation") for i, ids in best.items()}
