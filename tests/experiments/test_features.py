"""Training with kept features against training without: same losses and gradients, nothing decoded twice, on any ranks.

Run: pytest tests/experiments/test_features.py
"""

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data_pipelines.feature_cache import FeatureCache
from encoders import VideoPatches
from experiments.features import keep_features
from experiments.runtime import run_runner
from experiments.train_video_lm import train_on
from mmcp.config import ConfigError
from mmcp.parallel.mesh import build_mesh
from mmcp.sequence import Segment, TokenSequence, Unit
from mmcp.training.kept import KeptUnits, PartlyKept, encoder_digest, to_array, to_tensor
from mmcp.training.media import MediaInputs
from mmcp.training.run_folder import open_run_folder
from tests.training.tiny_run import tiny_settings

FROZEN = ("parts.video=0", "parts.image=0", "parts.audio=0", "optim.total_steps=5")


class Noted:
    """Notes what each step of a run decoded."""

    def __init__(self):
        self.frames, self.losses = [], []

    def __call__(self, runner):
        return self

    def __enter__(self):
        return self.step

    def __exit__(self, *_):
        pass

    def step(self, metrics, loaded):
        self.frames.append(loaded.frames_decoded)
        self.losses.append(metrics["loss"])


def train(settings) -> tuple[list[float], list[int]]:
    noted = Noted()
    train_on(build_mesh(settings.mesh), settings, Path(settings.folder), resume=False, watch=noted)
    return noted.losses, noted.frames


@pytest.mark.parametrize("ranks", [1, 2])
def test_kept_features_train_alike_and_nothing_is_decoded_twice(tiny_shards, tmp_path, rank_pool, ranks):
    runs = []
    for name in ("without", "cold", "warm"):
        keep = [] if name == "without" else [f"features.folder={tmp_path / 'features'}"]
        settings = tiny_settings(tiny_shards, tmp_path / name, f"mesh.ulysses={ranks}", *FROZEN, *keep)
        open_run_folder(settings.folder, resume=False)
        runs.append(rank_pool.run(train, settings, ranks=ranks, timeout=200.0))
    without, cold, warm = runs
    for rank in range(ranks):
        assert warm[rank][0] == pytest.approx(without[rank][0], rel=1e-12)
        assert cold[rank][0] == pytest.approx(without[rank][0], rel=1e-12)
        assert sum(warm[rank][1]) == 0 < sum(without[rank][1])
    first, later = sum(rank[1][0] for rank in cold), sum(sum(rank[1]) for rank in cold)
    assert first <= later <= sum(sum(rank[1]) for rank in without)
    assert FeatureCache(tmp_path / "features", 1).size() > 0


def test_other_weights_or_settings_have_other_digests(tiny_shards, tmp_path):
    def digest(*changes):
        settings = tiny_settings(tiny_shards, tmp_path, f"features.folder={tmp_path}", *FROZEN, *changes)
        return keep_features(settings, run_runner(settings, build_mesh(settings.mesh), vocabulary=264))["video"]

    digests = [digest(), digest("seed=1"), digest("dtype=float32"), digest("model.video.heads=1")]
    assert len(set(digests)) == 4 and digest() == digests[0]


def test_the_projector_is_not_part_of_the_digest():
    module = VideoPatches(patch=8, channels=8, layers=1, heads=2).build(8)
    before = encoder_digest(module)
    with torch.no_grad():
        module.projector.first.weight += 1
    assert encoder_digest(module) == before
    with torch.no_grad():
        module.embed.weight[0, 0] += 1e-6
    assert encoder_digest(module) != before


def test_an_encoder_that_draws_is_refused():
    module = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.1))
    with pytest.raises(ValueError, match=r"features of an encoder with Dropout \('1'\) differ from step to step"):
        encoder_digest(module)


def test_a_call_is_completed_in_order():
    stored = {}
    encoded = torch.arange(12.0).reshape(2, 3, 2)
    old = np.full((3, 2), 7, np.float32)
    kept = PartlyKept([None, old, None], ["a", ""], [0.5, 0.0], lambda key, *rest: stored.update({key: rest}))
    assert kept.complete(encoded)[:, 0, 0].tolist() == [0, 7, 6]
    assert list(stored) == ["a"] and np.array_equal(stored["a"][0], encoded[0]) and stored["a"][1] == 0.5
    nothing = PartlyKept([old, old], [], [], None)
    assert nothing.complete(encoded[:0]).shape == (2, 3, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_hit_has_the_stored_bits(dtype):
    values = torch.randn(5, 3, dtype=dtype)
    assert torch.equal(to_tensor(to_array(values), values), values)


def test_nothing_to_keep_is_refused(tiny_shards, tmp_path):
    with pytest.raises(ConfigError, match="keeps features of frozen encoders, and none is frozen"):
        tiny_settings(tiny_shards, tmp_path, f"features.folder={tmp_path}")
    tiny_settings(tiny_shards, tmp_path, f"features.folder={tmp_path}", "parts.audio=0")


def test_a_sound_is_scaled_by_its_loudest_window_though_that_is_kept():
    units = tuple(
        Unit(num_tokens=1, start=Fraction(i), end=Fraction(i + 1), grid=(1, 1, 1), size=(20,), items=(i, i + 1))
        for i in range(2)
    )
    row = TokenSequence((Segment(kind="audio", source="a", units=units),))
    plan = SimpleNamespace(calls=((("audio", ((0, 2),)),),), encode=(((0, 2),),))
    seen = []
    media = MediaInputs(
        {"audio": SimpleNamespace(empty=lambda: torch.zeros(0, 2, 20))},
        finish=lambda x, loudest: seen.append(loudest.tolist()) or x,
        silence=-10.0,
        reduce_max=lambda values: values,
        device=torch.device("cpu"),
        store=lambda *_: None,
    )
    kept = KeptUnits({0: np.zeros((1, 4), np.float32)}, {0: 3.0}, {1: "key"})
    arrays = {1: np.full((2, 20), 1.0, np.float32)}
    ((_, x, partly),) = media.calls(row, plan, rank=0, arrays=arrays, num_calls={"audio": 1}, kept=kept)
    assert seen == [[3.0]] and x.shape == (1, 2, 20) and partly.loudest == [1.0] and partly.keys == ["key"]
    assert partly.complete(torch.ones(1, 1, 4))[:, 0, 0].tolist() == [0.0, 1.0]
