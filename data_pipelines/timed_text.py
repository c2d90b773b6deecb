"""Subtitles as cues at exact times: SubRip (.srt) and WebVTT (.vtt) files, and the text streams inside a media file.

Times of a file are on its clip's clock, as a player shows them; those of a stream are moved to it as all of its file
are. Cues come sorted by their start, equal ones in the order of the file; they may overlap. Markup is stripped and
lines are joined by a space. A cue without a word is left out.

    1
    00:00:01,500 --> 00:00:03,000         WEBVTT
    <i>Hello</i>                    or                                        -> Cue(3/2, 3, "Hello")
                                          00:01.500 --> 00:03.000 line:0
                                          <v Ann>Hello
"""

import html
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import av

from data_pipelines.container import ClipIndex
from data_pipelines.media import MediaError, MediaFile, demux, open_container

TEXT_CODECS = ("subrip", "webvtt", "mov_text", "ass", "ssa", "text")
MOST_BYTES = 64 << 20  # more is no subtitle file
ARROW = "-->"
LINE_ENDS = re.compile("\r\n|\r|\n")
_TIME = r"(?:(\d+):)?(\d{1,2}):(\d{1,2})[.,](\d{1,9})"
TIMING = re.compile(rf"\s*{_TIME}\s*{ARROW}\s*{_TIME}(?:\s.*)?")
TAGS = re.compile(r"</?[a-zA-Z][^<>]*>|</?\d[\d:.]*>")  # of HTML and WebVTT
OVERRIDES = re.compile(r"\{\\[^{}]*\}|\\[Nnh]")  # of ASS
BLOCKS = ("NOTE", "STYLE", "REGION")  # WebVTT: blocks that are no cues
ASS_FIELDS = 8  # FFmpeg gives every text stream as lines of ASS: eight fields and a comma each, then the text


@dataclass(frozen=True, slots=True, kw_only=True)
class Cue:
    """Words shown for a while."""

    start: Fraction
    """Seconds on the clip's clock."""
    end: Fraction
    text: str


def read_cues(file: MediaFile) -> tuple[Cue, ...]:
    """Read a subtitle file, SubRip or WebVTT by its content.

    Raises MediaError with the file and the line: no such file, empty, not UTF-8 nor UTF-16 with its mark, no cue, a
    time that cannot be read, an end before its start.
    """
    lines = LINE_ENDS.split(_decode(file))
    is_vtt = re.fullmatch(r"WEBVTT([ \t].*)?", lines[0]) is not None
    cues = []
    for number, start, end, words in _blocks(file, lines, is_vtt):
        if end < start:
            raise MediaError(str(file), f"line {number}: a cue ends at {float(end)} s, before it starts", start)
        text = plain_text(" ".join(words))
        if text:
            cues.append(Cue(start=start, end=end, text=html.unescape(text) if is_vtt else text))
    if not cues:
        raise MediaError(str(file), "holds no cue; give a SubRip (.srt) or WebVTT (.vtt) file")
    return tuple(sorted(cues, key=lambda cue: cue.start))


def read_embedded_cues(file: MediaFile, index: ClipIndex) -> tuple[Cue, ...]:
    """Read the first text stream inside a media file, in one pass over its packets.

    Raises MediaError: no text stream (pictures of text are none), a cue that cannot be decoded.
    """
    with open_container(file) as container:
        streams = [stream for stream in container.streams.subtitles if stream.codec_context is not None]
        chosen = next((stream for stream in streams if stream.codec_context.codec.canonical_name in TEXT_CODECS), None)
        if chosen is None:
            kinds = ", ".join(stream.codec_context.codec.canonical_name for stream in streams)
            raise MediaError(str(file), f"no stream of timed text (subtitles it holds: {kinds or 'none'})")
        cues = []
        for packet in demux(container, chosen):
            if not packet.size or packet.pts is None:
                continue
            start = packet.pts * packet.time_base - index.origin
            text = _decoded_text(file, packet, start)
            if text:
                cues.append(Cue(start=start, end=start + (packet.duration or 0) * packet.time_base, text=text))
    return tuple(sorted(cues, key=lambda cue: cue.start))


def cues_to_json(cues: tuple[Cue, ...]) -> list[list[str]]:
    """[start, end, text] of each cue; times are exact."""
    return [[str(cue.start), str(cue.end), cue.text] for cue in cues]


def cues_from_json(data: list[list[str]]) -> tuple[Cue, ...]:
    """Read what `cues_to_json` wrote."""
    return tuple(Cue(start=Fraction(start), end=Fraction(end), text=text) for start, end, text in data)


def plain_text(text: str) -> str:
    """Text without the markup of HTML, WebVTT and ASS, blanks joined."""
    return _without_overrides(TAGS.sub("", text))


def _without_overrides(text: str) -> str:
    return " ".join(OVERRIDES.sub(lambda found: " " if found[0][0] == "\\" else "", text).split())


def _decode(file: MediaFile) -> str:
    with file.open() as reader:
        if not reader.size:
            raise MediaError(str(file), "empty file (0 bytes)")
        if reader.size > MOST_BYTES:
            raise MediaError(str(file), f"{reader.size} bytes are no subtitles; at most {MOST_BYTES} are read")
        data = reader.read()
    encoding = "utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return data.decode(encoding).replace("\0", "\ufffd")
    except UnicodeDecodeError as error:
        reason = f"is not {encoding[:6].upper().rstrip('-')} (byte {error.start}); save it as UTF-8"
        raise MediaError(str(file), reason) from None


def _blocks(file: MediaFile, lines: list[str], is_vtt: bool) -> Iterator[tuple[int, Fraction, Fraction, list[str]]]:
    """Yield (line from 1, start, end, lines of text) of each cue.

    WebVTT ends a cue at a blank line. SubRip files in use have blank lines inside cues: there a cue runs up to the next
    one, whose number is taken off when it stands after a blank line.
    """
    timings = [i for i, line in enumerate(lines) if ARROW in line and not _is_note(lines, i, is_vtt)]
    for i, following in pairwise([*timings, len(lines)]):
        match = TIMING.fullmatch(lines[i])
        if match is None:
            raise MediaError(str(file), f"line {i + 1}: '{lines[i].strip()[:60]}' is no time of a cue")
        words = lines[i + 1 : following]
        if is_vtt:
            words = words[: next((n for n, line in enumerate(words) if not line.strip()), len(words))]
        elif following < len(lines) and words and words[-1].strip().isdigit() and not any(map(str.strip, words[-2:-1])):
            words = words[:-1]
        yield i + 1, _seconds(*match.groups()[:4]), _seconds(*match.groups()[4:]), words


def _is_note(lines: list[str], at: int, is_vtt: bool) -> bool:
    """Whether a line stands in a block of WebVTT that is no cue."""
    if not is_vtt:
        return False
    first = at
    while first > 0 and lines[first - 1].strip():
        first -= 1
    return lines[first].split(maxsplit=1)[0] in BLOCKS


def _seconds(hours: str | None, minutes: str, seconds: str, fraction: str) -> Fraction:
    whole = int(hours or 0) * 3600 + int(minutes) * 60 + int(seconds)
    return whole + Fraction(int(fraction), 10 ** len(fraction))


def _decoded_text(file: MediaFile, packet: av.Packet, at: Fraction) -> str:
    """The words of one packet of a text stream."""
    try:
        subtitles: list[Any] = packet.decode()
    except av.error.FFmpegError as error:
        raise MediaError(str(file), f"a subtitle cannot be decoded ({error.strerror})", at) from None
    lines = [line.ass.decode("utf-8", errors="replace") for line in subtitles]
    return " ".join(filter(None, (_without_overrides(line.split(",", ASS_FIELDS)[-1]) for line in lines)))
