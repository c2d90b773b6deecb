"""Jobs that tests give to decode workers; a worker imports them by name."""

import ctypes
import os
import signal
import time

import numpy as np


def squares(count):
    return {"count": count}, [np.arange(count, dtype=np.int64) ** 2, np.ones((0, 3), np.float32)]


def fail():
    raise ValueError("clip.mp4 is empty")


def hang():
    time.sleep(1000)


def hang_in_native_code():
    """Never come back, and hold the interpreter's lock meanwhile."""
    ctypes.PyDLL(None).sleep(1000)


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def crash_in_native_code():
    """Read address 0."""
    ctypes.string_at(0)


def slow(step):
    time.sleep(0.05 * (step % 2))
    return {"step": step}, []
