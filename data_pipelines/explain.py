"""Why each unit of a sample is there, and as fine as it is: what the chain of upgrades did to its cell, in words."""

from collections.abc import Sequence
from dataclasses import dataclass

from data_pipelines.chain import ABSENT, SCALE, Cell, Chain, Part
from data_pipelines.parts import MediaPart
from mmcp.sequence import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptUnit:
    """A unit, and how it came to be what it is."""

    unit: Unit
    halvings: int
    """How often the whole part was halved until this unit stood for its stretch alone."""
    enlargements: int
    """How many sizes it grew by."""
    lead: float
    """Doublings by which its stretch is refined before one that changes as the whole; 0 where that is not asked."""
    next_upgrade: tuple[int, int] | None
    """Place in the order of upgrades, and tokens, of what would refine it next; None: nothing finer is asked for."""
    taken: int
    """Upgrades of all parts that the budget had room for: those at places below this."""
    upgrades: int
    """Upgrades there are."""
    kind: str = ""
    source: str = ""

    @property
    def why(self) -> str:
        """The same in a sentence."""
        if not self.upgrades:
            return "the one setting takes all there is at its rate and size"
        steps = [f"the whole was halved {_times(self.halvings)}"] if self.halvings else ["it stands for the whole"]
        if self.enlargements:
            steps.append(f"enlarged {_times(self.enlargements)}")
        if self.lead:
            word = "more" if self.lead > 0 else "less"
            steps.append(f"it changes {word} than the whole: {abs(self.lead):.1f} doublings {_order(self.lead)}")
        if self.next_upgrade is None:
            return ", ".join(steps) + "; no finer setting is asked for"
        place, tokens = self.next_upgrade
        return (
            ", ".join(steps)
            + f"; finer would be upgrade {place + 1:,} of {self.upgrades:,}, {tokens:+,} tokens, and the "
            f"budget has room for {self.taken:,}"
        )


def kept_units(
    chain: Chain, parts: Sequence[MediaPart], cells: Sequence[Sequence[Cell]], *, room: int
) -> list[list[KeptUnit]]:
    """Explain the units of each part of a chain.

    cells: of each part, those that the chain takes for `room` tokens
    """
    taken, upgrades = chain.count(room), len(chain.order)
    return [
        [
            KeptUnit(
                unit=unit,
                halvings=part.part.level - cell.level,
                enlargements=cell.size - (0 if part.part.size == ABSENT else part.part.size),
                lead=_lead(part.part, cell),
                next_upgrade=chain.following(number, cell),
                taken=taken,
                upgrades=upgrades,
            )
            for cell, unit in zip(own, part.units(own), strict=True)
        ]
        for number, (part, own) in enumerate(zip(parts, cells, strict=True))
    ]


def _lead(part: Part, cell: Cell) -> float:
    return int(part.lead(cell.level)[cell.first >> cell.level]) / SCALE if part.lead else 0.0


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _order(lead: float) -> str:
    return "earlier" if lead > 0 else "later"
