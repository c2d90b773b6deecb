"""The model of a run on one rank: built, wrapped for context parallelism, sharded."""

from typing import cast

import torch
from torch import nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from encoders.mel import SILENCE, finish
from experiments.base import ModelConfig, RunConfig, build_model
from mmcp.model.pretrained import ModelFolder
from mmcp.parallel.apply import shard_parameters, wrap_attention
from mmcp.parallel.collectives import all_reduce
from mmcp.parallel.mesh import Mesh
from mmcp.parallel.pretrained import draw_adapters, fill, materialise
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
    is_filled_later: bool = False,
) -> StepRunner:
    """Build the model for this rank of the mesh; new weights are the same whatever the mesh.

    dtype: type of the parameters      compute_dtype: type they are cast to for the computation; None: as they are
    parts: which of them train
    is_filled_later: leave the weights of `model.pretrained` unread, since a checkpoint is loaded over them
    """
    model = build_model(model_config, vocabulary=vocabulary, seed=seed, dtype=dtype)
    model.encoders.to(mesh.device)
    if not model_config.pretrained:
        model.to(mesh.device)
    parts.freeze(model)
    wrap_attention(model, mesh)
    shard_parameters(model, mesh, units=model.units, compute_dtype=compute_dtype)
    register_fsdp_forward_method(model, "predict")
    materialise(model, mesh.device)
    if model_config.pretrained and not is_filled_later:
        fill(model, ModelFolder.open(model_config.pretrained))
    draw_adapters(model, seed)
    media = MediaInputs(
        {kind: cast(UnitEncoder, module) for kind, module in model.encoders.items()},
        finish=finish,
        silence=SILENCE,
        reduce_max=lambda values: all_reduce(values, "max", group=mesh.cp, name="loudest sound"),
        device=mesh.device,
    )
    return StepRunner(model, mesh, media=media, positions=model_config.backbone.positions_of, device=mesh.device)


def run_runner(settings: RunConfig, mesh: Mesh, *, vocabulary: int, is_filled_later: bool = False) -> StepRunner:
    """Build the model that a run's config describes; arguments as for `make_runner`."""
    return make_runner(
        settings.model,
        mesh,
        vocabulary=vocabulary,
        seed=settings.seed,
        dtype=settings.parameter_dtype,
        compute_dtype=settings.compute_dtype,
        parts=settings.parts,
        is_filled_later=is_filled_later,
    )


def num_updated(model: nn.Module) -> int:
    """Count the numbers of the parameters that train, of those that this rank keeps."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return sum((each.to_local() if isinstance(each, DTensor) else each).numel() for each in trained)
