"""Check one media file, and say what a plan needs to know of it before anything is decoded."""

import json
from dataclasses import dataclass

from data_pipelines.container import ClipIndex
from data_pipelines.decode import decode_image, image_size
from data_pipelines.demux import read_index
from data_pipelines.media import MediaFile

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
