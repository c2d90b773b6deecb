"""Ways to read frames and sound of a long clip, each measured in a process of its own: ours and those of others.

A reader takes a file and returns what it read. `measured` runs one in a fresh process and returns its seconds of wall
clock and CPU, and how much memory it took at its peak beyond what the process held before. Packages that are only
measured, and that nothing here depends on, are imported by name.
"""

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import av
import numpy as np

from data_pipelines.container import ClipIndex
from data_pipelines.decode import decode_frames
from data_pipelines.demux import read_index
from data_pipelines.media import as_media_file as media
from data_pipelines.media import demux, open_container
from data_pipelines.sound import SoundReader
from encoders.mel import log_mel_raw, needed
from mmcp.registry import Registry
from mmcp.sequence import HOP, SAMPLE_RATE

READERS = Registry("reader")
PART_S = 60  # seconds of sound at a time
BINS = 128


def one_a_second(file: str, frames: int) -> tuple[ClipIndex, list[int]]:
    """The index, and the frames that a player shows at the first `frames` whole seconds."""
    index = read_index(file, need=("video",))
    return index, [index.frame_at(Fraction(second)) for second in range(frames)]


@READERS.register("index")
def index_only(file: str, **_: Any) -> Any:
    """Read the index."""
    return read_index(file)


@READERS.register("mmcp")
def ours(file: str, *, frames: int, size: tuple[int, int], **_: Any) -> np.ndarray:
    """Index the file, decode, resize and drop one by one."""
    index, numbers = one_a_second(file, frames)
    return decode_frames(file, index, numbers, size).pixels


@READERS.register("mmcp, spread")
def ours_spread(file: str, *, frames: int, size: tuple[int, int], **_: Any) -> np.ndarray:
    """Frames evenly spread over the whole file."""
    index = read_index(file, need=("video",))
    times = [index.duration * number / frames for number in range(frames)]
    return decode_frames(file, index, [index.frame_at(time) for time in times], size).pixels


@READERS.register("mmcp through decord")
def ours_by_decord(file: str, *, frames: int, size: tuple[int, int], **_: Any) -> np.ndarray:
    """The same by our decord backend."""
    from data_pipelines.decord_frames import decode_with_decord

    index, numbers = one_a_second(file, frames)
    return decode_with_decord(file, index, numbers, size).pixels


@READERS.register("PyAV, float batch")
def pyav_native(file: str, *, frames: int, **_: Any) -> np.ndarray:
    """Seek to the key frame before each second, decode up to it, keep it at native size; then a float batch."""
    pictures = []
    with av.open(file) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        assert stream.time_base is not None
        for second in range(frames):
            due = round(second / stream.time_base)
            container.seek(due, stream=stream, backward=True)
            shown = next(frame for frame in container.decode(stream) if frame.pts is not None and frame.pts >= due)
            pictures.append(shown.to_ndarray(format="rgb24"))
    return _as_floats(np.stack(pictures))


@READERS.register("decord, float batch")
def decord_native(file: str, *, frames: int, **_: Any) -> np.ndarray:
    """get_batch at native size; then a float batch."""
    import decord

    reader = decord.VideoReader(file, num_threads=1)
    return _as_floats(reader.get_batch(_by_average_rate(reader, frames)).asnumpy())


@READERS.register("decord, resized")
def decord_resized(file: str, *, frames: int, size: tuple[int, int], **_: Any) -> np.ndarray:
    """get_batch at the model's size."""
    import decord

    reader = decord.VideoReader(file, num_threads=1, height=size[0], width=size[1])
    return reader.get_batch(_by_average_rate(reader, frames)).asnumpy()


@READERS.register("torchcodec, float batch")
def torchcodec_native(file: str, *, frames: int, **_: Any) -> np.ndarray:
    """get_frames_played_at at native size, exact mode; then a float batch."""
    decoder = import_module("torchcodec.decoders").VideoDecoder(file, num_ffmpeg_threads=1, seek_mode="exact")
    return _as_floats(decoder.get_frames_played_at(list(range(frames))).data.numpy())


@READERS.register("mmcp, log-mel in parts")
def mel_in_parts(file: str, *, seconds: int, **_: Any) -> np.ndarray:
    """Log-mel, a minute at a time, of a waveform that is read from its file in parts."""
    total = seconds * SAMPLE_RATE
    result = np.empty((BINS, total // HOP), dtype=np.float32)
    for first in range(0, total, PART_S * SAMPLE_RATE):
        count = min(PART_S * SAMPLE_RATE, total - first) // HOP
        low, high = needed(first, total, frames=count)
        samples = np.fromfile(file, dtype=np.float32, count=high - low, offset=4 * low)
        part = log_mel_raw(samples, first, total, frames=count, bins=BINS)
        result[:, first // HOP : first // HOP + count] = part
    np.maximum(result, result.max() - 8, out=result)
    result += 4
    result /= 4
    return result


@READERS.register("transformers, log-mel")
def mel_whole(file: str, *, seconds: int, **_: Any) -> np.ndarray:
    """WhisperFeatureExtractor on the same waveform."""
    extractor = import_module("transformers").WhisperFeatureExtractor(feature_size=BINS, chunk_length=seconds)
    samples = np.fromfile(file, dtype=np.float32, count=seconds * SAMPLE_RATE)
    return extractor(samples, sampling_rate=SAMPLE_RATE, return_tensors="np", padding="longest")["input_features"][0]


@READERS.register("log-mel difference")
def mel_difference(file: str, *, seconds: int, **_: Any) -> np.ndarray:
    """The largest difference between parts and transformers' own float64 transform of the whole."""
    samples = np.fromfile(file, dtype=np.float32, count=seconds * SAMPLE_RATE).astype(np.float64)
    theirs = (
        import_module("transformers")
        .WhisperFeatureExtractor(feature_size=BINS)
        ._np_extract_fbank_features(samples[None], "cpu")[0]
    )
    ours = mel_in_parts(file, seconds=seconds)
    assert ours.shape == theirs.shape, f"{ours.shape} of ours, {theirs.shape} of theirs"
    return np.abs(ours - theirs).max()


@READERS.register("mmcp, sound in parts")
def sound_in_parts(file: str, **_: Any) -> np.ndarray:
    """Decode the sound a minute at a time; what is returned is the loudness of each minute."""
    index = read_index(file, need=("audio",))
    begin, end = index.audio_samples
    parts = range(begin, end, PART_S * SAMPLE_RATE)
    with SoundReader(file, index) as sound:
        return np.array([np.abs(sound.read(at, min(at + PART_S * SAMPLE_RATE, end)).samples).mean() for at in parts])


@READERS.register("PyAV, whole sound")
def sound_whole(file: str, **_: Any) -> np.ndarray:
    """Decode and resample all of the sound into one waveform."""
    with open_container(media(file)) as container:
        stream = container.streams.audio[0]
        resampler = av.AudioResampler(format="flt", layout="mono", rate=SAMPLE_RATE)
        frames = (frame for packet in demux(container, stream) for frame in packet.decode())
        parts = [part.to_ndarray()[0] for frame in frames for part in resampler.resample(frame)]  # type: ignore[arg-type]
        return np.concatenate([*parts, *(part.to_ndarray()[0] for part in resampler.resample(None))])


def _as_floats(pictures: np.ndarray) -> np.ndarray:
    batch = pictures.astype(np.float32)
    batch /= 255
    return batch


def _by_average_rate(reader: Any, frames: int) -> list[int]:
    """Frame numbers at whole seconds, as readers without an index take them: seconds x average rate."""
    return [min(round(second * reader.get_avg_fps()), len(reader) - 1) for second in range(frames)]


def why_not(name: str) -> str:
    """Why a reader cannot run here; empty when it can."""
    package = name.replace("mmcp through ", "").split(",")[0].lower()
    if package in ("decord", "torchcodec", "transformers") and find_spec(package) is None:
        return f"{package} is not installed"
    return ""


def measured(name: str, file: Path, **settings: Any) -> dict[str, Any]:
    """Run a reader in a fresh process; return what it took, or {"reader", "error"}."""
    job = json.dumps({"name": name, "file": str(file), "settings": settings})
    ended = subprocess.run([sys.executable, "-m", "experiments.bench_readers", job], capture_output=True, text=True)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines()
        return {"reader": name, "error": lines[-1] if lines else f"exit code {ended.returncode}"}
    return {"reader": name, **json.loads(ended.stdout.strip().splitlines()[-1])}


def measure_here(read: Callable[..., Any], file: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Run a reader in this process, after a first short run that imports what it needs."""
    short: dict[str, Any] = {name: 1 for name in ("frames", "seconds") if name in settings}
    if short:
        read(file, **{**settings, **short})
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = _status("VmRSS")
    began, cpu = time.perf_counter(), _cpu()
    result = read(file, **settings)
    seconds, cpu = time.perf_counter() - began, _cpu() - cpu
    size = result.nbytes if isinstance(result, np.ndarray | np.generic) else 0
    taken = {"seconds": seconds, "cpu_s": cpu, "peak_mb": _status("VmHWM") - before, "result_mb": size / 1e6}
    return {**taken, "value": float(result)} if np.ndim(result) == 0 and size else taken


def _status(field: str) -> float:
    """A field of this process's memory, in MB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 / 1e6 for line in lines if line.startswith(field))


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    job = json.loads(sys.argv[1])
    print(json.dumps(measure_here(READERS[job["name"]], job["file"], job["settings"])))
