"""Names of a package (PEP 562), and modules, that load on first use."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


class _Module:
    """A module before its first use: an attribute that is read loads it, and is kept here."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self._name), name)
        setattr(self, name, value)
        return value


def module(name: str) -> Any:
    """Return a module that loads on first use, for one that few runs need and a file names in several places.

    The file imports the module under ``TYPE_CHECKING``, and has this in the ``else``. For one place, an import in the
    function is shorter. Not for compiled modules, in which the ``else`` is not there.
    """
    return _Module(name)


def loader(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__getattr__`` and ``__dir__`` of a package. ``homes``: by module its names, separated by spaces."""
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"cues.{home_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted(sys.modules[package].__all__)
