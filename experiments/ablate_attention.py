"""What does linear attention cost in accuracy, and save in work, when some or all layers use it?

Question: softmax, linear, or a mix of both, on the same clips, tokens, steps and seeds.
Run:      mmcp ablate experiments/configs/ablate.yaml [--ranks 2] [key=value ...]
Smoke:    mmcp ablate experiments/configs/ablate.yaml smoke=true          (two CPU cores, a minute or two)
Expect:   linear layers lose on order and time, where one place of the clip has to be found; the mix loses little.
Result:   experiments/LOG.md, entry "ablate attention"; the folder's table.md, table.csv, table.json, loss.png and
          accuracy.png, over ordinary run folders VARIANT/seed_K. What is finished there is not run again.
"""

import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from pydantic import Field, NonNegativeInt, PositiveInt

from data_pipelines.prepare import prepare
from data_pipelines.synthetic import SyntheticConfig
from experiments import evaluate
from experiments.base import RunConfig
from experiments.check_run import check
from experiments.compare_runs import compare, tables, write_comparison
from experiments.demo import write_data
from experiments.train_video_lm import train, with_ranks
from experiments.watch import watch
from mmcp.attention import AttentionConfig
from mmcp.config import config, dump, load
from mmcp.parallel.launch import launch
from mmcp.report.outcome import Outcome
from mmcp.training import checkpoint
from mmcp.training.run_folder import open_run_folder

SMOKE_CLIPS = SyntheticConfig(train_clips=6, heldout_clips=2, train_text_documents=1, heldout_text_questions=2)


@config
class AblateConfig:
    """Which variants are compared, and for how long."""

    base: str
    """Config file of a run: everything but the folder, the seed, the steps and the attention of the layers."""
    changes: tuple[str, ...] = ()
    """Settings `section.key=value` that win over `base`."""
    folder: str
    """Where runs, tables and figures are written."""
    variants: dict[str, tuple[AttentionConfig, ...]] = Field(min_length=1)
    """By name: the attention of the first layers, repeated over all."""
    seeds: tuple[NonNegativeInt, ...] = Field(default=(0, 1, 2), min_length=1)
    """Of new weights and of the order of samples."""
    steps: PositiveInt
    """Of each run; the same samples in the same order for all variants of a seed."""
    smoke: bool = False
    """Two steps of two seeds on a few clips that are written for it, in FOLDER_smoke."""

    def __post_init__(self):
        for name, pattern in self.variants.items():
            if not pattern or not name.isidentifier():
                raise ValueError(f"variant '{name}' needs a name for a folder and at least one layer's attention")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds={list(self.seeds)} repeat; give each once")


def run(config: Path, overrides: Sequence[str] = (), *, ranks: int | None = None) -> Outcome:
    """Train and evaluate what is not there yet, then compare. Raises ValueError before any work for what cannot be."""
    settings = load(AblateConfig, config, overrides)
    settings = smoke_settings(settings) if settings.smoke else settings
    base = with_ranks(load(RunConfig, settings.base, settings.changes), ranks)
    if settings.smoke:
        write_smoke_data(base)
    if not base.data.held_out:
        raise ValueError(f"{settings.base}: data.held_out is empty; name shards to compare the variants on")
    runs = {
        (name, seed): run_config(settings, base, name, seed) for name in settings.variants for seed in settings.seeds
    }
    for run_settings in runs.values():
        check_folder(run_settings)
    check(base)
    for (name, seed), run_settings in runs.items():
        print(f"{name}, seed {seed}: {run_settings.folder}", file=sys.stderr)
        run_once(run_settings)
    folder = Path(settings.folder)
    record = compare({name: [Path(runs[name, seed].folder) for seed in settings.seeds] for name in settings.variants})
    write_comparison(folder, record)
    return Outcome(record=record, tables=tables(record))


def smoke_settings(settings: AblateConfig) -> AblateConfig:
    """Make everything small."""
    folder = f"{settings.folder}_smoke"
    data = (f"data.train={folder}/data/train", f"data.held_out={folder}/data/heldout", "data.held_out_samples=8")
    changes = (*settings.changes, *data, "optim.warmup_steps=1")
    return replace(settings, folder=folder, changes=changes, seeds=(0, 1), steps=2)


def write_smoke_data(base: RunConfig) -> None:
    """Write and prepare a few clips, unless they are there."""
    folder = Path(base.data.sources[0].path).parent
    write_data(folder, SMOKE_CLIPS)
    for manifest, shards in (("train.jsonl", base.data.sources[0].path), ("heldout.jsonl", base.data.held_out)):
        if not (Path(shards) / "index.json").is_file():
            prepare(folder / manifest, shards, strict=True)


def run_config(settings: AblateConfig, base: RunConfig, variant: str, seed: int) -> RunConfig:
    """Return the config of one run: held-out loss at its end, the schedule of the rate over its steps."""
    return replace(
        base.with_pattern(settings.variants[variant]),
        folder=f"{settings.folder}/{variant}/seed_{seed}",
        seed=seed,
        optim=replace(base.optim, total_steps=settings.steps),
        train=replace(base.train, evaluate_every=settings.steps),
    )


def check_folder(settings: RunConfig) -> None:
    """Raise ValueError when the run's folder holds a run of another config."""
    written = Path(settings.folder) / "config.yaml"
    if written.is_file() and written.read_text(encoding="utf-8") != dump(settings):
        raise ValueError(f"'{settings.folder}' holds a run of other settings; delete it or name another folder")


def run_once(settings: RunConfig) -> None:
    """Train and evaluate one run, from where it was left."""
    folder = Path(settings.folder)
    if (folder / "eval.json").is_file():
        return
    saved = checkpoint.latest(folder / "checkpoints")
    if saved is None:
        shutil.rmtree(folder, ignore_errors=True)
        open_run_folder(folder, resume=False)
    if saved is None or checkpoint.read_state(saved)["step"] < settings.optim.total_steps:
        launch(train, settings.mesh.world, settings, folder.resolve(), saved is not None, partial(watch, folder=folder))
    evaluate.run(folder)
