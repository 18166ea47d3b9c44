"""For a process of its own: importing a heavy library raises, so that what a command does before it is seen."""

import importlib.machinery
import sys
from collections.abc import Sequence
from typing import Any, NoReturn


class Imported(BaseException):
    """A library was imported; the message is its name."""


class Loader:
    def create_module(self, spec: importlib.machinery.ModuleSpec) -> NoReturn:
        raise Imported(spec.name)

    def exec_module(self, module: object) -> None:
        pass


class Finder:
    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        loader: Any = Loader()
        return importlib.machinery.ModuleSpec(name, loader) if name in self.names else None


def forbid(*names: str) -> None:
    finder: Any = Finder(names)
    sys.meta_path.insert(0, finder)
