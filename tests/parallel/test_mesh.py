"""Groups and coordinates of the mesh against lists written by hand.

Run: python -m pytest tests/parallel/test_mesh.py
"""

import pydantic
import pytest
import torch.distributed as dist

from mmcp.parallel.collectives import agree
from mmcp.parallel.mesh import MeshConfig, build_mesh, process_group

NAMES = ("ulysses", "ring", "cp", "data", "dp_replicate", "fsdp", "world")


def groups_of(config: MeshConfig) -> dict:
    mesh = build_mesh(config)
    groups = {name: getattr(mesh, name) for name in NAMES}
    assert all(group.recorders is mesh.world.recorders for group in groups.values())
    assert all(group.ranks[group.index] == mesh.rank for group in groups.values())
    assert all((group.handle is None) == (group.size == 1) for name, group in groups.items() if name != "fsdp")
    return {name: group.ranks for name, group in groups.items()}


def test_data_and_ulysses_axes(rank_pool):
    results = rank_pool.run(groups_of, MeshConfig(dp_shard=2, ulysses=2), ranks=4)
    assert results[2] == {
        "ulysses": (2, 3),
        "ring": (2,),
        "cp": (2, 3),
        "data": (0, 2),
        "dp_replicate": (2,),
        "fsdp": (0, 1, 2, 3),
        "world": (0, 1, 2, 3),
    }
    assert results[1]["data"] == (1, 3) and results[1]["cp"] == (0, 1)


def test_ulysses_is_innermost_and_replicas_outermost(rank_pool):
    ring = rank_pool.run(groups_of, MeshConfig(ring=2, ulysses=2), ranks=4)
    assert [result["ulysses"] for result in ring] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [result["ring"] for result in ring] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [result["cp"] for result in ring] == [(0, 1, 2, 3)] * 4
    copies = rank_pool.run(groups_of, MeshConfig(dp_replicate=2, dp_shard=2), ranks=4)
    assert [result["dp_replicate"] for result in copies] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert [result["fsdp"] for result in copies] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [result["data"] for result in copies] == [(0, 1, 2, 3)] * 4


def test_one_rank_needs_no_torch_distributed():
    assert groups_of(MeshConfig()) == {name: (0,) for name in NAMES}


def test_sizes_that_do_not_fit_are_refused_with_their_numbers():
    message = "dp_replicate=1 x dp_shard=2 x ring=1 x ulysses=3 needs 6 ranks, but 1 are running; start 6 ranks"
    with pytest.raises(ValueError, match=message):
        build_mesh(MeshConfig(dp_shard=2, ulysses=3))
    with pytest.raises(pydantic.ValidationError, match="ring"):
        MeshConfig(ring=0)


def test_a_process_group_ends_with_its_block(tmp_path):
    with (
        pytest.raises(KeyError),
        process_group(init_method=f"file://{tmp_path}/store", rank=0, world_size=1) as device,
    ):
        mesh = build_mesh(MeshConfig(), device=device)
        assert mesh.world.size == 1 and mesh.fsdp.handle is not None
        agree(None, group=mesh.world)
        raise KeyError
    assert not dist.is_initialized()
