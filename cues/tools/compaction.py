"""Compaction: removal of unused queues, and of free pages, which the file system gets back.

    data.mdb ──copy, without free pages──▶ data.mdb.compact ──fsync, rename──▶ data.mdb

1. The store is opened exclusively (:func:`cues.storage.exclusive.alone`): no other process has it open.
2. The unfinished copy of a compaction that died is deleted.
3. The queues to remove are checked and removed, in one commit.
4. LMDB writes a compacted copy beside the data file. It gets the transaction numbers of the original, is
   synced, and is opened and compared.
5. The copy is renamed over the data file, and the directory synced.

A death at any moment leaves one whole store: before the commit of 3 the old one, before 5 the one without
the queues, and then the compacted one. Its id, durability and map size are the same, and so are the
identities and indices of its queues, positions, state and try logs.

A queue is removed only by its name. An empty queue is not removed by itself: it may get messages soon, and
its identity and next index ensure that no index is used twice.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from cues import faults
from cues.base import names
from cues.base.checks import nearest
from cues.base.data import dataclass
from cues.base.texts import quoted
from cues.errors import QueueInUse, QueueNotFound, StoreError, StoreFull
from cues.forwarding.marks import CONSUMER
from cues.forwarding.other_stores import ProducerRow
from cues.graphs.processor_rows import ProcessorInputs
from cues.queues.base import partitions_of
from cues.queues.log import Log, read_row
from cues.queues.store import Store
from cues.storage import door, timeline, transaction
from cues.storage.datafile import carry_on, sync_directory
from cues.storage.exclusive import alone
from cues.storage.transaction import StoreTransaction

COPY: Final = "data.mdb.compact"
"""The copy beside the data file; if a compaction dies, the next one deletes it."""

Progress = Callable[[int, int], None]
"""Called with the number of bytes that are copied, and about the total number."""


@dataclass(frozen=True)
class Compaction:
    """The result of a compaction or a dry run; sizes in bytes on the disk. In a dry run ``after`` is an estimate."""

    before: int
    after: int
    removed: tuple[str, ...]


def look(store: Store, remove: Iterable[str] = ()) -> Compaction:
    """Return the result that :func:`compact` would have now. The store may be in use. Raises the same errors."""
    chosen = tuple(dict.fromkeys(remove))
    tails = _tails(store)
    with store.core.view() as txn:
        for queue in chosen:
            _check_removable(txn, store, queue, tails)
    return Compaction(store.info()["disk"], store.core.live_bytes(), chosen)


def compact(path: str | os.PathLike[str], remove: Iterable[str] = (), progress: Progress | None = None) -> Compaction:
    """Remove the queues ``remove`` and rewrite the store's data file without free pages.

    A queue can be removed when it is empty, no processor has a position on it, and no try log names it (a
    log keeps several hundred steps). Positions of named tailers and groups on it are removed too. Either
    all of ``remove`` are removed, or none.

    Needs free disk space for a copy of the used pages. Raises :class:`QueueInUse`, :class:`QueueNotFound`,
    :class:`AlreadyRunning` (another process has the store open), :class:`StoreError` (this process has
    it open), :class:`StoreFull`. After an error the store is as before. There is one exception: if there is no
    room for the copy, the queues may be removed already.
    """
    chosen = tuple(dict.fromkeys(remove))
    place = Path(path)
    with alone(place, Store) as store:
        copy = place / COPY
        copy.unlink(missing_ok=True)
        before = store.info()["disk"]
        if chosen:
            _remove(store, chosen)
            faults.point("compact.removed")
        total = store.core.live_bytes()
        free = shutil.disk_usage(place).free
        if free < total:
            raise StoreFull(
                f"A copy of the store {path} takes about {total:,} bytes, and the disk has {free:,} free.",
                "free space on the disk.",
                path=str(path),
            )
        try:
            _copy(store, copy, total, progress or (lambda done, total: None))
        except BaseException as error:
            with suppress(OSError):
                copy.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise StoreError(
                    f"The copy {copy} cannot be written ({error.strerror}); the store is as before.",
                    "free space on the disk, or check the permissions of the directory.",
                    path=str(path),
                ) from error
            raise
        faults.point("compact.copied")
        copy.rename(place / "data.mdb")
        faults.point("compact.renamed")
        sync_directory(place)  # first: the disk may have no room for the next file
        timeline.mark(place)  # a death before it costs a timeline
    return Compaction(before, (place / "data.mdb").stat().st_blocks * 512, chosen)


def _remove(store: Store, queues: Sequence[str]) -> None:
    tails = _tails(store)
    with store.core.view() as txn:
        partitions = [(queue, partition) for queue in queues for partition in range(partitions_of(txn, queue))]
    databases = [names.log_database(queue, partition) for queue, partition in partitions]
    for name in databases:
        store.core.database(name)  # opened here, because it must not be opened first inside the transaction

    def work(txn: StoreTransaction) -> None:
        for queue in queues:
            _check_removable(txn, store, queue, tails)
        for name in databases:
            store.core.drop_database(txn, name)
        for queue in queues:
            for key in _rows(txn, queue):
                txn.delete(key)

    store.core.commit(work)


def _tails(store: Store) -> list[Log]:
    return [Log(store, queue) for queue in store.queues(all=True) if "." in queue and not names.split_fork(queue)]


def _check_removable(txn: StoreTransaction, store: Store, queue: str, tails: Sequence[Log]) -> None:
    """Raise unless the queue exists, is empty, and has no reader, forwarder or try log that names it."""
    in_use = functools.partial(QueueInUse, queue=queue)
    if "." in queue:
        raise in_use(f"{queue!r} belongs to a processor.", "name a queue of your own.")
    if txn.get(names.queue_key(queue)) is None:
        known = [name for name, *_ in transaction.named_rows(txn, names.queue_key("")) if "." not in name]
        raise QueueNotFound(
            f"The store {store.path} has no queue {queue!r}; it has {', '.join(known) or 'none'}.",
            nearest(queue, known, "give {!r}.", "give one of those."),
            queue=queue,
        )
    partitions = range(partitions_of(txn, queue))
    for partition in partitions:
        row = read_row(txn, queue, partition)
        if row.first != row.next:
            raise in_use(
                f"The queue {queue!r} has {row.next - row.first:,} messages.",
                "empty it with store.queue(…).delete(), if you do not need the messages.",
            )
    for processor, key, raw in transaction.named_rows(txn, names.TOPOLOGIES):
        topology = ProcessorInputs.unpack(key, raw, processor)
        if any(log.partition("/")[0] == queue for log, other in zip(topology.queues, topology.stores) if not other):
            raise in_use(
                f"The processor {processor!r} has a position on the queue {queue!r}.",
                "start its graph without that input (--accept-topology), which removes the position.",
            )
    for name, key, raw in transaction.named_rows(txn, names.PRODUCERS):
        if any(names.split_log(log)[0] == queue for log in ProducerRow.unpack(key, raw).ends):
            raise in_use(
                f"The processor {name.partition('/')[2]!r} of another store forwards to the queue {queue!r}.",
                "use --forget, if that store is lost for good.",
            )
    logs = [names.log_id(queue, partition) for partition in partitions]
    for name, *_ in [row for log in logs for row in transaction.named_rows(txn, names.low_water_prefix(log))]:
        reader = name.partition("/")[2]
        if reader.startswith(CONSUMER):
            raise in_use(
                f"The {reader} has a position on the queue {queue!r}.",
                "if it does not need the queue any more, run cues forget"
                f" {quoted(store.path)}#{quoted(reader.replace(' ', ':', 1))}.",
            )
        raise in_use(
            f"The processor {name.partition('/')[2]!r} of another store reads the queue {queue!r}.",
            "start its graph without that input (--accept-topology), or use --forget if its store is lost for good.",
        )
    for log in tails:
        if queue in _named_by(txn, log):
            raise in_use(
                f"The try log of {log.queue!r} names messages of the queue {queue!r}.",
                "try again after a thousand steps of the processor without it; its log has fewer.",
            )


def _named_by(txn: StoreTransaction, log: Log) -> set[str]:
    """The input and output queues that a try log names; it keeps several hundred steps."""
    row = log.row(txn)
    queues: set[str] = set()
    for batch in log.batches(log.read(txn, row, row.first, row.next - row.first)):
        for message in batch.messages():
            queues.update(names.split_log(log)[0] for log in message.get(names.MESSAGE_INDEX, ()))
            for tailer in message.get(names.TAILER_INDICES, ()):
                queues.add(tailer.rpartition(".")[2].partition("/")[0])
    return queues


def _rows(txn: StoreTransaction, queue: str) -> list[bytes]:
    """The keys of all rows about a queue: record, rows of logs, named readers, claims."""
    keys = [names.queue_key(queue)]
    for partition in range(partitions_of(txn, queue)):
        log = names.log_id(queue, partition)
        keys += [names.row_key(queue, partition), names.timeline_key(log), names.age_key(log)]
        prefixes = [names.reader_key(queue, partition, ""), names.clocks_prefix(log), names.claim_key(log, "")]
        prefixes += [names.schemas_prefix(log), names.spans_prefix(log), names.opens_prefix(log)]
        for prefix in prefixes:
            keys += [key for key, _ in transaction.rows(txn, prefix)]
    return keys


def _copy(store: Store, copy: Path, total: int, progress: Progress) -> None:
    """Write a durable copy, and compare it with the store."""
    mode = (copy.parent / "data.mdb").stat().st_mode
    done = 0
    with open(copy, "x+b", opener=door.private) as file:

        def write(piece: bytes) -> None:
            nonlocal done
            file.write(piece)
            done += len(piece)
            faults.point("compact.copying")
            progress(done, max(done, total))

        txnid = store.core.dump(write)
        carry_on(file, txnid)
        os.fchmod(file.fileno(), mode & 0o7777)
        file.flush()
        os.fsync(file.fileno())
    if not store.core.is_copy(copy, txnid):
        raise StoreError(
            f"The copy {copy} differs from the store; the store was not changed.",
            "look for damage with: cues check.",
            path=store.path,
        )
