"""The order of syncs and changes of names, for tests of a few calls; disk_states.py is for whole workloads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

Call = tuple[str, str]


def noted(monkeypatch: pytest.MonkeyPatch, root: Path) -> list[Call]:
    """Note each call of this process from here on: ``("fsync", path)``, ``("rename", new path)``, below ``root``."""
    found: list[Call] = []

    def note(name: str, path: str) -> None:
        if Path(path).is_relative_to(root):
            found.append((name, str(Path(path).relative_to(root))))

    def watch(name: str, of: Any) -> None:
        real = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            note(name, os.path.abspath(of(*arguments)))
            return real(*arguments, **options)

        monkeypatch.setattr(os, name, call)

    watch("fsync", lambda handle: os.readlink(f"/proc/self/fd/{handle}"))
    for name in ("rename", "replace", "link"):
        watch(name, lambda old, new, *_: new)
    watch("unlink", lambda path, *_: path)
    return found
