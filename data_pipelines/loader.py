"""Prefetch steps in order: plan ahead in a thread, decode ahead in the workers, hand over one step at a time."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from data_pipelines.workers import Reply, WorkerError, WorkerPool

P = TypeVar("P")


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
    """Iterate over steps, at most `prefetch` of them prepared ahead, always in order.

    prepare: step -> (payload, jobs); called in one background thread, in the order of steps
    Raises in `__next__` what `prepare` raised. Close it (or use `with`) to end its thread.
    """

    def __init__(self, prepare: Callable[[int], tuple[P, list[Job]]], pool: WorkerPool, *, steps: range, prefetch: int):
        if prefetch < 1:
            raise ValueError(f"prefetch={prefetch} steps: the loader prepares at least one step ahead")
        self._steps = steps
        self._prepare = prepare
        self._pool = pool
        self._ahead = threading.Semaphore(prefetch)
        self._ready: queue.SimpleQueue = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._produce, name="loader", daemon=True)
        self._thread.start()

    def __iter__(self) -> Iterator[Loaded[P]]:
        for _ in self._steps:
            began = time.monotonic()
            item = self._ready.get()
            if isinstance(item, BaseException):
                raise item
            step, payload, futures = item
            results = tuple((job, self._result(future)) for job, future in futures)
            self._ahead.release()
            yield Loaded(step, payload, results, time.monotonic() - began)

    def close(self) -> None:
        """End the background thread; jobs already queued are the pool's to drop."""
        self._closed = True
        self._ahead.release()
        self._thread.join()

    def __enter__(self) -> "Loader[P]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _produce(self) -> None:
        try:
            for step in self._steps:
                self._ahead.acquire()
                if self._closed:
                    return
                payload, jobs = self._prepare(step)
                futures = [(job, self._pool.submit(job.function, *job.args)) for job in jobs]
                self._ready.put((step, payload, futures))
        except BaseException as error:
            self._ready.put(error)

    @staticmethod
    def _result(future: Future) -> Reply | WorkerError:
        try:
            return future.result()
        except WorkerError as error:
            return error
