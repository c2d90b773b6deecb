"""The training loop: load, agree, step, measure, save."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pydantic import NonNegativeInt

from mmcp.config import config
from mmcp.parallel.collectives import all_gather, all_reduce
from mmcp.training.optim import OptimConfig, apply_update
from mmcp.training.parts import PartsConfig
from mmcp.training.stage_clock import BACKBONE, STAGES, StageClock, seconds_by_stage
from mmcp.training.status import Status, exchange_status
from mmcp.training.step import StepRunner, StepWork


@config
class TrainConfig:
    """What to write on the way, and what to put up with; how long to train is `optim.total_steps`."""

    checkpoint_every: int = 0
    """Steps between checkpoints; 0: only at the end and when asked to stop."""
    keep_last: int = 2
    """Checkpoints kept; -1 keeps all."""
    evaluate_every: int = 0
    """Steps between held-out losses; 0: never."""
    max_lost_share: float = 0.1
    """Share of the samples seen so far that may be unusable (one always may) before the run stops with an error."""
    strict: bool = False
    """Whether the first unusable sample stops the run."""
    timeline_every: NonNegativeInt = 50
    """Steps between those whose stages are written to timeline.jsonl, span by span; the first is; 0: none."""


@dataclass(frozen=True)
class LoadedStep:
    """A step as the loader hands it over."""

    step: int
    work: StepWork
    faults: Mapping[tuple[int, int], str]
    """By (row, document): what this rank could not decode, and why."""
    refused: tuple[str, ...]
    """Samples of the step that could not be laid out, and why; the same on every rank."""
    notes: tuple[str, ...]
    """Damage that did not make a sample unusable."""
    decode_s: float
    """Seconds this rank's workers spent on it."""
    waited_s: float
    """Seconds this rank waited for it."""
    frames_decoded: int
    """Video frames this rank's workers decoded for it."""
    reduced: tuple[str, ...] = ()
    """Samples of the step that are seen or heard less finely than asked, and how; the same on every rank."""
    decoded: tuple[tuple[float, float], ...] = ()
    """Per decode job: when it began, by time.monotonic, and its seconds."""


def never(_: str) -> bool:
    """Stop for no message."""
    return False


OnStep = Callable[[dict[str, Any], LoadedStep], None]
"""Gets the metrics of a step that is done, and what it was made of; called on every rank.

Beside the fields of `metrics.jsonl`, the metrics hold under `timeline` this rank's own entry of `timeline.jsonl`.
"""


@dataclass
class Counters:
    """What a run has seen; part of the checkpoint."""

    documents: int = 0
    """Samples that came up."""
    lost: int = 0
    """Those that could not be laid out or read, each of which used up its place in the order."""
    skipped_steps: int = 0
    """Steps without a label."""
    faults: dict[str, int] = field(default_factory=dict)
    """How often each message was given."""


@dataclass(frozen=True, eq=False)
class Trainer:
    """Everything a rank needs to train, built by the caller.

    Raises ValueError on every rank when a sample cannot be read and `strict` is set, or too many cannot be.
    """

    runner: StepRunner
    optimizer: torch.optim.Optimizer
    optim: OptimConfig
    parts: PartsConfig
    settings: TrainConfig
    counters: Counters
    on_step: Sequence[OnStep]
    """Called after each step, one after the other."""
    save: Callable[[int], None]
    """Called on every rank with the number of steps done."""
    held_out_loss: Callable[[], float]
    """Mean token loss on held-out data."""
    stop_requested: Callable[[], bool]
    """Whether this process has been asked to stop."""
    is_fatal: Callable[[str], bool] = never
    """Whether a sample that could not be used for the reason given ends the run, strict or not."""

    def run(self, steps: Iterable[LoadedStep]) -> int:
        """Train on `steps`; return how many are done in all. Saves at the end and when asked to stop."""
        self.runner.model.train()
        done = saved = -1
        for loaded in steps:
            mesh, device = self.runner.mesh, self.runner.device
            plan, stop = loaded.work.plan, self.stop_requested()
            status = exchange_status(plan, loaded.faults, stop=stop, group=mesh.world, device=device)
            if status.stop:
                done = loaded.step
                break
            self._count(loaded, status)
            metrics = self._step(replace(loaded, work=replace(loaded.work, void=status.void)))
            done = loaded.step + 1
            if self.settings.evaluate_every and done % self.settings.evaluate_every == 0:
                metrics["held_out_loss"] = self.held_out_loss()
            for tell in self.on_step:
                tell(metrics, loaded)
            if self.settings.checkpoint_every and done % self.settings.checkpoint_every == 0:
                self.save(done)
                saved = done
        if saved != done:
            self.save(done)
        return done

    def _count(self, loaded: LoadedStep, status: Status) -> None:
        """Count what was seen and lost; stop the run when too much is lost."""
        counters, refused = self.counters, loaded.refused
        counters.documents += sum(len(row.document_bounds) - 1 for row in loaded.work.plan.rows) + len(refused)
        counters.lost += sum(len(documents) for documents in status.void.values()) + len(refused)
        messages = (*refused, *status.messages)
        for message in messages:
            counters.faults[message] = counters.faults.get(message, 0) + 1
        allowed = self.settings.max_lost_share * counters.documents
        is_fatal = any(map(self.is_fatal, messages))
        if messages and (is_fatal or self.settings.strict or counters.lost > max(1.0, allowed)):
            limit = "train.strict is set" if self.settings.strict else f"{self.settings.max_lost_share:.0%} are allowed"
            limit = "data.dead_worker is stop" if is_fatal else limit
            raise ValueError(
                f"step {loaded.step}: {counters.lost} of {counters.documents} samples could not be used ({limit}): "
                f"{'; '.join(messages)}; repair or remove them, or raise train.max_lost_share"
            )

    def _step(self, loaded: LoadedStep) -> dict[str, Any]:
        """Run one optimizer step; a step in which nothing is labelled changes nothing and is counted."""
        runner, work = self.runner, loaded.work
        began, clock = time.monotonic(), StageClock(runner.device)
        norm, total = 0.0, work.label_tokens
        loss_sum = torch.zeros((), dtype=torch.float64, device=runner.device)
        if total:
            loss_sum = runner.backward(work, clock)
            self.parts.check_gradients(runner.model)
            clock.stretch("update")
            norm = apply_update(self.optimizer, self.optim, loaded.step)
            clock.mark("optimizer")
        else:
            self.counters.skipped_steps += 1
        spans = clock.spans()
        seconds = {**seconds_by_stage(spans), "decode": loaded.decode_s, "wait": loaded.waited_s}
        seconds["total"] = time.monotonic() - began + loaded.waited_s
        loss = all_reduce(loss_sum, "sum", group=runner.mesh.world, name="loss").item() / max(1, total)
        names = (*STAGES, *BACKBONE, "wait", "total")
        local = torch.tensor([seconds[name] for name in names], dtype=torch.float64, device=runner.device)
        by_rank = all_gather(local, group=runner.mesh.world, name="seconds").tolist()
        tokens = sum(row.num_tokens for row in work.plan.rows)
        return {
            "step": loaded.step,
            "loss": loss,
            "label_tokens": total,
            "tokens": tokens,
            "tokens_per_second": tokens / max(seconds[-1] for seconds in by_rank),
            "lr": self.optim.rate(loaded.step),
            "grad_norm": norm,
            "seconds": {name: max(column) for name, column in zip(names, zip(*by_rank, strict=True), strict=True)},
            "seconds_by_rank": [dict(zip(names, row, strict=True)) for row in by_rank],
            "plan_digest": work.plan.digest,
            "timeline": {
                "began": clock.began_unix,
                "spans": [
                    *(("decode", "worker", None, start - began, length) for start, length in loaded.decoded),
                    ("wait", "load", None, -loaded.waited_s, loaded.waited_s),
                    *spans,
                ],
            },
        }
