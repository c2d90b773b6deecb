"""What transformers' attention and mask interfaces call under the name `mmcp`.

A parallelised model is called with this rank's tokens and an argument `mmcp_row`, which passes through the model to
every attention layer: it holds the masks of the whole row and the exchanges between ranks. No layer makes a mask of its
own tokens: it is handed `NO_MASK`, which transformers passes through untouched.
"""

import math
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from mmcp.integrations.transformers.local_row import LocalRow
from mmcp.integrations.transformers.whole_mask import whole_mask
from mmcp.parallel.new_tokens import NewTokens

NAME = "mmcp"
HARMLESS = ("position_ids", "use_cache", "output_attentions", "output_router_logits", "is_causal", "sliding_window")
"""Arguments that layers pass beside q, k, v, and that say nothing which the row's masks do not say."""


def register() -> None:
    """Make `mmcp` a name of transformers' attention and mask interfaces."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, whole_mask)


def no_mask() -> Tensor:
    """Return what stands for a mask in a call with this rank's tokens: 4-D, hence left alone; empty, hence no mask."""
    return torch.empty(0, 0, 0, 0)


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    mmcp_row: LocalRow | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Attend to the whole row from this rank's tokens.

    query: [1, h, s/cp, d]  key, value: [1, k, s/cp, d]
    returns [1, s/cp, h, d] and no weights
    Raises ValueError for what the layer asks and this attention does not do.
    """
    if mmcp_row is None:
        raise ValueError(
            f"{type(module).__name__} was called outside of a parallelised model's forward; call the model itself"
        )
    info = mmcp_row.info(module.layer_idx)
    is_windowed = bool(info.mask.window) or isinstance(info, NewTokens)  # the window of new tokens is the cache's
    _check(module, key, value, dropout, options, is_windowed)
    if attention_mask is None or attention_mask.ndim != 4 or attention_mask.numel():
        raise ValueError(f"{type(module).__name__} changed its attention_mask on the way to its attention")
    q, k, v = (mmcp_row.without_ghost(_as_rows(x)) for x in (query, key, value))
    scale = 1.0 if scaling is None else scaling * math.sqrt(q.shape[-1])
    inputs = {"q": q if math.isclose(scale, 1.0) else q * scale, "k": k, "v": v}
    with torch.autocast(q.device.type, enabled=False):  # its sums stay wide
        out = mmcp_row.attend(module.layer_idx, inputs)
    return mmcp_row.with_ghost(out)[None].to(value.dtype), None


def _as_rows(x: Tensor) -> Tensor:
    """[1, heads, n, d] -> [n, heads, d], in autocast's type where it is on."""
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return x[0].transpose(0, 1)


def _check(module: Any, key: Tensor, value: Tensor, dropout: float, options: dict[str, Any], is_windowed: bool) -> None:
    name = f"{type(module).__name__} (layer {module.layer_idx})"
    if dropout:
        raise ValueError(f"{name}: attention dropout {dropout} depends on the rank; set attention_dropout to 0")
    if key.shape[-1] != value.shape[-1]:
        raise ValueError(f"{name}: keys of {key.shape[-1]} and values of {value.shape[-1]} numbers per head differ")
    asked = [option for option, given in options.items() if given is not None and option not in HARMLESS]
    if asked:
        raise ValueError(f"{name}: {', '.join(asked)} in its attention is not supported under context parallelism")
    if options.get("output_attentions"):
        raise ValueError(f"{name}: attention weights are never written out; leave output_attentions off")
    if options.get("sliding_window") and not is_windowed:
        raise ValueError(f"{name}: a window of {options['sliding_window']} tokens that its mask does not have")
