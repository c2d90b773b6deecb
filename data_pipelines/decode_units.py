"""Decode the units of one track that a plan gives to one rank; runs in a decode worker."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

import numpy as np

from data_pipelines.container import ClipIndex
from data_pipelines.decode import decode_image
from data_pipelines.decord_frames import BACKENDS
from data_pipelines.media import MediaFile
from data_pipelines.slow_sound import averaged_mel
from data_pipelines.sound import SoundReader, packets_needed
from mmcp.sequence import HOP, Unit

SOUND_RUN = 64  # windows decoded at once: a minute of one-second windows, 4 MB of samples

LogMel = Callable[..., np.ndarray]
"""(samples, first, total, *, frames) -> [bins, frames] raw log-mel; `first` counts from the start of the sound."""
Needed = Callable[..., tuple[int, int]]
"""(first, total, *, frames) -> first and last + 1 sample that such a piece is computed from."""


def decode_units(
    kind: str,
    file: MediaFile,
    index: ClipIndex | None,
    units: Sequence[Unit],
    log_mel: LogMel,
    needed: Needed,
    *,
    backend: str = "pyav",
) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Decode units of one kind from one file, in order.

    index:   of the file, or an excerpt of it
    backend: reads the pictures of a video; what `backend_for` says of the whole index
    Returns a header {"seconds", "frames", "notes"} (seconds spent, video frames decoded, damage found) and an array per
    unit: image [h, w, 3] and video [f, h, w, 3] uint8, audio [bins, frames] float32.
    Raises MediaError for a file that cannot be read.
    """
    began = time.perf_counter()
    frames, notes = 0, list[str]()
    if kind == "image":
        arrays = [decode_image(file, (unit.size[0], unit.size[1])) for unit in units]
    else:
        assert index is not None, f"{file}: {kind} is decoded by its index"
        if kind == "video":
            arrays, frames, notes = _video(file, index, units, backend)
        else:
            with SoundReader(file, index) as sound:
                arrays, notes = _sound(sound, units, log_mel, needed)
    return {"seconds": time.perf_counter() - began, "frames": frames, "notes": notes}, arrays


def excerpt(kind: str, index: ClipIndex, units: Sequence[Unit], needed: Needed) -> ClipIndex:
    """What of an index `decode_units` needs for some units of one track: the other track and other stretches go.

    An hour's index is a megabyte; a job travels to its worker with a few kilobytes of it.
    """
    if kind == "video":
        assert index.video is not None, "a clip without pictures has no frame groups"
        start, stop = min(unit.decode[0] for unit in units), max(unit.decode[1] for unit in units)
        return replace(index, video=index.video.window(start, stop), audio=None)
    assert index.audio is not None, "a clip without sound has no windows"
    begin, end = index.audio_samples
    spans = [
        needed(unit.items[0] - begin, end - begin, frames=max(unit.size[0], (unit.items[1] - unit.items[0]) // HOP))
        for unit in units
    ]
    low, high = min(low for low, _ in spans), max(high for _, high in spans)
    return replace(index, video=None, audio=index.audio.window(*packets_needed(index.audio, low, high)))


def _video(
    file: MediaFile, index: ClipIndex, units: Sequence[Unit], backend: str
) -> tuple[list[np.ndarray], int, list[str]]:
    arrays, decoded, notes = [], 0, []
    for size, run in groupby(units, key=lambda unit: unit.size[1:]):
        group = list(run)
        wanted = sorted({frame for unit in group for frame in unit.items})
        found = BACKENDS[backend](file, index, wanted, size)
        place = {frame: i for i, frame in enumerate(wanted)}
        arrays += [found.pixels[[place[frame] for frame in unit.items]] for unit in group]
        decoded += found.num_decoded
        if found.damaged:
            notes.append(f"{file}: {len(found.damaged)} damaged frames were used, the first is {found.damaged[0]}")
    return arrays, decoded, notes


def _sound(
    reader: SoundReader, units: Sequence[Unit], log_mel: LogMel, needed: Needed
) -> tuple[list[np.ndarray], list[str]]:
    begin, end = reader.index.audio_samples
    total, arrays, lost, cleaned = end - begin, [], 0, 0

    def piece(start: int, first: int, frames: int) -> np.ndarray:
        """Log-mel of `frames` frames from `first` on, counted from sample `start` of the sound."""
        nonlocal lost, cleaned
        low, high = needed(start + first * HOP, total, frames=frames)
        sound = reader.read(low + begin, high + begin)
        lost, cleaned = lost + sound.lost_packets, cleaned + sound.cleaned
        return log_mel(sound.samples, start + first * HOP, total, frames=frames)

    for run in _runs(units):
        if _is_slow(run[0]):
            (unit,), start = run, run[0].items[0] - begin
            arrays.append(averaged_mel(partial(piece, start), (unit.items[1] - unit.items[0]) // HOP, unit.size[0]))
            continue
        low, _ = needed(run[0].items[0] - begin, total, frames=run[0].size[0])
        _, high = needed(run[-1].items[0] - begin, total, frames=run[-1].size[0])
        sound = reader.read(low + begin, high + begin)
        lost, cleaned = lost + sound.lost_packets, cleaned + sound.cleaned
        for unit in run:
            first, frames = unit.items[0] - begin, unit.size[0]
            start, stop = needed(first, total, frames=frames)
            arrays.append(log_mel(sound.samples[start - low : stop - low], first, total, frames=frames))
    notes = [f"{reader.source}: {lost} sound packets could not be decoded and are silent"] if lost else []
    notes += [f"{reader.source}: {cleaned} samples were not finite and became 0"] if cleaned else []
    return arrays, notes


def _runs(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Join windows that follow each other, so that their overlap is decoded once; slow ones stay alone."""
    run: list[Unit] = []
    for unit in units:
        is_new = run and (run[-1].items[1] != unit.items[0] or len(run) == SOUND_RUN)
        if is_new or (run and (_is_slow(unit) or _is_slow(run[-1]))):
            yield run
            run = []
        run.append(unit)
    if run:
        yield run


def _is_slow(unit: Unit) -> bool:
    """Whether a window stands for more mel frames than it has."""
    return (unit.items[1] - unit.items[0]) // HOP > unit.size[0]
