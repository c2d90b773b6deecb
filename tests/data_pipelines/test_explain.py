"""Reasons for units against what budgets do: the named next upgrade is the one that more tokens buy, and not sooner.

Compared: the units with those of `build_sequence` over drawn clips and budgets; halvings with how units tile time.
Run: python -m pytest tests/data_pipelines/test_explain.py
"""

import random
from collections import defaultdict
from fractions import Fraction

import pytest

from data_pipelines.budget import BudgetConfig, Setting
from data_pipelines.clip import ClipConfig, build_sequence, explain_sequence
from data_pipelines.manifest import Item, Sample
from tests.data_pipelines.test_budget import drawn_clip, rules

ONE = Setting(frames_per_second=2.0, frame_pixels=128**2, image_pixels=128**2)


def sample_of(clips: int) -> Sample:
    items = [Item(kind="video", media=f"{number}.mp4") for number in range(clips)]
    turns = (("user", (*items, Item(kind="text", text="What?"))), ("assistant", (Item(kind="text", text="red"),)))
    return Sample(id="a", row=1, turns=turns)


def drawn(seed: int):
    rng = random.Random(seed)
    clips = rng.choice([1, 1, 2])
    media = {f"{number}.mp4": drawn_clip(rng) for number in range(clips)}
    config = BudgetConfig(tokens=int(4096 * 2 ** rng.uniform(0, 4)), adaptive=rng.random() < 0.5)
    return sample_of(clips), media, config, rules(rng)


def explained(sample, media, budget, known):
    sequence, report = build_sequence(sample, media, ClipConfig(budget=budget), rules=known)
    return sequence, report.budget.tokens, explain_sequence(sample, media, ClipConfig(budget=budget), rules=known)


def with_tokens(budget: BudgetConfig, tokens: int) -> BudgetConfig:
    return BudgetConfig(tokens=tokens, settings=budget.settings, adaptive=budget.adaptive)


@pytest.mark.parametrize("seed", range(8))
def test_the_next_upgrade_is_what_more_tokens_buy(seed):
    sample, media, budget, known = drawn(seed)
    sequence, used, kept = explained(sample, media, budget, known)
    assert [unit.unit for unit in kept] == list(sequence.units)
    assert [unit.kind for unit in kept] == [segment.kind for segment in sequence.segments for _ in segment.units]
    assert [unit.source for unit in kept] == [segment.source for segment in sequence.segments for _ in segment.units]
    waiting = [unit for unit in kept if unit.next_upgrade is not None]
    assert all(unit.next_upgrade[0] >= unit.taken for unit in waiting)
    assert len({unit.next_upgrade[0] for unit in waiting}) == len(waiting)
    assert budget.adaptive or not any(unit.lead for unit in kept)
    following = [unit for unit in waiting if unit.next_upgrade[0] == unit.taken]
    if not following:
        return
    (unit,), tokens = following, following[0].next_upgrade[1]
    assert used + tokens > budget.tokens
    before = build_sequence(sample, media, ClipConfig(budget=with_tokens(budget, used + tokens - 1)), rules=known)[0]
    after = build_sequence(sample, media, ClipConfig(budget=with_tokens(budget, used + tokens)), rules=known)[0]
    assert before == sequence and after.num_tokens == used + tokens
    gone = set(map(id_of, sequence.units)) - set(map(id_of, after.units))
    assert gone == {id_of(unit.unit)}


def id_of(unit) -> tuple:
    return unit.start, unit.end, unit.size, unit.items


@pytest.mark.parametrize("seed", range(8))
def test_halvings_tile_the_whole(seed):
    _, _, kept = explained(*drawn(seed))
    shares = defaultdict(Fraction)
    for unit in kept:
        shares[unit.source, unit.kind] += Fraction(1, 2**unit.halvings)
    assert shares and all(Fraction(1, 2) < share <= 1 for share in shares.values())


def test_reasons_read_as_sentences():
    sample, media, _, known = drawn(0)
    wide = BudgetConfig(tokens=10**7, settings=(ONE,))
    assert {unit.why for unit in explained(sample, media, wide, known)[2]} == {
        "the one setting takes all there is at its rate and size"
    }
    told = [unit.why for unit in explained(sample, media, BudgetConfig(tokens=4096), known)[2]]
    assert any("finer would be upgrade" in why for why in told) and all("halved" in why for why in told)
    finest = explained(sample, media, BudgetConfig(tokens=10**8), known)[2]
    assert all(why.endswith("no finer setting is asked for") for why in (unit.why for unit in finest))
