"""`generate` of a parallelised model: transformers' own loop, with processors, criteria and streamers, over our caches.

Every rank of a group is given the same batch and returns the same ids. Drawing uses the generator of the first rank.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.utils import ModelOutput

from mmcp.integrations.transformers.sharded_cache import ShardedCache
from mmcp.integrations.transformers.turns import Turn, Turns
from mmcp.parallel.collectives import all_gather
from mmcp.parallel.mesh import Mesh

MODES = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
REFUSED = {
    "prefill_chunk_size": "the prompt is read at once, split over ranks",
    "cache_implementation": "caches are split over ranks",
    "guidance_scale": "guidance runs the model a second time with a cache of its own",
    "output_attentions": "attention weights are never written out",
    "output_hidden_states": "hidden states of a whole batch are on no rank",
    "token_healing": "healed prompts differ from those that the ranks agreed on",
}
"""Options that `generate` cannot follow over ranks, and why."""


@dataclass
class NextLogits(ModelOutput):
    """What `generate` asks of a model; the same on every rank."""

    logits: Tensor | None = None
    """[b, 1, vocabulary]: of the token after the last one."""
    cache: ShardedCache | None = None


def enable_generation(model: PreTrainedModel, mesh: Mesh) -> Turns:
    """Let `model.generate` run over ranks; what it cannot do, it refuses by name before anything is read.

    Returns what the model's forward tells of each call.
    """
    turns = Turns(mesh.cp)
    own: Any = model
    own.generate = MethodType(_as_method(type(own).generate, mesh, turns), model)
    own._prepare_cache_for_generation = MethodType(partial(_put_cache, mesh=mesh), model)
    own._maybe_prepare_encoder_kwargs_for_generation = MethodType(_encode_in_forward, model)
    return turns


def _as_method(own: Callable, mesh: Mesh, turns: Turns) -> Callable:
    """Dress transformers' own `generate` in what the ranks tell each other."""

    @wraps(own)
    def generate(self: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        nothing = torch.zeros(0, dtype=torch.int64, device=self.device)
        turns.is_open = True
        try:
            _check_call(self, mesh, kwargs)
            result = own(self, *args, **(kwargs | {"synced_gpus": False}))
        except Exception as error:
            if turns.is_open:
                turns.meet(Turn.RAISE, nothing, error=error)
            raise
        turns.meet(Turn.END, nothing)
        return result

    return generate


def _check_call(model: PreTrainedModel, mesh: Mesh, options: dict[str, Any]) -> None:
    asked = [name for name in ("custom_generate", "synced_gpus", "cache", "past_key_values") if options.get(name)]
    if asked:
        raise ValueError(
            f"{', '.join(asked)} in generate: ranks of a group run one loop in step, with a cache of their own; leave "
            "it out"
        )
    if options.get("inputs_embeds") is not None:
        raise ValueError("inputs_embeds in generate cannot be split over ranks; give input_ids")
    if mesh.data.size > 1 and isinstance(model, FSDPModule):
        raise ValueError(
            f"generate over {mesh.data.size} data-parallel groups whose parameters are sharded: a group that ends "
            "early would leave the others waiting; generate on one group, or on whole parameters"
        )


def _put_cache(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    generation_mode: GenerationMode,
    batch_size: int,
    max_cache_length: int,
    *,
    mesh: Mesh,
) -> None:
    """Give the loop a sharded cache where it would make its own; raise ValueError for what ranks cannot follow."""
    if generation_mode not in MODES:
        raise ValueError(
            f"generation mode '{generation_mode.value}' is not supported over ranks; use greedy search or sampling"
        )
    for name, reason in REFUSED.items():
        if getattr(generation_config, name, None):
            raise ValueError(f"{name}={getattr(generation_config, name)} is not supported over ranks: {reason}")
    if generation_config.use_cache is False:
        raise ValueError("use_cache=False in generate is not supported over ranks; leave it on")
    if generation_config.num_return_sequences > 1 and any(name.startswith("pixel") for name in model_kwargs):
        raise ValueError(
            f"num_return_sequences={generation_config.num_return_sequences} of a prompt with pixels: transformers "
            "repeats each image and video by itself, not with its row; repeat the rows of the batch instead"
        )
    if generation_config.do_sample:
        _share_generator(mesh, model.device)
    columns = model_kwargs["position_ids"].shape[-1]
    model_kwargs["cache"] = ShardedCache(max_cache_length - columns, mesh.cp)


def _encode_in_forward(
    model: PreTrainedModel, _inputs: Tensor, model_kwargs: dict[str, Any], *_: Any, **__: Any
) -> dict[str, Any]:
    """Leave pixels as they are: the forward encodes each on one rank."""
    return model_kwargs


def _share_generator(mesh: Mesh, device: torch.device) -> None:
    """Let all ranks of a group draw what its first rank draws."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    first = all_gather(state.to(device), group=mesh.cp, name="generator")[0].cpu()
    if device.type == "cuda":
        torch.cuda.set_rng_state(first, device)
    else:
        torch.set_rng_state(first)
