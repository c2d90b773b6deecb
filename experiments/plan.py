"""Which mesh should a step run on, what will it take, and does it fit? Nothing is run and no GPU is needed.

Run:     mmcp plan --model Qwen2.5-7B --clip 1h@1fps --gpus 8 --gpu H100
"""

from dataclasses import replace
from pathlib import Path

from rich.table import Table

from experiments.base import RunConfig
from experiments.inspect_plan import SHIPPED
from experiments.plan_simulation import simulation_record
from experiments.plan_source import find_job
from mmcp.config import load
from mmcp.parallel.mesh import AXES
from mmcp.planning.choose import Choice, Prediction, choose
from mmcp.planning.explain import assumptions, describe, missing, reasons, remedies
from mmcp.planning.memory import MemoryPolicy
from mmcp.report.numbers import short
from mmcp.report.outcome import Outcome
from mmcp.report.terminal import facts_grid

OFFLOADS = ("optimizer", "activations")


def run(
    *,
    model: str | None = None,
    config: Path | None = None,
    clip: str | None = None,
    tokens: int | None = None,
    labels: int | None = None,
    rows: int = 1,
    gpus: int | None = None,
    gpu: str = "H100",
    offload: str = "",
    simulate: int | None = None,
) -> Outcome:
    """Choose mesh, modes and memory policy for rows like the one named, and tell what a step takes.

    model: a public size or a folder with config.json; None: that of `config`
    config: a YAML file or a run folder, for the encoders, rates and type of the computation
    clip, tokens: what a row holds      labels: trained tokens of it      rows: rows of a step
    offload: what may wait on the host, of `optimizer` and `activations`, joined by a comma
    simulate: also run the code of so many ranks, all of them, on tensors without data
    Raises ValueError for what cannot be planned.
    """
    if gpus is None and simulate is None:
        raise ValueError("name the devices: --gpus N, or --simulate N to run that many ranks without data as well")
    if simulate is not None and gpus not in (None, simulate):
        raise ValueError(f"--simulate {simulate} with --gpus {gpus}: give both the same number")
    settings = _settings(config)
    asked = find_job(
        settings, model=model, clip=clip, tokens=tokens, labels=labels, rows=rows, gpus=gpus or simulate or 0, gpu=gpu
    )
    policies = memory_policies(offload, settings.data.prefetch)
    choice = choose(asked.job, policies)
    found = [] if choice.best.fits else remedies(asked.job, policies)
    record = plan_record(choice, found)
    tables = [facts_grid(asked.facts), *_tables(choice, record)]
    agrees = True
    if simulate is not None:
        told = record["simulation"] = simulation_record(choice, asked)
        agrees = not told["disagreements"]
        tables.append(facts_grid({name: short(value) for name, value in told.items() if name != "disagreements"}))
        tables.append(facts_grid({"all ranks agree": "yes" if agrees else "; ".join(told["disagreements"])}))
    return Outcome(record=record, tables=tables, is_ok=agrees)


def memory_policies(offload: str, prefetch: int) -> tuple[MemoryPolicy, ...]:
    """Return the policies to choose from. Raises ValueError for a part that cannot be offloaded."""
    parts = [part.strip() for part in offload.split(",") if part.strip()]
    unknown = [part for part in parts if part not in OFFLOADS]
    if unknown:
        raise ValueError(f"--offload {unknown[0]}: unknown; use {' or '.join(OFFLOADS)}, or both joined by a comma")
    lean = MemoryPolicy(
        checkpointing=True,
        offload_optimizer="optimizer" in parts,
        offload_activations="activations" in parts,
        prefetch=prefetch,
    )
    return (lean,) if lean.offload_activations else (replace(lean, checkpointing=False), lean)


def plan_record(choice: Choice, found: list[str]) -> dict:
    """Return what `mmcp plan --json` prints."""
    best, job = choice.best, choice.job
    return {
        "model": job.architecture.name,
        "parameters": job.architecture.parameters,
        "tokens": job.load.tokens,
        "rows": job.rows,
        "gpus": job.devices,
        "gpu": job.device.name,
        **prediction_record(best),
        "per_host_bytes": best.memory.host * min(job.device.node_size, job.devices),
        "seconds": best.seconds.as_record(),
        "traffic": {f"{name}, {phase}": moved for (name, phase), moved in sorted(best.traffic.items())},
        "parameter_traffic_bytes": best.gathered,
        "micro_batches": best.micro_batches,
        "assumptions": [{"text": entry.text, "offered": entry.is_offered} for entry in assumptions(job, best.setting)],
        "reasons": reasons(choice),
        "would_fit": found,
        "runners_up": [prediction_record(other) for other in choice.runners_up],
    }


def prediction_record(prediction: Prediction) -> dict:
    """Return the figures of one setting."""
    setting = prediction.setting
    return {
        "mesh": dict(zip(AXES, setting.mesh.shape, strict=True)),
        "modes": setting.modes,
        "checkpointing": setting.policy.checkpointing,
        "offered": not list(missing(prediction.job, setting)),
        "fits": prediction.fits,
        "per_rank_bytes": prediction.memory.as_record(),
        "traffic_bytes": prediction.traffic_bytes,
        "step_seconds": prediction.step_seconds,
    }


def _settings(config: Path | None) -> RunConfig:
    file = config or SHIPPED
    return load(RunConfig, file / "config.yaml" if file.is_dir() else file)


def _tables(choice: Choice, record: dict) -> list[Table]:
    """Lay out the choice, its parts and the runners-up."""
    best = choice.best
    rate = choice.job.load.tokens * choice.job.rows / best.step_seconds
    head = {
        "choice": describe(best.setting),
        "fits": "yes" if best.fits else f"no: {'; '.join(best.misses)}",
        "step": f"{best.step_seconds:.3g} s ({rate:,.0f} tokens/s)",
    }
    if record["would_fit"]:
        head["would fit with"] = "; ".join(record["would_fit"])
    parts = ", ".join(f"{name} {short(value)}" for name, value in record["per_rank_bytes"].items())
    head["bytes a device"] = parts
    others = Table(title="meshes, the best first")
    for heading in ("mesh and modes", "fits", "offered", "GB", "seconds", "traffic"):
        others.add_column(heading, justify="left" if heading == "mesh and modes" else "right")
    for prediction in (best, *choice.runners_up[:8]):
        entry = prediction_record(prediction)
        others.add_row(
            describe(prediction.setting),
            *("yes" if entry[name] else "no" for name in ("fits", "offered")),
            f"{prediction.memory.total / 1e9:.1f}",
            f"{prediction.step_seconds:.4g}",
            short(prediction.traffic_bytes),
        )
    said = {f"why {number}": text for number, text in enumerate(record["reasons"], 1)}
    assumed = {
        f"assumed {number}": entry["text"] + ("" if entry["offered"] else " (not offered by mmcp train yet)")
        for number, entry in enumerate(record["assumptions"], 1)
    }
    return [facts_grid(head), others, facts_grid(said), facts_grid(assumed)]
