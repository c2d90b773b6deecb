"""The folder of a run: made or refused before any work starts, with what is needed to repeat the run."""

import importlib.metadata
import json
import platform
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from mmcp.config import dump

PROBE = ".writable"  # prefix of a file that is made to see whether a folder can be written


def check_run_folder(path: str | Path, *, resume: bool) -> Path:
    """Return the absolute path of a run's folder, without making it.

    Raises ValueError when a new run's folder already holds files, a resumed run's is not there, or nothing can be
    written into it or into the folder that it would be made in.
    """
    folder = Path(path).resolve()
    if resume and not folder.is_dir():
        raise ValueError(f"no run to resume: '{path}' (looked for the folder {folder}); check the path or start anew")
    try:
        if not resume and folder.exists() and (not folder.is_dir() or _holds_files(folder)):
            raise ValueError(
                f"run folder '{path}' already exists ({folder}); name another, delete it, or resume the run in it"
            )
        existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
        with tempfile.NamedTemporaryFile(dir=existing, prefix=PROBE):
            pass
    except OSError as error:
        raise ValueError(
            f"run folder '{path}' cannot be written ({folder}: {error.strerror}); name a folder you may write to"
        ) from None
    return folder


def open_run_folder(path: str | Path, *, resume: bool) -> Path:
    """Return the absolute path of a run's folder, made if it is not there. Raises as `check_run_folder` does."""
    folder = check_run_folder(path, resume=resume)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _holds_files(folder: Path) -> bool:
    """Whether there is anything in a folder but the probe of another rank."""
    return any(not entry.name.startswith(PROBE) for entry in folder.iterdir())


def write_setup(folder: Path, config: Any) -> None:
    """Write the resolved `config.yaml` and `env.json`; call it on one rank before step 0."""
    (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
    write_json(folder / "env.json", environment())


def write_json(file: Path, value: Any) -> None:
    """Write strict JSON under its name only when it is whole. Raises ValueError for NaN and infinities."""
    partial = file.with_name(file.name + ".tmp")
    partial.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    partial.replace(file)


def environment() -> dict[str, Any]:
    """Return what a result depends on beside config and data: versions, devices, the commit."""
    return {
        "mmcp": importlib.metadata.version("mmcp"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version(name) for name in required_packages(with_extras=True)},
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "command": sys.argv,
        **_commit(Path(__file__).parent),
    }


def required_packages(*, with_extras: bool) -> list[str]:
    """Return the names of the distributions that mmcp's metadata asks for, sorted."""
    lines = [line for line in importlib.metadata.requires("mmcp") or [] if with_extras or "extra ==" not in line]
    return sorted({re.split(r"[^A-Za-z0-9_.-]", line, maxsplit=1)[0] for line in lines})


def version(package: str) -> str | None:
    """Return the installed version of a distribution, None when it is not there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit(folder: Path) -> dict[str, Any]:
    """Return the git commit of the code and whether files differ from it; None outside a repository."""

    def git(*arguments: str) -> str | None:
        try:
            answer = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    return {"git_commit": commit, "git_changed": bool(git("status", "--porcelain")) if commit else None}
