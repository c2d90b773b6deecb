"""What does a step of a tiny Qwen2.5-VL on a real clip cost when each frame is decoded and encoded once, not per rank?

Run:     mmcp bench hf site=FOLDER [layers=4]     (FOLDER: where DeepSpeed is installed; site='' leaves it out)
Smoke:   mmcp bench hf seconds=10 layers=1 rounds=1 steps=1 site=''
Expect:  the same loss; on 2 ranks at least 1.35 times faster than the usual way where half of the one-rank step is
         decoding and encoding (no overhead at all would give 1.5), 1.5 times where it is two thirds.
Result:  experiments/LOG.md, entry "hf".

    one     the unmodified model on one process
    usual   DeepSpeed Ulysses attention; every rank decodes and encodes the whole clip, as its data loader and the
            model's own forward have it, and keeps its part of the embeddings
    mmcp    parallelize(model, mesh) with deferred pixels

Each system runs in turn, with one thread a rank. `DeepSpeed`'s data loader adapter itself cannot split a batch with
pixels; the recipe around its attention is therefore written here.
"""

import os
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from pydantic import PositiveInt
from rich.table import Table
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from data_pipelines.container import ClipIndex
from data_pipelines.decode import decode_frames
from data_pipelines.demux import read_index
from experiments.long_clip import LongClip, write_clip
from mmcp.config import config
from mmcp.config.load import build
from mmcp.config.source import Source
from mmcp.integrations.transformers import DeferredPixels, Step, average_gradients, parallelize
from mmcp.parallel.collectives import all_gather_json
from mmcp.parallel.launch import launch
from mmcp.parallel.mesh import Mesh, MeshConfig, build_mesh, process_group
from mmcp.report.outcome import Outcome

SIZE = (168, 224)  # of a frame as the tower sees it, in pixels
PATCH, MERGE, VOCABULARY, VIDEO = 14, 2, 2048, 2000
SYSTEMS = ("one", "usual", "mmcp")


@config
class HfBench:
    """What is measured."""

    seconds: PositiveInt = 48
    """Of the clip, at 10 frames a second of 1280 x 720, of which two are shown."""
    tower_layers: PositiveInt = 2
    layers: PositiveInt = 9
    """Of the language model: with 9, decoding and encoding are half of the one-rank step, with 4 two thirds."""
    rounds: PositiveInt = 3
    """Alternations of the systems; medians are over all of their steps."""
    steps: PositiveInt = 2
    """Timed steps of each run, after one that is not."""
    site: str = os.environ.get("PEERS_SITE", "")
    """Folder that DeepSpeed is installed in; without one the usual way is left out."""


def run(overrides: Sequence[str] = ()) -> Outcome:
    """Measure the systems in turn. Raises ValueError for a folder without DeepSpeed."""
    settings = build(HfBench, Source(), overrides)
    if settings.site and not Path(settings.site, "deepspeed").is_dir():
        raise ValueError(
            f"site='{settings.site}' holds no deepspeed; give the folder of the peers' setup.sh, or site=''"
        )
    systems = [name for name in SYSTEMS if name != "usual" or settings.site]
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in systems}
    with tempfile.TemporaryDirectory() as folder:
        clip = LongClip(seconds=settings.seconds, height=720, width=1280)
        write_clip(clip, Path(folder, "clip.mp4"))
        for _ in range(settings.rounds):
            for name in systems:
                lines[name].append(launch(measure, 1 if name == "one" else 2, name, settings, f"{folder}/clip.mp4"))
    rows = [_summary(name, found) for name, found in lines.items()]
    times = {row["system"]: row["step_s"] for row in rows}
    one = rows[0]
    record = {
        "rows": rows,
        "decode_and_encode_share": round((one["decode_s"] + one["encode_s"]) / one["step_s"], 3),
        "faster_than_usual": round(times["usual"] / times["mmcp"], 3) if "usual" in times else None,
        "faster_than_one": round(times["one"] / times["mmcp"], 3),
    }
    is_equal = all(abs(row["loss"] - one["loss"]) < 1e-4 * one["loss"] for row in rows)
    return Outcome(record=record, tables=[_table(record)], is_ok=is_equal)


def measure(system: Literal["one", "usual", "mmcp"], settings: HfBench, file: str) -> dict[str, Any]:
    """Time steps of a system on this rank; what all ranks together did."""
    torch.set_num_threads(1)
    with process_group() as device:
        mesh = build_mesh(MeshConfig(ulysses=dist.get_world_size()), device=device)
        clip = Clip(file)
        model = make_model(settings)
        step = _steps(settings)[system](model, mesh, clip)
        start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        seconds, loss = [], 0.0
        for number in range(settings.steps + 1):
            clip.forget()
            model.zero_grad(set_to_none=True)
            dist.barrier()
            begin = time.monotonic()
            loss = step()
            if number:
                seconds.append(time.monotonic() - begin)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) / 1024
        mine = {
            "seconds": seconds,
            "loss": loss,
            "decode_s": clip.seconds,
            "decoded": clip.decoded,
            "encoded": clip.encoded,
            "grown_mb": grown,
        }
        ranks = all_gather_json(mine, group=mesh.world, name="bench")
        encode_s = _encode_seconds(model, clip) if system == "one" else 0.0
    return {
        "seconds": [max(times) for times in zip(*(rank["seconds"] for rank in ranks), strict=True)],
        "loss": ranks[0]["loss"],
        "decode_s": max(rank["decode_s"] for rank in ranks),
        "encode_s": encode_s,
        "frames_decoded": sum(rank["decoded"] for rank in ranks),
        "frames_encoded": sum(rank["encoded"] for rank in ranks),
        "grown_mb": max(rank["grown_mb"] for rank in ranks),
    }


@dataclass
class Clip:
    """Two frames a second of a file, in pairs, as Qwen2.5-VL's patches; counts what is decoded and encoded."""

    file: str
    seconds: float = 0.0
    decoded: int = 0
    encoded: int = 0
    index: ClipIndex = field(init=False)

    def __post_init__(self):
        self.index = read_index(self.file)
        assert self.index.video is not None
        self.frames = np.arange(0, self.index.video.num_frames, 5)[: self.index.video.num_frames // 10 * 2]

    @property
    def grid(self) -> tuple[int, int, int]:
        return len(self.frames) // 2, SIZE[0] // PATCH, SIZE[1] // PATCH

    def forget(self) -> None:
        """Begin to count anew."""
        self.seconds, self.decoded, self.encoded = 0.0, 0, 0

    def patches(self, steps: list[int]) -> Tensor:
        """Decode pairs of frames: [patches, 3 * 2 * 14 * 14]."""
        begin = time.monotonic()
        wanted = self.frames.reshape(-1, 2)[steps].ravel()
        found = decode_frames(self.file, self.index, wanted.tolist(), SIZE)
        (_, h, w), t = self.grid, len(steps)
        x = torch.from_numpy(found.pixels).float().div_(127.5).sub_(1)  # [2 t, H, W, 3]
        x = x.view(t, 2, h // MERGE, MERGE, PATCH, w // MERGE, MERGE, PATCH, 3).permute(0, 2, 5, 3, 6, 8, 1, 4, 7)
        self.decoded += found.num_decoded
        self.encoded += len(wanted)
        patches = x.reshape(t * h * w, -1)
        self.seconds += time.monotonic() - begin
        return patches

    def steps(self) -> list[Step]:
        """Say what must be decoded for each pair."""
        track = self.index.video
        assert track is not None
        pairs = self.frames.reshape(-1, 2)
        starts, stops = track.starts(pairs[:, 0]), track.stops(pairs[:, 1])
        spans = zip(pairs.tolist(), starts.tolist(), stops.tolist(), strict=True)
        return [
            Step(at=Fraction(n), frames=tuple(pair), decode=(start, stop), native=(720, 1280))
            for n, (pair, start, stop) in enumerate(spans)
        ]


def make_model(settings: HfBench) -> transformers.Qwen2_5_VLForConditionalGeneration:
    """Make a small Qwen2.5-VL with random weights, the same on every rank."""
    torch.manual_seed(0)
    vision = {
        "depth": settings.tower_layers,
        "hidden_size": 320,
        "intermediate_size": 864,
        "num_heads": 4,
        "out_hidden_size": 256,
        "fullatt_block_indexes": [1],
    }
    text = {
        "vocab_size": VOCABULARY,
        "hidden_size": 256,
        "intermediate_size": 688,
        "num_hidden_layers": settings.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]},
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    settings_of_model = transformers.Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, video_token_id=VIDEO, image_token_id=VIDEO + 1
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(settings_of_model).train()


def make_batch(clip: Clip) -> dict[str, Any]:
    """Make the batch of a clip and an answer of 63 tokens, all but its pixels; an even number, as DeepSpeed needs."""
    t, h, w = clip.grid
    text = torch.randint(0, VIDEO, (64,), generator=torch.Generator().manual_seed(1))
    ids = torch.cat([text[:1], torch.full((t * h * w // MERGE**2,), VIDEO), text[1:]])[None]
    labels = torch.where(torch.arange(ids.shape[1]) > ids.shape[1] - 63, ids, -100)
    return {
        "input_ids": ids,
        "labels": labels,
        "mm_token_type_ids": 2 * (ids == VIDEO).int(),
        "video_grid_thw": torch.tensor([clip.grid]),
    }


Prepare = Callable[[Any, Mesh, Clip], Callable[[], float]]


def _steps(settings: HfBench) -> dict[str, Prepare]:
    def usual(model: Any, mesh: Mesh, clip: Clip) -> Callable[[], float]:
        return _usual(model, mesh, clip, settings.site)

    return {"one": _one, "usual": usual, "mmcp": _mmcp}


def _one(model: Any, _mesh: Mesh, clip: Clip) -> Callable[[], float]:
    def step() -> float:
        loss = model(**make_batch(clip), pixel_values_videos=clip.patches(list(range(clip.grid[0])))).loss
        loss.backward()
        return loss.item()

    return step


def _mmcp(model: Any, mesh: Mesh, clip: Clip) -> Callable[[], float]:
    parallelize(model, mesh)
    pixels = DeferredPixels(clip.patches, clip.steps())

    def step() -> float:
        loss = model(**make_batch(clip), pixel_values_videos=pixels).loss
        loss.backward()
        average_gradients(model, mesh)
        return loss.item()

    return step


def _usual(model: Any, mesh: Mesh, clip: Clip, site: str) -> Callable[[], float]:
    """Decode and encode everything on every rank, split the embeddings, attend by DeepSpeed's Ulysses."""
    os.environ |= {"DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"}
    sys.path.append(site)
    with redirect_stdout(sys.stderr):
        import_module("deepspeed").init_distributed("gloo", verbose=False)
        ulysses = import_module("deepspeed.runtime.sequence_parallel.ulysses_sp")
    transformers.AttentionInterface.register("tower", sdpa_attention_forward)  # theirs takes over the name sdpa
    model.model.visual.set_attn_implementation("tower")
    decoder = model.model.language_model
    ulysses.UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=decoder,
        core_attn_implementation="sdpa",
        sequence_parallel_size=mesh.world.size,
        micro_batch_size=1,
        seq_length_is_variable=True,
    )

    def step() -> float:
        batch = make_batch(clip)
        pixels = clip.patches(list(range(clip.grid[0])))
        rows = torch.cat(model.model.get_video_features(pixels, batch["video_grid_thw"]).pooler_output)
        embeds = model.get_input_embeddings()(batch["input_ids"])
        embeds = embeds.masked_scatter((batch["input_ids"] == VIDEO)[..., None], rows)
        positions, _ = model.model.get_rope_index(**{name: x for name, x in batch.items() if name != "labels"})
        positions = torch.cat([torch.arange(embeds.shape[1])[None, None], positions])  # it asks for 1-D ones too
        targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        mine = slice(
            mesh.rank * embeds.shape[1] // mesh.world.size, (mesh.rank + 1) * embeds.shape[1] // mesh.world.size
        )
        hidden = decoder(inputs_embeds=embeds[:, mine], position_ids=positions[..., mine], use_cache=False)[0]
        kept = targets[:, mine] != -100
        share = F.cross_entropy(model.lm_head(hidden[kept]), targets[:, mine][kept], reduction="sum")
        share = share / (targets != -100).sum()
        (share * mesh.world.size).backward()
        average_gradients(model, mesh)
        total = share.detach().clone()
        dist.all_reduce(total)
        return total.item()

    return step


def _encode_seconds(model: Any, clip: Clip) -> float:
    pixels = clip.patches(list(range(clip.grid[0])))
    begin = time.monotonic()
    torch.cat(model.model.get_video_features(pixels, torch.tensor([clip.grid])).pooler_output).sum().backward()
    return time.monotonic() - begin


def _summary(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    last = runs[-1]
    return {
        "system": name,
        "step_s": round(median([s for found in runs for s in found["seconds"]]), 3),
        "decode_s": round(median(found["decode_s"] for found in runs), 3),
        "encode_s": round(median(found["encode_s"] for found in runs), 3),
        "frames_decoded": last["frames_decoded"],
        "frames_encoded": last["frames_encoded"],
        "grown_mb": round(median(found["grown_mb"] for found in runs)),
        "loss": last["loss"],
    }


def _table(record: dict[str, Any]) -> Table:
    shares = f"decoding and encoding are {record['decode_and_encode_share']:.0%} of the one-rank step"
    faster = f"{record['faster_than_usual']} times faster than the usual way" if record["faster_than_usual"] else ""
    table = Table(title=f"Tiny Qwen2.5-VL on a clip; {shares}; {faster}")
    for column in record["rows"][0]:
        table.add_column(column, justify="left" if column == "system" else "right")
    for row in record["rows"]:
        table.add_row(*(f"{value:.6g}" if isinstance(value, float) else str(value) for value in row.values()))
    return table
