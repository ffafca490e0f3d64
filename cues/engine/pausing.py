"""Pause and resume processors from outside of a step, whether their graph runs or not (steps/pauses.py)."""

from __future__ import annotations

import os

from cues.base.names import ProcessorId
from cues.engine.status import is_named, processor_of
from cues.errors import InvalidArgument
from cues.graphs.graph import Graph
from cues.graphs.pause import ProcessorPause
from cues.graphs.processor_rows import all_keys, read_topology
from cues.queues.store import Store
from cues.steps import pauses

Place = Graph | Store | str | os.PathLike[str]


def units_of(store: Store, graph: str | None, processor: str | None) -> dict[ProcessorId, str]:
    """Return the kinds of the units of a processor (None: of all) that have run in a store, by id.

    ``processor``: its name, with or without the graph and the partition. Raises :class:`InvalidArgument` if there is
    no such processor.
    """
    with store.core.view() as txn:
        topologies = {unit: read_topology(txn, unit) for unit in all_keys(txn)}
    kinds = {unit: topology.kind for unit, topology in topologies.items() if topology is not None}
    known = {unit: kind for unit, kind in kinds.items() if graph in (None, unit.partition(".")[0])}
    if processor is None:
        return known
    named = {unit: kind for unit, kind in known.items() if is_named(unit, processor)}
    if not named:
        listed = ", ".join(dict.fromkeys(map(processor_of, known))) or "none: no graph has run on it"
        raise InvalidArgument(
            f"The store {store.path} has no processor {processor!r}; it has {listed}.",
            "pass the name of one of them, with or without its graph.",
        )
    return named


def resume_units(store: Store, graph: str | None, processor: str | None) -> list[ProcessorPause]:
    """Resume the paused units of a processor, or all; see :func:`resume`."""
    return pauses.resume(store, units_of(store, graph, processor))


def resume(place: Place, *, processor: str | None = None) -> list[ProcessorPause]:
    """Resume paused processors, and return the pauses that were taken away; [] if nothing was paused.

    A processor that paused before a message that failed (``on_error="pause"``) calls its function for this message
    again. After ``max_errors=`` it continues with the message after the last error, and counts from 0. The change is
    one commit. The process that runs the graph notices it at once; if none does, the next start does.

    ``place``: a graph, an open store, or the path of one. ``processor``: its name, with or without the graph and the
    partition; None: all that are paused. Raises :class:`InvalidArgument` if the store has no processor of that name.
    """
    from cues.engine.redriving import opened

    with opened(place, readonly=False) as (store, graph):
        return resume_units(store, None if graph is None else graph.id, processor)


def pause(place: Place, *, processor: str | None = None, reason: str = "") -> list[ProcessorPause]:
    """Pause processors until :func:`resume`, and return the new pauses.

    The other processors go on. One more step at most is made; after it the processor takes nothing, also in
    later runs. Redrives are made. Sources cannot be paused. ``processor``: as for :func:`resume`; None: all streams
    and sinks. Raises :class:`InvalidArgument` for a source, or if the store has no processor of that name.
    """
    from cues.engine.redriving import opened

    with opened(place, readonly=False) as (store, graph):
        return pause_units(store, None if graph is None else graph.id, processor, reason)


def pause_units(store: Store, graph: str | None, processor: str | None, reason: str) -> list[ProcessorPause]:
    """Pause the units of a processor, or all; see :func:`pause`."""
    units = units_of(store, graph, processor)
    sources = [unit for unit, kind in units.items() if kind == "source"]
    if processor is not None and sources:
        raise InvalidArgument(
            f"{', '.join(sources)} is a source, and a source cannot be paused.",
            "pause the processors that read its queue, or end the run, which loses nothing.",
        )
    return pauses.ask(store, [unit for unit in units if unit not in sources], reason)


def list_pauses(store: Store, graph: str | None = None) -> list[ProcessorPause]:
    """Return the pauses of a store, or of one graph."""
    with store.core.view() as txn:
        known = pauses.of_store(txn)
    return [pause for unit, pause in known.items() if graph in (None, unit.partition(".")[0])]
