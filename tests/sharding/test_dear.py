"""Dear units dealt one by one, runs of the others around them: by hand.

Run: python -m pytest tests/sharding/test_dear.py
"""

import numpy as np

from mmcp.sequence import Segment, TokenSequence
from mmcp.sharding.cost import row_costs
from mmcp.sharding.dear import dear_apart
from mmcp.sharding.evenness import Evenness
from mmcp.sharding.groups import Groups
from tests.sharding.rows import MODEL, media_units


def layout(images, windows, ranks, *, grain):
    slides = Segment(kind="image", source="slides", units=media_units("image", images, grain=grain))
    sound = Segment(kind="audio", source="talk", units=media_units("audio", windows))
    costs = row_costs(TokenSequence((slides, sound)), MODEL)
    parts = dear_apart(Evenness(costs, ranks), Groups(costs))
    return None if parts is None else (costs, parts[:images], parts[images:])


def test_ranks_with_a_slide_take_what_fits_and_the_others_longer_runs():
    costs, slides, sound = layout(3, 40, 4, grain=22)  # a slide is 9,859 FLOPs, a window 143, a share 8,824
    assert costs.flops[[0, 3]].tolist() == [22 * 64 * 7 + 3, 143]
    assert slides.tolist() == [0, 1, 2]
    assert (np.diff(sound) >= 0).all()
    counts = np.bincount(sound, minlength=4)
    assert counts[3] > counts[:3].max() and counts.sum() == 40


def test_without_few_dear_units_there_is_no_such_layout():
    assert layout(0, 40, 4, grain=1) is None
    assert layout(4, 0, 2, grain=1) is None
    assert layout(300, 300, 2, grain=1) is None
