"""Checkpoints that are complete or not there, hold no pickle, and load on any number of ranks, bit for bit.

    checkpoints/step_120/
        state.json                  what the run needs to go on: step, sampler, seed, digests, mesh
        contents.json               every tensor (shape, type) and every file (bytes): what must be there
        shard-0000R-*.safetensors   rank R's parts, written by torch.distributed.checkpoint

torch.distributed.checkpoint's usual reader unpickles its metadata; its safetensors storage has none to unpickle, but
takes a missing part for a smaller tensor or for nothing: contents.json closes that gap.
"""

import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter

from mmcp.parallel.collectives import Group, PeerError, agree

_NAME = re.compile(r"step_(0|[1-9][0-9]*)")
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


def save(
    folder: str | Path,
    step: int,
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    group: Group,
) -> Path:
    """Write `folder/step_N`; every rank calls it, and all return or all raise.

    group: the ranks that hold the model, all ranks of the run
    state: JSON values, the same on every rank (rank 0's are written); `step` is added
    Everything is written under another name, synchronised to the disk, and renamed at the end, so that a checkpoint
    with its name is complete. Raises ValueError when it already exists, OSError when a rank cannot write.
    """
    target = Path(folder).resolve() / f"step_{step}"
    partial = target.with_name(target.name + ".tmp")
    text = json.dumps({**state, "step": step}, indent=2, allow_nan=False)
    agree(_attempt(group, _start, target, partial), group=group, timeout=None)
    tensors = _tensors(model, optimizer)
    writer = HuggingFaceStorageWriter(str(partial), save_distributed=True)
    with _plain_errors(f"cannot write {partial}", group):
        dcp.save(tensors, storage_writer=writer, process_group=group.handle, no_dist=group.size == 1)
    agree(_attempt(group, _finish, target, partial, _describe(tensors), text), group=group, timeout=None)
    return target


def load(
    checkpoint: str | Path, *, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, group: Group
) -> dict[str, Any]:
    """Fill the model, and the optimizer if given, from a checkpoint saved on any number of ranks; return its state.

    group: the ranks that hold the model, all ranks of the run
    Raises ValueError, before any tensor is touched, naming the file that is missing or cut short, or the tensors that
    the checkpoint and the model do not share in name, shape and type.
    """
    checkpoint = Path(checkpoint).resolve()
    tensors = _tensors(model, optimizer)
    error = _attempt(group, _check, checkpoint, _describe(tensors), optimizer is not None)
    agree(error, group=group, timeout=None)
    with _plain_errors(f"cannot read {checkpoint}", group):
        reader = HuggingFaceStorageReader(str(checkpoint))
        dcp.load(tensors, storage_reader=reader, process_group=group.handle, no_dist=group.size == 1)
    if optimizer is not None:
        for name, parameter in _trained(model, optimizer).items():
            optimizer.state[parameter] = {part: tensors[f"optimizer.{part}.{name}"] for part in _MOMENTS}
    return read_state(checkpoint)


def read_tensors(checkpoint: str | Path, tensors: dict[str, Tensor], *, group: Group) -> None:
    """Fill tensors, by their names in the checkpoint (`model.` before a parameter's), from a checkpoint of any ranks.

    Raises ValueError, before any is touched, for a file that is missing or cut short and for a tensor that the
    checkpoint has not, or has in another shape or type.
    """
    checkpoint = Path(checkpoint).resolve()
    wanted = _describe(tensors)
    agree(_attempt(group, _check_some, checkpoint, wanted), group=group, timeout=None)
    with _plain_errors(f"cannot read {checkpoint}", group):
        reader = HuggingFaceStorageReader(str(checkpoint))
        dcp.load(tensors, storage_reader=reader, process_group=group.handle, no_dist=group.size == 1)


def contents(checkpoint: str | Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Return type and whole shape of every tensor of a checkpoint, by name. Raises ValueError for none."""
    saved = _read_json(Path(checkpoint).resolve() / "contents.json")["tensors"]
    return {name: (getattr(torch, dtype), tuple(shape)) for name, (dtype, shape) in saved.items()}


def read_state(checkpoint: str | Path) -> dict[str, Any]:
    """Return what `save` was given as state, with `step`. Raises ValueError when it is missing or not JSON."""
    return _read_json(Path(checkpoint).resolve() / "state.json")


def latest(folder: str | Path) -> Path | None:
    """Return the complete checkpoint of the highest step, None when there is none; other names are ignored."""
    found = _complete(Path(folder))
    return found[-1] if found else None


def prune(folder: str | Path, keep_last: int) -> list[Path]:
    """Delete all but the last `keep_last` checkpoints, oldest first; return what went. Other names are ignored.

    keep_last: at least 1, so that the newest is never deleted; -1 keeps all. Call it on one rank.
    Raises ValueError for any other number.
    """
    if keep_last != -1 and keep_last < 1:
        raise ValueError(f"keep_last={keep_last} would keep no checkpoint; use 1 or more, or -1 to keep all")
    found = _complete(Path(folder))
    surplus = found[:-keep_last] if keep_last > 0 else []
    for checkpoint in surplus:
        doomed = checkpoint.with_name(checkpoint.name + ".tmp")
        checkpoint.rename(doomed)
        shutil.rmtree(doomed)
    return surplus


def _complete(folder: Path) -> list[Path]:
    """List the checkpoints by step, as numbers: step_9 before step_10."""
    steps = [path for path in folder.glob("step_*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(steps, key=lambda path: int(path.name.removeprefix("step_")))


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Name every tensor of the model and the optimizer; what is loaded goes into these very tensors."""
    kept = model.state_dict(keep_vars=True)
    first = {id(tensor): name for name, tensor in reversed(kept.items())}  # tied tensors are kept once
    tensors = {f"model.{name}": tensor.detach() for name, tensor in kept.items() if first[id(tensor)] == name}
    if optimizer is not None:
        for name, parameter in _trained(model, optimizer).items():
            moments = optimizer.state[parameter] or {part: torch.zeros_like(parameter) for part in _MOMENTS[1:]}
            count = torch.as_tensor(moments.get("step", 0.0), dtype=torch.float32)
            for part, tensor in zip(_MOMENTS, (count, moments["exp_avg"], moments["exp_avg_sq"]), strict=True):
                tensors[f"optimizer.{part}.{name}"] = tensor.detach()
    return tensors


def _trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    """Name the parameters that the optimizer updates."""
    updated = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in updated}


def _describe(tensors: dict[str, Tensor]) -> dict[str, list]:
    """Return name -> [type, whole shape]."""
    return {name: [str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in tensors.items()}


def _attempt(group: Group, action: Callable[..., None], *args: Any) -> Exception | None:
    """Act on the first rank and return what went wrong, for all ranks to agree on."""
    if group.index != 0:
        return None
    try:
        action(*args)
    except Exception as error:
        return error
    return None


def _start(target: Path, partial: Path) -> None:
    if target.exists():
        raise ValueError(f"{target} already exists; resume from it, or move it away")
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def _finish(target: Path, partial: Path, tensors: dict[str, list], state: str) -> None:
    """Write the two JSON files, push everything to the disk, and give the checkpoint its name."""
    files = {path.name: path.stat().st_size for path in sorted(partial.glob("*.safetensors"))}
    contents = json.dumps({"files": files, "tensors": tensors}, indent=1, allow_nan=False)
    for name, text in (("contents.json", contents), ("state.json", state)):
        with open(partial / name, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
    _sync_folder(partial)
    partial.rename(target)
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        reason = "is missing" if file.parent.is_dir() else "is missing, and so is its folder"
    except (ValueError, OSError) as error:
        reason = f"cannot be read ({error})"
    raise ValueError(f"checkpoint file {file} {reason}; resume from another checkpoint")


def _check(checkpoint: Path, wanted: dict[str, list], with_optimizer: bool) -> None:
    """Raise ValueError unless every file is there, whole, and holds what this model and optimizer want."""
    contents = _read_json(checkpoint / "contents.json")
    read_state(checkpoint)
    _check_files(checkpoint, contents["files"])
    saved = contents["tensors"]
    if not with_optimizer:
        saved = {name: how for name, how in saved.items() if not name.startswith("optimizer.")}
    _refuse_differences(checkpoint, saved, wanted)


def _check_some(checkpoint: Path, wanted: dict[str, list]) -> None:
    """Raise ValueError unless every file is there, whole, and holds what is wanted, whatever else it holds."""
    found = _read_json(checkpoint / "contents.json")
    _check_files(checkpoint, found["files"])
    _refuse_differences(checkpoint, {name: how for name, how in found["tensors"].items() if name in wanted}, wanted)


def _refuse_differences(checkpoint: Path, saved: dict[str, list], wanted: dict[str, list]) -> None:
    """Raise ValueError listing the tensors that differ in name, shape or type."""
    differences = [f"{name} is not in the checkpoint" for name in wanted.keys() - saved.keys()]
    differences += [f"{name} is not in the model" for name in saved.keys() - wanted.keys()]
    differences += [
        f"{name} was saved as {saved[name][0]} {saved[name][1]}, the model has {how[0]} {how[1]}"
        for name, how in wanted.items()
        if saved.get(name, how) != how
    ]
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise ValueError(
            f"{checkpoint} does not fit this model: {'; '.join(sorted(differences)[:5])}{more}; "
            "use the config the checkpoint was trained with"
        )


def _check_files(checkpoint: Path, files: dict[str, int]) -> None:
    there = {path.name: path.stat().st_size for path in checkpoint.glob("*.safetensors")}
    for name, size in files.items():
        if name not in there:
            raise ValueError(f"checkpoint file {checkpoint / name} is missing; resume from another checkpoint")
        if there[name] != size:
            raise ValueError(
                f"checkpoint file {checkpoint / name} has {there[name]} of {size} bytes; resume from another checkpoint"
            )
        try:
            safe_open(checkpoint / name, framework="pt")
        except SafetensorError as error:
            raise ValueError(f"{checkpoint / name} is not a safetensors file ({error})") from None
    strangers = sorted(there.keys() - files.keys())
    if strangers:
        raise ValueError(f"checkpoint file {checkpoint / strangers[0]} was not written with the others; remove it")


@contextmanager
def _plain_errors(what: str, group: Group) -> Iterator[None]:
    """Raise a rank's own error on that rank and PeerError on the others, instead of all tracebacks everywhere."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is no mistake
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        message = f"{what}: {cause}"
        if rank == group.index:
            raise OSError(message) from error
        raise PeerError(f"rank {rank}: {message}") from None
