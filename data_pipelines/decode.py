"""Decode given frames, one image: exactly those asked for, each in the model's size as soon as it is decoded.

Pictures come out upright (display matrix, EXIF), with square pixels, in RGB. Resizing is swscale's bicubic filter with
exact rounding, widened when it shrinks (antialiased), on one thread: the same bits on every run. What is transparent
shows BACKGROUND. Interlaced frames are given as stored, both fields woven. An animated image is its first frame.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import av
import numpy as np
from av.video.reformatter import Interpolation, VideoReformatter
from PIL import Image, ImageOps, UnidentifiedImageError

from data_pipelines.container import ClipIndex, VideoTrack
from data_pipelines.media import MediaError, MediaFile, as_media_file, open_container
from data_pipelines.track_reader import TrackReader

BACKGROUND = 255  # white, as a page
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
SKIP_UNREFERRED = ("h264", "hevc", "mpeg1video", "mpeg2video", "mpeg4")
"""Codecs whose decoders can be told, packet by packet, to leave out a picture that no other refers to."""
FILTER = (
    Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT | Interpolation.BITEXACT
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Frames:
    """What decode_frames gives."""

    pixels: np.ndarray
    """[n, h, w, 3] uint8."""
    num_decoded: int
    """Packets that went through the decoder."""
    damaged: tuple[int, ...]
    """Frames among those asked for that the decoder had to repair, because the file's bytes are wrong."""


@dataclass(frozen=True, slots=True)
class FrameNumbers:
    """Which frame a packet holds."""

    first: int
    """The first packet that holds a frame."""
    frames: np.ndarray
    """[n] int32: the frame of each packet from it on; -1 for none."""

    def of(self, packet: int) -> int | None:
        """The frame of a packet; None when it holds none."""
        at = packet - self.first
        frame = int(self.frames[at]) if 0 <= at < len(self.frames) else -1
        return frame if frame >= 0 else None


@dataclass(slots=True)
class Run:
    """A stretch of packets, decoded without a gap, and the frames wanted of it."""

    start: int
    stop: int
    frames: list[int]


def decode_frames(source: str | MediaFile, index: ClipIndex, frames: Sequence[int], size: tuple[int, int]) -> Frames:
    """Decode frames by number, in one pass through the file; repeats and any order are fine.

    frames: [n]     numbers in display order
    size: (h, w)    of the result, upright
    Raises MediaError with the file and the time when a frame cannot be decoded.
    """
    source, track = as_media_file(source), _video(source, index)
    wanted, rows = np.unique(np.asarray(frames, dtype=np.int64), return_inverse=True)
    if len(wanted) and not 0 <= wanted[0] <= wanted[-1] < track.num_frames:
        raise ValueError(f"{source} has frames 0..{track.num_frames - 1}, asked for {wanted[0]}..{wanted[-1]}")
    distinct = np.empty((len(wanted), *size, 3), dtype=np.uint8)
    row_of = {int(frame): row for row, frame in enumerate(wanted)}
    damaged, num_decoded = [], 0
    with open_container(source) as container:
        reader, numbers = TrackReader(container, track, str(source)), FrameNumbers(*track.frames_by_packet())
        convert = Upright(track.turn, size)
        for run in _runs(track, wanted):
            num_decoded += run.stop - run.start
            missing = set(run.frames)
            for number, picture in _pictures(reader, track, numbers, run):
                if number in missing:
                    missing.remove(number)
                    distinct[row_of[number]] = convert(picture)
                    if picture.is_corrupt:
                        damaged.append(number)
            if missing:
                lost = min(missing)
                raise MediaError(str(source), f"frame {lost} cannot be decoded", index.frame_time(lost))
    in_order = np.array_equal(rows, np.arange(len(wanted)))
    return Frames(distinct if in_order else distinct[rows], num_decoded, tuple(damaged))


def _video(source: MediaFile, index: ClipIndex) -> VideoTrack:
    if index.video is None:
        raise MediaError(str(source), "no video stream")
    return index.video


def _runs(track: VideoTrack, wanted: np.ndarray) -> list[Run]:
    """Cut the frames wanted into runs: a decoder starts anew where an entry lies beyond all that it needed so far."""
    runs: list[Run] = []
    for frame, start, stop in zip(wanted, track.starts(wanted), track.stops(wanted), strict=True):
        if not runs or start > runs[-1].stop:
            runs.append(Run(int(start), int(stop), []))
        runs[-1].stop = max(runs[-1].stop, int(stop))
        runs[-1].frames.append(int(frame))
    return runs


def _pictures(
    reader: TrackReader, track: VideoTrack, numbers: FrameNumbers, run: Run
) -> Iterator[tuple[int, av.VideoFrame]]:
    """Yield (frame number, picture) of a run.

    Each packet carries its frame's number through the decoder in place of its pts, so that no container's or
    decoder's idea of time can mix frames up. Counted tracks number what comes out. Pictures that are neither wanted nor
    referred to by others are left out by the decoder, which changes no bit of those wanted.
    """
    reader.go_to(run.start)
    decoder, wanted = reader.decoder, frozenset(run.frames)
    may_skip = track.codec in SKIP_UNREFERRED and not track.counted
    decoder.flush_buffers()
    counted = track.entry_frames[int(track.entry_packets.searchsorted(run.start))]
    for number in range(run.start, run.stop + 1):
        packet = None
        if number < run.stop:
            packet = reader.read()
            frame = numbers.of(number)
            packet.pts, packet.dts = frame, None
            if may_skip:
                decoder.skip_frame = "DEFAULT" if frame is None or frame in wanted else "NONREF"
        try:
            pictures = decoder.decode(packet)
        except av.error.FFmpegError:
            continue  # a frame that is lost by this is missed by the caller
        for picture in pictures:
            if track.counted:
                yield counted, picture
                counted += 1
            elif picture.pts is not None:
                yield picture.pts, picture


class Upright:
    """Turns a decoded picture into [h, w, 3] uint8: RGB, upright, resized, nothing transparent."""

    def __init__(self, turn: tuple[bool, bool, bool], size: tuple[int, int]):
        self.turn, self.size = turn, size
        self.reformatter = VideoReformatter()

    def __call__(self, picture: av.VideoFrame) -> np.ndarray:
        transpose, mirror_x, mirror_y = self.turn
        height, width = self.size[::-1] if transpose else self.size
        has_alpha = any(component.is_alpha for component in picture.format.components)
        pixels = self.reformatter.reformat(
            picture, width, height, "rgba" if has_alpha else "rgb24", interpolation=FILTER, threads=1
        ).to_ndarray()
        pixels = on_background(pixels) if has_alpha else pixels
        pixels = pixels.swapaxes(0, 1) if transpose else pixels
        pixels = pixels[:, ::-1] if mirror_x else pixels
        return pixels[::-1] if mirror_y else pixels


def on_background(pixels: np.ndarray) -> np.ndarray:
    """Composite on BACKGROUND: [h, w, 4] uint8 -> [h, w, 3] uint8."""
    colour, alpha = pixels[..., :3].astype(np.uint32), pixels[..., 3:].astype(np.uint32)
    return ((colour * alpha + BACKGROUND * (255 - alpha) + 127) // 255).astype(np.uint8)


def image_size(source: str | MediaFile) -> tuple[int, int]:
    """Height and width of an image as a viewer shows it, from its header. Raises MediaError."""
    with _open_image(as_media_file(source)) as image:
        width, height = image.size
        turned = image.getexif().get(0x0112, 1) in (5, 6, 7, 8)  # EXIF orientation with a quarter turn
        return (width, height) if turned else (height, width)


def decode_image(source: str | MediaFile, size: tuple[int, int]) -> np.ndarray:
    """Decode an image: upright, transparency on BACKGROUND, resized (bicubic, antialiased) to [h, w, 3] uint8.

    size: (h, w)  of the result
    Raises MediaError.
    """
    with _open_image(as_media_file(source)) as image:
        upright = _as_rgb(ImageOps.exif_transpose(image))
        return np.asarray(upright.resize(size[::-1], Image.Resampling.BICUBIC))


@contextmanager
def _open_image(source: MediaFile) -> Iterator[Image.Image]:
    """Open an image; whatever PIL raises on its bytes, then or in the body, becomes a MediaError."""
    with source.open() as file:
        data = file.read()
    if not data:
        raise MediaError(str(source), "empty file (0 bytes)")
    Image.init()
    formats = [name for name in IMAGE_FORMATS if name in Image.OPEN]  # PIL may be built without some
    try:
        with Image.open(io.BytesIO(data), formats=formats) as image:
            yield image
    except UnidentifiedImageError:
        raise MediaError(str(source), f"not an image (begins with {data[:16]!r})") from None
    except Exception as error:  # on damaged bytes PIL raises errors of every kind
        raise MediaError(str(source), f"the image cannot be decoded ({error})") from None


def _as_rgb(image: Image.Image) -> Image.Image:
    """Any mode of PIL to RGB: 16-bit grey keeps its range, transparency shows BACKGROUND."""
    if image.mode.startswith(("I", "F")):
        grey = np.asarray(image, dtype=np.float64)
        return Image.fromarray(np.clip(np.rint(grey / 257), 0, 255).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        return Image.fromarray(on_background(np.asarray(image.convert("RGBA"))))
    return image.convert("RGB")
