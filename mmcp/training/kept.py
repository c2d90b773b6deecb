"""Features of units that were kept from an earlier step, beside those of units that are encoded now."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Store = Callable[[str, np.ndarray, float], None]
"""(key, features [rows, c], loudest raw log-mel value) -> stored."""


@dataclass(frozen=True, eq=False)
class KeptUnits:
    """What is known of one row's units; the others are encoded and forgotten."""

    features: dict[int, np.ndarray] = field(default_factory=dict)
    """By unit: [rows, c], as stored."""
    loudest: dict[int, float] = field(default_factory=dict)
    """By unit with features: largest raw log-mel value; pictures 0."""
    keys: dict[int, str] = field(default_factory=dict)
    """By unit that has to be encoded: the key to store its features under."""


@dataclass(frozen=True, eq=False)
class PartlyKept:
    """One encoder call of which some units are kept: completes the features of the others."""

    kept: Sequence[np.ndarray | None]
    """Per unit of the call: its features, None where it is encoded."""
    keys: Sequence[str]
    """Per encoded unit: its key, "" when it is not to be stored."""
    loudest: Sequence[float]
    """Per encoded unit."""
    store: Store

    def complete(self, features: Tensor) -> Tensor:
        """features: [m, rows, c] of the encoded units -> [n, rows, c] of all units of the call, in order."""
        for key, values, loudest in zip(self.keys, features, self.loudest, strict=True):
            if key:
                self.store(key, to_array(values), loudest)
        encoded = iter(features)
        rows = [next(encoded) if value is None else to_tensor(value, features) for value in self.kept]
        return torch.stack(rows) if rows else features


def to_array(values: Tensor) -> np.ndarray:
    """A tensor's bits as an array; bfloat16, which numpy lacks, as uint16."""
    values = values.detach().cpu().contiguous()
    return (values.view(torch.uint16) if values.dtype == torch.bfloat16 else values).numpy()


def to_tensor(values: np.ndarray, like: Tensor) -> Tensor:
    """Undo `to_array`, on the device of `like`; the bits are of its type by the key."""
    tensor = torch.from_numpy(values.copy())
    tensor = tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
    assert tensor.dtype == like.dtype, f"kept features are {tensor.dtype}, this run computes in {like.dtype}"
    return tensor.to(like.device)


def encoder_digest(module: nn.Module, *facts: str) -> str:
    """Digest of an encoder's weights and buffers without its projector, and of `facts`; every rank calls it.

    Raises ValueError for an encoder whose features are not a function of its input alone.
    """
    for name, part in module.named_modules():
        is_random = isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0
        if is_random or isinstance(part, nn.modules.batchnorm._BatchNorm) or getattr(part, "drop_prob", None):
            raise ValueError(f"features of an encoder with {type(part).__name__} ('{name}') differ from step to step")
    digest = hashlib.sha256("\0".join(facts).encode())
    for name, values in sorted(module.state_dict().items()):
        if not name.startswith("projector."):
            whole = values.full_tensor() if isinstance(values, DTensor) else values
            digest.update(f"\0{name} {whole.dtype} {tuple(whole.shape)}\0".encode())
            digest.update(to_array(whole).tobytes())
    return digest.hexdigest()
