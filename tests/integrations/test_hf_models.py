"""Parallelised transformers models against the unmodified ones on one process: loss and every parameter's gradient.

Run: python -m pytest tests/integrations/test_hf_models.py           (a few cases of each model)
     python -m pytest tests/integrations/test_hf_models.py -m full   (all models, batches and meshes)
"""

import pytest

pytest.importorskip("transformers")

import torch

from tests.integrations.hf_cases import HfCase, errors_against_one_process

TEXT_BATCHES = ("text", "right_padded", "left_padded", "packed", "labels_at_the_end", "three_tokens")
FEW = [
    HfCase("llama", "right_padded", 3),
    HfCase("llama", "packed", 2, dtype=torch.float32),
    HfCase("llama", "four_d_mask", 2),
    HfCase("llama", "labels_at_the_end", 2, ring=2),
    HfCase("qwen3", "left_padded", 3),
    HfCase("qwen3", "packed", 4),
    HfCase("qwen3", "packed", 2, checkpointing=True),
]


def check(pool, case: HfCase) -> None:
    tolerance = 1e-8 if case.dtype == torch.float64 else 1e-5
    for errors in pool.run(errors_against_one_process, case, ranks=case.ring * case.ulysses):
        worst = max(errors, key=errors.__getitem__)
        assert errors[worst] <= tolerance, (worst, errors[worst])


@pytest.mark.parametrize("case", FEW, ids=str)
def test_some_cases_equal_one_process(rank_pool, case):
    check(rank_pool, case)
