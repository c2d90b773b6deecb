"""Files of picture and sound: where their bytes lie, how they are opened, and what is wrong when they are not."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction

import av

SAFE_OPTIONS = {"protocol_whitelist": "none"}  # a file never makes FFmpeg open another file or address
READ_BYTES = 1 << 16


class MediaError(ValueError):
    """One media file, or one moment of it, cannot be used. Names the file, the reason and the time in the clip."""

    def __init__(self, path: str, reason: str, time: Fraction | None = None):
        super().__init__(path, reason, time)
        self.path, self.reason, self.time = path, reason, time

    def __str__(self) -> str:
        at = "" if self.time is None else f" at {float(self.time):.3f} s"
        return f"{self.path}{at}: {self.reason}"


@dataclass(frozen=True, slots=True)
class MediaFile:
    """A file, or a byte range inside one: a member of a tar is read in place."""

    path: str
    offset: int = 0
    """First byte."""
    size: int | None = None
    """Number of bytes; None: to the end of the file."""

    def __str__(self) -> str:
        return self.path if self.size is None else f"{self.path}[{self.offset}:{self.offset + self.size}]"

    @property
    def num_bytes(self) -> int:
        """Bytes to read. Raises OSError when there is no such file."""
        return os.path.getsize(self.path) - self.offset if self.size is None else self.size

    def open(self) -> "RangeReader":
        """Open for reading. Raises MediaError when there is no such file."""
        try:
            return RangeReader(self)
        except FileNotFoundError:
            raise MediaError(str(self), "no such file") from None
        except IsADirectoryError:
            raise MediaError(str(self), "is a folder, not a media file") from None
        except OSError as error:
            raise MediaError(str(self), f"cannot be opened ({error.strerror})") from None


class RangeReader:
    """Read-only view of a MediaFile's bytes, as PyAV, PIL and tarfile want it: read, seek, tell, close."""

    def __init__(self, source: MediaFile):
        self.descriptor = os.open(source.path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            os.pread(self.descriptor, 1, 0)  # a folder opens but does not read
            length = os.fstat(self.descriptor).st_size
        except OSError:
            os.close(self.descriptor)
            raise
        stop = length if source.size is None else min(length, source.offset + source.size)
        self.offset = source.offset
        self.size = max(0, stop - source.offset)
        self.position = 0

    def read(self, count: int = -1) -> bytes:
        left = max(0, self.size - self.position)
        data = os.pread(self.descriptor, left if count < 0 else min(count, left), self.offset + self.position)
        self.position += len(data)
        return data

    def seek(self, target: int, whence: int = os.SEEK_SET) -> int:
        self.position = max(0, target + {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: self.size}[whence])
        return self.position

    def tell(self) -> int:
        return self.position

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> "RangeReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def as_media_file(source: "str | os.PathLike[str] | MediaFile") -> MediaFile:
    """Return the MediaFile of a path; a MediaFile is returned as it is."""
    return source if isinstance(source, MediaFile) else MediaFile(os.fspath(source))


@contextmanager
def open_container(source: MediaFile) -> Iterator[av.container.InputContainer]:
    """Open `source` with PyAV by its bytes, so that no character of its name has a meaning; always closed.

    Raises MediaError: no such file, empty file, no index (moov missing), not a media file.
    """
    with source.open() as file:
        if file.size == 0:
            raise MediaError(str(source), "empty file (0 bytes)")
        try:
            container = av.open(
                file, buffer_size=READ_BYTES, options=SAFE_OPTIONS, metadata_errors="replace", timeout=None
            )
        except (av.error.FFmpegError, OSError, ValueError) as error:
            raise MediaError(str(source), _why_not_opened(source, error)) from None
        with container:
            yield container  # type: ignore[misc]  # opened for reading


def demux(container: av.container.InputContainer, *streams: av.stream.Stream) -> Iterator[av.Packet]:
    """Yield the packets of some streams; at the end of each, one without size or time.

    Broadcasts begin new streams in the middle. PyAV fails on their packets, which are not asked for; reading goes on.
    """
    numbers = {stream.index for stream in streams}
    while streams:
        try:
            for packet in container.demux(*streams):
                if packet.stream_index in numbers:
                    yield packet
        except IndexError:
            continue
        return


def _why_not_opened(source: MediaFile, error: Exception) -> str:
    """Tell an mp4 without its index from a file that is no media at all."""
    with source.open() as file:
        boxes, head = _top_level_boxes(file), b""
        file.seek(0)
        head = file.read(24)
    if boxes and boxes[0] in ("ftyp", "mdat", "free", "wide", "skip") and "moov" not in boxes:
        return f"no index (moov missing; found {', '.join(boxes)}): the recording or download was cut; get it again"
    return f"not a media file (begins with {head!r}; FFmpeg: {getattr(error, 'strerror', error)})"


def _top_level_boxes(file: RangeReader, most: int = 64) -> list[str]:
    """Names of the boxes an mp4 is made of; empty when the bytes do not look like boxes."""
    names: list[str] = []
    position = 0
    while position + 8 <= file.size and len(names) < most:
        file.seek(position)
        header = file.read(16)
        size, name = int.from_bytes(header[:4], "big"), header[4:8]
        if not name.isalnum() or 1 < size < 8:
            break
        names.append(name.decode("ascii"))
        size = int.from_bytes(header[8:16], "big") if size == 1 else size
        if size < 8:
            break
        position += size
    return names
