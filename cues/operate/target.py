"""The target of a command: a graph file, a store, or either with a queue after ``#``.

graph.py          the store of its graph: --store, else Graph(store=…), else CUES_STORE, else data/<id>
data/example      the store
data/example#orders/3   a partition of its queue orders
graph.py#orders   a queue of it
data/example#group:billing   a consumer group
#orders           a queue of the store that CUES_STORE names
s3://bucket/dir   a directory of cues run --queues, which is also a path on a mount
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from cues.base.data import dataclass
from cues.base.names import ProcessorId
from cues.base.texts import quoted
from cues.errors import QueueNotFound, StoreNotFound
from cues.graphs import graphfile
from cues.graphs.graphfile import GraphFile
from cues.graphs.graphfile import shown as shown
from cues.graphs.processor_rows import all_ids
from cues.operate.refused import Refused
from cues.queues.queue import Queue
from cues.queues.store import Store
from cues.steps.tries import open_named

GROUP: Final = "group:"
"""The beginning of a name that is a consumer group's."""


@dataclass(frozen=True)
class Target:
    """A store, which may not exist yet, the graph file that names it, and the name after ``#``."""

    path: Path
    file: GraphFile | None
    name: str
    text: str
    """The part before ``#``, as the user wrote it."""
    store: str | None = None
    """The value of ``--store``."""
    command: str = "cues status"
    """The command that names it, as its errors say it again."""

    @property
    def graph(self) -> str | None:
        """The id of the graph, if it is named by its file."""
        return self.file.graph.id if self.file is not None else None

    def again(self, name: str) -> str:
        """The command, with ``name`` after ``#``."""
        return f"{self.command} {quoted(f'{self.text}#{name}')}"

    @property
    def exists(self) -> bool:
        """True if the store exists."""
        return (self.path / "data.mdb").exists()

    @property
    def location(self) -> str:
        """The path or the URL."""
        given = self.store or self.text
        return given if self.is_url else str(self.path)

    @property
    def is_url(self) -> bool:
        """True if it is named by a URL, as ``s3://bucket/dir``."""
        return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", self.store or self.text) is not None

    def require(self) -> None:
        """Raise :class:`StoreNotFound` if the store does not exist. The error names what is there instead."""
        if not self.exists:
            raise StoreNotFound(*self._missing(), path=str(self.path))

    def open(self, readonly: bool = True) -> Store:
        """Open the store; read-only by default, which does not disturb writers."""
        if readonly:
            self.require()
        return Store(self.path, readonly=readonly)

    def _missing(self) -> tuple[str, str]:
        message = f"There is no store at {shown(self.path)}"
        if self.file is not None and self.name and self.path != store_of(self.file, None):
            queue = f"which has queue {self.name!r} of the graph"
            return f"{message}, {queue}.", f"cues run {quoted(self.text)}, or put the store back at its path."
        if self.file is not None:
            message = f"The graph {self.file.graph.id!r} has not run yet: there is no store at {shown(self.path)}."
            return message, f"cues run {quoted(self.text)}."
        stores = [p.parent for p in sorted(self.path.glob("**/data.mdb"))[:5]] if self.path.is_dir() else []
        if not stores and self.path.parent.is_dir():
            beside = [p.parent.name for p in self.path.parent.glob("*/data.mdb")]
            beside += [p.name for p in self.path.parent.glob("*.py")]
            import difflib

            stores = [self.path.parent / name for name in difflib.get_close_matches(self.path.name, beside, 3)]
        if self.path.is_file():
            message = f"{shown(self.path)} is a file; a store is a directory"
        instead = " or ".join(map(str, stores)) or "the directory of a store, or a graph file"
        return f"{message}.", f"give {instead}."


def resolve(target: str | None, store: str | None = None, command: str = "cues status") -> Target:
    """Parse a target. Imports the graph file, but opens no store."""
    text, name = _split((target or "").removeprefix("file://"))
    if not text:
        chosen = store or os.environ.get("CUES_STORE")
        if not chosen:
            raise Refused("No store is named.", "name a graph file or a store, or set CUES_STORE.")
        return Target(Path(chosen), None, name, chosen, command=command)
    if not Path(text).is_dir() and graphfile.is_file(text):
        file = graphfile.load(text)
        return Target(store_of_queue(file, name, store), file, name, text, store, command)
    return Target(Path(text), None, name, text, command=command)


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


def nearest(name: str, known: Sequence[str]) -> str:
    """The known name that is most similar to ``name``, or the first one."""
    import difflib

    near = difflib.get_close_matches(name, known, 1, 0.5)
    return near[0] if near else next(iter(known), "")


def open_queue(target: Target, store: Store) -> Queue:
    """The queue of an open store that a target names; a try log only by its whole name."""
    if "." not in target.name:
        return store.queue(queue_of(target, store.queues()))
    with store.core.view() as txn:
        known = [*store.queues(all=True), *all_ids(txn)]
    return open_named(store, queue_of(target, list(dict.fromkeys(known))))


def queue_of(target: Target, known: Sequence[str]) -> str:
    """The queue that a target names, which must be one of ``known``; the only one if it names none.

    ``orders/3`` is a partition of one of them.
    """
    queue, slash, partition = target.name.partition("/")
    if slash and queue in known and partition.isdecimal():
        return target.name
    hint = "make it with cues run, or with cues send --create."
    return _chosen(target, {id: id for id in known}, "queue", ", ".join(known) or "none", "queue", hint)


def processor_named(target: Target, known: Sequence[str]) -> ProcessorId:
    """The processor id that a target names, with or without its graph's name."""
    names = {id: id for id in known} | {id.partition(".")[2]: id for id in reversed(known)}
    listed, hint = ", ".join(known) or "none yet", "run the graph first: cues run."
    return ProcessorId(_chosen(target, names, "processor", listed, "graph.processor", hint))


def group_of(target: Target, known: Sequence[str]) -> str | None:
    """The consumer group that a target names (``group:billing``), which must be one of ``known``; None for others."""
    if not target.name.startswith(GROUP):
        return None
    ids = {GROUP + group: group for group in known}
    hint = "list the groups of a store with cues status."
    return _chosen(target, ids, "group", ", ".join(known) or "none", f"{GROUP}NAME", hint)


def _chosen(target: Target, names: Mapping[str, str], kind: str, listed: str, example: str, hint: str) -> str:
    """Return the id that a target names by one of ``names``; the only id if it names none."""
    if target.name in names:
        return names[target.name]
    ids = list(dict.fromkeys(names.values()))
    if not target.name:
        if len(ids) == 1:
            return ids[0]
        raise Refused(f"Which {kind} of {target.text}? It has {listed}.", target.again(min(ids, default=example)))
    near = nearest(target.name, list(names))
    if target.command.endswith(" forget"):
        near, hint = "", "name one of those, if it is gone for good."  # a command with the nearest name would delete it
    raise QueueNotFound(
        f"{target.text} has no {kind} {target.name.removeprefix(GROUP)!r}; it has {listed}.",
        f"{target.again(near)}." if near else hint,
        queue=target.name,
    )
