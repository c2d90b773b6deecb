"""Tiny transformers models with random weights, batches for them, and their run over ranks beside one process.

Every rank makes the same model and batch, runs the unmodified model alone on all of it, then the parallelised model
with the others, and compares the loss and each parameter's gradient by the library's error: |a - b| / max(|b|, 1e-3 of
the whole model's gradient), L2 per tensor.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from mmcp.integrations.transformers import average_gradients, parallelize
from mmcp.parallel.mesh import MeshConfig, build_mesh

VOCABULARY = 96
IMAGE, VIDEO, START, STOP = 90, 91, 92, 93
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
VISION = {
    "depth": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 32,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
}
SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **TEXT, layer_types=["full_attention", "sliding_attention", "full_attention"], sliding_window=5,
            use_sliding_window=True,
        )
    )  # fmt: skip


def gemma3_config(**changes: Any) -> Any:
    settings = TEXT | {"sliding_window": 6, "query_pre_attn_scalar": 12, "tie_word_embeddings": True} | changes
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    return transformers.Gemma3TextConfig(**settings, layer_types=types)


def gemma3_text() -> nn.Module:
    return transformers.Gemma3ForCausalLM(gemma3_config(final_logit_softcapping=5.0))


def gemma3() -> nn.Module:
    vision = transformers.SiglipVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, image_size=24, patch_size=4
    )
    config = transformers.Gemma3Config(
        text_config=gemma3_config(), vision_config=vision, mm_tokens_per_image=9, image_token_index=IMAGE
    )
    config.image_token_id = IMAGE
    model = transformers.Gemma3ForConditionalGeneration(config)
    nn.init.normal_(model.model.multi_modal_projector.mm_input_projection_weight, std=0.2)
    return model


def qwen2_5_vl() -> nn.Module:
    text = TEXT | {"rope_parameters": SECTIONS}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=VISION | {"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=STOP,
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl() -> nn.Module:
    text = TEXT | {"rope_parameters": SECTIONS | {"mrope_interleaved": True}}
    vision = VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=STOP,
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def qwen3_next() -> nn.Module:
    return transformers.Qwen3NextForCausalLM(
        transformers.Qwen3NextConfig(
            **TEXT,
            layer_types=["linear_attention", "linear_attention", "full_attention"],
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_conv_kernel_dim=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
        )
    )


MODELS = {f.__name__: f for f in (llama, qwen3, gemma3_text, gemma3, qwen2_5_vl, qwen3_vl, qwen3_next)}


def make_model(name: str, dtype: torch.dtype) -> nn.Module:
    """Make a model whose weights are large enough for attention and norms to matter."""
    torch.manual_seed(7)
    model = MODELS[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    if name == "qwen3_next":
        model.set_experts_implementation("eager")  # the grouped product takes no float64
    return model.to(dtype).train()


def text_batch(*, rows: int = 2, tokens: int = 19, seed: int = 0, answer: float = 0.5) -> dict[str, Tensor]:
    """Rows of random text of which the last part is trained."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, 90, (rows, tokens), generator=generator)
    labels = ids.clone()
    labels[:, : int(tokens * (1 - answer))] = -100
    return {"input_ids": ids, "labels": labels}


def right_padded() -> dict[str, Tensor]:
    batch = text_batch(rows=3, tokens=14, seed=1)
    mask = torch.ones_like(batch["input_ids"])
    mask[0, 9:], mask[2, 12:] = 0, 0
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def left_padded() -> dict[str, Tensor]:
    batch = text_batch(rows=2, tokens=14, seed=2)
    mask = torch.ones_like(batch["input_ids"])
    mask[1, :5] = 0
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def packed() -> dict[str, Tensor]:
    """One row of three documents, told apart by their positions."""
    batch = text_batch(rows=1, tokens=23, seed=3, answer=1.0)
    lengths = (9, 3, 11)
    starts = (0, 9, 12)
    batch["labels"][0, list(starts)] = -100
    return batch | {"position_ids": torch.cat([torch.arange(n) for n in lengths])[None]}


def labels_at_the_end() -> dict[str, Tensor]:
    """Two labels of a long row: most ranks have none."""
    return text_batch(rows=1, tokens=21, seed=4, answer=0.1)


def three_tokens() -> dict[str, Tensor]:
    """Fewer tokens than ranks."""
    return text_batch(rows=1, tokens=3, seed=5, answer=1.0)


def four_d_mask() -> dict[str, Tensor]:
    """A user's own mask: two documents, the first with a prefix read both ways."""
    batch = text_batch(rows=1, tokens=12, seed=6, answer=0.4)
    mask = torch.ones(12, 12, dtype=torch.bool).tril()
    mask[7:, :7] = False
    mask[:3, :3] = True
    return batch | {"attention_mask": mask[None, None]}


def qwen_media(*, with_image: bool = True, stamps: bool = False, videos: tuple[int, ...] = (3, 1)) -> dict[str, Tensor]:
    """A row of text, an image of 4 x 6 patches and videos of unequal length, of 4 x 4 patches a frame.

    stamps: whether each frame stands by itself between timestamps, as Qwen3-VL has it
    """
    generator = torch.Generator().manual_seed(8)

    def text(n: int) -> list[int]:
        return torch.randint(1, 90, (n,), generator=generator).tolist()

    ids = text(3)
    if with_image:
        ids += [START, *[IMAGE] * 6, STOP, *text(2)]
    for frames in videos:
        for _ in range(frames if stamps else 1):
            ids += [*text(1), START, *[VIDEO] * (4 if stamps else 4 * frames), STOP]
    ids += text(7)
    row = torch.tensor([ids])
    labels = row.clone()
    labels[:, : len(ids) - 6] = -100
    batch = {"input_ids": row, "labels": labels}
    batch["mm_token_type_ids"] = (row == IMAGE).int() + 2 * (row == VIDEO).int()
    if with_image:
        batch["pixel_values"] = torch.randn(24, 96, generator=generator)
        batch["image_grid_thw"] = torch.tensor([[1, 4, 6]])
    if videos:
        batch["pixel_values_videos"] = torch.randn(16 * sum(videos), 96, generator=generator)
        batch["video_grid_thw"] = torch.tensor([[frames, 4, 4] for frames in videos])
    return batch


def gemma_media(images: int = 2, gap: int = 3) -> dict[str, Tensor]:
    """A row of text and images of nine tokens each, longer than the window, read both ways."""
    generator = torch.Generator().manual_seed(9)
    ids: list[int] = []
    for _ in range(images):
        ids += [*torch.randint(1, 90, (gap,), generator=generator).tolist(), *[IMAGE] * 9]
    ids += torch.randint(1, 90, (8,), generator=generator).tolist()
    row = torch.tensor([ids])
    labels = row.clone()
    labels[:, : len(ids) - 7] = -100
    return {
        "input_ids": row,
        "labels": labels,
        "token_type_ids": (row == IMAGE).int(),
        "pixel_values": torch.randn(images, 3, 24, 24, generator=generator),
    }


@contextmanager
def wide_casts() -> Iterator[None]:
    """Let nothing of transformers cast float64 down: .float(), .to(float32) and softmax(dtype=float32)."""
    as_float, to, softmax = Tensor.float, Tensor.to, F.softmax

    def float_(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self if self.dtype == torch.float64 else as_float(self, *args, **kwargs)

    def to_(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.dtype == torch.float64:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in kwargs.items()}
        return to(self, *args, **kwargs)

    def softmax_(x: Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Tensor:
        return softmax(x, *args, dtype=torch.float64 if x.dtype == torch.float64 else dtype, **kwargs)

    Tensor.float, Tensor.to, F.softmax = float_, to_, softmax_
    try:
        yield
    finally:
        Tensor.float, Tensor.to, F.softmax = as_float, to, softmax


@dataclass(frozen=True)
class HfCase:
    model: str
    batch: str
    ulysses: int = 1
    ring: int = 1
    dtype: torch.dtype = torch.float64
    mode: str | None = None
    checkpointing: bool = False
    gradients: str = "mean"


BATCHES: dict[str, Callable[[], dict[str, Tensor]]] = {
    "text": text_batch,
    "right_padded": right_padded,
    "left_padded": left_padded,
    "packed": packed,
    "labels_at_the_end": labels_at_the_end,
    "three_tokens": three_tokens,
    "four_d_mask": four_d_mask,
    "qwen_media": qwen_media,
    "qwen_video": lambda: qwen_media(with_image=False, videos=(5, 2, 1)),
    "qwen_stamped": lambda: qwen_media(stamps=True),
    "qwen_one_image": lambda: qwen_media(videos=()),
    "gemma_media": gemma_media,
    "gemma_joined": lambda: gemma_media(images=3, gap=0),
}


def make_batch(name: str, dtype: torch.dtype) -> dict[str, Any]:
    batch = BATCHES[name]()
    return {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}


def errors_against_one_process(case: HfCase) -> dict[str, float]:
    """Return this rank's error of the loss and of every parameter's gradient."""
    with wide_casts() if case.dtype == torch.float64 else nullcontext():
        model = make_model(case.model, case.dtype)
        loss, gradients = one_process(model, make_batch(case.batch, case.dtype))
        mesh = build_mesh(MeshConfig(ring=case.ring, ulysses=case.ulysses))
        if case.checkpointing:
            model.activation_checkpointing_enable()
        model = parallelize(model, mesh, mode=case.mode, gradients=case.gradients)
        model.zero_grad()
        out = model(**make_batch(case.batch, case.dtype))
        out.loss.backward()
    average_gradients(model, mesh)
    whole = torch.sqrt(sum(g.square().sum() for g in gradients.values()))
    errors = {"loss": abs(out.loss.item() - loss) / abs(loss)}
    for name, parameter in model.named_parameters():
        summed = mesh.cp.size if case.gradients == "sum" else 1
        errors[name] = relative(parameter.grad * summed, gradients[name], whole)
    return errors


def rounding_of_one_process(case: HfCase) -> dict[str, float]:
    """Return the error of the unmodified model's own gradients in the case's type, against float64."""
    _, gradients = one_process(make_model(case.model, case.dtype), make_batch(case.batch, case.dtype))
    with wide_casts():
        batch = make_batch(case.batch, torch.float64)
        _, exact = one_process(make_model(case.model, case.dtype).double(), batch)
    whole = torch.sqrt(sum(g.square().sum() for g in exact.values()))
    return {name: relative(gradients[name].double(), want, whole) for name, want in exact.items()}


def one_process(model: nn.Module, batch: dict[str, Any]) -> tuple[float, dict[str, Tensor]]:
    """Return the unmodified model's loss and gradients, without a cache, for which transformers forgets packing.

    A recurrent model sees each packed document by itself.
    """
    parts = [batch]
    if model.config.model_type == "qwen3_next" and "position_ids" in batch:
        starts = [*torch.nonzero(batch["position_ids"][0] == 0)[:, 0].tolist(), batch["input_ids"].shape[1]]
        parts = [{key: value[:, a:b] for key, value in batch.items()} for a, b in pairwise(starts)]
    count = sum(int((part["labels"][:, 1:] != -100).sum()) for part in parts)
    losses = [model(**part, num_items_in_batch=count, use_cache=False).loss for part in parts]
    sum(losses).backward()
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in model.named_parameters()
    }
    return sum(loss.item() for loss in losses), gradients


def relative(a: Tensor, b: Tensor, whole: Tensor) -> float:
    return float((a - b).norm() / max(b.norm(), 1e-3 * whole))
