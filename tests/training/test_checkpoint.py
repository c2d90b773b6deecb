"""Training with a stop and a resume against training without, on the same and on other numbers of ranks; and what
happens to checkpoints that are incomplete, foreign or hostile.

Run: python -m pytest tests/training/test_checkpoint.py
"""

import json
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mmcp.parallel.launch import RankError, launch
from mmcp.training import checkpoint
from mmcp.training.optim import OptimConfig, apply_update
from tests.parallel.cases import whole_group

OPTIM = OptimConfig(learning_rate=0.02, warmup_steps=2, total_steps=8)


class Tiny(nn.Module):
    """Two linear layers whose rows do not divide by 2, 3 or 4, a norm, and a buffer."""

    def __init__(self, seed: int = 0):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.norm, self.down = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)
        self.register_buffer("scale", torch.tensor(2.0 + seed))

    def forward(self, x):
        return self.down(self.norm(self.up(x)).tanh()) * self.scale


def sharded(model: nn.Module, **options) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for part in (model.up, model.down):
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def steps(model, optimizer, which: range) -> list[float]:
    """Train on the same rows on every rank (FSDP2 means the gradients over ranks, so any number gives the same)."""
    losses = []
    for step in which:
        rows = torch.randn(4, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        loss = model(rows.to(next(model.parameters()).dtype)).square().mean()
        loss.backward()
        apply_update(optimizer, OPTIM, step)
        losses.append(float(loss.detach()))
    return losses


def whole(model, optimizer) -> dict[str, torch.Tensor]:
    """Return every tensor of model and optimizer, unsharded."""
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        tensors |= {f"{part}.{name}": tensor for part, tensor in optimizer.state[parameter].items()}
    full = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    return {name: tensor.detach().clone().contiguous() for name, tensor in full.items()}


def start(seed: int = 0, *, shard: bool = True):
    model = Tiny(seed).double()
    model = sharded(model) if shard else model
    return model, OPTIM.build(model)


def train_and_save(folder: str) -> list[float]:
    """Train 8 steps, saving after 4; note the tensors at both points."""
    model, optimizer = start()
    losses = steps(model, optimizer, range(4))
    checkpoint.save(
        folder, 4, model=model, optimizer=optimizer, state={"seed": 7, "losses": losses}, group=whole_group()
    )
    at_4 = whole(model, optimizer)
    losses += steps(model, optimizer, range(4, 8))
    at_8 = whole(model, optimizer)
    if dist.get_rank() == 0:
        save_file(at_4, f"{folder}/at_4.safetensors")
        save_file(at_8, f"{folder}/at_8.safetensors")
    return losses


def resume(folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Resume from step 4 on a model of another seed; return the losses of the 4 last steps and the tensors then."""
    model, optimizer = start(seed=1)
    state = checkpoint.load(checkpoint.latest(folder), model=model, optimizer=optimizer, group=whole_group())
    assert state["step"] == 4 and state["seed"] == 7
    expected = load_file(f"{folder}/at_4.safetensors")
    loaded = whole(model, optimizer)
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor, expected[name]) and tensor.dtype == expected[name].dtype, name
    losses = steps(model, optimizer, range(4, 8))
    return losses, whole(model, optimizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, rank_pool) -> tuple[Path, list[float]]:
    """A folder with step_4 saved on 2 ranks, and the losses of 8 steps without a stop."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return folder, rank_pool.run(train_and_save, str(folder), ranks=2)[0]


def test_the_same_layout_goes_on_bit_for_bit(saved, rank_pool):
    folder, losses = saved
    resumed, tensors = rank_pool.run(resume, str(folder), ranks=2)[0]
    assert resumed == losses[4:]
    for name, expected in load_file(folder / "at_8.safetensors").items():
        assert torch.equal(tensors[name], expected), name


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_another_number_of_ranks_starts_from_the_same_bits_and_goes_on_alike(saved, rank_pool, ranks):
    folder, losses = saved
    resumed, _ = rank_pool.run(resume, str(folder), ranks=ranks)[0]
    assert resumed == pytest.approx(losses[4:], rel=1e-12)


def test_a_model_that_is_not_sharded_loads_it_too(saved):
    folder, losses = saved
    model, optimizer = start(seed=1, shard=False)
    checkpoint.load(folder / "step_4", model=model, optimizer=optimizer, group=whole_group())
    assert steps(model, optimizer, range(4, 8)) == pytest.approx(losses[4:], rel=1e-12)
    weights_only, _ = start(seed=1, shard=False)
    checkpoint.load(folder / "step_4", model=weights_only, group=whole_group())
    assert torch.equal(weights_only.up.weight, load_file(folder / "at_4.safetensors")["model.up.weight"])


@pytest.fixture
def made(tmp_path):
    """A model, its optimizer after one step, and the folder of its checkpoint step_1; no torch.distributed."""
    model, optimizer = start(shard=False)
    steps(model, optimizer, range(1))
    return (
        model,
        optimizer,
        checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer, state={}, group=whole_group()),
    )


def test_a_missing_or_short_piece_is_refused_by_name_before_anything_is_loaded(made):
    model, optimizer, folder = made
    before = whole(model, optimizer)
    shard = next(folder.glob("*.safetensors"))
    for file in (shard, folder / "state.json", folder / "contents.json"):
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(ValueError, match=f"{file} is missing"):
            checkpoint.load(folder, model=model, optimizer=optimizer, group=whole_group())
        file.write_bytes(content)
    shard.write_bytes(content := shard.read_bytes()[:-8])
    with pytest.raises(ValueError, match=f"{shard} has {len(content)} of {len(content) + 8} bytes"):
        checkpoint.load(folder, model=model, optimizer=optimizer, group=whole_group())
    (folder / "state.json").write_text('{"step": ')
    with pytest.raises(ValueError, match=r"state.json cannot be read"):
        checkpoint.load(folder, model=model, optimizer=optimizer, group=whole_group())
    with pytest.raises(ValueError, match="so is its folder"):
        checkpoint.load(folder / "nowhere", model=model, group=whole_group())
    assert all(torch.equal(tensor, before[name]) for name, tensor in whole(model, optimizer).items())


def test_tensors_that_do_not_fit_the_model_are_named(made):
    _, _, folder = made
    with pytest.raises(ValueError, match=r"model.down.bias was saved as float64 \[3\], the model has float32 \[3\]"):
        checkpoint.load(folder, model=Tiny(), group=whole_group())
    other = Tiny().double()
    other.extra = nn.Linear(1, 1).double()
    del other.norm
    with pytest.raises(
        ValueError, match=r"extra\.bias is not in the checkpoint; model\.extra\.weight is not in the check"
    ):
        checkpoint.load(folder, model=other, group=whole_group())
    with pytest.raises(ValueError, match=r"model\.norm\.bias is not in the model"):
        checkpoint.load(folder, model=other, group=whole_group())


class Hostile:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return Path.write_text, (self.path, "owned")


def test_nothing_is_unpickled(made, tmp_path):
    model, optimizer, folder = made
    mark = tmp_path / "mark"
    attack = pickle.dumps(Hostile(mark))
    pickle.loads(attack)
    assert mark.exists(), "the attack works on a reader that unpickles"
    mark.unlink()
    (folder / ".metadata").write_bytes(attack)
    checkpoint.load(folder, model=model, optimizer=optimizer, group=whole_group())
    shard = next(folder.glob("*.safetensors"))
    stranger = folder / "shard-00009-model-00001-of-00001.safetensors"
    stranger.write_bytes(shard.read_bytes())
    with pytest.raises(ValueError, match=f"{stranger} was not written with the others"):
        checkpoint.load(folder, model=model, optimizer=optimizer, group=whole_group())
    stranger.unlink()
    shard.write_bytes(attack.ljust(shard.stat().st_size, b"\0"))
    with pytest.raises(ValueError, match="is not a safetensors file"):
        checkpoint.load(folder, model=model, optimizer=optimizer, group=whole_group())
    assert not mark.exists()


def fail_to_write(folder: str, where: str) -> None:
    """Make rank 1's writer, or rank 0's last rename, fail."""
    dist.init_process_group("gloo")
    model, optimizer = start()
    steps(model, optimizer, range(1))

    def fail(*_, **__):
        raise OSError(f"no space left for {where}")

    if where == "tensors" and dist.get_rank() == 1:
        checkpoint.HuggingFaceStorageWriter.write_data = fail
    if where == "rename" and dist.get_rank() == 0:
        Path.rename = fail
    checkpoint.save(folder, 1, model=model, optimizer=optimizer, state={}, group=whole_group())


@pytest.mark.parametrize(("where", "rank"), [("tensors", 1), ("rename", 0)])
def test_a_writer_that_fails_ends_the_run_and_leaves_no_complete_checkpoint(tmp_path, where, rank):
    with pytest.raises(RankError, match=f"^rank {rank}: .*no space left for {where}\n"):
        launch(fail_to_write, 2, str(tmp_path), where)
    assert checkpoint.latest(tmp_path) is None
    model, optimizer = start(shard=False)
    checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer, state={}, group=whole_group())
    assert checkpoint.latest(tmp_path) == tmp_path / "step_1", "what the failed writer left is no obstacle"


def test_state_is_strict_json_and_a_checkpoint_is_never_overwritten(made, tmp_path):
    model, optimizer, folder = made
    with pytest.raises(ValueError, match="not JSON compliant"):
        checkpoint.save(
            tmp_path, 2, model=model, optimizer=optimizer, state={"loss": float("nan")}, group=whole_group()
        )
    with pytest.raises(ValueError, match=r"step_1 already exists; resume from it"):
        checkpoint.save(tmp_path, 1, model=model, optimizer=optimizer, state={}, group=whole_group())
    assert not list(tmp_path.glob("*.tmp"))
    assert json.loads((folder / "state.json").read_text()) == {"step": 1}


@pytest.mark.parametrize(
    ("keep_last", "left"), [(2, [99, 100]), (1, [100]), (9, [9, 10, 99, 100]), (-1, [9, 10, 99, 100])]
)
def test_steps_are_numbers_and_strays_are_left_alone(tmp_path, keep_last, left):
    strays = ["best", "step_100.tmp", "step_007", "step_", "step_1e3"]
    for name in [*strays, "step_9", "step_10", "step_99", "step_100"]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    (tmp_path / "step_1000").write_text("a file")
    assert checkpoint.latest(tmp_path) == tmp_path / "step_100"
    gone = checkpoint.prune(tmp_path, keep_last)
    assert [path.name for path in gone] == [f"step_{step}" for step in (9, 10, 99, 100) if step not in left]
    assert {path.name for path in tmp_path.iterdir()} == {*strays, "step_1000", *(f"step_{step}" for step in left)}


@pytest.mark.parametrize("keep_last", [0, -2])
def test_no_setting_deletes_the_newest(tmp_path, keep_last):
    with pytest.raises(ValueError, match=f"keep_last={keep_last} would keep no checkpoint"):
        checkpoint.prune(tmp_path, keep_last)
    assert checkpoint.latest(tmp_path) is None


@pytest.fixture
def one_rank():
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_bfloat16_compute_learns_as_float32_does_because_the_masters_are_float32(one_rank, tmp_path):
    rows = torch.randn(32, 5, generator=torch.Generator().manual_seed(0))
    target = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))
    optim = OptimConfig(learning_rate=1e-5, total_steps=200, min_rate_ratio=1.0, weight_decay=0.0)
    fall, models = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        model = models[dtype] = sharded(Tiny(), mp_policy=policy)
        optimizer = optim.build(model)
        losses = []
        for step in range(200):
            scaled = rows * 1e3 if step == 100 else rows
            loss = (model(scaled.to(dtype)).float() - target).square().mean()
            loss.backward()
            apply_update(optimizer, optim, step)
            losses.append(loss.item())
        fall[dtype] = losses[0] - losses[-1]
    assert fall[torch.float32] > 0 and fall[torch.bfloat16] > 0.8 * fall[torch.float32]
    start, end = Tiny().state_dict(), whole(model, optimizer)
    moved = [(start[name] != end[f"model.{name}"]).flatten() for name, _ in Tiny().named_parameters()]
    assert torch.cat(moved).float().mean() > 0.9
    assert {tensor.dtype for tensor in end.values()} == {torch.float32}
    checkpoint.save(tmp_path, 200, model=model, optimizer=optimizer, state={}, group=whole_group())
    fresh = sharded(Tiny(seed=1), mp_policy=policy)
    fresh_optimizer = optim.build(fresh)
    checkpoint.load(tmp_path / "step_200", model=fresh, optimizer=fresh_optimizer, group=whole_group())
    assert all(torch.equal(tensor, end[name]) for name, tensor in whole(fresh, fresh_optimizer).items())
