"""The video-language model: text embedding and encoders make rows, the backbone reads them, the head scores labels."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from mmcp.attention.base import RowInfo
from mmcp.model.backbone import Backbone
from mmcp.model.head import LMHead


class RowExchange(Protocol):
    """How rows reach the rank that needs them; on one rank nothing moves."""

    def to_owners(self, rows: Tensor) -> Tensor:
        """rows: [n_r, e] encoded here -> [m, e] rows of this rank's media positions, ascending."""

    def to_scorers(self, hidden: Tensor) -> Tensor:
        """hidden: [s/cp, e] of this rank's tokens -> [l, e] the rows of the labels that this rank scores."""


@dataclass(frozen=True, eq=False)
class RankRow:
    """What one rank's forward is told of one row; tensors on the rank's device, derived from metadata alone."""

    ids: Tensor
    """[t] int64: ids of the text tokens held here, in order."""
    text: Tensor
    """[t] int64: where they stand among this rank's s/cp tokens."""
    media: Tensor
    """[m] int64: where encoder rows stand among this rank's tokens, ascending."""
    positions: Tensor
    """[axes, s/cp] int64 or float64: rotary positions of this rank's tokens."""
    labels: Tensor
    """[l] int64: the labels of the rows this rank scores, ascending; NO_LABEL for those of a void sample."""
    info: RowInfo
    """Mask and plan, for the attention layers."""

    @property
    def num_tokens(self) -> int:
        return len(self.text) + len(self.media)


class VideoLM(nn.Module):
    """Decoder over one interleaved row of text, image, video and audio.

    encoders: by segment kind; image and video may be one module
    tied_head: score labels by the very weights that embed text
    """

    def __init__(self, backbone: Backbone, encoders: dict[str, nn.Module], *, vocabulary: int, tied_head: bool = False):
        super().__init__()
        width, std = backbone.settings.width, backbone.settings.init_std
        self.embedding = nn.Embedding(vocabulary, width)
        nn.init.normal_(self.embedding.weight, std=std)
        self.encoders = nn.ModuleDict(encoders)
        self.backbone = backbone
        self.head = LMHead(width, vocabulary, std=std)
        if tied_head:
            self.head.register_parameter("weight", self.embedding.get_parameter("weight"))

    @property
    def units(self) -> list[nn.Module]:
        """Parts whose parameters may be gathered one at a time: blocks, encoders, an embedding that is not the head."""
        is_tied = self.embedding.weight is self.head.weight
        return [*self.backbone.blocks, *dict.fromkeys(self.encoders.values()), *([] if is_tied else [self.embedding])]

    def encode(self, calls: Sequence[tuple], text: Tensor) -> Tensor:
        """Run the planned encoder calls: (kind, input) or (kind, input, kept features). Returns [n_r, e].

        Inputs may hold 0 units. text: [t, e]  gives the type when there is no call
        """
        rows = [self.encoders[kind](*inputs) for kind, *inputs in calls]
        return torch.cat(rows) if rows else text.new_zeros(0, text.shape[1])

    def forward(self, row: RankRow, calls: Sequence[tuple], exchange: RowExchange) -> tuple[Tensor, Tensor, Tensor]:
        """Encode, route, interleave, run the backbone, score this rank's label rows.

        Returns the sum of the label rows' token losses (a scalar), in evaluation mode the most likely id of each [l],
        and the final hidden states [s/cp, e].
        """
        rows, hidden = self._rows(row, calls, exchange)
        return self.head(rows, row.labels), row.labels[:0] if self.training else self.head.most_likely(rows), hidden

    @torch.no_grad()
    def predict(self, row: RankRow, calls: Sequence[tuple], exchange: RowExchange) -> Tensor:
        """Run the row as `forward` does; return the logits of the rows that reach this rank's head, [l, vocabulary]."""
        return self.head.logits(self._rows(row, calls, exchange)[0])

    def _rows(self, row: RankRow, calls: Sequence[tuple], exchange: RowExchange) -> tuple[Tensor, Tensor]:
        """Return the hidden states to score here, [l, e], and those of this rank's tokens, [s/cp, e]."""
        text = self.embedding(row.ids)
        media = exchange.to_owners(self.encode(calls, text))
        hidden = text.new_zeros(row.num_tokens, text.shape[1])
        hidden = hidden.index_copy(0, row.text, text).index_copy(0, row.media, media.to(text.dtype))
        hidden = self.backbone(hidden, row.positions, row.info)
        return exchange.to_scorers(hidden), hidden
