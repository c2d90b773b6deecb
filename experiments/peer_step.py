"""Our driver among those of the peers: one training step of a Llama checkpoint, measured by their `common.py`.

Run:     torchrun --nproc-per-node=2 -m experiments.peer_step --seq 4096        (their folder on PYTHONPATH)
Expect:  one JSON line as every driver prints, then one with what the ranks of mmcp exchanged in a step.

It is the step of `mmcp train`: planned from metadata, Ulysses, label rows routed to their scorers, parameters and
gradients sharded by FSDP2, float32 parameters under bfloat16.
"""

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from encoders.mel import SILENCE, finish
from experiments.base import ModelConfig, Planner, ShardingConfig, cost_model
from mmcp.model.backbone import BackboneConfig
from mmcp.model.vlm import VideoLM
from mmcp.parallel.apply import shard_parameters, wrap_attention
from mmcp.parallel.collectives import all_reduce, record
from mmcp.parallel.mesh import Mesh, MeshConfig, build_mesh, process_group
from mmcp.sequence import NO_LABEL, Segment, TokenSequence
from mmcp.sharding.cost import Rates
from mmcp.training.media import MediaInputs
from mmcp.training.stage_clock import StageClock
from mmcp.training.step import StepRunner, StepWork

BLOCK_NAMES = {
    "input_layernorm": "mixer_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_proj": "mixer.project.q",
    "self_attn.k_proj": "mixer.project.k",
    "self_attn.v_proj": "mixer.project.v",
    "self_attn.o_proj": "mixer.out",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
"""Modules of one layer: Llama's name -> ours."""


def main() -> None:
    """Run the steps that the command line asks for, on this rank."""
    settings = common.parser().parse_args()
    torch.set_num_threads(settings.threads)
    with process_group("cpu") as device:
        mesh = build_mesh(MeshConfig(ulysses=common.world()), device=device)
        runner, names = load_runner(settings, mesh)
        work = plan_batch(settings, mesh, runner.model.backbone.settings)
        traffic: list[dict[str, Any]] = []

        def step() -> float:
            with record(mesh.world) as recorder:
                loss = train_step(runner, work)
            traffic[:] = [
                {"name": name, "phase": phase, "collectives": entry.collectives, "bytes": entry.bytes}
                for (name, phase), entry in recorder.traffic.items()
            ]
            return loss

        def gradients() -> dict[str, Tensor]:
            ours = dict(runner.model.named_parameters())
            return {theirs: _whole(ours[name].grad).float() for theirs, name in names.items()}

        common.run(settings, "mmcp", step, runner.model, note="mmcp: Ulysses, FSDP2", grads_fn=gradients)
        if mesh.rank == 0:
            print(json.dumps({"traffic": traffic}), flush=True)


def train_step(runner: StepRunner, work: StepWork) -> float:
    """Leave the gradients of the mean token loss in the model and return it; a step without labels leaves zeros."""
    total = work.label_tokens
    if not total:
        for parameter in runner.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return 0.0
    loss_sum = runner.backward(work, StageClock(runner.device))
    return all_reduce(loss_sum, "sum", group=runner.mesh.world, name="loss").item() / total


def load_runner(settings: Namespace, mesh: Mesh) -> tuple[StepRunner, dict[str, str]]:
    """Load the checkpoint, split attention and parameters over the ranks; also the names, theirs -> ours."""
    folder = Path(common.ensure_ckpt(settings))
    hf = json.loads((folder / "config.json").read_text())
    backbone = BackboneConfig(
        width=hf["hidden_size"],
        layers=hf["num_hidden_layers"],
        heads=hf["num_attention_heads"],
        kv_heads=hf["num_key_value_heads"],
        head_dim=hf["head_dim"],
        mlp_width=hf["intermediate_size"],
        rope_theta=hf["rope_parameters"]["rope_theta"],
        qk_norm=False,
        qkv_bias=hf["model_type"] == "qwen2",
        norm_eps=hf["rms_norm_eps"],
    )
    model = VideoLM(backbone.build(), {}, vocabulary=hf["vocab_size"])
    names = _names(backbone)
    with torch.no_grad():
        ours = dict(model.named_parameters())
        for name, tensor in load_file(folder / "model.safetensors").items():
            ours[names[name]].copy_(tensor)
    wrap_attention(model, mesh)
    compute = torch.bfloat16 if settings.dtype == "bf16" else None
    shard_parameters(model, mesh, units=model.units, compute_dtype=compute)
    media = MediaInputs({}, finish=finish, silence=SILENCE, reduce_max=lambda values: values, device=mesh.device)
    model.train()
    return StepRunner(model, mesh, media=media, positions=backbone.positions_of, device=mesh.device), names


def plan_batch(settings: Namespace, mesh: Mesh, backbone: BackboneConfig) -> StepWork:
    """Plan the step over the batch that all drivers share: one document, a run of text for each run of labels."""
    ids, labels = (row[0].numpy() for row in common.batch(settings))
    is_label = labels != NO_LABEL
    cuts = np.flatnonzero(np.diff(is_label)) + 1
    segments = tuple(
        Segment(kind="text", ids=tuple(run.tolist()), loss=bool(flags[0]))
        for run, flags in zip(np.split(ids, cuts), np.split(is_label, cuts), strict=True)
    )
    costs = cost_model(
        ModelConfig(backbone=backbone),
        vocabulary=settings.vocab,
        dtype=common.DT[settings.dtype],
        call_tokens=settings.seq,
        rates=Rates(),
    )
    return StepWork(Planner(mesh.config, ShardingConfig(), costs).step([TokenSequence(segments)]), {})


def _names(backbone: BackboneConfig) -> dict[str, str]:
    """Llama's parameter names -> ours."""
    names = {"model.embed_tokens.weight": "embedding.weight", "lm_head.weight": "head.weight"}
    names["model.norm.weight"] = "backbone.norm.weight"
    for layer in range(backbone.layers):
        for theirs, ours in BLOCK_NAMES.items():
            names[f"model.layers.{layer}.{theirs}.weight"] = f"backbone.blocks.{layer}.{ours}.weight"
            if backbone.qkv_bias and ".project." in ours:
                names[f"model.layers.{layer}.{theirs}.bias"] = f"backbone.blocks.{layer}.{ours}.bias"
    return names


def _whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None, "every parameter has a gradient after a step"
    return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


if __name__ == "__main__":
    main()
