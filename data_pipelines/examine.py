"""Check one media file, and say what a plan needs to know of it before anything is decoded."""

import json
from concurrent.futures import Future
from dataclasses import dataclass

from data_pipelines.container import ClipIndex
from data_pipelines.decode import decode_image, image_size
from data_pipelines.demux import read_index
from data_pipelines.media import MediaError, MediaFile
from data_pipelines.workers import Reply, WorkerError, WorkerPool

MEDIA_KINDS = ("image", "video", "audio")


@dataclass(frozen=True, slots=True, kw_only=True)
class Media:
    """A media file that was checked."""

    kind: str
    """image, video or audio."""
    file: MediaFile
    clip: ClipIndex | None = None
    """Video and audio: the index."""
    image: tuple[int, int] | None = None
    """Image: height and width in pixels, as a viewer shows it."""


def examine(kind: str, file: MediaFile) -> Media:
    """Check a file: an image is decoded once, a video or sound is indexed. Raises MediaError."""
    if kind == "image":
        decode_image(file, (8, 8))
        return Media(kind=kind, file=file, image=image_size(file))
    return Media(kind=kind, file=file, clip=read_index(file, need=(kind,)))


def facts_to_json(media: Media) -> str:
    """What `examine` found, without the place of the file, as canonical JSON."""
    return media.clip.to_json() if media.clip is not None else json.dumps(media.image)


def facts_from_json(kind: str, file: MediaFile, text: str) -> Media:
    """Read what `facts_to_json` wrote, for a file that now lies at `file`."""
    if kind == "image":
        height, width = json.loads(text)
        return Media(kind=kind, file=file, image=(height, width))
    return Media(kind=kind, file=file, clip=ClipIndex.from_json(text))


class Examiner:
    """Examines media files ahead of their use, each once, on worker processes where there are some."""

    def __init__(self, pool: WorkerPool | None):
        self.pool = pool
        self.started: dict[tuple[str, MediaFile], Future[Reply]] = {}
        self.found: dict[tuple[str, MediaFile], MediaError] = {}

    def start(self, kind: str, file: MediaFile) -> None:
        """Begin to examine a file; without workers nothing happens yet."""
        if self.pool is not None and (kind, file) not in self.started and (kind, file) not in self.found:
            self.started[kind, file] = self.pool.submit(examine_in_worker, kind, file)

    def result(self, kind: str, file: MediaFile) -> Media:
        """What was found. Raises MediaError, also when the file hangs or crashes a decoder."""
        if (kind, file) in self.found:
            raise self.found[kind, file]
        try:
            return self._examined(kind, file)
        except MediaError as error:
            self.found[kind, file] = error
            raise

    def _examined(self, kind: str, file: MediaFile) -> Media:
        if self.pool is None:
            return examine(kind, file)
        self.start(kind, file)
        try:
            header, _ = self.started.pop((kind, file)).result()
        except WorkerError as error:
            raise MediaError(str(file), str(error)) from None
        if "reason" in header:
            raise MediaError(str(file), header["reason"])
        return facts_from_json(kind, file, header["facts"])


def examine_in_worker(kind: str, file: MediaFile) -> Reply:
    """Examine a file in a worker; what is found, or the reason why it cannot be used, goes into the header."""
    try:
        return {"facts": facts_to_json(examine(kind, file))}, []
    except MediaError as error:
        return {"reason": error.reason}, []
