"""Backpressure: writers of a queue with ``max_lag`` or ``max_bytes`` wait for its readers.

    gate = Gate(writer, queues)          one for each writer
    gate.room()                          messages that may be appended now; 0: the writer waits
    wait_for_room(gate, …)               the wait of a program that appends by itself

1. Before a writer begins, it reads how far each known reader of its queues is behind: the readers for which the policy
   ``retention="read"`` waits. If one of them has not read ``max_lag`` messages or ``max_bytes`` bytes, there is no
   room.
2. A writer without room does not begin its step, its transaction or its append. It holds nothing meanwhile: no
   transaction, no messages that it took. So a kill during the wait changes nothing.
3. A writer that waits for longer than :data:`NOTE_S` notes it in a file, in the directory of each store that it reads
   from or writes to. ``cues status`` shows these notes.
4. **No deadlock.** Each writer waits for all of its readers. So if a reader waits, by these notes, for the writer
   itself, directly or over others, neither could ever continue: the writer does not wait for this reader. A join that
   has nothing to take on one input is not late on the others, and notes this too; nobody waits for it.

The rows of readers are read before the commit, not in it. So a queue may get longer than its bound, by one commit of
each writer. Not guaranteed either: a bound on messages of a transaction that is not acknowledged yet; only its first
message on a queue waits.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from cues.base import clock, logs
from cues.base.data import dataclass
from cues.errors import QueueFull
from cues.overrides import override
from cues.queues import readers
from cues.queues.base import BaseQueue, views_of
from cues.queues.committed import CommittedLog, counts_places
from cues.queues.log import Log
from cues.queues.options import QueueOptions
from cues.queues.readers import Reader
from cues.storage import door, locks, wakeup
from cues.storage.transaction import StoreTransaction

NOTE_S: Final = 0.05
"""Seconds of a wait before it is noted. Shorter waits are usual, and cost no file."""
WARN_S: Final = 1.0
"""Seconds of a wait before the warning, which a writer gives once."""
ENDLESS: Final = 1 << 62
"""The room of queues without bounds, in messages."""
_FOLDER: Final = "waits"
_CHAIN_MAX: Final = 10_000
"""Notes that one search for a cycle reads."""

logger = logs.logger("cues")


class Lag(NamedTuple):
    """A reader of a log, and how far it is behind."""

    reader: Reader
    behind: int
    """Messages that it has not read."""


@dataclass(frozen=True)
class Edge:
    """A reader for which a writer waits."""

    queue: str
    store: str
    """The directory of the queue's store."""
    home: str
    reader: str
    behind: int
    limit: str
    hint: str

    @override
    def __str__(self) -> str:
        return f"{self.reader} has not read {self.behind:,} messages of {self.queue} ({self.limit})"


@dataclass(frozen=True)
class Note:
    """A wait that is under way."""

    writer: str
    home: str
    pid: int
    boot: str
    since: str
    edges: tuple[Edge, ...] = ()
    starved: str = ""
    """The queue on which a join has nothing to take; then nobody waits for it."""

    @property
    def alive(self) -> bool:
        """True if the process that wrote the note is alive."""
        return self.boot == clock.boot_id() and locks.process_state(self.pid) != "gone"

    @override
    def __str__(self) -> str:
        return f"{self.writer} waits: {'; '.join(map(str, self.edges))}"


# --- readers ------------------------------------------------------------------------------------


def lags(txn: StoreTransaction, log: Log) -> Iterator[Lag]:
    """Iterate over the known readers of a log, those for which the policy ``retention="read"`` waits."""
    row = log.row(txn)
    committed: list[tuple[int, int]] = []

    def behind(identity: bytes, position: int) -> int:
        first, next = row.first, row.next
        if counts_places(txn, log, identity):  # messages that are pending cannot be read yet: they do not count
            if not committed:
                of_places = CommittedLog(log.store, log.queue, log.partition).row(txn)
                committed.append((of_places.first, of_places.next))
            first, next = committed[0]
        return max(0, next - max(position, first))

    for reader in readers.of_log(txn, log):
        if not reader.kind.expired(txn, log.store, reader):
            yield Lag(reader, behind(reader.identity, reader.next))


def room_on(txn: StoreTransaction, queue: BaseQueue, options: QueueOptions, excused: Any) -> tuple[int, list[Edge]]:
    """Return the messages for which a log has room, and the readers that are too far behind, without the excused."""
    log = queue.core.log.records
    row = log.row(txn)
    room, late = ENDLESS, []
    mean = 0.0
    if options.max_bytes is not None and row.next > row.first:
        mean = max(1.0, log.size_bytes(txn) / (row.next - row.first))
    for reader, behind in lags(txn, log):
        home = reader.home.hex()
        if (home, reader.name) in excused:
            continue
        limits = []
        if options.max_lag is not None:
            room = min(room, max(0, options.max_lag - behind))
            if behind >= options.max_lag:
                limits.append(f"max_lag={options.max_lag:,}")
        if options.max_bytes is not None and mean:
            assert isinstance(options.max_bytes, int)
            unread = behind * mean
            room = min(room, max(int(unread < options.max_bytes), int((options.max_bytes - unread) / mean)))
            if unread >= options.max_bytes:
                limits.append(f"max_bytes={options.max_bytes:,}")
        if limits:
            where = os.path.abspath(log.store.directory)
            hint = reader.kind.hint(reader, log.id, where)
            late.append(Edge(log.id, where, home, reader.name, behind, ", ".join(limits), hint))
    return room, late


# --- notes --------------------------------------------------------------------------------------


def _path(store: str, home: str, writer: str) -> Path:
    folder = Path(store, _FOLDER)
    door.look(folder, stat.S_IFDIR)
    return folder / f"{home}.{quote(writer, safe='')}.json"


def notes(store: str | os.PathLike[str]) -> list[Note]:
    """Return the waits that are noted in the directory of a store, of processes that are alive."""
    found = [_read(path) for path in sorted(Path(store, _FOLDER).glob("*.json"))]
    return [note for note in found if note is not None and note.alive]


def _read(path: Path) -> Note | None:
    try:
        data = json.loads(door.read_text(path))
        return Note(**data | {"edges": tuple(Edge(**edge) for edge in data["edges"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _cyclic(edge: Edge, waiter: set[tuple[str, str]]) -> bool:
    """Return whether the reader of an edge waits, over the notes, for one of ``waiter``, or for a starved join."""
    known: set[tuple[str, str, str]] = set()
    ways = [edge]
    while ways and len(known) < _CHAIN_MAX:
        at = ways.pop()
        if (at.home, at.reader) in waiter:
            return True
        if (at.store, at.home, at.reader) in known:
            continue
        known.add((at.store, at.home, at.reader))
        note = _read(_path(at.store, at.home, at.reader))
        if note is None or not note.alive:
            continue
        if note.starved:
            return True
        ways += note.edges
    return False


class Gate:
    """The waits of one writer. Used by one thread at a time."""

    def __init__(
        self,
        writer: str,
        queues: Iterable[BaseQueue],
        home: str = "",
        own: Iterable[str] = (),
        reads: Iterable[str] = (),
    ) -> None:
        """``own`` are the names under which the writer itself reads, with positions in the store ``home``; ``reads``
        are the directories of the stores that it reads from."""
        self.writer = writer
        self._queues = list(queues)
        self._home = home
        self._own = {(home, name) for name in own}
        self._reads = list(reads)
        self._excused: set[tuple[str, str]] = set()
        """Readers that wait for this writer: it does not wait for them this time."""
        self._paths: list[Path] = []
        """The files of the note, if there is one."""
        self._noted: Any = None
        self._since = 0.0
        self._warned = False
        self._counted = 0.0
        self.noted = False
        """True if the writer waits, or has waited, since the last :meth:`clear`."""
        self.starving = False
        """True if :meth:`starve` was called last."""
        self.late: list[Edge] = []
        """The readers for which the writer waits; empty if it does not wait."""

    @property
    def bounded(self) -> list[BaseQueue]:
        """The queues that have a bound now."""
        return [queue for queue in self._queues if queue.core.bounded]

    @property
    def interests(self) -> list[tuple[wakeup.Doorbells | None, int]]:
        """The doorbells that the readers ring."""
        return [(view.store.core.doorbells, view.core.log.mask) for queue in self.bounded for view in views_of(queue)]

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began; 0 if the writer does not wait."""
        return time.monotonic() - self._since if self._since else 0.0

    def room(self) -> int:
        """Return the messages that may be appended; 0 if the writer has to wait.

        A wait that is over is forgotten by :meth:`clear`, which the writer calls when it begins.
        """
        for queue in self._queues:
            if queue.core.bounded:
                break
        else:
            self.late = []
            return ENDLESS
        bounded = self.bounded
        room, late = self._look(bounded, self._own | self._excused)
        if late and self.waited_s > NOTE_S:
            cyclic = {(edge.home, edge.reader) for edge in late if _cyclic(edge, self._me)}
            if cyclic:
                self._excused |= cyclic
                room, late = self._look(bounded, self._own | self._excused)
        self.late = late
        return 0 if late else max(1, room)

    @property
    def _me(self) -> set[tuple[str, str]]:
        return self._own | {(self._home, self.writer)}

    def _look(self, bounded: Sequence[BaseQueue], excused: set[tuple[str, str]]) -> tuple[int, list[Edge]]:
        room, late = ENDLESS, []
        for queue in bounded:
            for view in views_of(queue):
                with view.store.core.view() as txn:
                    free, behind = room_on(txn, view, view.core.options, excused)
                room = min(room, free)
                late += behind
        return room, late

    def note_wait(self, warn: Callable[[str], object]) -> float:
        """Note that the writer waits for :attr:`late`; call ``warn`` with a text, once, if it takes long.

        Return the seconds of the wait since the last call.
        """
        now = time.monotonic()
        if not self._since:
            self._since = self._counted = now
            self.noted = True
            return 0.0
        waited_s, self._counted = now - self._counted, now
        if self.waited_s >= NOTE_S:
            self._note(tuple(self.late), "")
        if self.waited_s >= WARN_S and not self._warned:
            self._warned = True
            warn(f"waits for readers: {'; '.join(map(str, self.late))}. {self.hint}")
        return waited_s

    def starve(self, queue: str) -> None:
        """Note that the writer, a join, has nothing to take from ``queue``."""
        self.starving = True
        self._note((), queue)

    @property
    def hint(self) -> str:
        """The hint for a reader that is dead."""
        return f"Start the reader; or, if it is gone for good, give it up: {self.late[0].hint}" if self.late else ""

    def _note(self, edges: tuple[Edge, ...], starved: str) -> None:
        about = tuple((edge.queue, edge.home, edge.reader) for edge in edges), starved
        if about == self._noted and self._paths:
            return
        self._noted = about
        now = clock.to_datetime(clock.now_ns()).isoformat()
        note = Note(self.writer, self._home, os.getpid(), clock.boot_id(), now, edges, starved)
        text = json.dumps(asdict(note))
        self.noted = True
        # A writer that reads under other names (a transaction) is found under each of them.
        readers = sorted({name for _, name in self._own} | {self.writer})
        stores = dict.fromkeys([*self._reads, *(edge.store for edge in edges)])
        self._paths = [_path(store, self._home, name) for store in stores for name in readers]
        for path in self._paths:
            with contextlib.suppress(OSError):  # a full disk, or a reader without permission
                door.folder(path.parent)
                door.replace(path, text)

    def clear(self) -> None:
        """Note that the writer does not wait any more."""
        self._excused = set()
        self._since = 0.0
        self.late = []
        self.noted = self.starving = False
        paths, self._paths = self._paths, []
        for path in paths:
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def take_over(self) -> None:
        """Remove a note of an earlier process of this writer: its number may belong to another process now."""
        self._paths = [_path(store, self._home, self.writer) for store in self._reads]
        self.clear()


def wait_for_room(gate: Gate, timeout: float | None, check: Callable[[], object] = lambda: None) -> None:
    """Wait until the queues of a gate have room.

    Raises :class:`QueueFull` after ``timeout`` seconds (None: never), and the errors of ``check``, which is called
    while it waits.
    """

    def ready() -> bool:
        check()
        if gate.room():
            return True
        gate.note_wait(lambda text: logger.warning("%s: %s", gate.writer, text))
        return False

    if gate.room():
        return
    try:
        if not wakeup.wait(gate.interests, ready, timeout):
            late = gate.late[0]
            raise QueueFull(
                f"Waited {timeout:g} s for room on {late.queue!r}: {'; '.join(map(str, gate.late))}. Nothing was"
                " written.",
                f"write again later, or start the reader; if it is gone for good, give it up: {late.hint}",
                queue=late.queue,
                readers=[edge.reader for edge in gate.late],
            )
    finally:
        gate.clear()


def await_room(queues: Iterable[BaseQueue], own: Iterable[str] = (), timeout: float | None = None) -> None:
    """Wait before one commit of a program that appends to ``queues``, and moves the readers ``own`` of their store.

    Raises :class:`QueueFull` after ``timeout`` seconds.
    """
    bounded = [queue for queue in queues if queue.core.bounded]
    if not bounded:
        return
    store = bounded[0].store
    wait_for_room(Gate(program(), bounded, store.id.hex(), own, [store.directory] if own else []), timeout)


def program() -> str:
    """The name of a writer that is not a processor."""
    thread = threading.current_thread()
    return f"process {os.getpid()}" + (f" thread {thread.ident}" if thread is not threading.main_thread() else "")
