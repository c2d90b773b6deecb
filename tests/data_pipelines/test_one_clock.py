"""One event seen, heard and captioned at one moment lands in one place, whatever the streams' start times.

Frames carry their number, the sound clicks once a second from its own start: a click at a known time of the file
belongs to the frame with a known number, whose group, sound window, caption and printed time must agree.

python -m pytest tests/data_pipelines/test_one_clock.py
"""

import io
import json
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from data_pipelines.budget import BudgetConfig, ladder
from data_pipelines.clip import ClipConfig, Rules, build_sequence
from data_pipelines.decode import decode_frames
from data_pipelines.demux import read_index
from data_pipelines.examine import examine
from data_pipelines.manifest import Sample, parse_line
from data_pipelines.media import MediaFile
from data_pipelines.sound import decode_audio
from encoders import AudioWindows, TokenizerConfig, VideoPatches
from mmcp.interleave import StampConfig
from tests.data_pipelines.clips import read_number, write_clip

RATE = 10
TEXT = TokenizerConfig().build()
RULES = Rules(text=TEXT, video=VideoPatches(patch=8, frames=1), audio=AudioWindows(window=10, frames_per_row=10))
STAMPS = StampConfig(decimals=3)
ALL_FRAMES = ClipConfig(budget=BudgetConfig(tokens=10**6, settings=ladder((RATE, 256, 256, True))), stamps=STAMPS)
STARTS = {"together": (0, 0), "late picture": ("1.5", "0.2"), "late sound": ("0.3", "2.1"), "both late": ("7.5", "5.9")}
MUXER_DELAY = {"mp4": 0.002, "mov": 0.002, "mkv": 0.03, "ts": 0.03}  # seconds that a muxer may shift sound by


def event(start: Fraction, sound_start: Fraction) -> tuple[Fraction, int]:
    """The first click while there is a picture, in seconds of the file, and the number of the frame shown with it."""
    click = next(sound_start + k for k in range(1, 9) if sound_start + k >= start + Fraction(1, 2))
    return click, int((click - start) * RATE)


def onset(samples: np.ndarray, near: float) -> float:
    """When a click begins, in seconds, within a quarter of a second of `near`."""
    first = max(0, int((near - 0.25) * 16000))
    return (first + int(np.flatnonzero(np.abs(samples[first : first + 8000]) > 0.2)[0])) / 16000


@pytest.mark.parametrize("kind", MUXER_DELAY)
@pytest.mark.parametrize("starts", STARTS)
def test_an_event_seen_and_heard_is_one_moment(tmp_path, kind, starts):
    start, sound_start = map(Fraction, STARTS[starts])
    path = str(tmp_path / f"a.{kind}")
    write_clip(path, rate=RATE, frames=60, start=start, sound="aac", sound_start=sound_start, sound_seconds=6)
    index = read_index(path)
    _, number = event(start, sound_start)
    pixels = decode_frames(path, index, [number], (64, 96)).pixels
    assert read_number(pixels[0]) == number
    seen = index.frame_time(number)
    heard = onset(decode_audio(path, index, 0, index.audio_samples[1]).samples, float(seen))
    assert abs(heard - seen) <= MUXER_DELAY[kind]


def sample(folder: Path, name: str, captions: object) -> Sample:
    content = [{"type": "video", "video": name, "captions": captions}]
    row = {"messages": [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]}
    return parse_line(json.dumps(row).encode(), manifest=str(folder / "m.jsonl"), row=1)


def stamp(seconds: Fraction) -> str:
    return f"00:00:{int(seconds):02},{int(seconds * 1000) % 1000:03}"


def with_captions(folder: Path, name: str, text: str) -> None:
    """Copy an mp4 into a Matroska file and put a text stream beside it."""
    words = av.open(io.BytesIO(text.encode()), format="srt")
    with av.open(str(folder / name)) as clip, words, av.open(str(folder / "with.mkv"), "w") as out:
        sources = [(file, [out.add_stream_from_template(stream) for stream in file.streams]) for file in (clip, words)]
        for file, targets in sources:
            for packet in file.demux():
                if packet.dts is not None:
                    packet.stream = targets[packet.stream_index]
                    out.mux(packet)


@pytest.mark.parametrize(("kind", "inside"), [("mp4", False), ("mkv", False), ("mp4", True)])
@pytest.mark.parametrize("starts", STARTS)
def test_it_lands_in_one_place_of_the_sequence(tmp_path, kind, inside, starts):
    """The group of the frame, the window with the click and the caption follow each other, after the printed time."""
    start, sound_start = map(Fraction, STARTS[starts])
    name = f"a.{kind}"
    write_clip(
        str(tmp_path / name), rate=RATE, frames=60, start=start, sound="aac", sound_start=sound_start, sound_seconds=6
    )
    click, number = event(start, sound_start)
    srt = f"1\n{stamp(click)} --> {stamp(click + 1)}\nclick\n"
    (tmp_path / "a.srt").write_text(srt)
    if inside:
        with_captions(tmp_path, name, srt)
        name = "with.mkv"
    row = sample(tmp_path, name, True if inside else "a.srt")
    path = str(tmp_path / name)
    media = examine("video", MediaFile(path))
    sequence, _ = build_sequence(row, {path: media}, ALL_FRAMES, rules=RULES)
    timed = [segment for segment in sequence.segments if segment.end]
    at = next(i for i, segment in enumerate(timed) if segment.kind == "video" and segment.units[0].items[0] == number)
    seen = timed[at].start
    assert seen == media.clip.frame_time(number)
    assert TEXT.decode(list(timed[at - 1].ids)) == STAMPS.text(seen) == f"<{float(seen):.3f}>"
    until_next = [segment for segment in timed[at + 1 :] if segment.start <= seen + Fraction(1, 50)]
    caption = next(segment for segment in timed if segment.kind == "text" and TEXT.decode(list(segment.ids)) == "click")
    assert abs(caption.start - seen) <= Fraction(1, 1000)
    assert caption in timed[at - 2 : at + 3] and len(until_next) <= 4
    windows = [unit for segment in timed if segment.kind == "audio" for unit in segment.units]
    heard = onset(decode_audio(path, media.clip, 0, media.clip.audio_samples[1]).samples, float(seen))
    holding = next(unit for unit in windows if unit.start <= heard < unit.end)
    assert abs(holding.start - seen) <= Fraction(13, 100)  # a window of a tenth, and the muxer's delay
