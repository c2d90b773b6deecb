"""From what a user names to one row that can be planned: a clip, a sample of shards or of a manifest, a run."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from data_pipelines.clip import build_sequence, explain_sequence
from data_pipelines.examine import Media, examine
from data_pipelines.explain import KeptUnit
from data_pipelines.manifest import Item, RowError, Sample, read_lines
from data_pipelines.media import MediaFile
from data_pipelines.prepare import check_row
from data_pipelines.shards import KIND_OF, ShardSet
from experiments.base import RunConfig
from experiments.pipeline import OneSample, Pipeline, Samples
from mmcp.sequence import KINDS, TokenSequence

QUESTION = "What happens in this recording?"
ANSWER = "A clip alone has no answer. This text of about a hundred bytes stands for one, with its label rows."


@dataclass(frozen=True)
class Row:
    """A row, or a plan of one, and what is known of it in words."""

    title: str
    sequence: TokenSequence | None
    """None when only its plan is left."""
    facts: dict[str, str]
    reasons: tuple[dict[str, Any], ...] | None = None
    """Why each unit is there, as JSON values; None where that was not asked for."""


def find_row(source: str, settings: RunConfig, *, sample: int | None = None, explain: bool = False) -> Row:
    """Lay out a clip, or sample number `sample` (None: the first) of a manifest (.jsonl) or of shards.

    explain: also say why each unit is there
    Raises ValueError for what is none of these or cannot be used.
    """
    path = Path(source)
    if path.is_file() and path.suffix.lower() == ".jsonl":
        return _sample_row(_manifest_sample(path, sample or 0), 0, settings, explain=explain)
    if not path.is_file() or path.suffix.lower() == ".tar":
        return _sample_row(ShardSet.open(source), sample or 0, settings, explain=explain)
    if sample is not None:
        raise ValueError(f"--sample {sample}: '{source}' is one clip; leave the option out, or name a manifest")
    return _sample_row(clip_sample(path), 0, settings, explain=explain)


def run_row(folder: str, settings: RunConfig, *, sample: int | None = None, explain: bool = False) -> Row:
    """Lay out the first row of a run's first step, or one sample of its training data.

    explain: also say why each unit is there; of one sample only
    """
    if explain and sample is None:
        raise ValueError(f"--explain: the first step of '{folder}' packs several samples; name one with --sample N")
    shards = settings.data.open_train()
    if sample is not None:
        return _sample_row(shards, sample, settings, explain=explain)
    numbers = shards.order(settings.seed).take(settings.data.documents_per_step)
    step = _pipeline(settings, shards).plan(numbers)
    if not step.documents:
        raise ValueError(f"no sample of the first step can be laid out; the first: {step.refused[0]}")
    names = [document.sample.id for document in step.documents[0]]
    facts = {"row": f"the first of {len(step.documents)} rows of the first step: samples {', '.join(names)}"}
    row = step.plan.rows[0]
    return Row(f"{Path(folder).resolve().name}, first step", row, {**facts, **_content(row)})


def _sample_row(samples: Samples, number: int, settings: RunConfig, *, explain: bool) -> Row:
    """Lay out one sample as a row of its own."""
    if not 0 <= number < len(samples):
        raise ValueError(f"--sample {number}: there are {len(samples)} samples, numbered from 0")
    sample, media = samples.load(number)
    rules = _pipeline(settings, samples).rules
    sequence, report = build_sequence(sample, media, settings.clip, rules=rules)
    budget = report.budget
    facts = {
        "sample": sample.id,
        **_content(sequence),
        "budget": f"{budget.tokens:,} of {budget.limit:,} tokens",
        **({"seen and heard": "; ".join(budget.detail)} if budget.detail else {}),
    }
    if budget.reduced:
        facts["reduced"] = f"{'; '.join(budget.reduced)} (the finest setting needs {budget.full_tokens:,} tokens)"
    if report.without_sound:
        facts["no sound in"] = ", ".join(report.without_sound)
    row = Row(sample.id, sequence, facts)
    if not explain:
        return row
    kept = explain_sequence(sample, media, settings.clip, rules=rules)
    return replace(row, reasons=tuple(_reason(unit, media) for unit in kept))


def _reason(kept: KeptUnit, media: Mapping[str, Media]) -> dict[str, Any]:
    """Say why a unit is there, and when each of its frames is shown."""
    clip = media[kept.source].clip
    frames = dict.fromkeys(kept.unit.items) if kept.kind == "video" else ()
    times = [float(clip.frame_time(frame)) for frame in frames] if clip is not None else []
    place, tokens = kept.next_upgrade or (None, None)
    return {
        **({"times_s": times} if times else {}),
        "halvings": kept.halvings,
        "enlargements": kept.enlargements,
        "lead": kept.lead,
        "next_upgrade": place,
        "next_tokens": tokens,
        "upgrades_taken": kept.taken,
        "upgrades": kept.upgrades,
        "why": kept.why,
    }


def _pipeline(settings: RunConfig, samples: Samples) -> Pipeline:
    tokenizer = settings.tokenizer.build()
    return Pipeline(settings, tokenizer, samples, settings.planner(tokenizer.vocab_size))


def _manifest_sample(manifest: Path, number: int) -> OneSample:
    """Read and check one row of a manifest. Raises RowError naming row and file."""
    rows = list(islice(read_lines(manifest), max(0, number) + 1))
    if not 0 <= number < len(rows):
        raise ValueError(f"--sample {number}: {manifest} has no such row; they are numbered from 0")
    line, text = rows[number]
    checked = check_row(text, str(manifest), line)
    if isinstance(checked, RowError):
        raise checked
    sample, media = checked
    return OneSample(sample, {str(item.file): item for item in media})


def clip_sample(path: Path) -> OneSample:
    """Put a clip into a conversation of its own. Raises MediaError."""
    name, kind = str(path), KIND_OF.get(path.suffix.lower().removeprefix("."), "video")
    media = examine(kind, MediaFile(name))
    question = ("user", (Item(kind=kind, media=name), Item(kind="text", text=QUESTION)))
    answer = ("assistant", (Item(kind="text", text=ANSWER),))
    return OneSample(Sample(id=path.name, row=1, turns=(question, answer)), {name: media})


def _content(sequence: TokenSequence) -> dict[str, str]:
    """Count tokens and units of each kind and the labels, and tell what time the media span."""
    tokens, units = Counter[str](), Counter[str]()
    for segment in sequence.segments:
        tokens[segment.kind] += segment.num_tokens
        units[segment.kind] += len(segment.units)
    words = [
        f"{tokens[kind]:,} {kind}" + (f" ({units[kind]:,} units)" if units[kind] else "")
        for kind in KINDS
        if tokens[kind]
    ]
    labels = len(sequence.label_positions)
    content = {"tokens": f"{sequence.num_tokens:,}: {', '.join(words)}; {labels:,} of them are trained"}
    if sequence.units:
        start, end = min(unit.start for unit in sequence.units), max(unit.end for unit in sequence.units)
        content["media"] = f"{float(start):,.2f} s to {float(end):,.2f} s"
    return content
