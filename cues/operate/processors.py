"""Processors from outside: plan a seek, seek, and delete one that its graph has no more.

    plan_seek(store, "shop.count", "start")       what a seek would do: deliveries, outputs, state
    seek(store, plans, reset_state=True)          do it, in one commit for each unit
    plan_forget(store, "shop.old")                what is deleted with a processor
    forget(store, "shop.old")                     delete it

Planning changes nothing. A processor over partitions has a plan for each of its units.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from cues.base import names
from cues.base.data import dataclass
from cues.base.names import ProcessorId, ProcessorKey
from cues.base.seek_plan import Place, SeekInput, SeekOutput, SeekPlan
from cues.base.texts import quoted
from cues.engine import identities, standing
from cues.engine.standing import TailerMetrics
from cues.engine.status import processor_of
from cues.errors import AlreadyRunning, InvalidArgument, QueueInUse, QueueNotFound, StoreError, StoreNotFound
from cues.forwarding import low_water, marks, other_stores
from cues.graphs import processor_rows
from cues.graphs.graph import Graph
from cues.graphs.graphfile import shown
from cues.graphs.plan import Plan
from cues.graphs.processor_rows import ProcessorRow, key_of, read_row, read_topology
from cues.operate import positions
from cues.operate.refused import Refused
from cues.operate.target import nearest
from cues.queues.log import Log
from cues.queues.queue import open_queue
from cues.queues.store import Store
from cues.steps import delays, error_records, ownership, pauses, pending
from cues.steps.ownership import Claimant, Ownership
from cues.storage import wakeup
from cues.storage.base_store import BaseStore
from cues.storage.datafile import PAGE_BYTES, pages_of
from cues.storage.transaction import StoreTransaction
from cues.tools import metrics

Form = tuple[str, str]
FORM: Final = ("to", "tailer={!r}")
"""The arguments of the library, as errors name them; commands have options."""


def units_of(store: Store, processor: str) -> list[ProcessorId]:
    """Return the units of a processor, or the one unit that is named. Raises :class:`InvalidArgument`."""
    known = standing.processors(store)
    units = [id for id in known if id == processor or processor_of(id) == processor]
    if not units:
        raise InvalidArgument(
            f"The store {store.path} has no processor {processor!r}; it has {', '.join(known) or 'none'}.",
            "run cues status, and give the id of a processor: graph.processor.",
        )
    return units


def plan_seek(
    store: Store,
    processor: str,
    to: Place,
    *,
    tailer: str | None = None,
    again: bool = False,
    graph: Graph | None = None,
) -> list[SeekPlan]:
    """Return the effects of a seek, by unit. Changes nothing.

    ``tailer`` is a queue, or a tailer id: only this input moves. ``again``: transactional sinks would accept the
    messages again. With ``graph`` the outputs are those that it declares; without it those of the last steps.
    """
    units = units_of(store, processor)
    if len(units) > 1 and isinstance(to, int):
        raise InvalidArgument(
            f"{processor} reads {len(units)} partitions, and an index belongs to one.",
            f"name the unit, such as {units[-1]!r}; or pass 'start', 'end' or a time.",
        )
    plan = graph.plan() if graph else None
    return [plan_unit(store, unit, to, tailer, again, plan) for unit in units]


def plan_unit(
    store: Store, unit: ProcessorId, to: Place, tailer: str | None, again: bool, plan: Plan | None, form: Form = FORM
) -> SeekPlan:
    """Return the effects of a seek of one unit. ``form`` is how errors name the arguments."""
    known = {each.tailer: each for each in standing.tailers(store, unit)}
    if not known:
        raise InvalidArgument(
            f"{unit} is a source, which keeps its own position.", "start it over with: cues run --fresh."
        )
    with other_stores.Others(store) as others:
        opened = {other.path: other for id in other_stores.places(store) if (other := others.get(id)) is not None}
        inputs = tuple(
            SeekInput(id, known[id].queue, known[id].position, _index(store, opened, known[id], to, form[0]))
            for id in tailers_to_move(unit, to, tailer, list(known), form)
        )
    outputs = _outputs(store, unit, again, plan) if any(input.again for input in inputs) else ()
    return SeekPlan(unit, inputs, outputs, *_state_size(store, unit))


def tailers_to_move(unit: str, to: Place, tailer: str | None, known: list[str], form: Form = FORM) -> list[str]:
    """The ids of the tailers that a seek moves: of the one that is named (by its queue or its id), else of all."""
    processor, inputs = processor_of(unit), [id.rpartition(".")[2] for id in known]
    if tailer is None:
        if len(known) > 1 and isinstance(to, int):
            raise Refused(
                f"{processor} has several inputs ({', '.join(inputs)}), and an index belongs to one.",
                f"add {form[1].format(inputs[0])}",
            )
        return known
    for id, queue in zip(known, inputs):
        if tailer in (id, queue, queue.partition("/")[0]):
            return [id]
    raise Refused(
        f"{processor} does not read {tailer!r}; it reads {', '.join(inputs)}.",
        f"give {form[1].format(nearest(tailer, inputs))}",
    )


def _index(store: Store, opened: Mapping[str, BaseStore], tailer: TailerMetrics, to: Place, option: str) -> int:
    other = opened.get(tailer.store) if tailer.store else store
    if other is None:
        raise StoreNotFound(
            f"The store of queue {tailer.queue!r} is not at its path ({shown(tailer.store)}), or is another one.",
            "put the store back at that path.",
            path=tailer.store,
        )
    return positions.now_on(Log(other, *names.split_log(tailer.queue)), to, option)


def seek(
    store: Store, plans: Sequence[SeekPlan], *, again: bool = False, reset_state: bool | None = None
) -> list[ProcessorRow]:
    """Move positions as planned, whether the processor runs or not. Each unit is one commit, with its state.

    ``reset_state``: True deletes the state of the units in the same commit; False keeps it, and messages that are
    delivered again count twice in it. None, the default, refuses that (:class:`InvalidArgument`), and then nothing is
    moved. ``again`` raises the generation: transactional sinks accept the messages again.
    """
    for plan in plans:
        if plan.counts_twice and reset_state is None:
            raise InvalidArgument(
                f"{plan.processor} has state ({plan.state_values:,} values) of the messages that it would be given"
                " again, which would count twice.",
                "pass reset_state=True to begin with an empty state, or reset_state=False to keep it.",
            )
    rows = []
    for plan in plans:
        moves = {input.tailer: input.to for input in plan.inputs}
        rows.append(ownership.seek(store, plan.processor, moves, again, bool(reset_state)))
        store.core.ring(wakeup.union(wakeup.mask_of(*names.split_log(input.queue)) for input in plan.inputs))
    return rows


def _outputs(store: Store, unit: ProcessorId, again: bool, plan: Plan | None) -> tuple[SeekOutput, ...]:
    node = None if plan is None else next((n for n in plan.running if n.id == processor_of(unit)), None)
    with store.core.view() as txn:
        topology = read_topology(txn, unit)
        key = key_of(txn, unit)
    outputs: list[SeekOutput] = []
    if topology is not None and topology.kind == "sink":
        exact = node is not None and node.options.checkpoint is not None
        effect = "skipped by the target" if exact and not again else "delivered again"
        outputs.append(SeekOutput(processor_of(unit), effect))
    paths = {id: str(places[0]) for id, places in other_stores.places(store).items()}
    if node is not None and plan is not None:
        ends = [(p.queue, str(plan.queues[p.queue].path or "")) for p in node.writes]
    else:
        wrote = _wrote(store, key)
        ends = [(queue, "") for queue in sorted(wrote) if names.split_fork(queue) is None]
        ends += [("messages", paths.get(f[1], f[1].hex())) for queue in sorted(wrote) if (f := names.split_fork(queue))]
    return (*outputs, *(SeekOutput(queue, "appended again", path) for queue, path in ends))


def _wrote(store: Store, key: ProcessorKey) -> set[str]:
    """The queues that the try log of a processor names: those of its last steps."""
    log = Log(store, key)
    with store.core.view() as txn:
        row = log.row(txn)
        raws = log.read(txn, row, row.first, row.next - row.first)
    indices = [message.get(names.MESSAGE_INDEX, ()) for batch in log.batches(raws) for message in batch.messages()]
    return {names.split_log(queue)[0] for each in indices for queue in each}


def _state_size(store: Store, unit: ProcessorId) -> tuple[int, int]:
    with store.core.view() as txn:
        key = key_of(txn, unit)
    try:
        database = store.core.database(names.state_database(key))
    except QueueNotFound:
        return 0, 0
    with store.core.view() as txn:
        figures = txn.stat(database)
    return int(figures["entries"]), pages_of(figures) * PAGE_BYTES if figures["entries"] else 0


# --- orphans --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ForgetPlan:
    """A processor in the store that can be deleted, with all of its units."""

    processor: str
    units: tuple[ProcessorId, ...]
    unread: int
    """The number of messages that it has not taken, for which retention may wait."""
    held: int
    """The number of delayed and redriven messages that it was to be given later."""
    state_values: int
    state_bytes: int


def plan_forget(store: Store, processor: str, graph: Graph | None = None) -> ForgetPlan:
    """Return what would be deleted. Changes nothing. Raises the errors of :func:`forget`."""
    units = units_of(store, processor)
    if units == [processor] and processor != processor_of(processor):
        raise InvalidArgument(f"{processor} is one partition.", f"name the processor: {processor_of(processor)}.")
    present = identities.graphs(store).get(processor.partition(".")[0], set())
    if graph is not None and graph.id == processor.partition(".")[0]:
        present = {node.id for node in graph.plan().running}
    if processor in present:
        raise InvalidArgument(
            f"{processor} is a processor of its graph.",
            f"remove it from the graph first; or start it over with: cues seek {quoted(store.path)}#{quoted(processor)}"
            " --to start --reset-state.",
        )
    for unit in units:
        holder = metrics.owner(store, unit)
        if holder is not None:
            raise AlreadyRunning(
                f"{unit} is run by process {holder.pid} ({holder.state}).",
                f"stop that process first (kill {holder.pid}).",
                pid=holder.pid,
            )
    for forward in metrics.of_forwards(store):
        if forward.processor in units and forward.waiting != 0:
            waiting = "messages" if forward.waiting is None else f"{forward.waiting:,} messages"
            raise QueueInUse(
                f"{waiting} of {forward.processor} wait to be forwarded to the store {forward.store}.",
                "run the graph once, which forwards them.",
                queue=f"{forward.processor}.fork.",
            )
    sizes = [_state_size(store, unit) for unit in units]
    unread = sum(tailer.lag or 0 for unit in units for tailer in standing.tailers(store, unit))
    with store.core.view() as txn:
        held = sum(error_records.waiting(txn, unit) for unit in units)
    held += sum(each.messages for each in delays.waiting(store) if each.unit in units)
    return ForgetPlan(processor, tuple(units), unread, held, sum(n for n, _ in sizes), sum(size for _, size in sizes))


def refuse_running(path: Path, plan: Plan) -> None:
    """Raise :class:`AlreadyRunning` if a process runs a processor of a graph with its store at ``path``."""
    with contextlib.suppress(StoreError), Store(path, readonly=True) as store:
        ownership.require_replaceable(store, [node.id for node in plan.running], take_over=False)


def forget(store: Store, processor: str, graph: Graph | None = None) -> ForgetPlan:
    """Delete a processor that its graph has no more: positions, state and tries of all its units, in one commit.

    Retention no longer waits for it. Its outputs and the data of its target stay. A processor of that name begins
    anew later, also for targets. ``graph`` is the graph as it is now; without it, the processors of the graph are
    those of its last start. Raises :class:`AlreadyRunning` while a process runs it, :class:`QueueInUse` while its
    messages wait for another store, and :class:`InvalidArgument` if there is none, or if the graph has it.
    """
    plan = plan_forget(store, processor, graph)
    owned = Ownership(store, [Claimant(unit, "", {}) for unit in plan.units])
    try:
        with store.core.view() as txn:
            keys = {unit: key_of(txn, unit) for unit in plan.units}
            topologies = {unit: read_topology(txn, unit) for unit in plan.units}
        for unit, key in keys.items():
            _settle(store, unit, key)
        # The marks first: what is left after a death in between is deleted by the next call.
        for unit, topology in topologies.items():
            for queue, other in zip(topology.queues, topology.stores) if topology else ():
                with contextlib.suppress(StoreNotFound):
                    if other:
                        with other_stores.opened(store, other, readonly=False) as opened:
                            low_water.drop_mark(opened, queue, marks.ForeignReader(store.id, keys[unit], 0))
        parts = [part(key) for key in keys.values() for part in names.PARTS]
        tables = []
        for key in (*keys.values(), *parts):
            with contextlib.suppress(QueueNotFound):
                tables.append(store.core.database(names.state_database(key)))
        made = [id for id in store.queues(all=True) if any(f"{id}.".startswith(f"{part}.") for part in parts)]
        logs = [Log(store, id) for id in (*keys.values(), *made)]

        def delete(txn: StoreTransaction) -> None:
            for unit in plan.units:
                processor_rows.forget(txn, unit)
                pauses.forget(txn, keys[unit])
            for key in (*keys.values(), *parts):
                for key_of_row in (names.redriver_key, names.redriver_inputs_key, names.redrives_key):
                    txn.delete(key_of_row(key))
            for table in tables:
                txn.drop(table, delete=False)
            for log in logs:  # the row of the try log stays: the key is not used again
                row = log.row(txn)
                txn.drop(log.database, delete=False)
                log.move_front(txn, row, row.next)

        store.core.commit(delete)
    finally:
        owned.release()
    return plan


def _settle(store: Store, unit: ProcessorId, key: ProcessorKey) -> None:
    """Append the acknowledgements that are due in other stores, and drop the pending messages there."""
    with store.core.view() as txn:
        row, owner = pending.read_row(txn, key), read_row(txn, unit)
    if row is None or owner is None:
        return
    with contextlib.ExitStack() as opened:
        queues = []
        for id, log in row.due:
            other = opened.enter_context(other_stores.opened(store, id, readonly=False))
            queues.append(open_queue(other, names.split_log(log)[0]))
        pending.finish(store, unit, key, owner, queues)
