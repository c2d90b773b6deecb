"""How far a layout of units is from even in encoding, decoding and memory, in one scale for all three."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmcp.sharding.cost import RowCosts
from mmcp.sharding.exchange import SCALE

LEADING_TOLERANCE, TOLERANCE = SCALE // 64, SCALE // 32
"""What counts as even: a cost that sets the step time may be 1.6 percent above its share, another 3.1 percent."""


@dataclass(frozen=True, eq=False)
class Evenness:
    """Prices layouts of one row's units over some ranks; SCALE is an even share of the least total."""

    costs: RowCosts
    num_ranks: int

    @cached_property
    def even(self) -> np.ndarray:
        """[3] int64: loads of encoding, decoding and memory up to which a rank counts as even."""
        model, decode_ns = self.costs.model, self.costs.least_decoding[0]
        leads = decode_ns // model.rates.decoders > model.ns(self.costs.total_flops)
        encode, decode = (TOLERANCE, LEADING_TOLERANCE) if leads else (LEADING_TOLERANCE, TOLERANCE)
        return SCALE + np.array([encode, decode, TOLERANCE], dtype=np.int64)

    @cached_property
    def totals(self) -> np.ndarray:
        """[3] int64: FLOPs, nanoseconds and bytes of the row, everything done once."""
        return np.array([self.costs.flops.sum(), self.costs.least_decoding[0], self.costs.bytes.sum()])

    def loads(self, parts: np.ndarray) -> np.ndarray:
        """Price each part of a partition by itself: [parts, 3] int64, scaled.

        parts: [u] int64  the part (a rank, or a chunk) of each unit
        """
        number = int(parts.max(initial=-1)) + 1
        table = np.zeros((number, 3), dtype=np.int64)
        np.add.at(table[:, 0], parts, self.costs.flops)
        table[:, 1] = self.costs.decoding(np.arange(self.costs.num_units), parts, number)[0]
        np.add.at(table[:, 2], parts, self.costs.bytes)
        return self.scale(table)

    def scale(self, table: np.ndarray) -> np.ndarray:
        """Scale the columns of [parts, 3] so that an even share of each is SCALE; one without work stays 0."""
        coarse = np.maximum(self.totals >> 30, 1)  # keeps the product below in 64 bits
        return table // coarse * (self.num_ranks * SCALE) // np.maximum(self.totals // coarse, 1)

    def score(self, ranks: np.ndarray) -> tuple[int, int]:
        """Rate a layout, lower is better: its step time in steps of 0.8 percent, then its badness.

        Badness is the sum over ranks and costs of the squared load above `even`; 0 when all is even.
        """
        loads = self.loads(ranks)
        excess = np.maximum(loads - self.even, 0) >> 4
        return self._step_ns(loads.max(axis=0)) * 128 // max(1, self._least_step_ns), int(np.square(excess).sum())

    def _step_ns(self, most: np.ndarray) -> int:
        """Step time with the given greatest loads, the stages that units do not change at their least."""
        model, ranks = self.costs.model, self.num_ranks
        encode, decode, _ = (
            load * total // (ranks * SCALE) for load, total in zip(most.tolist(), self.totals.tolist(), strict=True)
        )
        rest = (self.costs.total_flops - int(self.costs.flops.sum())) // ranks
        return max(decode // model.rates.decoders, model.ns(encode + rest))

    @cached_property
    def _least_step_ns(self) -> int:
        return self._step_ns(np.full(3, SCALE))
