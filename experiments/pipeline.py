"""From sample numbers to planned and decoded steps: where data, encoders and plans meet."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Protocol

import numpy as np

from data_pipelines.clip import Rules, build_sequence
from data_pipelines.decode_units import decode_units, excerpt
from data_pipelines.decord_frames import backend_for
from data_pipelines.examine import Media
from data_pipelines.feature_cache import decode_missing, sound_digest
from data_pipelines.loader import Job, Loaded, Loader
from data_pipelines.manifest import Sample
from data_pipelines.media import MediaError
from data_pipelines.packing import pack_rows
from data_pipelines.shards import ShardSet
from data_pipelines.workers import WorkerError, WorkerPool
from encoders import Tokenizer
from encoders.mel import log_mel_raw, needed
from experiments.base import Planner, RunConfig
from mmcp.parallel.mesh import Mesh
from mmcp.sequence import TokenSequence, pack
from mmcp.sharding.cost import RowCosts, row_costs
from mmcp.sharding.ranges import as_indices
from mmcp.sharding.step import StepPlan
from mmcp.training.kept import KeptUnits
from mmcp.training.stage_clock import StageClock
from mmcp.training.status import exchange_status
from mmcp.training.step import StepRunner, StepWork
from mmcp.training.train import LoadedStep

JOB_UNITS = 128  # units decoded by one job at most, so that several workers can share a long clip


@dataclass(frozen=True, eq=False)
class Document:
    """A sample laid out as a sequence."""

    sample: Sample
    media: Mapping[str, Media]
    sequence: TokenSequence
    notes: tuple[str, ...]
    """What was reduced or is missing, in words."""


@dataclass(frozen=True, eq=False)
class PlannedStep:
    """A step before decoding."""

    plan: StepPlan
    documents: tuple[tuple[Document, ...], ...]
    """Per row: its documents in order."""
    refused: tuple[str, ...]
    """Samples that could not be laid out, with the reason; the same on every rank."""


@dataclass(frozen=True, eq=False)
class UnitJob:
    """What a decode job is for."""

    row: int
    document: int
    """Number of the document in its row."""
    units: tuple[int, ...]
    """Numbers of the units in the row."""


class Samples(Protocol):
    """What samples come from: a ShardSet, or anything that answers like one."""

    def __len__(self) -> int: ...

    def load(self, number: int, /) -> tuple[Sample, dict[str, Media]]:
        """Return a sample and what is known of its media."""


@dataclass(frozen=True)
class OneSample:
    """A single sample that answers like a shard set."""

    sample: Sample
    media: dict[str, Media]

    def __len__(self) -> int:
        return 1

    def load(self, _: int) -> tuple[Sample, dict[str, Media]]:
        return self.sample, self.media


@dataclass(frozen=True, eq=False)
class Pipeline:
    """Lays out samples, packs and plans them, and tells what one rank has to decode."""

    config: RunConfig
    tokenizer: Tokenizer
    shards: Samples
    planner: Planner
    encoders: Mapping[str, str] = field(default_factory=dict)
    """Digest by kind of each encoder whose features are kept (see experiments.features)."""

    @property
    def rules(self) -> Rules:
        model = self.config.model
        return Rules(text=self.tokenizer, image=model.image, video=model.video, audio=model.audio)

    def document(self, number: int) -> Document:
        """Lay out one sample. Raises ValueError naming it."""
        sample, media = self.shards.load(number)
        try:
            sequence, report = build_sequence(sample, media, self.config.clip, rules=self.rules)
        except MediaError as error:
            raise ValueError(f"sample '{sample.id}': {error}") from None
        if not len(sequence.label_positions):
            raise ValueError(f"sample '{sample.id}' has no answer to train on; add an assistant's turn")
        notes = [*report.budget.reduced, *(f"{name}: no sound" for name in report.without_sound)]
        for name, item in media.items():
            if why := self._backend(item)[1]:
                notes.append(f"{name}: read by pyav, not {self.config.data.backend}: {why}")
        if report.repeated_stamps:
            notes.append(f"{report.repeated_stamps} frame groups are stamped with the same time as the one before")
        return Document(sample, media, sequence, tuple(notes))

    def _backend(self, media: Media) -> tuple[str, str]:
        """Return what reads the pictures of a file, and why it is not what the config says."""
        if media.kind != "video" or media.clip is None:
            return "pyav", ""
        return backend_for(self.config.data.backend, media.clip)

    def plan(self, numbers: Sequence[int]) -> PlannedStep:
        """Lay out, pack and plan the samples of one step, in this order."""
        documents, refused = [], []
        for number in numbers:
            try:
                documents.append(self.document(number))
            except ValueError as error:
                refused.append(str(error))
        return self.plan_documents(documents, refused)

    def plan_documents(self, documents: Sequence[Document], refused: Sequence[str] = ()) -> PlannedStep:
        """Pack documents into rows and plan these."""
        lengths = [document.sequence.num_tokens for document in documents]
        names = [document.sample.id for document in documents]
        packed = pack_rows(lengths, max(self.config.data.row_tokens, *lengths, 0), names=names)
        by_row = tuple(tuple(documents[i] for i in row) for row in packed)
        rows = [pack([document.sequence for document in row]) for row in by_row]
        return PlannedStep(self.planner.step(rows), by_row, tuple(refused))

    def jobs(self, step: PlannedStep, mesh: Mesh) -> list[Job]:
        """List what this rank decodes for a step, by row, document and track."""
        jobs = []
        for row in step.plan.groups[mesh.data.index]:
            if row is not None:
                jobs += list(self._row_jobs(step, row, as_indices(step.plan.plans[row].decode[mesh.cp.index])))
        return jobs

    def _row_jobs(self, step: PlannedStep, row: int, units: np.ndarray) -> Iterator[Job]:
        sequence = step.plan.rows[row]
        tracks: dict[tuple[int, str, str, int], list[int]] = {}
        for unit in units.tolist():
            segment = sequence.unit_segment(unit)
            key = (segment.document, segment.kind, segment.source, segment.stream)
            tracks.setdefault(key, []).append(unit)
        costs = row_costs(sequence, self.planner.costs)
        for (document, kind, source, _), numbers in tracks.items():
            media = step.documents[row][document].media[source]
            backend = self._backend(media)[0]
            for start in range(0, len(numbers), JOB_UNITS):
                part = numbers[start : start + JOB_UNITS]
                own = [sequence.units[unit] for unit in part]
                clip = None if media.clip is None else excerpt(kind, media.clip, own, needed)
                mel = partial(log_mel_raw, bins=self.config.model.audio.bins)
                is_kept = kind in self.encoders
                args = (kind, media.file, clip, own, mel, needed)
                yield Job(
                    UnitJob(row, document, tuple(part)),
                    step.documents[row][document].sample.id,
                    partial(decode_missing if is_kept else decode_units, backend=backend),
                    (*self._kept_by(sequence, numbers, kind), *args) if is_kept else args,
                    cost_ns=decode_ns(costs, np.array(part)),
                    num_bytes=sum(self._bytes(kind, unit.size) for unit in own),
                )

    def _kept_by(self, sequence: TokenSequence, units: list[int], kind: str) -> tuple:
        """What the keys of a track's features are made of, beside file and units."""
        own, sound = sequence.unit_segment(units[0]), ""
        if kind == "audio":
            heard = [
                unit
                for segment in sequence.segments
                if (segment.kind, segment.document) == (kind, own.document)
                and (segment.source, segment.stream) == (own.source, own.stream)
                for unit in segment.units
            ]
            sound = sound_digest(heard)
        features = self.config.features
        return (features.folder, features.max_mb << 20), self.encoders[kind], own.stream, sound

    def _bytes(self, kind: str, size: tuple[int, ...]) -> int:
        """Bytes of a decoded unit: three uint8 colours, or float32 mel bins."""
        return prod(size) * (3 if kind != "audio" else 4 * self.config.model.audio.bins)


def decode_ns(costs: RowCosts, units: np.ndarray) -> int:
    """Nanoseconds to decode some units of one track: frames or packets that they share are decoded once."""
    spans = costs.spans[units]
    shared = min(int((spans[:, 1] - spans[:, 0]).sum()), int(spans[:, 1].max() - spans[:, 0].min()))
    return shared * int(costs.frame_ns[units].max()) + int(costs.output_ns[units].sum())


def collect(loaded: Loaded[PlannedStep]) -> LoadedStep:
    """Sort a step's decoded units by row, and its failures by document."""
    arrays: dict[int, dict[int, np.ndarray]] = {}
    faults: dict[tuple[int, int], str] = {}
    kept: dict[int, KeptUnits] = {}
    seconds, frames, notes, decoded = 0.0, 0, [], []
    for job, result in loaded.results:
        key = job.key
        if isinstance(result, WorkerError):
            faults[(key.row, key.document)] = f"sample '{job.sample}': {result}"
            continue
        header, values = result
        found = dict(zip(key.units, values, strict=True))
        if "keys" in header:
            found = _sort_kept(kept.setdefault(key.row, KeptUnits()), found, header)
        arrays.setdefault(key.row, {}).update(found)
        seconds, frames = seconds + header["seconds"], frames + header["frames"]
        notes += header["notes"]
        decoded.append((header["began"], header["seconds"]))
    return LoadedStep(
        step=loaded.step,
        work=StepWork(loaded.payload.plan, arrays, kept=kept),
        faults=faults,
        refused=loaded.payload.refused,
        notes=tuple(notes),
        decode_s=seconds,
        waited_s=loaded.waited_s,
        frames_decoded=frames,
        decoded=tuple(decoded),
        reduced=tuple(
            f"sample '{document.sample.id}': {'; '.join(document.notes)}"
            for row in loaded.payload.documents
            for document in row
            if document.notes
        ),
    )


def _sort_kept(kept: KeptUnits, found: dict[int, np.ndarray], header: dict) -> dict[int, np.ndarray]:
    """Note which of the arrays are kept features, and the keys of the others; return these."""
    decoded = {}
    for (unit, values), store_as, loudest in zip(found.items(), header["keys"], header["loudest"], strict=True):
        if store_as:
            decoded[unit] = values
            kept.keys[unit] = store_as.replace("?", "")
        else:
            kept.features[unit] = values
            kept.loudest[unit] = loudest
    return decoded


def read_steps(
    pipeline: Pipeline, mesh: Mesh, pool: WorkerPool, *, plan: Callable[[int], PlannedStep], steps: range
) -> Iterator[Loaded[PlannedStep]]:
    """Yield steps in order, planned by `plan` and decoded as far as this rank needs."""

    def prepare(step: int) -> tuple[PlannedStep, list[Job]]:
        planned = plan(step)
        return planned, pipeline.jobs(planned, mesh)

    data = pipeline.config.data
    with Loader(
        prepare,
        pool,
        steps=steps,
        prefetch=data.prefetch,
        lookahead=data.lookahead,
        most_bytes=data.prefetch_mb << 20,
    ) as loader:
        yield from loader


def held_out_loss(pipeline: Pipeline, runner: StepRunner, pool: WorkerPool) -> float:
    """Return the mean token loss over `data.held_out_samples` held-out samples; the same on every rank."""
    data = pipeline.config.data
    held_out = replace(pipeline, shards=ShardSet.open(data.held_out))
    numbers = range(0, len(held_out.shards), -(-len(held_out.shards) // data.held_out_samples))
    batches = [numbers[i : i + data.documents_per_step] for i in range(0, len(numbers), data.documents_per_step)]
    loss, labels = 0.0, 0
    plan, steps = (lambda i: held_out.plan(batches[i])), range(len(batches))
    for step in read_steps(held_out, runner.mesh, pool, plan=plan, steps=steps):
        work, _ = agree_on(collect(step), runner)
        loss += runner.score(work, StageClock(runner.device))[0].item()
        labels += work.label_tokens
    return loss / max(1, labels)


def agree_on(step: LoadedStep, runner: StepRunner) -> tuple[StepWork, tuple[str, ...]]:
    """Make samples that any rank could not read void on all ranks; return why they could not be."""
    status = exchange_status(step.work.plan, step.faults, stop=False, group=runner.mesh.world, device=runner.device)
    return replace(step.work, void=status.void), status.messages
