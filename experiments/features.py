"""Keep the features of a run's frozen encoders: the digests that their keys are made of, and the store."""

from importlib.metadata import version

import numpy as np
import torch

from data_pipelines.feature_cache import FeatureCache, Kept
from experiments.base import RunConfig
from mmcp.config import dump
from mmcp.training.kept import encoder_digest
from mmcp.training.step import StepRunner

LIBRARIES = ("torch", "av", "pillow", "numpy")


def keep_features(settings: RunConfig, runner: StepRunner) -> dict[str, str]:
    """Let the runner keep features, if asked for; return the digest of each frozen encoder by kind.

    Call it on every rank, when the weights are those of the run: after a checkpoint is loaded.
    """
    if not settings.features.folder:
        return {}
    cache = FeatureCache(settings.features.folder, settings.features.max_mb << 20)

    def store(key: str, features: np.ndarray, loudest: float) -> None:
        cache.write(key, Kept(features=features, loudest=loudest))

    runner.media.store = store
    software = [f"{name} {version(name)}" for name in LIBRARIES]
    types = [str(settings.parameter_dtype), str(settings.compute_dtype), runner.device.type]
    return {
        kind: encoder_digest(_module(runner, kind), dump(settings.model.encoders[kind]), *types, *software)
        for kind in sorted(settings.parts.frozen_encoders)
    }


def _module(runner: StepRunner, kind: str) -> torch.nn.Module:
    return runner.model.encoders[kind]
