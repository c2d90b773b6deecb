"""One new token of each of some documents, told to the layers as a row of documents of one token."""

from dataclasses import dataclass

from mmcp.attention.base import RowInfo
from mmcp.masks import Mask
from mmcp.sharding.plan import ShardPlan


@dataclass(frozen=True, eq=False, kw_only=True)
class NewTokens(RowInfo):
    """What layers are told of a step of decoding; every rank computes all of it, but for attention."""

    number: int
    """How many tokens were made before, the same for all documents."""
    documents: tuple[int, ...]
    """Which documents of the prompt's row go on, ascending."""
    places: tuple[int, ...]
    """Of each: place of its new token in the document."""


def new_tokens(prompts: Mask, documents: tuple[int, ...], number: int) -> NewTokens:
    """Describe new token `number` of some documents of a row of prompts."""
    lengths = prompts.bounds[1:] - prompts.bounds[:-1]
    count = len(documents)
    plan = ShardPlan(
        strategy="replicated",
        ring=1,
        ulysses=1,
        tokens=(((0, count),) if count else (),),
        decode=((),),
        encode=((),),
        scored=((),),
        calls=((),),
        unit_ranges=(),
        label_ranges=(),
    )
    return NewTokens(
        mask=Mask.causal([1] * count),
        plan=plan,
        rank=0,
        number=number,
        documents=documents,
        places=tuple(int(lengths[document]) + number for document in documents),
    )
