"""The fields of a config.json: each is asked for by name, and what is not understood is refused by name."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

MISSING = object()


class Fields:
    """Fields of one JSON object; errors name the file, the field, its value and what would do."""

    def __init__(self, values: Mapping[str, Any], where: str):
        self.values, self.where = values, where

    @classmethod
    def read(cls, file: Path) -> "Fields":
        """Read a config.json. Raises ValueError when there is none or it is not one JSON object."""
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(
                f"'{file.parent}' is no model folder: there is no {file.resolve()}; give a folder that transformers "
                "or `mmcp export` wrote"
            ) from None
        except (OSError, ValueError) as error:
            raise ValueError(f"{file} cannot be read ({error}); copy the folder again") from None
        if not isinstance(values, dict):
            raise ValueError(f"{file} holds no JSON object; copy the folder again")
        return cls(values, str(file))

    def get(self, name: str, kind: type | tuple[type, ...], default: Any = MISSING) -> Any:
        """Return a field; null and a missing field give the default. Raises ValueError for another type."""
        value = self.values.get(name)
        if value is None:
            if default is MISSING:
                raise ValueError(f"{self.where} lacks the field '{name}'; copy the folder again")
            return default
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if is_number and float in (kind if isinstance(kind, tuple) else (kind,)):
            return float(value)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
            raise ValueError(f"{self.where}: {name}={value!r} is of a type that is not known here")
        return value

    def section(self, name: str) -> "Fields":
        """Return a field that is an object; a missing one is empty."""
        return Fields(self.get(name, dict, {}), f"{self.where}, {name}")

    def refuse_unless(self, name: str, *allowed: Any) -> None:
        """Raise ValueError when a field is there and is none of the values that this library computes."""
        value = self.values.get(name)
        if value is not None and value not in allowed:
            known = " or ".join(repr(option) for option in allowed) or "a model without it"
            raise ValueError(f"{self.where}: {name}={value!r} is not supported; use {known}")

    def refuse_unknown(self, *known: str) -> None:
        """Raise ValueError for a field that is not among these."""
        unknown = sorted(name for name, value in self.values.items() if name not in known and value is not None)
        if unknown:
            raise ValueError(f"{self.where}: the field '{unknown[0]}' is not known here; known: {', '.join(known)}")
