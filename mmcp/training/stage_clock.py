"""When each stage of a step ran on this rank: marks where stages meet, turned into spans once the step is done.

On a GPU a mark is an event on the current stream, so that marking holds nothing up; on the CPU it is the time.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

STAGES = ("decode", "encode", "route", "backbone", "loss", "optimizer")
"""What a step is told in; `backbone` is the sum of BACKBONE."""
BACKBONE = ("linear", "attention")
"""Norms and matrix products of the blocks; what is between projections: attention with its exchanges."""


class Span(NamedTuple):
    """A stretch of one stage."""

    stage: str
    phase: str
    """forward, backward or update."""
    micro_batch: int | None
    start: float
    """Seconds since the clock began."""
    seconds: float


class StageClock:
    """Takes the time between marks. `stretch` begins a stretch of them, and says what it belongs to."""

    def __init__(self, device: torch.device):
        self._device = device
        self._marks: list[tuple[str | None, str, int | None, Any]] = []
        self._phase = ""
        self._micro_batch: int | None = None
        self.began_unix = time.time()
        self._began = self._now()

    def stretch(self, phase: str, micro_batch: int | None = None) -> None:
        """Begin a new stretch; the time since the last mark counts nowhere."""
        self._phase, self._micro_batch = phase, micro_batch
        self._marks.append((None, phase, micro_batch, self._now()))

    def mark(self, stage: str) -> None:
        """Count the time since the last mark for `stage`."""
        self._marks.append((stage, self._phase, self._micro_batch, self._now()))

    def spans(self) -> list[Span]:
        """Return all spans so far, in order; waits for a GPU to be done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        found, before = [], 0.0
        for stage, phase, micro_batch, moment in self._marks:
            now = self._seconds(moment)
            if stage is not None:
                found.append(Span(stage, phase, micro_batch, before, now - before))
            before = now
        return found

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.monotonic()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, moment: Any) -> float:
        """Seconds from the clock's beginning to a mark."""
        return moment - self._began if self._device.type != "cuda" else self._began.elapsed_time(moment) / 1000


def seconds_by_stage(spans: Sequence[Span]) -> dict[str, float]:
    """Add up spans by entry of STAGES and BACKBONE."""
    seconds = dict.fromkeys((*STAGES, *BACKBONE), 0.0)
    for span in spans:
        seconds[span.stage] += span.seconds
        if span.stage in BACKBONE:
            seconds["backbone"] += span.seconds
    return seconds


@contextmanager
def timed_attention(layers: Sequence[nn.Module], clock: StageClock) -> Iterator[None]:
    """Mark, inside the `with` block, where these attention layers begin and end, forward and backward.

    layers: modules called with (inputs by name, info), which answer with a tensor
    """
    hooks = [layer.register_forward_pre_hook(lambda _, arguments: _before(arguments[0], clock)) for layer in layers]
    hooks += [layer.register_forward_hook(lambda _, arguments, out: _after(out, clock)) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _before(inputs: dict[str, Tensor], clock: StageClock) -> None:
    """Mark the beginning; in backward attention ends when the first of its inputs has its gradient."""
    clock.mark("linear")
    on_first_gradient(list(inputs.values()), lambda: clock.mark("attention"))


def _after(out: Tensor, clock: StageClock) -> None:
    on_first_gradient([out], lambda: clock.mark("linear"))
    clock.mark("attention")


def on_first_gradient(tensors: Sequence[Tensor], tell: Callable[[], None]) -> None:
    """Call `tell` once, when a backward has computed the gradient of any of these tensors."""
    is_told: list[bool] = []

    def hook(_: Tensor) -> None:
        if not is_told:
            is_told.append(True)
            tell()

    for tensor in tensors:
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor.register_hook(hook)
