"""Stages of one model over real runs: a folder of transformers, projectors aligned, adapters, everything, and out.

Compared: what each stage changes with what it declares; its first weights with the last of the stage before; ranks with
one rank; what is exported with transformers' own class. Run: python -m pytest tests/training/test_stages.py
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

transformers = pytest.importorskip("transformers")
pytest.importorskip("peft")

from experiments.base import RunConfig, build_model  # noqa: E402
from experiments.export import run as export  # noqa: E402
from experiments.runtime import run_runner  # noqa: E402
from mmcp.config import ConfigError, dump, load  # noqa: E402
from mmcp.model.adapters import is_adapter, plain_name  # noqa: E402
from mmcp.model.pretrained import ModelFolder  # noqa: E402
from mmcp.parallel.mesh import build_mesh  # noqa: E402
from mmcp.parallel.pretrained import draw_adapters, fill, materialise  # noqa: E402
from mmcp.training import checkpoint  # noqa: E402
from mmcp.training.parts import part_of  # noqa: E402
from mmcp.training.run_folder import open_run_folder  # noqa: E402
from mmcp.training.stages import last_checkpoint, start_from  # noqa: E402
from tests.model.pretrained.families import SIZES  # noqa: E402
from tests.training.exact_cases import whole  # noqa: E402
from tests.training.tiny_run import train_here, train_in, write_shards  # noqa: E402

VOCABULARY = 270  # bytes, special tokens, some rows that no id uses
SETTINGS = """
folder: {folder}
dtype: float64
data: {{train: {shards}, documents_per_step: 3, row_tokens: 2048}}
clip:
  budget:
    tokens: 512
    settings: [{{frames_per_second: 2, frame_pixels: 1536, image_pixels: 1024, sound: true}}]
model:
  pretrained: {pretrained}
  video: {{name: video_patches, patch: 8, channels: 8, layers: 1, heads: 2}}
  image: {{name: image_patches, patch: 8, channels: 8, layers: 1, heads: 2}}
  audio: {{name: audio_windows, window: 100, frames_per_row: 20, channels: 8, layers: 1, heads: 2}}
optim: {{learning_rate: 0.01, total_steps: 2}}
"""
FROZEN = [f"parts.{part}=0" for part in ("image", "video", "audio", "embedding", "backbone", "head")]
RANKS = "mesh.ulysses=2"


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Write shards and a tiny tied Qwen2."""
    root = tmp_path_factory.mktemp("stages")
    config = transformers.Qwen2Config(**{**SIZES, "vocab_size": VOCABULARY, "tie_word_embeddings": True})
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(config).double().save_pretrained(root / "qwen2", max_shard_size="20KB")
    return {"root": root, "shards": write_shards(root), "pretrained": root / "qwen2"}


def settings_of(folders: dict[str, Path], name: str, *overrides: str) -> RunConfig:
    file = folders["root"] / f"{name}.yaml"
    text = SETTINGS.format(folder=folders["root"] / name, shards=folders["shards"], pretrained=folders["pretrained"])
    file.write_text(text)
    return load(RunConfig, file, list(overrides))


def train_alone(settings: RunConfig) -> dict[str, torch.Tensor]:
    """Train on one rank; return what the last checkpoint holds of the model."""
    train_here(replace_folder(settings))
    return weights_of(Path(settings.folder))


def replace_folder(settings: RunConfig) -> RunConfig:
    open_run_folder(settings.folder, resume=False)
    return settings


def weights_of(run: Path) -> dict[str, torch.Tensor]:
    saved = last_checkpoint(run)
    known = {name: how for name, how in checkpoint.contents(saved).items() if name.startswith("model.")}
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (dtype, shape) in known.items()}
    checkpoint.read_tensors(saved, tensors, group=build_mesh(ONE).world)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}


ONE = RunConfig.__dataclass_fields__["mesh"].default


def first_weights(settings: RunConfig, saved: Path | None = None) -> dict[str, torch.Tensor]:
    """Return the weights that a stage begins with, by plain name."""
    model = build_model(settings.model, vocabulary=260, seed=settings.seed, dtype=torch.float64)
    materialise(model, torch.device("cpu"))
    fill(model, ModelFolder.open(settings.model.pretrained))
    draw_adapters(model, settings.seed)
    if saved is not None:
        start_from(model, saved, settings.model.lora, group=build_mesh(ONE).world)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_three_stages_and_out_again(folders, rank_pool):
    root = folders["root"]
    align = settings_of(folders, "align", *FROZEN)
    given, aligned = first_weights(align), train_alone(align)
    assert {part_of(n) for n, value in aligned.items() if not torch.equal(value, given[n])} == {"projectors"}

    lora = settings_of(folders, "lora", *FROZEN, f"start_from={root / 'align'}", "model.lora.rank=2", RANKS)
    first = first_weights(lora, last_checkpoint(root / "align"))
    assert all(torch.equal(first[n], aligned[plain_name(n)]) for n in first if not is_adapter(n))
    train_in(rank_pool, lora)
    adapted = weights_of(root / "lora")
    moved = {part_of(n) for n, value in adapted.items() if not torch.equal(value, first[n])}
    assert moved == {"projectors", "adapters"}

    full = settings_of(folders, "full", f"start_from={root / 'lora'}", RANKS, "optim.total_steps=1")
    merged = first_weights(full, last_checkpoint(root / "lora"))
    up = "backbone.blocks.0.mlp.up"
    added = adapted[f"{up}.lora_B.default.weight"] @ adapted[f"{up}.lora_A.default.weight"] * (16.0 / 2)
    torch.testing.assert_close(merged[f"{up}.weight"], adapted[f"{up}.base_layer.weight"] + added)
    train_in(rank_pool, full)
    assert all(not torch.equal(value, merged[n]) for n, value in weights_of(root / "full").items() if "backbone" in n)

    outcome = export(root / "lora", out=root / "exported", dtype="float32")
    assert outcome.record["model_type"] == "qwen2"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(root / "exported", dtype=torch.float64)
    for name, place in ModelFolder.open(root / "exported").rows.items():
        torch.testing.assert_close(theirs.state_dict()[place.name], merged[name], rtol=1e-6, atol=1e-6)


def filled_on_ranks(settings: RunConfig) -> dict[str, torch.Tensor]:
    runner = run_runner(settings, build_mesh(settings.mesh), vocabulary=260)
    return {name: whole(parameter) for name, parameter in runner.model.named_parameters()}


MESHES = [{"ulysses": 2}, *(pytest.param(mesh, marks=pytest.mark.full)
                            for mesh in ({"dp_shard": 3}, {"dp_replicate": 2, "ulysses": 2}))]  # fmt: skip


@pytest.mark.parametrize("mesh", MESHES)
def test_ranks_together_hold_what_one_rank_reads(mesh, folders, rank_pool):
    overrides = [f"mesh.{axis}={size}" for axis, size in mesh.items()]
    settings = settings_of(folders, "fill", "model.lora.rank=3", *overrides)
    found = rank_pool.run(filled_on_ranks, settings, ranks=settings.mesh.world)[0]
    wanted = first_weights(settings)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


def test_a_folder_s_model_is_written_out_in_the_settings(folders):
    model = settings_of(folders, "written").model
    assert (model.backbone.width, model.vocabulary, model.tied_head) == (SIZES["hidden_size"], VOCABULARY, True)


def test_single_fields_of_the_backbone_win_over_the_folder_s(folders):
    plain = settings_of(folders, "plain").model
    words = ("checkpointing=true", "positions=mrope", "mrope_sections=[2,1,1]")
    changed = settings_of(folders, "changed", *(f"model.backbone.{word}" for word in words)).model
    fields = {"checkpointing": True, "positions": "mrope", "mrope_sections": (2, 1, 1)}
    assert changed == replace(plain, backbone=replace(plain.backbone, **fields))
    again = folders["root"] / "again.yaml"
    again.write_text(dump(settings_of(folders, "changed", "model.backbone.checkpointing=true")))
    assert load(RunConfig, again).model.backbone == replace(plain.backbone, checkpointing=True)
    with pytest.raises(ConfigError, match="no model folder"):
        settings_of(folders, "none", "model.pretrained=nowhere", "model.backbone.checkpointing=true")


def test_what_cannot_work_is_refused(folders, tmp_path):
    with pytest.raises(ValueError, match=r"start_from='.*nothing'"):
        last_checkpoint(tmp_path / "nothing")
    with pytest.raises(ValueError, match="300 ids, the model 270 rows"):
        settings_of(folders, "few").model.decoder(300)
    with pytest.raises(ValueError, match="no layer has a map 'sideways'"):
        build_model(
            settings_of(folders, "odd", "model.lora.rank=1", "model.lora.targets=[sideways]").model,
            vocabulary=260, seed=0, dtype=torch.float64,
        )  # fmt: skip
