"""Which parts of the model train, and how fast: declared once, set before parameters are sharded, checked on gradients.

The stages of a video-language model are three settings of it:

    align the projectors    image: 0, video: 0, audio: 0, embedding: 0, backbone: 0, head: 0
    train adapters          the same, with model.lora.rank=16
    train everything        (the default) or any mix, such as backbone: 0.1
"""

from collections.abc import Iterator
from typing import Annotated

from pydantic import Field
from torch import nn

from mmcp.config import config

Rate = Annotated[float, Field(ge=0)]
ENCODERS = ("image", "video", "audio")


@config
class PartsConfig:
    """The learning rate of each part, in units of `optim.learning_rate`; 0 freezes it."""

    image: Rate = 1.0
    """The image encoder, without its projector."""
    video: Rate = 1.0
    """The video encoder, without its projector."""
    audio: Rate = 1.0
    """The audio encoder, without its projector."""
    projectors: Rate = 1.0
    """What turns the features of all encoders into rows of the model's width."""
    embedding: Rate = 1.0
    """Rows of text; a tied head belongs to it."""
    backbone: Rate = 1.0
    """Decoder blocks and final norm, without adapters."""
    adapters: Rate = 1.0
    """Low-rank adapters of the backbone."""
    head: Rate = 1.0
    """The map to the vocabulary."""

    @property
    def frozen_encoders(self) -> frozenset[str]:
        """Kinds whose encoder gives the same features in every step; its projector may train."""
        return frozenset(kind for kind in ENCODERS if not self.rate(kind))

    def rate(self, part: str) -> float:
        """Return the rate of a part."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}[part]

    def freeze(self, model: nn.Module) -> None:
        """Let gradients flow into the parts that train and into no other. Raises ValueError when nothing is left."""
        rates = {name: self.rate(part_of(name)) for name, _ in model.named_parameters()}
        if not any(rates.values()):
            raise ValueError("parts: every part of the model has rate 0; give the parts that shall train a rate above")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(rates[name] > 0)

    def check_gradients(self, model: nn.Module) -> None:
        """Assert, after a backward, that gradients are where rates are, and only there."""
        wrong = [f"{name} ({'has' if has else 'lacks'} a gradient)" for name, has in self._differing(model)]
        assert not wrong, f"the declared parts are not those that train: {', '.join(wrong[:5])}"

    def _differing(self, model: nn.Module) -> Iterator[tuple[str, bool]]:
        for name, parameter in model.named_parameters():
            has = parameter.grad is not None
            if has != (self.rate(part_of(name)) > 0):
                yield name, has


def part_of(name: str) -> str:
    """Return the part that a parameter of a VideoLM belongs to.

    encoders.video.blocks.0.expand.bias -> video    encoders.video.projector.first.bias -> projectors
    """
    top, *rest = name.split(".")
    if "lora_A" in rest or "lora_B" in rest:
        return "adapters"
    if top == "encoders":
        return "projectors" if rest[1] == "projector" else rest[0]
    return top
