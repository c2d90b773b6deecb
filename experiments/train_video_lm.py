"""Train a video-language model on prepared clips over context-parallel ranks.

Run:     mmcp train experiments/configs/demo.yaml --ranks 2
Resume:  mmcp train experiments/configs/demo.yaml --ranks 2 --resume      (also on another number of ranks)
Result:  the run folder: config.yaml, env.json, metrics.jsonl, plan.json, checkpoints/, report/
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from data_pipelines.mixture import Mixture
from data_pipelines.sampler import OrderState
from data_pipelines.workers import WorkerPool, tells_of_death
from experiments.base import RunConfig, default_rates
from experiments.check_run import check
from experiments.features import keep_features
from experiments.pipeline import Pipeline, collect, held_out_loss, read_steps
from experiments.run_log import RunLog
from experiments.runtime import num_updated, run_runner
from mmcp.config import as_values, dump, load
from mmcp.parallel.launch import launch
from mmcp.parallel.mesh import Mesh, build_mesh, device_type_for, process_group
from mmcp.parallel.stop import StopRequest
from mmcp.report.run import write_run_report
from mmcp.sharding.cost import Rates
from mmcp.training import checkpoint
from mmcp.training.parts import part_of
from mmcp.training.run_folder import open_run_folder, write_setup
from mmcp.training.stages import last_checkpoint, start_from
from mmcp.training.step import StepRunner
from mmcp.training.train import Counters, OnStep, Trainer, never

RESUMABLE = (
    "folder",
    "mesh",
    "train",
    "features",
    *(f"data.{name}" for name in ("held_out", "held_out_samples", "workers", "prefetch", "deadline_s")),
    *(f"data.{name}" for name in ("lookahead", "prefetch_mb", "dead_worker")),
)
"""What may differ when a run is resumed: nothing that changes the samples, the model or the updates."""


def run(
    config: Path,
    overrides: Sequence[str] = (),
    *,
    ranks: int | None = None,
    resume: bool = False,
    dry_run: bool = False,
) -> None:
    """Check everything that can be checked, then train. Raises ValueError for what cannot work, before any work."""
    settings = with_ranks(load(RunConfig, config, overrides), ranks)
    if resume:
        settings = with_saved_rates(settings)
    check(settings, file=config.resolve(), resume=resume)
    if dry_run:
        print(dump(settings), end="")
        return
    folder = open_run_folder(settings.folder, resume=resume)
    launch(train, settings.mesh.world, settings, folder, resume)
    print(f"run: {folder}\nreport: {write_run_report(folder)}")


def with_ranks(settings: RunConfig, ranks: int | None) -> RunConfig:
    """Set the mesh for a number of ranks: groups and ring as configured, all the rest on the Ulysses axis."""
    mesh = settings.mesh
    if ranks is None or ranks == mesh.world:
        return settings
    others = mesh.data * mesh.ring
    if ranks < 1 or ranks % others:
        raise ValueError(
            f"--ranks {ranks} is not a multiple of dp_replicate={mesh.dp_replicate} x dp_shard={mesh.dp_shard} x "
            f"ring={mesh.ring}; give a multiple of {others}, or set mesh.* to match"
        )
    return replace(settings, mesh=replace(mesh, ulysses=ranks // others))


def with_saved_rates(settings: RunConfig) -> RunConfig:
    """Keep the rates that a run was planned with, so that its plans do not depend on the machine it goes on on.

    Rates that were given, and differ, are left as they are: `restore` refuses them.
    """
    found = checkpoint.latest(Path(settings.folder) / "checkpoints")
    if found is None or settings.rates != default_rates():
        return settings
    return replace(settings, rates=Rates(**checkpoint.read_state(found)["config"]["rates"]))


@contextmanager
def unwatched(_: StepRunner) -> Iterator[OnStep]:
    """Look at nothing."""
    yield lambda metrics, loaded: None


def train(
    settings: RunConfig,
    folder: Path,
    resume: bool,
    watch: Callable[[StepRunner], AbstractContextManager[OnStep]] = unwatched,
) -> None:
    """Train on this rank, from joining the others to leaving them.

    watch: entered with the runner before the first step; what it gives is called after each, once that is logged
    """
    with process_group(device_type_for(settings.parameter_dtype)) as device:
        train_on(build_mesh(settings.mesh, device=device), settings, folder, resume=resume, watch=watch)


def train_on(
    mesh: Mesh,
    settings: RunConfig,
    folder: Path,
    *,
    resume: bool,
    watch: Callable[[StepRunner], AbstractContextManager[OnStep]] = unwatched,
) -> None:
    """Train on this rank of the mesh."""
    with ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        tokenizer = settings.tokenizer.build()
        is_filled_later = resume or bool(settings.start_from)
        runner = run_runner(settings, mesh, vocabulary=tokenizer.vocab_size, is_filled_later=is_filled_later)
        if settings.start_from and not resume:
            start_from(runner.model, last_checkpoint(settings.start_from), settings.model.lora, group=mesh.world)
        optimizer = settings.optim.build(runner.model, rate_of=lambda name: settings.parts.rate(part_of(name)))
        shards = settings.data.open_train()
        start, counters = 0, Counters()
        if resume:
            start, counters = restore(settings, folder, runner, optimizer, shards=shards)
        elif mesh.rank == 0:
            write_setup(folder, settings)
        pool = WorkerPool(settings.data.workers, settings.data.deadline_s)
        stack.callback(pool.close)
        planner = settings.planner(tokenizer.vocab_size)
        pipeline = Pipeline(settings, tokenizer, shards, planner, encoders=keep_features(settings, runner))
        log = RunLog(
            settings,
            folder,
            mesh,
            pipeline=pipeline,
            counters=counters,
            start=start,
            num_updated=num_updated(runner.model),
        )
        stack.enter_context(log)
        order = shards.order(settings.seed)
        trainer = Trainer(
            runner=runner,
            optimizer=optimizer,
            optim=settings.optim,
            parts=settings.parts,
            settings=settings.train,
            counters=counters,
            on_step=(log.step, stack.enter_context(watch(runner))),
            save=lambda done: save(settings, folder, runner, optimizer, done, counters, shards=shards),
            held_out_loss=lambda: held_out_loss(pipeline, runner, pool),
            stop_requested=stop.is_set,
            is_fatal=tells_of_death if settings.data.dead_worker == "stop" else never,
        )
        batch, total = settings.data.documents_per_step, settings.optim.total_steps
        steps = range(start, total)
        planned = read_steps(
            pipeline, mesh, pool, plan=lambda step: pipeline.plan(order.samples(step * batch, batch)), steps=steps
        )
        trainer.run(map(collect, planned))


def order_at(settings: RunConfig, shards: Mixture, step: int) -> OrderState:
    """Return where the order of samples is after `step` steps: a product, so prefetching cannot disturb it."""
    return replace(shards.order(settings.seed).state, taken=step * settings.data.documents_per_step)


def save(
    settings: RunConfig,
    folder: Path,
    runner: StepRunner,
    optimizer: torch.optim.Optimizer,
    done: int,
    counters: Counters,
    *,
    shards: Mixture,
) -> None:
    """Write a checkpoint after `done` steps, unless it is there; forget old ones."""
    target = folder / "checkpoints"
    if (target / f"step_{done}").exists():
        return
    state = {
        "order": asdict(order_at(settings, shards, done)),
        "counters": asdict(counters),
        "config": as_values(settings),
        "ranks": runner.mesh.world.size,
    }
    checkpoint.save(target, done, model=runner.model, optimizer=optimizer, state=state, group=runner.mesh.world)
    if runner.mesh.rank == 0:
        checkpoint.prune(target, settings.train.keep_last)


def restore(
    settings: RunConfig, folder: Path, runner: StepRunner, optimizer: torch.optim.Optimizer, *, shards: Mixture
) -> tuple[int, Counters]:
    """Load the latest checkpoint; return the steps done and what was counted.

    Raises ValueError when anything that decides the updates differs from the run that saved it.
    """
    found = checkpoint.latest(folder / "checkpoints")
    assert found is not None, "the caller has looked"
    state = checkpoint.read_state(found)
    changed = differences(state["config"], as_values(settings))
    if changed:
        raise ValueError(f"this config is not the one of {found}: {'; '.join(changed)}; resume with the saved one")
    step = state["step"]
    try:
        shards.order(settings.seed).restore(OrderState.of(state["order"]))
    except ValueError as error:
        raise ValueError(f"{found} was saved on other data: {error}") from None
    checkpoint.load(found, model=runner.model, optimizer=optimizer, group=runner.mesh.world)
    return step, Counters(**state["counters"])


def differences(saved: Any, now: Any, path: str = "") -> list[str]:
    """List the settings that may not change and did."""
    if path in RESUMABLE or saved == now:
        return []
    if isinstance(saved, dict) and isinstance(now, dict):
        keys = sorted({*saved, *now})
        return [
            line for key in keys for line in differences(saved.get(key), now.get(key), f"{path}.{key}" if path else key)
        ]
    return [f"{path} was {saved}, is {now}"]
