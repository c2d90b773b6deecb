"""Every kind of mask that transformers' masking_utils makes against our Mask, pair by pair; what is none is refused.

The reference is transformers' own `sdpa_mask` of the same arguments, for rows with and without padding.
Run: python -m pytest tests/integrations/test_hf_masks.py
"""

import inspect

import numpy as np
import pytest

pytest.importorskip("transformers")

import torch
from transformers import LlamaConfig, masking_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

from mmcp.integrations.transformers import interfaces, mask_functions, whole_mask
from mmcp.integrations.transformers.whole_mask import WholeMask, mask_of_tensor

B, S = 2, 17
BLOCKS = torch.tensor([[-1] * 3 + [0] * 6 + [-1] * 4 + [1] * 4, [0] * 5 + [-1] * 12])
PADDED = torch.ones(B, S, dtype=torch.int64)
PADDED[0, :4], PADDED[1, 14:] = 0, 0
PACKED = torch.cat([torch.arange(6), torch.arange(3), torch.arange(8)])[None].expand(B, -1)


def config(implementation: str, **settings) -> LlamaConfig:
    made = LlamaConfig(hidden_size=8, num_attention_heads=2)
    for name, value in {"sliding_window": 4, "attention_chunk_size": 5, **settings}.items():
        setattr(made, name, value)
    made._attn_implementation = implementation
    return made


def both(make, *, settings=None, **arguments) -> tuple[WholeMask, torch.Tensor]:
    """Let `make` create a mask for our interface and, written out, for eager attention: [b, s, s] bool."""
    interfaces.register()
    embeds = torch.zeros(B, S, 8)
    arguments = {"inputs_embeds": embeds, "attention_mask": None, "cache": None, **arguments}
    ours = make(config=config("mmcp", **(settings or {})), **arguments)
    dense = make(config=config("eager", **(settings or {})), **arguments)
    return ours, dense


def pairs(dense: torch.Tensor) -> np.ndarray:
    return (dense[:, 0] == 0).numpy()


def check(ours: WholeMask, dense: torch.Tensor) -> None:
    """Compare what kept tokens read; padding is dropped by us and never read in theirs."""
    allowed = pairs(dense)
    at = 0
    packed = ours.packed().dense()
    for row in range(B):
        kept = ours.kept[row]
        assert not allowed[row][np.ix_(kept, ~kept)].any()
        expected = allowed[row][np.ix_(kept, kept)]
        stop = at + int(kept.sum())
        np.testing.assert_array_equal(packed[at:stop, at:stop], expected)
        assert not packed[at:stop, :at].any() and not packed[at:stop, stop:].any()
        at = stop
    assert at == len(packed)


MAKERS = {
    "causal": masking_utils.create_causal_mask,
    "sliding": masking_utils.create_sliding_window_causal_mask,
    "chunked": masking_utils.create_chunked_causal_mask,
}
EXTRAS = {
    "plain": {},
    "padded": {"attention_mask": PADDED},
    "packed": {"position_ids": PACKED},
    "blocks": {"block_sequence_ids": BLOCKS},
    "blocks padded": {"block_sequence_ids": BLOCKS, "attention_mask": PADDED},
    "and window": {"and_mask_function": masking_utils.sliding_window_overlay(3)},
    "or blocks": {"or_mask_function": masking_utils.blockwise_overlay(BLOCKS)},
    "or blocks and window": {
        "or_mask_function": masking_utils.blockwise_overlay(BLOCKS),
        "and_mask_function": masking_utils.sliding_window_overlay(3),
    },
    "a user's function": {"and_mask_function": lambda b, h, q, k: q - k < 3},
    "a user's or": {"or_mask_function": lambda b, h, q, k: (q < 4) & (k < 4)},
}

BLOCKS_ACROSS_CHUNKS = {("chunked", "blocks"), ("chunked", "blocks padded"), ("chunked", "or blocks")}


@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("kind", MAKERS)
def test_every_causal_kind_is_exact_or_refused(kind, extra):
    if (kind, extra) in BLOCKS_ACROSS_CHUNKS:
        with pytest.raises(ValueError, match="a both-ways block across two documents or chunks"):
            both(MAKERS[kind], **EXTRAS[extra])
        return
    ours, dense = both(MAKERS[kind], **EXTRAS[extra])
    check(ours, dense)


def test_bidirectional_masks():
    ours, dense = both(masking_utils.create_bidirectional_mask, allow_is_bidirectional_skip=False)
    check(ours, dense)
    ours, dense = both(
        masking_utils.create_bidirectional_mask, attention_mask=PADDED, allow_is_bidirectional_skip=False
    )
    check(ours, dense)
    ours, dense = both(masking_utils.create_causal_mask, settings={"is_causal": False}, allow_is_causal_skip=False)
    check(ours, dense)


def test_a_window_both_ways_is_refused_by_name():
    with pytest.raises(ValueError, match="sliding_window_bidirectional_overlay"):
        both(masking_utils.create_bidirectional_sliding_window_mask)


@pytest.mark.parametrize("extra", ["plain", "padded", "packed"])
def test_masks_of_vision_models(extra):
    """Gemma 3's own composition: images both ways, in sliding layers cut by the window."""
    arguments = {"position_ids": None, **EXTRAS[extra]}
    ours, dense = both(create_masks_for_vision_model, block_sequence_ids=BLOCKS, **arguments)
    for kind in ("full_attention", "sliding_attention"):
        check(ours[kind], dense[kind])


def four_d(kind: str) -> torch.Tensor:
    """[b, 1, s, s] bool."""
    full = torch.ones(S, S, dtype=torch.bool)
    causal = full.tril()
    documents = causal & (PACKED[0].cumsum(0)[:, None] >= 0)
    documents[6:, :6] = False
    made = {
        "causal": causal,
        "full": full,
        "window": causal & full.triu(-3),
        "documents": documents,
        "prefix": causal | ((torch.arange(S) < 5)[:, None] & (torch.arange(S) < 5)[None]),
        "padding": causal & (torch.arange(S) >= 3)[None],
    }[kind]
    return made[None, None].expand(B, 1, S, S)


@pytest.mark.parametrize("kind", ["causal", "full", "window", "documents", "prefix", "padding"])
@pytest.mark.parametrize("is_added", [False, True])
def test_four_d_masks_of_a_user(kind, is_added):
    mask = four_d(kind)
    given = torch.where(mask, 0.0, torch.finfo(torch.float32).min) if is_added else mask
    ours = mask_of_tensor(given, B)
    assert ours.is_over_kept
    for row in range(B):
        kept = ours.kept[row]
        np.testing.assert_array_equal(ours.rows[row].dense(), mask[row, 0].numpy()[np.ix_(kept, kept)])


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (torch.rand(1, 1, S, S) > 0.5, "is not causal documents"),
        (four_d("causal") & ((torch.arange(S)[:, None] - torch.arange(S)) % 3 < 2), "is not causal documents"),
        (torch.randn(1, 1, S, S), "a bias on the scores"),
        (torch.stack([four_d("causal")[0, 0], four_d("full")[0, 0]])[None], "differs between heads"),
        (torch.ones(1, 1, S, 2 * S, dtype=torch.bool), "only square masks"),
    ],
)
def test_four_d_masks_that_are_refused(mask, reason):
    with pytest.raises(ValueError, match=reason):
        mask_of_tensor(mask, 1)


def test_holes_under_a_window_are_refused():
    holes = PADDED.clone()
    holes[0, 8] = 0
    ours, _ = both(masking_utils.create_sliding_window_causal_mask, attention_mask=holes)
    with pytest.raises(ValueError, match="zeros between the tokens"):
        ours.packed()
    ours, dense = both(masking_utils.create_causal_mask, attention_mask=holes)
    check(ours, dense)


def test_a_mask_over_a_cache_is_refused():
    with pytest.raises(ValueError, match="a cache is not split"):
        whole_mask.whole_mask(1, 3, 7, 4, 0, masking_utils.causal_mask_function)


def test_long_rows_are_read_without_their_pairs():
    interfaces.register()
    length = 200_000
    positions = torch.cat([torch.arange(150_000), torch.arange(50_000)])[None]
    made = masking_utils.create_sliding_window_causal_mask(
        config=config("mmcp"),
        inputs_embeds=torch.zeros(1, 1, 1).expand(1, length, 8),
        attention_mask=None,
        cache=None,
        position_ids=positions,
    )
    assert made.rows[0].bounds.tolist() == [0, 150_000, length] and made.rows[0].window == 4
    with pytest.raises(ValueError, match="too many to look at"):
        masking_utils.create_causal_mask(
            config=config("mmcp"),
            inputs_embeds=torch.zeros(1, 1, 1).expand(1, length, 8),
            attention_mask=None,
            cache=None,
            and_mask_function=lambda b, h, q, k: q >= k,
        )


def test_every_mask_function_of_transformers_is_known():
    """A new function of masking_utils fails here, until it is read or named as one that is refused."""
    composed = {"sliding_window_causal_mask_function", "chunked_causal_mask_function"}  # of others
    refused = {"sliding_window_bidirectional_overlay", "sliding_window_bidirectional_mask_function"}
    elsewhere = {"padding_mask_function", "add_offsets_to_mask_function"}  # added by interfaces other than ours
    known = {name.split(".")[0] for name in mask_functions.MASK_FUNCTIONS}
    makers = {
        name
        for name, function in inspect.getmembers(masking_utils, inspect.isfunction)
        if function.__module__ == masking_utils.__name__
        and (name.endswith(("_mask_function", "_overlay", "_masks")) or name.startswith("remap"))
    }
    assert makers <= known | composed | refused | elsewhere, makers - known - composed - refused - elsewhere
    layers = set(masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING)
    assert ALL_MASK_ATTENTION_FUNCTIONS["mmcp"] is whole_mask.whole_mask and "full_attention" in layers
