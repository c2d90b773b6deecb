"""What a parallelised model refuses, by name and before anything is communicated."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmcp.attention.base import split_heads
from mmcp.integrations.transformers.interfaces import NAME
from mmcp.integrations.transformers.whole_row import WholeRow
from mmcp.parallel.collectives import Group, all_gather
from mmcp.parallel.mesh import Mesh
from mmcp.sharding.plan import ShardPlan

MODELS = ("llama", "qwen3", "gemma3_text", "gemma3", "qwen2_5_vl", "qwen3_vl", "qwen3_next")
"""Model types compared with their one-process run by the tests."""
TEXT_KEYS = ("input_ids", "attention_mask", "position_ids", "labels", "shift_labels", "num_items_in_batch")
OPTIONS = ("return_dict", "fused_lm_head")
VISION_KEYS = {
    "gemma3": ("pixel_values", "token_type_ids"),
    "qwen2_5_vl": (
        "pixel_values",
        "pixel_values_videos",
        "image_grid_thw",
        "video_grid_thw",
        "mm_token_type_ids",
        "second_per_grid_ts",
    ),
    "qwen3_vl": ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw", "mm_token_type_ids"),
}
PACKED_KEYS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What padding-free collators add for flash-attn: where position_ids start anew, said twice."""
SWITCHES = ("use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "logits_to_keep")
"""Options that must be off."""


def check_model(model: nn.Module, mesh: Mesh) -> None:
    """Raise ValueError for a model whose layers, heads, loss or dropout cannot be split over this mesh."""
    if not isinstance(model, PreTrainedModel):
        raise ValueError(
            f"a {type(model).__name__} is no model of transformers, nor peft's around one; parallelize the model "
            "itself, before it is wrapped or compiled"
        )
    config = model.config
    if config.model_type not in MODELS or model.get_output_embeddings() is None:
        raise ValueError(
            f"{type(model).__name__} (model_type '{config.model_type}') is not among the models that are known to give "
            f"their one-process results over ranks: language models with a head, of {', '.join(MODELS)}"
        )
    text: Any = model.get_decoder().config
    split_heads(text.num_attention_heads, text.num_key_value_heads, mesh.ulysses.size)
    _check_loss_and_dropout(model)


def check_unchanged(model: PreTrainedModel) -> None:
    """Raise ValueError for a parallelised model that was changed since into one that cannot be split."""
    text = model.get_decoder()
    if text.config._attn_implementation != NAME:
        raise ValueError(
            f"the attention of this parallelised model was set to '{text.config._attn_implementation}', which sees one "
            "rank's tokens only; leave it as parallelize() set it"
        )
    _check_loss_and_dropout(model)


def _check_loss_and_dropout(model: PreTrainedModel) -> None:
    if getattr(model, "_loss_function", None) is not None:
        raise ValueError(
            "model.loss_function was set, and would be given logits that are on no rank under context parallelism; "
            "leave the model's own"
        )
    dropped = any(isinstance(module, nn.Dropout) and module.p and module.training for module in model.modules())
    if dropped or getattr(model.get_decoder().config, "attention_dropout", None):
        raise ValueError(
            f"{type(model).__name__} has dropout, which would differ between ranks and from one process; set every "
            "dropout of its configuration to 0, adapters' too"
        )


def check_batch(model: PreTrainedModel, batch: dict[str, Any], *, is_scored: bool = True) -> dict[str, Any]:
    """Return the batch without entries that say nothing; raise ValueError for one that would be ignored.

    is_scored: whether it is given for its loss
    """
    kept = {name: value for name, value in batch.items() if name not in PACKED_KEYS and name not in SWITCHES}
    for name in SWITCHES:
        asked = batch.get(name, getattr(model.config, name, False) if name.startswith("output") else False)
        if isinstance(asked, Tensor) or asked:
            raise ValueError(f"{name}={asked} is not supported under context parallelism; leave it off")
    known = (*TEXT_KEYS, *OPTIONS, *VISION_KEYS.get(model.config.model_type, ()))
    unknown = sorted(set(kept) - set(known))
    if unknown:
        raise ValueError(
            f"{', '.join(unknown)} in the batch of a {model.config.model_type} model cannot be split over ranks; "
            f"known are {', '.join(known)}"
        )
    if "input_ids" not in kept or (is_scored and not {"labels", "shift_labels"} & set(kept)):
        raise ValueError(
            "a batch under context parallelism needs input_ids and labels (or shift_labels); to continue a text, call "
            "generate"
        )
    if not kept["input_ids"].numel():
        raise ValueError(f"input_ids of shape {list(kept['input_ids'].shape)} hold no token; give at least one")
    _check_packing(batch)
    _check_positions(model, batch)
    return kept


def check_ranks_agree(batch: dict[str, Any], whole: WholeRow, plan: ShardPlan, group: Group) -> None:
    """Raise ValueError on all ranks when they were given different batches: an exchange would hang or mix them."""
    if group.size == 1:
        return
    masks = [part for mask in dict.fromkeys(whole.masks) for part in (mask.bounds, mask.blocks, np.array(mask.window))]
    count = np.array(float(batch.get("num_items_in_batch", -1)))
    parts = (whole.ids, whole.positions, whole.sequence.labels, *masks, count)
    parts = (*parts, np.frombuffer(plan.digest.encode(), np.uint8))
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in parts)).digest()
    mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    digests = all_gather(mine, group=group, name="agree")
    others = [rank for rank, row in zip(group.ranks, digests, strict=True) if not torch.equal(row, digests[0])]
    if others:
        raise ValueError(
            f"ranks {list(group.ranks)} share their rows but were given different batches (those of ranks {others} "
            f"differ from rank {group.ranks[0]}'s); see share_batches for accelerate and Trainer"
        )


def _check_packing(batch: dict[str, Any]) -> None:
    """Raise ValueError when flash-attn's lengths say other documents than position_ids."""
    lengths = batch.get("cu_seq_lens_q")
    if lengths is None:
        return
    positions = batch.get("position_ids")
    ids = batch["input_ids"]
    starts = None if positions is None else torch.nonzero(positions.reshape(-1, ids.shape[-1])[0] == 0)[:, 0]
    if starts is None or len(ids) > 1 or lengths.tolist() != [*starts.tolist(), ids.shape[-1]]:
        raise ValueError(
            f"cu_seq_lens_q {lengths.tolist()[:8]} tells of packed documents, which position_ids do not; give "
            "position_ids [1, s] that start at 0 in each document"
        )


def _check_positions(model: PreTrainedModel, batch: dict[str, Any]) -> None:
    """Raise ValueError where rotary tables depend on the longest position that a rank sees."""
    rope = getattr(model.get_decoder().config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)] or [rope]
    kinds = {parameters.get("rope_type", "default") for parameters in nested} & {"dynamic", "longrope"}
    longest = model.get_decoder().config.max_position_embeddings
    tokens = batch["input_ids"].shape[-1]
    if kinds and tokens > longest:
        raise ValueError(
            f"rope_type '{kinds.pop()}' scales its tables by the longest position a rank sees, and {tokens} tokens are "
            f"more than the {longest} of the configuration; use linear, llama3 or yarn"
        )
