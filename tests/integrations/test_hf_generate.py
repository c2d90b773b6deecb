"""`generate` of parallelised transformers models against the unmodified ones on one process, with and without a cache.

Ids are equal and the logits that they are chosen from agree to 1e-9 in float64, greedy and drawn.
Run: python -m pytest tests/integrations/test_hf_generate.py           (a few cases of each model)
     python -m pytest tests/integrations/test_hf_generate.py -m full   (all models, prompts and meshes)
"""

import pytest

pytest.importorskip("transformers")

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from mmcp.integrations.transformers import parallelize
from mmcp.parallel.mesh import MeshConfig, build_mesh
from tests.integrations.hf_cases import IMAGE, START, STOP, VIDEO, make_batch, make_model, wide_casts

GREEDY = {"max_new_tokens": 9, "do_sample": False}
DRAWN = {"max_new_tokens": 9, "do_sample": True, "temperature": 1.3, "top_k": 30, "top_p": 0.9}
SCORED = {"return_dict_in_generate": True, "output_logits": True}
CHANGED = {"max_length": 30, "eos_token_id": list(range(1, 20)), "repetition_penalty": 1.3, "num_return_sequences": 2}


@dataclass(frozen=True)
class Case:
    model: str
    batch: str
    ulysses: int
    ring: int = 1
    options: str = "greedy"


OPTIONS: dict[str, dict[str, Any]] = {"greedy": GREEDY, "drawn": DRAWN, "changed": DRAWN | CHANGED}
FEW = [
    Case("llama", "left_padded", 3, options="drawn"),
    Case("llama", "text", 2, 2, options="changed"),
    Case("qwen3", "left_padded", 2),
    Case("qwen3_next", "text", 3, options="drawn"),
    Case("qwen3_next", "left_padded", 2, 2),
    Case("qwen2_5_vl", "qwen_media", 3),
    Case("qwen2_5_vl", "qwen_video", 2, options="drawn"),
    Case("qwen3_vl", "qwen_stamped", 2),
    Case("gemma3", "gemma_joined", 3),
    Case("gemma3_text", "left_padded", 4),
]
TEXT_PROMPTS = ("text", "left_padded", "three_tokens")
PROMPTS = {
    "llama": TEXT_PROMPTS,
    "qwen3": TEXT_PROMPTS,
    "qwen3_next": TEXT_PROMPTS,
    "gemma3_text": ("text", "left_padded"),
    "qwen2_5_vl": ("text", "qwen_media", "qwen_video", "qwen_one_image"),
    "qwen3_vl": ("qwen_stamped", "qwen_one_image"),
    "gemma3": ("gemma_media", "gemma_joined"),
}
ALL = [
    Case(model, batch, ulysses, ring, options)
    for model, batches in PROMPTS.items()
    for batch in batches
    for ring, ulysses in ((1, 2), (1, 3), (1, 4), (2, 2))
    for options in (OPTIONS if batch in TEXT_PROMPTS else ("greedy", "drawn"))
]


def prompt(name: str) -> dict[str, Tensor]:
    return {key: value for key, value in make_batch(name, torch.float64).items() if key != "labels"}


def answers(case: Case) -> tuple[Tensor, Tensor, float]:
    """Return ids of one process, ids of the parallelised model here, and the largest difference of logits."""
    options = OPTIONS[case.options] | {"pad_token_id": 0, "suppress_tokens": [IMAGE, VIDEO, START, STOP]}
    with wide_casts():
        model = make_model(case.model, torch.float64).eval()
        torch.manual_seed(3)
        one = model.generate(**prompt(case.batch), **options, **SCORED)
        torch.manual_seed(3)
        slow = model.generate(**prompt(case.batch), **options, use_cache=False)
        assert torch.equal(one.sequences, slow), "transformers' own cache changes what it says"
        mesh = build_mesh(MeshConfig(ring=case.ring, ulysses=case.ulysses))
        model = parallelize(model, mesh)
        torch.manual_seed(3 + mesh.rank)  # the first rank's is what counts
        found = model.generate(**prompt(case.batch), **options, **SCORED)
    difference = max(float((a - b).abs().max()) for a, b in zip(found.logits, one.logits, strict=False))
    return one.sequences, found.sequences, difference


def check(pool, case: Case) -> None:
    for one, found, difference in pool.run(answers, case, ranks=case.ring * case.ulysses):
        assert torch.equal(found, one)
        assert difference < 1e-9


@pytest.mark.parametrize("case", FEW, ids=str)
def test_some_cases_say_what_one_process_says(rank_pool, case):
    check(rank_pool, case)


@pytest.mark.full
@pytest.mark.parametrize("case", ALL, ids=str)
def test_all_cases_say_what_one_process_says(rank_pool, case):
    check(rank_pool, case)


class Fails(StoppingCriteria):
    """Raises on one rank after some tokens; or ends there."""

    def __init__(self, rank: int, *, raises: bool):
        self.rank, self.raises, self.calls = rank, raises, 0

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        self.calls += 1
        here = torch.distributed.get_rank() == self.rank and self.calls == 3
        if here and self.raises:
            raise RuntimeError("the disk is full")
        return torch.full((len(input_ids),), here)


def failing(raises: bool) -> str:
    model = parallelize(make_model("llama", torch.float64).eval(), build_mesh(MeshConfig(ulysses=3)))
    try:
        model.generate(**prompt("text"), **GREEDY, stopping_criteria=[Fails(1, raises=raises)])
    except Exception as error:
        assert len(model.generate(**prompt("text"), **GREEDY)), "ranks are still in step"
        return f"{type(error).__name__}: {error}"
    return "none"


def test_an_error_of_one_rank_between_two_tokens_is_raised_on_all(rank_pool):
    first, second, third = rank_pool.run(failing, True, ranks=3)
    assert second == "RuntimeError: the disk is full"
    assert first == third == "PeerError: rank 1: RuntimeError: the disk is full"


def test_a_rank_that_ends_alone_is_an_error_on_all(rank_pool):
    for message in rank_pool.run(failing, False, ranks=3):
        assert message.startswith("ValueError: ranks [1] of [0, 1, 2] have ended")


REFUSED = {
    "beams": ({"num_beams": 2}, "generation mode 'beam_search'"),
    "drawn beams": ({"num_beams": 2, "do_sample": True}, "generation mode 'beam_sample'"),
    "prompt lookup": ({"prompt_lookup_num_tokens": 2}, "generation mode 'assisted_generation'"),
    "chunks": ({"prefill_chunk_size": 4}, "prefill_chunk_size=4"),
    "static": ({"cache_implementation": "static"}, "cache_implementation=static"),
    "no cache": ({"use_cache": False}, "use_cache=False"),
    "attentions": ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
    "synced": ({"synced_gpus": True}, "synced_gpus"),
    "guidance": ({"guidance_scale": 2.0}, "guidance_scale=2.0"),
}


def refusal(options: dict[str, Any], batch: str, model: str = "llama") -> str:
    model = parallelize(make_model(model, torch.float64).eval(), build_mesh(MeshConfig(ulysses=2)))
    with pytest.raises(ValueError) as caught:
        model.generate(**prompt(batch), **(GREEDY | options))
    return str(caught.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_done_is_refused_by_name(rank_pool, name):
    options, message = REFUSED[name]
    for found in rank_pool.run(refusal, options, "text", ranks=2):
        assert message in found


@pytest.mark.parametrize("batch, message", [("right_padded", "pad on the left"), ("packed", "packs several documents")])
def test_prompts_that_cannot_be_continued_are_refused(rank_pool, batch, message):
    for found in rank_pool.run(refusal, {}, batch, ranks=2):
        assert message in found


def test_several_answers_to_a_prompt_with_pixels_are_refused(rank_pool):
    for found in rank_pool.run(
        refusal, {"num_return_sequences": 2, "do_sample": True}, "qwen_video", "qwen2_5_vl", ranks=2
    ):
        assert "num_return_sequences=2 of a prompt with pixels" in found
