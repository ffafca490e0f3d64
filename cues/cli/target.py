"""The target of a command: a graph file, a store, or either with a queue after ``#``.

graph.py          the store of its graph: --store, else Graph(store=…), else CUES_STORE, else data/<id>
data/example      the store
data/example#orders/3   a partition of its queue orders
graph.py#orders   a queue of it
#orders           a queue of the store that CUES_STORE names
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cues.cli.options import WrongUsage
from cues.errors import QueueNotFound, StoreNotFound
from cues.graphs import graphfile
from cues.queues.store import Store

if TYPE_CHECKING:
    from cues.graphs.graphfile import GraphFile


@dataclass(frozen=True)
class StoreTarget:
    """A store, which may not exist yet, the graph file that names it, and the name after ``#``."""

    path: Path
    file: GraphFile | None
    name: str
    text: str
    """The part before ``#``, as the user wrote it."""

    def open(self, readonly: bool = True, durability: str | None = None) -> Store:
        """Open the store; read-only by default, which does not disturb writers."""
        if readonly and not (self.path / "data.mdb").exists():
            raise self._missing()
        return Store(self.path, durability=durability, readonly=readonly)

    def _missing(self) -> StoreNotFound:
        if self.file is not None and self.name and self.path != store_of(self.file, None):
            message = f"There is no store at {shown(self.path)}, which has queue {self.name!r} of the graph."
            return StoreNotFound(
                message, f"cues run {self.text}, or put the store back at its path.", path=str(self.path)
            )
        if self.file is not None:
            hint = f"cues run {self.text}."
            message = f"The graph {self.file.graph.id!r} has not run yet: there is no store at {shown(self.path)}."
            return StoreNotFound(message, hint, path=str(self.path))
        stores = [p.parent for p in sorted(self.path.glob("**/data.mdb"))[:5]] if self.path.is_dir() else []
        if not stores and self.path.parent.is_dir():
            beside = [p.parent.name for p in self.path.parent.glob("*/data.mdb")]
            beside += [p.name for p in self.path.parent.glob("*.py")]
            stores = [self.path.parent / name for name in difflib.get_close_matches(self.path.name, beside, 3)]
        hint = (
            f"give {' or '.join(str(p) for p in stores)}."
            if stores
            else "give the directory of a store, or a graph file."
        )
        message = f"There is no store at {shown(self.path)}."
        if self.path.is_file():
            message = f"{shown(self.path)} is a file; a store is a directory."
        return StoreNotFound(message, hint, path=str(self.path))


def resolve(target: str | None, store: str | None = None) -> StoreTarget:
    """Parse a target. Imports the graph file, but opens no store."""
    text, name = _split(target or "")
    if not text:
        chosen = store or os.environ.get("CUES_STORE")
        if not chosen:
            raise WrongUsage("No store is named.", "name a graph file or a store, or set CUES_STORE.")
        return StoreTarget(Path(chosen), None, name, chosen)
    if not Path(text).is_dir() and graphfile.is_file(text):
        file = graphfile.load(text)
        return StoreTarget(store_of_queue(file, name, store), file, name, text)
    return StoreTarget(Path(text), None, name, text)


def store_of_queue(file: GraphFile, queue: str, store: str | None) -> Path:
    """The store of a graph's queue: the graph's own, unless the options of the queue have a path."""
    graph = file.graph
    options = graph.plan().queues.get(queue.partition("/")[0]) if queue else None
    if options is not None and options.path is not None:
        return graph.place(options.path)
    return store_of(file, store)


def store_of(file: GraphFile, store: str | None) -> Path:
    """The path of the store of a graph file's graph; ``store`` is the value of ``--store``."""
    if store:
        return Path(store)
    return file.graph.store_path(beside=file.path.parent)


def _split(target: str) -> tuple[str, str]:
    if "#" not in target or Path(target).exists():
        return target, ""
    text, _, name = target.rpartition("#")
    return text, name


def shown(path: Path | str) -> str:
    """A path in its shortest form."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def nearest(name: str, known: Sequence[str]) -> str:
    """The known name that is most similar to ``name``, or the first one."""
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return near[0] if near else next(iter(known), "")


def queue_of(target: StoreTarget, known: Sequence[str], command: str) -> str:
    """The queue that a target names, which must be one of ``known``; the only one if it names none.

    ``orders/3`` is a partition of one of them.
    """
    queue, slash, partition = target.name.partition("/")
    if target.name in known or (slash and queue in known and partition.isdecimal()):
        return target.name
    listed = ", ".join(known) or "none"
    if not target.name:
        if len(known) == 1:
            return known[0]
        raise WrongUsage(
            f"Which queue of {target.text}? It has {listed}.",
            f"{command} {target.text}#{known[0] if known else 'queue'}",
        )
    near = nearest(target.name, known)
    raise QueueNotFound(
        f"{target.text} has no queue {target.name!r}; it has {listed}.",
        f"{command} {target.text}#{near}." if near else "make it with cues run, or with cues send --create.",
        queue=target.name,
    )


def processor_of(target: StoreTarget, known: Sequence[str], command: str) -> str:
    """The processor id that a target names, with or without its graph's name."""
    names = {id: id for id in known}
    for id in known:
        names.setdefault(id.partition(".")[2], id)
    if target.name in names:
        return names[target.name]
    listed = ", ".join(known) or "none yet"
    if not target.name:
        if len(known) == 1:
            return known[0]
        raise WrongUsage(
            f"Which processor of {target.text}? It has {listed}.",
            f"{command} {target.text}#{known[0] if known else 'graph.processor'}",
        )
    near = nearest(target.name, list(names))
    raise QueueNotFound(
        f"{target.text} has no processor {target.name!r}; it has {listed}.",
        f"{command} {target.text}#{near}." if near else "run the graph first: cues run.",
        queue=target.name,
    )
