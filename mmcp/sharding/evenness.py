"""How far a layout of units is from even in encoding, decoding and memory, in one scale for all three."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mmcp.sharding.cost import RowCosts
from mmcp.sharding.joint import busiest, decoding_beside_encoding, whole_groups

SCALE = 1 << 20
"""An even share of a cost, after scaling."""

DECODE = 1
"""Column of decoding in a table of loads: encoding, decoding, memory."""
TOLERANCE = SCALE * 49 // 1000
"""Load above an even share that counts as even: 4.9 percent."""
STEP_TOLERANCE = SCALE // 80
"""What a cost that counts in the step time may add to it: 1.25 percent."""
STEP_LIMIT = SCALE // 40
"""What all stages may add to the step: 2.5 percent; encoding may use what uneven attention leaves of it, ..."""
LEAST_TOLERANCE = SCALE // 64
"""... and this part of itself in any case."""
GRADES, AS_GOOD = 256, 260
"""Step times are told apart in steps of a 256th of the least; up to AS_GOOD of them count as the least."""
MOST_FRAMES = 108
"""Frames of all ranks, in hundredths of one decode of the row, that are as good as one decode."""
BOUND_TOLERANCE = 36
"""Where a bound is above even, loads up to the bound and this part of it more count as even."""


@dataclass(frozen=True, eq=False)
class Evenness:
    """Prices layouts of one row's units over some ranks; SCALE is an even share of the least total."""

    costs: RowCosts
    num_ranks: int
    unit_cap: int = 0
    """Most resident bytes of the units of one rank; 0: any number."""
    uneven_ns: int = 0
    """What attention adds to the step over its even share."""

    @cached_property
    def even(self) -> np.ndarray:
        """[3] int64: loads of encoding, decoding and memory up to which a rank counts as even."""
        costs, ranks = self.costs, self.num_ranks
        encode, decode = self._step_tolerances()
        memory = TOLERANCE * costs.total_bytes // max(int(costs.bytes.sum()), 1)
        tolerance = np.array([encode, decode, memory], dtype=np.int64)
        encode_flops, most_bytes = (busiest(item, int(item.sum()), ranks) for item in (costs.flops, costs.bytes))
        least = [encode_flops, self._least_busiest_decoding(), most_bytes]
        bounds = self.scale(np.array([least], dtype=np.int64))[0]
        even = np.maximum(SCALE + tolerance, bounds + bounds // BOUND_TOLERANCE)
        if self.unit_cap:
            even[2] = min(even[2], self.scale(np.array([[0, 0, self.unit_cap]]))[0, 2])
        return even

    @cached_property
    def totals(self) -> np.ndarray:
        """[3] int64: FLOPs, nanoseconds and bytes of the row, everything done once."""
        return np.array([self.costs.flops.sum(), self.costs.least_decoding[0], self.costs.bytes.sum()])

    def loads(self, parts: np.ndarray, number: int) -> np.ndarray:
        """Price each part of a partition by itself: [number, 3] int64, scaled.

        parts: [u] int64  the part (a rank, or a chunk) of each unit
        """
        table = np.zeros((number, 3), dtype=np.int64)
        np.add.at(table[:, 0], parts, self.costs.flops)
        table[:, DECODE] = self.costs.decoding(np.arange(self.costs.num_units), parts, number)[0]
        np.add.at(table[:, 2], parts, self.costs.bytes)
        return self.scale(table)

    def loads_of(self, units: np.ndarray) -> np.ndarray:
        """Price one rank's units: [3] int64, scaled."""
        costs, alone = self.costs, np.zeros(len(units), dtype=np.int64)
        decode = int(costs.decoding(units, alone, 1)[0][0])
        work = np.array([[costs.flops[units].sum(), decode, costs.bytes[units].sum()]])
        return self.scale(work)[0]

    def scale(self, table: np.ndarray) -> np.ndarray:
        """Scale the columns of [parts, 3] so that an even share of each is SCALE; one without work stays 0."""
        coarse = np.maximum(self.totals >> 30, 1)  # keeps the product below in 64 bits
        return table // coarse * (self.num_ranks * SCALE) // np.maximum(self.totals // coarse, 1)

    def score(self, ranks: np.ndarray) -> tuple[int, int, int]:
        """Rate a layout, lower is better: its step time as far as it matters, its badness, its frames.

        Badness is the sum over ranks and costs of the squared load above `even`, 0 when all is even. Frames are the
        hundredths of one decode of the row's video that all ranks together decode beyond MOST_FRAMES.
        """
        loads = self.loads(ranks, self.num_ranks)
        frames = int(self.costs.decoding(np.arange(self.costs.num_units), ranks, self.num_ranks)[1].sum())
        excess = np.maximum(loads - self.even, 0) >> 4
        grade = self._step_ns(loads.max(axis=0)) * GRADES // max(1, self._least_step_ns)
        more = frames * 100 // max(1, self.costs.least_decoding[1]) - MOST_FRAMES
        return max(grade - AS_GOOD, 0), int(np.square(excess).sum()), max(more, 0)

    def _step_ns(self, most: np.ndarray) -> int:
        """Step time with the given greatest loads, the stages that units do not change at their least."""
        model, ranks = self.costs.model, self.num_ranks
        encode, decode, _ = (
            load * total // (ranks * SCALE) for load, total in zip(most.tolist(), self.totals.tolist(), strict=True)
        )
        rest = (self.costs.compute_ns - model.ns(int(self.costs.flops.sum()), "encode")) // ranks
        return model.rates.step_ns(decode, model.ns(encode, "encode") + rest)

    def _step_tolerances(self) -> tuple[int, int]:
        """Load of encoding and of decoding above an even share that counts as even, by what it adds to a step."""
        costs, rates = self.costs, self.costs.model.rates
        encode_ns, decode_ns = costs.model.ns(int(costs.flops.sum()), "encode"), costs.least_decoding[0]
        step_ns = rates.step_ns(decode_ns, costs.compute_ns)
        spare = min(STEP_TOLERANCE * step_ns, STEP_LIMIT * step_ns - self.uneven_ns * self.num_ranks * SCALE)
        allowed = max(spare, LEAST_TOLERANCE * encode_ns, 1)
        encode, decode = (min(allowed // max(each, 1), TOLERANCE) for each in (encode_ns, decode_ns))
        if not rates.decoders:
            return encode, decode
        return (TOLERANCE, STEP_TOLERANCE) if self._is_led_by_decoding else (encode, TOLERANCE)

    @property
    def _is_led_by_decoding(self) -> bool:
        decoders = self.costs.model.rates.decoders
        return bool(decoders) and self.costs.least_decoding[0] // decoders > self.costs.compute_ns

    def _least_busiest_decoding(self) -> int:
        """Nanoseconds that the busiest rank decodes at least; in any plan where decoding counts in the step's time."""
        costs, ranks = self.costs, self.num_ranks
        if self._is_led_by_decoding or not costs.model.rates.decoders:
            return busiest(whole_groups(costs), costs.least_decoding[0], ranks)
        return decoding_beside_encoding(costs, ranks)

    @cached_property
    def _least_step_ns(self) -> int:
        return self._step_ns(np.full(3, SCALE))
