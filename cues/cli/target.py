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

import difflib
import functools
import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from cues.base.names import ProcessorId
from cues.base.texts import quoted
from cues.cli import candidates
from cues.cli.options import F, WrongUsage, store_option
from cues.errors import NotInstalled, QueueNotFound, StoreNotFound
from cues.graphs import graphfile
from cues.graphs.graphfile import GraphFile
from cues.graphs.graphfile import shown as shown
from cues.queues.processor_rows import all_ids
from cues.queues.queue import Queue, open_named
from cues.queues.store import Store

GROUP: Final = "group:"
"""The beginning of a name that is a consumer group's."""


@dataclass(frozen=True)
class StoreTarget:
    """A store, which may not exist yet, the graph file that names it, and the name after ``#``."""

    path: Path
    file: GraphFile | None
    name: str
    text: str
    """The part before ``#``, as the user wrote it."""
    store: str | None = None
    """The value of ``--store``."""

    def again(self, name: str) -> str:
        """The command that runs now, with ``name`` after ``#``."""
        return f"{click.get_current_context().command_path} {quoted(f'{self.text}#{name}')}"

    @property
    def exists(self) -> bool:
        """True if the store exists."""
        return (self.path / "data.mdb").exists()

    @property
    def place(self) -> str:
        """The path or the URL."""
        given = self.store or self.text
        return given if _is_url(given) else str(self.path)

    @functools.cached_property
    def is_shared(self) -> bool:
        """True if it is a directory of ``cues run --queues``, and not a store.

        A URL is one. Raises :class:`StoreNotFound` if there is none at a URL.
        """
        is_url = _is_url(self.place)
        if not (is_url or (self.path / "_cues" / "id.json").exists()):
            return False
        if importlib.util.find_spec("deltalake") is None:
            raise NotInstalled(
                f"{self.place} is a directory of cues run --queues, and the packages that read it are not installed.",
                "run pip install 'cues-streams[spark]'.",
            )
        if is_url:
            from cues.spark.cluster.files import open_files

            if open_files(self.place, make=False).read("_cues/id.json") is None:
                raise StoreNotFound(
                    f"There is no directory of cues run --queues at {self.place}: the file _cues/id.json is missing.",
                    "give the URL that cues run --queues has.",
                    path=self.place,
                )
        return True

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
            stores = [self.path.parent / name for name in difflib.get_close_matches(self.path.name, beside, 3)]
        if self.path.is_file():
            message = f"{shown(self.path)} is a file; a store is a directory"
        instead = " or ".join(map(str, stores)) or "the directory of a store, or a graph file"
        return f"{message}.", f"give {instead}."


def takes_store(metavar: str, shared: bool = False) -> Callable[[F], F]:
    """The argument that names a store, and ``--store``. Passes the :class:`StoreTarget` as ``target``.

    ``shared``: the command can also do its work on a directory of ``cues run --queues``.
    """

    def decorate(fn: F) -> F:
        @functools.wraps(fn)
        def call(target: str | None, store: str | None, **given: Any) -> Any:
            found = resolve(target, store)
            if not shared and found.is_shared:
                name = click.get_current_context().command_path
                raise WrongUsage(
                    f"{name} is for stores, and {found.place} is a directory of cues run --queues.",
                    f"name the graph file or its store; or use cues tail {quoted(found.place)}#QUEUE.",
                )
            return fn(target=found, **given)

        required = not metavar.startswith("[")
        argument = click.argument("target", metavar=metavar, required=required, shell_complete=candidates.names)
        return argument(store_option(call))  # type: ignore[return-value]

    return decorate


def resolve(target: str | None, store: str | None = None) -> StoreTarget:
    """Parse a target. Imports the graph file, but opens no store."""
    text, name = _split((target or "").removeprefix("file://"))
    if not text:
        chosen = store or os.environ.get("CUES_STORE")
        if not chosen:
            raise WrongUsage("No store is named.", "name a graph file or a store, or set CUES_STORE.")
        return StoreTarget(Path(chosen), None, name, chosen)
    if not Path(text).is_dir() and graphfile.is_file(text):
        file = graphfile.load(text)
        return StoreTarget(store_of_queue(file, name, store), file, name, text, store)
    return StoreTarget(Path(text), None, name, text)


def _is_url(text: str) -> bool:
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


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
    near = difflib.get_close_matches(name, known, 1, 0.5)
    return near[0] if near else next(iter(known), "")


def open_queue(target: StoreTarget, store: Store) -> Queue:
    """The queue of an open store that a target names; a try log only by its whole name."""
    if "." not in target.name:
        return store.queue(queue_of(target, store.queues()))
    with store.core.view() as txn:
        known = [*store.queues(all=True), *all_ids(txn)]
    return open_named(store, queue_of(target, list(dict.fromkeys(known))))


def queue_of(target: StoreTarget, known: Sequence[str]) -> str:
    """The queue that a target names, which must be one of ``known``; the only one if it names none.

    ``orders/3`` is a partition of one of them.
    """
    queue, slash, partition = target.name.partition("/")
    if slash and queue in known and partition.isdecimal():
        return target.name
    hint = "make it with cues run, or with cues send --create."
    return _chosen(target, {id: id for id in known}, "queue", ", ".join(known) or "none", "queue", hint)


def processor_of(target: StoreTarget, known: Sequence[str]) -> ProcessorId:
    """The processor id that a target names, with or without its graph's name."""
    names = {id: id for id in known} | {id.partition(".")[2]: id for id in reversed(known)}
    listed, hint = ", ".join(known) or "none yet", "run the graph first: cues run."
    return ProcessorId(_chosen(target, names, "processor", listed, "graph.processor", hint))


def group_of(target: StoreTarget, known: Sequence[str]) -> str | None:
    """The consumer group that a target names (``group:billing``), which must be one of ``known``; None for others."""
    if not target.name.startswith(GROUP):
        return None
    ids = {GROUP + group: group for group in known}
    hint = "cues status lists the groups of a store."
    return _chosen(target, ids, "group", ", ".join(known) or "none", f"{GROUP}NAME", hint)


def _chosen(target: StoreTarget, names: Mapping[str, str], kind: str, listed: str, example: str, hint: str) -> str:
    """Return the id that a target names by one of ``names``; the only id if it names none."""
    if target.name in names:
        return names[target.name]
    ids = list(dict.fromkeys(names.values()))
    if not target.name:
        if len(ids) == 1:
            return ids[0]
        raise WrongUsage(f"Which {kind} of {target.text}? It has {listed}.", target.again(min(ids, default=example)))
    near = nearest(target.name, list(names))
    if click.get_current_context().info_name == "forget":
        near, hint = "", "name one of those, if it is gone for good."  # a command with the nearest name would delete it
    raise QueueNotFound(
        f"{target.text} has no {kind} {target.name.removeprefix(GROUP)!r}; it has {listed}.",
        f"{target.again(near)}." if near else hint,
        queue=target.name,
    )
