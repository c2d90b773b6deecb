"""Jobs that tests give to decode workers; a worker imports them by name."""

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


def crash():
    os.kill(os.getpid(), signal.SIGSEGV)


def slow(step):
    time.sleep(0.05 * (step % 2))
    return {"step": step}, []
