"""The loop of docs/bring_your_hf_model.md, run as it is written there, on a tiny folder of transformers.

Run: python -m pytest tests/integrations/test_hf_page.py -m full
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

from tests.integrations import hf_cases  # noqa: E402

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.full
def test_the_loop_of_the_page_trains_and_saves(tmp_path):
    page = (REPOSITORY / "docs/bring_your_hf_model.md").read_text()
    (loop,) = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "process_group(" in block]
    (tmp_path / "loop.py").write_text(loop)
    hf_cases.llama().save_pretrained(tmp_path / "models/llama")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "loop.py"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    losses = {rank: re.findall(rf"rank {rank}: (\d+\.\d+)", done.stdout) for rank in "01"}
    assert len(losses["0"]) == 3 and losses["0"] == losses["1"]
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "models/trained").config.model_type == "llama"
