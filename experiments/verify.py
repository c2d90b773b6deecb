"""Is the N-rank step the one-rank step? Loss, hidden states and every parameter's gradient, compared.

Run:     mmcp verify experiments/configs/demo.yaml --ranks 3           (the first training step of prepared shards)
         mmcp verify experiments/configs/demo.yaml --ranks 3 --synthetic            (drawn rows; nothing to prepare)
         mmcp verify experiments/configs/demo.yaml --ranks 3 --synthetic attention=linear,softmax mode=state,ring
Expect:  errors near the rounding of the type, float64 unless `dtype=` is given: below 1e-10, float32 below 1e-5.
"""

import math
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from rich.table import Table

from data_pipelines.workers import WorkerPool
from encoders import Tokenizer
from experiments.attention_choice import take_choice, with_choice
from experiments.base import RunConfig
from experiments.check_run import check_heads
from experiments.exactness import LIMITS, Computed, compare, measure
from experiments.pipeline import Pipeline, agree_on, collect, read_steps
from experiments.runtime import run_runner
from experiments.synthetic_rows import STEP, draw_media, draw_rows
from experiments.train_video_lm import with_ranks
from mmcp.config import load
from mmcp.parallel.launch import launch
from mmcp.parallel.mesh import MeshConfig, build_mesh, process_group
from mmcp.report.outcome import Outcome
from mmcp.training.step import StepRunner, StepWork

ERRORS = ("loss_rel", "hidden_rel", "grad_rel_max")


def run(config: Path, overrides: Sequence[str] = (), *, ranks: int | None = None, synthetic: bool = False) -> Outcome:
    """Compute the same step on one rank and on N, and compare; a success only when they are equal.

    The computation is in float64, whatever the config says, unless `dtype=` is among the overrides. These may hold the
    words `attention=` and `mode=` of experiments.attention_choice.
    Raises ValueError for a config, data or ranks that cannot work, before anything is started.
    """
    chosen, overrides = take_choice(overrides)
    is_dtype_given = any(override.partition("=")[0].strip() == "dtype" for override in overrides)
    settings = load(RunConfig, config, overrides if is_dtype_given else [*overrides, "dtype=float64"])
    settings = with_choice(with_ranks(settings, ranks), chosen)
    _check(settings, synthetic)
    world = settings.mesh.world
    with tempfile.TemporaryDirectory(prefix="mmcp-verify-") as folder:
        one, many = Path(folder, "one.safetensors"), Path(folder, "many.safetensors")
        launch(compute, 1, replace(settings, mesh=MeshConfig()), synthetic, one)
        launch(compute, world, settings, synthetic, many)
        errors = compare(Computed.read(one), Computed.read(many))
    limit = LIMITS[settings.dtype]
    is_ok = all(float(errors[name]) < limit for name in ERRORS)
    finite = {name: value if isinstance(value, str) or math.isfinite(value) else None for name, value in errors.items()}
    layers = [f"{variant.name} {variant.mode}" for variant in settings.model.backbone.pattern]
    mesh = {"ring": settings.mesh.ring, "ulysses": settings.mesh.ulysses}
    record = {"ok": is_ok, "dtype": settings.dtype, **finite, "ranks": world, **mesh, "attention": layers}
    return Outcome(record=record, tables=[_table(record, limit)], is_ok=is_ok)


def _check(settings: RunConfig, synthetic: bool) -> None:
    """Raise ValueError for what cannot work."""
    if settings.mesh.world == 1:
        raise ValueError("one rank against itself proves nothing; give --ranks 2 or more")
    check_heads(settings)
    settings.planner(settings.tokenizer.build().vocab_size).step([])
    if synthetic:
        return
    try:
        settings.data.open_train()
    except ValueError as error:
        raise ValueError(f"data.train: {error}; prepare it, or verify on drawn rows with --synthetic") from None


def compute(settings: RunConfig, synthetic: bool, file: Path) -> None:
    """Compute the step on this rank of the mesh; rank 0 writes what all of them computed."""
    with process_group("cpu") as device:
        mesh = build_mesh(settings.mesh, device=device)
        tokenizer = settings.tokenizer.build()
        runner = run_runner(settings, mesh, vocabulary=tokenizer.vocab_size)
        work = (drawn_step if synthetic else first_step)(settings, runner, tokenizer)
        if not work.label_tokens:
            raise ValueError("no sample of the first step can be used; see what `mmcp prepare` says of the data")
        computed = measure(runner, work)
        if mesh.rank == 0:
            computed.write(file)


def first_step(settings: RunConfig, runner: StepRunner, tokenizer: Tokenizer) -> StepWork:
    """Plan the first step of a training run and decode this rank's units of it."""
    shards = settings.data.open_train()
    pipeline = Pipeline(settings, tokenizer, shards, settings.planner(tokenizer.vocab_size))
    numbers = shards.order(settings.seed).take(settings.data.documents_per_step)
    with closing(WorkerPool(settings.data.workers, settings.data.deadline_s)) as pool:
        steps = read_steps(pipeline, runner.mesh, pool, plan=lambda _: pipeline.plan(numbers), steps=range(1))
        (step,) = map(collect, steps)
    return agree_on(step, runner)[0]


def drawn_step(settings: RunConfig, runner: StepRunner, tokenizer: Tokenizer) -> StepWork:
    """Plan a step of drawn rows: every kind of segment, packed and alone, with and without labels."""
    encoders, vocabulary = settings.model.encoders, tokenizer.vocab_size
    rows = draw_rows(STEP, seed=settings.seed, encoders=encoders, vocabulary=vocabulary)
    plan = settings.planner(vocabulary).step(rows)
    return StepWork(plan, draw_media(rows, seed=settings.seed, encoders=encoders))


def _table(record: dict, limit: float) -> Table:
    verdict = "equal" if record["ok"] else "NOT EQUAL"
    mesh, layers = f"ring={record['ring']} x ulysses={record['ulysses']}", ", ".join(record["attention"])
    table = Table(
        title=f"{record['ranks']} ranks against one in {record['dtype']}: {verdict}", caption=f"{mesh}; {layers}"
    )
    for heading in ("what", "largest error", "limit", "where"):
        table.add_column(heading)
    for name, what in zip(ERRORS, ("loss", "hidden states", "gradients"), strict=True):
        error = "not finite" if record[name] is None else f"{record[name]:.1e}"
        where = record["worst_parameter"] if name == "grad_rel_max" else ""
        table.add_row(what, error, f"{limit:.0e}", where)
    return table
