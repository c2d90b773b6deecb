"""Units from indexes: drawn indexes against a slow search through time, and the files of public reports.

Run: pytest tests/data_pipelines/test_units.py
"""

from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipelines.container import AudioTrack, ClipIndex, VideoTrack
from data_pipelines.demux import read_index
from data_pipelines.sound import decode_audio
from data_pipelines.units import image_unit, sampled_frames, sound_windows
from encoders import AudioWindows, ImagePatches, VideoPatches
from encoders.mel import log_mel_raw, needed
from mmcp.interleave import StampConfig
from mmcp.sequence import HOP
from tests.data_pipelines.clips import frame_groups, packets_of

CASES = Path(__file__).parents[1] / "data" / "cases"
EACH = VideoPatches(patch=8, frames=1)
PAIRS = VideoPatches(patch=8, frames=2)
WINDOWS = AudioWindows(window=100, frames_per_row=20)
ZERO = np.zeros(1, np.int64)


@st.composite
def video_tracks(draw):
    """Draw a track: frames at increasing ticks, stored out of order inside groups of pictures."""
    gaps = draw(st.lists(st.integers(1, 4000), max_size=30))
    pts = draw(st.integers(-500, 500)) + np.concatenate([[0], np.cumsum(gaps, dtype=np.int64)])
    entries = sorted(draw(st.sets(st.integers(0, len(pts) - 1))) | {0})
    packet = np.concatenate([
        np.array([low, *(low + 1 + np.array(draw(st.permutations(range(high - low - 1))), dtype=np.int64))])
        for low, high in pairwise([*entries, len(pts)])
    ])  # fmt: skip
    ticks_a_second = draw(st.sampled_from([600, 1001, 90000]))
    return VideoTrack(
        stream=0, codec="h264", time_base=Fraction(1, ticks_a_second), pts=pts.astype(np.int64),
        duration=draw(st.integers(1, 900)), packet=packet.astype(np.int64), sizes=np.ones(len(pts), np.int64),
        entry_packets=np.array(entries), entry_frames=np.array(entries), counted=False, seekable=True,
        coded=(48, 64), aspect=Fraction(1), turn=(False, False, False),
    )  # fmt: skip


def clip(*, video=None, audio=None, origin=Fraction(0)):
    return ClipIndex(format="mp4", size=1, origin=origin, streams=(), video=video, audio=audio, notes=())


def sound_track(samples, *, rate=16000, start=Fraction(0), per_packet=1024):
    counts = [min(per_packet, samples - first) for first in range(0, samples, per_packet)] or [0]
    position = np.cumsum([0, *counts[:-1]])
    return AudioTrack(
        stream=1, codec="aac", time_base=Fraction(1, rate), rate=rate, channels=1, layout="mono", start=start,
        pts=position, position=position, count=np.array(counts), exact=True, seekable=True,
    )  # fmt: skip


@given(video_tracks(), st.fractions(min_value="0.1", max_value=100, max_denominator=50))
def test_frames_are_those_a_player_shows(track, rate):
    times, k = [], 0
    end = track.pts[-1] + max(1, track.duration)
    while (tick := track.pts[0] + k / (rate * track.time_base)) < end:
        times.append(tick)
        k += 1
    shown = sorted({max(f for f in range(track.num_frames) if track.pts[f] <= tick) for tick in times})
    assert sampled_frames(track, rate).tolist() == shown


@given(video_tracks(), st.integers(1, 3), st.fractions(min_value=1, max_value=100, max_denominator=9))
def test_groups_cover_the_clip_and_say_what_to_decode(track, frames, rate):
    index = clip(video=track, origin=Fraction(7, 3))
    rule = VideoPatches(patch=8, frames=frames)
    groups = frame_groups(index, (32, 16), rule, rate=rate)
    joined = [frame for group in groups for frame in group.items]
    chosen = sampled_frames(track, rate).tolist()
    padding = -len(chosen) % frames
    assert joined == chosen + [chosen[-1]] * padding and padding < frames
    for group in groups:
        assert group.start == int(track.pts[group.items[0]]) * track.time_base - Fraction(7, 3)
        low, high = group.decode
        assert low in track.entry_packets and (low, high) == packets_of(track, group.items)
        assert group.size == (frames, 32, 16) and group.native == (48, 64)
        assert group.num_tokens == rule.num_tokens(group.size) == 2
    assert all(before.end == after.start for before, after in pairwise(groups))
    assert groups[-1].end == index.video_end


@given(st.integers(0, 60000), st.integers(-9, 9), st.integers(1, 6), st.integers(1, 4))
def test_windows_cover_the_sound_once(samples, start, rows, length):
    rule = AudioWindows(window=rows * length * 4, frames_per_row=4 * length)
    index = clip(audio=sound_track(samples, start=Fraction(start, 7)))
    begin, end = index.audio_samples
    windows = sound_windows(index, rule)
    if samples < HOP:
        assert windows == ()
        return
    assert windows[0].items[0] == begin and windows[-1].items[1] == end
    assert all(before.items[1] == after.items[0] for before, after in pairwise(windows))
    assert all(window.size == (rule.window,) for window in windows[:-1])
    frames = samples // HOP - rule.window * (len(windows) - 1)
    assert frames <= windows[-1].size[0] < frames + rule.frames_per_row
    for window in windows:
        assert (window.start, window.end) == tuple(Fraction(item, 16000) for item in window.items)
        assert window.num_tokens == rule.num_tokens(window.size) and (window.items[0] - begin) % HOP == 0


@given(st.integers(200, 9000), st.sampled_from([8000, 16000, 44100]), st.integers(1, 2000))
def test_windows_name_the_packets_that_hold_them(samples, rate, per_packet):
    track = sound_track(samples, rate=rate, per_packet=per_packet)
    index = clip(audio=track)
    for window in sound_windows(index, AudioWindows(window=8, frames_per_row=2)):
        low, high = (Fraction(item * rate, 16000) for item in window.items)
        held = [
            p for p in range(len(track.count)) if track.position[p] < high and track.position[p] + track.count[p] > low
        ]
        assert window.decode[0] == held[0] and window.decode[1] in (held[-1] + 1, held[-1] + 2)


def test_image_is_one_unit():
    unit = image_unit((100, 200), (32, 64), ImagePatches(patch=8))
    assert (unit.num_tokens, unit.grid, unit.size, unit.native, unit.items) == (8, (1, 2, 4), (32, 64), (100, 200), ())


@pytest.mark.parametrize(
    ("name", "frames", "gap"), [("4fps_5s", 20, "1/4"), ("8fps_5s", 40, "1/8"), ("0p2fps_60s", 12, 5)]
)
def test_every_frame_has_its_own_time_at_any_rate(name, frames, gap):
    index = read_index(str(CASES / f"B44_{name}.mp4"))
    units = frame_groups(index, (16, 16), EACH, rate=Fraction(30))
    assert [unit.start for unit in units] == [i * Fraction(gap) for i in range(frames)]
    assert len({StampConfig().text(unit.start) for unit in units}) == frames


def test_variable_rate_is_sampled_by_time():
    index = read_index(str(CASES / "B08_vfr.mkv"))
    units = frame_groups(index, (16, 16), EACH, rate=Fraction(1))
    assert len(units) == 8
    assert all(0 <= i - unit.start < Fraction(1, 5) for i, unit in enumerate(units))


def test_sound_and_picture_of_different_lengths():
    counts = {}
    for name in ("no_audio_track", "silent_track", "audio5s_video2s", "audio1s_video5s"):
        index = read_index(str(CASES / f"B46_{name}.mp4"))
        windows = sound_windows(index, WINDOWS)
        counts[name] = sum(window.num_tokens for window in windows)
        assert all(before.start < after.start for before, after in pairwise(windows))
        if name == "audio1s_video5s":
            assert max(window.end for window in windows) < Fraction("1.1")
        if name == "audio5s_video2s":
            assert windows[-1].end >= 5 > 2 >= index.video_end
    assert counts["no_audio_track"] == 0 and counts["silent_track"] in (20, 21)
    assert counts["audio5s_video2s"] in (25, 26) and counts["audio1s_video5s"] in (5, 6)


def test_short_and_broken_sounds_give_rows_by_the_rule():
    rows = {}
    for path in sorted((CASES / "B47_audio").glob("*.wav")):
        try:
            index = read_index(str(path))
        except ValueError as error:
            assert str(path) in str(error)
            continue
        windows = sound_windows(index, WINDOWS)
        begin, end = index.audio_samples
        for window in windows:
            first = window.items[0] - begin
            low, high = needed(first, end - begin, frames=window.size[0])
            samples = decode_audio(str(path), index, begin + low, begin + high).samples
            raw = log_mel_raw(samples, first, end - begin, frames=window.size[0], bins=80)
            assert np.isfinite(raw).all() and raw.shape == (80, *window.size)
        rows[path.stem] = sum(window.num_tokens for window in windows)
    assert rows["ms_24"] == rows["ms_26"] == 1
    assert rows.get("samples_0", 0) == rows.get("samples_1", 0) == rows.get("ms_5", 0) == 0
    assert rows["exact_1s"] == 5 and rows["one_s_plus_1_sample"] - 5 in (0, 1)
