"""Nanoseconds of the library's own decoding of a file and of a photo, by setting of `rates`.

Of a video the first frame is decoded alone, then the last of the same group of pictures, then the whole group, then the
first frames of several groups: their differences are decoding, conversion and seeking.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from data_pipelines.container import ClipIndex
from data_pipelines.decode import decode_frames, decode_image
from data_pipelines.demux import read_index
from data_pipelines.media import as_media_file
from data_pipelines.sound import decode_audio
from encoders.mel import log_mel_raw
from mmcp.sequence import HOP

PHOTO = (1080, 1440)
MEGAPIXEL = 1_000_000
GROUPS = 16  # whose first frames are sought
MEL_BINS = 80
MOST_SAMPLES = 60 * 16_000  # of sound: a minute


def decode_rates(file: Path, *, size: tuple[int, int], folder: Path, repeats: int) -> dict[str, int]:
    """Measure a file with picture and sound, whose frames are shown at `size`; a photo is written into `folder`."""
    index = read_index(as_media_file(file), need=("video", "audio"))
    video = picture_rates(file, index, size, repeats)
    photo = photo_ns(folder / "photo.jpg", size, repeats)
    return video | {
        "image_ns_per_megapixel": max(0, photo - video["convert_ns_per_megapixel"]),
        "packet_ns": packet_ns(file, index, repeats),
    }


def picture_rates(file: Path, index: ClipIndex, size: tuple[int, int], repeats: int) -> dict[str, int]:
    """Nanoseconds a megapixel of decoding and of conversion, and nanoseconds of a seek."""
    assert index.video is not None, "read with need=video"
    starts = np.unique(index.video.starts(np.arange(index.video.num_frames)))
    group = int(starts[1]) if len(starts) > 1 else index.video.num_frames
    megapixels = index.video.display[0] * index.video.display[1] / MEGAPIXEL

    def seconds(frames: Sequence[int]) -> float:
        return quickest(lambda: decode_frames(str(file), index, frames, size), repeats)

    first, last, whole = seconds([0]), seconds([group - 1]), seconds(range(group))
    decode = max(0.0, last - first) / max(1, group - 1)
    convert = max(0.0, whole - last) / max(1, group - 1)
    apart = starts[:: max(1, len(starts) // GROUPS)][:GROUPS].tolist()
    seek = max(0.0, (seconds(apart) - first) / max(1, len(apart) - 1) - decode - convert)
    return {
        "decode_ns_per_megapixel": round(1e9 * decode / megapixels),
        "convert_ns_per_megapixel": round(1e9 * convert / megapixels),
        "seek_ns": round(1e9 * seek),
    }


def packet_ns(file: Path, index: ClipIndex, repeats: int) -> int:
    """Nanoseconds of one packet of sound, its log-mel included."""
    assert index.audio is not None, "read with need=audio"
    begin, stop = index.audio_samples
    end = min(stop, begin + MOST_SAMPLES)

    def hear() -> None:
        samples = decode_audio(str(file), index, begin, end).samples
        log_mel_raw(samples, 0, end - begin, frames=(end - begin) // HOP, bins=MEL_BINS)

    packets = len(index.audio.pts) * (end - begin) / (stop - begin)
    return round(1e9 * quickest(hear, repeats) / packets)


def photo_ns(file: Path, size: tuple[int, int], repeats: int) -> int:
    """Nanoseconds a megapixel of a JPEG, from the file to the encoder's input."""
    noise = np.random.default_rng(0).integers(0, 256, (PHOTO[0] // 8, PHOTO[1] // 8, 3), dtype=np.uint8)
    Image.fromarray(noise).resize(PHOTO[::-1]).save(file)
    return round(1e9 * quickest(lambda: decode_image(str(file), size), repeats) * MEGAPIXEL / (PHOTO[0] * PHOTO[1]))


def quickest(job: Callable[[], object], repeats: int) -> float:
    """Seconds of the quickest of several calls."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        job()
        seconds.append(time.perf_counter() - began)
    return min(seconds)
