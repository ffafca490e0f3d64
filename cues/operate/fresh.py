"""``--fresh``: delete a store, and with ``--queues`` the files of the graph in the shared directory; nothing else.

It deletes only the files of a store, only if the directory is surely a store, and only while no process
has it open for writing. In a shared directory it deletes the queues that the graph writes and the records of its
processors, only while no driver runs the graph. Data that sinks wrote elsewhere stays.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cues.base.data import dataclass
from cues.base.names import ProcessorId, ProcessorKey
from cues.base.texts import count, size
from cues.engine import history, record, standing
from cues.engine.status import processor_of
from cues.errors import AlreadyRunning, CuesError, StoreDamaged, StoreForeign
from cues.forwarding import other_stores
from cues.graphs.graphfile import shown
from cues.graphs.plan import Plan
from cues.graphs.processor_rows import all_keys
from cues.queues.store import Store
from cues.storage import door, locks
from cues.storage.datafile import sync_directory
from cues.tools import metrics

_FILES = ("data.mdb", "data.mdb.compact", "lock.mdb", "locks", "wake", "open")


def filled(plan: Plan, path: Path) -> dict[str, list[str]]:
    """Return the targets of ``checkpoint=`` that the graph has filled, each with its sinks. They refuse a new store.

    A target knows a sink that was renamed by the key that it has in the store at ``path``.
    """
    keys: dict[ProcessorId, ProcessorKey] = {}
    if (path / "data.mdb").exists():
        with contextlib.suppress(CuesError), Store(path, readonly=True) as store, store.core.view() as txn:
            keys = all_keys(txn)
    sinks: dict[str, tuple[Any, list[str]]] = {}
    for node in plan.running:
        target = node.options.checkpoint
        if target is not None and hasattr(target, "holds"):
            sinks.setdefault(getattr(target, "where", repr(target)), (target, []))[1].append(keys.get(node.id, node.id))
    return {
        where if "://" in where else shown(where): held
        for where, (target, ids) in sinks.items()
        if (held := target.holds(ids))
    }


@dataclass(frozen=True)
class SharedFiles:
    """The files of a graph in a shared directory."""

    words: str
    remove: Callable[[], None]


@contextlib.contextmanager
def shared_files(place: str | None, graph: str) -> Iterator[SharedFiles | None]:
    """The files of a graph in a shared directory, if it has one. No driver of the graph runs during the block.

    Raises :class:`AlreadyRunning` if one runs.
    """
    if place is None:
        yield None
        return
    from cues.spark.cluster import operations
    from cues.spark.cluster.files import open_files

    files = open_files(place)
    found = operations.files_of(files, graph)
    if found is None:
        yield None
        return
    with operations.running_none(files, graph):
        found = operations.files_of(files, graph) or found  # no driver changes it from here on
        queues = count(len(found.queues), "queue") + (f" ({', '.join(found.queues)})" if found.queues else "")
        records = f"records and state of {count(len(found.processors), 'processor')}"
        words = f"the files of the graph {graph!r} in {place}: {queues}, {records}"
        yield SharedFiles(words, functools.partial(operations.remove, files, graph, found))


def clear(
    path: Path,
    ask: Callable[[str], object],
    is_open: bool = False,
    elsewhere: Mapping[str, Path] | None = None,
    targets: Mapping[str, Sequence[str]] | None = None,
    shared: SharedFiles | None = None,
) -> None:
    """Delete the store at ``path``, if there is one, and the files ``shared``.

    ``ask`` is called before with a text of what goes and what stays; an exception leaves all as it is.

    ``elsewhere`` are the graph's queues in other stores, which stay. ``targets`` is the result of :func:`filled`: they
    would stop a run over a new store, so nothing is deleted.

    ``is_open``: this process itself has it open (``Graph(store=cues.open(…))``), so it must stay.
    """
    if is_open:
        raise CuesError(
            f"The graph file opens its store {shown(path)} itself, so --fresh cannot delete it.",
            "give the graph a path, Graph(store='…'), or delete the directory.",
        )
    if targets:
        shown_targets = " and ".join(f"{where} (by {', '.join(ids)})" for where, ids in targets.items())
        ids = ", ".join(f"'{id}'" for held in targets.values() for id in held)
        raise CuesError(
            f"{shown_targets} was filled from the store {shown(path)} and refuses a new one; nothing was deleted.",
            f"remove {' and '.join(targets)}, or the data of these sinks and their rows (delete from"
            f" cues_positions where processor in ({ids})); then use --fresh again.",
        )
    exists = (path / "data.mdb").exists()
    if not exists and path.is_file():
        raise StoreForeign(
            f"{shown(path)} is a file; a store is a directory.", "give a directory: --store DIR.", path=str(path)
        )
    if not exists and shared is None:
        return
    what = [] if shared is None else [shared.words]
    if exists:
        what.insert(0, f"the store {shown(path)}: {_describe(path)}")
        refuse_running(path)
    stays = "Data that sinks wrote elsewhere stays."
    if elsewhere:
        queues = ", ".join(f"{name} in {shown(place)}" for name, place in elsewhere.items())
        stays = f"{queues} stay as they are: messages that are written there again are there twice. {stays}"
    ask(f"--fresh deletes {'; and '.join(what)}. {stays}")
    if shared is not None:
        shared.remove()  # first, because a directory that was fed from a store refuses another one
    if not exists:
        return
    _forget(path)
    try:
        register = locks.open_locks(path / "locks")
    except OSError as error:
        raise CuesError(
            f"{shown(path)} cannot be locked ({error.strerror}).", "check the permissions of the directory."
        ) from error
    try:
        # While the register is held no process becomes a writer of this store.
        register.try_lock(locks.REGISTER)
        refuse_running(path, register)
        delete_store(path)
    finally:
        register.unlock(locks.REGISTER)
        register.close()


def _describe(path: Path) -> str:
    try:
        with Store(path, readonly=True) as store:
            queues = metrics.of_queues(store)
            messages = sum(queue.messages for queue in queues)
            known = len(set(map(processor_of, standing.processors(store))))
            disk = size(store.info()["disk"])
        return (
            f"{count(len(queues), 'queue')}, {count(messages, 'message')},"
            f" positions and state of {count(known, 'processor')} ({disk})"
        )
    except StoreDamaged as error:
        # --fresh may delete a damaged store, if it is surely a Cues store.
        if not (path / "locks").exists() or not (path / "wake").exists():
            raise
        return f"it is damaged ({error.message.rstrip('.')})"


def refuse_running(path: Path, register: locks.LockFile | None = None) -> None:
    try:
        opened = register or locks.open_locks(path / "locks")
    except OSError:
        return
    try:
        pid = opened.holder(locks.OPENED, locks.OPENED_END)
    finally:
        if register is None:
            opened.close()
    if pid is not None:
        raise AlreadyRunning(
            f"The store {shown(path)} is in use by process {pid} ({locks.process_state(pid)}); nothing was deleted.",
            f"stop that process first (kill {pid}).",
            pid=pid,
        )


def _forget(path: Path) -> None:
    """Remove the rows of the store's readers in other stores, which would keep messages for them for ever."""
    with contextlib.suppress(CuesError), Store(path, readonly=True) as store:
        for id in other_stores.places(store):
            with contextlib.suppress(CuesError), other_stores.opened(store, id, readonly=False) as other:
                other_stores.forget(other, home=store.id)


def delete_store(path: Path) -> None:
    door.look(path / "bells", stat.S_IFDIR)
    for bell in (path / "bells").glob("*"):
        bell.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        (path / "bells").rmdir()
    for pattern in ("lease-*", record.PATTERN, record.PLACES, history.PATTERN, "*.[0-9]*-[0-9]*.part"):
        for file in path.glob(pattern):
            file.unlink(missing_ok=True)
    for name in _FILES:
        (path / name).unlink(missing_ok=True)
        if name == "data.mdb":  # a power cut must not leave it without the mark that it was being written
            sync_directory(path)
    with contextlib.suppress(OSError):
        os.rmdir(path)  # fails if other files are there, which are not ours
