"""Frames by number through decord, for clips whose index proves that it gives the right ones.

decord seeks to the key frame that the container marks and counts frames from there. That is right where every key frame
is closed, every frame has its own stored time and nothing was repaired; elsewhere it gives other frames without a word
(transport streams, AVI, open groups of pictures, recovery points). So the index decides, and what decord says of key
frames and times is compared with it before a frame is used. It has no part in a plan: a clip has the same units, frames
and times whichever backend reads it.
"""

from collections.abc import Sequence
from typing import Any

import av
import numpy as np

from data_pipelines.container import ClipIndex, VideoTrack
from data_pipelines.decode import Frames, Upright, decode_frames
from data_pipelines.media import MediaError, MediaFile, as_media_file
from mmcp.registry import Registry

FORMATS = ("mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm")
CODECS = ("h264", "vp8", "vp9", "mjpeg")
PIXELS = ("yuv420p", "yuvj420p")
TOLERANCE = 1e-4  # seconds
RESOLUTION = 2e-7  # relative: decord's times are float32
UPRIGHT = (False, False, False)

BACKENDS = Registry("video backend")
BACKENDS.register("pyav")(decode_frames)


def backend_for(wanted: str, index: ClipIndex) -> tuple[str, str]:
    """Return the backend that reads a clip, and why it is not the one wanted; a function of its whole index alone."""
    if wanted not in BACKENDS:
        raise ValueError(f"video backend '{wanted}' is unknown; use one of {', '.join(sorted(BACKENDS))}")
    reason = why_unsafe(index) if wanted == "decord" else ""
    return ("pyav", reason) if reason else (wanted, "")


def why_unsafe(index: ClipIndex) -> str:
    """Why decord may not read a clip; empty when the index proves that it gives the right frames."""
    track = index.video
    if track is None:
        return "the clip has no pictures"
    facts = [
        (index.format in FORMATS, f"the format {index.format} keeps no times that decord reads rightly"),
        (track.codec in CODECS, f"decord is not known to be right for {track.codec}"),
        (track.pixels in PIXELS, f"the pixel format is {track.pixels}"),
        (not track.counted and track.seekable, "its time stamps had to be repaired"),
        (track.turn == UPRIGHT, "the picture is turned"),
        (_all_closed(track), "frames refer back across a key frame"),
    ]
    return next((reason for holds, reason in facts if not holds), "")


def _all_closed(track: VideoTrack) -> bool:
    """Whether, at every entry, all frames shown before it are stored before it, and those shown after it after it."""
    packets = np.asarray(track.packet)
    before = np.maximum.accumulate(np.append(-1, packets))[np.asarray(track.entry_frames)]
    after = np.minimum.accumulate(packets[::-1])[::-1][np.asarray(track.entry_frames)]
    entries = np.asarray(track.entry_packets)
    return bool((before < entries).all() and (after == entries).all())


@BACKENDS.register("decord")
def decode_with_decord(
    source: str | MediaFile, index: ClipIndex, frames: Sequence[int], size: tuple[int, int]
) -> Frames:
    """Decode frames by number, as `decode_frames` does; the clip must be one for which `why_unsafe` is empty.

    Raises MediaError when decord cannot read the file, or says something else than the index.
    """
    source, track = as_media_file(source), index.video
    assert track is not None, "a clip without pictures has no frames"
    wanted, rows = np.unique(np.asarray(frames, dtype=np.int64), return_inverse=True)
    reader = _opened(source, index, track)
    convert = Upright(UPRIGHT, size)
    pixels = np.empty((len(wanted), *size, 3), dtype=np.uint8)
    for row, frame in enumerate(wanted.tolist()):
        try:
            native = reader[frame].asnumpy()
        except Exception as error:  # decord raises its own errors, IndexError and RuntimeError
            reason = f"decord cannot decode frame {frame} ({_first_line(error)})"
            raise MediaError(str(source), reason, index.frame_time(frame)) from None
        pixels[row] = convert(av.VideoFrame.from_ndarray(native, format="rgb24"))
    return Frames(pixels[rows], len(wanted), ())


def _opened(source: MediaFile, index: ClipIndex, track: VideoTrack) -> Any:
    """Open a clip with decord and compare what it says of it with the index."""
    import decord  # an extra with wheels for x86-64 only

    path = source.path
    if source.size is not None:
        path = f"subfile,,start,{source.offset},end,{source.offset + source.size},,:{source.path}"
    first, stop = track.pts.first, track.num_frames
    try:
        reader = decord.VideoReader(path, num_threads=1)
        times = np.asarray(reader.get_frame_timestamp(range(first, stop)))[:, 0]
        keys = np.asarray(reader.get_key_indices())
    except Exception as error:
        raise MediaError(str(source), f"decord cannot read it ({_first_line(error)}); use the backend pyav") from None
    expected = (np.asarray(track.pts) - track.pts[first]) * float(track.time_base)
    entries = np.asarray(track.entry_frames)
    off = float(np.abs(times - times[0] - expected).max(initial=0))
    if off > TOLERANCE + RESOLUTION * float(times[-1]):
        raise MediaError(str(source), f"decord's times are {off:g} s off those of the index; use the backend pyav")
    inside, ours = (numbers[(numbers >= first) & (numbers < stop)] for numbers in (keys, entries))
    if not np.array_equal(inside, ours):
        raise MediaError(str(source), "decord starts at other key frames than the index; use the backend pyav")
    return reader


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
