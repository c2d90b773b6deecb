"""Parallelised transformers models against the unmodified ones on one process: loss and every parameter's gradient.

Run: python -m pytest tests/integrations/test_hf_models.py           (a few cases of each model)
     python -m pytest tests/integrations/test_hf_models.py -m full   (all models, batches and meshes)
"""

import pytest

pytest.importorskip("transformers")

from fractions import Fraction

import torch

from mmcp.integrations.transformers import DeferredPixels, Step, parallelize
from mmcp.parallel.mesh import MeshConfig, build_mesh
from tests.integrations import hf_cases
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
    HfCase("llama", "four_d_mask", 2, gradients="sum"),
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
    """Bound errors; one beyond 1e-5 in float32 must be less than twice what the one process itself is off."""
    tolerance = 1e-8 if case.dtype == torch.float64 else 1e-5
    for errors in pool.run(errors_against_one_process, case, ranks=case.ring * case.ulysses):
        beyond = {name: error for name, error in errors.items() if not error <= tolerance}
        if beyond:
            assert case.dtype == torch.float32, beyond
            allowed = hf_cases.rounding_of_one_process(case)
            assert all(error < 2 * allowed.get(name, 0.0) for name, error in beyond.items()), (beyond, allowed)


@pytest.mark.parametrize("case", FEW, ids=str)
def test_some_cases_equal_one_process(rank_pool, case):
    check(rank_pool, case)


@pytest.mark.full
@pytest.mark.parametrize("case", ALL, ids=str)
def test_all_cases_equal_one_process(rank_pool, case):
    check(rank_pool, case)


def deferred_against_decoded() -> tuple[list[int], float]:
    """Run a video whose pixels are loaded where they are encoded: steps loaded here, difference of the losses."""
    batch = hf_cases.make_batch("qwen_video", torch.float64)
    pixels, loaded = batch["pixel_values_videos"], []

    def load(steps: list[int]) -> torch.Tensor:
        loaded.extend(steps)
        return torch.cat([pixels[16 * step : 16 * step + 16] for step in steps])

    model = parallelize(hf_cases.make_model("qwen2_5_vl", torch.float64), build_mesh(MeshConfig(ulysses=3)))
    whole = model(**batch).loss.item()
    steps = [Step(at=Fraction(n), frames=(n,), decode=(n, n + 1), native=(16, 16)) for n in range(8)]
    return loaded, abs(model(**batch | {"pixel_values_videos": DeferredPixels(load, steps)}).loss.item() - whole)


def test_each_step_of_a_video_is_loaded_on_one_rank(rank_pool):
    found = rank_pool.run(deferred_against_decoded, ranks=3)
    assert sorted(step for loaded, _ in found for step in loaded) == list(range(8))
    assert all(loaded for loaded, _ in found) and max(difference for _, difference in found) < 1e-12
