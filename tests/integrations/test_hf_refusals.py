"""What a parallelised model refuses, by name; that ranks of one group notice each other's faults and differences.

Run: python -m pytest tests/integrations/test_hf_refusals.py
"""

import pytest

pytest.importorskip("transformers")

import copy
from fractions import Fraction

import torch
import torch.distributed as dist
import transformers

from mmcp.integrations.transformers import DeferredPixels, Step, parallelize
from mmcp.parallel.mesh import MeshConfig, build_mesh
from tests.integrations import hf_cases


@pytest.fixture(scope="module")
def llama():
    return parallelize(hf_cases.make_model("llama", torch.float32), build_mesh(MeshConfig()))


REFUSED = {
    "past_key_values": ({"past_key_values": torch.zeros(1)}, "past_key_values in the batch of a llama model"),
    "pixels": ({"pixel_values": torch.zeros(1)}, "pixel_values in the batch of a llama model"),
    "audio": ({"input_features": torch.zeros(1)}, "input_features in the batch of a llama model"),
    "cache": ({"use_cache": True}, "use_cache=True is not supported"),
    "attentions": ({"output_attentions": True}, "output_attentions=True is not supported"),
    "logits": ({"logits_to_keep": torch.zeros(1)}, "logits_to_keep"),
    "no labels": ({"labels": None}, "needs input_ids and labels"),
    "hidden states": ({"output_hidden_states": True}, "output_hidden_states=True is not supported"),
    "router losses": ({"output_router_logits": True}, "output_router_logits=True is not supported"),
    "embeddings": ({"inputs_embeds": torch.zeros(1, 19, 32)}, "inputs_embeds in the batch of a llama model"),
    "no ids": ({"input_ids": None}, "needs input_ids and labels"),
    "no token": (
        {"input_ids": torch.zeros(1, 0, dtype=torch.long), "labels": torch.zeros(1, 0, dtype=torch.long)},
        r"input_ids of shape \[1, 0\] hold no token",
    ),
    "other packing": ({"cu_seq_lens_q": torch.tensor([0, 5, 19])}, "cu_seq_lens_q"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_batches_that_are_refused(llama, case):
    given, reason = REFUSED[case]
    with pytest.raises(ValueError, match=reason):
        llama(**(hf_cases.text_batch(rows=1) | given))


def _set_attention(model):
    model.set_attn_implementation("sdpa")


def _set_loss(model):
    model.loss_function = torch.nn.functional.cross_entropy


def _add_dropout(model):
    model.model.norm = torch.nn.Sequential(model.model.norm, torch.nn.Dropout(0.1))


CHANGES = {
    "attention": (_set_attention, "was set to 'sdpa', which sees one rank's tokens only"),
    "loss": (_set_loss, "loss_function was set"),
    "dropout": (_add_dropout, "has dropout"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_is_changed_after_it_was_parallelised_is_refused(case):
    change, reason = CHANGES[case]
    model = parallelize(hf_cases.make_model("llama", torch.float32), build_mesh(MeshConfig()))
    change(model)
    with pytest.raises(ValueError, match=reason):
        model(**hf_cases.text_batch())


def test_a_copy_does_not_answer_for_the_original():
    model = parallelize(hf_cases.make_model("llama", torch.float32), build_mesh(MeshConfig()))
    with pytest.raises(ValueError, match="is a copy of a parallelised model"):
        copy.deepcopy(model)(**hf_cases.text_batch())


def test_rotary_tables_that_follow_the_longest_position_are_refused():
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    settings = hf_cases.TEXT | {"max_position_embeddings": 16, "rope_parameters": rope}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings))
    parallelize(model, build_mesh(MeshConfig()))
    assert model(**hf_cases.text_batch(tokens=16)).loss.isfinite()
    with pytest.raises(ValueError, match="rope_type 'dynamic' scales its tables by the longest position"):
        model(**hf_cases.text_batch(tokens=17))


def test_a_label_that_padding_predicts_is_refused(llama):
    batch = hf_cases.left_padded()
    batch["labels"][1] = batch["input_ids"][1].masked_fill(batch["attention_mask"][1] == 0, -100)
    with pytest.raises(ValueError, match="is predicted by token 4, which attention_mask says is padding"):
        llama(**batch)


def test_lengths_of_padding_free_collators_are_taken_when_positions_agree(llama):
    batch = hf_cases.packed()
    told = {"cu_seq_lens_q": torch.tensor([0, 9, 12, 23]), "cu_seq_lens_k": torch.tensor([0, 9, 12, 23])}
    assert llama(**batch, **told).loss == llama(**batch).loss


def test_placeholders_without_their_pixels_are_refused():
    model = parallelize(hf_cases.make_model("qwen2_5_vl", torch.float32), build_mesh(MeshConfig()))
    batch = hf_cases.qwen_media()
    batch["pixel_values_videos"] = None
    with pytest.raises(ValueError, match="16 video tokens, but video_grid_thw"):
        model(**batch)


def test_models_that_are_refused():
    small = {"vocab_size": 32, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    mistral = transformers.MistralForCausalLM(transformers.MistralConfig(**small, num_key_value_heads=1))
    with pytest.raises(ValueError, match="model_type 'mistral'"):
        parallelize(mistral, build_mesh(MeshConfig()))
    with pytest.raises(ValueError, match="a OptimizedModule is no model of transformers"):
        parallelize(torch.compile(hf_cases.make_model("llama", torch.float32)), build_mesh(MeshConfig()))
    headless = transformers.LlamaModel(transformers.LlamaConfig(**small))
    with pytest.raises(ValueError, match="language models with a head"):
        parallelize(headless, build_mesh(MeshConfig()))
    changed = hf_cases.make_model("llama", torch.float32)
    _set_loss(changed)
    with pytest.raises(ValueError, match="loss_function was set"):
        parallelize(changed, build_mesh(MeshConfig()))
    dropping = transformers.LlamaForCausalLM(transformers.LlamaConfig(**small, attention_dropout=0.1))
    with pytest.raises(ValueError, match="has dropout"):
        parallelize(dropping, build_mesh(MeshConfig()))


def two_heads_on_three_ranks() -> str:
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(vocab_size=32, hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    )
    try:
        parallelize(model, build_mesh(MeshConfig(ulysses=3)))
    except ValueError as error:
        return str(error)
    return ""


def different_batches(entry: str) -> str:
    """Give each rank another value of one entry of the batch."""
    rank = dist.get_rank()
    batch = hf_cases.four_d_mask() | {"num_items_in_batch": 4}
    if entry == "attention_mask":
        batch[entry][..., 0, 1:3] = batch[entry][..., 1, 2] = rank == 0
    elif entry == "num_items_in_batch":
        batch[entry] += rank
    else:
        batch[entry][0, -1] = 5 + rank
    model = parallelize(hf_cases.make_model("llama", torch.float32), build_mesh(MeshConfig(ulysses=2)))
    try:
        model(**batch)
    except ValueError as error:
        return str(error)
    return ""


def fault_of_one_rank(case: str) -> str:
    """Give one rank what it refuses, or a file that it cannot read; returns the error's type and text."""
    batch = hf_cases.make_batch("qwen_video", torch.float32)
    pixels = batch["pixel_values_videos"]

    def load(steps: list[int]) -> torch.Tensor:
        if case == "load" and dist.get_rank() == 1:
            raise OSError("the file ends early")
        return torch.cat([pixels[16 * step : 16 * step + 16] for step in steps])

    if case == "refused" and dist.get_rank() == 1:
        batch["video_grid_thw"] = batch["video_grid_thw"][:2]
    steps = [Step(at=Fraction(n), frames=(n,), decode=(n, n + 1), native=(16, 16)) for n in range(8)]
    model = parallelize(hf_cases.make_model("qwen2_5_vl", torch.float32), build_mesh(MeshConfig(ulysses=3)))
    try:
        model(**batch | {"pixel_values_videos": DeferredPixels(load, steps)})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_what_ranks_refuse_together(rank_pool):
    assert all("for 2 query heads" in text for text in rank_pool.run(two_heads_on_three_ranks, ranks=3))


@pytest.mark.parametrize("entry", ["input_ids", "labels", "attention_mask", "num_items_in_batch"])
def test_ranks_of_a_group_notice_different_batches(rank_pool, entry):
    assert all("share_batches" in text for text in rank_pool.run(different_batches, entry, ranks=2))


@pytest.mark.parametrize(
    ("case", "reason"),
    [("refused", "ValueError: 32 video tokens, but video_grid_thw"), ("load", "OSError: the file ends early")],
)
def test_a_fault_of_one_rank_is_raised_on_all(rank_pool, case, reason):
    first, at_fault, last = rank_pool.run(fault_of_one_rank, case, ranks=3)
    assert at_fault.startswith(reason)
    assert first == last and first.startswith("PeerError: rank 1: " + reason)
