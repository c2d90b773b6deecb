"""The `mmcp` command: one table of verbs, each a job that is imported only when it is asked for."""

import argparse
import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Verb:
    """A word of the command line and the job it runs."""

    name: str
    summary: str
    """One line; shown in the overview."""
    example: str
    """A command that can be copied."""
    job: str
    """`module:function`; it gets the arguments by name and returns an Outcome or None."""
    add_arguments: Callable[[argparse.ArgumentParser], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0 only on success, 1 for an error, 2 for a command that cannot be read.

    Errors are one line, value, reason and remedy; `--debug` or MMCP_DEBUG=1 adds the traceback.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return 0 if words else 2
    if words[0] not in VERBS:
        near = difflib.get_close_matches(words[0], VERBS, n=1, cutoff=0.5)
        hint = f"did you mean '{near[0]}'?" if near else f"use one of {', '.join(VERBS)}"
        print(f"error: unknown verb '{words[0]}'; {hint}", file=sys.stderr)
        return 2
    verb = VERBS[words[0]]
    options = vars(_parser(verb).parse_intermixed_args([_as_path(word) for word in words[1:]]))
    debug = options.pop("debug") or os.environ.get("MMCP_DEBUG", "0") not in ("", "0")
    try:
        return _run(verb, options)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        if debug:
            traceback.print_exc()
        if not _is_told_by_another(error):
            print(f"error: {_one_line(error)}", file=sys.stderr)
        return 1


def _run(verb: Verb, options: dict) -> int:
    as_json = options.pop("json", False)
    module, function = verb.job.split(":")
    outcome = getattr(importlib.import_module(module), function)(**options)
    if outcome is None:
        return 0
    outcome.show(as_json=as_json)
    return 0 if outcome.is_ok else 1


def _as_path(word: str) -> str:
    """Take a word with one leading dash for a file where there is such a file; options of verbs begin with two."""
    is_file = word.startswith("-") and not word.startswith("--") and os.path.exists(word)
    return os.path.join(os.curdir, word) if is_file else word


def _is_told_by_another(error: Exception) -> bool:
    """Whether rank 0 of the processes that torchrun started tells the same: what is wrong with a config."""
    from mmcp.config import ConfigError

    return isinstance(error, ConfigError) and os.environ.get("RANK", "0") != "0"


def _one_line(error: Exception) -> str:
    """Say what is wrong; of an error that is not the user's, also its kind and the place it comes from."""
    if isinstance(error, ValueError | OSError):
        return str(error) or type(error).__name__
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({place.filename}:{place.lineno}); --debug shows the traceback"


def _overview() -> str:
    width = max(map(len, VERBS))
    lines = [f"  {verb.name:<{width}}  {verb.summary}" for verb in VERBS.values()]
    head = ["usage: mmcp VERB ...", "", "Train video-language models on long clips, over context-parallel ranks.", ""]
    tail = [
        "",
        "`mmcp VERB --help` tells the options and an example; the examples use what `make demo` leaves in runs/.",
    ]
    return "\n".join([*head, *lines, *tail])


def _parser(verb: Verb) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"mmcp {verb.name}",
        description=verb.summary,
        epilog=f"example: {verb.example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verb.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the result as JSON and nothing else")


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, metavar="CONFIG", help="YAML file; experiments/configs/ has some")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="settings that win over the file, such as seed=1"
    )


def _add_ranks(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, metavar="N", help="processes on this machine (default: the config's mesh)")


def _prepare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("manifest", type=Path, metavar="MANIFEST", help="JSONL file, one sample a line")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="new folder for shards and index")
    bad = parser.add_mutually_exclusive_group()
    bad.add_argument("--strict", action="store_true", help="stop at the first row that cannot be used")
    bad.add_argument("--skip-bad", action="store_true", help="exit with 0 although rows were rejected")
    parser.add_argument("--workers", type=int, metavar="N", help="processes that examine media (default: all cores)")
    parser.add_argument(
        "--part", default="1/1", metavar="I/N", help="only the I-th of N runs of rows; DIR then holds all parts"
    )
    parser.add_argument(
        "--outside-mb", type=int, metavar="MB", help="media files of at least this size stay where they are"
    )
    _add_json(parser)


def _train(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    _add_ranks(parser)
    parser.add_argument(
        "--resume", action="store_true", help="go on from the latest checkpoint, on any number of ranks"
    )
    parser.add_argument("--dry-run", action="store_true", help="only check everything and print all settings")


def _eval(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument(
        "--blank", action="store_true", help="with black pictures and silence: what does text alone give away?"
    )
    _add_ranks(parser)
    _add_json(parser)


def _export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER", help="new folder for the model")
    types = ("float32", "bfloat16", "float16")
    parser.add_argument("--dtype", choices=types, default="float32", help="type of the weights in the files")
    _add_json(parser)


def _ask(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="folder of a run")
    parser.add_argument("question", metavar="QUESTION", help="what to ask about the clip")
    parser.add_argument("--video", type=Path, required=True, metavar="FILE", help="the clip")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="draw the answer at this temperature (0: no draw)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw; the same on any number of ranks")
    _add_ranks(parser)
    _add_json(parser)


def _inspect(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", nargs="?", metavar="SOURCE", help="a clip, a manifest (.jsonl), a folder of shards, or a run"
    )
    parser.add_argument("--workload", metavar="NAME", help="a named family of rows, or all of them, in place of SOURCE")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="CONFIG",
        help="YAML file of a model and its token budget (default: the run's, else long_clips.yaml)",
    )
    parser.add_argument("--sample", type=int, metavar="N", help="which sample of SOURCE, from 0")
    parser.add_argument("--budget", type=int, metavar="N", help="tokens it may have (default: the config's)")
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="context-parallel ranks to plan for (default: the config's)"
    )
    parser.add_argument("--strategy", metavar="NAME", help="how tokens are shared out (default: the config's)")
    parser.add_argument("--compare", action="store_true", help="plan with every strategy")
    parser.add_argument(
        "--cap-bytes",
        type=int,
        metavar="N",
        help="most resident bytes of a rank (default: the config's; 0: any number)",
    )
    parser.add_argument("--explain", action="store_true", help="say for each frame why it was kept, when and where")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page that works offline")
    parser.add_argument("--png", type=Path, metavar="FILE", help="also write a figure")
    parser.add_argument(
        "--trace", type=Path, metavar="FILE", help="of a run: its steps for Perfetto or chrome://tracing"
    )
    _add_json(parser)


def _plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="NAME", help="a public size such as Qwen2.5-7B, or a folder with a Hugging Face config.json"
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="CONFIG",
        help="YAML file or run whose model, encoders, rates and type are used (default: long_clips.yaml)",
    )
    parser.add_argument("--clip", metavar="CLIP", help="a length such as 1h@1fps, or a file")
    parser.add_argument("--tokens", type=int, metavar="N", help="tokens of a row of text, instead of a clip")
    parser.add_argument("--labels", type=int, metavar="N", help="trained tokens of a row (default: all of --tokens)")
    parser.add_argument("--rows", type=int, default=1, metavar="N", help="rows of an optimizer step (default: 1)")
    parser.add_argument("--gpus", type=int, metavar="N", help="devices, all of one kind")
    parser.add_argument("--gpu", default="H100", metavar="NAME", help="A100, H100, H200, or a YAML file of a device")
    parser.add_argument(
        "--offload", default="", metavar="PARTS", help="what may wait on the host: optimizer, activations or both"
    )
    parser.add_argument(
        "--simulate", type=int, metavar="N", help="also run the code of all N ranks on tensors without data"
    )
    _add_json(parser)


def _verify(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--synthetic", action="store_true", help="draw rows and media instead of reading data.train")
    _add_ranks(parser)
    _add_json(parser)


def _ablate(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    _add_ranks(parser)
    _add_json(parser)


def _bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="what to measure; a wrong name lists them all")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings of the measurement")
    _add_json(parser)


def _doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="do not start ranks to see whether they can talk")
    _add_json(parser)


VERBS = {
    verb.name: verb
    for verb in (
        Verb(
            "prepare",
            "turn media and a JSONL manifest into shards and an index",
            "mmcp prepare runs/demo-data/train.jsonl --out shards/train",
            "experiments.prepare:run",
            _prepare,
        ),
        Verb(
            "train",
            "train a video-language model over context-parallel ranks",
            "mmcp train experiments/configs/demo.yaml folder=runs/mine optim.total_steps=100 --ranks 2",
            "experiments.train_video_lm:run",
            _train,
        ),
        Verb(
            "eval",
            "measure a run on held-out clips",
            "mmcp eval runs/demo --blank",
            "experiments.evaluate:run",
            _eval,
        ),
        Verb(
            "ask",
            "answer one question about one clip",
            'mmcp ask runs/demo "Which color flashed?" --video runs/demo-data/media/heldout_00000.mp4',
            "experiments.ask:run",
            _ask,
        ),
        Verb(
            "export",
            "write the decoder of a run as a folder that transformers loads",
            "mmcp export runs/demo --out runs/demo-model",
            "experiments.export:run",
            _export,
        ),
        Verb(
            "inspect",
            "show how a sequence lies over ranks and how even the work is; nothing is decoded",
            "mmcp inspect runs/demo-data/media/heldout_00000.mp4 --ranks 4 --compare --html balance.html",
            "experiments.inspect_plan:run",
            _inspect,
        ),
        Verb(
            "plan",
            "predict memory, traffic and time of a step on given GPUs, and choose the mesh",
            "mmcp plan --model Qwen2.5-7B --clip 1h@1fps --gpus 8 --gpu H100",
            "experiments.plan:run",
            _plan,
        ),
        Verb(
            "verify",
            "prove here that N ranks compute what one rank does",
            "mmcp verify experiments/configs/demo.yaml --ranks 3 --json",
            "experiments.verify:run",
            _verify,
        ),
        Verb(
            "ablate",
            "compare attention variants at equal tokens",
            "mmcp ablate experiments/configs/ablate.yaml smoke=true",
            "experiments.ablate_attention:run",
            _ablate,
        ),
        Verb(
            "bench",
            "measure side by side, on this machine",
            "mmcp bench attention smoke=true",
            "experiments.bench:run",
            _bench,
        ),
        Verb(
            "doctor",
            "say what this machine has and lacks, and what follows",
            "mmcp doctor",
            "mmcp.report.doctor:run",
            _doctor,
        ),
    )
}

if __name__ == "__main__":
    sys.exit(main())
