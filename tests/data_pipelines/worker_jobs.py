"""Jobs that tests give to decode workers; a worker imports them by name."""

import ctypes
import os
import signal
import time

import numpy as np

from data_pipelines.decode import decode_frames, decode_image
from data_pipelines.demux import read_index
from data_pipelines.sound import decode_audio
from data_pipelines.tar_index import index_tar


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


def use_file(path):
    """Do with a file what a run does with it."""
    if path.endswith((".jpg", ".png", ".gif")):
        decode_image(path, (8, 8))
    elif path.endswith(".tar"):
        index_tar(path)
    else:
        index = read_index(path)
        if index.video is not None:
            last = index.video.num_frames - 1
            decode_frames(path, index, [0, last // 2, last], (16, 24))
        if index.audio is not None:
            decode_audio(path, index, 0, min(index.audio_samples[1], 100_000))
    return {"used": path}, []
