"""Start the ranks of a run on this machine, watch over them, and end them all together."""

import multiprocessing
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
import torch.distributed as dist

from mmcp.parallel.collectives import PeerError

SETTLE = 1.0  # seconds to wait for the cause when only its consequences have been seen
GRACE = 3.0  # seconds a rank has to end by itself after a failure before it is killed
LEAVE = 20.0  # seconds a rank that has returned has to leave the interpreter
_CONSEQUENCE = re.compile(
    r"gloo/transport|[Cc]onnection (closed|reset|refused)|Broken pipe|NCCL error|remote process exited"
)


class RankError(ChildProcessError):
    """The first failure of a run: which rank and why; the rank's traceback is its note."""

    def __init__(self, rank: int, reason: str, details: str = ""):
        super().__init__(f"rank {rank}: {reason}")
        self.rank = rank
        if details:
            self.add_note(details)


@dataclass(frozen=True)
class _Outcome:
    """How one rank ended."""

    rank: int
    value: Any = None
    """What the function returned; kept for rank 0 only."""
    reason: str = ""
    """Why it failed; empty on success."""
    details: str = ""
    """The traceback of the failure."""
    is_consequence: bool = False
    """Whether the failure only tells of another rank's."""


def launch(function: Callable[..., Any], ranks: int, *args: Any) -> Any:
    """Run `function(*args)` on `ranks` processes of this machine and return what rank 0 returns.

    The function is a module-level one; torchrun's environment variables are set, so `process_group()` needs no
    argument. Each rank leads a session of its own and gets its share of the cores as threads. When one rank raises,
    exits or is killed, all are ended within seconds and RankError names the one that failed first. SIGTERM and SIGINT
    go to the ranks as a request to stop (see StopRequest); a second one kills them. When this process dies, they die.
    Under torchrun the function is called directly.
    Raises ValueError for a number of ranks that cannot be, RankError, SystemExit when a stop ended a rank.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        if int(os.environ["WORLD_SIZE"]) != ranks:
            raise ValueError(
                f"ranks={ranks}, but torchrun started {os.environ['WORLD_SIZE']}; give both the same number"
            )
        return function(*args)
    if ranks < 1:
        raise ValueError(f"ranks={ranks}: a run needs at least one rank")
    job = _Job()
    with _signals_to(job.stop):
        try:
            job.start(function, ranks, args)
            value = job.watch()
        except BaseException:
            job.end(has_failed=True)
            raise
        job.end(has_failed=False)
        return value


def end_with_parent() -> None:
    """Kill this process and its session as soon as the process that started it is gone; for ranks and workers."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "end_with_parent is for processes started by multiprocessing"

    def watch() -> None:
        wait([parent.sentinel])
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


class _Job:
    """The processes of one run, seen from the process that started them."""

    def __init__(self) -> None:
        self.processes: list[BaseProcess] = []
        self.pipes: list[Connection] = []
        self.signals = 0
        """Requests to stop received so far."""
        self.store: dist.TCPStore | None = None

    def start(self, function: Callable[..., Any], ranks: int, args: tuple[Any, ...]) -> None:
        """Start the processes; the store through which they find each other lives here, so no port can be lost."""
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("spawn")
        for rank in range(ranks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(function, args, rank, sender), name=f"rank {rank}")
            with _environment(_rank_environment(rank, ranks, self.store.port)):
                process.start()
            sender.close()
            self.processes.append(process)
            self.pipes.append(receiver)

    def watch(self) -> Any:
        """Wait until every rank has ended; return rank 0's value or raise for the first that failed."""
        outcomes: dict[int, _Outcome] = {}
        give_up = float("inf")
        while len(outcomes) < len(self.processes):
            waiting = [rank for rank in range(len(self.processes)) if rank not in outcomes]
            sources = [self.pipes[rank] for rank in waiting] + [self.processes[rank].sentinel for rank in waiting]
            wait(sources, timeout=max(0.0, min(give_up - time.monotonic(), 60.0)))
            for rank in waiting:
                outcome = self._outcome(rank)
                if outcome:
                    outcomes[rank] = outcome
            failed = [outcome for outcome in outcomes.values() if outcome.reason]
            if failed and give_up == float("inf"):
                give_up = time.monotonic() + SETTLE
            causes = [outcome for outcome in failed if not outcome.is_consequence]
            if causes or time.monotonic() >= give_up:
                first = (causes or failed)[0]
                raise RankError(first.rank, first.reason, first.details)
        return outcomes[0].value

    def _outcome(self, rank: int) -> _Outcome | None:
        """Return how a rank ended, None while it runs."""
        process = self.processes[rank]
        has_ended = not process.is_alive()
        if self.pipes[rank].poll():
            with suppress(EOFError):
                return self.pipes[rank].recv()
            process.join(GRACE)
            has_ended = not process.is_alive()
        if not has_ended:
            return None
        code = process.exitcode or 0
        if self.signals and code in (-signal.SIGTERM, -signal.SIGKILL):
            raise SystemExit(128 + signal.SIGTERM)
        if code < 0:
            name = signal.Signals(-code).name
            hint = "; the machine may have run out of memory" if name == "SIGKILL" else ""
            return _Outcome(rank, reason=f"was ended by {name}{hint}")
        return _Outcome(rank, reason=f"ended without a word, exit code {code}")

    def stop(self) -> None:
        """Ask the ranks to stop; asked again, kill them."""
        self.signals += 1
        for process in self.processes:
            if self.signals > 1:
                _kill(process)
            elif process.is_alive() and process.pid:
                os.kill(process.pid, signal.SIGTERM)

    def end(self, *, has_failed: bool) -> None:
        """Leave no process behind: let those that are done leave, end the others and all that they started."""
        if has_failed:
            self._ask_to_end()
        deadline = time.monotonic() + (GRACE if has_failed else LEAVE)
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self.processes:
            _kill(process)

    def _ask_to_end(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.terminate()


def _kill(process: BaseProcess) -> None:
    """Kill a rank, its session, and those of its descendants that left the session."""
    assert process.pid is not None, "only started processes are ended"
    descendants: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        descendants = psutil.Process(process.pid).children(recursive=True)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    for descendant in descendants:
        with suppress(psutil.NoSuchProcess):
            descendant.kill()
    process.join()


def _rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """What torchrun would set, and each rank's share of the cores unless the user has chosen one."""
    numbers = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_WORLD_SIZE": ranks,
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", max(1, len(os.sched_getaffinity(0)) // ranks)),
    }
    words = {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    if "lo" in (name for _, name in socket.if_nameindex()):
        words["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return {**{name: str(number) for name, number in numbers.items()}, **words}


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables while a process starts, because a thread pool is sized when torch is imported."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _signals_to(action: Callable[[], None]) -> Iterator[None]:
    """Call `action` on SIGTERM and SIGINT; signals reach the main thread alone, elsewhere nothing is changed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda *_: action())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _rank(function: Callable[..., Any], args: tuple[Any, ...], rank: int, pipe: Connection) -> None:
    """Live one rank's life: run the function, tell how it ended."""
    os.setsid()
    end_with_parent()
    try:
        value = function(*args)
        pipe.send(_Outcome(rank, value=value if rank == 0 else None))
    except BaseException as error:
        pipe.send(_failure(rank, error))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # a regular exit may wait for other ranks or for workers


def _failure(rank: int, error: BaseException) -> _Outcome:
    text = str(error) or "no message"
    place = traceback.extract_tb(error.__traceback__)[-1]
    is_plain = isinstance(error, ValueError | OSError)
    reason = text if is_plain else f"{type(error).__name__}: {text} ({place.filename}:{place.lineno})"
    is_consequence = isinstance(error, PeerError) or bool(_CONSEQUENCE.search(text))
    return _Outcome(rank, reason=reason, details=traceback.format_exc(), is_consequence=is_consequence)
