"""A store, as operators use it: measured, read, and changed from outside of its graph."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from cues.base import clock
from cues.base.names import ProcessorId
from cues.engine import history, identities, record, redriving, standing
from cues.engine.status import processor_of
from cues.errors import QueueNotFound, StoreNotFound
from cues.graphs import draw
from cues.graphs.graph import Graph
from cues.graphs.graphfile import shown
from cues.operate import form, lineage, positions, seeking, sql, steps
from cues.operate.changes import Growth, PlannedPurges, refuse_partition
from cues.operate.failed import FailedMessages
from cues.operate.positions import Position
from cues.operate.reading import FoundMessage, StoreReader
from cues.operate.refused import Refused
from cues.operate.seeking import PlannedSeek, SeekRequest
from cues.operate.shape import Shape, shape_of_store
from cues.operate.target import GROUP, Target, open_queue, queue_of, store_of
from cues.queues import backpressure
from cues.queues.committed import Isolation
from cues.queues.queue import Queue, purge_to, source_of
from cues.queues.retention import PlannedPurge, PositionHolder
from cues.queues.store import Store
from cues.queues.tables import Selection
from cues.steps import delays
from cues.steps.error_records import ErrorLogs
from cues.steps.state import StateTable, rows_under
from cues.steps.tries import open_named
from cues.storage import environment, exclusive, free_space
from cues.storage.environment import file_key
from cues.tools import check as checks
from cues.tools import follower, metrics
from cues.tools.measurement import Measurement, QueueMetrics


class StorePlace:
    """A store and, if the target names one, its graph.

    :attr:`store` is opened once and read-only. It must not be open beside a handle that writes, so
    :meth:`changing` closes it before. Safe from any thread.
    """

    kind: ClassVar = "store"
    look_every_s: ClassVar = 0.0
    """The shortest time between two measurements, where each costs much."""

    def __init__(self, target: Target, stores: Mapping[str, str] | None = None) -> None:
        """``stores``: by queue, the path of its store, if that is another one."""
        self.target = target
        self._stores = stores or {}
        self._guard = threading.Lock()
        self._opened: dict[str, tuple[Store, Any]] = {}

    def __enter__(self) -> StorePlace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        with self._guard:
            for store, _ in self._opened.values():
                store.close()
            self._opened.clear()

    def require(self) -> None:
        """Raise :class:`StoreNotFound` if the store does not exist."""
        self.target.require()

    @property
    def store(self) -> Store:
        """The store, read-only; opened again after it was replaced, as by ``cues run --fresh``."""
        self.target.require()
        return self.opened(self.target.path)

    def opened(self, path: Path) -> Store:
        """The store at a path, read-only, which is this one or one that has a queue of its graph."""
        with self._guard:
            known, key = self._opened.get(str(path)), file_key(path)
            if known is not None and known[1] == key and not known[0].closed:
                return known[0]
            if known is not None:
                known[0].close()
            store = Store(path, readonly=True)
            self._opened[str(path)] = store, key
            return store

    @contextlib.contextmanager
    def changing(self) -> Iterator[Store]:
        """The store, for changes."""
        self.target.require()
        self.close()
        with self.target.open(readonly=False) as store:
            yield store

    @property
    def graph(self) -> Graph | None:
        return self.target.file.graph if self.target.file is not None else None

    @property
    def name(self) -> str:
        """Its name in messages."""
        return shown(self.target.path)

    @property
    def called(self) -> str:
        """Its name at the beginning of a sentence."""
        return f"The store {self.name}"

    def only_stores(self, what: str, hint: str) -> StorePlace:
        """This place: it is a store. A directory refuses."""
        return self

    def only_directories(self, what: str, hint: str) -> NoReturn:
        """Refuse: it is a store. ``what`` is a subject and its verb, such as ``cues vacuum is``."""
        if not self.target.exists:
            raise StoreNotFound(
                f"There is no directory of cues run --queues at {self.target.path}: the file _cues/id.json is missing.",
                "give the path or the URL that cues run --queues has.",
                path=str(self.target.path),
            )
        raise Refused(f"{what} for directories of cues run --queues, and {self.target.path} is a store.", hint)

    # --- measure ---

    def measure(self) -> Measurement:
        """Measure it; the units of the graph are in the order of the graph."""
        store, path = self.store, self.target.path
        seen, plan = metrics.of_store(store), self.graph.plan() if self.graph is not None else None
        nodes = draw.in_order(plan) if plan is not None else []
        order = {node.id: number for number, node in enumerate(nodes)}
        known = {processor_of(unit.processor) for unit in seen.processors}
        return replace(
            seen,
            processors=tuple(sorted(seen.processors, key=lambda u: order.get(processor_of(u.processor), len(order)))),
            delayed=tuple(delays.waiting(store)),
            orphans=tuple(identities.orphans(store, plan)),
            missing=() if plan is None else tuple(node.id for node in plan.running if node.id not in known),
            waits=tuple(backpressure.notes(path)),
            copies=tuple(follower.seen(path)),
            old_read=store.core.old_read(),
            space=free_space.look(path),
            noted=record.queues_of(path, plan.id) if plan is not None else None,
        )

    def history(self, span: str, processor: str = "") -> dict[str, list[history.Point]]:
        """The history of its processors, or of one of them (:func:`cues.engine.history.read`)."""
        return history.read(self.target.path, span, clock.now_ns() / 1e9, processor)

    def headline(self, seen: Measurement) -> str:
        """The first lines of its status."""
        return form.headline(seen)

    def lines(self, seen: Measurement) -> list[dict[str, Any]]:
        """A measurement as JSON objects."""
        return form.lines(seen)

    def queues(self, everything: bool = False) -> list[QueueMetrics]:
        """Measure the queues, also those of the graph in other stores; or the queue that the target names.

        ``everything``: also the try logs of processors.
        """
        store = self.store
        if self.target.name:
            row = metrics.of_queue(store, queue_of(self.target, store.queues(all="." in self.target.name)))
            return [row, *row.partitions]
        return [*metrics.of_queues(store, all=everything), *self._elsewhere()]

    def queue_line(self, queue: QueueMetrics) -> dict[str, Any]:
        """A queue as a JSON object."""
        return form.queue_line(queue)

    def _elsewhere(self) -> Iterator[QueueMetrics]:
        """The graph's existing queues in other stores."""
        for name, path in self._paths_elsewhere():
            with contextlib.suppress(QueueNotFound):
                row = metrics.of_queue(self.opened(path), name)
                yield replace(row, options=replace(row.options, path=shown(path)) if row.options else None)

    def _paths_elsewhere(self) -> Iterator[tuple[str, Path]]:
        """The graph's queues in other stores that exist, and the paths of these."""
        for name, options in self.graph.plan().queues.items() if self.graph is not None else ():
            if self.graph is not None and options.path is not None:
                path = self.graph.place(options.path)
                if (path / "data.mdb").exists():
                    yield name, path

    # --- read ---

    def reader(self, isolation: Isolation = "uncommitted") -> StoreReader:
        """A reader of the queue that the target names."""
        return StoreReader(open_queue(self.target, self.store), isolation)

    def reader_of(self, queue: str, partition: int | None = None) -> StoreReader:
        """A reader of a queue, which may be in another store of the graph, or of one partition of it."""
        opened = self.queue(queue)
        if partition is not None and not 0 <= partition < opened.partitions:
            raise QueueNotFound(
                f"{queue!r} has no partition {partition}.", f"give one from 0 to {opened.partitions - 1}.", queue=queue
            )
        return StoreReader(opened.partition(partition) if partition is not None and opened.is_partitioned else opened)

    def queue(self, name: str) -> Queue:
        """A queue of the graph, which may be in another store."""
        base, path, store = name.partition("/")[0], self._stores.get(name.partition("/")[0]), self.store
        if path is not None and base not in store.queues():
            store = self.opened(Path(path))
        if "." in name:
            raise QueueNotFound(f"{name!r} is a try log.", "look at the steps of the processor.", queue=name)
        return store.queue(name)

    # --- processors ---

    def shape(self) -> Shape:
        """The processors that have run, with the queues that they read and write."""
        return shape_of_store(self.store)

    def processors(self) -> list[ProcessorId]:
        """The units of processors that have run."""
        return standing.processors(self.store)

    def steps(self, unit: ProcessorId, most: int | None) -> list[dict[str, Any]]:
        """The last steps of a unit, oldest first; None: all that are kept."""
        found = steps.of_log(open_named(self.store, unit).tailer())
        return found if most is None else found[-most:] if most else []

    def step_that_wrote(self, processor: str, hash: str) -> lineage.Step | None:
        """The step of a processor with a delivery hash; None if its try logs have it no more."""
        return lineage.step_that_wrote(self.store, lineage.units_of(self.store, processor), hash)

    def readings(self, shape: Shape, log: str, message: FoundMessage) -> list[lineage.Reading]:
        """The results that the readers of a log made of a message on it."""
        when = clock.to_ns(message.time)
        return lineage.readings(self.store, shape, log, message.index, when, self.queue)

    def state(self, unit: ProcessorId, start: bytes, count: int) -> list[tuple[bytes, Any, Any, Any]]:
        """Rows of the state of a unit from a place in its table on: place, key, field and value."""
        return list(islice(rows_under(self.store, lineage.unit_key(self.store, unit), start), count))

    def state_of(self, unit: ProcessorId, key: Any, count: int) -> list[tuple[Any, Any, Any]]:
        """Rows of the state under one key: key, field and value."""
        fields = StateTable(self.store, lineage.unit_key(self.store, unit)).view(key)
        return [(key, field, fields[field]) for field in islice(fields, count)]

    def tables(self, metadata: bool) -> Mapping[str, sql.Source]:
        """The tables of :mod:`cues.operate.sql` by name.

        A processor's state has the name of its graph too, if two graphs of the store have a processor of this name.
        """
        own: dict[str, sql.Source] = {
            name: functools.partial(self._scan, name, metadata) for name in self.store.queues()
        }
        own |= {name: functools.partial(self._scan, name, metadata, path) for name, path in self._paths_elsewhere()}
        units: dict[str, list[ProcessorId]] = {}
        for unit in self.processors():
            units.setdefault(processor_of(unit), []).append(unit)
        short = Counter(id.partition(".")[2] for id in units)
        for id, of_processor in units.items():
            name = id.partition(".")[2]
            named = sql.STATE + (name if short[name] == 1 else id.replace(".", "_"))
            own.setdefault(named, functools.partial(self._states, of_processor))
        return own

    def _scan(self, name: str, metadata: bool, path: Path | None = None) -> Callable[[], Any]:
        queue = (self.store if path is None else self.opened(path)).queue(name)
        return source_of(queue, Selection(facts=metadata))

    def _states(self, units: Sequence[ProcessorId]) -> Callable[[], Any]:
        rows = [row[1:] for unit in units for row in rows_under(self.store, lineage.unit_key(self.store, unit), b"")]
        table = sql.state_table(rows)
        return lambda: table

    # --- failed messages ---

    @contextlib.contextmanager
    def home(self, readonly: bool = True) -> Iterator[Store]:
        """The store that has the processors, also if the target names a queue in another one."""
        target = self.target
        if target.file is not None:
            target = replace(target, path=store_of(target.file, target.store), name="")
        target.require()
        with Store(target.path, readonly=readonly) as home:
            yield home

    def error_logs(self, home: Store, declared: Collection[str] = (), queue: str = "") -> ErrorLogs:
        """The error queues; or ``queue``, or the queue or partition that the target names."""
        declared = {*declared, *redriving.error_queues(self.graph)}
        if self.target.name:
            with ErrorLogs(home, declared) as logs:
                known = {log.id for log in logs.logs}
            known |= {name.partition("/")[0] for name in known}
            if self.target.name not in known:
                queue_of(self.target, sorted(known))  # raises, with the nearest name
        return ErrorLogs(home, declared, queue or self.target.name)

    @contextlib.contextmanager
    def errors(self, declared: Collection[str] = (), queue: str = "") -> Iterator[FailedMessages]:
        """The failed messages, for the block; of one ``queue`` or partition, if it is named.

        ``declared``: queues that are error queues; the graph file of the target names some too.
        """
        with contextlib.ExitStack() as opened:
            home = self.store if self.graph is None else opened.enter_context(self.home())
            logs = opened.enter_context(self.error_logs(home, declared, queue))
            yield FailedMessages(
                lambda: [log.records for log in logs.logs],
                lambda index: [record for log in logs.logs if (record := log.record(index))],
                logs.unresolved,
                can_settle=True,
            )

    # --- change ---

    @contextlib.contextmanager
    def seeking(self, request: SeekRequest) -> Iterator[PlannedSeek]:
        """A move of positions that can be made in the block."""
        if self.target.name.startswith(GROUP):
            request.refuse_state(self.target.text, "a consumer group")
        with contextlib.nullcontext(self.store) if request.plan_only else self.changing() as opened:
            yield seeking.planned(opened, self.target, request, self.graph)

    @contextlib.contextmanager
    def purging(self, before: Position) -> Iterator[PlannedPurges]:
        """A purge of the queue that the target names, which can be made in the block.

        A processor of the graph that has not run yet begins at the start of the queue.
        """
        with self.changing() as opened:
            queue = open_queue(self.target, opened)
            if queue.is_partitioned and not isinstance(before, datetime):
                raise Refused(
                    f"{queue.id} has {queue.partitions} partitions, and each has indices of its own.",
                    f"give a time; or {self.target.again(f'{queue.id}/0')} --before {before}",
                )
            at = before if isinstance(before, datetime) else positions.now_on(queue.core.log, before, "--before")
            plans = [self._with_new_processors(plan) for plan in queue.plan_purge(at)]
            indices = {plan.log: plan.index for plan in plans}
            yield PlannedPurges(
                plans, lambda force: purge_to(queue, lambda txn, log, row: indices.get(log.id, row.first), not force)
            )

    def _with_new_processors(self, plan: PlannedPurge) -> PlannedPurge:
        queue, slash, partition = plan.log.partition("/")
        nodes = self.graph.plan().running if self.graph is not None else ()
        readers = [node for node in nodes if queue in (port.queue for port in node.reads)]
        ids = {f"{node.id}{slash}{partition}" for node in readers} - plan.readers
        new = [PositionHolder(id, plan.first, False) for id in sorted(ids) if plan.count]
        return replace(plan, behind=[*plan.behind, *new])

    @contextlib.contextmanager
    def growing(self) -> Iterator[Growth]:
        """The queue that the target names, which can get more partitions in the block."""
        with self.changing() as opened:
            queue = open_queue(self.target, opened)
            refuse_partition(self.target, queue.id)
            yield Growth(queue.id, queue.partitions, queue.options.key, queue.grow)

    # --- check ---

    def check(self, tell: Callable[[str, int, int], None]) -> list[str]:
        """The damage, one sentence each. ``tell`` is called meanwhile: what is checked, records done, and all."""
        self.target.require()
        return checks.walk(str(self.target.path), tell) or checks.check_others(self.store)

    repair: ClassVar = (
        "restore a backup; or cues salvage STORE NEW, which copies everything readable; or cues run --fresh, if the"
        " sources can yield all messages again."
    )
    """The remedy for damage."""

    def adopt(self) -> bool:
        """Make a store of an undamaged copy of a running one. Returns False if it is a store already."""
        if not environment.is_refused(self.target.path):
            return False
        self.close()
        exclusive.adopt(self.target.path)
        return True
