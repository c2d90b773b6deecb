"""The words attention= and mode=: what they make of a config, by hand. What they refuse: test_verify.py.

Run: python -m pytest tests/experiments/test_attention_choice.py
"""

from dataclasses import replace

from experiments.attention_choice import take_choice, with_choice
from experiments.base import RunConfig
from mmcp.config import load
from mmcp.parallel.mesh import MeshConfig
from tests.training.tiny_run import CONFIG

SETTINGS = replace(load(RunConfig, CONFIG), mesh=MeshConfig(ulysses=4))


def chosen(*words: str, ring: int = 1):
    settings = replace(SETTINGS, mesh=MeshConfig(ring=ring, ulysses=4 // ring))
    made = with_choice(settings, take_choice(words)[0])
    return [(v.name, v.mode) for v in made.model.backbone.pattern], (made.mesh.ring, made.mesh.ulysses)


def test_words_are_parted_from_overrides():
    assert take_choice(["seed=1", "mode = ring, state", "model.mode=x"]) == (
        {"mode": ["ring", "state"]},
        ["seed=1", "model.mode=x"],
    )
    assert with_choice(SETTINGS, {}) is SETTINGS


def test_a_mode_that_crosses_takes_the_ranks_to_the_ring():
    assert chosen("attention=softmax", "mode=ring") == ([("softmax", "ring")], (4, 1))
    assert chosen("attention=softmax", "mode=ring", ring=2) == ([("softmax", "ring")], (2, 2))
    assert chosen("attention=softmax") == ([("softmax", "ulysses")], (1, 4))


def test_one_mode_is_for_all_or_one_for_each():
    assert chosen("attention=linear,gated_delta", "mode=scan")[0] == [("linear", "scan"), ("gated_delta", "scan")]
    assert chosen("attention=linear,softmax", "mode=state,ring") == ([("linear", "state"), ("softmax", "ring")], (4, 1))
    names = [variant.name for variant in SETTINGS.model.backbone.pattern]
    assert chosen("mode=ulysses")[0] == [(name, "ulysses") for name in names]
