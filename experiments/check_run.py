"""Find what would stop a run later, before it starts: heads, tokenizer, data, folder; all of it at once."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_pipelines.mixture import DataSource, Mixture
from encoders import Tokenizer
from experiments.base import RunConfig
from experiments.pipeline import Pipeline
from mmcp.config import ConfigError
from mmcp.model.pretrained import ModelFolder
from mmcp.parallel.modes import check_layer
from mmcp.training import checkpoint
from mmcp.training.run_folder import check_run_folder
from mmcp.training.stages import last_checkpoint


def check(settings: RunConfig, *, file: str | Path = "config", resume: bool | None = None) -> None:
    """Split the heads, build the tokenizer, open the data, lay out a sample; tell what data were found.

    file:   named in errors
    resume: whether the run goes on in its folder; None: the folder is not looked at
    Raises ConfigError with every problem, each naming field, value, reason and remedy.
    """
    problems: list[str] = []
    tokenizer = None
    with _noting(problems, "mesh"):
        check_heads(settings)
    with _noting(problems, "tokenizer.file"):
        tokenizer = settings.tokenizer.build()
    if tokenizer:
        with _noting(problems, "model"):
            settings.planner(tokenizer.vocab_size).step([])
    with _noting(problems, "model.pretrained"):
        if settings.model.pretrained and not resume and not settings.start_from:
            ModelFolder.open(settings.model.pretrained).check()
    with _noting(problems, "start_from"):
        if settings.start_from and not resume:
            last_checkpoint(settings.start_from)
    held_out = (DataSource(path=settings.data.held_out),) if settings.data.held_out else ()
    for name, sources in (("train", settings.data.sources), ("held_out", held_out)):
        if sources or name == "train":
            with _noting(problems, f"data.{name}"):
                shards = Mixture.open(sources, strict=settings.train.strict)
                _tell(f"data.{name}: {shards.summary()}", *(f"warning: {problem}" for problem in shards.problems))
                if tokenizer:
                    find_usable(settings, tokenizer, shards)
    if resume is not None:
        with _noting(problems, "folder"):
            folder = check_run_folder(settings.folder, resume=resume)
            if resume and checkpoint.latest(folder / "checkpoints") is None:
                raise ValueError(f"no complete checkpoint to resume in {folder / 'checkpoints'}; drop --resume")
    if problems:
        raise ConfigError(str(file), problems)


def check_heads(settings: RunConfig) -> None:
    """Raise ValueError when a layer's heads cannot be split over the mesh, or its mode cannot carry its attention."""
    backbone, mesh = settings.model.backbone, settings.mesh
    for number, variant in enumerate(backbone.pattern):
        try:
            check_layer(variant, backbone.shape(variant), ring=mesh.ring, ulysses=mesh.ulysses)
        except ValueError as error:
            raise ValueError(f"{error} (pattern.{number}: {variant.name} in mode '{variant.mode}')") from None


def find_usable(settings: RunConfig, tokenizer: Tokenizer, shards: Mixture) -> None:
    """Lay out samples until one can be trained on. Raises ValueError when none can."""
    pipeline = Pipeline(settings, tokenizer, shards, settings.planner(tokenizer.vocab_size))
    first = ""
    for number in range(len(shards)):
        try:
            pipeline.document(number)
            return
        except ValueError as error:
            first = first or str(error)
    raise ValueError(f"none of {len(shards)} samples can be used; the first: {first}")


@contextmanager
def _noting(problems: list[str], field: str) -> Iterator[None]:
    """Put an error of the user's into `problems`, with the field it belongs to, and go on."""
    try:
        yield
    except ValueError as error:
        problems.append(f"{field}: {error}")


def _tell(*lines: str) -> None:
    """Print to the standard error, once for all ranks that torchrun started."""
    if os.environ.get("RANK", "0") == "0":
        print(*lines, sep="\n", file=sys.stderr)
