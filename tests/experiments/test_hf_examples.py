"""The examples with Trainer, accelerate and SFTTrainer as the programs that users start, on two ranks.

What they compute is compared with one process in tests/integrations/test_hf_trainers.py.
Run: python -m pytest tests/experiments/test_hf_examples.py
"""

import subprocess
import sys

import pytest

for name in ("transformers", "accelerate", "trl"):
    pytest.importorskip(name)


@pytest.mark.full
@pytest.mark.parametrize("example", ["hf_trainer", "hf_accelerate", "hf_sft"])
def test_an_example_trains_and_resumes(example, tmp_path):
    command = [sys.executable, "-m", f"experiments.{example}", "--ranks", "2", "--out", str(tmp_path / "out")]
    first = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert first.returncode == 0 and "loss: " in first.stdout, first.stderr
    again = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=200)
    assert again.returncode == 0, again.stderr
