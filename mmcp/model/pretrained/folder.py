"""A model folder as transformers writes it, read piece by piece: config.json and safetensors, one file or several.

Nothing is unpickled. A file is open only while a tensor of it is read, so that what was read does not stay mapped.
"""

import json
import re
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmcp.model.pretrained.families import Family, family_of
from mmcp.model.pretrained.fields import Fields
from mmcp.model.pretrained.rows import Decoder, Rows

ONE_FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHOWN = 8  # tensors listed in an error


@dataclass(frozen=True)
class ModelFolder:
    """A folder of a decoder's weights; `check` it before the first `read`."""

    path: Path
    config: Fields
    family: Family
    decoder: Decoder

    @staticmethod
    def open(path: str | Path) -> "ModelFolder":
        """Read the config.json of a folder. Raises ValueError for one that is not there or not supported."""
        path = Path(path)
        config = Fields.read(path / "config.json")
        family = family_of(config)
        return ModelFolder(path, config, family, family.read(config))

    @cached_property
    def rows(self) -> dict[str, Rows]:
        """By name of a VideoLM's parameter: where it lies."""
        return self.family.rows(self.decoder)

    @cached_property
    def files(self) -> dict[str, Path]:
        """By name of a tensor: its file. Raises ValueError when a file is missing or is no safetensors file."""
        index = self.path / INDEX
        if index.is_file():
            try:
                placed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{index} cannot be read ({error!r}); copy the folder again") from None
            names = sorted(set(placed.values()))
        else:
            names = [ONE_FILE]
        files: dict[str, Path] = {}
        for name in names:
            file = self.path / name
            if Path(name).name != name or not file.is_file():
                raise ValueError(
                    f"'{self.path}' has no file {name} ({file.resolve()}); copy the folder again, or save it as "
                    "safetensors (other formats are pickles and are not read)"
                )
            files |= dict.fromkeys(_shapes(file), file)
        return files

    def check(self) -> None:
        """Compare every tensor's name and shape with what the config.json says.

        Raises ValueError listing tensors that are missing, unknown or of another shape.
        """
        found: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(self.files.values())):
            found |= _shapes(file)
        wanted = {rows.name: rows.shape for rows in self.rows.values()}
        tied = r"|lm_head\.weight" if self.decoder.tied_head else ""
        ignored = re.compile(self.family.ignored + tied)
        wrong = [f"{name} is missing" for name in wanted if name not in found]
        wrong += [f"{name} is unknown" for name in found if name not in wanted and not ignored.fullmatch(name)]
        wrong += [
            f"{name} is {list(found[name])}, expected {list(shape)}"
            for name, shape in wanted.items()
            if found.get(name, shape) != shape
        ]
        if wrong:
            more = f" and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise ValueError(
                f"'{self.path}' does not hold the model of its config.json: {'; '.join(sorted(wrong)[:SHOWN])}{more}; "
                "copy the folder again, or mend its config.json"
            )

    def read(self, name: str, shape: tuple[int, ...], start: int = 0, stop: int | None = None) -> Tensor:
        """Read rows start .. stop of a parameter, counted in its own first dimension; no others are read.

        name, shape: of the whole parameter in a VideoLM
        returns [stop - start, *shape[1:]], in the file's type
        """
        rows, stop = self.rows[name], shape[0] if stop is None else stop
        assert prod(shape) * rows.shape[0] == prod(rows.shape) * rows.num_rows, f"{name} {shape} is not {rows}"
        each = rows.num_rows // shape[0]
        with safe_open(self.files[rows.name], framework="pt") as file:
            tensor = file.get_slice(rows.name)
            parts = [tensor[first:last] for first, last in rows.cut(start * each, stop * each)]
            whole = torch.cat(parts) if len(parts) != 1 else parts[0].clone()
        return whole.reshape(stop - start, *shape[1:])


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a file, from its header."""
    try:
        with safe_open(file, framework="pt") as opened:
            return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{file} is not a safetensors file ({error}); copy it again") from None
