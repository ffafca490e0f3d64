"""The objects that answer the API: a store or a shared directory, made from settings that are plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from cues.ui.shape import Shape


class Look(Protocol):
    """What the API asks: of a store (:mod:`cues.ui.look`), or of a directory (:mod:`cues.ui.directory`)."""

    def settings(self) -> dict[str, Any]: ...
    def overview(self) -> dict[str, Any]: ...
    def graph(self) -> dict[str, Any]: ...
    def messages(
        self, queue: str, at: str = "", older: bool = False, count: int = 50, where: str = ""
    ) -> dict[str, Any]: ...
    def message(self, queue: str, index: int, partition: int = 0, offset: int = 0) -> dict[str, Any]: ...
    def became(self, queue: str, index: int, partition: int = 0) -> dict[str, Any]: ...
    def steps(self, processor: str, count: int = 20) -> dict[str, Any]: ...
    def state(self, processor: str, key: str = "", after: str = "", count: int = 50) -> dict[str, Any]: ...
    def errors(self, processor: str = "", count: int = 100, settled: bool = False) -> dict[str, Any]: ...
    def close(self) -> None: ...


def look_of(settings: dict[str, Any]) -> Look:
    """The store or the directory that the settings name."""
    shape = Shape.from_dict(settings["shape"]) if settings["shape"] else None
    if settings["directory"]:
        from cues.ui.directory import DirectoryLook

        return DirectoryLook(settings["place"], shape, settings["title"])
    from cues.ui.look import StoreLook

    return StoreLook(Path(settings["place"]), shape, settings["title"])
