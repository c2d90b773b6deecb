"""A small model made parallel against the same model in one process: loss, every gradient, norm, and their clipping.

Run: python -m pytest tests/parallel/test_apply.py
"""

import pytest
import torch
from torch import nn

from mmcp.attention.base import LocalAttention, RowInfo, split_heads
from mmcp.masks import Mask
from mmcp.parallel.apply import shard_parameters, wrap_attention
from mmcp.parallel.mesh import MeshConfig, build_mesh
from mmcp.parallel.ulysses import Ulysses
from mmcp.training.optim import OptimConfig, apply_update
from tests.parallel.cases import DenseAttention, plan_of_owners, relative_error

ROW_LENGTHS = (7, 4, 6, 5)
HEADS, KV_HEADS, DIM, WIDTH = 3, 1, 4, 5


class TinyBlock(nn.Module):
    def __init__(self):
        super().__init__()
        core = DenseAttention(DIM, DIM)
        self.attention = LocalAttention(core, split_heads(HEADS, KV_HEADS, 1)[0])
        self.project = nn.ModuleDict(
            {t.name: nn.Linear(WIDTH, t.dim * (HEADS if t.heads == "query" else KV_HEADS)) for t in core.tensors}
        )
        self.out = nn.Linear(HEADS * DIM, WIDTH)

    def forward(self, hidden: torch.Tensor, info: RowInfo) -> torch.Tensor:
        inputs = {t.name: self.project[t.name](hidden).unflatten(-1, (-1, t.dim)) for t in self.attention.core.tensors}
        return hidden + self.out(self.attention(inputs, info).flatten(1))


class TinyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(2, WIDTH)
        self.blocks = nn.ModuleList(TinyBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, row: torch.Tensor, info: RowInfo) -> torch.Tensor:
        hidden = self.embed(row)
        for block in self.blocks:
            hidden = block(hidden, info)
        return self.head(hidden)


def tiny_model(dtype: torch.dtype) -> TinyModel:
    torch.manual_seed(0)
    return TinyModel().to(dtype)


def rows(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 2, generator=generator, dtype=torch.float64).to(dtype) for n in ROW_LENGTHS]


def sum_loss(model: nn.Module, row: torch.Tensor, owners: list[int], mesh) -> torch.Tensor:
    """This rank's part of the row's loss over the number of tokens of the step."""
    plan = plan_of_owners(owners, mesh.cp.size)
    mine = torch.from_numpy(plan.positions(mesh.cp.index))
    info = RowInfo(Mask.causal([2, len(row) - 2]), plan, mesh.cp.index)
    return model(row[mine], info).square().sum() / sum(ROW_LENGTHS)


def parallel_gradients(config: MeshConfig, dtype: torch.dtype, compute_dtype: torch.dtype | None) -> dict:
    mesh, model = build_mesh(config), tiny_model(dtype)
    wrap_attention(model, mesh)
    shard_parameters(model, mesh, units=model.blocks, compute_dtype=compute_dtype)
    for row in rows(compute_dtype or dtype)[mesh.data.index :: mesh.data.size]:
        owners = [i * i % mesh.cp.size for i in range(len(row))]
        sum_loss(model, row, owners, mesh).backward()
    grads = {name: whole(parameter.grad).clone() for name, parameter in model.named_parameters()}
    optim = OptimConfig(clip_norm=0.01)
    optimizer = optim.build(model)
    norm = apply_update(optimizer, optim, 0)
    moments = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}
    clipped = {name: whole(moment) / (1 - optim.betas[0]) for name, moment in moments.items()}
    stored = {whole(parameter).dtype for parameter in model.parameters()}
    return {"grads": grads, "norm": norm, "clipped": clipped, "stored": stored}


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def one_process_gradients() -> tuple[dict, float]:
    mesh, model = build_mesh(MeshConfig()), tiny_model(torch.float64)
    for row in rows(torch.float64):
        sum_loss(model, row, [0] * len(row), mesh).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return grads, float(torch.stack([grad.norm() for grad in grads.values()]).norm())


LAYOUTS = [
    MeshConfig(dp_shard=2),
    MeshConfig(ulysses=2),
    MeshConfig(dp_shard=2, ulysses=2),
    MeshConfig(dp_replicate=2, ulysses=2),
    MeshConfig(dp_replicate=2),
    MeshConfig(ulysses=3),
]


@pytest.mark.parametrize("config", LAYOUTS, ids=lambda config: "x".join(map(str, config.shape)))
def test_gradients_are_the_sums_of_one_process(rank_pool, config):
    expected, norm = one_process_gradients()
    for result in rank_pool.run(parallel_gradients, config, torch.float64, None, ranks=config.world):
        assert set(result["grads"]) == set(expected)
        for name, grad in expected.items():
            assert relative_error(result["grads"][name], grad) < 1e-10, name
            assert relative_error(result["clipped"][name], grad * 0.01 / norm) < 1e-3, name  # torch adds 1e-6 to norm
        assert result["norm"] == pytest.approx(norm, rel=1e-10)


@pytest.mark.parametrize("ranks", [1, 2])
def test_bfloat16_compute_keeps_float32_parameters_and_sums(rank_pool, ranks):
    expected, norm = one_process_gradients()
    arguments = MeshConfig(ulysses=ranks), torch.float32, torch.bfloat16
    for result in rank_pool.run(parallel_gradients, *arguments, ranks=ranks):
        assert result["stored"] == {torch.float32}
        assert {grad.dtype for grad in result["grads"].values()} == {torch.float32}
        assert result["norm"] == pytest.approx(norm, rel=2e-2)
        assert max(relative_error(result["grads"][name], grad) for name, grad in expected.items()) < 0.1


def wrapped_names() -> tuple[bool, bool]:
    mesh, model = build_mesh(MeshConfig(ulysses=2)), tiny_model(torch.float32)
    names = list(model.state_dict())
    wrap_attention(model, mesh)
    return names == list(model.state_dict()), all(isinstance(block.attention, Ulysses) for block in model.blocks)


def test_every_layer_is_wrapped_and_keeps_its_names(rank_pool):
    assert rank_pool.run(wrapped_names, ranks=2) == [(True, True)] * 2


def test_one_rank_leaves_the_model_alone():
    mesh, model = build_mesh(MeshConfig()), tiny_model(torch.float32)
    wrap_attention(model, mesh)
    shard_parameters(model, mesh, units=model.blocks)
    assert isinstance(model.blocks[0].attention, LocalAttention)
    with pytest.raises(ValueError, match=r"compute type torch\.bfloat16 needs FSDP2"):
        shard_parameters(model, mesh, units=model.blocks, compute_dtype=torch.bfloat16)
