"""Reading a folder onto ranks: the peak of a rank's memory against the size of the model.

Run: python -m pytest tests/parallel/test_pretrained.py
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

import pytest
import torch

from mmcp.model.pretrained import Decoder, ModelFolder, write_folder
from mmcp.model.pretrained.dense import Qwen3
from mmcp.model.pretrained.fields import Fields
from mmcp.model.vlm import VideoLM
from mmcp.parallel.apply import shard_parameters
from mmcp.parallel.mesh import MeshConfig, build_mesh
from mmcp.parallel.pretrained import fill, materialise
from tests.training.exact_cases import whole

CONFIG = {
    "model_type": "qwen3", "vocab_size": 8000, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "rms_norm_eps": 1e-6,
}  # fmt: skip
RANKS = 3


def bare(decoder: Decoder) -> VideoLM:
    with torch.device("meta"):
        return VideoLM(decoder.backbone.build(), {}, vocabulary=decoder.vocabulary)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Write a model of 100 MB in several files."""
    path = tmp_path_factory.mktemp("big")
    decoder = Qwen3().read(Fields(CONFIG, "test"))
    shapes = {name: parameter.shape for name, parameter in bare(decoder).named_parameters()}
    generator = torch.Generator().manual_seed(0)
    write_folder(
        path, decoder, lambda name: torch.randn(shapes[name], generator=generator), dtype=torch.float32,
        file_bytes=30 << 20,
    )  # fmt: skip
    return path


def peak() -> int:
    """Return the most resident memory since the last reset, in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def read_on_ranks(path: Path, is_sharded: bool) -> tuple[int, float]:
    """Return how far memory rose above where it stood, and a sum of the weights read."""
    mesh = build_mesh(MeshConfig(ulysses=RANKS))
    source = ModelFolder.open(path)
    source.check()
    model = bare(source.decoder)
    if is_sharded:
        shard_parameters(model, mesh, units=list(model.backbone.blocks))
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier runs freed must not serve this one
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    materialise(model, mesh.device)
    fill(model, source)
    risen = peak() - before
    return risen, sum(float(whole(parameter).double().sum()) for parameter in model.parameters())


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_needs_its_shard_and_a_tensor(folder, rank_pool):
    files = json.loads((folder / "model.safetensors.index.json").read_text())
    size = files["metadata"]["total_size"]
    rank_pool.run(read_on_ranks, folder, True, ranks=RANKS)  # first use of DTensor loads code
    sharded = rank_pool.run(read_on_ranks, folder, True, ranks=RANKS)
    alone = rank_pool.run(read_on_ranks, folder, False, ranks=RANKS)
    largest = 4 * CONFIG["vocab_size"] * CONFIG["hidden_size"]
    for (risen, total), (_, wanted) in zip(sharded, alone, strict=True):
        assert risen < 1.1 * (size / RANKS + largest), f"{risen / size:.2f} of the model on one of {RANKS} ranks"
        assert total == pytest.approx(wanted, rel=1e-9)
    assert min(risen for risen, _ in alone) > 0.9 * size
