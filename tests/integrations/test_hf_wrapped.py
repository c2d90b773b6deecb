"""Parallelised models inside what people put around and into them, against the same without ranks.

peft's adapters in three orders, frozen parts, DDP, FSDP2, reentrant checkpointing, autocast, torch.compile, rows of
unequal length with media of their own, a number of items that is not that of the labels: loss and every gradient that
trains, in float64. What autocast rounds is compared with what it rounds on one process.
Run: python -m pytest tests/integrations/test_hf_wrapped.py
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

pytest.importorskip("peft")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mmcp.integrations.transformers import average_gradients, parallelize
from mmcp.parallel.mesh import MeshConfig, build_mesh
from tests.integrations import hf_cases
from tests.integrations.hf_cases import relative, wide_casts

Change = Callable[[Any], Any]


def adapted(model: nn.Module) -> nn.Module:
    """Put adapters with an effect on all linear maps."""
    import peft

    torch.manual_seed(3)
    settings = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return peft.get_peft_model(model, settings).double()


def frozen_but_for(part: str, model: nn.Module) -> nn.Module:
    """Train nothing but parameters whose names hold this."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
    return model


def only(part: str) -> Change:
    return partial(frozen_but_for, part)


def reentrant(model: Any) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    return model


def sharded(model: Any) -> nn.Module:
    for layer in [*model.get_decoder().layers, *getattr(getattr(model.base_model, "visual", None), "blocks", ())]:
        fully_shard(layer)
    return fully_shard(model)


def as_it_is(model: nn.Module) -> nn.Module:
    return model


@dataclass(frozen=True)
class Wrapped:
    model: str
    batch: str
    before: Change = as_it_is
    """Done to the model, with and without ranks, before it is parallelised."""
    after: Change = as_it_is
    """The same, after it was parallelised."""
    around: Change | None = None
    """Put around a parallelised model; averages the gradients itself."""


CASES = {
    "peft, then parallelize": Wrapped("llama", "packed", before=adapted),
    "peft of qwen3_vl, then parallelize": Wrapped("qwen3_vl", "qwen_stamped", before=adapted),
    "parallelize, then peft": Wrapped("qwen2_5_vl", "qwen_media", after=adapted),
    "parallelize a recurrent model, then peft": Wrapped("qwen3_next", "right_padded", after=adapted),
    "only the projector trains": Wrapped("qwen2_5_vl", "qwen_media", before=only("visual.merger")),
    "only Gemma's projector trains": Wrapped("gemma3", "gemma_media", before=only("multi_modal_projector")),
    "only one layer trains": Wrapped("llama", "labels_at_the_end", before=only("layers.1")),
    "only decays train": Wrapped("qwen3_next", "text", before=only("A_log")),
    "reentrant checkpointing": Wrapped("qwen2_5_vl", "qwen_media", before=reentrant),
    "DDP": Wrapped("llama", "right_padded", around=DistributedDataParallel),
    "DDP, a batch without media": Wrapped("qwen3_vl", "text", around=DistributedDataParallel),
    "FSDP2": Wrapped("qwen2_5_vl", "labels_at_the_end", around=sharded),
    "FSDP2 before": Wrapped("qwen3_next", "right_padded", around=sharded),
    "rows with media, padded left": Wrapped("qwen2_5_vl", "two_rows"),
}


def two_rows() -> dict[str, Tensor]:
    """Two rows of unequal length, each with an image and videos of its own, padded on the left."""
    rows = [hf_cases.qwen_media(), hf_cases.qwen_media(videos=(2,))]
    longest = max(row["input_ids"].shape[1] for row in rows)
    fills = {"input_ids": 0, "labels": -100, "mm_token_type_ids": 0, "attention_mask": 0}
    for row in rows:
        row["attention_mask"] = torch.ones_like(row["input_ids"])
        for key, fill in fills.items():
            row[key] = F.pad(row[key], (longest - row[key].shape[1], 0), value=fill)
    return {key: torch.cat([row[key] for row in rows]) for key in rows[0]}


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """By name, without what wrappers add to it."""
    found = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            whole: Any = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            found[name.removeprefix("module.")] = whole.clone()
    return found


def worst_error(case: Wrapped) -> float:
    """Return the largest error of the loss and the gradients on this rank."""
    hf_cases.BATCHES["two_rows"] = two_rows
    batch = hf_cases.make_batch(case.batch, torch.float64) | {"num_items_in_batch": 7}
    mesh = build_mesh(MeshConfig(ulysses=dist.get_world_size()))
    with wide_casts():
        alone = case.after(case.before(hf_cases.make_model(case.model, torch.float64)))
        expected = alone(**batch, use_cache=False).loss
        expected.backward()
        model = case.after(parallelize(case.before(hf_cases.make_model(case.model, torch.float64)), mesh))
        model = case.around(model) if case.around else model
        loss = model(**batch).loss
        loss.backward()
    if not case.around:
        average_gradients(model, mesh)
    wanted, found = gradients_of(alone), gradients_of(model)
    assert wanted.keys() == found.keys()
    whole = torch.sqrt(sum(g.square().sum() for g in wanted.values()))
    errors = [relative(found[name], gradient, whole) for name, gradient in wanted.items()]
    return max(*errors, abs(loss.item() - expected.item()) / expected.item())


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_one_process(rank_pool, case):
    assert max(rank_pool.run(worst_error, CASES[case], ranks=3)) < 1e-8


def rounding_under_autocast(name: str) -> tuple[float, float]:
    """Return how far the gradients of one process and of all ranks are from those without autocast."""
    batch = hf_cases.make_batch("right_padded", torch.float32)
    mesh = build_mesh(MeshConfig(ulysses=dist.get_world_size()))
    found = []
    for in_bfloat16, over_ranks in ((False, False), (True, False), (True, True)):
        model = hf_cases.make_model(name, torch.float32)
        if over_ranks:
            parallelize(model, mesh)
        with torch.autocast("cpu", torch.bfloat16) if in_bfloat16 else nullcontext():
            loss = model(**batch).loss
        loss.backward()
        if over_ranks:
            average_gradients(model, mesh)
        found.append(torch.cat([gradient.flatten() for gradient in gradients_of(model).values()]))
    exact, alone, ours = found
    return float((alone - exact).norm() / exact.norm()), float((ours - exact).norm() / exact.norm())


@pytest.mark.parametrize("model", ["llama", "qwen3_next"])
def test_autocast_rounds_no_more_than_on_one_process(rank_pool, model):
    for alone, ours in rank_pool.run(rounding_under_autocast, model, ranks=2):
        assert ours < 1.5 * alone < 0.5


def compiled_and_not() -> tuple[float, float, type]:
    model = parallelize(hf_cases.make_model("llama", torch.float32), build_mesh(MeshConfig(ulysses=2)))
    batch = hf_cases.text_batch()
    as_tuple = model(**batch, return_dict=False)
    return torch.compile(model)(**batch).loss.item(), as_tuple[0].item(), type(as_tuple)


def test_a_compiled_model_and_one_that_answers_in_a_tuple_give_the_same(rank_pool):
    for compiled, plain, kind in rank_pool.run(compiled_and_not, ranks=2):
        assert compiled == plain and kind is tuple
