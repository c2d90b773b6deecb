"""One table per kind of component: name -> class or function."""

from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")


class Registry(dict):
    """Name -> entry. Fill with `@REG.register("name")`; read with `REG["name"]`.

    Raises ValueError when a name is registered twice, KeyError (listing the known names) when it is unknown.
    """

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that stores what it decorates under `name`."""
        if name in self:
            raise ValueError(f"{self.kind} '{name}' is already registered by {self[name].__module__}")
        return lambda entry: self.setdefault(name, entry)

    def __missing__(self, name: str) -> NoReturn:
        raise KeyError(f"unknown {self.kind} '{name}'; registered: {', '.join(sorted(self))}")
