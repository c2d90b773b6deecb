"""The ranks of a run, arranged along four axes: dp_replicate, dp_shard, ring, ulysses (innermost)."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Annotated

import numpy as np
import pydantic
import torch
import torch.distributed as dist

from mmcp.config import config
from mmcp.parallel.collectives import Group, Recorder

AXES = ("dp_replicate", "dp_shard", "ring", "ulysses")
TIMEOUT = timedelta(seconds=300)  # how long a collective waits for the slowest rank
CPU = torch.device("cpu")
Size = Annotated[int, pydantic.Field(ge=1)]


@config
class MeshConfig:
    """Ranks along each axis; their product is the number of ranks of the run."""

    dp_replicate: Size = 1
    """Copies of the parameters, in ranks."""
    dp_shard: Size = 1
    """Data-parallel groups that share one copy of the parameters, in ranks."""
    ring: Size = 1
    """Ranks along the ring axis of context parallelism (between nodes)."""
    ulysses: Size = 1
    """Ranks along the Ulysses axis of context parallelism (inside a node)."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.dp_replicate, self.dp_shard, self.ring, self.ulysses

    @property
    def cp(self) -> int:
        """Ranks that share one row of tokens."""
        return self.ring * self.ulysses

    @property
    def data(self) -> int:
        """Groups of ranks that hold different rows."""
        return self.dp_replicate * self.dp_shard

    @property
    def world(self) -> int:
        return self.data * self.cp


@dataclass(frozen=True, eq=False)
class Mesh:
    """Where this rank stands, and the groups it talks in.

    2 data-parallel groups of 1 x 2 context-parallel ranks:      world rank   dp_shard   ulysses
                                                                     0            0         0
        rank 2: cp and ulysses = (2, 3), data = (0, 2)               1            0         1
                                                                     2            1         0
                                                                     3            1         1
    """

    config: MeshConfig
    rank: int
    """This rank in the whole run."""
    device: torch.device
    """Where this rank computes."""
    ulysses: Group
    ring: Group
    cp: Group
    """Ranks that share a row: ring x ulysses; the index in it is the rank a ShardPlan speaks of."""
    data: Group
    """Ranks that hold the same part of different rows: dp_replicate x dp_shard."""
    dp_replicate: Group
    """Ranks that hold the same part of the parameters."""
    fsdp: Group
    """Ranks that share one copy of the parameters: dp_shard x ring x ulysses. Its traffic is FSDP2's alone."""
    world: Group


def build_mesh(mesh_config: MeshConfig, *, device: torch.device = CPU, timeout: timedelta = TIMEOUT) -> Mesh:
    """Arrange the running ranks; every rank must call it, with the same config.

    Without torch.distributed there is one rank. timeout: how long a collective of its groups may wait.
    Raises ValueError when the axes' product is not the number of ranks.
    """
    world, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    if mesh_config.world != world:
        axes = " x ".join(f"{name}={size}" for name, size in zip(AXES, mesh_config.shape, strict=True))
        raise ValueError(
            f"mesh {axes} needs {mesh_config.world} ranks, but {world} are running; "
            f"start {mesh_config.world} ranks or choose sizes whose product is {world}"
        )
    recorders: list[Recorder] = []
    members = {
        "ulysses": ("ulysses",),
        "ring": ("ring",),
        "cp": ("ring", "ulysses"),
        "data": ("dp_replicate", "dp_shard"),
        "dp_replicate": ("dp_replicate",),
        "fsdp": ("dp_shard", "ring", "ulysses"),
        "world": AXES,
    }
    groups = {
        name: _group(name, _lines(mesh_config.shape, axes), rank, recorders, timeout) for name, axes in members.items()
    }
    connect(groups["ring"], device)
    return Mesh(config=mesh_config, rank=rank, device=device, **groups)


def connect(group: Group, device: torch.device) -> None:
    """Join the ranks of `group` before they talk point to point; every one of them must call it.

    NCCL joins the ranks of a group at its first exchange and waits for all of them, but of the ranks of a ring only
    those that read keys of one another may have something to exchange.
    """
    if group.size > 1 and device.type != "cpu":
        dist.all_reduce(torch.zeros(1, device=device), group=group.handle)


def device_type_for(dtype: torch.dtype) -> str:
    """Choose where ranks compute: `cuda` where there is a device for every local rank, `cpu` otherwise.

    float64 always runs on the CPU: no attention kernel of a GPU computes it.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return "cuda" if dtype != torch.float64 and torch.cuda.device_count() >= local_ranks else "cpu"


@contextmanager
def process_group(
    device_type: str = "cpu",
    *,
    timeout: timedelta = TIMEOUT,
    init_method: str = "env://",
    rank: int = -1,
    world_size: int = -1,
) -> Iterator[torch.device]:
    """Join the other ranks for the length of a `with` block, which gets this rank's device.

    device_type: `cpu` talks by gloo; `cuda` by NCCL, with gloo beside it for flags and other tensors on the CPU
    init_method, rank, world_size: as in torch; by default torchrun's environment variables say them
    """
    device, backend = CPU, "gloo"
    if device_type != "cpu":
        device, backend = torch.device(device_type, dist.get_node_local_rank(0)), f"cpu:gloo,{device_type}:nccl"
        torch.cuda.set_device(device)
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def _lines(shape: tuple[int, ...], axes: tuple[str, ...]) -> list[tuple[int, ...]]:
    """Partition the world's ranks: those of one line differ along `axes` only.

    _lines((1, 2, 1, 2), ("ulysses",)) -> [(0, 1), (2, 3)];   ("dp_shard",) -> [(0, 2), (1, 3)]
    """
    ranks = np.arange(math.prod(shape)).reshape(shape)
    along = [AXES.index(axis) for axis in axes]
    across = [i for i in range(len(AXES)) if i not in along]
    length = math.prod(shape[i] for i in along)
    return [tuple(line) for line in ranks.transpose(across + along).reshape(-1, length).tolist()]


def _group(name: str, lines: list[tuple[int, ...]], rank: int, recorders: list[Recorder], timeout: timedelta) -> Group:
    """Make the process groups of all lines, as torch wants every rank to do, and return the one that holds `rank`.

    A single rank needs none, except under FSDP2.
    """
    mine = next(line for line in lines if rank in line)
    needed = [line for line in lines if len(line) > 1 or (name == "fsdp" and dist.is_initialized())]
    handles = {line: dist.new_group(list(line), timeout=timeout) for line in needed}
    handle = handles.get(mine)
    assert handle is None or isinstance(handle, dist.ProcessGroup)
    return Group(name, mine, mine.index(rank), handle, recorders)
