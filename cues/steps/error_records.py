"""The error messages of a store as records, with what was done about each.

    ErrorRecord    an error message: its place, inputs, causes, and its resolution
    Resolution     what was done: redriven, failed again, discarded
    ErrorRows      the rows of a home store about error messages
    ErrorLog       one partition of an error queue, read from its end

The error queue itself never changes. A row beside it, in the store of the processor (its home store), has the
resolution. So a redrive writes it in the commit of its outputs, also if the error queue is in another store.

    e <identity of the log> <index>      sealed msgpack of the resolution
    r <queue of redriven messages> \\0 <index>     sealed key of the error message of a redriven message

Both are in the database ``errors`` of the home store. A message without an ``e`` row is unresolved. Rows of messages
that are no longer on their queue are removed when others are written.

Not guaranteed: that an unresolved message is kept. An error queue has the retention that it was given, as every queue.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from cues import codec
from cues.base import clock, names
from cues.base.closing import Closing
from cues.base.data import dataclass
from cues.base.names import ProcessorId, ProcessorKey
from cues.errors import CuesError, QueueNotFound
from cues.forwarding import other_stores
from cues.graphs.processor_rows import all_keys, key_of
from cues.overrides import override
from cues.queues.base import views_of
from cues.queues.queue import open_queue
from cues.records import sealed

if TYPE_CHECKING:
    from cues.queues.log import Log
    from cues.records.batch import Batch
    from cues.storage.base_store import BaseStore
    from cues.storage.transaction import StoreTransaction

SETTLED: Final = frozenset({"resolved", "failed again", "discarded"})
"""The states of error messages that are settled."""
State = Literal["unresolved", "requested", "refused", "resolved", "failed again", "discarded"]
FORGOTTEN_MAX: Final = 1000
"""Most rows of removed messages that one commit deletes."""

_COUNTS: Final = struct.Struct(">QQ")
_PLACE: Final = struct.Struct(">8sQ")
_INDEX: Final = struct.Struct(">Q")


@dataclass(frozen=True)
class Resolution:
    """The state of an error message.

    requested       a redrive was asked for, and has not run yet
    refused         a redrive was asked for, and its processor could not take the messages: ``reason``
    resolved        it was redriven; its outputs are in the commit that wrote this
    failed again    it was redriven and failed; ``again`` has the indices of the new error messages
    discarded       somebody decided that nothing is to be done: ``reason``
    """

    state: State
    time: datetime
    by: str
    """The user and the process that asked."""
    reason: str = ""
    hash: str = ""
    """The delivery hash of the step that redrove it: 32 hex digits."""
    again: tuple[int, ...] = ()


@dataclass(frozen=True)
class ErrorRecord:
    """An error message."""

    queue: str
    """The error queue, or its partition (``errors/3``)."""
    index: int
    time: datetime
    processor: ProcessorId
    """The id of the unit that failed: ``graph.processor``, or ``graph.processor/3``; if it was renamed, its new id."""
    message: dict[str, Any]
    """The whole message, as it is on the queue."""
    resolution: Resolution | None
    identity: bytes
    """The identity of the log, under which its rows are kept."""
    batch: Batch | None
    """The record batch, which has the provenance; None in a directory of ``cues run --queues``."""
    unit_key: ProcessorKey
    """The key of the unit (:attr:`Node.key`), under which the store has its redrives."""

    @property
    def state(self) -> State:
        return "unresolved" if self.resolution is None else self.resolution.state

    @property
    def settled(self) -> bool:
        """True if nothing is left to do."""
        return self.state in SETTLED

    @property
    def inputs(self) -> dict[str, list[dict[str, Any]]]:
        """The messages that failed, by binding."""
        inputs = self.message.get(names.ERR_MESSAGES)
        if not isinstance(inputs, dict):
            return {}
        return {binding: messages for binding, messages in inputs.items() if isinstance(messages, list)}

    @property
    def count(self) -> int:
        """The number of messages that failed together; for several inputs, one message of each counts as one."""
        return max((len(messages) for messages in self.inputs.values()), default=1) or 1

    @property
    def config(self) -> dict[str, Any]:
        """The processor as it was declared when it failed."""
        config = self.message.get(names.ERR_CONFIG)
        return config if isinstance(config, dict) else {}

    @property
    def of_timer(self) -> bool:
        """True if a timer failed, and not a message."""
        return "timer" in self.config

    @property
    def causes(self) -> list[dict[str, str]]:
        """The chain of exceptions, outermost first: ``type``, ``message``, ``trace``."""
        return [cause for cause in self.message.get(names.ERR_CAUSE) or [] if isinstance(cause, dict)]

    @property
    def type(self) -> str:
        """The class of the outermost exception."""
        return str(self.causes[0].get("type")) if self.causes else "?"

    @property
    def text(self) -> str:
        """The text of the outermost exception."""
        return str(self.causes[0].get("message")) if self.causes else ""

    @property
    def attempts(self) -> int:
        """The number of calls that failed."""
        return int(self.config.get("attempt", 1))

    @property
    def redriven(self) -> list[dict[str, Any]]:
        """The error messages (``queue`` and ``index``) from whose redrive this one came; empty for a first failure."""
        return list(self.message.get(names.ERR_REDRIVEN) or [])

    @property
    def hash(self) -> str:
        """The delivery hash of the messages that failed: 32 hex digits."""
        return (self.batch.head.hash or b"").hex() if self.batch is not None else ""

    @property
    def key(self) -> bytes:
        return error_key(self.identity, self.index)


class Counts(NamedTuple):
    """The redrives of a unit."""

    asked: int = 0
    done: int = 0

    @staticmethod
    def unpack(key: bytes, raw: bytes | None) -> Counts:
        return Counts() if raw is None else Counts._make(sealed.unseal_fields(key, raw, "counts of redrives", _COUNTS))

    @staticmethod
    def read(txn: StoreTransaction, key: bytes) -> Counts:
        return Counts.unpack(key, txn.get(key))

    def pack(self) -> bytes:
        return _COUNTS.pack(*self)

    @property
    def waiting(self) -> int:
        return self.asked - self.done


def waiting(txn: StoreTransaction, unit: ProcessorId) -> int:
    """Return the number of redrives of a unit that were asked for and are not done."""
    return Counts.read(txn, names.redrives_key(key_of(txn, unit))).waiting


def error_key(identity: bytes, index: int) -> bytes:
    """Key of the row about the error message at ``index`` of the log with that identity."""
    return b"e" + _PLACE.pack(identity, index)


def redriven_key(queue: str, index: int) -> bytes:
    """Key of the row that says from which error message a redriven message came."""
    return b"r" + queue.encode() + b"\0" + _INDEX.pack(index)


def unpack_origin(key: bytes, raw: bytes) -> bytes:
    """Decode an ``r`` row; one of an earlier version has no seal. Raises :class:`StoreDamaged`."""
    return raw if len(raw) == 1 + _PLACE.size else sealed.unseal(key, raw, f"row of a redriven message ({key.hex()})")


def whoami() -> str:
    """The user and the process, for a resolution."""
    import getpass

    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user without a name
        user = f"user {os.getuid()}"
    return f"{user}, process {os.getpid()}"


def _fields(key: bytes, raw: bytes) -> dict[str, Any]:
    form = {"state": str, "time_ns": int, "by": str}
    fields: dict[str, Any] = sealed.unseal_value(key, raw, f"row of an error message ({key.hex()})", form)
    return fields


class ErrorRows:
    """The rows of one home store. Open it outside of transactions."""

    def __init__(self, home: BaseStore) -> None:
        self.home = home
        self.database: Any = None
        with suppress(QueueNotFound):
            self.database = home.core.database(names.ERRORS_DATABASE)

    def ensure(self) -> None:
        """Make the database, before a commit that writes rows."""
        if self.database is None:
            self.home.core.commit(self.home.core.create_database, names.ERRORS_DATABASE)
            self.database = self.home.core.database(names.ERRORS_DATABASE)

    def get(self, txn: StoreTransaction, key: bytes) -> dict[str, Any] | None:
        """Return the fields of an ``e`` row; None if there is none."""
        raw = None if self.database is None else txn.get(key, db=self.database)
        return None if raw is None else _fields(key, raw)

    def origin_of(self, txn: StoreTransaction, key: bytes) -> bytes | None:
        """Return the key of the error message that an ``r`` row names; None without such a row."""
        raw = txn.get(key, db=self.database)
        return None if raw is None else unpack_origin(key, raw)

    def put(self, txn: StoreTransaction, key: bytes, state: State, by: str, **fields: Any) -> None:
        """Write an ``e`` row."""
        body = {"state": state, "time_ns": clock.now_ns(), "by": by, **fields}
        sealed.put(txn, key, codec.pack(body), self.database)

    def settled(self, txn: StoreTransaction, identity: bytes, first: int, next: int) -> int:
        """Count the settled error messages of a log from ``first`` to ``next``."""
        if self.database is None:
            return 0
        count = 0
        cursor = txn.cursor(self.database)
        alive = cursor.set_range(error_key(identity, first))
        end = error_key(identity, next)
        while alive:
            key, raw = cursor.item()
            if key >= end or key[:1] != b"e":
                break
            count += _fields(key, raw)["state"] in SETTLED
            alive = cursor.next()
        return count

    def forget(self, txn: StoreTransaction, identity: bytes, first: int) -> None:
        """Delete some rows of messages before ``first``: retention removed them."""
        cursor = txn.cursor(self.database)
        alive = cursor.set_range(error_key(identity, 0))
        gone: list[bytes] = []
        end = error_key(identity, first)
        while alive and len(gone) < FORGOTTEN_MAX and (key := cursor.key()) < end:
            gone.append(key)
            alive = cursor.next()
        for key in gone:
            fields = self.get(txn, key)
            if fields is not None and fields["state"] != "requested":
                txn.delete(key, db=self.database)

    def resolution(self, txn: StoreTransaction, key: bytes) -> Resolution | None:
        fields = self.get(txn, key)
        if fields is None:
            return None
        return Resolution(
            fields["state"],
            clock.to_datetime(fields["time_ns"]),
            fields["by"],
            fields.get("reason", ""),
            fields.get("hash", ""),
            tuple(fields.get("again", ())),
        )


class ErrorLog:
    """A partition of an error queue, with the rows of the home store about it."""

    def __init__(self, rows: ErrorRows, log: Log) -> None:
        self.rows = rows
        self.log = log
        self.id = log.id

    @property
    def ends_with_an_error(self) -> bool:
        """True if the last message is an error message. The store does not say which queues are error queues."""
        with self.log.store.core.view() as txn:
            row = self.log.row(txn)
            raws = self.log.read_before(txn, row, row.next)
        try:
            batches = self.log.batches(raws)
            return bool(batches) and batches[0].messages()[-1].get(names.TYPE) == names.PROCESSOR_ERROR
        except CuesError:
            return False

    def unresolved(self) -> int:
        """Count the error messages that are on the queue and not settled. No message is read."""
        with self.log.store.core.view() as txn:
            row = self.log.row(txn)
        with self.rows.home.core.view() as txn:
            settled = self.rows.settled(txn, row.identity, row.first, row.next)
        return row.next - row.first - settled

    def record(self, index: int) -> ErrorRecord | None:
        """Return the error message at ``index``; None if there is none, or it is another message."""
        return next((record for record in self.records(True, index + 1, index)), None)

    def records(self, settled: bool = False, before: int | None = None, least: int = 0) -> Iterator[ErrorRecord]:
        """Yield error messages from the last one before the index ``before`` down to ``least``.

        ``settled``: also those that are settled. Runs of these are skipped by their rows, and not read.
        Ends at a message that cannot be read.
        """
        home, log = self.rows.home, self.log
        index = before
        while True:
            with log.store.core.view() as txn:
                row = log.row(txn)
            index = row.next if index is None else min(index, row.next)
            least = max(least, row.first)
            if not settled:
                with home.core.view() as txn:
                    index = self._skipped(txn, row.identity, index, least)
            if index <= least:
                return
            with log.store.core.view() as txn:
                raws = log.read_before(txn, log.row(txn), index)
            try:
                batches = log.batches(raws)
                messages = batches[0].messages() if batches else []
            except CuesError:
                return
            if not messages:
                return
            batch = batches[0]
            low, high = max(batch.first, least), min(index, batch.next)
            with home.core.view() as txn:
                keys = all_keys(txn)
                ids = {key: id for id, key in keys.items()}
                done = {at: self.rows.resolution(txn, error_key(row.identity, at)) for at in range(low, high)}
            time = clock.to_datetime(batch.head.time_ns)
            for at in range(high - 1, low - 1, -1):
                message, resolution = messages[at - batch.first], done[at]
                if message.get(names.TYPE) != names.PROCESSOR_ERROR:
                    continue
                config = message.get(names.ERR_CONFIG) or {}
                named = ProcessorId(str(config.get("id")))
                # The key of a unit stays the same when it is renamed, and an error message has it if it differs.
                unit = ids.get(ProcessorKey(str(config.get("key", named))), named)
                key = keys.get(unit, ProcessorKey(unit))
                record = ErrorRecord(self.id, at, time, unit, message, resolution, row.identity, batch, key)
                if settled or not record.settled:
                    yield record
            index = low

    def _skipped(self, txn: StoreTransaction, identity: bytes, index: int, least: int) -> int:
        """Return the index before which the last message is not settled; ``least`` if all are."""
        if self.rows.database is None:
            return index
        cursor = txn.cursor(self.rows.database)
        alive = index > least and cursor.set_key(error_key(identity, index - 1))
        while alive and index > least and cursor.key() == error_key(identity, index - 1):
            if _fields(cursor.key(), cursor.value())["state"] not in SETTLED:
                break
            index -= 1
            alive = cursor.prev()
        return index


class ErrorLogs(Closing):
    """The error queues of a store, and those of other stores to which its processors write."""

    def __init__(self, home: BaseStore, declared: Iterable[str] = (), only: str = "") -> None:
        """``declared``: queues that are error queues also when their last message is not an error message, or that are
        in other stores. ``only``: this queue or partition alone."""
        self.home = home
        self.rows = ErrorRows(home)
        self._opened = ExitStack()
        others = self._opened.enter_context(other_stores.Others(home))
        stores = [home, *(other for id in other_stores.places(home) if (other := others.get(id)) is not None)]
        self.logs: list[ErrorLog] = []
        queue = only.partition("/")[0]
        for store in stores:
            for name in store.queues():
                if only and name != queue:
                    continue
                for view in views_of(open_queue(store, name)):
                    log = ErrorLog(self.rows, view.core.log)
                    if only and only not in (name, view.core.log.id):
                        continue
                    if only or name in declared or log.ends_with_an_error:
                        self.logs.append(log)

    def tidy(self) -> None:
        """Delete rows of error messages that are not on their queues any more. The home store is open for writing."""
        for log in self.logs if self.rows.database is not None else ():
            with log.log.store.core.view() as txn:
                row = log.log.row(txn)
            self.home.core.commit(self.rows.forget, row.identity, row.first)

    def unresolved(self) -> int:
        """Count the error messages that are not settled."""
        return sum(log.unresolved() for log in self.logs)

    def records(self, settled: bool = False) -> Iterator[ErrorRecord]:
        """Yield the error messages of all queues, the last of each queue first."""
        for log in self.logs:
            yield from log.records(settled)

    @override
    def close(self) -> None:
        self._opened.close()
