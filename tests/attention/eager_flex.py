"""FlexAttention on the CPU, uncompiled and with gradients: torch's own dense formulas for it, in float64 too."""

import pytest
from torch.nn.attention import flex_attention as torch_flex

from mmcp.attention import flex


def eager_flex(monkeypatch: pytest.MonkeyPatch, *, block: int = 8) -> None:
    """Let mmcp call FlexAttention uncompiled, in small blocks.

    torch refuses gradients on the CPU, where only the compiled kernel has none.
    """
    monkeypatch.setattr(flex, "_kernel", lambda: torch_flex.flex_attention)
    monkeypatch.setattr(flex, "BLOCK", block)
    monkeypatch.setattr(torch_flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
