"""Hand over steps in order: plan ahead in a thread, decode ahead in the workers, long jobs first of all."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from data_pipelines.schedule import Planned, Schedule
from data_pipelines.workers import Reply, WorkerError

P = TypeVar("P")
CLOSED = "the decode workers were closed"


@dataclass(frozen=True)
class Job:
    """Something to decode for a step."""

    key: Any
    """Tells the consumer what it is for."""
    sample: str
    """Name of the sample, for messages."""
    function: Callable[..., Reply]
    """Importable by name; runs in a worker."""
    args: tuple
    """Its arguments."""
    cost_ns: int = 0
    """Nanoseconds it is planned to take."""
    num_bytes: int = 0
    """Of its result."""


class Pool(Protocol):
    """What runs jobs: a WorkerPool, or anything that answers like one."""

    @property
    def num_workers(self) -> int:
        """Jobs that run at the same time."""

    def submit(self, function: Callable[..., Reply], /, *args: Any) -> "Future[Reply]":
        """Queue `function(*args)`."""


@dataclass(frozen=True)
class Loaded(Generic[P]):
    """One step, decoded."""

    step: int
    payload: P
    """What `prepare` returned beside the jobs."""
    results: tuple[tuple[Job, Reply | WorkerError], ...]
    """Per job, in order: its reply, or why there is none."""
    waited_s: float
    """Seconds the consumer waited for it."""


class Loader(Generic[P]):
    """Iterate over steps, in order, decoded ahead by the rule of `data_pipelines.schedule`.

    prepare:    step -> (payload, jobs); called in one background thread, in the order of steps
    prefetch:   steps decoded ahead
    lookahead:  further steps planned ahead, whose long jobs may start early
    most_bytes: of decoded results that wait
    Raises in `__next__` what `prepare` raised. Close it (or use `with`) to end its thread.
    """

    def __init__(
        self,
        prepare: Callable[[int], tuple[P, list[Job]]],
        pool: Pool,
        *,
        steps: range,
        prefetch: int,
        lookahead: int = 0,
        most_bytes: int = 1 << 30,
    ):
        if prefetch < 1:
            raise ValueError(f"prefetch={prefetch} steps: the loader prepares at least one step ahead")
        self._steps = steps
        self._prepare = prepare
        self._pool = pool
        self._planned_ahead = prefetch + lookahead
        self._schedule: Schedule[tuple[Job, Future[Reply]]] = Schedule(
            workers=pool.num_workers, prefetch=prefetch, most_bytes=most_bytes, head=steps.start
        )
        self._ready: dict[int, tuple[P, list[tuple[Job, Future[Reply]]]]] = {}
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._produce, name="loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Loaded[P]]:
        for step in self._steps:
            began = time.monotonic()
            payload, futures = self._take(step)
            results = tuple((job, self._result(future)) for job, future in futures)
            del futures
            with self._changed:
                self._schedule.used(step)
                self._changed.notify_all()
            yield Loaded(step, payload, results, time.monotonic() - began)

    def _take(self, step: int) -> tuple[P, list[tuple[Job, "Future[Reply]"]]]:
        """Wait until a step is planned. Raises what planning it raised."""
        with self._changed:
            while step not in self._ready:
                if self._error is not None:
                    raise self._error
                self._changed.wait()
            return self._ready.pop(step)

    def close(self) -> None:
        """End the background thread; jobs already started are the pool's to drop."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def __enter__(self) -> "Loader[P]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _produce(self) -> None:
        """Start jobs while workers are free, else plan the next step, else wait for either to become possible."""
        planned = self._steps.start
        while True:
            with self._changed:
                if self._closed:
                    return
                job = self._schedule.next()
                last = min(self._steps.stop, self._schedule.head + self._planned_ahead)
                can_plan = self._error is None and planned < last
                if job is None and not can_plan:
                    self._changed.wait()
                    continue
            if job is not None:
                if not self._start(job):
                    return
                continue
            try:
                self._plan(planned)
            except BaseException as error:  # the steps before it are still handed over
                with self._changed:
                    self._error = error
                    self._changed.notify_all()
            planned += 1

    def _plan(self, step: int) -> None:
        """Plan one step and put its jobs on the schedule."""
        payload, jobs = self._prepare(step)
        futures = [(job, Future[Reply]()) for job in jobs]
        with self._changed:
            entries = [Planned(step, job.cost_ns, job.num_bytes, (job, future)) for job, future in futures]
            self._schedule.add(step, entries)
            self._ready[step] = (payload, futures)
            self._changed.notify_all()

    def _start(self, planned: Planned[tuple[Job, "Future[Reply]"]]) -> bool:
        """Give a job to the pool; its result goes to the future that the consumer waits for. False: it is closed."""
        job, promised = planned.job

        def finish(future: "Future[Reply]") -> None:
            with self._changed:
                self._schedule.done(planned)
                self._changed.notify_all()
            error = WorkerError(CLOSED) if future.cancelled() else future.exception()
            if error is not None:
                promised.set_exception(error)
            else:
                promised.set_result(future.result())

        try:
            self._pool.submit(job.function, *job.args).add_done_callback(finish)
        except RuntimeError:  # a run that stops on an error closes its pool first
            promised.set_exception(WorkerError(CLOSED))
            return False
        return True

    @staticmethod
    def _result(future: Future) -> Reply | WorkerError:
        try:
            return future.result()
        except WorkerError as error:
            return error
