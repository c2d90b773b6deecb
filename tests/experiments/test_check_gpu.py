"""check_gpu on the CPU: its comparison and its timing run there too; without a GPU every path is skipped by name.

Run: python -m pytest tests/experiments/test_check_gpu.py
"""

import json

import pytest
import torch

from experiments import check_gpu
from experiments.check_gpu import NCCL_MODES, PATHS, check_path, largest_error, rank_error, timed
from mmcp.attention.softmax import Softmax
from mmcp.parallel.launch import launch

CPU = torch.device("cpu")


HERE = (
    "flash-attn, window",
    "FlexAttention, prefix and units",
    "FlexAttention, parts, window and sink",
    "fla, fixed decay",
)


@pytest.mark.parametrize("path", [path for path in PATHS if path.name in HERE], ids=lambda path: path.name)
def test_the_comparison_finds_the_cpu_right(path):
    small = torch.float32
    assert largest_error(path.variant, path.mask, small, CPU, parts=path.parts) < 1e-5
    assert timed(path.variant, small, CPU, tokens=64, parts=path.parts) > 0


@pytest.mark.parametrize("mode", ["ring", *(pytest.param(x, marks=pytest.mark.full) for x in ("ulysses", "allgather"))])
def test_the_comparison_over_ranks_finds_gloo_right(mode):
    assert launch(rank_error, 2, mode, "cpu") < 1e-5


def test_the_comparison_sees_a_wrong_kernel(monkeypatch):
    right = Softmax.forward
    monkeypatch.setattr(Softmax, "forward", lambda self, inputs, *rest: right(self, inputs, *rest) * 1.02)
    assert largest_error(PATHS[2].variant, PATHS[2].mask, torch.float32, CPU) > 1.9e-2


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_without_a_gpu_every_path_is_skipped_with_its_reason(capsys):
    assert check_gpu.main(["--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == len(PATHS) + len(NCCL_MODES) and {row["skipped"] for row in rows} == {"no CUDA device"}
    assert check_gpu.main([]) == 1
    assert capsys.readouterr().out.count("skipped: no CUDA") == len(rows)


def test_a_path_that_breaks_is_told_and_does_not_stop_the_others(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no kernel image\nmore")

    monkeypatch.setattr(check_gpu, "why_not", lambda _: "")
    monkeypatch.setattr(check_gpu, "largest_error", broken)
    row = check_path(PATHS[0])
    assert not row["ok"] and row["failed"] == "RuntimeError: no kernel image"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_every_path_that_can_run_is_right():
    assert check_gpu.run().is_ok
