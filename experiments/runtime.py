"""The model of a run on one rank: built, wrapped for context parallelism, sharded."""

from typing import cast

import torch

from encoders.mel import SILENCE, finish
from experiments.base import ModelConfig, RunConfig, build_model
from mmcp.parallel.apply import shard_parameters, wrap_attention
from mmcp.parallel.collectives import all_reduce
from mmcp.parallel.mesh import Mesh
from mmcp.training.media import MediaInputs, UnitEncoder
from mmcp.training.parts import PartsConfig
from mmcp.training.step import StepRunner

EVERYTHING = PartsConfig()


def make_runner(
    model_config: ModelConfig,
    mesh: Mesh,
    *,
    vocabulary: int,
    seed: int,
    dtype: torch.dtype,
    compute_dtype: torch.dtype | None = None,
    parts: PartsConfig = EVERYTHING,
) -> StepRunner:
    """Build the model for this rank of the mesh; new weights are the same whatever the mesh.

    dtype: type of the parameters      compute_dtype: type they are cast to for the computation; None: as they are
    parts: which of them train
    """
    model = build_model(model_config, vocabulary=vocabulary, seed=seed, dtype=dtype).to(mesh.device)
    parts.freeze(model)
    wrap_attention(model, mesh)
    units = [*model.backbone.blocks, *dict.fromkeys(model.encoders.values())]
    shard_parameters(model, mesh, units=units, compute_dtype=compute_dtype)
    media = MediaInputs(
        {kind: cast(UnitEncoder, module) for kind, module in model.encoders.items()},
        finish=finish,
        silence=SILENCE,
        reduce_max=lambda values: all_reduce(values, "max", group=mesh.cp, name="loudest sound"),
        device=mesh.device,
    )
    return StepRunner(model, mesh, media=media, positions=model_config.backbone.positions_of, device=mesh.device)


def run_runner(settings: RunConfig, mesh: Mesh, *, vocabulary: int) -> StepRunner:
    """Build the model that a run's config describes."""
    return make_runner(
        settings.model,
        mesh,
        vocabulary=vocabulary,
        seed=settings.seed,
        dtype=settings.parameter_dtype,
        compute_dtype=settings.compute_dtype,
        parts=settings.parts,
    )
