"""Write a decoder as a folder that transformers loads, one tensor in memory at a time per file that is filled."""

import json
from collections.abc import Callable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mmcp.model.pretrained.families import FAMILIES, family_for
from mmcp.model.pretrained.folder import INDEX, ONE_FILE
from mmcp.model.pretrained.rows import Decoder, Rows

FILE_BYTES = 4 << 30  # of tensors in one file


def write_folder(
    folder: Path,
    decoder: Decoder,
    read: Callable[[str], Tensor],
    *,
    dtype: torch.dtype,
    extra: Mapping[str, Any] | None = None,
    file_bytes: int = FILE_BYTES,
) -> str:
    """Write config.json and safetensors files into a folder; return the model family they are of.

    read:  name of a VideoLM's parameter -> the whole parameter, called once for each, file by file
    dtype: type of the tensors in the files
    extra: fields of config.json that say nothing of the weights, such as ids of special tokens
    Raises ValueError, before anything is written, when no family of transformers computes this decoder.
    """
    family, config = family_for(decoder)
    rows = FAMILIES[family]().rows(decoder)
    folder.mkdir(parents=True, exist_ok=True)
    shapes = {place.name: place.shape for place in rows.values()}
    files = _deal(shapes, file_bytes // dtype.itemsize)
    placed: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = ONE_FILE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        tensors = {name: _gather(name, rows, read, dtype) for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        placed |= dict.fromkeys(names, file)
    if len(files) > 1:
        total = sum(map(prod, shapes.values())) * dtype.itemsize
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": placed})
    _write_json(folder / "config.json", {**(extra or {}), **config, "dtype": str(dtype).removeprefix("torch.")})
    return family


def _deal(shapes: dict[str, tuple[int, ...]], most: int) -> list[list[str]]:
    """Deal tensors, in order, to files of at most `most` numbers each, one tensor at least."""
    files: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        if prod(shape) > room:
            files.append([])
            room = most
        files[-1].append(name)
        room -= prod(shape)
    return files


def _gather(name: str, rows: dict[str, Rows], read: Callable[[str], Tensor], dtype: torch.dtype) -> Tensor:
    """Put a tensor of the checkpoint together from the parameters that hold its rows."""
    parts = {ours: place for ours, place in rows.items() if place.name == name}
    shape = next(iter(parts.values())).shape
    tensor, filled = torch.empty(shape, dtype=dtype), 0
    for ours, place in parts.items():
        values = read(ours).reshape(place.num_rows, *shape[1:])
        done = 0
        for start, stop in place.runs:
            tensor[start:stop] = values[done : done + stop - start]
            done += stop - start
        filled += done
    assert filled == shape[0], f"{filled} of {shape[0]} rows of {name} are known"
    return tensor


def _write_json(file: Path, value: dict[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
