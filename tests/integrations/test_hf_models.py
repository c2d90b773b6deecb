"""Parallelised transformers models against the unmodified ones on one process: loss and every parameter's gradient.

Run: python -m pytest tests/integrations/test_hf_models.py           (a few cases of each model)
     python -m pytest tests/integrations/test_hf_models.py -m full   (all models, batches and meshes)
"""

import pytest

pytest.importorskip("transformers")

import torch

from tests.integrations.hf_cases import HfCase, errors_against_one_process

TEXT_BATCHES = ("text", "right_padded", "left_padded", "packed", "labels_at_the_end", "three_tokens")
MEDIA_BATCHES = {
    "qwen2_5_vl": ("qwen_media", "qwen_video", "qwen_one_image"),
    "qwen3_vl": ("qwen_stamped", "qwen_one_image"),
    "gemma3": ("gemma_media", "gemma_joined"),
}
TEXT_MODELS = ("llama", "qwen3", "gemma3_text", "qwen3_next")
MESHES = ((1, 2), (1, 3), (1, 4), (2, 2))  # ring x ulysses
FEW = [
    HfCase("llama", "right_padded", 3),
    HfCase("llama", "packed", 2, dtype=torch.float32),
    HfCase("llama", "four_d_mask", 2),
    HfCase("llama", "labels_at_the_end", 2, ring=2),
    HfCase("qwen3", "left_padded", 3),
    HfCase("qwen3", "packed", 4, checkpointing=True),
    HfCase("gemma3_text", "left_padded", 4),
    HfCase("gemma3", "gemma_joined", 3),
    HfCase("qwen2_5_vl", "text", 2),
    HfCase("qwen2_5_vl", "qwen_media", 3, dtype=torch.float32),
    HfCase("qwen3_vl", "qwen_stamped", 4),
    HfCase("qwen3_next", "packed", 3),
    HfCase("qwen3_next", "right_padded", 2, ring=2),
]
ALL = [
    HfCase(model, batch, ulysses, ring, dtype)
    for model in (*TEXT_MODELS, *MEDIA_BATCHES)
    for batch in (*TEXT_BATCHES, *MEDIA_BATCHES.get(model, ()))
    for ring, ulysses in MESHES
    for dtype in (torch.float64, torch.float32)
]


def check(pool, case: HfCase) -> None:
    tolerance = 1e-8 if case.dtype == torch.float64 else 1e-5
    for errors in pool.run(errors_against_one_process, case, ranks=case.ring * case.ulysses):
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= tolerance, (worst, errors[worst])


@pytest.mark.parametrize("case", FEW, ids=str)
def test_some_cases_equal_one_process(rank_pool, case):
    check(rank_pool, case)


@pytest.mark.full
@pytest.mark.parametrize("case", ALL, ids=str)
def test_all_cases_equal_one_process(rank_pool, case):
    check(rank_pool, case)
