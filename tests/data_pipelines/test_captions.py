"""Captions from the manifest to the sequence: at their times between pictures and sound, given or trained.

python -m pytest tests/data_pipelines/test_captions.py
"""

import io
import json
import shutil
import tarfile
from fractions import Fraction
from pathlib import Path

import pytest

from data_pipelines.budget import BudgetConfig, ladder
from data_pipelines.clip import ClipConfig, Rules, build_sequence
from data_pipelines.examine import examine
from data_pipelines.manifest import RowError, Sample, parse_line
from data_pipelines.media import MediaFile
from data_pipelines.prepare import prepare
from data_pipelines.shards import ShardSet
from encoders import AudioWindows, TokenizerConfig, VideoPatches
from mmcp.sequence import NO_LABEL, TokenSequence

CASES = Path(__file__).parents[1] / "data" / "cases"
CLIP = "ref_4s_30fps_aac.mp4"
TEXT = TokenizerConfig().build()
RULES = Rules(text=TEXT, video=VideoPatches(patch=8), audio=AudioWindows(frames_per_row=20))
FIXED = ClipConfig(budget=BudgetConfig(tokens=10**6, settings=ladder((1.0, 1024, 1024, True))))
SRT = "1\n00:00:02,500 --> 00:00:03,000\nlater\n\n2\n00:00:01,000 --> 00:00:01,500\n<i>first</i>\n"


@pytest.fixture
def folder(tmp_path):
    shutil.copy(CASES / CLIP, tmp_path)
    (tmp_path / "a.srt").write_text(SRT)
    (tmp_path / "bad.srt").write_text("no cue")
    return tmp_path


def line(**fields) -> bytes:
    content = [{"type": "video", "video": CLIP, **fields}, {"type": "text", "text": "what?"}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "that"}]
    return json.dumps({"id": "a", "messages": turns}).encode()


def parsed(folder: Path, **fields) -> Sample | RowError:
    return parse_line(line(**fields), manifest=str(folder / "m.jsonl"), row=1)


def laid_out(sample: Sample) -> TokenSequence:
    media = {item.media: examine(item.kind, MediaFile(item.media)) for item in sample.items if item.media}
    return build_sequence(sample, media, FIXED, rules=RULES)[0]


def told(sequence: TokenSequence) -> list[tuple[str, Fraction]]:
    """(text or kind, start) of every segment with a time."""
    timed = [segment for segment in sequence.segments if segment.end]
    return [(TEXT.decode(list(s.ids)) if s.kind == "text" else s.kind, s.start) for s in timed]


def test_captions_stand_at_their_times(folder):
    sequence = laid_out(parsed(folder, captions="a.srt"))
    found = told(sequence)
    assert ("first", Fraction(1)) in found and ("later", Fraction(5, 2)) in found
    assert [start for _, start in found] == sorted(start for _, start in found)
    plain = laid_out(parsed(folder))
    assert sequence.num_tokens - plain.num_tokens == len(TEXT.encode("first")) + len(TEXT.encode("later"))
    assert (sequence.labels != NO_LABEL).sum() == (plain.labels != NO_LABEL).sum()


def test_captions_are_trained_where_the_row_says_so(folder):
    sequence = laid_out(parsed(folder, captions="a.srt", train_captions=True))
    trained = [TEXT.decode(list(segment.ids)) for segment in sequence.segments if segment.loss and segment.end]
    assert trained == ["first", "later"]


def test_captions_outside_the_view_are_not_shown(folder):
    found = told(laid_out(parsed(folder, captions="a.srt", video_start=1.5, video_end=2.75)))
    words = [text for text, _ in found if text in ("first", "later")]
    assert words == ["later"]


def test_captions_travel_through_shards(folder):
    (folder / "m.jsonl").write_bytes(line(captions="a.srt", train_captions=True) + b"\n" + line() + b"\n")
    prepare(folder / "m.jsonl", folder / "out")
    shards = ShardSet.open(folder / "out")
    expected = parsed(folder, captions="a.srt", train_captions=True).items[0]
    for number, (captions, train) in enumerate([(expected.captions, True), ((), False)]):
        item = shards.load(number)[0].items[0]
        assert (item.captions, item.train_captions) == (captions, train)


def test_a_foreign_shard_has_captions_as_a_field(folder):
    with tarfile.open(folder / "shard.tar", "w") as tar:
        for name, data in (("k.mp4", (CASES / CLIP).read_bytes()), ("k.srt", SRT.encode()), ("k.txt", b"words")):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    shards = ShardSet.open(folder / "shard.tar")
    assert [cue.text for cue in shards.load(0)[0].items[0].captions] == ["first", "later"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"captions": "bad.srt"}, "has captions that cannot be used: holds no cue"),
        ({"captions": "gone.srt"}, "names the file 'gone.srt', which is not there"),
        ({"captions": True}, "has captions that cannot be used: no stream of timed text"),
        ({"captions": 3}, "has captions 3 and train_captions False in a video item; captions is a path"),
        ({"captions": "a.srt", "train_captions": "yes"}, "train_captions is true or false"),
    ],
)
def test_bad_captions_reject_the_row(folder, fields, message):
    error = parsed(folder, **fields)
    assert isinstance(error, RowError) and message in str(error)
