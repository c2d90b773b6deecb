"""Jobs that tests give to decode workers; a worker imports them by name."""

import os
import signal
import time

import numpy as np

from data_pipelines.decode_units import decode_units


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


def decode_but_hang_on_sound(kind, file, index, units, log_mel, needed):
    """Decode as ever, but never come back from a file without a picture."""
    if index is not None and index.video is None:
        time.sleep(10_000)
    return decode_units(kind, file, index, units, log_mel, needed)
