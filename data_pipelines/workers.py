"""Decode workers: lean processes that can be killed, so that a native decoder's hang or crash costs one job.

A worker is started with `python -m data_pipelines.workers`, not forked: it holds numpy and a decoder, not torch, and
it inherits no thread and no lock. Requests are function references with arguments; replies are a JSON header and raw
array bytes, so nothing that comes out of a decoder is ever unpickled.
"""

import ctypes
import json
import os
import queue
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Pipe
from typing import Any

import numpy as np

Reply = tuple[dict[str, Any], list[np.ndarray]]


class WorkerError(RuntimeError):
    """A job did not give a result: the function raised, the worker died, or the deadline passed."""


DEATH = re.compile(r"decode worker \d+ died after")


def tells_of_death(message: str) -> bool:
    """Whether a message about a job says that its worker's process is gone; another has taken its place by then."""
    return bool(DEATH.search(message))


class WorkerPool:
    """Run jobs on a few worker processes, first come first served.

    num_workers: processes
    deadline_s:  seconds one job may take; then its worker is killed and replaced, and the job fails
    """

    def __init__(self, num_workers: int, deadline_s: float):
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: decoding needs at least one worker process")
        self.deadline_s = deadline_s
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._workers = [_Worker(number) for number in range(num_workers)]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(num_workers, thread_name_prefix="decode")

    @property
    def num_workers(self) -> int:
        """Processes, and so jobs that run at the same time."""
        return len(self._workers)

    def submit(self, function: Callable[..., Reply], *args: Any) -> "Future[Reply]":
        """Queue `function(*args)`, importable by name in the worker; the future raises WorkerError on failure."""
        return self._threads.submit(self._run, function, args)

    def pids(self) -> list[int]:
        """Return the process ids of the workers."""
        return [worker.process.pid for worker in self._workers]

    def close(self) -> None:
        """Drop queued jobs, end every worker and wait for it."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.stop()
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.connection.close()

    def _run(self, function: Callable[..., Reply], args: tuple) -> Reply:
        worker = self._idle.get()
        try:
            return worker.call(function, args, self.deadline_s)
        finally:
            self._idle.put(worker)


class _Worker:
    """One process and this side's end of its pipe; replaced in place after a crash or a missed deadline."""

    def __init__(self, number: int):
        self.number = number
        self.stopped = False
        self._start()

    def _start(self) -> None:
        self.connection, theirs = Pipe()
        handle = theirs.fileno()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "data_pipelines.workers", str(handle)],
            pass_fds=[handle],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        theirs.close()

    def call(self, function: Callable[..., Reply], args: tuple, deadline_s: float) -> Reply:
        if self.process.poll() is not None and not self.stopped:
            self._replace()  # it died between jobs, so this one is not to blame
        began = time.monotonic()
        try:
            self.connection.send((function, args))
            if not self.connection.poll(deadline_s):
                self._replace()
                raise WorkerError(f"decode worker {self.number} gave no result within {deadline_s:g} s; it was killed")
            header = json.loads(self.connection.recv_bytes())
            arrays = [self._array(**spec) for spec in header.pop("arrays")]
        except (EOFError, OSError) as error:
            code = self.process.wait(timeout=10)
            if self.stopped:
                raise WorkerError("the decode workers were closed") from error
            self._replace()
            took = time.monotonic() - began
            how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise WorkerError(f"decode worker {self.number} died after {took:.1f} s with {how}") from error
        if "error" in header:
            raise WorkerError(header["error"])
        return header, arrays

    def _array(self, *, shape: list[int], dtype: str) -> np.ndarray:
        array = np.empty(shape, dtype=dtype)
        if array.nbytes:
            self.connection.recv_bytes_into(array.data.cast("B"))
        return array

    def _replace(self) -> None:
        self._end()
        if not self.stopped:
            self._start()

    def _end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()

    def stop(self) -> None:
        self.stopped = True
        self.process.kill()
        self.process.wait()


def serve(connection: Connection) -> None:
    """Answer jobs until the other side closes the pipe; headers tell when a job `began`, by time.monotonic."""
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            return
        began = time.monotonic()
        try:
            header, arrays = function(*args)
        except Exception as error:
            header, arrays = {"error": f"{type(error).__name__}: {error}"}, []
        arrays = [np.ascontiguousarray(array) for array in arrays]
        header = {
            **header,
            "began": began,
            "arrays": [{"shape": array.shape, "dtype": array.dtype.str} for array in arrays],
        }
        connection.send_bytes(json.dumps(header).encode())
        for array in arrays:
            if array.nbytes:
                connection.send_bytes(memoryview(array).cast("B"))


def die_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, however it ends; elsewhere the closed pipe has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


if __name__ == "__main__":
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the run decides when to stop, and closes the pipe
    serve(Connection(int(sys.argv[1])))
