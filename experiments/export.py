"""Write the decoder of a run as a folder that transformers loads.

Run:     mmcp export runs/mine --out folder            (AutoModelForCausalLM.from_pretrained("folder") reads it)
Result:  config.json, safetensors files, and the tokenizer's files of the folder that the run began with
"""

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from experiments.evaluate import open_run
from mmcp.model.adapters import BASE, adapter_of, merged
from mmcp.model.pretrained import ModelFolder, write_folder
from mmcp.parallel.collectives import Group
from mmcp.parallel.mesh import MeshConfig, build_mesh
from mmcp.report.outcome import Outcome
from mmcp.training import checkpoint
from mmcp.training.stages import lora_of, read_adapter

COPIED = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "vocab.json",
          "merges.txt", "chat_template.jinja")  # fmt: skip
"""Files of a model folder that training does not change."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def run(run: Path, *, out: Path, dtype: str = "float32") -> Outcome:
    """Write the latest checkpoint's decoder, its adapters added in. Raises ValueError for what cannot be written.

    Encoders and projectors stay behind: no class of transformers holds them. Start other runs of ours from the run.
    """
    settings, saved = open_run(run, ranks=None)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"'{out}' is already there ({out.resolve()}); name a new folder")
    decoder = settings.model.decoder(settings.tokenizer.build().vocab_size)
    source, extra = Path(settings.model.pretrained), {}
    if settings.model.pretrained and source.is_dir():
        given = ModelFolder.open(source).config.values
        extra = {name: given[name] for name in TOKEN_IDS if name in given}
    reader = _Reader(saved, build_mesh(MeshConfig()).world)
    family = write_folder(out, decoder, reader.read, dtype=getattr(torch, dtype), extra=extra)
    for name in COPIED if settings.model.pretrained else ():
        if (source / name).is_file():
            shutil.copy(source / name, out / name)
    record: dict[str, Any] = {"folder": str(out), "model_type": family, "checkpoint": saved.name, "dtype": dtype}
    return Outcome(record=record, tables=[f"{out}: {family} of {saved.name} in {dtype}"])


class _Reader:
    """Reads one parameter after the other from a checkpoint."""

    def __init__(self, saved: Path, group: Group):
        self.saved, self.group = saved, group
        self.known, self.lora = checkpoint.contents(saved), lora_of(saved)

    def read(self, name: str) -> Tensor:
        """Return a whole parameter by its plain name."""
        head, _, last = name.rpartition(".")
        with_base = f"model.{head}{BASE}{last}"
        key = with_base if with_base in self.known else f"model.{name}"
        dtype, shape = self.known[key]
        tensors = {key: torch.empty(shape, dtype=dtype)}
        checkpoint.read_tensors(self.saved, tensors, group=self.group)
        if f"model.{adapter_of(name)[0]}" not in self.known:
            return tensors[key]
        return merged(tensors[key], *read_adapter(self.saved, name, group=self.group), self.lora.scale)
