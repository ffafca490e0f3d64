"""The shape of a graph: its processors with their kinds, and the queues that they read and write.

It is that of a graph file's plan. A store alone does not know the outputs of a processor, so they are those of its last
steps (:func:`shape_of_store`): a processor that has written nothing yet has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import Any, Final

from cues.base import names
from cues.base.data import dataclass
from cues.base.names import ProcessorId
from cues.engine import standing
from cues.engine.status import processor_of
from cues.graphs import draw
from cues.graphs.graph import Graph
from cues.graphs.plan import written
from cues.graphs.processor import function_name
from cues.graphs.processor_rows import read_topology
from cues.queues.store import Store
from cues.steps.tries import open_named

_STEPS: Final = 64
"""Messages at the end of a try log in which the outputs of a processor are looked for."""


@dataclass
class ProcessorShape:
    id: str
    kind: str
    inputs: list[str] = field(default_factory=list)
    """Queues."""
    outputs: list[str] = field(default_factory=list)
    errors: str | None = None
    guarantee: str = ""
    function: str = ""

    @property
    def name(self) -> str:
        return self.id.rpartition(".")[2]


@dataclass
class Shape:
    """Processors and queues of a graph, or of all graphs of a store."""

    graph: str | None
    processors: list[ProcessorShape]
    stores: dict[str, str] = field(default_factory=dict)
    """By queue: the path of its store, if that is another one."""

    def readers(self, queue: str) -> list[ProcessorShape]:
        return [each for each in self.processors if queue in each.inputs]

    def writers(self, queue: str) -> list[ProcessorShape]:
        return [each for each in self.processors if queue in each.outputs or queue == each.errors]

    def to_dict(self) -> dict[str, Any]:
        return {"graph": self.graph, "stores": self.stores, "processors": [vars(each) for each in self.processors]}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Shape:
        return Shape(data["graph"], [ProcessorShape(**each) for each in data["processors"]], data["stores"])


def shape_of_graph(graph: Graph) -> Shape:
    """The shape of a declared graph."""
    plan = graph.plan()
    processors = [
        ProcessorShape(
            node.id,
            node.kind,
            list(dict.fromkeys(port.queue for port in node.reads)),
            list(dict.fromkeys(port.queue for port in node.writes)),
            node.errors if node.errors in written(node) else None,
            node.guarantee,
            function_name(node.fn) or "",
        )
        for node in draw.in_order(plan)
        if node.fn is not None
    ]
    elsewhere = {queue: options.path for queue, options in plan.queues.items() if options.path is not None}
    return Shape(plan.id, processors, {queue: str(graph.place(path)) for queue, path in elsewhere.items()})


def merged(units: Iterable[ProcessorShape]) -> Shape:
    """The shape with one processor for the units of each."""
    shapes: dict[str, ProcessorShape] = {}
    for unit in units:
        shape = shapes.setdefault(processor_of(unit.id), ProcessorShape(processor_of(unit.id), unit.kind))
        shape.errors = unit.errors or shape.errors
        shape.inputs += [queue for queue in unit.inputs if queue not in shape.inputs]
        shape.outputs += [queue for queue in unit.outputs if queue not in (*shape.outputs, shape.errors)]
    return Shape(None, list(shapes.values()))


def shape_of_store(store: Store) -> Shape:
    """The shape of all graphs that have run on a store, from their positions and last steps."""
    return merged(filter(None, (_unit(store, unit) for unit in standing.processors(store))))


def _unit(store: Store, unit: ProcessorId) -> ProcessorShape | None:
    with store.core.view() as txn:
        topology = read_topology(txn, unit)
    if topology is None:
        return None
    shape = ProcessorShape(unit, topology.kind, list(dict.fromkeys(names.split_log(log)[0] for log in topology.queues)))
    for step in _last_steps(store, unit):
        queues = [names.split_log(log)[0] for log in step.get(names.MESSAGE_INDEX, {}) if "." not in log]
        queues += [names.split_log(log.partition("/")[2])[0] for log in step.get(names.PENDING_INDEX, {})]
        if step.get(names.TYPE) == names.ERROR_ATTEMPT:
            shape.errors = next((queue for queue in queues if queue not in shape.outputs), shape.errors)
        else:
            shape.outputs += [q for q in dict.fromkeys(queues) if q not in shape.outputs and q != shape.errors]
    return shape


def _last_steps(store: Store, unit: ProcessorId) -> list[dict[str, Any]]:
    tailer = open_named(store, unit).tailer()
    tailer.to_index(max(tailer.index, tailer.queue.last_index + 1 - _STEPS))
    return tailer.read_many(_STEPS)
