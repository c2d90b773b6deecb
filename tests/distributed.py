"""Runs a function on N gloo ranks, each a process of its own on this machine.

    assert run_on_ranks(add_ranks, 3, 10) == [13, 13, 13]      # starts three processes, ends them

    with RankPool(4) as pool:                                  # starts four processes once
        assert pool.run(add_ranks, 10, ranks=2) == [11, 11]    # a fresh group of two of them
        assert pool.run(add_ranks, 10, ranks=4) == [16, 16, 16, 16]

The function is a picklable module-level one; it finds torch.distributed initialised with as many ranks as asked for.
A rank that raises, dies or does not answer in time ends every rank at once, and the first failure is raised here with
the rank's own traceback. Nothing is left running.
"""

import faulthandler
import functools
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

TIMEOUT = 60.0  # seconds a run may take; a collective waits for less, so that it fails where it stands
START_TIMEOUT = 180.0  # seconds in which new processes must have imported torch, on a busy machine too


def run_on_ranks(function: Callable, ranks: int, *args: Any, timeout: float = TIMEOUT) -> list:
    """Return `[function(*args) on rank 0, on rank 1, ...]`, from processes started for this call.

    Raises the first failing rank's exception, ChildProcessError when a rank dies, TimeoutError after `timeout` seconds.
    """
    with RankPool(ranks) as pool:
        return pool.run(function, *args, timeout=timeout)


class RankPool:
    """Processes that stay alive between runs, because importing torch costs seconds; started when first needed.

    Every run gets a fresh process group, so no run sees what an earlier one left. After a failure the processes are
    ended, and the next run starts new ones.
    """

    def __init__(self, ranks: int):
        self.ranks = ranks
        self._context = multiprocessing.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._processes: list = []
        self._pipes: list[Connection] = []
        self._runs = 0

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def run(self, function: Callable, *args: Any, ranks: int | None = None, timeout: float = TIMEOUT) -> list:
        """Run `function(*args)` on the first `ranks` processes (all by default) and return their results in order.

        Raises as `run_on_ranks` does.
        """
        ranks = self.ranks if ranks is None else ranks
        if not 1 <= ranks <= self.ranks:
            raise ValueError(f"{ranks} ranks asked of a pool of {self.ranks}; ask for 1 to {self.ranks}")
        self._start(ranks)
        self._runs += 1
        task = pickle.dumps((function, args, ranks, f"{self._folder.name}/store-{self._runs}", timeout))
        try:
            for pipe in self._pipes[:ranks]:
                pipe.send_bytes(task)
            return self._collect(range(ranks), timeout)
        except BaseException:
            self._kill()
            raise

    def close(self) -> None:
        """End every process and remove the scratch folder."""
        self._kill()
        self._folder.cleanup()

    def _start(self, ranks: int) -> None:
        """Start what is missing of the first `ranks` processes and wait until they are ready."""
        running = len(self._processes)
        for rank in range(running, ranks):
            here, there = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(rank, there, self._folder.name), daemon=True)
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        try:
            self._collect(range(running, ranks), START_TIMEOUT)
        except BaseException:
            self._kill()
            raise

    def _collect(self, ranks: range, timeout: float) -> list:
        """Wait for one answer of each of `ranks`; raise the first failure."""
        results: dict[int, Any] = {}
        rank_of = {self._pipes[rank]: rank for rank in ranks}
        deadline = time.monotonic() + timeout
        while rank_of:
            ready = wait(list(rank_of), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                waiting = sorted(rank_of.values())
                raise TimeoutError(f"ranks {waiting} gave no answer within {timeout:g} s\n{self._stacks(waiting)}")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank = rank_of.pop(pipe)
                results[rank] = self._receive(rank, pipe)
        return [results[rank] for rank in ranks]

    def _receive(self, rank: int, pipe: Connection) -> Any:
        try:
            has_failed, value, text = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            self._processes[rank].join(5)
            raise ChildProcessError(f"rank {rank} died, exit code {self._processes[rank].exitcode}") from None
        if has_failed:
            value.add_note(f"on rank {rank}:\n{text}")
            for other, process in enumerate(self._processes):
                if process.exitcode is not None:  # this rank only felt that its peer went away
                    raise ChildProcessError(f"rank {other} died, exit code {process.exitcode}") from value
            raise value
        return value

    def _stacks(self, ranks: list[int]) -> str:
        """Where each of `ranks` stood shortly before the time was up."""
        texts = {rank: Path(_stack_file(self._folder.name, rank)) for rank in ranks}
        return "\n".join(f"rank {rank}:\n{path.read_text()}" for rank, path in texts.items() if path.exists())

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []


def _stack_file(folder: str, rank: int) -> str:
    return f"{folder}/stack-{rank}"


def _serve(rank: int, pipe: Connection, folder: str) -> None:
    """Answer tasks until the pipe closes: the life of one rank's process."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    pipe.send_bytes(pickle.dumps((False, None, "")))
    with open(_stack_file(folder, rank), "w") as stacks:
        while True:
            try:
                function, args, ranks, store, timeout = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            stacks.seek(0)
            stacks.truncate()
            faulthandler.dump_traceback_later(0.9 * timeout, file=stacks)
            answer = _run(function, args, rank, ranks, store, timeout)
            faulthandler.cancel_dump_traceback_later()
            pipe.send_bytes(answer)


def _run(function: Callable, args: tuple, rank: int, ranks: int, store: str, timeout: float) -> bytes:
    """Return the pickled (has failed, result or exception, traceback)."""
    from torch import distributed

    try:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=0.8 * timeout),
        )
        answer = pickle.dumps((False, function(*args), ""))
        distributed.destroy_process_group()
        _forget_meshes()
        return answer
    except Exception as error:
        return _pickled_failure(error, traceback.format_exc())


def _forget_meshes() -> None:
    """Clear DTensor's caches: they hold meshes of this run, whose groups' names the next run gives to other groups."""
    from torch.distributed.tensor import _redistribute, debug

    debug._clear_sharding_prop_cache()
    debug._clear_fast_path_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    for entry in vars(_redistribute).values():
        if isinstance(entry, functools._lru_cache_wrapper):
            entry.cache_clear()


def _pickled_failure(error: Exception, text: str) -> bytes:
    answer = pickle.dumps((True, RuntimeError(f"{type(error).__name__}: {error}"), text))
    try:
        as_raised = pickle.dumps((True, error, text))
        pickle.loads(as_raised)
    except Exception:  # some exceptions cannot be pickled; their text can
        return answer
    return as_raised
