"""Ask a trained model one question about one clip.

Run:     mmcp ask runs/demo "Which color flashed?" --video clip.mp4
"""

import time
from dataclasses import dataclass
from pathlib import Path

from data_pipelines.examine import Media, examine
from data_pipelines.manifest import Item, Sample
from data_pipelines.media import MediaFile
from experiments.base import RunConfig
from experiments.evaluate import Answering, open_run
from mmcp.parallel.launch import launch
from mmcp.report.outcome import Outcome

ROOM = 64  # tokens an answer may have


@dataclass(frozen=True)
class OneQuestion:
    """A single sample made of a clip and a question."""

    media: Media
    question: str

    def __len__(self) -> int:
        return 1

    def load(self, number: int) -> tuple[Sample, dict[str, Media]]:
        name = self.media.file.path
        asked = ("user", (Item(kind="video", media=name), Item(kind="text", text=self.question)))
        answer = ("assistant", (Item(kind="text", text=""),))
        return Sample(id=name, row=1, turns=(asked, answer)), {name: self.media}


def run(run: Path, question: str, *, video: Path, ranks: int | None = None) -> Outcome:
    """Answer a question about a clip. Raises ValueError for a clip that cannot be used."""
    settings, saved = open_run(run, ranks)
    media = examine("video", MediaFile(str(video)))
    began = time.monotonic()
    record = launch(ask, settings.mesh.world, settings, saved, OneQuestion(media, question))
    record |= {"video": str(video), "checkpoint": saved.name, "seconds": time.monotonic() - began}
    seen = f"{record['frames']} frames and {record['sound_windows']} windows of sound, {record['tokens']} tokens"
    span = f"{record['start']:.2f} s to {record['end']:.2f} s"
    return Outcome(record=record, tables=[record["answer"], f"[dim]seen: {span}, {seen}[/dim]"])


def ask(settings: RunConfig, saved: Path, question: OneQuestion) -> dict:
    """Answer on this rank's part. Raises ValueError when the clip cannot be laid out or read."""
    with Answering(settings, saved, question, room=ROOM) as answering:
        answers = list(answering.answer_all())
        if not answers:
            raise ValueError("; ".join(answering.refused))
        document, answer = answers[0]
        if answer is None:
            raise ValueError(f"{document.sample.id} could not be read; see the messages above")
        units = document.sequence.units
        kinds = [document.sequence.unit_segment(i).kind for i in range(len(units))]
        frames = {frame for unit, kind in zip(units, kinds, strict=True) if kind == "video" for frame in unit.items}
        return {
            "answer": answer,
            "tokens": document.sequence.num_tokens,
            "frames": len(frames),
            "sound_windows": kinds.count("audio"),
            "start": float(min(unit.start for unit in units)),
            "end": float(max(unit.end for unit in units)),
        }
