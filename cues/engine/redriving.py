"""Error messages from outside of a step: list, redrive, discard; whether their graph runs or not.

    select       the error messages that a caller means
    plan         those of them that can be redriven, and why the others cannot
    run          ask (steps/redrive.py), and take the redriven messages here if no process runs their processor

The request is durable before anything runs. So a caller that dies leaves requests that the next owner takes up, and
it does not matter which process that is.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from cues.base import names
from cues.base.data import dataclass
from cues.engine.assembly import Assembly, assemble
from cues.engine.causes import cause_of, normalised
from cues.engine.status import is_named
from cues.engine.threads import adopt
from cues.errors import AlreadyRunning, Fenced, InvalidArgument
from cues.graphs.graph import Graph
from cues.graphs.processor import Node
from cues.graphs.running import RedriveResult
from cues.queues.store import Store
from cues.steps import redrive as redrives
from cues.steps.error_records import ErrorLogs, ErrorRecord, ErrorRows, Resolution
from cues.steps.ownership import supervisor_lock
from cues.storage import locks

if TYPE_CHECKING:
    from cues.base import events

LOOK_S: Final = 0.05
"""Time between two looks at redrives that another process makes."""
Where = Callable[[dict[str, Any]], bool]
"""A condition over the fields of :func:`view`."""


def view(record: ErrorRecord) -> dict[str, Any]:
    """Return the fields of an error message for a condition.

    ``queue``, ``index``, ``time``, ``processor``, ``type`` and ``text`` (of the exception), ``cause`` (both, without
    quoted text and numbers), ``attempts``, ``count``, ``state``, ``redriven`` (the number of error messages from
    whose redrive it came, 0 for a first failure), ``input`` (the message that failed; of several the first), ``inputs``
    (by binding, the first of each), ``context``.
    """
    inputs = {binding: messages[0] for binding, messages in record.inputs.items() if messages}
    return {
        "queue": record.queue,
        "index": record.index,
        "time": record.time,
        "processor": record.processor.partition(".")[2],
        "type": record.type,
        "text": record.text,
        "cause": normalised(cause_of(record)),
        "attempts": record.attempts,
        "count": record.count,
        "state": record.state,
        "redriven": len(record.redriven),
        "input": next(iter(inputs.values()), {}),
        "inputs": inputs,
        "context": record.message.get(names.ERR_CONTEXT) or {},
    }


def matches(record: ErrorRecord, processor: str | None = None, where: Where | None = None) -> bool:
    """Return whether an error message fulfils a condition, and is of a processor.

    ``processor``: its name, with or without its graph and its partition.
    """
    if processor is not None and not is_named(record.processor, processor):
        return False
    return where is None or bool(where(view(record)))


def select(
    logs: ErrorLogs,
    processor: str | None = None,
    index: Collection[int] = (),
    where: Where | None = None,
    settled: bool = False,
) -> list[ErrorRecord]:
    """Return error messages in the order of their queues; unless ``settled``, only those that need somebody.

    Raises :class:`InvalidArgument` for an index that is on several error queues, or on none.
    """
    if not index:
        found = [record for record in logs.records(settled) if matches(record, processor, where)]
        return sorted(found, key=lambda record: (record.queue, record.index))
    chosen = []
    for at in sorted(set(index)):
        here = [record for log in logs.logs if (record := log.record(at)) is not None]
        here = [record for record in here if matches(record, processor, where)]
        if not here:
            known = ", ".join(log.id for log in logs.logs) or "no error queue"
            raise InvalidArgument(
                f"There is no error message {at} (on {known}).",
                "list them with cues errors; retention may have removed it.",
            )
        if len(here) > 1:
            queues = ", ".join(record.queue for record in here)
            raise InvalidArgument(f"The index {at} is on {queues}.", f"name the queue: #{here[0].queue}.")
        chosen += here
    return chosen


@dataclass(frozen=True)
class RedrivePlan:
    """The error messages that a redrive takes, and those that it cannot take."""

    records: tuple[ErrorRecord, ...]
    refused: tuple[tuple[ErrorRecord, str], ...]
    """Each with the reason, as a sentence."""
    requested: tuple[ErrorRecord, ...] = ()
    """Those for which a redrive was asked for before, and has not run yet."""

    @property
    def by_processor(self) -> dict[str, int]:
        """The number of error messages, by the id of the unit."""
        counts: dict[str, int] = {}
        for record in (*self.records, *self.requested):
            counts[record.processor] = counts.get(record.processor, 0) + 1
        return counts


def plan(home: Store, records: Sequence[ErrorRecord], nodes: Mapping[str, Node] | None) -> RedrivePlan:
    """Divide error messages into those that can be redriven and those that cannot. Changes nothing.

    ``nodes``: the processors of the graph, by id; None if only its store is known.
    """
    taken, refused, requested = [], [], []
    for record in records:
        if record.settled:
            refused.append((record, f"it is {record.state} already"))
        elif record.state == "requested":
            requested.append(record)
        elif why := redrives.refusal(home, record, nodes):
            refused.append((record, why))
        else:
            taken.append(record)
    return RedrivePlan(tuple(taken), tuple(refused), tuple(requested))


def run(
    home: Store,
    planned: RedrivePlan,
    graph: Graph | None,
    timeout: float | None = None,
    emit: Callable[[events.Event], None] = lambda event: None,
    halted: Callable[[], bool] = lambda: False,
) -> RedriveResult:
    """Ask for the redrives of a plan and see them done.

    If no process runs a processor, this one does, with ``graph``, for its redriven messages alone. Without ``graph``,
    and after ``timeout`` seconds, or once ``halted``, those that are left wait for the next start.
    """
    redrives.ask(home, sorted(planned.records, key=lambda record: (record.queue, record.index)))
    records = (*planned.records, *planned.requested)
    rows = ErrorRows(home)
    deadline = None if timeout is None else time.monotonic() + timeout

    def over() -> bool:
        return halted() or (deadline is not None and time.monotonic() >= deadline)

    while True:
        left = [r for r, resolution in zip(records, _resolutions(rows, records)) if resolution.state == "requested"]
        if not left or over():
            break
        free = sorted({record.processor for record in left if not _owned(home, record.processor)})
        if free and graph is None:
            break
        if not (free and graph is not None and _run_here(graph, home, free, emit, over)):
            time.sleep(LOOK_S)
    return _result(planned, records, _resolutions(rows, records))


def _result(planned: RedrivePlan, records: Sequence[ErrorRecord], resolutions: Sequence[Resolution]) -> RedriveResult:
    by_state: dict[str, list[tuple[str, int]]] = {}
    refused = [(record.queue, record.index, why) for record, why in planned.refused]
    for record, resolution in zip(records, resolutions):
        by_state.setdefault(resolution.state, []).append((record.queue, record.index))
        if resolution.state == "refused":
            refused.append((record.queue, record.index, resolution.reason))
    return RedriveResult(
        tuple(by_state.get("resolved", ())),
        tuple(by_state.get("failed again", ())),
        tuple(refused),
        tuple(by_state.get("requested", ())),
    )


def _resolutions(rows: ErrorRows, records: Sequence[ErrorRecord]) -> list[Resolution]:
    with rows.home.core.view() as txn:
        found = [rows.resolution(txn, record.key) for record in records]
    # A row that is gone belongs to a message that retention removed after its redrive.
    return [r if r is not None else Resolution("resolved", record.time, "") for r, record in zip(found, records)]


def _owned(home: Store, unit: str) -> bool:
    """Return whether a process runs a unit, or is about to: a supervisor starts a worker again."""
    offsets = (locks.offset_of(unit), supervisor_lock(unit.partition(".")[0]))
    return any(home.core.locks.mine(offset) or home.core.locks.holder(offset) is not None for offset in offsets)


def _run_here(
    graph: Graph,
    home: Store,
    units: Sequence[str],
    emit: Callable[[events.Event], None],
    over: Callable[[], bool],
) -> bool:
    """Take the redriven messages of these units in this thread. Return False if another process runs one of them."""
    try:
        assembly = assemble(graph, home, units=units, emit=emit)
    except AlreadyRunning:
        return False
    try:
        _take_redriven(assembly, over)
    finally:
        assembly.close()
    return True


def _take_redriven(assembly: Assembly, over: Callable[[], bool]) -> None:
    going = True
    while going:
        going = False
        for stepper in assembly.steppers:
            try:
                going |= stepper.redrive()
                if stepper.redrive_waits_s:  # a new assembly would begin with a call in its bucket
                    time.sleep(min(LOOK_S, stepper.redrive_waits_s))
                    going |= not over()
            except Fenced as fence:
                if fence.reason != "seek":
                    raise
                adopt(stepper)
                going = True
        for forwarder in assembly.forwarders:
            going |= forwarder.step()


# --- for programs -------------------------------------------------------------------------------


@contextlib.contextmanager
def opened(place: Any, readonly: bool) -> Iterator[tuple[Store, Graph | None]]:
    """Open the home store that a graph, a store or a path names."""
    graph = place if isinstance(place, Graph) else None
    given = place if graph is None else (graph.store if graph.store is not None else graph.store_path())
    if isinstance(given, Store):
        yield given, graph
    else:
        with Store(given, readonly=readonly) as store:
            yield store, graph


def error_queues(graph: Graph | None) -> list[str]:
    """Return the error queues that a graph declares."""
    return [] if graph is None else sorted({node.errors for node in graph.plan().running if node.errors})


def nodes_of(graph: Graph | None) -> dict[str, Node] | None:
    return None if graph is None else {node.id: node for node in graph.plan().running}


def list_errors(
    place: Graph | Store | str | os.PathLike[str],
    *,
    queue: str = "",
    processor: str | None = None,
    index: Collection[int] = (),
    where: Where | None = None,
    settled: bool = False,
) -> list[ErrorRecord]:
    """Return the error messages of a graph or a store, in the order of their queues, whether the graph runs or not.

    ``place``: a graph, an open store, or the path of one. ``queue``: this error queue alone, or a partition of it.
    ``processor``: its name, with or without the graph and the partition. ``where``: a function of the fields that
    :func:`view` names. ``settled``: also those that were redriven or discarded. Changes nothing.
    """
    with opened(place, readonly=True) as (store, graph), ErrorLogs(store, error_queues(graph), queue) as logs:
        return select(logs, processor, index, where, settled)


def redrive(
    graph: Graph,
    *,
    store: Store | str | os.PathLike[str] | None = None,
    queue: str = "",
    processor: str | None = None,
    index: Collection[int] = (),
    where: Where | None = None,
    all: bool = False,
    timeout: float | None = None,
) -> RedriveResult:
    """Give the inputs of error messages to the processors that failed once more, and to no other processor.

    If another process runs the graph, it takes them; else this one does, in the calling thread. The outputs, the
    state and the resolution of the error message are one commit. A message that fails again is a new error message,
    which names the old one.

    ``store``: the home store of the graph, if it is not the default. ``queue``: this error queue alone, or a partition
    of it. ``processor``: its name, with or without the graph and the partition. ``index``: indices on the error queue.
    ``where``: a function of the fields that :func:`view` names. A message must fit all that are given; without any,
    ``all=True`` is needed. ``timeout``: seconds, after which the messages that are left wait for the owner of their
    processor; None: there is no limit.

    Returns the messages that were resolved, failed again, or are left, and those that cannot be redriven, each with the
    reason. Raises :class:`InvalidArgument` if nothing is chosen, the errors of :meth:`Graph.start`, and
    :class:`ProcessorStopped` if the target of a sink fails.
    """
    check_choice(processor, index, where, all)
    with opened(graph if store is None else store, readonly=False) as (home, _):
        with ErrorLogs(home, error_queues(graph), queue) as logs:
            logs.tidy()
            planned = plan(home, select(logs, processor, index, where), nodes_of(graph))
        return run(home, planned, graph, timeout)


def discard(
    place: Graph | Store | str | os.PathLike[str],
    *,
    reason: str,
    queue: str = "",
    processor: str | None = None,
    index: Collection[int] = (),
    where: Where | None = None,
    all: bool = False,
) -> list[ErrorRecord]:
    """Mark error messages as done with, and keep the reason, the user and the time; return those that were marked.

    ``reason`` is a text that is not empty. The other arguments are those of :func:`list_errors`, and ``all`` is that of
    :func:`redrive`. The messages stay on their queue. Messages that are settled, or whose redrive was asked for, stay
    as they are. Raises :class:`InvalidArgument` if nothing is chosen or the reason is empty.
    """
    check_choice(processor, index, where, all)
    if not reason.strip():
        raise InvalidArgument("reason='' says nothing.", "say why nothing is to be done about these messages.")
    with opened(place, readonly=False) as (home, graph), ErrorLogs(home, error_queues(graph), queue) as logs:
        logs.tidy()
        return list(redrives.discard(home, select(logs, processor, index, where), reason).records)


def check_choice(processor: str | None, index: Collection[int], where: Where | None, all: bool) -> None:
    """Raise :class:`InvalidArgument` if nothing says which error messages are meant."""
    if not (all or processor is not None or index or where is not None):
        raise InvalidArgument("No error messages are chosen.", "pass index=, processor= or where=; or all=True.")
