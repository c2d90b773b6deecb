"""Subtitle files and streams against FFmpeg's own readers and against what was written; bad files by name.

python -m pytest tests/data_pipelines/test_timed_text.py
"""

import io
import re
from fractions import Fraction
from pathlib import Path

import av
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines.demux import read_index
from data_pipelines.media import MediaError, MediaFile
from data_pipelines.timed_text import Cue, plain_text, read_cues, read_embedded_cues
from tests.data_pipelines.clips import write_clip

SRT = """1
00:00:01,500 --> 00:00:03,000
<i>Hello,</i> <font color="#ff0000">you</font>
there

2
00:00:00,250 --> 00:00:02,000 X1:10 X2:20
{\\an8}3 < 4

3
30:00:00,000 --> 30:00:01,000

after a blank line

4
00:00:09,000 --> 00:00:09,500
<b> </b>
"""
SRT_CUES = (
    Cue(start=Fraction(1, 4), end=Fraction(2), text="3 < 4"),
    Cue(start=Fraction(3, 2), end=Fraction(3), text="Hello, you there"),
    Cue(start=Fraction(108000), end=Fraction(108001), text="after a blank line"),
)
VTT = """WEBVTT - a title
Kind: captions

STYLE
::cue { color: red }

NOTE 00:00.000 --> 00:09.000
is no cue

intro
00:01.500 --> 00:03.000 line:0 position:10%
<v Ann>Tom &amp; <00:00:02.000><c.loud>Ann</c>
&lt;waving&gt;

00:02.000 --> 100:00:04.125
- overlaps
"""
VTT_CUES = (
    Cue(start=Fraction(3, 2), end=Fraction(3), text="Tom & Ann <waving>"),
    Cue(start=Fraction(2), end=Fraction(360004125, 1000), text="- overlaps"),
)


def read(folder: Path, data: str | bytes, name: str = "a.srt") -> tuple[Cue, ...]:
    (folder / name).write_bytes(data.encode() if isinstance(data, str) else data)
    return read_cues(MediaFile(str(folder / name)))


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_both_forms_in_every_dress(tmp_path, encoding, line_end):
    assert read(tmp_path, SRT.replace("\n", line_end).encode(encoding)) == SRT_CUES
    assert read(tmp_path, VTT.replace("\n", line_end).encode(encoding), "a.vtt") == VTT_CUES


def test_a_name_says_nothing(tmp_path):
    assert read(tmp_path, VTT, "a.srt") == VTT_CUES and read(tmp_path, SRT, "a.vtt") == SRT_CUES


WORDS = st.lists(
    st.text("ab \u00e9\u52d5\U0001f3ac", min_size=1, max_size=12).filter(str.strip), min_size=1, max_size=3
)
CUES = st.lists(
    st.tuples(st.integers(0, 10**7), st.integers(1, 9000), WORDS), min_size=1, max_size=8, unique_by=lambda cue: cue[:2]
)


def stamp(ms: int, comma: str) -> str:
    return f"{ms // 3600000:02}:{ms // 60000 % 60:02}:{ms // 1000 % 60:02}{comma}{ms % 1000:03}"


def ffmpeg_cues(data: bytes, kind: str) -> list[tuple[Fraction, Fraction, str]]:
    """What FFmpeg reads, in the order of starts."""
    with av.open(io.BytesIO(data), format=kind) as container:
        packets = [packet for packet in container.demux() if packet.size]
        cues = [(p.pts * p.time_base, (p.pts + p.duration) * p.time_base, bytes(p).decode()) for p in packets]
    return sorted(((start, end, " ".join(text.split())) for start, end, text in cues), key=lambda cue: cue[0])


@given(CUES, st.sampled_from(["srt", "webvtt"]))
def test_drawn_files_read_as_ffmpeg_reads_them(tmp_path_factory, cues, kind):
    comma = "," if kind == "srt" else "."
    text = "WEBVTT\n\n" if kind == "webvtt" else ""
    for number, (start, length, words) in enumerate(cues, start=1):
        lines = "\n".join(line.strip() for line in words)
        text += f"{number}\n{stamp(start, comma)} --> {stamp(start + length, comma)}\n{lines}\n\n"
    ours = read(tmp_path_factory.getbasetemp(), text, "drawn")
    assert sorted((cue.start, cue.end, cue.text) for cue in ours) == sorted(ffmpeg_cues(text.encode(), kind))
    assert [cue.start for cue in ours] == sorted(cue.start for cue in ours)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "empty file"),
        (b"just words\n", "holds no cue"),
        (b"WEBVTT\n\nNOTE nothing\n", "holds no cue"),
        (b"1\n00:00:01 --> 00:00:02\nx\n", "line 2: '00:00:01 --> 00:00:02' is no time of a cue"),
        (b"1\n\n00:00:01,0 --> later\nx\n", "line 3: '00:00:01,0 --> later' is no time of a cue"),
        (b"1\n00:00:02,000 --> 00:00:01,000\nx\n", "line 2: a cue ends at 1.0 s, before it starts"),
        ("1\n00:00:01,000 --> 00:00:02,000\n\u00e9\n".encode("latin-1"), "is not UTF-8 (byte 32)"),
        (b"\xff\xfe1", "is not UTF-16 (byte 2)"),
    ],
)
def test_a_bad_file_is_named_with_the_line(tmp_path, data, reason):
    with pytest.raises(MediaError) as caught:
        read(tmp_path, data, "bad.srt")
    assert reason in caught.value.reason and caught.value.path.endswith("bad.srt")


def test_what_is_not_there_is_named():
    with pytest.raises(MediaError, match=r"gone.srt: no such file"):
        read_cues(MediaFile("gone.srt"))


@given(st.text(st.characters(exclude_characters="<>{}\\"), max_size=40))
def test_text_without_markup_stays(text):
    assert plain_text(text) == " ".join(text.split())


def with_text(clip: Path, out: Path, text: str, kind: str) -> None:
    """Copy a clip and put a text stream beside it."""
    words = av.open(io.BytesIO(text.encode()), format=kind)
    with av.open(str(clip)) as source, words, av.open(str(out), "w") as target:
        streams = [(container, target.add_stream_from_template(container.streams[0])) for container in (source, words)]
        for container, stream in streams:
            for packet in container.demux(0):
                if packet.dts is not None:
                    packet.stream = stream
                    target.mux(packet)


@pytest.mark.parametrize(("text", "kind"), [(SRT, "srt"), (VTT, "webvtt")])
def test_a_stream_of_text_reads_as_the_file_does(tmp_path, text, kind):
    text = re.sub(r"(30|100):00:0", "00:00:1", text).replace("\n\nafter", "\nafter").replace("<b> </b>", "end")
    write_clip(str(tmp_path / "a.mkv"), frames=10)
    with_text(tmp_path / "a.mkv", tmp_path / "b.mkv", text, kind)
    file = MediaFile(str(tmp_path / "b.mkv"))
    assert read_embedded_cues(file, read_index(file)) == read(tmp_path, text, "same")


def test_a_clip_without_text_says_so(tmp_path):
    write_clip(str(tmp_path / "a.mkv"), frames=5)
    file = MediaFile(str(tmp_path / "a.mkv"))
    with pytest.raises(MediaError, match=r"no stream of timed text \(subtitles it holds: none\)"):
        read_embedded_cues(file, read_index(file))
