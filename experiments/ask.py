"""Ask a trained model one question about one clip.

Run:     mmcp ask runs/demo "Which color flashed?" --video clip.mp4
         mmcp ask runs/demo "What happens?" --video clip.mp4 --ranks 4 --temperature 0.7 --seed 1
"""

import time
from pathlib import Path

from rich.text import Text

from data_pipelines.examine import examine
from data_pipelines.manifest import Item, Sample
from data_pipelines.media import MediaFile
from experiments.base import RunConfig
from experiments.evaluate import Answering, open_run
from experiments.pipeline import OneSample
from mmcp.generate import Sampling
from mmcp.parallel.launch import launch
from mmcp.report.outcome import Outcome

ROOM = 64  # tokens an answer may have


def run(
    run: Path, question: str, *, video: Path, ranks: int | None = None, temperature: float = 0.0, seed: int = 0
) -> Outcome:
    """Answer a question about a clip. Raises ValueError for a clip that cannot be used.

    temperature, seed: as in mmcp.generate.Sampling
    """
    sampling = Sampling(temperature=temperature, seed=seed)
    settings, saved = open_run(run, ranks)
    media = examine("video", MediaFile(str(video)))
    began = time.monotonic()
    asked = ("user", (Item(kind="video", media=str(video)), Item(kind="text", text=question)))
    answer = ("assistant", (Item(kind="text", text=""),))
    sample = Sample(id=str(video), row=1, turns=(asked, answer))
    record = launch(ask, settings.mesh.world, settings, saved, OneSample(sample, {str(video): media}), sampling)
    record |= {"video": str(video), "checkpoint": saved.name, "seconds": time.monotonic() - began}
    seen = f"{record['frames']} frames and {record['sound_windows']} windows of sound, {record['tokens']} tokens"
    span = f"{record['start']:.2f} s to {record['end']:.2f} s"
    return Outcome(record=record, tables=[Text(record["answer"]), f"[dim]seen: {span}, {seen}[/dim]"])


def ask(settings: RunConfig, saved: Path, question: OneSample, sampling: Sampling) -> dict:
    """Answer on this rank's part. Raises ValueError when the clip cannot be laid out or read."""
    with Answering(settings, saved, question, room=ROOM, sampling=sampling) as answering:
        answers = list(answering.answer_all())
        if answering.refused:
            raise ValueError("; ".join(answering.refused))
        document, answer = answers[0]
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
