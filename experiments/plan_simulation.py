"""Run every rank's context-parallel code for a choice of `mmcp plan`, without data, and tell what the ranks did."""

from dataclasses import replace

from experiments.plan_source import Asked
from mmcp.model.backbone import BackboneConfig
from mmcp.planning.choose import Choice
from mmcp.planning.memory import memory_of
from mmcp.planning.share import share_of
from mmcp.planning.simulate import Simulation, simulate
from mmcp.sequence import Segment, TokenSequence
from mmcp.sharding.balance import Balance, balance
from mmcp.sharding.cost import CostModel, row_costs
from mmcp.sharding.strategies import STRATEGIES

MOST_LABELS = 4096  # label rows of a row of text alone: more of them change nothing but the sizes of one exchange


def simulation_record(choice: Choice, asked: Asked) -> dict:
    """Plan the row on the chosen mesh, run all ranks, and tell the slowest of them."""
    best, job = choice.best, choice.job
    mesh = best.setting.mesh
    backbone = replace(job.architecture.backbone, pattern=best.setting.pattern)
    row = asked.sequence or text_row(job.load.tokens, min(job.load.labels, MOST_LABELS))
    model = in_modes(asked.costs, backbone)
    costs = row_costs(row, model)
    plan = STRATEGIES["balanced"](row, (mesh.ring, mesh.ulysses), costs)
    done = simulate(backbone, mesh, row, plan, dtype=job.dtype)
    seconds = _rank_seconds(done, balance(row, plan, costs), model, choice)
    slowest = max(range(mesh.world), key=lambda rank: seconds[rank])
    architecture = replace(job.architecture, backbone=backbone)
    memory = [
        memory_of(
            architecture,
            share_of(row, plan, costs, rank=rank, unit_bytes=asked.unit_bytes),
            job.numbers,
            best.setting.policy,
            shards=mesh.dp_shard * mesh.cp,
            is_sharded=job.is_sharded,
            encoder_parameters=job.encoder_parameters,
            largest_encoder=job.largest_encoder,
        ).total
        for rank in range(mesh.cp)
    ]
    return {
        "ranks": mesh.world,
        "row_tokens": row.num_tokens,
        "label_rows": plan.num_labels,
        "calls": done.collectives,
        "disagreements": done.disagreements[:20],
        "slowest_rank": slowest,
        "slowest_rank_seconds": seconds[slowest],
        "mean_rank_seconds": sum(seconds) / len(seconds),
        "most_received_bytes": max(done.received),
        "mean_received_bytes": sum(done.received) // mesh.world,
        "most_kept_bytes": max(log.kept for log in done.logs),
        "most_memory_bytes": max(memory),
        "simulation_seconds": done.seconds,
    }


def in_modes(costs: CostModel, backbone: BackboneConfig) -> CostModel:
    """Price the layers of each kind in the mode that was chosen for them."""
    modes = [variant.mode for variant in dict.fromkeys(backbone.variants)]
    layers = tuple(replace(layer, mode=mode) for layer, mode in zip(costs.layers, modes, strict=True))
    return replace(costs, layers=layers)


def text_row(tokens: int, labels: int) -> TokenSequence:
    """Make a row of text whose last tokens are trained."""
    texts = Segment(kind="text", ids=(1,) * (tokens - labels)), Segment(kind="text", ids=(1,) * labels, loss=True)
    return TokenSequence(tuple(text for text in texts if text.num_tokens))


def _rank_seconds(done: Simulation, work: Balance, costs: CostModel, choice: Choice) -> list[float]:
    """Seconds of each rank: its FLOPs at the device's rate, and what it received at that of the slower link used."""
    device, mesh = choice.job.device, choice.best.setting.mesh
    rate = device.reached_node_rate if mesh.cp <= device.node_size else device.reached_network_rate
    flops = [
        encode + linear + attention + labels * costs.label_flops
        for encode, linear, attention, labels in zip(
            work.encoder_flops, work.linear_flops, work.attention_flops, work.label_rows, strict=True
        )
    ]
    return [
        costs.passes * flops[rank % mesh.cp] / device.reached_flops + received / rate
        for rank, received in enumerate(done.received)
    ]
