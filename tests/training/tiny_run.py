"""A run of a few tiny samples through the real pipeline: files, shards, workers, plans, training, checkpoints."""

import json
from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor

from data_pipelines.prepare import prepare
from experiments.base import RunConfig
from experiments.train_video_lm import train_on
from mmcp.config import load
from mmcp.parallel.mesh import build_mesh
from mmcp.training.metrics import read_metrics
from mmcp.training.run_folder import open_run_folder
from tests.data_pipelines.clips import write_clip

CONFIG = Path(__file__).with_name("tiny.yaml")
CASES = Path(__file__).parents[1] / "data" / "cases"


def write_shards(folder: Path) -> Path:
    """Write clips with and without sound, a manifest of video, sound, image and text, and its shards; return these."""
    clips = {name: folder / f"{name}.mp4" for name in ("loud", "mute", "long")}
    write_clip(str(clips["loud"]), frames=20, sound="aac")
    write_clip(str(clips["mute"]), frames=12)
    write_clip(str(clips["long"]), frames=30, sound="aac", sound_seconds=2.2)
    rows = [
        _row("loud", "what is shown?", "bars", video=clips["loud"]),
        _row("loud again", "and heard?", "clicks, each second", video=clips["loud"]),
        _row("mute", "sound?", "none", video=clips["mute"]),
        _row("long", "how long?", "three seconds", video=clips["long"]),
        _row("sound", "who speaks?", "a woman", audio=CASES / "B10_audio" / "speech_8k.wav"),
        _row("image", "what?", "a card", image=CASES / "B45_images" / "exif_6.jpg"),
        *(_row(f"text {i}", f"{i} + {i}?", str(2 * i)) for i in range(4)),
    ]
    manifest = folder / "manifest.jsonl"
    manifest.write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare(manifest, folder / "shards", strict=True)
    return folder / "shards"


def _row(name: str, question: str, answer: str, **media: Path) -> dict:
    items = [{"type": kind, kind: str(path)} for kind, path in media.items()]
    content = [*items, {"type": "text", "text": question}]
    return {"id": name, "messages": [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]}


def tiny_settings(shards: Path, folder: Path, *overrides: str) -> RunConfig:
    """Read the tiny config for these shards and this run folder."""
    return load(RunConfig, CONFIG, [f"folder={folder}", f"data.train={shards}", *overrides])


def train_here(settings: RunConfig, resume: bool = False) -> None:
    """Train on ranks that run already."""
    train_on(build_mesh(settings.mesh), settings, Path(settings.folder), resume=resume)


def train_in(pool, settings: RunConfig, *, resume: bool = False) -> list[dict]:
    """Train on the ranks of a RankPool; return the metrics of the run folder."""
    folder = open_run_folder(settings.folder, resume=resume)
    pool.run(train_here, settings, resume, ranks=settings.mesh.world, timeout=200.0)
    return read_metrics(folder)


def checkpoint_tensors(folder: Path, step: int) -> dict[str, Tensor]:
    """Read every tensor of a checkpoint as its files hold it: by file and name."""
    files = sorted((folder / "checkpoints" / f"step_{step}").glob("*.safetensors"))
    assert files, f"no checkpoint of step {step} in {folder}"
    return {f"{file.name}:{name}": tensor for file in files for name, tensor in load_file(file).items()}
