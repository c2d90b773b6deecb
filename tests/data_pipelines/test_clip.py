"""Samples as sequences: the files of public reports through index, budget and tokenizer, against what must come out.

Run: pytest tests/data_pipelines/test_clip.py
"""

import json
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from data_pipelines.budget import BudgetConfig, ladder
from data_pipelines.clip import ClipConfig, Rules, build_sequence
from data_pipelines.container import AudioTrack, ClipIndex, VideoTrack
from data_pipelines.examine import Media, examine
from data_pipelines.manifest import Item, Sample
from data_pipelines.media import MediaError, MediaFile
from encoders import AudioWindows, ImagePatches, TokenizerConfig, VideoPatches
from mmcp.interleave import StampConfig
from mmcp.sequence import NO_ID, NO_LABEL

CASES = Path(__file__).parents[1] / "data" / "cases"
TEXT = TokenizerConfig().build()
RULES = Rules(
    text=TEXT, image=ImagePatches(patch=8), video=VideoPatches(patch=8), audio=AudioWindows(frames_per_row=20)
)
FIXED = ClipConfig(budget=BudgetConfig(tokens=10**6, settings=ladder((1.0, 1024, 1024, True))))
REFERENCE = "ref_4s_30fps_aac.mp4"


def video(name, **options):
    return Item(kind="video", media=name, **options)


def text(words):
    return Item(kind="text", text=words)


def sample(*question, answer="red"):
    return Sample(id="a", row=1, turns=(("user", question), ("assistant", (text(answer),))))


def media(*items):
    return {item.media: examine(item.kind, MediaFile(str(CASES / item.media))) for item in items if item.media}


def build(*question, config=FIXED, answer="red", **options):
    return build_sequence(sample(*question, answer=answer), media(*question), config, **{"rules": RULES, **options})


def within(tokens, config=FIXED):
    return replace(config, budget=replace(config.budget, tokens=tokens))


def test_a_conversation_in_order_with_loss_on_the_answer_only():
    sequence, _ = build(text("What?"), answer="red")
    user, assistant, end = TEXT.opening("user")[0], TEXT.opening("assistant")[0], TEXT.end
    assert sequence.ids.tolist() == [user, *b"What?", assistant, *b"red", end]
    assert sequence.labels[sequence.label_positions].tolist() == [*b"red", end]


def test_a_prompt_ends_where_the_answer_would_begin():
    whole, _ = build(text("What?"), answer="red")
    prompt, _ = build(text("What?"), answer="red", prompt=True)
    assert prompt.ids.tolist() == whole.ids.tolist()[: -len("red") - 1]
    assert len(prompt.label_positions) == 0


def test_a_clip_is_laid_out_in_time_order():
    sequence, report = build(video(REFERENCE), text("Which?"))
    kinds = [
        bytes(s.ids).decode() if s.kind == "text" and max(s.ids) < 256 else f"{s.kind} {len(s.units)}"
        for s in sequence.segments
    ]
    assert kinds[1:8] == ["<0.0>", "video 1", "audio 2", "<2.0>", "video 1", "audio 2", "Which?"]
    groups = [unit for segment in sequence.segments if segment.kind == "video" for unit in segment.units]
    assert [(unit.items, unit.start, unit.end) for unit in groups] == [((0, 30), 0, 2), ((60, 90), 2, 4)]
    assert report.without_sound == () and report.repeated_stamps == 0 and report.budget.reduced == ()


def test_media_places_and_rows_agree_with_the_units():
    sequence, _ = build(video(REFERENCE), text("Which?"), video("B46_silent_track.mp4"))
    expected = sum(unit.num_tokens for unit in sequence.units)
    assert (sequence.ids == NO_ID).sum() == expected
    for unit, (first, last) in zip(sequence.units, sequence.unit_ranges, strict=True):
        assert last - first == unit.num_tokens and (sequence.ids[first:last] == NO_ID).all()


@pytest.mark.parametrize("name", ["no_audio_track", "silent_track", "audio5s_video2s", "audio1s_video5s"])
def test_picture_and_sound_need_not_last_equally_long(name):
    sequence, report = build(video(f"B46_{name}.mp4"), text("Which?"))
    media = [segment for segment in sequence.segments if segment.kind != "text"]
    assert all(before.start <= after.start for before, after in pairwise(media))
    rows = sum(segment.num_tokens for segment in media if segment.kind == "audio")
    assert report.without_sound == (("B46_no_audio_track.mp4",) if name == "no_audio_track" else ())
    assert rows in {"no_audio_track": (0,), "silent_track": (20, 21), "audio5s_video2s": (25, 26),
                    "audio1s_video5s": (5, 6)}[name]  # fmt: skip


def test_a_missing_sound_track_is_refused_when_asked():
    strict = replace(FIXED, missing_sound="refuse")
    with pytest.raises(MediaError, match=r"B46_no_audio_track\.mp4: no audio stream"):
        build(video("B46_no_audio_track.mp4"), config=strict)
    build(video("B46_no_audio_track.mp4", audio=False), config=strict)
    build(video("B46_no_audio_track.mp4"), config=strict, rules=replace(RULES, audio=None))


def test_sound_is_left_out_where_the_row_or_the_model_says_so():
    for options in ({"audio": False}, {}):
        rules = RULES if options else replace(RULES, audio=None)
        sequence, report = build(video(REFERENCE, **options), rules=rules)
        assert not any(segment.kind == "audio" for segment in sequence.segments) and report.without_sound == ()


@pytest.mark.parametrize(("name", "frames"), [("4fps_5s", 20), ("8fps_5s", 40), ("0p2fps_60s", 12)])
def test_every_group_reads_its_own_time(name, frames):
    every = replace(FIXED.budget, settings=ladder((30.0, 1024, 1024, True)))
    config = replace(FIXED, budget=every)
    rules = replace(RULES, video=VideoPatches(patch=8, frames=1))
    sequence, report = build(video(f"B44_{name}.mp4"), config=config, rules=rules)
    stamps = [s.ids for s, after in pairwise(sequence.segments) if after.kind == "video"]
    assert len(set(stamps)) == len(stamps) == frames and report.repeated_stamps == 0
    whole_seconds = replace(config, stamps=StampConfig(decimals=0))
    _, coarse = build(video(f"B44_{name}.mp4"), config=whole_seconds, rules=rules)
    assert coarse.repeated_stamps == (0 if name == "0p2fps_60s" else frames - 6)


def test_a_budget_refuses_or_reduces_and_never_cuts():
    whole, _ = build(video(REFERENCE), text("Which?"), answer="caption")
    start = next(i for i, id in enumerate(whole.ids) if id == NO_ID)
    middle = start + 3
    for tokens in (whole.num_tokens - 1, middle, start, 4):
        with pytest.raises(
            ValueError, match=rf"sample 'a': {whole.num_tokens} tokens .* allows {tokens}; allow at least"
        ):
            build(video(REFERENCE), text("Which?"), answer="caption", config=within(tokens))
    steps = ladder((0.5, 256, 1024, False), (1.0, 1024, 1024, True))
    config = replace(FIXED, budget=BudgetConfig(tokens=whole.num_tokens - 1, settings=steps))
    reduced, report = build(video(REFERENCE), text("Which?"), answer="caption", config=config)
    assert reduced.num_tokens == report.budget.tokens < whole.num_tokens and report.budget.reduced
    assert (reduced.ids == NO_ID).sum() == sum(unit.num_tokens for unit in reduced.units)
    assert len(reduced.label_positions) == len(whole.label_positions)


@pytest.mark.parametrize("with_clip", [False, True])
def test_odd_texts_give_arrays_of_one_length(with_clip):
    for line in (CASES / "B48_texts.jsonl").read_text().splitlines():
        words = TEXT.clean(json.loads(line)["text"])[0]
        question = [video("B46_silent_track.mp4"), text(words)] if with_clip else [text(words)]
        if not (words or with_clip):
            continue
        sequence, _ = build(*question, answer=words)
        assert len(sequence.ids) == len(sequence.labels) == sequence.num_tokens
        trained = sequence.labels[sequence.labels != NO_LABEL].tolist()
        assert trained == [*words.encode(), TEXT.end]


def test_what_holds_nothing_is_refused():
    with pytest.raises(ValueError, match=r"sample 'a' has neither text nor media; remove the row"):
        build(text(""), answer="")


def test_images_and_sounds_stand_where_they_are_named(tmp_path):
    image, sound = Item(kind="image", media="a.png"), Item(kind="audio", media="B47_audio/exact_1s.wav")
    known = {"a.png": Media(kind="image", file=MediaFile("a.png"), image=(100, 100)), **media(sound)}
    sequence, _ = build_sequence(sample(text("x"), image, text("y"), sound), known, FIXED, rules=RULES)
    assert [s.kind for s in sequence.segments[1:5]] == ["text", "image", "text", "audio"]
    assert [unit.size for unit in sequence.units] == [(32, 32), (100,)]


def test_media_the_model_cannot_take_is_named():
    with pytest.raises(
        MediaError, match=r"ref_4s_30fps_aac\.mp4: is of kind video, for which the model has no encoder"
    ):
        build(video(REFERENCE), rules=replace(RULES, video=None))
    sound_only = {REFERENCE: replace(media(video(REFERENCE))[REFERENCE], kind="video")}
    sound_only[REFERENCE] = replace(sound_only[REFERENCE], clip=replace(sound_only[REFERENCE].clip, video=None))
    with pytest.raises(MediaError, match="no video stream"):
        build_sequence(sample(video(REFERENCE)), sound_only, FIXED, rules=RULES)


def hour():
    """Index of an hour of picture at 10 frames a second, a key frame every 5 s, with sound."""
    frames = np.arange(36000)
    entries = frames[::50]
    packets = np.arange(0, 3600 * 16000, 1024)
    return ClipIndex(
        format="mp4", size=1, origin=Fraction(0), streams=(), notes=(),
        video=VideoTrack(
            stream=0, codec="h264", time_base=Fraction(1, 10), pts=frames, duration=1, packet=frames,
            sizes=np.ones(36000, np.int64), entry_packets=entries, entry_frames=entries, counted=False, seekable=True,
            coded=(180, 320), aspect=Fraction(1), turn=(False, False, False),
        ),
        audio=AudioTrack(
            stream=1, codec="aac", time_base=Fraction(1, 16000), rate=16000, channels=1, layout="mono",
            start=Fraction(0), pts=packets, position=packets, count=np.full(len(packets), 1024),
            exact=True, seekable=True,
        ),
    )  # fmt: skip


def test_an_hour_is_laid_out_whole():
    known = {"hour.mp4": Media(kind="video", file=MediaFile("hour.mp4"), clip=hour())}
    sequence, _ = build_sequence(sample(video("hour.mp4"), text("What?")), known, FIXED, rules=RULES)
    assert len(sequence.units) == 1800 + 3600 and sequence.num_tokens > 32768
    assert {kind: max(s.end for s in sequence.segments if s.kind == kind) for kind in ("video", "audio")} == {
        "video": 3600,
        "audio": 3600,
    }
