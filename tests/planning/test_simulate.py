"""Ranks over the fake process group against the closed forms, and logs that were tampered with.

Run: python -m pytest tests/planning/test_simulate.py
"""

from dataclasses import replace

import pytest
import torch

from experiments.base import cost_model
from mmcp.attention import GatedDeltaConfig, LinearConfig, SoftmaxConfig
from mmcp.parallel.mesh import MeshConfig
from mmcp.planning.architecture import Architecture
from mmcp.planning.simulate import Call, Simulation, disagreements, simulate
from mmcp.planning.step_traffic import row_traffic
from mmcp.sharding.cost import Rates, row_costs
from mmcp.sharding.strategies import STRATEGIES
from tests.planning.runs import VOCABULARY, Run

CASES = {
    "ulysses": (MeshConfig(ulysses=3), (SoftmaxConfig(),)),
    "ring x ulysses, two groups": (MeshConfig(dp_shard=2, ring=3, ulysses=2), (SoftmaxConfig(mode="ring"),)),
    "gathered keys": (MeshConfig(ring=2, ulysses=2), (SoftmaxConfig(mode="allgather"), LinearConfig())),
    "scans": (MeshConfig(ring=4), (GatedDeltaConfig(mode="scan"), LinearConfig(mode="scan"))),
    "states": (MeshConfig(dp_replicate=2, ring=3), (GatedDeltaConfig(mode="state"), LinearConfig(mode="state"))),
}


def simulated(name: str) -> tuple[Simulation, list]:
    mesh, pattern = CASES[name]
    run = Run(pattern=pattern, documents=(160, 90), media=5)
    row = run.row()
    costs = cost_model(run.model, vocabulary=VOCABULARY, dtype=torch.float32, call_tokens=64, rates=Rates())
    plan = STRATEGIES["balanced"](row, (mesh.ring, mesh.ulysses), row_costs(row, costs))
    done = simulate(run.model.backbone, mesh, row, plan, dtype=torch.float32)
    architecture = Architecture(name="run", backbone=run.model.backbone, vocabulary=VOCABULARY)
    expected = [
        row_traffic(architecture, row, plan, rank=rank % mesh.cp, dtype=torch.float32, checkpointing=False)
        for rank in range(mesh.world)
    ]
    return done, expected


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_and_move_what_the_closed_forms_say(name):
    done, expected = simulated(name)
    assert not done.disagreements
    assert [log.recorder.traffic for log in done.logs] == expected


def test_each_kind_of_disagreement_is_found():
    logs = simulated("ring x ulysses, two groups")[0].logs
    group, calls = next(iter(logs[0].collectives.items()))
    shorter = replace(logs[0], collectives={**logs[0].collectives, group: calls[:-1]})
    assert any("collectives" in text for text in disagreements([shorter, *logs[1:]]))
    number = next(i for i, call in enumerate(calls) if call.name == "alltoall_base_")
    more = Call(calls[number].name, tuple(n + 1 for n in calls[number].sent), calls[number].received)
    changed = replace(
        logs[0], collectives={**logs[0].collectives, group: [*calls[:number], more, *calls[number + 1 :]]}
    )
    assert any("not what is expected" in text for text in disagreements([changed, *logs[1:]]))
    silent = replace(logs[0], sends={})
    assert any("sends rank" in text for text in disagreements([silent, *logs[1:]]))
