"""What a run folder holds, and which folders are refused before a run starts.

Run: python -m pytest tests/training/test_run_folder.py
"""

import json
import os

import pytest

from mmcp.config import load
from mmcp.training import run_folder
from mmcp.training.optim import OptimConfig


def test_a_new_folder_is_made_with_its_parents_and_a_resumed_one_is_kept(tmp_path):
    folder = run_folder.open_run_folder(tmp_path / "a" / "b", resume=False)
    assert folder.is_dir() and folder.is_absolute() and not list(folder.iterdir())
    run_folder.open_run_folder(folder, resume=False)
    (folder / "metrics.jsonl").write_text("")
    assert run_folder.open_run_folder(folder, resume=True) == folder
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


def test_folders_that_cannot_be_used_are_refused_with_their_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    (tmp_path / "file").write_text("")
    for path, resume, message in (
        ("full", False, f"'full' already exists .{tmp_path}/full.; name another, delete it, or resume"),
        ("file", False, "'file' already exists"),
        ("none", True, f"no run to resume: 'none' .looked for the folder {tmp_path}/none"),
        ("file/run", False, f"'file/run' cannot be written .{tmp_path}/file/run: Not a directory"),
    ):
        with pytest.raises(ValueError, match=message):
            run_folder.open_run_folder(path, resume=resume)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(ValueError, match=r"cannot be written .*Permission denied"):
        run_folder.open_run_folder(tmp_path, resume=True)


def test_a_folder_on_which_no_file_can_be_made_is_refused():
    with pytest.raises(ValueError, match=r"'/proc/1' cannot be written .*; name a folder you may write to"):
        run_folder.open_run_folder("/proc/1", resume=True)


def test_the_setup_can_be_read_back(tmp_path):
    config = OptimConfig(learning_rate=1e-5)
    run_folder.write_setup(tmp_path, config)
    assert load(OptimConfig, tmp_path / "config.yaml") == config
    environment = json.loads((tmp_path / "env.json").read_text())
    assert environment["packages"]["torch"] and "flash-attn" in environment["packages"]
    assert len(environment["git_commit"] or "0" * 40) == 40
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml", "env.json"}


def test_json_files_are_strict_and_never_half_written(tmp_path):
    run_folder.write_json(tmp_path / "eval.json", {"a": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        run_folder.write_json(tmp_path / "eval.json", {"a": float("inf")})
    assert json.loads((tmp_path / "eval.json").read_text()) == {"a": 1}
