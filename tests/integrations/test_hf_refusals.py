"""What a parallelised model refuses, by name; that ranks of one group notice when they are given different batches.

Run: python -m pytest tests/integrations/test_hf_refusals.py
"""

import pytest

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
import transformers

from mmcp.integrations.transformers import parallelize
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
    "other packing": ({"cu_seq_lens_q": torch.tensor([0, 5, 19])}, "cu_seq_lens_q"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_batches_that_are_refused(llama, case):
    given, reason = REFUSED[case]
    with pytest.raises(ValueError, match=reason):
        llama(**(hf_cases.text_batch(rows=1) | given))


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


def different_batches() -> str:
    model = parallelize(hf_cases.make_model("llama", torch.float32), build_mesh(MeshConfig(ulysses=2)))
    try:
        model(**hf_cases.text_batch(seed=dist.get_rank()))
    except ValueError as error:
        return str(error)
    return ""


def test_what_ranks_refuse_together(rank_pool):
    assert all("for 2 query heads" in text for text in rank_pool.run(two_heads_on_three_ranks, ranks=3))
    assert all("share_batches" in text for text in rank_pool.run(different_batches, ranks=2))
