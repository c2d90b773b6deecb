"""One pre-norm decoder block."""

from collections.abc import Callable

from torch import Tensor, is_grad_enabled, nn
from torch.utils.checkpoint import checkpoint

from mmcp.attention.base import RowInfo
from mmcp.model.layers import AttentionLayer, GatedMLP, RMSNorm


class Block(nn.Module):
    """x + mixer(norm(x)), then x + mlp(norm(x)); with `checkpointing` only x is kept and the rest computed again."""

    def __init__(self, mixer: AttentionLayer, mlp: GatedMLP, *, norm: Callable[[], RMSNorm], checkpointing: bool):
        super().__init__()
        self.mixer_norm = norm()
        self.mixer = mixer
        self.mlp_norm = norm()
        self.mlp = mlp
        self.checkpointing = checkpointing

    def forward(self, hidden: Tensor, cos: Tensor, sin: Tensor, info: RowInfo) -> Tensor:
        """hidden: [s/cp, e]  cos, sin: [s/cp, d/2]  ->  [s/cp, e]."""
        if self.checkpointing and is_grad_enabled():
            return checkpoint(self._run, hidden, cos, sin, info, use_reentrant=False, preserve_rng_state=False)
        return self._run(hidden, cos, sin, info)

    def _run(self, hidden: Tensor, cos: Tensor, sin: Tensor, info: RowInfo) -> Tensor:
        hidden = hidden + self.mixer(self.mixer_norm(hidden), cos, sin, info)
        return hidden + self.mlp(self.mlp_norm(hidden))
