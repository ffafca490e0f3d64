"""Integrity: read everything in a store and report all damage, one sentence each.

    format     the store can be opened at all (truncated and foreign files are refused there)
    pages      each page of the data file is free, or named exactly once; LMDB's counts are those of its pages
    queues     each has its record, its row and its database, and they agree
    logs       every record batch: keys grow, checksum, header, body, times; no index is missing
    rows       checksums; positions are inside their queues, after the batches whose seals they keep
    producers  the clocks of each producer of a log: checksums; pending messages are on the log
    others     rows about other stores; every step on a fork queue is whole
    outside    source positions of external writers: checksums; not beyond their queue
    groups     rows of consumer groups: checksums, positions inside their queues
    tries      every attempt names messages that have its hash
    state      every piece of every row: checksum, number, completeness

A store may be checked while its graph runs: the check uses short read transactions, so it does not hold
freed pages, and messages that are purged meanwhile are not reported as missing. Only the pages are counted in one
transaction, without their values.

Not guaranteed: that a damaged store can be read. LMDB follows the page numbers that it finds, and
a wrong one may end the process; so ``cues check`` reads in a child (:func:`main`, :func:`walk`).
The content of free pages is not checked. The name in the key of a row is compared with the rest of the store where
something else names it too; of a named tailer, an external writer or a consumer nothing does.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Final

from cues import codec
from cues.base import names
from cues.base.names import ProcessorId, ProcessorKey
from cues.checkpoints.lmdbstore import unpack_fence
from cues.engine import identities, replays
from cues.errors import BatchDamaged, CodecError, CuesError, NotInstalled, StoreDamaged, StoreError, StoreVersion
from cues.forwarding import external_writers, fork, other_stores
from cues.forwarding.forwarder import Forwarder
from cues.forwarding.marks import Mark
from cues.graphs import processor_rows
from cues.graphs.pause import ProcessorPause
from cues.graphs.processor_rows import ProcessorInputs, ProcessorRow
from cues.groups import claims, group_rows
from cues.groups.group_rows import MemberRow
from cues.producers import clocks, spans
from cues.queues import retention
from cues.queues.base import unpack_record
from cues.queues.committed import CommittedLog, counts_places
from cues.queues.log import KEY, Log
from cues.queues.options import QueueOptions
from cues.queues.store import Store
from cues.records import batch, provenance, sealed
from cues.records.batch import Batch
from cues.records.columns import StoredSchema
from cues.records.log_row import LogRow, unpack_row
from cues.records.positions import NO_SEAL, unpack_reader
from cues.steps import state
from cues.steps.error_records import Counts
from cues.steps.pauses import ErrorWindow
from cues.steps.pending import PendingRow
from cues.storage import door, timeline, transaction
from cues.storage.datafile import ALWAYS, check_format
from cues.storage.pages import META_PAGES, Census, DataFile
from cues.storage.transaction import StoreTransaction
from cues.txn.consumer_rows import ConsumerRow, PublisherRow

PROBLEMS_MAX: Final = 1000
"""The largest number of reported problems; more would not help."""
_CHUNK_RECORDS: Final = 2000
"""Records of one read transaction: a few milliseconds, so that it holds freed pages only briefly."""
_LOOKS: Final = 100
_FORK_BYTES: Final = 4 << 20
"""Bytes of a fork queue that are in memory at a time."""
_PIECE: Final = struct.Struct(">H")

Progress = Callable[[str, int, int], None]
"""Called with the name of the part that is read, the number of records done, and their total number."""


def check(store: Store, progress: Progress | None = None) -> list[str]:
    """Check the whole store; returns the problems, or an empty list."""
    return list(_problems(store, progress or (lambda what, done, total: None)))


def _problems(store: Store, progress: Progress) -> Iterator[str]:
    walker = _Walker(store, progress)
    try:
        for number, problem in enumerate(walker.problems()):
            if number == PROBLEMS_MAX:
                yield f"There are more than {PROBLEMS_MAX:,} problems; the rest is not listed."
                return
            yield problem
    except CuesError as error:
        yield f"The check of {walker.at} ended early: {error.message}"


def check_others(store: Store) -> list[str]:
    """The contradictions between a store and the others that its processors read from and write to.

    The next start would refuse these: stores that are missing or were exchanged, fork queues and positions
    of another history. Changes nothing.
    """
    problems: list[str] = []
    with other_stores.Others(store) as others:
        for id, places in other_stores.places(store).items():
            if others.get(id) is None:
                problems.append(f"The store {id.hex()}, which was at {places[0]}, is missing, or is another one.")
        for queue in store.queues(all=True):
            parts = names.split_fork(queue)
            other = others.get(parts[1]) if parts else None
            if parts and other is not None:
                try:
                    Forwarder(store, other, [parts[0]]).compare()
                except CuesError as error:
                    problems.append(error.message)
        with store.core.view() as txn:
            topologies = list(processor_rows.topologies(txn))
        for processor, topology in topologies:
            with store.core.view() as txn:
                row = processor_rows.read_row(txn, processor)
            for tailer, queue, id, position in zip(
                topology.tailers, topology.queues, topology.stores, row.positions if row else ()
            ):
                other = others.get(id) if id else None
                if other is not None and names.split_log(queue)[0] in other.queues():
                    log = Log(other, queue)  # opened before the transaction, in which it would not be valid
                    with other.core.view() as txn:
                        problems += _place(log, txn, f"Tailer {tailer}", *position)
    return problems


class _Walker:
    def __init__(self, store: Store, progress: Progress) -> None:
        self.store = store
        self.progress = progress
        self.at = "the store"
        """The part that is being read, for the report of an early end."""
        self._entries: dict[bytes, int] = {}
        self._known: set[str] = set()

    def problems(self) -> Iterator[str]:
        self.at = "the pages"
        if not (yield from self._pages()):
            yield "The rest was not checked, because LMDB may end the process there. cues salvage reads such pages."
            return
        with self.store.core.view() as txn:
            record = codec.unpack(txn.get(names.FORMAT_KEY))
        if "seal" not in record and set(record["requires"]) >= ALWAYS:
            yield "The format record has no checksum."
        self.at = "the list of databases"
        self._entries = dict(self.store.core.entries())
        self.at = "the rows"
        yield from self._key_order()
        queues = yield from self._queues()
        for queue in queues:
            self.at = f"queue {queue}"
            yield from self._guarded(self._log(queue))
        self.at = "the positions"
        for part in (self._processors, self._readers, self._producers, self._others, self._outside, self._groups):
            yield from self._guarded(part(queues))
        yield from self._guarded(self._schemas())
        yield from self._intact(names.REDRIVERS, "The row of the redriver of {}", ProcessorRow.unpack)
        yield from self._intact(
            names.redriver_inputs_key(ProcessorKey("")), "The topology of the redriver of {}", ProcessorInputs.unpack
        )
        yield from self._intact(
            names.REDRIVES, "The row of the redrives of {}", lambda key, raw, _: Counts.unpack(key, raw)
        )
        yield from self._intact(names.CHECKPOINTS, "The fence of the checkpoint {}", unpack_fence)
        yield from self._intact(names.PAUSES, "The row of the pause of {}", ProcessorPause.unpack)
        yield from self._intact(names.FAILURES, "The row of the count of error messages of {}", ErrorWindow.fields)
        for name in self._entries:
            kind, _, owner = name.decode("utf-8", "replace").partition(":")
            if kind == "state":
                self.at = f"the state of {owner}"
                if self._entries[name] and not self._is_known(owner):
                    yield f"The state of {owner} belongs to no processor."
                yield from self._state(name, owner)
            elif name == names.ERRORS_DATABASE:
                self.at = "the rows about error records"
                yield from self._error_rows()
            elif kind != "log" or owner not in self._known:
                yield f"The database {name!r} belongs to no queue and no processor."

    def _is_known(self, owner: str) -> bool:
        """Return whether state is of a processor, of a part of one (``g.p.delayed``), or of a checkpoint."""
        with self.store.core.view() as txn:
            kind, _, name = owner.partition(":")
            if kind == "checkpoint":
                return txn.get(names.checkpoint_key(name)) is not None
            with contextlib.suppress(StoreDamaged):  # it is named where the processors are checked
                return names.is_of_unit(owner, set(processor_rows.all_keys(txn).values()))
        return True

    def _pages(self) -> Generator[str, None, bool]:
        """Count the pages, in one transaction: each is free, or named once (cues/storage/pages.py).

        Return whether LMDB can follow them.
        """
        looks = 0
        while True:
            looks += 1
            # A writer may write a meta page while it is read, so both are read again if they do not fit.
            with self.store.core.view() as txn, door.reading(Path(self.store.directory) / "data.mdb") as file:
                data = DataFile(file.fileno())
                found = data.metas
                metas = [meta for meta in found if meta.txnid == txn.id()]
                fits = metas and len(found) == META_PAGES and found[0].txnid - found[1].txnid == (metas[0].txnid > 0)
                if not fits and looks < _LOOKS:
                    continue
                if not fits:
                    which = ", ".join(str(meta.txnid) for meta in found) or "none"
                    yield f"The first two pages should be of the last two commits; the readable ones are of {which}."
                if not metas:
                    return False
                census = Census(data, metas[0], lambda done, total: self.progress("pages", done, total))
                yield from census.problems
                now, before = found[0], found[-1]
                if fits and not census.problems and now.txnid == metas[0].txnid and not census.follows(before):
                    yield f"Commit {now.txnid} is not the one after {before.txnid}: one of the numbers is wrong."
                return census.is_readable

    def _rows(self, prefix: bytes, txn: StoreTransaction | None = None) -> dict[str, bytes]:
        """The rows by the rest of their keys, in the transaction or in one of its own."""
        with contextlib.nullcontext(txn) if txn is not None else self.store.core.view() as txn:
            return {key[len(prefix) :].decode("utf-8", "replace"): raw for key, raw in transaction.rows(txn, prefix)}

    def _intact(
        self, prefix: bytes, what: str, decode: Callable[[bytes, bytes, Any], Any] | None = None
    ) -> Generator[str, None, list[tuple[str, bytes, bytes]]]:
        """Return the rows whose checksum holds, and which have their form: the rest of the key, the key, and the row.

        ``what`` names a row that is damaged, by the rest of its key. ``decode`` takes those three.
        """
        whole = []
        with self.store.core.view() as txn:
            rows = list(transaction.rows(txn, prefix))
        for key, raw in rows:
            name = key[len(prefix) :].decode("utf-8", "replace")
            if not is_sound(b"", key, raw):
                yield what.format(name.replace("\0", " ")) + " is damaged (its checksum fails)."
                continue
            try:
                if decode is not None:
                    decode(key, raw, name)
            except StoreDamaged as error:
                yield error.message
            else:
                whole.append((name, key, raw))
        return whole

    def _guarded(self, part: Iterator[str]) -> Iterator[str]:
        """Yield the problems of a part. Damage that ends it does not end the check of the other parts."""
        try:
            yield from part
        except CuesError as error:
            yield f"The check of {self.at} ended early: {error.message}"

    def _key_order(self) -> Iterator[str]:
        """Check that every row of the unnamed database has a known kind, and that a search finds it."""
        kinds = b"queue row proc topo sub reader store producer low source clock span open line age group member claim"
        kinds += b" checkpoint graph replay redrive redriven redrives consumer publisher pause failures schema"
        prefixes = tuple(b"\0%b\0" % kind for kind in (*kinds.split(), b"pending"))
        last = None
        unfound: list[bytes] = []
        with self.store.core.view() as txn:
            for key, _ in txn.cursor():
                if last is not None and key <= last:
                    yield f"The rows of the store are out of order at {key!r}; the rows after it were not checked."
                    break
                last = key
                if b"\0" in key and key != names.FORMAT_KEY and not key.startswith(prefixes):  # no name of a database
                    yield f"The row {key!r} is of no known kind."
                elif not key.startswith((names.SCHEMAS, names.SPANS)) and not _is_text(key):
                    yield f"The key of the row {key!r} is not text."
                if not txn.cursor().set_key(key):
                    unfound.append(key)
        for key in unfound:
            yield f"The row {key!r} is there but a search does not find it."

    # --- queues ---

    def _queues(self) -> Generator[str, None, list[str]]:
        """Check records against rows; returns the ids of the logs that can be walked."""
        walkable: list[str] = []
        with self.store.core.view() as txn:
            rows = self._rows(names.row_key("", 0), txn)
            records = self._rows(names.queue_key(""), txn)
        if any(names.log_database(log, 0) not in self._entries for log in rows):
            self._entries = dict(self.store.core.entries())  # one was made or removed meanwhile
        for queue, raw in records.items():
            identity, partitions, problem = queue_record(queue, raw)
            if problem:
                yield problem
            for partition in range(partitions):
                log = names.log_id(queue, partition)
                self._known.add(log)
                row = rows.pop(log, None)
                if problem:
                    continue
                if row is None:
                    yield f"Queue {log} has no row, so its next index is unknown."
                elif not sealed.intact(row_key := names.row_key(log, 0), row):
                    yield f"The row of queue {log} is damaged (its checksum fails)."
                elif unpack_row(row_key, row, log).identity != identity:
                    yield (
                        f"Queue {log} has identity {identity.hex()} in its record and"
                        f" {unpack_row(row_key, row, log).identity.hex()} in its row."
                    )
                elif names.log_database(queue, partition) not in self._entries:
                    yield f"Queue {log} has no database."
                else:
                    walkable.append(log)
        for log in rows:
            yield f"The row of {log} belongs to no queue."
        return walkable

    def _log(self, queue: str) -> Iterator[str]:
        """Check one log in chunks; messages may be purged or appended meanwhile."""
        log = Log(self.store, queue)
        total = self._entries[names.log_database(queue, 0)]
        walk = _LogWalk(queue, log)
        done = 0
        while walk.more:
            with self.store.core.view() as txn:
                raws, row = walk.read(txn)
            done += len(raws)
            yield from walk.look(raws, row)
            self.progress(queue, min(done, total), total)

    # --- positions ---

    def _processors(self, queues: list[str]) -> Iterator[str]:
        with_topology = set(self._rows(names.TOPOLOGIES))
        for processor in map(ProcessorId, self._rows(names.PROCESSORS)):
            # One transaction for the row and its queues, because they change together.
            with self.store.core.view() as txn:
                key, inputs_key = names.processor_key(processor), names.topology_key(processor)
                raw, raw_topology = txn.get(key), txn.get(inputs_key)
                if raw is None:
                    continue
                if not sealed.intact(key, raw):
                    yield f"The row of processor {processor} is damaged (its checksum fails)."
                    continue
                row = ProcessorRow.unpack(key, raw, processor)
                if raw_topology is None:
                    yield f"Processor {processor} has no topology record."
                    continue
                try:
                    topology = ProcessorInputs.unpack(inputs_key, raw_topology, processor)
                except StoreDamaged as error:
                    yield error.message
                    with_topology.discard(processor)
                    continue
                if len(topology.tailers) != len(row.positions) or len(topology.queues) != len(row.positions):
                    yield (
                        f"Processor {processor} has {len(row.positions)} positions and its topology names"
                        f" {len(topology.tailers)} tailers."
                    )
                    continue
                for tailer, queue, store, position in zip(
                    topology.tailers, topology.queues, topology.stores, row.positions
                ):
                    if store:
                        continue  # the content of another store is compared at the start
                    yield from self._position(txn, f"Tailer {tailer}", queue, *position, known=queues)
                    if txn.get(names.subscription_key(queue, processor)) != b"":
                        yield f"Processor {processor} reads queue {queue}, which has no row about it."
            try:
                if row.source:
                    processor_rows.unpacked_source(row.source)
            except StoreDamaged as error:
                yield f"Of processor {processor}: {error.message}"
            with_topology.discard(processor)
            own = topology.key_of(processor)
            if own in queues:
                yield from self._tries(own, queues)
        for left in with_topology:
            yield f"The topology of {left} belongs to no processor."

    def _readers(self, queues: list[str]) -> Iterator[str]:
        with self.store.core.view() as txn:
            keys = [key for key, _ in transaction.rows(txn, names.READERS)]
        for key in keys:
            queue, _, name = key[len(names.READERS) :].decode("utf-8", "replace").partition("\0")
            who = f"The named tailer {name!r} of queue {queue}"
            with self.store.core.view() as txn:
                now = txn.get(key)  # by the key that is there, which a wrong bit may have made another one
                try:
                    position = None if now is None else unpack_reader(key, now, queue, name)
                except StoreDamaged as error:
                    yield error.message
                    continue
                if position is not None:
                    yield from self._position(txn, who, queue, *position, known=queues)

    def _producers(self, queues: list[str]) -> Iterator[str]:
        with self.store.core.view() as txn:
            keys = [key for key, _ in transaction.rows(txn, names.CLOCKS)]
        for key in keys:
            log, _, producer = key[len(names.CLOCKS) :].decode("utf-8", "replace").partition("\0")
            queue, _, partition = log.partition("/")
            who = f"The row of producer {producer} of queue {log}"
            known = Log(self.store, queue, int(partition or 0)) if queue in queues else None
            with self.store.core.view() as txn:
                raw = txn.get(key)
                has_queue = txn.get(names.queue_key(queue)) is not None
                row = known.row(txn) if known is not None else None
            if raw is None:
                continue
            if not sealed.intact(key, raw):
                yield f"{who} cannot be read (its checksum fails)."
            elif not has_queue:
                yield f"{who} is there, but the queue is not."
            elif row is not None and (begin := clocks.Written.unpack(key, raw).begin) >= row.next:
                yield f"{who} has pending messages from {begin} on, but the queue ends before {row.next}."

    def _schemas(self) -> Iterator[str]:
        with self.store.core.view() as txn:
            found = list(transaction.rows(txn, names.SCHEMAS))
        for key, raw in found:
            log, hash = key[len(names.SCHEMAS) : -9].decode("utf-8", "replace"), key[-8:]
            if not sealed.intact(key, raw) or batch.checksum(raw[: -sealed.CHECKSUM_BYTES]) != hash:
                yield f"The schema {hash.hex()} of records of queue {log} is damaged (its checksum fails)."

    # --- other stores ---

    def _others(self, queues: list[str]) -> Iterator[str]:
        """Check the rows about other stores, and the fork queues for them."""
        yield from self._intact(names.SPANS, "The row of an acknowledged transaction of queue {}", spans.unpack_span)
        yield from self._intact(names.OPENS, "The row of the pending transaction of {}", spans.unpack_open)
        for prefix, what, decode in (
            (names.timeline_key(""), "The row of the timelines of queue {}", timeline.unpack),
            (names.age_key(""), "The notes for retention by age of queue {}", retention.unpack_notes),
        ):
            for log, *_ in (yield from self._intact(prefix, what, decode)):
                if log not in self._known:
                    yield f"{what.format(log)} is there, but the queue is not."
        notes = yield from self._intact(names.graph_key(""), "The note of the graph {}", identities.unpack_note)
        for graph, key, raw in notes:
            if any(not id.startswith(f"{graph}.") for id in identities.unpack_note(key, raw, graph)["processors"]):
                yield f"The note of the graph {graph} is of another graph."
        yield from self._intact(names.REPLAY_KEY, "The note of the replay{}", lambda _, raw, name: replays.unpack(raw))
        for store, raw in self._rows(names.store_key(b"")).items():
            try:
                other_stores.unpack_place(store, names.store_key(b"") + store.encode(), raw)
            except StoreDamaged as error:
                yield error.message
        steps = yield from self._intact(
            names.PRODUCERS,
            "The row of the steps that {} forwarded",
            lambda key, raw, _: other_stores.ProducerRow.unpack(key, raw),
        )
        for writer, key, raw in steps:
            for queue, last in other_stores.ProducerRow.unpack(key, raw).ends.items():
                if queue in queues and last >= (next := self._row(queue).next):
                    yield (
                        f"The row of what {writer} forwarded says that it reached {last} of queue {queue}, which ends"
                        f" before {next}."
                    )
        yield from self._intact(names.PENDINGS, "The pending row of {}", PendingRow.unpack)
        yield from self._intact(names.LOW_WATERS, "The low-water mark {!r}", lambda key, raw, _: Mark.unpack(key, raw))
        yield from self._intact(names.consumer_key(""), "The row of the consumer {}", ConsumerRow.unpack)
        yield from self._intact(names.publisher_key(""), "The row of the publisher {}", PublisherRow.unpack)
        for queue in queues:
            if names.split_fork(queue) is not None:
                yield from self._fork(queue)

    def _outside(self, queues: list[str]) -> Iterator[str]:
        """Check the source positions of external writers."""
        rows = yield from self._intact(names.SOURCES, "The position of writer {!r}", external_writers.SourceRow.unpack)
        for writer, key, raw in rows:
            position = external_writers.SourceRow.unpack(key, raw, writer)
            ends = position.next if isinstance(position.next, list) else [position.next]
            for partition, written in enumerate(ends):
                log = names.log_id(position.queue, partition)
                if log in queues and written > (next := self._row(log).next):
                    yield (
                        f"The position of writer {writer!r} says that it wrote up to {written - 1} of queue {log},"
                        f" which ends before {next}."
                    )

    def _groups(self, queues: list[str]) -> Iterator[str]:
        """Check groups, their members and their claims."""
        yield from self._intact(names.group_key(""), "The row of the group {!r}", group_rows.unpack_group)
        yield from self._intact(b"\0member\0", "The row of the member of a group {!r}", MemberRow.unpack)
        for log, group, raw in claims.all_rows(self.store):
            who = f"The claim of group {group!r} on {log}"
            if not sealed.intact(names.claim_key(log, group), raw):
                yield f"{who} is damaged (its checksum fails)."
                continue
            with self.store.core.view() as txn:
                claim = claims.read(txn, log, group)  # again: it and the log change together
                if claim is not None:
                    yield from self._position(txn, who, log, claim.identity, claim.next, claim.seal, known=queues)

    def _row(self, log: str) -> LogRow:
        with self.store.core.view() as txn:
            return Log(self.store, *names.split_log(log)).row(txn)

    def _fork(self, queue: str) -> Iterator[str]:
        """Check that every step on a fork queue is whole."""
        log = Log(self.store, queue)
        row = self._row(queue)
        at = row.first
        try:
            while at < row.next:
                with self.store.core.view() as txn:
                    at = max(at, log.row(txn).first)  # trimmed meanwhile
                steps = fork.read(log, at, _FORK_BYTES)
                if not steps:
                    return
                at = steps[-1].next
        except CuesError as error:
            yield f"The fork queue {queue} is damaged: {error.message}"

    def _position(
        self, txn: StoreTransaction, who: str, queue: str, identity: bytes, index: int, seal: bytes, *, known: list[str]
    ) -> Iterator[str]:
        if queue not in known:
            if txn.get(names.queue_key(names.split_log(queue)[0])) is None:
                yield f"{who} is a position on queue {queue}, which is missing."
            return  # a damaged queue was named already
        yield from _place(Log(self.store, queue), txn, who, identity, index, seal)

    # --- tries ---

    def _tries(self, processor: str, queues: list[str]) -> Iterator[str]:
        """Check that every attempt names messages that have its hash."""
        log = Log(self.store, processor)
        with self.store.core.view() as txn:
            row = log.row(txn)
            try:
                raws = log.read(txn, row, row.first, row.next - row.first, 1 << 62)
            except BatchDamaged:  # reported by the check of the log
                return
        for raw in raws:
            try:
                messages = log.batches([raw])[0].messages()
            except CuesError:
                continue  # reported by the check of the log
            for message in messages:
                hash = str(message.get(names.HASH))
                for queue, index in (message.get(names.MESSAGE_INDEX) or {}).items():
                    if queue in queues:
                        yield from self._attempt(processor, hash, queue, index)

    def _attempt(self, processor: str, hash: str, queue: str, index: int) -> Iterator[str]:
        log = Log(self.store, queue)
        raws = []
        with self.store.core.view() as txn:
            row = log.row(txn)
            if row.first <= index < row.next:
                with contextlib.suppress(BatchDamaged):  # reported by the check of the queue
                    raws = log.read(txn, row, index, 1)
        if index >= row.next:
            yield f"A step of {processor} ({hash}) wrote message {index} of queue {queue}, which ends before it."
            return
        if not raws or not batch.intact(raws[0][1], raws[0][0]):
            return  # purged; or damaged, and reported by the check of the queue
        carried = batch.header(raws[0][1]).hash
        if carried is None or carried.hex() != hash:
            yield (
                f"A step of {processor} ({hash}) wrote message {index} of queue {queue}, but the message there"
                f" has {carried.hex() if carried else 'no hash'}."
            )

    # --- state ---

    def _error_rows(self) -> Iterator[str]:
        """Check the rows about error messages, some at a time."""
        database = self.store.core.database(names.ERRORS_DATABASE)
        after = b""
        while True:
            rows: list[tuple[bytes, bytes]] = []
            with self.store.core.view() as txn:
                cursor = txn.cursor(database)
                if cursor.set_range(after) if after else cursor.first():
                    rows = list(itertools.islice(cursor, _CHUNK_RECORDS))
            for key, raw in rows:
                if not is_sound(names.ERRORS_DATABASE, key, raw):
                    yield f"The row about the error message {key.hex()} is damaged (its checksum fails)."
            if len(rows) < _CHUNK_RECORDS:
                return
            after = rows[-1][0] + b"\0"

    def _state(self, name: bytes, processor: str) -> Iterator[str]:
        database = self.store.core.database(name)
        total, done = self._entries[name], 0
        after = b""
        moments: set[int] = set()
        while True:
            values: dict[bytes, list[tuple[int, bytes]]] = {}
            with self.store.core.view() as txn:
                moments.add(txn.id())
                entries = int(txn.stat(database)["entries"])
                cursor = txn.cursor(database)
                alive = cursor.set_range(after) if after else cursor.first()
                last = after
                count = 0
                while alive:
                    key, value = cursor.item()
                    if last and key < last:
                        yield f"The state of {processor} is out of order; it was not checked to its end."
                        return
                    if count >= _CHUNK_RECORDS and key[:-2] not in values:
                        break  # the pieces of a value stay together
                    values.setdefault(key[:-2], []).append((_PIECE.unpack(key[-2:])[0], value))
                    last = key
                    count += 1
                    alive = cursor.next()
                after = cursor.key() if alive else b""
            for row, pieces in values.items():
                problem = state_fault(row, pieces)
                if problem:
                    yield f"The state of {processor} has a row ({row[:24].hex()}…) {problem}."
            done += count
            self.progress(f"state of {processor}", min(done, total), total)
            if not after:
                if len(moments) == 1 and done != entries:
                    yield f"The state of {processor} has {entries} rows, and only {done} of them are found."
                return


class _LogWalk:
    """The check of one log: the expected and the found records."""

    def __init__(self, queue: str, log: Log) -> None:
        self.queue = queue
        self.log = log
        self.more = True
        self.unfound: list[bytes] = []
        """Keys that exist, but that a search does not find."""
        self._after = 0
        """The first index of the last record that was checked."""
        self._next: int | None = None
        """The index with which the next record must begin; None: any (at the front, or after damage)."""
        self._time_ns = 0
        self._bad = 0

    def read(self, txn: StoreTransaction) -> tuple[list[tuple[bytes, bytes]], LogRow]:
        """Copy out the next whole records, with all their pieces."""
        row = self.log.row(txn)
        cursor = txn.cursor(self.log.database)
        search = txn.cursor(self.log.database)
        raws: list[tuple[bytes, bytes]] = []
        start = self._after + 1
        alive = cursor.set_range(KEY.pack(start)) if self._after else cursor.first()
        last = b""
        while alive:
            key, value = cursor.item()
            if key <= last or len(key) not in (8, 12):
                raws.append((key, value))
                break  # out of order: the loop might not end
            if len(key) == 8 and len(raws) >= _CHUNK_RECORDS:
                return raws, row
            raws.append((key, value))
            if not search.set_key(key):
                self.unfound.append(key)
            last = key
            alive = cursor.next()
        # The end of the log is compared with the row in the same transaction.
        self.more = False
        return raws, row

    def look(self, raws: list[tuple[bytes, bytes]], row: LogRow) -> Iterator[str]:
        for key in self.unfound:
            yield f"The record {key.hex()} of queue {self.queue} is there but a search does not find it."
        self.unfound.clear()
        last = b""
        for number, (key, value) in enumerate(raws):
            if key <= last or len(key) not in (8, 12):
                yield f"Queue {self.queue} is out of order after index {self._after}; it was not checked to its end."
                self.more = False
                return
            last = key
            if len(key) == 8:
                pieces = []
                for other, piece in raws[number + 1 :]:
                    if len(other) == 8:
                        break
                    pieces.append((other, piece))
                yield from self._record(KEY.unpack(key)[0], value, pieces, row)
            elif not self._after or key[:8] != KEY.pack(self._after):
                yield f"Queue {self.queue} has a piece of a message at {key.hex()} without its beginning."
        if not self.more:
            yield from self._end(row)

    def _record(self, first: int, value: bytes, pieces: list[tuple[bytes, bytes]], row: LogRow) -> Iterator[str]:
        expected = self._next
        self._after = first
        if expected is None and not self._bad and first > row.first:
            yield f"Queue {self.queue} begins at {row.first}, but its first record has {first}."
        elif expected is not None and first != expected and first > row.first:
            what = "are missing" if first > expected else "are there twice"
            low, high = sorted((first, expected))
            yield f"The messages {low} to {high - 1} of queue {self.queue} {what}."
        problem, opened = open_record(first, value, pieces, self.log.schema)
        if opened is None:
            # The next record tells how many messages it had.
            self._next = None
            self._bad = first
            yield f"The record batch at {first} of queue {self.queue} is damaged: {problem}."
            return
        self._next, self._bad = opened.next, 0
        if problem:
            yield f"The record batch at {first} of queue {self.queue} is damaged: {problem}."
        if opened.head.time_ns < self._time_ns:
            yield f"The record batch at {first} of queue {self.queue} is older than the one before it."
        self._time_ns = opened.head.time_ns

    def _end(self, row: LogRow) -> Iterator[str]:
        name = f"Queue {self.queue}"
        if row.first > row.next:
            yield f"{name} begins at {row.first} and ends before {row.next}."
        elif self._next is not None and self._next != row.next:
            missing = f"The messages {self._next} to {row.next - 1} of queue {self.queue} are missing."
            contradiction = f"{name} ends before {row.next}, but its last record ends before {self._next}."
            yield missing if self._next < row.next else contradiction
        elif not self._after and row.first != row.next:
            yield f"{name} has no records, but should hold the messages {row.first} to {row.next - 1}."
        elif row.time_ns < self._time_ns:
            yield f"{name} was appended to last before its last record."


def _place(log: Log, txn: StoreTransaction, who: str, identity: bytes, index: int, seal: bytes) -> Iterator[str]:
    """Yield the faults of a position on a log."""
    if counts_places(txn, log, identity):
        log = CommittedLog(log.store, log.queue, log.partition)
    row = log.row(txn)
    if identity != row.identity:
        yield f"{who} has identity {identity.hex()} of queue {log.id}, but the queue has {row.identity.hex()}."
    elif not 1 <= index <= row.next:
        yield f"{who} is at {index}, but queue {log.id} ends before {row.next}."
    elif seal != NO_SEAL:
        actual = log.seal_before(txn, row, index)
        if actual not in (NO_SEAL, seal):
            yield (
                f"{who} is at {index} of queue {log.id}, after a batch with checksum {seal.hex()},"
                f" but the batch there has {actual.hex()}."
            )


# --- single values ----------------------------------------------------------------------------------


def is_gap(problem: str) -> bool:
    """Return whether a problem is that messages are missing, and nothing else: the rest of the store can be used."""
    return bool(re.match(r"The messages .* are missing\.|Queue \S+ (begins at \S+, but|has no records)", problem))


def is_sound(database: bytes, key: bytes, value: bytes) -> bool:
    """Return whether a row is as it was written, as far as its form can tell. Records of logs are not such rows."""
    if database.startswith(b"state:"):
        return state.piece_intact(key, value)
    if database:
        return database != names.ERRORS_DATABASE or sealed.intact(key, value) or (key[:1] == b"r" and len(value) == 17)
    kind = key.split(b"\0")[1] if key.startswith(b"\0") else b""
    try:
        if key == names.FORMAT_KEY:
            check_format(Path(), value)
        elif kind == b"sub":
            return not value
        elif kind == b"checkpoint":
            return len(value) == 8 or sealed.intact(key, value)  # of an earlier version without a seal
        elif kind == b"reader":
            unpack_reader(key, value, "", "")
        elif kind in (b"queue", b"topo", b"store"):
            record = sealed.unseal_map(key, value, "row")  # of an earlier version without a seal
            return kind != b"queue" or {"identity", "options", "partitions", "version"} <= set(record)
        else:
            return sealed.intact(key, value)
    except StoreVersion:
        raise
    except CuesError:
        return False
    return True


def whole_record(first: int, value: bytes, pieces: list[tuple[bytes, bytes]]) -> tuple[str, Batch | None]:
    """The fault of a record whose messages are not decoded, and the record if at least its header can be read."""
    if len(value) <= batch.PREFIX_BYTES or not batch.intact(value, first):
        return "its checksum fails", None
    try:
        opened = Batch(first, value, [piece for _, piece in pieces])
    except (CuesError, struct.error) as error:
        return f"its header cannot be read ({getattr(error, 'message', error)})", None
    for number, (key, piece) in enumerate(pieces, 1):
        if int.from_bytes(key[8:], "big") != number:
            return f"piece {number} of its message is missing", opened
        if not batch.intact(piece, number):
            return f"the checksum of piece {number} of its message fails", opened
    if opened.head.length and not opened.is_complete():
        return "pieces of its message are missing", opened
    if pieces and not opened.head.length:
        return "it has pieces of a message that is whole", opened
    return "", opened


def open_record(
    first: int, value: bytes, pieces: list[tuple[bytes, bytes]], schema_of: Callable[[bytes], StoredSchema]
) -> tuple[str, Batch | None]:
    """The fault of a record, and the record if at least its header can be read."""
    problem, opened = whole_record(first, value, pieces)
    if problem or opened is None:
        return problem, opened
    try:
        if (hash := opened.schema_hash) is not None:
            opened.schema = schema_of(hash)
        if opened.head.provenance:
            provenance.decode(opened.head.provenance, opened.head.count)
        opened.messages()
    except CodecError as error:
        # A type that users register in their own program is unknown here; this is not damage.
        return ("" if "is not registered" in error.message else error.message.rstrip(".")), opened
    except StoreDamaged as error:
        return error.message.rstrip("."), opened
    except NotInstalled:  # columns are as they were written: the checksums hold
        return "", opened
    except Exception as error:
        return f"its body cannot be decoded ({type(error).__name__}: {error})", opened
    return "", opened


def queue_record(queue: str, raw: bytes) -> tuple[bytes, int, str]:
    """The identity of a queue, its number of partitions, and the fault of its record."""
    try:
        record = unpack_record(queue, raw)
        QueueOptions.from_dict(record["options"])
        identity, partitions, _ = bytes(record["identity"]), int(record["partitions"]), record["version"]
    except StoreDamaged as error:
        return b"", 1, error.message
    except Exception as error:
        return b"", 1, f"The record of queue {queue} cannot be read ({type(error).__name__}: {error})."
    return identity, partitions, ""


def state_fault(row: bytes, pieces: list[tuple[int, bytes]]) -> str:
    if [number for number, _ in pieces] != list(range(len(pieces))):
        return "with a piece missing"
    for number, value in pieces:
        if not state.piece_intact(row + _PIECE.pack(number), value):
            return f"whose piece {number} is damaged (its checksum fails)"
    if any(_PIECE.unpack_from(value, 8)[0] != len(pieces) for _, value in pieces):
        return "with a piece missing"
    if not _decodes(b"".join(value[8 + _PIECE.size :] for _, value in pieces)):
        return "that cannot be decoded"
    return ""


def _is_text(key: bytes) -> bool:
    try:
        return bool(key.decode())
    except UnicodeDecodeError:
        return False


def _decodes(raw: bytes) -> bool:
    try:
        codec.unpack(raw)
    except CodecError as error:
        return "is not registered" in error.message
    except Exception:
        return False
    return True


# --- in a child ---------------------------------------------------------------------------------


def walk(path: str, progress: Progress | None = None) -> list[str]:
    """Run :func:`check` on the store at ``path`` in a separate process, which a damaged store may end.

    A store that cannot be opened because of damage is a finding. For a missing store, or a directory that
    is not a store, the error of opening it is raised.
    """
    child = subprocess.Popen(
        [sys.executable, "-P", "-c", "from cues.tools.check import main; main()", path],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    problems: list[str] = []
    error: StoreError | None = None
    at = ""
    assert child.stdout is not None
    assert child.stderr is not None
    with child:
        for line in child.stdout:
            news = json.loads(line)
            if "problem" in news:
                problems.append(news["problem"])
            elif "refused" in news:
                error = StoreError(news["refused"], news["hint"], path=path)
            else:
                at = news["at"]
                if progress is not None:
                    progress(at, news["done"], news["total"])
        trace = child.stderr.read()
    if error is not None:
        raise error
    if child.returncode < 0:
        name = signal.Signals(-child.returncode).name
        where = f" while reading {at}" if at else ""
        problems.append(f"LMDB crashed ({name}){where}: the structure of the data file is damaged.")
    elif child.returncode:
        last = trace.strip().rpartition("\n")[2]
        problems.append(f"The check failed at {at or 'the start'}: {last}")
    return problems


def main() -> None:
    """The child of :func:`walk`: prints a JSON line for each progress and finding."""

    def say(**news: Any) -> None:
        print(json.dumps(news), flush=True)

    (path,) = sys.argv[1:]
    try:
        store = Store(path, readonly=True)
    except StoreDamaged as error:
        say(problem=error.message)
        return
    except CuesError as error:
        say(refused=error.message, hint=error.hint)
        return
    with store:
        for problem in _problems(store, lambda what, done, total: say(at=what, done=done, total=total)):
            say(problem=problem)
