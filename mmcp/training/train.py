"""The training loop: load, agree, step, measure, save."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mmcp.config import config
from mmcp.parallel.collectives import all_gather, all_reduce
from mmcp.training.status import exchange_status
from mmcp.training.step import STAGES, StageClock, StepRunner, StepWork


@config
class TrainConfig:
    """How long to train and what to write on the way."""

    steps: int
    """Optimizer steps of the whole run."""
    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only at the end and when asked to stop."""
    keep_last: int = 2
    """Checkpoints kept; -1 keeps all."""
    evaluate_every: int = 0
    """Steps between held-out losses; 0: never."""
    max_void_share: float = 0.1
    """Share of the documents seen so far that may be unreadable before the run stops with an error."""
    strict: bool = False
    """Whether the first unreadable sample stops the run."""


@dataclass(frozen=True)
class LoadedStep:
    """A step as the loader hands it over."""

    step: int
    work: StepWork
    faults: Mapping[tuple[int, int], str]
    """By (row, document): what this rank could not decode, and why."""
    decode_s: float
    """Seconds this rank's workers spent on it."""
    waited_s: float
    """Seconds this rank waited for it."""
    frames_decoded: int
    """Video frames this rank's workers decoded for it."""


@dataclass
class Counters:
    """What a run has seen; part of the checkpoint."""

    documents: int = 0
    void: int = 0
    skipped_steps: int = 0
    faults: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Trainer:
    """Everything a rank needs to train, built by the caller.

    Raises ValueError on every rank when a sample cannot be read and `strict` is set, or too many cannot be.
    """

    runner: StepRunner
    optimizer: torch.optim.Optimizer
    set_learning_rate: Callable[[int], float]
    """Sets the optimizer's rates for a step (0 is the first) and returns the rate."""
    clip: Callable[[], torch.Tensor]
    """Clips the gradients; returns their norm over all ranks before clipping."""
    settings: TrainConfig
    counters: Counters
    on_step: Callable[[dict[str, Any], LoadedStep], None]
    """Called on every rank with the metrics of a step."""
    save: Callable[[int], None]
    """Called on every rank with the number of steps done."""
    held_out_loss: Callable[[], float]
    """Mean token loss on held-out data."""
    stop_requested: Callable[[], bool]
    """Whether this process has been asked to stop."""

    def run(self, steps: Iterable[LoadedStep]) -> int:
        """Train on `steps`; returns the number of steps done in all. Stops early, after a save, when asked to."""
        self.runner.model.train()
        done = None
        for loaded in steps:
            mesh, device = self.runner.mesh, self.runner.device
            status = exchange_status(
                loaded.work.plan, loaded.faults, stop=self.stop_requested(), group=mesh.world, device=device
            )
            if status.stop:
                self.save(loaded.step)
                return loaded.step
            self._count(loaded, status.void, status.messages)
            loaded = replace(loaded, work=replace(loaded.work, void=status.void))
            metrics = self._step(loaded)
            done = loaded.step + 1
            if self.settings.evaluate_every and done % self.settings.evaluate_every == 0:
                metrics["held_out_loss"] = self.held_out_loss()
            self.on_step(metrics, loaded)
            if done == self.settings.steps or (
                self.settings.checkpoint_every and done % self.settings.checkpoint_every == 0
            ):
                self.save(done)
        return self.settings.steps if done is None else done

    def _count(self, loaded: LoadedStep, void: Mapping[int, frozenset[int]], messages: tuple[str, ...]) -> None:
        counters = self.counters
        counters.documents += sum(len(row.document_bounds) - 1 for row in loaded.work.plan.rows)
        counters.void += sum(len(documents) for documents in void.values())
        for message in messages:
            counters.faults[message] = counters.faults.get(message, 0) + 1
        share = counters.void / max(1, counters.documents)
        if messages and (self.settings.strict or share > self.settings.max_void_share):
            limit = "strict is set" if self.settings.strict else f"more than {self.settings.max_void_share:.0%} allowed"
            raise ValueError(
                f"step {loaded.step}: {counters.void} of {counters.documents} samples could not be read ({limit}): "
                f"{'; '.join(messages)}; repair or remove them, or allow more with train.max_void_share"
            )

    def _step(self, loaded: LoadedStep) -> dict[str, Any]:
        """Run one optimizer step; a step in which nothing is labelled changes nothing and is counted."""
        runner, work = self.runner, loaded.work
        clock = StageClock(runner.device)
        clock.seconds["decode"] = loaded.decode_s
        began = clock.last
        total = work.label_tokens
        rate, norm = self.set_learning_rate(loaded.step), torch.zeros((), device=runner.device)
        loss_sum = torch.zeros((), dtype=torch.float64, device=runner.device)
        if total:
            loss_sum = runner.backward(work, clock)
            clock.start()
            norm = self.clip()
        loss_sum = all_reduce(loss_sum, "sum", group=runner.mesh.world, name="loss")
        loss = loss_sum.item() / max(1, total)
        if not (math.isfinite(loss) and math.isfinite(norm.item())):
            raise ValueError(
                f"step {loaded.step}: loss {loss}, gradient norm {norm.item()}; nothing was updated in this step; "
                "resume from the last checkpoint with a lower optim.lr"
            )
        if total:
            self.optimizer.step()
            self.optimizer.zero_grad()
            clock.mark("optimizer")
        else:
            self.counters.skipped_steps += 1
        clock.start()
        seconds = {**clock.seconds, "total": clock.last - began + loaded.waited_s}
        names = (*STAGES, "total")
        local = torch.tensor([seconds[name] for name in names], dtype=torch.float64, device=runner.device)
        by_rank = all_gather(local, group=runner.mesh.world, name="seconds").tolist()
        tokens = sum(row.num_tokens for row in work.plan.rows)
        return {
            "step": loaded.step,
            "loss": loss,
            "label_tokens": total,
            "tokens": tokens,
            "tokens_per_second": tokens / max(seconds[-1] for seconds in by_rank),
            "lr": rate,
            "grad_norm": norm.item(),
            "seconds": {name: max(column) for name, column in zip(names, zip(*by_rank, strict=True), strict=True)},
            "seconds_by_rank": [dict(zip(names, row, strict=True)) for row in by_rank],
            "void": sum(map(len, work.void.values())),
            "plan_digest": work.plan.digest,
        }
