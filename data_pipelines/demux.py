"""Read the ClipIndex of a media file, in one pass over its packets."""

from fractions import Fraction
from typing import TypeVar

import av
from av.stream import Disposition

from data_pipelines.container import AudioTrack, ClipIndex, StreamInfo, VideoTrack
from data_pipelines.media import MediaError, MediaFile, as_media_file, open_container
from data_pipelines.packets import read_packets
from data_pipelines.place_frames import place_frames
from data_pipelines.place_sound import place_sound

FREE_RUNNING = ("mpegts", "mpeg", "mpegtsraw", "mp3")  # formats whose time stamps start anywhere
LATEST_START = 60  # seconds after zero
SLOWEST_SOUND, FASTEST_SOUND = 1000, 768_000  # samples a second; others are damaged headers

S = TypeVar("S", av.VideoStream, av.AudioStream)


def read_index(source: "str | MediaFile", *, need: tuple[str, ...] = ()) -> ClipIndex:
    """Read the index of a media file.

    need: the tracks ("video", "audio") without which the file is of no use.
    Raises MediaError: no such file, empty file, no index, not a media file, no video stream, no audio stream, no
    frames, no samples, no decoder, an impossible rate.
    """
    source = as_media_file(source)
    notes: list[str] = []
    with open_container(source) as container:
        video, audio = _choose(container, container.streams.video), _choose(container, container.streams.audio)
        for kind, stream in (("video", video), ("audio", audio)):
            if kind in need and stream is None:
                kinds = ", ".join(sorted({other.type for other in container.streams}))
                raise MediaError(str(source), f"no {kind} stream (the file holds: {kinds or 'nothing'})")
        wanted: list[av.VideoStream | av.AudioStream] = [stream for stream in (video, audio) if stream is not None]
        for stream in wanted:
            if stream.codec_context is None:
                raise MediaError(str(source), f"no decoder for its {stream.type} stream (number {stream.index})")
            stream.codec_context.thread_count = 1
        packets = read_packets(container, wanted, notes)
        name = container.format.name
        video_track = None if video is None else place_frames(video, name, packets[video.index], notes)
        audio_track = None if audio is None else place_sound(audio, packets[audio.index], notes)
        if "video" in need and video_track is None:
            raise MediaError(str(source), "no frames: the video stream holds no picture that can be decoded")
        if "audio" in need and audio_track is None:
            raise MediaError(str(source), "no samples: the audio stream holds no sound that can be decoded")
        if audio_track is not None and not SLOWEST_SOUND <= audio_track.rate <= FASTEST_SOUND:
            raise MediaError(str(source), f"its header states {audio_track.rate} samples of sound a second")
        return ClipIndex(
            format=name,
            size=source.size if source.size is not None else container.size,
            origin=_origin(name, video_track, audio_track),
            streams=tuple(_stream_info(stream) for stream in container.streams),
            video=video_track,
            audio=audio_track,
            notes=tuple(notes),
        )


def _choose(container: av.container.InputContainer, streams: tuple[S, ...]) -> S | None:
    """Of the streams of one kind, the one a player plays; the cover picture of a song is no video."""
    streams = tuple(stream for stream in streams if not stream.disposition & Disposition.attached_pic)
    best = container.streams.best(streams[0].type) if streams else None
    return next((stream for stream in streams if stream is best), streams[0] if streams else None)


def _stream_info(stream: av.stream.Stream) -> StreamInfo:
    context = stream.codec_context
    return StreamInfo(
        index=stream.index,
        kind=stream.type or "unknown",
        codec=context.codec.canonical_name if context is not None else "unknown",
        time_base=stream.time_base or Fraction(0),
        start=stream.start_time,
    )


def _origin(format_name: str, video: VideoTrack | None, audio: AudioTrack | None) -> Fraction:
    """Time 0 of the clip on the file's own timeline; the module's docstring of container.py has the rule."""
    starts = [] if video is None else [video.pts[0] * video.time_base]
    starts += [] if audio is None else [audio.start]
    earliest = min(starts, default=Fraction(0))
    has_zero = format_name not in FREE_RUNNING and 0 <= earliest <= LATEST_START
    return Fraction(0) if has_zero else earliest
