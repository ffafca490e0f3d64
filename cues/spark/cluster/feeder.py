"""From the queues of sources into the directory: same identity, same indices, same hashes.

    the driver's store                           DIR/_cues/steps/<graph>.sources.feed/<n>.json
    messages, and the rows of the sources  ──▶   files, next indices, the rows of the sources, the store's id

Sources run as they do on the embedded engine, and commit into the store of the driver's machine. The feeder then
copies their messages, some thousand in a file. Each copy is a step of its own (ledger.py). So the first stages read
the same messages under the same names as without Spark.

A copy ends at a *cut*: the ends of all queues and the rows of all sources, read in one transaction of the store. So a
source that continues at its row in the record yields exactly the messages that the directory does not have. A driver
with an empty store uses this, on any machine (:meth:`Feeder.restore`): its queues begin at the next indices, and its
sources at these rows. The store that was used before is refused after that, unless its last copied messages are the
last ones of the directory: the record has a checksum of the batch that holds them.

Not guaranteed: messages that no source can yield again, and that were not copied, are only in the store that was used
before (``send``, ``cues send``, a webhook). After a start with another store they are not processed.

An error queue of sources is copied too. Its messages follow those of other writers, and get new indices. Failures of
other processors, from runs of another engine on the store, are not copied: here these processors begin again.
"""

from __future__ import annotations

import logging
import secrets
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, Final, NamedTuple

import pyarrow as pa

from cues import codec
from cues.base import clock, events, names
from cues.base.data import dataclass
from cues.base.names import ProcessorId
from cues.buffers import repeated
from cues.errors import Diverged, Unsupported
from cues.graphs.processor_rows import ProcessorInputs, ProcessorRow, boot, has_state, key_of, read_row
from cues.queues.base import views_of
from cues.queues.queue import continue_log
from cues.queues.tailer import Tailer
from cues.records import sealed
from cues.records.batch import Batch
from cues.records.columns import integers
from cues.records.packed import packed_arrays, unpacked
from cues.records.positions import NO_SEAL
from cues.records.provenance import Provenance, concat, decode
from cues.spark.cluster.data import Plain, Writer, hash_runs
from cues.spark.cluster.files import folder_of, identity_of
from cues.spark.cluster.ledger import Ledger, LedgerRecord
from cues.spark.cluster.publish import publish
from cues.spark.cluster.typed import fields_of
from cues.steps.state import StateTable

if TYPE_CHECKING:
    from cues.queues.queue import Queue
    from cues.queues.store import Store
    from cues.spark.cluster.directory import DataFile, QueueDirectory
    from cues.spark.cluster.driver import Driver
    from cues.storage.transaction import StoreTransaction

FEED_MESSAGES: Final = 50_000
"""Most messages of a file. A copy has more files if there is no cut before."""
FEED_BYTES: Final = 16 << 20
"""Most bytes of a file, which is in the driver's memory."""


@dataclass(frozen=True)
class _Cut:
    """A moment in the history of the store."""

    ends: dict[str, int]
    """By log id: the index after its last message."""
    seals: dict[str, str]
    """By log id: the checksum of its last record batch, in hex."""
    sources: dict[str, str]
    """By source that has yielded: epoch, generation and position of its row, in msgpack and hex."""


class Feeder:
    """Copies the queues of the sources of one graph. Used by one thread at a time."""

    def __init__(
        self,
        driver: Driver,
        store: Store,
        queues: Mapping[str, Queue],
        sources: Collection[ProcessorId],
        written: Collection[str],
    ) -> None:
        """``sources`` are the ids of the sources with a function, ``written`` the queues that stages write to.

        A queue that stages write to has other indices in the directory.
        """
        self.driver = driver
        self.queues = queues
        self._store = store
        self._sources = sources
        self._written = written
        # There is no cut through several stores.
        self._has_cuts = all(queue.store is store for queue in queues.values())
        self.ledger = Ledger(driver.files, f"{driver.graph}.sources.feed", driver.owner)
        self.cuts: deque[_Cut] = deque()
        """Cuts after the position, oldest first. They are made while files are written, so copies stay short."""
        self._readers: dict[str, Tailer] = {}

    # --- the start ---

    def restore(self) -> None:
        """Let an empty store continue where the directory ends. Nothing is changed in another store."""
        self.restore_from(self.ledger.read())

    def restore_from(self, last: LedgerRecord | None) -> bool:
        """Do that, after the record ``last``. Return True if the store continues there now."""
        if any(view.core.row().time_ns for view in self.logs().values()):  # it has or had messages
            return False
        known = self._known(last)
        for name in self.queues.keys() - set(self._written):
            # The driver that made the queue in the directory may have died before it copied a message.
            made = self.driver.files.read(place := f"{folder_of(name)}/_cues/queue.json")
            if made is not None:
                identity = identity_of(self.driver.files, place, made).hex()
                known = {names.log_id(name, n): (identity, 1) for n in range(self.queues[name].partitions)} | known
        if not self._continues(last, known):
            return False
        for name, queue in self.queues.items():
            queue.grow(max([queue.partitions, *(n + 1 for of, n in map(names.split_log, known) if of == name)]))
        rows = {id: view.core.row() for id, view in self.logs().items()}
        fresh = {name: secrets.token_bytes(8) for name in self.queues}
        sources = last.sources if last is not None else {}
        self._refuse_without_state(sources)

        def restore(txn: StoreTransaction) -> None:
            # All rows are written: the store may have continued this directory before, and then been left without
            # messages, and the graph may have been started over since.
            for id, row in rows.items():
                name, partition = names.split_log(id)
                own = row.identity if row.next == 1 else fresh[name]
                identity, next = known.get(id, (own.hex(), 1))
                continue_log(txn, name, partition, bytes.fromhex(identity), next)
            for source in set(self._sources) - sources.keys():
                txn.delete(names.processor_key(source))
                txn.delete(names.topology_key(source))
            for source, packed in ((ProcessorId(id), packed) for id, packed in sources.items()):
                epoch, generation, position = codec.unpack(bytes.fromhex(packed))
                restored = ProcessorRow(bytes(8), epoch, generation, 0, boot(), False, (), position)
                sealed.put(txn, names.processor_key(source), restored.pack())
                sealed.put(txn, names.topology_key(source), ProcessorInputs("source", (), (), ()).pack())

        self._store.core.commit(restore)
        return True

    def _refuse_without_state(self, sources: Mapping[str, str]) -> None:
        """Raise :class:`Diverged` for a source whose position belongs to rows that only the former store has."""
        for source, packed in sources.items():
            if not has_state(codec.unpack(bytes.fromhex(packed))[2]):
                continue
            with self._store.core.view() as txn:
                key = key_of(txn, ProcessorId(source))
            if not StateTable(self._store, key).exists():
                raise Diverged(
                    f"{source} keeps a state, such as the files that it has read. It is in the store that fed"
                    f" {self.driver.files.url} until now, and not in {self._store.path}.",
                    "start with that store; or give the source another id, which begins at the start.",
                    processor=source,
                )

    def _continues(self, last: LedgerRecord | None, known: Mapping[str, tuple[str, int]]) -> bool:
        """Return True if an empty store can continue: the record is at a cut, or nothing was copied."""
        at_cut = last is not None and last.store is not None
        return self._has_cuts and (at_cut or all(next == 1 for _, next in known.values()))

    def _known(self, last: LedgerRecord | None) -> dict[str, tuple[str, int]]:
        """By log that was copied: its identity, and the index that is copied next."""
        known = dict(last.positions) if last is not None else {}
        for name in self.queues.keys() - known.keys():  # an earlier version had a feeder for each queue
            old = Ledger(self.driver.files, f"{self.driver.graph}.{name}.feed", "").read()
            known |= {} if old is None else {name: old.positions[name]}
        return known

    def logs(self) -> dict[str, Queue]:
        """The handles on all partitions that there are now, by log id."""
        return {
            names.log_id(name, view.core.log.partition): view
            for name, queue in self.queues.items()
            for view in views_of(queue)
        }

    def claim(self) -> None:
        """Own the copying after its last commit, and forward the files of that commit."""
        self.driver.claim(self.ledger, self._positions)
        self.cuts.clear()
        for id, view in self.logs().items():
            self._reader(id, view)

    def _reader(self, id: str, view: Queue) -> Tailer:
        """The named reader of a log, which retention waits for."""
        if id not in self._readers:
            self._readers[id] = view.tailer(f"spark-{self.driver.store_id}")
        return self._readers[id]

    def _positions(self, last: LedgerRecord | None) -> dict[str, tuple[str, int]]:
        """The positions of the feeder. Raises :class:`Diverged` if the store does not continue the directory."""
        restored, known = self.restore_from(last), self._known(last)
        # A claim is not a copy: if the last one did not end at a cut, this record does not either.
        self.ledger.store = self._store.id.hex() if self._continues(last, known) else None
        logs = self.logs()
        positions = {id: (view.core.row().identity.hex(), 1) for id, view in logs.items()} | known
        if not restored:
            for id, position in positions.items():
                self._compare(id, logs.get(id), *position, last)
        return positions

    def _compare(self, id: str, queue: Queue | None, identity: str, next: int, last: LedgerRecord | None) -> None:
        """Raise :class:`Diverged` if a log does not continue after the messages that were copied before ``next``."""
        whole = self.queues[names.split_log(id)[0]]
        row = whole.core.row() if queue is None else queue.core.row()
        with whole.store.core.view() as txn:
            seal = NO_SEAL if queue is None else queue.core.log.seal_before(txn, row, next)
        expected = last.seals.get(id) if last is not None else None
        problem = None
        if queue is None:
            problem = f"it has {whole.partitions} partitions"
        elif identity != row.identity.hex():
            problem = f"it has identity {row.identity.hex()}, not {identity}"
        elif next > row.next:
            problem = f"it ends with message {row.next - 1}"
        elif expected and seal != NO_SEAL:
            problem = None if seal.hex() == expected else f"it has another message {next - 1}"
        elif next > 1 and last is not None and last.store not in (None, self._store.id.hex()):
            problem = "another store has been used since"
        if problem is None:
            return
        again = "start over with --fresh or another --queues DIR."
        if last is not None and last.store is not None and self._has_cuts:
            again = (
                "start with an empty store (--store DIR): the sources continue after the last message in the"
                f" directory, and messages that only {whole.store.path} has are not processed. Or {again}"
            )
        raise Diverged(
            f"The queue {id!r} in {whole.store.path} does not continue the one in {self.driver.files.url}, which"
            f" has its messages up to {next - 1}: {problem}.",
            f"use the store from which the directory was fed last. Or {again}",
            processor=self.ledger.processor,
        )

    # --- copying ---

    def ready(self) -> bool:
        """Return True if there are messages to copy, or a source has moved without one."""
        if any(view.core.row().next > self._next(id) for id, view in self.logs().items()):
            return True
        with self._store.core.view() as txn:
            return self._moved(self._sources_in(txn), self.ledger.now.sources)

    def _sources_in(self, txn: StoreTransaction) -> dict[str, str]:
        """By source that has yielded: epoch, generation and position of its row, in msgpack and hex."""
        rows = {source: read_row(txn, source) for source in self._sources}
        return {
            source: codec.pack([row.epoch, row.generation, row.source]).hex()
            for source, row in rows.items()
            if row is not None and row.source
        }

    def _moved(self, sources: Mapping[str, str], before: Mapping[str, str]) -> bool:
        """Return True if the position of a source differs. A start changes the rest of its row."""
        return any(
            packed != before.get(source) and _position_of(packed) != _position_of(before.get(source))
            for source, packed in sources.items()
        )

    def _next(self, log: str) -> int:
        """The index that is copied next."""
        positions = self.ledger.now.positions
        return positions[log][1] if log in positions else 1

    def step(self) -> bool:
        """Make one copy; return False if there is nothing to copy. Raises :class:`Fenced`."""
        if not self.cuts:
            self.look()
        if not self.cuts:
            self.ledger.check()
            return False
        while len(self.cuts) > 1 and self._count(self.cuts[1]) <= FEED_MESSAGES:
            self.cuts.popleft()
        cut = self.cuts[0]
        new: dict[QueueDirectory, list[DataFile]] = {}
        logs = self.logs()
        for id, end in cut.ends.items():
            files = self.copy(id, logs[id], end)
            if files is None:
                return False
            if files:
                new.setdefault(self.driver.queues[logs[id].name], []).extend(files)
        now = self.ledger.now
        positions = {id: (logs[id].core.row().identity.hex(), end) for id, end in cut.ends.items()}
        publish(
            self.ledger,
            new,
            positions=now.positions | positions,
            seals=now.seals | cut.seals,
            sources=now.sources | cut.sources,
            store=self._store.id.hex() if self._has_cuts else None,
            counts={"written": sum(file.count for files in new.values() for file in files)},
        )
        self.cuts.popleft()
        for id, end in cut.ends.items():
            self._reader(id, logs[id]).to_index(end)
        self.driver.ring()
        return True

    def look(self) -> None:
        """Note a cut, if there are messages after the last one, or a source has moved without one."""
        ends: dict[str, int] = {}
        seals: dict[str, str] = {}
        logs = self.logs()
        for id, view in logs.items():
            if view.store is not self._store:
                ends[id] = view.core.row().next
        with self._store.core.view() as txn:
            for id, view in logs.items():
                if view.store is self._store:
                    row = view.core.log.row(txn)
                    ends[id], seal = row.next, view.core.log.seal_before(txn, row, row.next)
                    seals |= {id: seal.hex()} if seal != NO_SEAL else {}
            sources = self._sources_in(txn)
        before = self.cuts[-1].ends if self.cuts else {id: self._next(id) for id in ends}
        known = self.cuts[-1].sources if self.cuts else self.ledger.now.sources
        if any(end != before.get(id, 1) for id, end in ends.items()) or self._moved(sources, known):
            self.cuts.append(_Cut(ends, seals, sources))

    def _count(self, cut: _Cut) -> int:
        return sum(end - self._next(id) for id, end in cut.ends.items())

    def copy(self, id: str, queue: Queue, end: int) -> list[DataFile] | None:
        """Write the messages of a log up to ``end`` into files. None if the graph was halted meanwhile."""
        directory, files = self.driver.queues[queue.name], []
        same, partition = queue.name not in self._written, queue.core.log.partition
        if same:
            directory.grow_to(partition + 1)
        next = self._next(id)
        while next < end:
            runs, first, after = self.read_runs(queue, next, end)
            if first > next:
                text = f"{first - next:,} messages of {id} were purged before they were copied"
                self.driver.emit(events.Event(self.ledger.processor, text, logging.WARNING))
            if not same:
                runs = [run for run in map(_of_sources, runs) if len(run.values)]
            where = directory, runs, partition % len(directory.logs), first if same else 0
            file = self.write_runs(*where) if runs else None
            if file is not None:
                files.append(replace(file, first=first) if same else file)
            next = after
            if next < end:
                self.look()
                if self.driver.sleep(0):
                    return None
        return files

    def refuse(self) -> None:
        """Refuse, before anything is taken, messages that a shared directory cannot keep. A start reads their heads."""
        known = self._known(self.ledger.read())
        for id, view in self.logs().items():
            next, end = known.get(id, ("", 1))[1], view.core.row().next
            while next < end:
                next = self._batches(view, next, end)[2]

    def read_runs(self, queue: Queue, start: int, end: int) -> tuple[list[_Run], int, int]:
        """Messages from an index on, the index of the first, and the index after the last."""
        batches, first, next = self._batches(queue, start, end)
        runs = list(runs_of(batches))
        if queue.name in self.driver.without_delays:
            runs = [run._replace(provenance=run.provenance.delivered()) for run in runs]
        return runs, first, next

    def _batches(self, queue: Queue, start: int, end: int) -> tuple[list[tuple[Batch, int, int]], int, int]:
        """Batches with the range of each, the index of the first message, and the index after the last one.

        Refuses acknowledgements, and messages that are not due if a frame reads the queue.
        """
        with queue.store.core.view() as txn:
            row = queue.core.log.row(txn)
            next = first = min(max(start, row.first), end)
            count = min(end - first, FEED_MESSAGES)
            raws = queue.core.log.read(txn, row, first, count, FEED_BYTES)
        batches = []
        for batch in queue.core.log.batches(raws):
            low, high = max(first, batch.first), min(batch.next, first + count)
            if high <= low:
                continue
            if batch.head.acknowledges:
                raise Unsupported(
                    f"The queue {queue.id!r} holds acknowledgements of transactions (cues.txn), at {low}, which a"
                    " queue in a shared directory cannot keep.",
                    "use a queue without them, or run Spark without queues=.",
                )
            if batch.delays and queue.name in self.driver.without_delays:
                self._refuse_delayed(queue, low, _provenance(batch, low, high))
            batches.append((batch, low, high))
            next = high
        return batches, first, next

    @staticmethod
    def _refuse_delayed(queue: Queue, first: int, provenance: Provenance) -> None:
        late = [(first + offset, time) for offset, time in enumerate(provenance.times()) if time > clock.now_ns()]
        if late:
            index, time = late[0]
            raise Unsupported(
                f"Message {index} of the queue {queue.id!r} is not to be delivered before"
                f" {clock.to_datetime(time).isoformat()}, and a frame reads the queue: frames hold no messages.",
                "start again after that time; or let a stream read the queue, and write a copy for the frame.",
            )

    def write_runs(
        self, directory: QueueDirectory, runs: Sequence[_Run], partition: int, first: int
    ) -> DataFile | None:
        driver, record = self.driver, self.ledger.now.number + 1
        directory.learn([each for run in runs if run.is_table for each in fields_of(run.values.schema)])
        delayed = [run.provenance for run in runs if run.provenance.extra is not None]
        directory.note_delays(max((max(provenance.times()) for provenance in delayed), default=0))
        where = driver.files, directory.folder, self.ledger.processor, record, 0
        writer = Writer(*where, directory.columns, partition, first)
        for is_table, group in groupby(runs, lambda run: run.is_table):
            for some in ([run] for run in group) if is_table else (list(group),):
                counts = [len(run.values) for run in some]
                writer.add(
                    some[0].values if is_table else pa.concat_arrays([run.values for run in some]),
                    hash_runs([run.hash for run in some], counts),
                    concat([run.provenance for run in some]),
                    repeated(integers(run.time_us for run in some), counts),
                )
        return writer.close()


class _Run(NamedTuple):
    """The messages of one record batch, or of several that have the same hash and time and no provenance."""

    values: pa.Array | pa.Table
    """The packed messages; or the messages as a table, if they are a record of columns."""
    hash: str | None
    time_us: int
    provenance: Provenance

    @property
    def is_table(self) -> bool:
        return isinstance(self.values, pa.Table)


def runs_of(batches: Sequence[tuple[Batch, int, int]]) -> Iterator[_Run]:
    """The messages of record batches, each with its range. One array for many costs less than one for each."""
    for key, group in groupby(batches, _key):
        some = list(group)
        batch, low, high = some[0]
        hash, time_us = batch.head.hash.hex() if batch.head.hash else None, batch.head.time_ns // 1000
        if batch.schema is not None:
            table = pa.Table.from_batches([batch.table().slice(low - batch.first, high - low)])
            yield _Run(table, hash, time_us, _provenance(batch, low, high))
            continue
        values = Plain()
        for batch, low, high in some:
            values.add_array(batch.body(), batch.cuts()[low - batch.first : high - batch.first + 1])
        one = Provenance(len(values.ends) - 1, {}) if key[0] is None else _provenance(batch, low, high)
        yield _Run(values.array(), hash, time_us, one)


def _key(part: tuple[Batch, int, int]) -> tuple[int | None, bytes | None, int]:
    """The key of record batches that can be one run: the first is the index of one that must be alone."""
    batch = part[0]
    alone = batch.schema is not None or batch.head.provenance is not None
    return batch.first if alone else None, batch.head.hash, batch.head.time_ns


def _provenance(batch: Batch, low: int, high: int) -> Provenance:
    """The provenance of the messages of a record batch in [low, high)."""
    head = batch.head
    whole = Provenance(head.count, {}) if head.provenance is None else decode(head.provenance, head.count)
    return whole.slice(low - batch.first, high - batch.first)


def _position_of(packed: str | None) -> bytes | None:
    """The position in the row of a source, as a record has it."""
    return None if packed is None else codec.unpack(bytes.fromhex(packed))[2]


def _of_sources(run: _Run) -> _Run:
    """The messages of an error queue without the failures of streams and sinks."""
    packed = pa.concat_arrays(packed_arrays(run.values)) if run.is_table else run.values
    kinds = [message.get(names.ERR_CONFIG, {}).get("kind", "source") for message in unpacked(packed)]
    chosen = [offset for offset, kind in enumerate(kinds) if kind == "source"]
    return run._replace(values=packed.take(integers(chosen)), provenance=run.provenance.select(chosen))
