"""From nothing to a model that answers questions about clips it never saw, on two cores.

Run:     make demo                              (or: python -m experiments.demo [--folder runs/demo] [key=value ...])
Expect:  colour and tone above 0.9, order above 0.8, the time of the flash to within half a second.
Result:  runs/demo: the run, its evaluation and its report; experiments/LOG.md, entry "demo"
"""

import argparse
import os
import shutil
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from data_pipelines.synthetic import ClipPlan, SyntheticConfig, write_clip, write_manifests
from experiments import evaluate, prepare, train_video_lm
from experiments.base import RunConfig
from mmcp.config import load

CONFIG = Path(__file__).parent / "configs" / "demo.yaml"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=CONFIG, metavar="FILE", help="the run's config")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that win over the file")
    options = parser.parse_args(arguments)
    settings = load(RunConfig, options.config, options.overrides)
    folder, began = Path(settings.folder), time.monotonic()
    if (folder / "config.yaml").exists():
        shutil.rmtree(folder)  # an earlier demo
    stages = Stages(began)
    stages.say("1/4  write clips and questions")
    data = Path(settings.data.sources[0].path).parent
    write_data(data, SyntheticConfig(seed=settings.seed))
    stages.say("2/4  prepare shards")
    prepare_data(data, settings)
    stages.say(f"3/4  train on {settings.mesh.world} ranks")
    train_video_lm.run(options.config, options.overrides)
    stages.say("4/4  answer questions about clips that were not trained on")
    outcome = evaluate.run(folder)
    outcome.show(as_json=False)
    print(f"report: {(folder / 'report' / 'index.html').resolve()}")
    print(f"without picture and sound: mmcp eval {folder} --blank")
    stages.say("done")
    return 0


class Stages:
    """Says which stage begins and how long everything has taken."""

    def __init__(self, began: float):
        self.began = began

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.began:5.0f} s]  {text}", file=sys.stderr, flush=True)


def write_data(folder: Path, config: SyntheticConfig) -> None:
    """Write clips on all cores and both manifests, unless the same data is there."""
    done = folder / "written.txt"
    if done.exists() and done.read_text() == repr(config):
        return
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    plans = write_manifests(folder, config)
    jobs = [(config, plan, folder / "media" / f"{plan.name}.mp4") for plan in plans]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool, Progress(console=Console(stderr=True)) as bar:
        for _ in bar.track(pool.map(_write, jobs, chunksize=8), total=len(jobs), description="clips"):
            pass
    done.write_text(repr(config))


def prepare_data(folder: Path, settings: RunConfig) -> None:
    """Prepare both manifests, unless their shards are there."""
    for name, out in (("train", settings.data.sources[0].path), ("heldout", settings.data.held_out)):
        if not (Path(out) / "index.json").exists():
            found = prepare.run(folder / f"{name}.jsonl", Path(out), strict=True)
            found.show(as_json=False)


def _write(job: tuple[SyntheticConfig, ClipPlan, Path]) -> None:
    write_clip(*job)


if __name__ == "__main__":
    sys.exit(main())
