"""Ask a model for the positions and masks of whole rows, without computing anything of them.

The model's own code says which positions and which mask each layer gets: it is run on all tokens, with its embedding,
its layers, its norm and its rotary tables replaced by stand-ins that note what they are given. Only index tensors as
long as the row are made; hidden states are one number, expanded.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmcp.integrations.transformers.whole_mask import WholeMask, mask_of_tensor


@dataclass
class Outline:
    """What a model says of a batch of whole rows."""

    masks: list[Any] = field(default_factory=list)
    """Per layer: what it is given as attention_mask."""
    positions: Tensor | None = None
    """[b, s] or [axes, b, s]: what the rotary tables are made for."""

    def whole_masks(self, linear: list[bool], shape: tuple[int, int]) -> list[WholeMask | None]:
        """Read each layer's mask; None for layers that read in order, which are given padding only.

        linear: per layer, whether it reads in order   shape: (b, s)
        Raises ValueError for a layer of attention without a mask, and for a mask that is not understood.
        """
        known: dict[int, WholeMask] = {}
        masks: list[WholeMask | None] = []
        for number, (mask, reads_in_order) in enumerate(zip(self.masks, linear, strict=True)):
            if reads_in_order:
                masks.append(None)
                continue
            if id(mask) not in known:
                known[id(mask)] = _whole(mask, number, shape)
            masks.append(known[id(mask)])
        return masks


def outline(model: PreTrainedModel, inputs: dict[str, Any]) -> Outline:
    """Run `model` on whole rows as far as its masks and positions.

    inputs: what its base model takes: input_ids [b, s], masks, positions, grids; no pixels or samples
    """
    seen = Outline()
    decoder = model.get_decoder()
    stand_ins = {
        "embed_tokens": StandIn(lambda ids: _expanded(ids, model)),
        "norm": StandIn(lambda hidden: hidden),
        "rotary_emb": StandIn(partial(_note_positions, seen)),
        "layers": nn.ModuleList(StandIn(partial(_note_mask, seen)) for _ in decoder.layers),
    }
    with torch.no_grad(), _replaced(decoder, stand_ins):
        model.base_model(**inputs, use_cache=False)
    return seen


class StandIn(nn.Module):
    """Answers with a function in the place of a module."""

    def __init__(self, answer: Callable):
        super().__init__()
        self.answer = answer

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the function's answer."""
        return self.answer(*args, **kwargs)


@contextmanager
def _replaced(parent: nn.Module, children: dict[str, nn.Module]) -> Iterator[None]:
    """Exchange some children of a module; nothing that hangs on the true ones, hooks or gathers, runs."""
    true = {name: getattr(parent, name) for name in children}
    try:
        for name, child in children.items():
            setattr(parent, name, child)
        yield
    finally:
        for name, child in true.items():
            setattr(parent, name, child)


def _whole(mask: Any, layer: int, shape: tuple[int, int]) -> WholeMask:
    if isinstance(mask, WholeMask):
        return mask
    if isinstance(mask, Tensor) and mask.ndim == 4:
        return mask_of_tensor(mask, shape[0])
    what = "none" if mask is None else f"a {type(mask).__name__}"
    raise ValueError(
        f"layer {layer} is given {what} as its mask, made without transformers' mask interface; such a model cannot be "
        "parallelised"
    )


def _expanded(ids: Tensor, model: PreTrainedModel) -> Tensor:
    """[b, s] -> [b, s, e]: one zero, seen at every place."""
    width = model.config.get_text_config().hidden_size
    return torch.zeros(1, dtype=model.dtype, device=ids.device).expand(*ids.shape, width)


def _note_positions(seen: Outline, _hidden: Tensor, position_ids: Tensor, *_: Any, **__: Any) -> tuple[None, None]:
    seen.positions = position_ids
    return None, None


def _note_mask(seen: Outline, hidden_states: Tensor, *_: Any, attention_mask: Any = None, **__: Any) -> Tensor:
    seen.masks.append(attention_mask)
    return hidden_states
