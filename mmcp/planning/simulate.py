"""Run every rank's context-parallel code on tensors without data, over torch's fake process group, and compare notes.

Plan, exchanges, hops and buffers are those of the real code; only arithmetic is left out (torch's meta device). One
block of each kind of layer runs forward and backward on every rank, one rank after the other, between the routing of
media rows and of label rows. What each rank told torch.distributed is kept: members of a group must have made the same
collectives with sizes that fit, and every send must have its receive. FSDP2's own collectives are not run.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from mmcp.attention.base import RowInfo
from mmcp.masks import Mask
from mmcp.model.backbone import BackboneConfig
from mmcp.parallel.apply import wrap_attention
from mmcp.parallel.collectives import Recorder, Traffic, all_reduce, record
from mmcp.parallel.mesh import Mesh, MeshConfig, build_mesh
from mmcp.parallel.route import Router
from mmcp.sequence import TokenSequence
from mmcp.sharding.plan import ShardPlan

META = torch.device("meta")


@dataclass(frozen=True)
class Call:
    """One call that a rank made to torch.distributed."""

    name: str
    sent: tuple[int, ...]
    """Numbers sent to each rank of the group, or to the one that is named."""
    received: tuple[int, ...]
    """Numbers received from each."""


@dataclass(frozen=True, eq=False)
class RankLog:
    """What one rank did."""

    rank: int
    collectives: dict[tuple[int, ...], list[Call]]
    """By the ranks of the group, in order."""
    sends: dict[tuple[tuple[int, ...], int], list[int]]
    """By group and peer (its number in the run): numbers of each message, in order."""
    receives: dict[tuple[tuple[int, ...], int], list[int]]
    recorder: Recorder
    kept: int
    """Bytes kept for backward by blocks and routing, all layers."""


class CallLog(TorchDispatchMode):
    """Note every call to torch.distributed inside the `with` block."""

    def __init__(self) -> None:
        super().__init__()
        self.collectives: dict[tuple[int, ...], list[Call]] = defaultdict(list)
        self.sends: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
        self.receives: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self._note(func._schema.name.removeprefix("c10d::"), args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: Sequence[Any]) -> None:
        group = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject) and _is_group(arg))
        ranks = tuple(dist.get_process_group_ranks(group))
        if name in ("send", "recv_"):
            book = self.sends if name == "send" else self.receives
            book[ranks, ranks[args[2]]].append(sum(tensor.numel() for tensor in args[0]))
        elif name == "alltoall_base_":
            self.collectives[ranks].append(Call(name, tuple(args[4]), tuple(args[3])))
        else:
            sent = sum(tensor.numel() for tensor in _tensors(args[-1] if name.startswith("allgather") else args[0]))
            self.collectives[ranks].append(Call(name, (sent,), (sent,)))


@dataclass(frozen=True, eq=False)
class Simulation:
    """What all ranks did."""

    logs: list[RankLog]
    disagreements: list[str]
    """What does not fit together; empty when all is well."""
    seconds: float
    """That running it took."""

    @property
    def received(self) -> list[int]:
        """Per rank: bytes that came from others, FSDP2 aside."""
        return [log.recorder.total().bytes for log in self.logs]

    @property
    def collectives(self) -> int:
        """Calls of all ranks."""
        return sum(log.recorder.total().collectives for log in self.logs)


def simulate(
    backbone: BackboneConfig, mesh: MeshConfig, row: TokenSequence, plan: ShardPlan, *, dtype: torch.dtype
) -> Simulation:
    """Run every rank of a mesh; each data-parallel group has a row of its own like this one.

    plan: of the row over the context-parallel ranks of a group
    Raises ValueError when a layer refuses, as it would in a run.
    """
    began = time.perf_counter()
    logs = [simulate_rank(backbone, mesh, row, plan, rank=rank, dtype=dtype) for rank in range(mesh.world)]
    return Simulation(logs, disagreements(logs), time.perf_counter() - began)


def simulate_rank(
    backbone: BackboneConfig, mesh: MeshConfig, row: TokenSequence, plan: ShardPlan, *, rank: int, dtype: torch.dtype
) -> RankLog:
    """Run one rank: media rows to their owners, each kind of block, label rows to their scorers, and back."""
    counts = Counter(backbone.variants)
    kept, recorder = 0, Recorder()
    with _fake_ranks(mesh.world, rank):
        here = build_mesh(mesh)
        with CallLog() as calls:
            with record(here.world) as once, kept_tensors() as held:
                router = Router(plan, here.cp, device=META)
                rows = torch.empty(len(plan.unit_positions(here.cp.index)), backbone.width, dtype=dtype, device=META)
                hidden = torch.empty(plan.lengths[here.cp.index], backbone.width, dtype=dtype, device=META)
                _sounds(row, here)
                moved = router.to_owners(rows, trainable=True), router.to_scorers(hidden, trainable=True)
            kept += held()
            with record(here.world) as back:
                (moved[0].sum() + moved[1].sum()).backward()
            _add(recorder, once, 1)
            _add(recorder, back, 1)
            info = RowInfo(Mask.of(row), plan, here.cp.index)
            for variant, count in counts.items():
                with record(here.world) as each:
                    kept += count * _run_block(replace(backbone, layers=1, pattern=(variant,)), here, info, dtype)
                _add(recorder, each, count)
    return RankLog(rank, dict(calls.collectives), dict(calls.sends), dict(calls.receives), recorder, kept)


def _run_block(backbone: BackboneConfig, mesh: Mesh, info: RowInfo, dtype: torch.dtype) -> int:
    """Run one block forward and backward; return the bytes that it kept."""
    with META:
        model = backbone.build().to(dtype)
    wrap_attention(model, mesh)
    tokens = info.plan.lengths[info.rank]
    hidden = torch.empty(tokens, backbone.width, dtype=dtype, device=META, requires_grad=True)
    wide = torch.promote_types(dtype, torch.float32)
    cos, sin = (torch.empty(tokens, backbone.head_dim // 2, dtype=wide, device=META) for _ in range(2))
    with kept_tensors(*model.parameters(), cos, sin) as held:
        out = model.blocks[0](hidden, cos, sin, info)
    kept = held()
    out.sum().backward()
    return kept


def _sounds(row: TokenSequence, mesh: Mesh) -> None:
    """Find the loudest sound of each clip over all ranks, as the inputs of encoders need it."""
    tracks = {(s.document, s.source, s.stream) for s in row.segments if s.kind == "audio" and s.units}
    if tracks:
        all_reduce(torch.empty(len(tracks), device=META), "max", group=mesh.cp, name="loudest sound")


@contextmanager
def _fake_ranks(world: int, rank: int) -> Iterator[None]:
    """Be one of `world` ranks whose exchanges move nothing."""
    dist.init_process_group("cpu:fake,meta:fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def kept_tensors(*left_out: Tensor) -> Iterator[Callable[[], int]]:
    """Count the bytes of what autograd keeps inside the `with` block: each storage once.

    left_out: tensors that are not counted, parameters for instance
    yields a function that tells the bytes
    """
    known = {tensor.untyped_storage()._cdata for tensor in left_out}
    held: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        number = tensor.untyped_storage()._cdata
        if number not in known:
            held.setdefault(number, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield lambda: sum(tensor.untyped_storage().nbytes() for tensor in held.values())


def disagreements(logs: Sequence[RankLog]) -> list[str]:
    """Compare what all ranks say: collectives of each group, and messages of each pair."""
    return [*_collective_faults(logs), *_message_faults(logs)]


def _collective_faults(logs: Sequence[RankLog]) -> Iterator[str]:
    by_rank = {log.rank: log for log in logs}
    for group in {ranks for log in logs for ranks in log.collectives}:
        members = [by_rank[rank].collectives.get(group, []) for rank in group]
        if len({len(calls) for calls in members}) > 1:
            yield f"group {_short(group)}: its ranks make {sorted({len(calls) for calls in members})} collectives"
            continue
        for number, calls in enumerate(zip(*members, strict=True)):
            if len({call.name for call in calls}) > 1:
                yield f"group {_short(group)}, collective {number}: {sorted({call.name for call in calls})}"
            elif calls[0].name == "alltoall_base_":
                sent = np.array([call.sent for call in calls])
                received = np.array([call.received for call in calls])
                if not np.array_equal(sent, received.T):
                    yield f"group {_short(group)}, exchange {number}: what is sent is not what is expected"
            elif len({call.sent for call in calls}) > 1:
                yield f"group {_short(group)}, {calls[0].name} {number}: its ranks bring different sizes"


def _message_faults(logs: Sequence[RankLog]) -> Iterator[str]:
    by_rank = {log.rank: log for log in logs}
    pairs = {(group, log.rank, peer) for log in logs for group, peer in log.sends}
    pairs |= {(group, peer, log.rank) for log in logs for group, peer in log.receives}
    for group, sender, receiver in sorted(pairs):
        sent = by_rank[sender].sends.get((group, receiver), [])
        received = by_rank[receiver].receives.get((group, sender), [])
        if sent != received:
            yield f"rank {sender} sends rank {receiver} {len(sent)} messages, which expects {len(received)} or others"


def _short(group: tuple[int, ...]) -> str:
    return f"{group[0]}..{group[-1]} ({len(group)} ranks)"


def _add(total: Recorder, part: Recorder, times: int) -> None:
    for (name, phase), traffic in part.traffic.items():
        entry = total.traffic.setdefault((name, phase), Traffic())
        entry.collectives += times * traffic.collectives
        entry.bytes += times * traffic.bytes


def _is_group(value: torch.ScriptObject) -> bool:
    return value._type().qualified_name().endswith("ProcessGroup")


def _tensors(value: Any) -> list[Tensor]:
    """List the tensors of a nested argument."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in value for tensor in _tensors(part)] if isinstance(value, list | tuple) else []
