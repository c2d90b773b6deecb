"""Which attention variant, mode and mask go together, asked of the code: the text of docs/attention_modes.md.

Write it again after a change:  python -m mmcp.report.attention_modes > docs/attention_modes.md
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pydantic
import torch

from mmcp.attention.base import ATTENTION, split_heads
from mmcp.attention.gpu import check_type
from mmcp.masks import Mask
from mmcp.parallel.head_groups import head_groups
from mmcp.parallel.modes import MODES

HEADS, HEAD_DIM, TOKENS = 2, 8, 6
MASKS = {
    "causal": Mask.causal([TOKENS]),
    "packed documents": Mask.causal([2, 1, 3]),
    "prefix": Mask(np.array([0, TOKENS]), np.array([[0, 3]])),
    "both ways in a unit": Mask(np.array([0, TOKENS]), np.array([[2, 5]])),
}

INTRODUCTION = """# Attention modes

Written by `python -m mmcp.report.attention_modes` from the code; a test keeps it so. A layer's mode is the `mode` field
of its variant's config, so every layer of a pattern may have its own. All is free but for what is listed below: any
ring x ulysses, any heads over any divisor of key-value heads, any ownership of tokens, ranks without tokens.

A hybrid of three recurrent layers that pass their state and one softmax layer that goes round the ring, on two nodes:

```yaml
mesh: {ring: 2, ulysses: 8}
model:
  backbone:
    layers: 24
    pattern:
      - {name: gated_delta, mode: state}
      - {name: gated_delta, mode: state}
      - {name: gated_delta, mode: state}
      - {name: softmax, mode: ring}
```

`mmcp verify CONFIG --ranks 4 --synthetic mesh.ring=2` proves such a config on the machine at hand; the words
`attention=gated_delta,gated_delta,gated_delta,softmax mode=state,state,state,ring` put the pattern in the place of
CONFIG's own. Where a mode crosses the ring axis and the mesh has none, `verify` puts its ranks there.
"""


def render() -> str:
    """Return the text of docs/attention_modes.md."""
    return "\n".join([INTRODUCTION, *_mode_table(), "", *_mask_table(), "", *_refusals(), ""])


def _mode_table() -> Iterator[str]:
    names = list(MODES)
    yield "## Variants in each mode"
    yield ""
    yield f"| variant | {' | '.join(names)} |"
    yield "|---" * (len(names) + 1) + "|"
    for variant, entry in ATTENTION.items():
        core = entry().build(heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM)
        cells = ["yes" if isinstance(core, mode.carries) else "no" for mode in MODES.values()]
        yield f"| {variant} | {' | '.join(cells)} |"


def _mask_table() -> Iterator[str]:
    yield "## Masks of each variant, in every mode it has"
    yield ""
    yield f"| variant | {' | '.join(MASKS)} | window | sink |"
    yield "|---" * (len(MASKS) + 3) + "|"
    for variant, entry in ATTENTION.items():
        cells = ["no" if refusal_of_mask(variant, mask) else "yes" for mask in MASKS.values()]
        cells += ["yes" if name in entry.__dataclass_fields__ else "no" for name in ("window", "sink")]
        yield f"| {variant} | {' | '.join(cells)} |"


def _refusals() -> Iterator[str]:
    yield "## What is refused, and what it says"
    yield ""
    yield "Each is a ValueError on all ranks, before the first exchange."
    yield ""
    for message in dict.fromkeys(refusals()):
        yield f"- {message}"


def refusals() -> Iterator[str]:
    """Provoke every refusal of a variant, mode, mask or number of heads, and return what it says."""
    for variant, entry in ATTENTION.items():
        core = entry().build(heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM)
        for mode in MODES.values():
            yield from _message(partial(mode.check, core))
        for mask in MASKS.values():
            yield from filter(None, [refusal_of_mask(variant, mask)])
    yield from _message(lambda: split_heads(3, 2, 1))
    yield from _message(lambda: split_heads(4, 2, 6))
    yield from _message(lambda: head_groups(split_heads(4, 2, 2), 3))
    softmax = ATTENTION["softmax"]()
    yield from _message(lambda: check_type(torch.float64))
    yield from _message(lambda: replace(softmax, mode="ring", chunks=2))
    yield from _message(lambda: replace(softmax, sink=2))


def refusal_of_mask(variant: str, mask: Mask) -> str:
    """Return what a variant says of a mask if it refuses it, else nothing."""
    core = ATTENTION[variant]().build(heads=HEADS, kv_heads=HEADS, head_dim=HEAD_DIM)
    return next(_message(lambda: core.check(mask)), "")


def _message(provoke: Callable[[], Any]) -> Iterator[str]:
    try:
        provoke()
    except pydantic.ValidationError as error:
        yield error.errors()[0]["msg"].removeprefix("Value error, ")
    except ValueError as error:
        yield str(error)


if __name__ == "__main__":
    print(render(), end="")
