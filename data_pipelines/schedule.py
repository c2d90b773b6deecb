"""Which decode job a free worker starts next: a pure function of what is planned, started and used up.

Steps are used up in order. A step is due when all before it have been decoded, at the planned cost of their jobs shared
by the workers. Jobs start by the latest moment at which they would still be done in time, due - cost: a long one starts
many steps before its own, while the steps between are decoded beside it, and nothing is handed over out of order.

Jobs of the next `prefetch` steps start as workers become free. A later job starts early only if it would otherwise be
late, if it leaves a worker to the steps before it, and if its result fits into `most_bytes` beside theirs. What the
step to be used next needs is always allowed, so that nothing can wait for ever.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

J = TypeVar("J")


@dataclass(frozen=True, slots=True, eq=False)
class Planned(Generic[J]):
    """A job of a step."""

    step: int
    cost_ns: int
    """Nanoseconds it is planned to take on a worker."""
    num_bytes: int
    """Of its result."""
    job: J


@dataclass(eq=False)
class Schedule(Generic[J]):
    """The jobs of the steps ahead."""

    workers: int
    prefetch: int
    """Steps whose jobs all may start."""
    most_bytes: int
    """Of results that wait or are being made, but for those of the step to be used next."""
    head: int = 0
    """The step to be used next."""
    _waiting: dict[int, list[Planned[J]]] = field(default_factory=dict)
    _started: dict[int, list[Planned[J]]] = field(default_factory=dict)
    _running: set[Planned[J]] = field(default_factory=set)
    _due_ns: dict[int, int] = field(default_factory=dict)
    """By step: cost of all jobs of the steps before it, shared by the workers."""
    _planned_ns: int = 0

    def add(self, step: int, jobs: Sequence[Planned[J]]) -> None:
        """Plan the jobs of the step after those planned so far."""
        self._due_ns[step] = self._planned_ns // self.workers
        self._planned_ns += sum(job.cost_ns for job in jobs)
        self._waiting[step] = list(jobs)
        self._started[step] = []

    def next(self) -> Planned[J] | None:
        """Start and return the job that a free worker should do now; None when there is none or no worker is free."""
        if len(self._running) >= self.workers:
            return None
        soon = self._first(job for step in self._window() for job in self._waiting[step] if self._fits(job))
        early = self._first(job for job in self._late_unless_early() if self._leaves_room(job))
        is_left_one = self.workers > 1 and len(self._running) < self.workers - 1
        chosen = early if early is not None and (is_left_one or soon is None) else soon
        if chosen is not None:
            self._waiting[chosen.step].remove(chosen)
            self._started[chosen.step].append(chosen)
            self._running.add(chosen)
        return chosen

    def done(self, job: Planned[J]) -> None:
        """A started job has given its result, or failed."""
        self._running.discard(job)

    def used(self, step: int) -> None:
        """The results of a step are no longer needed here."""
        assert not self._waiting[step], f"step {step} was used before its jobs were started"
        for table in (self._waiting, self._started, self._due_ns):
            del table[step]
        self.head = step + 1

    @property
    def held_bytes(self) -> int:
        """Bytes of all results that are being made or wait."""
        return sum(job.num_bytes for jobs in self._started.values() for job in jobs)

    def _window(self) -> Iterator[int]:
        return (step for step in self._waiting if step < self.head + self.prefetch)

    def _first(self, jobs: Iterator[Planned[J]]) -> Planned[J] | None:
        return min(jobs, key=lambda job: (self._due_ns[job.step] - job.cost_ns, job.step), default=None)

    def _late_unless_early(self) -> Iterator[Planned[J]]:
        """Jobs beyond the window that would not be done in time if they were started when their step comes into it."""
        for step, jobs in self._waiting.items():
            if step >= self.head + self.prefetch:
                begins = self._due_ns.get(step - self.prefetch, 0)
                yield from (job for job in jobs if job.cost_ns > self._due_ns[step] - begins)

    def _fits(self, job: Planned[J]) -> bool:
        return job.step == self.head or self.held_bytes + job.num_bytes <= self.most_bytes

    def _leaves_room(self, job: Planned[J]) -> bool:
        wanted = sum(other.num_bytes for step in self._window() for other in self._waiting[step])
        return self.held_bytes + wanted + job.num_bytes <= self.most_bytes
