"""The predicted peak of a step against the most bytes of tensors that are alive at once in a real one.

A dispatch mode sees every tensor that any operation makes, temporaries of backward included, and when its storage goes.
Run: python -m pytest tests/planning/test_peak.py
"""

import weakref
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from experiments.base import Planner, ShardingConfig, cost_model
from experiments.runtime import make_runner
from experiments.synthetic_rows import draw_media
from mmcp.attention import LinearConfig, SoftmaxConfig
from mmcp.parallel.mesh import MeshConfig, build_mesh
from mmcp.planning.architecture import Architecture
from mmcp.planning.memory import MemoryPolicy, Numbers, memory_of
from mmcp.planning.share import share_of
from mmcp.sharding.cost import Rates, row_costs
from mmcp.training.stage_clock import StageClock
from mmcp.training.step import StepWork
from tests.planning.runs import ENCODERS, UNIT_BYTES, VOCABULARY, Run

SIZES = {"width": 128, "layers": 4, "head_dim": 32, "mlp_width": 384}
RUNS = {
    "softmax": Run(documents=(3000,), media=10, heads=4, kv_heads=2, changes=SIZES),
    "checkpointing": Run(documents=(3000,), media=10, heads=4, kv_heads=2, changes={**SIZES, "checkpointing": True}),
    "wide MLP": Run(documents=(2000,), media=4, heads=4, kv_heads=2, changes={**SIZES, "mlp_width": 1024}),
    "hybrid": Run(
        documents=(3000,), media=10, heads=4, kv_heads=2, pattern=(LinearConfig(), SoftmaxConfig()), changes=SIZES
    ),
}


class Alive(TorchDispatchMode):
    """Add up the bytes of the storages that operations make, and take them off when they go."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.known = {parameter.untyped_storage()._cdata for parameter in parameters}  # views of them are nothing new
        self.now = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.known:
                storage = tensor.untyped_storage()
                self.known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.most = max(self.most, self.now)
        return made

    def _gone(self, number: int, size: int) -> None:
        self.known.discard(number)
        self.now -= size


@pytest.mark.parametrize("name", RUNS)
def test_the_most_that_is_alive_is_what_is_predicted(name):
    run, mesh = RUNS[name], build_mesh(MeshConfig())
    settings, row = run.model, run.row()
    costs = cost_model(settings, vocabulary=VOCABULARY, dtype=torch.float32, call_tokens=4096, rates=Rates())
    step = Planner(mesh.config, ShardingConfig(), costs).step([row])
    runner = make_runner(settings, mesh, vocabulary=VOCABULARY, seed=0, dtype=torch.float32)
    work = StepWork(step, draw_media([row], seed=1, encoders=ENCODERS))
    with Alive(runner.model.parameters()) as alive:
        runner.backward(work, StageClock(mesh.device))
    share = share_of(row, step.plans[0], row_costs(row, costs), rank=0, unit_bytes=UNIT_BYTES)
    memory = memory_of(
        Architecture(name="run", backbone=settings.backbone, vocabulary=VOCABULARY),
        share,
        Numbers(master=4, compute=4),
        MemoryPolicy(checkpointing=settings.backbone.checkpointing, prefetch=0),
        shards=1,
        is_sharded=False,
    )
    made = replace(memory, parameters=0, gradients=0, optimizer=0, host=0).total
    assert abs(made / alive.most - 1) < 0.05, (made, alive.most, memory)
