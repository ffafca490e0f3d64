"""A replay: the processors of a graph, as they are now, over the messages that an old store has, into a fresh store.

    old store ──records──▶ fresh store ──streams run until idle──▶ compare queue by queue

1. The old store is read in one transaction: the ends of the queues that nothing in the replay writes (those of sources
   and of ``send``), the rows of sources, and the rows about publishers. The note (``engine/replays.py``) is committed
   with it in the fresh store, together with these queues, which are empty and have the identities of the old ones.
2. Record batches are copied up to these ends, byte by byte: indices, times, hashes and identities stay.
3. The graph runs without the functions of its sources, and without its sinks, until it is idle. There is no retention
   and no backpressure meanwhile, because no message may go before it is compared.
4. In one commit the rows of sources, the options of the queues and the note are written: the store is done. Its sources
   continue after their last message in 1.
5. The queues that the processors write are compared (``tools/replay_diff.py``).

A death at any moment leaves a store in one of these phases, and the same call continues there.

Not guaranteed: that a function that asks a clock, a random generator or another system gives the same results again;
that a batch function gets batches of the same size; the order of messages from several inputs or partitions.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from cues import faults
from cues.base import names
from cues.base.checks import is_count
from cues.engine import pausing, replays
from cues.engine.replays import ReplayNote
from cues.errors import GraphError, InvalidArgument, MessagesPurged, ProcessorStopped, StoreError
from cues.graphs.declaration import Processor, Source
from cues.graphs.graph import Graph
from cues.graphs.plan import Plan, written
from cues.graphs.processor import Node
from cues.graphs.processor_rows import read_topology
from cues.queues.base import unpack_record, views_of
from cues.queues.log import KEY, Log, read_row
from cues.queues.options import QueueOptions, changed
from cues.queues.queue import create_queue
from cues.queues.store import Store
from cues.records import sealed
from cues.records.log_row import LogRow, put_row
from cues.steps import closing
from cues.steps.state import StateTable
from cues.storage.transaction import StoreTransaction, rows
from cues.tools import replay_diff
from cues.tools.replay_diff import ReplayReport

COPY_BYTES_MAX: Final = 4 << 20
"""One commit copies about this many bytes."""
_UNBOUNDED: Final = {"retention": None, "max_lag": None, "max_bytes": None}

Progress = Callable[[str], None]
"""Called with one sentence about what is done now."""


def replay(
    graph: Graph,
    *,
    into: str | os.PathLike[str],
    store: str | os.PathLike[str] | None = None,
    until: int | datetime | None = None,
    processors: Sequence[str] = (),
    with_sinks: bool = False,
    from_first: bool = False,
    diff_limit: int = 10,
    progress: Progress | None = None,
) -> ReplayReport:
    """Run the graph's streams over the messages of its old store, into the fresh store ``into``; compare the outputs.

    ``store`` is the old store, by default the graph's own. It is only read, and may be in use. ``until`` ends before
    an index or a time of each copied queue; ``processors`` runs only these. Both make a store for comparison, on which
    the graph does not start. ``with_sinks`` runs the sinks too. ``from_first`` begins at the first message that is
    left, if a queue has lost messages. The report has at most ``diff_limit`` differences of each queue.

    After a kill, the same call continues. Raises :class:`StoreError` if ``into`` has something else,
    :class:`MessagesPurged` if messages are missing, :class:`GraphError` for a graph that cannot be replayed.
    """
    if not is_count(diff_limit, 0):
        raise InvalidArgument(f"diff_limit is {diff_limit!r}.", "pass a number of differences, such as 10.")
    say = progress or (lambda text: None)
    old_path, new_path = Path(store if store is not None else graph.store_path()), Path(into)
    if old_path.resolve() == new_path.resolve():
        raise InvalidArgument(f"The replay of {old_path} would be into itself.", "give the path of a new store.")
    plan = graph.plan()
    nodes = _chosen(plan, processors, with_sinks)
    _check_graph(plan, nodes)
    with Store(old_path, readonly=True) as old:
        made = not (new_path / "data.mdb").exists()
        if made:  # everything that can be refused is refused before anything is made
            planned = _planned(old, plan, nodes, until, bool(processors), from_first)
        with Store(new_path, durability=old.durability if made else None) as new:
            note = replays.read(new)
            if note is None:
                if not made:
                    planned = _planned(old, plan, nodes, until, bool(processors), from_first)
                note = _begin(new, planned)
            _check_note(note, old, new, graph, nodes, until)
            if note.phase == "copying":
                note = _copy(old, new, note, say)
            if note.phase == "running":
                _run(graph, plan, nodes, new, say, until is None and closing.closed_before(old))
                note = _finish(new, note)
            say("comparing")
            return replay_diff.compare(old, new, plan, nodes, note, diff_limit)


# --- 1. what is replayed ------------------------------------------------------------------------


def _chosen(plan: Plan, processors: Sequence[str], with_sinks: bool) -> list[Node]:
    """The processors that run: the named ones; else all streams, and with ``with_sinks`` the sinks."""
    if processors:
        nodes = list({node.id: node for node in map(plan.node, processors)}.values())
        for node in nodes:
            if node.kind == "source" or (node.kind == "sink" and not with_sinks):
                raise GraphError(
                    f"{node.id} is a {node.kind}, and a replay does not call the functions of {node.kind}s.",
                    "name a stream." if node.kind == "source" else "name a stream, or add --with-sinks.",
                    processor=node.id,
                )
        return nodes
    return [node for node in plan.running if node.kind != "source" and (with_sinks or node.kind != "sink")]


def _check_graph(plan: Plan, nodes: Sequence[Node]) -> None:
    """Refuse what a replay does not do, by name."""
    if not nodes:
        raise GraphError(
            f"The graph {plan.id!r} has no streams, so there is nothing to replay.", "name a graph with streams."
        )
    outside = {node.outputs[0].queue for node in plan.nodes if node.kind == "source"}
    for node in nodes:
        if node.kind == "frame":
            raise GraphError(
                f"{node.id} is a frame, which runs on Spark only, and cues replay runs in one process.",
                "replay the other processors with --processor.",
                processor=node.id,
            )
        for queue in written(node):
            if queue in outside:
                raise GraphError(
                    f"{node.id} writes to {queue!r}, which a source or send writes to as well: a replay cannot tell"
                    " their messages apart.",
                    "let the source write to a queue of its own.",
                    processor=node.id,
                )
    for node in plan.nodes:
        for queue in Plan.named(node):
            path = plan.queues[queue].path
            if path is not None and (node in nodes or node.kind == "source"):
                raise GraphError(
                    f"{node.id} uses {queue!r}, which is in another store ({path}), and a replay reads and writes one.",
                    "choose processors without this queue with --processor.",
                    processor=node.id,
                )


def _copied(nodes: Sequence[Node]) -> list[str]:
    """The queues that the processors read and do not write."""
    made = {queue for node in nodes for queue in written(node)}
    return sorted({port.queue for node in nodes for port in node.reads} - made)


def _planned(
    old: Store, plan: Plan, nodes: Sequence[Node], until: int | datetime | None, partial: bool, from_first: bool
) -> ReplayNote:
    """Read everything that bounds the replay, in one transaction of the old store."""
    whole = not partial and until is None
    copied: dict[str, list[list[int]]] = {}
    options: dict[str, dict[str, Any]] = {}
    identities: dict[str, bytes] = {}
    log_rows: list[list[bytes]] = []
    source_rows: list[list[bytes]] = []
    sources = [node for node in plan.nodes if node.kind == "source"] if whole else []
    present = set(old.queues())
    wanted = {*_copied(nodes), *(node.outputs[0].queue for node in sources)}
    missing = sorted(wanted - present)
    if missing == sorted(wanted):
        raise StoreError(
            f"The store {old.path} has no messages of the graph {plan.id!r}: it has no queue {', '.join(missing)}.",
            "give the store that the graph ran on, with --store.",
            path=old.path,
        )
    logs = {queue: [view.core.log for view in views_of(old.queue(queue))] for queue in sorted(wanted & present)}
    states = {node.key: StateTable(old, node.key).database() for node in sources}
    with old.core.view() as txn:
        for node in sources:
            former = node.options.renamed_from
            topology = read_topology(txn, node.id)
            if topology.key if topology is not None else former:
                raise StoreError(
                    f"The source {node.id} was renamed, and a replay does not take that along: it would begin anew.",
                    "replay into a store for comparison: name the streams with --processor.",
                    path=old.path,
                )
        if whole and any(True for _ in rows(txn, names.PRODUCERS)):
            raise StoreError(
                f"Graphs of other stores write to queues of {old.path}, and a replay does not take their positions"
                " along.",
                "replay into a store for comparison: name the streams with --processor.",
                path=old.path,
            )
        for queue, parts in logs.items():
            record = unpack_record(queue, txn.get(names.queue_key(queue)))
            options[queue], identities[queue] = record["options"], record["identity"]
            copied[queue] = []
            for log in parts:
                row = log.records_row(txn)
                if row.first > 1 and not from_first:
                    raise MessagesPurged(
                        f"The queue {log.id!r} of {old.path} has lost its first {row.first - 1:,} messages by retention"
                        " or a purge: functions with state would begin without them.",
                        f"add --from-first to begin at index {row.first}; or replay a backup that has them.",
                        queue=log.id,
                        first=1,
                        last=row.first - 1,
                    )
                copied[queue].append([row.first, _end(txn, log, row, until)])
                for prefix in (names.clocks_prefix, names.spans_prefix, names.opens_prefix):
                    stamped = [[key, bytes(value)] for key, value in rows(txn, prefix(log.id))]
                    if stamped and until is not None:
                        raise StoreError(
                            f"The queue {log.id!r} has messages of publishers, and their transactions cannot be cut.",
                            "leave --until out.",
                            path=old.path,
                        )
                    log_rows += stamped
                line = txn.get(names.timeline_key(log.id))
                if line is not None:
                    log_rows.append([names.timeline_key(log.id), bytes(line)])
        for node in sources if whole else ():
            if node.fn is not None and txn.get(names.processor_key(node.id)) is not None:
                for key in (names.processor_key(node.id), names.topology_key(node.id)):
                    source_rows.append([key, bytes(txn.get(key))])
        state_rows = {
            id: [[bytes(key), bytes(value)] for key, value in txn.cursor(database)]
            for id, database in states.items()
            if database is not None
        }
        if whole:
            source_rows += [[key, bytes(value)] for key, value in rows(txn, names.SOURCES)]
    return ReplayNote(
        source=str(old.directory),
        source_id=old.id,
        graph=plan.id,
        processors=sorted(node.name for node in nodes),
        until=None if until is None else str(until),
        whole=whole,
        copied=copied,
        identities=identities,
        log_rows=log_rows,
        source_rows=source_rows,
        options=options,
        state_rows=state_rows,
    )


def _end(txn: StoreTransaction, log: Log, row: LogRow, until: int | datetime | None) -> int:
    """The index after the last message that is copied: the beginning of a record, because records are copied whole."""
    if until is None:
        return row.next
    if isinstance(until, datetime):
        return log.index_at(txn, row, int(until.timestamp() * 1_000_000) * 1000)
    if until >= row.next:
        return row.next
    raws = log.read(txn, row, until, 1)
    return max(row.first, raws[0][0]) if raws else row.first


def _begin(new: Store, note: ReplayNote) -> ReplayNote:
    """Make the copied queues, empty, and the note, in one commit. Raises :class:`StoreError` if the store is in use."""
    identities = note.identities

    def begin(txn: StoreTransaction) -> None:
        for key, _ in rows(txn, b"\0"):
            if key != names.FORMAT_KEY and not key.startswith(b"\0store"):
                raise StoreError(
                    f"The store {new.path} is not empty and not a replay: it has {key[1:].decode(errors='replace')!r}.",
                    "give the path of a new store.",
                    path=new.path,
                )
        for queue, parts in note.copied.items():
            options = changed(QueueOptions.from_dict(note.options[queue]), _UNBOUNDED)
            create_queue(txn, new, queue, options)
            record = unpack_record(queue, txn.get(names.queue_key(queue))) | {"identity": identities[queue]}
            sealed.put(txn, names.queue_key(queue), sealed.pack_map(record))
            for partition, (first, _) in enumerate(parts):
                row = LogRow(identities[queue], first, first, 0, record["version"])
                put_row(txn, names.row_key(queue, partition), row)
        note.put(txn)

    new.core.commit(begin, pages=_pages_of(note))
    faults.point("replay.begun")
    return note


def _pages_of(note: ReplayNote) -> int:
    rows = itertools.chain(note.log_rows, note.source_rows, *note.state_rows.values())
    return 4 + sum(len(key) + len(value) for key, value in rows) // 1000


def _check_note(
    note: ReplayNote, old: Store, new: Store, graph: Graph, nodes: Sequence[Node], until: int | datetime | None
) -> None:
    """Raise :class:`StoreError` if the store is another replay, or has gone on since."""
    asked = (old.id, graph.id, sorted(node.name for node in nodes), None if until is None else str(until))
    if (note.source_id, note.graph, note.processors, note.until) != asked:
        until_text = "" if note.until is None else f" until {note.until}"
        raise StoreError(
            f"The store {new.path} is another replay: of {note.graph} in {note.source}{until_text}, with the"
            f" processors {', '.join(note.processors)}.",
            "give the path of a new store, or the same options again.",
            path=new.path,
        )
    with new.core.view() as txn:
        for queue, parts in note.copied.items():
            for partition, (_, end) in enumerate(parts):
                if read_row(txn, queue, partition).next > end:
                    raise StoreError(
                        f"The store {new.path} was a replay, and has gone on since: {queue!r} has messages from index"
                        f" {end} on that were not copied.",
                        "give the path of a new store.",
                        path=new.path,
                    )


# --- 2. the messages ----------------------------------------------------------------------------


def _copy(old: Store, new: Store, note: ReplayNote, say: Progress) -> ReplayNote:
    total = sum(end - first for parts in note.copied.values() for first, end in parts)
    done = 0
    for queue, parts in note.copied.items():
        for partition, (first, end) in enumerate(parts):
            source, target = Log(old, queue, partition), Log(new, queue, partition)
            at = first
            while at < end:
                at = _copy_some(source, target, end)
                faults.point("replay.copied")
                say(f"copied {done + at - first:,} of {total:,} messages")
            done += end - first

    def finish(txn: StoreTransaction) -> ReplayNote:
        for key, value in note.log_rows:
            txn.put(key, sealed.renewed(key, value) or value)
        running = note.at("running")
        running.put(txn)
        return running

    return new.core.commit(finish, pages=2 * _pages_of(note))


def _copy_some(source: Log, target: Log, end: int) -> int:
    """Copy some records, byte by byte; return the next index. Raises :class:`MessagesPurged`."""
    with target.store.core.view() as txn:
        at = target.row(txn).next
    if at >= end:
        return at
    with source.store.core.view() as txn:
        row = source.row(txn)
        if row.first > at:
            raise MessagesPurged(
                f"The queue {source.id!r} of {source.store.path} lost the messages {at} to {row.first - 1} by retention"
                " or a purge while they were copied.",
                "delete the unfinished store, set a longer retention, and start the replay again.",
                queue=source.id,
                first=at,
                last=row.first - 1,
            )
        raws = source.read(txn, row, at, end - at, COPY_BYTES_MAX)
    batches = source.batches(raws)
    raws = raws[: len(batches)]

    def put(txn: StoreTransaction) -> int:
        row = target.row(txn)
        if row.next != at:
            raise StoreError(
                f"Another process writes to {target.store.path}.",
                "wait until its replay has ended.",
                path=target.store.path,
            )
        items: list[tuple[bytes, bytes]] = []
        for first, value, pieces in raws:
            items.append((KEY.pack(first), value))
            items += [(KEY.pack(first) + number.to_bytes(4, "big"), piece) for number, piece in enumerate(pieces, 1)]
        txn.cursor(target.database).putmulti(items, append=True)
        target.keep_schemas(txn, {batch.schema.packed for batch in batches if batch.schema is not None})
        next = batches[-1].next
        put_row(txn, target.key, row._replace(next=next, time_ns=batches[-1].head.time_ns))
        return next

    return int(target.store.core.commit(put, pages=2 * sum(1 + len(raw[2]) for raw in raws)))


# --- 3. and 4. the processors -------------------------------------------------------------------


def _run(graph: Graph, plan: Plan, nodes: Sequence[Node], new: Store, say: Progress, closes: bool) -> None:
    """``closes``: windows of the old store were closed at the end of a run, so these are too."""
    say("running the processors")
    pausing.resume_units(new, plan.id, None)
    with replays.running(new), _graph_of(graph, nodes, new).start(store=new) as running:
        while not running.wait_done(idle_exit_s=0.0):
            raise StoreError("The replay was stopped.", "run it again; it continues.", path=new.path)
        for pause in running.pauses():
            raise ProcessorStopped(
                f"In the replay, {pause.processor} is paused {pause.text}.",
                "correct the function and run the replay again, which continues there.",
                processor=pause.processor,
            )
        if closes:
            running.close_open()
    faults.point("replay.ran")


def _graph_of(graph: Graph, nodes: Sequence[Node], new: Store) -> Graph:
    """The graph with these processors, sources without functions, and queues without bounds."""
    chosen = {node.name for node in nodes}
    fed = set(_copied(nodes))
    kept = [_unlimited(processor) for processor in graph.processors.values() if processor.id in chosen]
    kept += [Source(name, None) for name, processor in graph.processors.items()
             if processor.kind == "source" and name in fed]  # fmt: skip
    queues = {queue for node in nodes for queue in Plan.named(node)}
    result = Graph(
        graph.id,
        kept,
        store=new,
        errors=graph.errors,
        strategy=graph.strategy,
        system=graph.system,
        queues={
            name: changed(options, _UNBOUNDED)
            for name, options in graph.queues.items()
            if name in queues or name == "*"
        },
    )
    result.directory = graph.directory
    return result


def _unlimited(processor: Processor) -> Processor:
    """The processor without ``max_errors=``: a replay makes the errors of a month in a minute."""
    if processor.options.max_errors is None:
        return processor
    processor = copy.copy(processor)
    processor.options = replace(processor.options, max_errors=None)
    return processor


def _finish(new: Store, note: ReplayNote) -> ReplayNote:
    """Write the rows of sources and the options of copied queues; the store is done."""
    done = note.at("done")
    states = {id: StateTable(new, id) for id in note.state_rows}
    for table in states.values():
        table.ensure()

    def finish(txn: StoreTransaction) -> None:
        for id, table in states.items():
            txn.cursor(table.database()).putmulti([(key, value) for key, value in note.state_rows[id]])
        for key, value in note.source_rows:
            txn.put(key, sealed.renewed(key, value) or value)
        for queue, options in note.options.items():
            record = unpack_record(queue, txn.get(names.queue_key(queue)))
            record["options"] = options
            record["version"] += 1
            sealed.put(txn, names.queue_key(queue), sealed.pack_map(record))
            for partition in range(len(note.copied[queue])):
                row = read_row(txn, queue, partition)
                put_row(txn, names.row_key(queue, partition), row._replace(version=record["version"]))
        done.put(txn)

    new.core.commit(finish, pages=2 * _pages_of(note))
    faults.point("replay.done")
    return done
