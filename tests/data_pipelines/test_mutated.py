"""Damaged files of every kind: the outcome is a result or a MediaError that names the file; nothing leaks or crashes.

python -m pytest tests/data_pipelines/test_mutated.py
"""

import os
import random
from pathlib import Path

import pytest

from data_pipelines.decode import decode_frames, decode_image
from data_pipelines.demux import read_index
from data_pipelines.media import MediaError
from data_pipelines.sound import decode_audio
from data_pipelines.tar_index import index_tar

CASES = Path(__file__).parents[1] / "data" / "cases"
FILES = sorted(path for path in CASES.rglob("*") if path.is_file() and path.stat().st_size > 100)


def mutate(data: bytes, draw: random.Random) -> bytes:
    """Flip bits, cut, blank, repeat or insert bytes somewhere."""
    changed, at = bytearray(data), draw.randrange(len(data))
    kind = draw.choice(["flip", "cut", "blank", "repeat", "insert"])
    if kind == "flip":
        for _ in range(draw.choice([1, 5, 50])):
            changed[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del changed[at:]
    elif kind == "blank":
        changed[at : at + 200] = bytes(len(changed[at : at + 200]))
    elif kind == "repeat":
        changed[at:at] = changed[at : at + draw.randrange(1, 3000)]
    else:
        changed[at:at] = draw.randbytes(5)
    return bytes(changed)


def use(path: str) -> None:
    """Do with a file what a run does with it."""
    if path.endswith((".jpg", ".png", ".gif")):
        decode_image(path, (8, 8))
    elif path.endswith(".tar"):
        index_tar(path)
    else:
        index = read_index(path)
        if index.video is not None:
            last = index.video.num_frames - 1
            decode_frames(path, index, [0, last // 2, last], (16, 24))
        if index.audio is not None:
            decode_audio(path, index, 0, min(index.audio_samples[1], 100_000))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL.*")
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))], ids=lambda seed: f"seed{seed}"
)
def test_every_outcome_is_a_result_or_a_named_error(tmp_path, seed):
    draw = random.Random(seed)
    outcomes = {"used": 0, "refused": 0}
    before = len(os.listdir("/proc/self/fd"))
    for number in range(120):
        source = draw.choice(FILES)
        path = tmp_path / f"{number}{source.suffix}"
        path.write_bytes(mutate(source.read_bytes(), draw))
        try:
            use(str(path))
            outcomes["used"] += 1
        except MediaError as error:
            assert str(path) in str(error)
            outcomes["refused"] += 1
    assert len(os.listdir("/proc/self/fd")) == before
    assert min(outcomes.values()) > 10
