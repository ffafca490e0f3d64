"""The units of a graph, one for each partition that a processor reads, and the growth of their number.

divide            the units of the partitions that there are
Growth            the units that are missing after queues have grown, one queue after another
tell_of_growth    the warning at a start
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final, Protocol

from cues.base import events
from cues.base.names import ProcessorId
from cues.errors import GraphError
from cues.graphs.plan import Plan, partitions_of
from cues.graphs.processor import Node
from cues.graphs.processor_rows import read_topology
from cues.queues.options import QueueOptions
from cues.queues.store import Store


class HasOptions(Protocol):
    """A queue, of a store or of a directory."""

    @property
    def options(self) -> QueueOptions:
        """The options in force now."""


Emit = Callable[[events.Event], None]
MISFIT_S: Final = 30.0
"""Longest time in which the inputs of a processor may have different numbers of partitions while the graph runs."""


def divide(plan: Plan, queues: Mapping[str, HasOptions]) -> list[Node]:
    """The units of a graph: each processor once for each partition that its inputs have now.

    Raises :class:`GraphError` if the inputs of a processor do not fit together.
    """
    units, misfits = _divide(plan, queues)
    for misfit in misfits:
        raise misfit
    return units


def _divide(plan: Plan, queues: Mapping[str, HasOptions]) -> tuple[list[Node], list[GraphError]]:
    """The units, and the errors of processors that have none."""
    options = {name: queue.options for name, queue in queues.items()}
    units: list[Node] = []
    misfits: list[GraphError] = []
    for node in plan.running:
        try:
            partitions = partitions_of(node, options)
        except GraphError as misfit:
            misfits.append(misfit)
            continue
        if node.options.instances > 1 and partitions == 1:
            raise GraphError(
                f"{node.id} has instances={node.options.instances}, and its inputs have one partition, so the other"
                " instances would have nothing to do.",
                "give the queues partitions, queues={…: cues.QueueOptions(partitions=…, key=…)}; or set concurrency=…,"
                " for several calls at once in one order.",
                processor=node.name,
            )
        units += [node.unit(partition) for partition in range(partitions)]
    return units, misfits


class Growth:
    """Finds the partitions that queues get while a graph runs.

    Queues grow one after another. So the inputs of a processor may have different numbers of partitions (a misfit),
    but only for a limited time.
    """

    def __init__(self, plan: Plan, queues: Mapping[str, HasOptions], units: Sequence[Node], emit: Emit) -> None:
        """``units`` are those of :func:`divide` at the start."""
        self._plan = plan
        self._queues = queues
        self._emit = emit
        self._known = {unit.id for unit in units}
        self._misfit_since: float | None = None
        self._settled: dict[str, int] = {}
        """Partitions by queue, as of the last look that found no unit missing."""

    def look(self) -> tuple[list[Node], list[GraphError]]:
        """The units that are missing, and the errors of processors whose inputs do not fit together now."""
        partitions = {name: queue.options.partitions for name, queue in self._queues.items()}
        if partitions == self._settled:
            return [], []
        nodes, misfits = _divide(self._plan, self._queues)
        missing = [node for node in nodes if node.id not in self._known]
        if not (missing or misfits):
            self._settled = partitions
        return missing, misfits

    def take_in(self, own: Callable[[Sequence[Node]], object]) -> list[Node]:
        """Call ``own`` with the missing units, if there are any, and warn of them. Return the missing units.

        Warn of the first misfit; raise it when it has lasted longer than ``MISFIT_S``.
        """
        missing, misfits = self.look()
        if not misfits:
            self._misfit_since = None
        elif self._misfit_since is None:
            self._misfit_since = time.monotonic()
            for misfit in misfits:
                text = f"reads no new partition before its inputs fit together: {misfit.message}"
                self._emit(events.Event(self._plan.id, text, logging.WARNING))
        elif time.monotonic() - self._misfit_since > MISFIT_S:
            raise misfits[0]
        if missing:
            own(missing)
            self._known |= {unit.id for unit in missing}
            tell(Counter(unit.processor for unit in missing), "from now on", self._emit)
        return missing


def tell_of_growth(home: Store, nodes: Sequence[Node], emit: Emit) -> None:
    """Warn of processors that have new units besides old ones: the state of a key stays with its old partition.

    ``nodes`` are all units of the graph. Call it before this start has claimed any of them. If another process of the
    same start had claimed the first unit, the units that are not claimed yet would look like growth.
    """
    with home.core.view() as txn:
        new = [node for node in nodes if read_topology(txn, node.id) is None]
        grown = Counter(node.processor for node in new if read_topology(txn, node.processor) is not None)
    tell(grown, "than before", emit)


def tell(new_units: Mapping[ProcessorId, int], since: str, emit: Emit) -> None:
    """Warn of new units, by processor."""
    for processor, count in new_units.items():
        text = (
            f"reads {count} more partition{'s' if count > 1 else ''} {since}, from the beginning; state stays"
            " with the partition that it was kept for, so a key that moved begins anew"
        )
        emit(events.Event(processor, text, logging.WARNING))
