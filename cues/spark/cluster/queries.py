"""A frame that keeps state: a streaming query of Spark, whose batches are commits of the processor.

    DIR/_cues/batches/<processor id>/               the ranges of all batches (batches.py)
    DIR/_cues/checkpoints/<processor id>/<epoch>/   Spark's own: state, offsets, the batches that are done

1. The source that leads writes down the range of batch n. Spark writes its offsets, and runs the batch.
2. Spark calls :meth:`FrameQuery.commit_batch` with the rows of the batch. It takes n from the offsets.
3. If the last record of the processor has batch n or a later one, Spark only computes the batch, for its state.
4. If the record has batch n - 1, tasks write the rows into files, and the next record is the commit (publish.py).

So the record decides which rows count, and the checkpoint is only a copy of the state after some batch. At a start,
the newest checkpoint is used if it is after a batch that is committed, and its offsets are those of the batches that
are written down. Then it may be as old as it likes. Else the query begins with an empty checkpoint, in a folder of its
own, and the batches make the state again. That needs all messages: if retention has removed some, the start is refused.

Settings of Spark that decide the rows are those of the first start. The number of partitions and the format of the
state may change: then the state is made again too, because Spark cannot use a checkpoint with others.

Two drivers may use one checkpoint at the same time, for a moment: both compute the same batches, and the next record
fences one of them.

Not guaranteed: the order of the rows within a batch. And a sum of floating-point numbers may differ in its last digits
when the state is made again, because Spark adds in another order.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import tempfile
import threading
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from cues import codec, faults
from cues.base import clock, events, names
from cues.errors import Diverged, MessagesPurged, TopologyChanged, Unsupported
from cues.graphs.processor import Node
from cues.overrides import override
from cues.records.provenance import Provenance, merge
from cues.spark.checkpoint import OffsetRecord, record_of
from cues.spark.cluster.batches import Batch, Batches, offset_of
from cues.spark.cluster.data import read_rows
from cues.spark.cluster.files import folder_of
from cues.spark.cluster.frames import Encoding
from cues.spark.cluster.ingest import BatchCommits
from cues.spark.cluster.ledger import BATCH, LedgerRecord
from cues.spark.cluster.publish import publish
from cues.spark.cluster.rows import RowSlice
from cues.spark.cluster.step import Stage
from cues.spark.columns import frame_encoder
from cues.spark.conf import SHUFFLES, copy_of, said, shuffles
from cues.spark.datasource import source_for
from cues.spark.executor import shown_ranges
from cues.spark.failures import in_short
from cues.spark.options import FrameSource
from cues.spark.plans import QueryPlan, call, fields_of, process_of
from cues.steps.calls import Interrupted

if TYPE_CHECKING:
    from collections.abc import Collection

    from cues.spark.cluster.driver import Driver
    from cues.spark.cluster.files import Files

_OF_ROWS: Final = ("spark.sql.session.timeZone", "spark.sql.streaming.multipleWatermarkPolicy")
"""Settings of the first start, which later starts use again: with others the same batches give other rows."""
_OF_STATE: Final = (SHUFFLES, "spark.sql.streaming.stateStore.providerClass")
"""Settings of a checkpoint. With others the state is made again, so later starts use them too, unless a start says
otherwise."""
_SETTINGS: Final = {
    "spark.sql.streaming.pollingDelay": "100ms",  # of an object store, each look costs a request
    "spark.sql.streaming.stopTimeout": "30s",
}
_MUST: Final = {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}


def require_checkpoints(session: Any, files: Files, frames: Collection[str]) -> None:
    """Raise :class:`Unsupported` if Spark cannot write the checkpoints of these frames into the directory."""
    place = files.for_spark("_cues/checkpoints")
    try:
        path = session._jvm.org.apache.hadoop.fs.Path(place)
        path.getFileSystem(session._jsc.hadoopConfiguration()).exists(path)
    except Exception as error:
        raise Unsupported(
            f"Spark cannot keep the checkpoint of {', '.join(sorted(frames))} in {place}: {in_short(error)}.",
            "give Spark the connector of this object store (spark.jars.packages=org.apache.hadoop:hadoop-aws:…) and"
            " its settings; or keep the queues on a mount.",
        ) from None


class FrameQuery(BatchCommits, Stage):
    """One frame as a query. Spark calls :meth:`commit_batch` in a thread of its own."""

    def __init__(self, driver: Driver, node: Node, query: QueryPlan) -> None:
        super().__init__(driver, node)
        self.query = query
        self.batches = Batches(driver.files, node.id)
        self._checkpoints = f"_cues/checkpoints/{folder_of(node.id)}"
        self._queues = {port.binding: driver.queues[port.queue] for port in node.inputs}
        self._last: Batch | None = None
        """The last batch that is committed."""
        self._again: Batch | None = None
        """The first batch that Spark may run again: one that makes the state, or the last one."""
        self._committing = threading.Lock()
        """Held while the ledger is used: by Spark's thread, or by that of the stage."""
        self._query: Any = None
        self._here = ""
        self.checkpoint = ""

    # --- start ---

    @override
    def _positions(self, accept_topology: bool, last: LedgerRecord | None) -> dict[str, tuple[str, int]]:
        if last is not None and last.positions.keys() != self.inputs.keys():
            raise TopologyChanged(
                f"{self.node.id} has read {', '.join(last.positions)}, and reads {', '.join(self.inputs)} now; its"
                " state belongs to the former.",
                "give the frame another id; or start over with --fresh or another --queues DIR.",
                processor=self.node.id,
            )
        positions = super()._positions(False, last)
        self._refuse_settings()
        kept = last.batch if last is not None else None
        if kept is None:
            if last is not None and any(next > 1 for _, next in positions.values()):
                raise TopologyChanged(
                    f"{self.node.id} has run in steps, and its plan keeps state now. The state would lack the messages"
                    " of these steps.",
                    "give the frame another id; or start over with --fresh or another --queues DIR.",
                    processor=self.node.id,
                )
            if last is None and self.batches.plan() is not None:
                raise Diverged(
                    f"The records of {self.node.id} are gone, and its batches are in {self.driver.files.url}.",
                    "restore the directory from a copy.",
                    processor=self.node.id,
                )
            self._last = None
        else:
            self._last = self.batches.need(kept[0])
            moved = {names.tailer_id(self.node.key, q): stop for q, (_, stop) in self._last.ranges.items()}
            if self._last.chain != kept[1] or moved != {tailer: next for tailer, (_, next) in positions.items()}:
                raise Diverged(
                    f"Batch {kept[0]} of {self.node.id} in {self.driver.files.url}/{self.batches.folder} is not the one"
                    " that its last record has committed.",
                    "restore the directory from a copy.",
                    processor=self.node.id,
                )
        self._find_again()
        return positions

    def _find_again(self) -> None:
        """Find the first batch that Spark will run again. Raises :class:`MessagesPurged` if its messages are gone."""
        folder, first = self._usable()
        self._require_messages(folder, first)
        self._again = self.batches.read(first) if first <= self.committed else self._last

    def _refuse_settings(self) -> None:
        """Refuse settings with which the batches that are made again would give other rows."""
        begun = self._settings()
        for name in _OF_ROWS:
            asked = self.driver.conf.get(name)
            if asked is not None and begun.get(name, asked) != asked:
                raise TopologyChanged(
                    f"{self.node.id} has begun with {name}={begun[name]}, and this start asks for {asked}: its rows"
                    " would be of two kinds.",
                    f"leave {name} out; or start over with --fresh or another --queues DIR.",
                    processor=self.node.id,
                )

    def _settings(self) -> dict[str, str]:
        """The settings of the first start, if there was one."""
        plan = self.batches.plan() or {}
        return {name: str(value) for name, value in plan.get("settings", {}).items()}

    def _asked(self) -> dict[str, str]:
        """The settings of the state that this start wants: those of earlier starts, and those that the user gave."""
        wanted = {**self._settings(), **self.driver.conf}
        return {name: wanted[name] for name in _OF_STATE if name in wanted}

    @property
    def committed(self) -> int:
        """The number of the last batch that is committed; -1 before the first."""
        return self._last.number if self._last else -1

    def _usable(self) -> tuple[str | None, int]:
        """The checkpoint to use, and the first batch that Spark runs with it. None and 0: an empty one."""
        files = self.driver.files
        for epoch in sorted((name for name in files.names(self._checkpoints) if name.isdecimal()), key=int)[::-1]:
            folder = f"{self._checkpoints}/{epoch}"
            planned = {int(name) for name in files.names(f"{folder}/offsets") if name.isdecimal()}
            done = max((int(name) for name in files.names(f"{folder}/commits") if name.isdecimal()), default=-1)
            last = max(planned, default=-1)
            ends = {number for number in (done, last) if number >= 0}
            if (
                planned >= ends  # it is whole
                and ends
                and last - 1 <= done
                and done <= self.committed  # it is not ahead: the rows of these batches would be lost
                and all(self._planned(folder, number) == self.batches.read(number) for number in ends)
                and not self._differing(folder, last)
            ):
                return folder, done + 1
        return None, 0

    def _planned(self, folder: str, number: int) -> Batch | None:
        """The batch whose offsets a checkpoint has under this number; None if they are others."""
        batch, record = self.batches.read(number), self._record(folder, number)
        offsets = {offset_of(text) for text in record.offsets} if record else set()
        return batch if batch is not None and offsets == {(number, batch.chain)} else None

    def _differing(self, folder: str, number: int) -> dict[str, str]:
        """The settings of a checkpoint that are not those which this start wants."""
        record, asked = self._record(folder, number), self._asked()
        conf = record.conf if record else {}
        return {name: conf[name] for name, value in asked.items() if conf.get(name, value) != value}

    def _record(self, folder: str, number: int) -> OffsetRecord | None:
        raw = self.driver.files.read(f"{folder}/offsets/{number}")
        return record_of(folder, raw) if raw else None

    def _require_messages(self, folder: str | None, first: int) -> None:
        """Raise :class:`MessagesPurged` if messages are gone that a start from this checkpoint reads again."""
        begun = self._settings()
        changes = [name for name, value in self._asked().items() if begun.get(name, value) != value]
        for number in range(first, self.committed + 1):
            for queue, (low, high) in self.batches.need(number).ranges.items():
                start = self.driver.queues[queue].log(0).first
                if low < min(start, high):
                    why = "is an older copy" if folder else "is missing, or does not belong to its last record"
                    hint = "put the newest copy of the checkpoint back;"
                    if changes:
                        why, hint = f"has another value of {changes[0]}", f"leave {changes[0]} out;"
                    raise MessagesPurged(
                        f"{self.node.id} cannot make its state again: the checkpoint of its query in"
                        f" {self.driver.files.url}/{self._checkpoints} {why}, and messages {low} to"
                        f" {min(start, high) - 1} of {queue!r} were purged.",
                        f"{hint} or start over with --fresh or another --queues DIR, and set a longer retention.",
                        queue=queue,
                        first=low,
                        last=min(start, high) - 1,
                    )

    def prepare(self, settings: dict[str, str]) -> dict[str, str]:
        """Choose the checkpoint. Return the settings of the first start: ``settings``, if this is the first."""
        files = self.driver.files
        begun = self.batches.begin({"id": secrets.token_hex(8), "settings": settings})
        plan: dict[str, Any] = {"settings": {}} | begun
        if plan["settings"] != (wanted := plan["settings"] | self._asked()):
            plan = self.batches.change(plan | {"settings": wanted})
        folder, first = self._usable()
        if folder is None:
            for old in files.names(self._checkpoints):
                if old.isdecimal() and int(old) <= self.ledger.now.epoch:  # not that of a later driver
                    files.delete(f"{self._checkpoints}/{old}")
        self.checkpoint = folder or f"{self._checkpoints}/{self.ledger.now.epoch}"
        if first <= self.committed:
            text = f"runs batches {first} to {self.committed} again, to make its state; their rows are there already"
            self.driver.emit(events.Event(self.node.id, text))
        self._here = tempfile.mkdtemp(prefix="cues-frame-")
        return {name: str(value) for name, value in plan["settings"].items()}

    def _begin(self) -> None:
        """Start the query."""
        driver, node = self.driver, self.node
        session = copy_of(driver.session)
        session.dataSource.register(source_for(session))
        first = {name: str(session.conf.get(name)) for name in (*_OF_ROWS, *_OF_STATE)}
        if not said(session, SHUFFLES):
            first[SHUFFLES] = shuffles(int(driver.context.defaultParallelism))
        settings = self.prepare(first)
        for name, value in {**_SETTINGS, **settings, **_MUST}.items():
            session.conf.set(name, value)
        streams = {}
        for binding in self._queues:
            stream = session.readStream.format("cues").options(**self.options_of(binding))
            streams[binding] = stream.load()
        result = call(node, streams, process_of(node, driver.system, self.ledger.now.epoch, driver.store_id))
        frame_encoder(node.id, result)
        driver.context.setLocalProperty("spark.scheduler.pool", node.id)
        writer = result.writeStream.queryName(f"cues {node.id}").outputMode(self.query.mode)
        if node.options.trigger is not None:
            writer = writer.trigger(processingTime=node.options.trigger)
        writer = writer.option("checkpointLocation", driver.files.for_spark(self.checkpoint))
        self._query = writer.foreachBatch(self._run_batch).start()

    def options_of(self, binding: str) -> dict[str, str]:
        """The options with which the query reads an input."""
        queues = [directory.queue for directory in self._queues.values()]
        size = self.node.options.batch_size
        frame = FrameSource(self.node.id, queues, size, self.query.closes, self.committed, self._here)
        options = {"store": self.driver.files.place, "queue": self._queues[binding].queue}
        fields = fields_of(self.node, binding)
        return options | ({"fields": fields} if fields else {}) | {"frame": json.dumps(asdict(frame))}

    # --- for other threads ---

    @override
    def ready(self) -> bool:
        last = self._last
        more = any(low < end for low, end in self._available().values())
        return more or (self.query.closes and last is not None and last.messages > 0)

    @override
    def holds(self, tailer: str) -> int | None:
        """The first message that Spark may read again, or has not read."""
        return self._again.ranges[self.inputs[tailer].id][0] if self._again is not None else 1

    @override
    def cancel(self) -> None:
        super().cancel()
        if self._query is not None:
            with contextlib.suppress(Exception):  # the session was stopped, and its queries with it
                self._query.stop()

    @override
    def close(self) -> None:
        """Stop the query, and wait until the batch under way has ended."""
        self.cancel()
        with self._committing:
            shutil.rmtree(self._here, ignore_errors=True)

    # --- batches ---

    @override
    def step(self) -> bool:
        """Look after the query; return False. Raises :class:`Fenced` and :class:`ProcessorStopped`."""
        if self._query is None:
            self._begin()
        if not self._query.isActive:
            if self.driver.closed:
                raise Interrupted
            error = self._query.exception() or RuntimeError("the query was stopped")
            if self._may_start_again(error):
                shutil.rmtree(self._here, ignore_errors=True)
                self._find_again()
                self._begin()
                return False
            stopped = self._stopped(
                error,
                f"start again when the cause is gone. If Spark cannot read its checkpoint, delete {self._checkpoints}"
                f" in {self.driver.files.url}; the batches make the state again.",
            )
            raise stopped from (None if stopped is self._failed else self._failed or error)
        with self._committing:
            self.ledger.check()
        return False

    @override
    def commit_batch(self, rows: Any, number: int) -> None:
        with self._committing:
            faults.point("frame.batch")
            batch = self._batch_of(number)
            ranges = {names.tailer_id(self.node.key, queue): span for queue, span in batch.ranges.items()}
            self._extent = f" over {shown_ranges(ranges)}"
            self.driver.context.setJobDescription(f"{self.node.id}: {shown_ranges(ranges)}")
            if batch.number <= self.committed:
                rows.write.format("noop").mode("overwrite").save()  # for its state
            else:
                self._publish(rows, batch)
            self._again = batch
        self.unborn = 0
        faults.point("frame.committed")

    def _batch_of(self, number: int) -> Batch:
        """The batch that Spark's batch of this number runs."""
        batch = self._planned(self.checkpoint, number)
        if batch is None or number > self.committed + 1 or (number == self.committed and batch != self._last):
            self.ledger.check()  # another driver may use this checkpoint
            raise Diverged(
                f"Batch {number} in the checkpoint of {self.node.id} is not the one in {self.batches.folder} that"
                f" follows the last commit, batch {self.committed}. Nothing was written.",
                f"delete {self._checkpoints} in {self.driver.files.url}, and start again; the batches make the state"
                " again.",
                processor=self.node.id,
            )
        return batch

    def _publish(self, rows: Any, batch: Batch) -> None:
        """Write the rows of a batch, and commit it."""
        directory, record = self.targets[0], self.ledger.now.number + 1
        ranges = {names.tailer_id(self.node.key, queue): span for queue, span in batch.ranges.items()}
        delivered = [(t, self.inputs[t].directory.identity, low, high) for t, (low, high) in ranges.items()]
        digest = self._hasher.digest(delivered, ["batch", batch.number])
        encoding = Encoding(
            self.driver.files,
            directory.queue,
            directory.columns,
            directory.options,
            self.node.id,
            record,
            clock.now_ns() // 1000,
            digest.hex(),
            self._came(batch),
            rows.schema,
        )
        files = encoding.files_of(rows)
        count = sum(file.count for file in files)
        positions = {tailer: (known, ranges[tailer][1]) for tailer, (known, _) in self.ledger.now.positions.items()}
        publish(
            self.ledger,
            {directory: files} if files else {},
            positions=positions,
            hash=digest.hex(),
            source=codec.pack([BATCH, batch.number, batch.chain]).hex(),
            counts={"taken": batch.messages, "written": count},
        )
        self._last = batch
        self.batches.pack(batch.number)
        self.counters.steps += 1
        self.counters.taken += batch.messages
        self.counters.written += count
        self.driver.ring()

    def _came(self, batch: Batch) -> Provenance | None:
        """The provenance of the rows of a batch: that of the last message that it has seen of each queue."""
        parts = []
        for entrance in self.entrances():
            _, stop = batch.ranges[entrance.queue]
            if self.inputs[entrance.tailer].reaches(stop):
                pieces = self.pieces(entrance.tailer, stop - 1, stop)
                if pieces:
                    parts.append(RowSlice(entrance, read_rows(self.driver.files, pieces)).provenance().delivered())
        return merge(parts) if parts else None
