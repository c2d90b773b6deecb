"""What this machine has and lacks for training, what follows from it, and what to do."""

import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

import av
import psutil
import torch
import torch.distributed as dist
from rich.table import Table

from mmcp.parallel.launch import RankError, launch
from mmcp.report.outcome import Outcome
from mmcp.training import run_folder

GIB = 2**30
OK, LACKS, BROKEN = "ok", "lacks", "broken"


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    name: str
    status: str
    """ok; lacks: works without, in another way; broken: training cannot work."""
    found: str
    meaning: str = ""
    """What follows for a run."""
    remedy: str = ""
    """What to do about it; empty when all is well."""


def run(*, quick: bool = False) -> Outcome:
    """Look at the machine; with `quick`, without starting ranks. Not ok when something training needs is broken."""
    checks: list[Callable[[], Finding]] = [_python, _packages, _torch, _cuda, _attention, _backend, _media, _decord]
    checks += [_cores, _memory, _shared_memory, _scratch]
    checks += [] if quick else [_ranks]
    findings = [check() for check in checks]
    is_ok = all(finding.status != BROKEN for finding in findings)
    record = {"ok": is_ok, "findings": [asdict(finding) for finding in findings]}
    return Outcome(record=record, tables=[_table(findings)], is_ok=is_ok)


def _python() -> Finding:
    return Finding("python", OK, platform.python_version())


def _packages() -> Finding:
    """Hold what is installed against the requirements that have no extra."""
    missing = [name for name in run_folder.required_packages(with_extras=False) if run_folder.version(name) is None]
    if missing:
        return Finding("packages", BROKEN, f"missing: {', '.join(missing)}", "imports fail", "run `make setup`")
    return Finding("packages", OK, "all that pyproject.toml requires")


def _torch() -> Finding:
    build = f"CUDA {torch.version.cuda} build" if torch.version.cuda else "CPU build"
    return Finding("torch", OK, f"{torch.__version__}, {build}")


def _cuda() -> Finding:
    if not torch.cuda.is_available():
        remedy = "for a GPU: a driver for it, and a CUDA build of torch"
        return Finding("gpu", LACKS, "none", "trains on the CPU, in float32 or bfloat16", remedy)
    names = {torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}
    return Finding("gpu", OK, f"{torch.cuda.device_count()} x {', '.join(sorted(names))}")


def _attention() -> Finding:
    if not torch.cuda.is_available():
        return Finding("attention", OK, "block slices through torch's CPU kernel")
    if find_spec("flash_attn") is None:
        meaning = "packed rows run through FlexAttention"
        return Finding("attention", LACKS, "no flash-attn", meaning, "pip install flash-attn --no-build-isolation")
    version = importlib.metadata.version("flash-attn")
    return Finding("attention", OK, f"flash-attn {version} for 16-bit packed rows, FlexAttention for other masks")


def _backend() -> Finding:
    if not dist.is_available() or not dist.is_gloo_available():
        return Finding("collectives", BROKEN, "torch without gloo", "ranks cannot talk", "install torch from PyPI")
    if torch.cuda.is_available() and dist.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))
        return Finding("collectives", OK, f"NCCL {version} between GPUs, gloo for flags")
    return Finding("collectives", OK, "gloo")


def _media() -> Finding:
    """Look for the decoders of common clips and the encoders of the demo's."""
    version = ".".join(map(str, av.library_versions["libavcodec"]))
    wanted = [("h264", "r"), ("hevc", "r"), ("av1", "r"), ("aac", "r"), ("libx264", "w"), ("aac", "w")]
    missing = [f"{name} {'decoder' if mode == 'r' else 'encoder'}" for name, mode in wanted if not _has(name, mode)]
    found = f"PyAV {av.__version__}, libavcodec {version}"
    if missing:
        meaning = "such clips are rejected by name, or the demo's cannot be written"
        return Finding("media", LACKS, f"{found}, no {', '.join(missing)}", meaning, "pip install --force-reinstall av")
    return Finding("media", OK, found)


def _has(codec: str, mode: str) -> bool:
    try:
        av.codec.Codec(codec, mode)  # type: ignore[arg-type]
    except ValueError:
        return False
    return True


def _decord() -> Finding:
    if find_spec("decord") is None:
        is_x86 = platform.machine() in ("x86_64", "AMD64")
        remedy = "pip install 'mmcp[decord]'" if is_x86 else f"none: it has no wheels for {platform.machine()}"
        return Finding("decord", LACKS, "not installed", "PyAV decodes every clip", remedy)
    return Finding("decord", OK, importlib.metadata.version("decord"))


def _cores() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    meaning = "" if cores > 1 else "2 ranks take turns on it"
    return Finding("cores", OK, str(cores), meaning)


def _memory() -> Finding:
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.exists() else "max"
    total = min(psutil.virtual_memory().total, int(text) if text.isdecimal() else sys.maxsize)
    free = psutil.virtual_memory().available
    found = f"{total / GIB:.1f} GiB, {min(free, total) / GIB:.1f} GiB free"
    if total < 4 * GIB:
        return Finding("memory", LACKS, found, "2 ranks of the demo need about 4 GiB", "train with --ranks 1")
    return Finding("memory", OK, found)


def _shared_memory() -> Finding:
    """Workers hand tensors over through /dev/shm, which containers often keep at 64 MiB."""
    if not Path("/dev/shm").is_dir():
        return Finding("shared memory", OK, "no /dev/shm on this system")
    free = shutil.disk_usage("/dev/shm").free
    if free < GIB // 2:
        meaning = "loader workers may die with a bus error"
        return Finding("shared memory", LACKS, f"{free / 2**20:.0f} MiB free", meaning, "docker run --shm-size=8g")
    return Finding("shared memory", OK, f"{free / GIB:.1f} GiB free")


def _scratch() -> Finding:
    folder = tempfile.gettempdir()
    try:
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Finding("scratch folder", BROKEN, f"{folder}: {error.strerror}", "ranks cannot start", "set TMPDIR")
    return Finding("scratch folder", OK, f"{folder}, {shutil.disk_usage(folder).free / GIB:.1f} GiB free")


def _ranks() -> Finding:
    try:
        total = launch(_sum_of_ranks, 2)
    except (RankError, OSError) as error:
        remedy = "allow connections to 127.0.0.1, or set GLOO_SOCKET_IFNAME"
        return Finding("two ranks", BROKEN, str(error), "training on more than one rank fails", remedy)
    return Finding("two ranks", OK if total == 1 else BROKEN, "talk over gloo")


def _sum_of_ranks() -> int:
    dist.init_process_group("gloo")
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total)


def _table(findings: list[Finding]) -> Table:
    table = Table(title="mmcp doctor")
    for heading in ("what", "status", "found", "what follows", "remedy"):
        table.add_column(heading)
    for finding in findings:
        style = {OK: "green", LACKS: "yellow", BROKEN: "bold red"}[finding.status]
        status = f"[{style}]{finding.status}[/{style}]"
        table.add_row(finding.name, status, finding.found, finding.meaning, finding.remedy)
    return table
