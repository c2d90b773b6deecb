"""Choose the next id from logits: the most likely one, or one drawn."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How ids are drawn; the same seed draws the same on any number of ranks and in any packing."""

    temperature: float = 0.0
    """Logits are divided by it; 0: take the most likely id."""
    top_k: int = 0
    """Draw from so many of the most likely ids; 0: from all."""
    top_p: float = 1.0
    """Draw from the fewest most likely ids whose probabilities sum to at least this."""
    seed: int = 0

    def __post_init__(self):
        if self.temperature < 0 or self.top_k < 0 or self.seed < 0:
            raise ValueError(
                f"temperature={self.temperature}, top_k={self.top_k}, seed={self.seed} cannot be negative; use 0 for "
                "the most likely id, all ids and the first seed"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is a probability; use more than 0 and at most 1")

    def choose(self, logits: Tensor, key: tuple[int, ...]) -> int:
        """Return the id that follows.

        logits: [vocabulary]   key: numbers that tell this choice from all others, such as document and token
        Raises ValueError for logits that are not finite.
        """
        if not bool(logits.isfinite().all()):
            raise ValueError(f"the logits of choice {key} are not finite; the model's weights or inputs are broken")
        if not self.temperature:
            return int(logits.argmax())
        shares, ids = torch.softmax(logits.double() / self.temperature, dim=-1).sort(descending=True, stable=True)
        shares = shares[: self.top_k or None].cumsum(-1).cpu()
        last = int(torch.searchsorted(shares, self.top_p * shares[-1]).clamp(max=len(shares) - 1))
        draw = np.random.default_rng([self.seed, *key]).random() * shares[last].item()
        return int(ids[int(torch.searchsorted(shares[: last + 1], draw, right=True).clamp(max=last))])


GREEDY = Sampling()
