"""The plan: a graph with everything resolved and checked, as plain frozen data that engines run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from cues.base import names
from cues.base.data import dataclass
from cues.errors import GraphError
from cues.graphs import typed
from cues.graphs.declaration import AllOf, AnyOf, Processor, bindings
from cues.graphs.options import INHERIT, exclusion_of
from cues.graphs.processor import Mode, Node, Port
from cues.queues.options import QueueOptions, Retention, changed

if TYPE_CHECKING:
    from cues.graphs.topology import Topology
    from cues.schemas import Schema

REST: Final = "*"
"""In a graph's queue options: all queues that it does not name."""

BETWEEN: Final = Retention(age="7d", unread=True)
"""Retention of a new queue between two processors, unless its options give another."""


@dataclass(frozen=True)
class Plan:
    """A graph as engines run it."""

    id: str
    nodes: tuple[Node, ...]
    queues: Mapping[str, QueueOptions]
    """Every queue that the graph names, with its options."""
    system: Any
    source: str | None
    """The queue that ``send`` writes to by default."""

    @property
    def fed(self) -> tuple[str, ...]:
        """The queues that are written from outside: sources without a function, and inputs that nothing writes."""
        declared = {n.outputs[0].queue for n in self.nodes if n.kind == "source" and n.fn is None}
        read = {port.queue for n in self.nodes for port in n.reads}
        return tuple(sorted(declared | (read - self._written)))

    def schema_of(self, queue: str) -> Any:
        """Return the schema that messages from outside must fit: ``schema=`` of the source; None if it has none."""
        return next((n.options.schema for n in self.nodes if n.kind == "source" and n.name == queue), None)

    @property
    def _written(self) -> set[str]:
        """The queues that some processor writes or feeds, error queues too."""
        return {queue for node in self.nodes for queue in written(node)}

    def new_options(self, queue: str) -> QueueOptions:
        """The options with which a queue is made: with a retention, if none is given and it is between processors."""
        options = self.queues[queue]
        if options.retention is not None or options.keeps_all or queue not in self._between:
            return options
        return changed(options, {"retention": BETWEEN})

    @property
    def _between(self) -> frozenset[str]:
        """The queues of the graph's store that one processor writes with its results and another one reads."""
        made = {port.queue for node in self.running for port in node.writes}
        read = {port.queue for node in self.nodes for port in node.reads}
        failures = {node.errors for node in self.nodes}
        return frozenset(name for name in (made & read) - failures if self.queues[name].path is None)

    @property
    def misspelt(self) -> dict[str, str]:
        """Queues that are read but not written or declared in the graph, each with the most similar written queue.

        Names that differ only in their digits (orders-1, orders-2) are a series, not a mistake.
        """
        known = self._written
        misspelt = {}
        for queue in self.fed:
            if queue in known or self.queues[queue].path is not None:
                continue
            others = [other for other in sorted(known) if _letters(other) != _letters(queue)]
            import difflib

            near = difflib.get_close_matches(queue, others, 1, 0.75)
            if near:
                misspelt[queue] = near[0]
        return misspelt

    @property
    def running(self) -> tuple[Node, ...]:
        """The processors that an engine runs: all but sources without a function."""
        return tuple(node for node in self.nodes if node.fn is not None)

    @staticmethod
    def named(node: Node) -> list[str]:
        """The queues that a processor reads or writes, its error queue last."""
        return [*(port.queue for port in node.reads), *written(node)]

    @property
    def crossing(self) -> bool:
        """True if messages of some processor are forwarded to another store."""
        return any(away(node, self.queues) for node in self.running if not node.pending)

    def node(self, name: str) -> Node:
        """A processor by its name or id, or by that of one of its units."""
        for node in self.nodes:
            if name.partition("/")[0] in (node.name, node.id):
                return node
        raise GraphError(
            f"The graph {self.id!r} has no processor {name!r}; it has {', '.join(n.name for n in self.nodes)}.",
            "use one of those.",
            processor=name,
        )

    def topology(self) -> Topology:
        from cues.graphs.topology import Topology

        return Topology.of(self.nodes)


def build(
    id: str,
    processors: Iterable[Processor],
    *,
    errors: str | None,
    strategy: str,
    system: Any,
    source: str | None,
    queues: Mapping[str, QueueOptions],
) -> Plan:
    """Resolve and check a whole graph; raise :class:`GraphError` with the processor at fault."""
    nodes = tuple(_node(id, processor, errors, strategy) for processor in processors)
    named = dict.fromkeys(queue for node in nodes for queue in Plan.named(node))
    rest = queues.get(REST, QueueOptions())
    for name in queues:
        if name not in named and name != REST:
            raise GraphError(
                f"The graph {id!r} has options for the queue {name!r}, which no processor names; its queues"
                f" are {', '.join(named) or 'none'}.",
                "give options for one of its queues, or for '*', which means all.",
            )
    sources = [node.outputs[0].queue for node in nodes if node.kind == "source"]
    if source is not None and source not in named:
        raise GraphError(
            f"source={source!r} of the graph {id!r} is not one of its queues ({', '.join(named) or 'none'}).",
            f"give source={sources[0]!r}." if sources else "give a queue of the graph.",
        )
    if source is None:
        fed = [node.outputs[0].queue for node in nodes if node.kind == "source" and node.fn is None]
        source = fed[0] if len(fed) == 1 else sources[0] if len(sources) == 1 else None
    _check_renames(id, nodes)
    options = {name: queues.get(name, rest) for name in named}
    for node in nodes:
        partitions_of(node, options)
        _check_across(node, nodes, options)
        _check_isolation(node)
    return Plan(id, nodes, options, system, source)


def written(node: Node) -> list[str]:
    """The queues that a processor writes to, its error queue last."""
    return [*(port.queue for port in node.writes), *([node.errors] if node.errors else [])]


def away(node: Node, queues: Mapping[str, QueueOptions]) -> list[str]:
    """The queues of :func:`written` that have a path."""
    return [queue for queue in written(node) if queues[queue].path is not None]


def _check_renames(graph: str, nodes: tuple[Node, ...]) -> None:
    """Refuse two processors with one former name, one whose former name is in the graph, and one that never runs."""
    present = {node.name for node in nodes}
    taken: dict[str, str] = {}
    for node in nodes:
        former = node.options.renamed_from
        if former is None:
            continue
        other = former if former in present else taken.setdefault(former, node.name)
        if other != node.name:
            why = "is in the graph too" if other == former else f"is also the former name of {graph}.{other}"
            raise GraphError(
                f"{node.id} has renamed_from={former!r}, and {former!r} {why}.",
                "leave renamed_from= out of the processor that was not renamed; to give a former name to a new"
                " processor, start the renamed one once, and then remove its renamed_from=.",
                processor=node.name,
            )
        if node.fn is None:
            raise GraphError(
                f"{node.id} has renamed_from={former!r}, and has no function: it has no position to continue at.",
                "leave renamed_from= out.",
                processor=node.name,
            )


def _check_across(node: Node, nodes: tuple[Node, ...], queues: Mapping[str, QueueOptions]) -> None:
    """Refuse pending messages if there is no other store, or if a processor of the graph would read them."""
    if not node.pending:
        return
    elsewhere = away(node, queues)
    if not elsewhere:
        raise GraphError(
            f"{node.id} has across='pending', and none of its queues is in another store.",
            "give queues={…: cues.QueueOptions(path=…)}, or leave across= out.",
            processor=node.name,
        )
    for reader in nodes:
        for port in reader.reads:
            if port.queue in elsewhere and reader.options.isolation != "committed":
                raise GraphError(
                    f"{node.id} has across='pending', and {reader.id} reads {port.queue!r}: processors see messages"
                    " that are pending, and those of steps that never commit.",
                    f"give {reader.id} the option isolation='committed', or set across='forwarded'.",
                    processor=node.name,
                )


def _check_isolation(node: Node) -> None:
    """Refuse a join of committed messages: it pairs messages by places, some of which are passed over."""
    if node.mode == "join" and len(node.inputs) > 1 and node.options.isolation == "committed":
        raise GraphError(
            f"{node.id} joins {', '.join(repr(port.queue) for port in node.inputs)} with isolation='committed': a join"
            " takes the messages of its inputs in pairs, and pending messages have places without a message.",
            "copy each input to a queue of its own, by a stream with isolation='committed', and join these.",
            processor=node.name,
        )


def partitions_of(node: Node, queues: Mapping[str, QueueOptions]) -> int:
    """The number of partitions of each input of a processor, which runs as one unit for each partition.

    Messages that meet in a unit must have been placed alike. So several inputs must have the same number of
    partitions and the same partitioner; otherwise :class:`GraphError`. Their keys may have different names.
    """
    if not node.reads:
        return 1
    first, *others = (port.queue for port in node.reads)
    count, (_, way) = queues[first].partitions, queues[first].placing
    for other in others:
        other_count, (_, other_way) = queues[other].partitions, queues[other].placing
        if count == other_count and (way == other_way or count == 1):
            continue
        raise GraphError(
            f"{node.id} reads {first!r} ({_ways(count, way)}) and {other!r} ({_ways(other_count, other_way)}): messages"
            " that belong together would be on partitions that do not meet.",
            "give both the same partitions= and partitioner=; or copy one to a queue like the other with a stream.",
            processor=node.name,
        )
    return count


def unwritten(queue: str, near: str) -> str:
    """Return the warning for a queue whose name seems to be misspelt."""
    return (
        f"{queue!r}, which no source and no stream writes; did you mean {near!r}? If it is fed by send, declare it:"
        f" graph.source({queue!r})"
    )


def _letters(name: str) -> str:
    return "".join(character for character in name if character.isalpha())


def _ways(partitions: int, partitioner: str | None) -> str:
    return f"{partitions} partitions by {partitioner}" if partitions > 1 else "1 partition"


def _node(graph: str, processor: Processor, errors: str | None, strategy: str) -> Node:
    options = processor.options
    inputs = processor.inputs
    mode: Mode = "alts" if isinstance(inputs, AnyOf) else "join" if isinstance(inputs, dict) else "one"
    strategy = options.strategy or strategy
    resolved = replace(options, strategy=strategy)
    refusal = exclusion_of(resolved, processor.kind, processor.id, names.processor_id(graph, processor.id))
    if refusal is not None:
        raise GraphError(*refusal, processor=processor.id)
    schemas: Mapping[str, Schema] = {}
    if processor.kind == "frame":
        options = replace(options, batch=True)  # one call takes the messages of a step
    else:
        schemas, options = typed.resolved(options, processor.fn, bindings(inputs), mode == "join")
    node = Node(
        id=names.processor_id(graph, processor.id),
        kind=processor.kind,
        fn=processor.fn,
        mode=mode,
        inputs=_ports(inputs),
        outputs=_ports(processor.outputs),
        returns_messages=not isinstance(processor.outputs, dict),
        errors=errors if options.errors == INHERIT else options.errors,
        strategy=strategy,
        options=replace(options, id=processor.id),
        tailers=_ports(options.tailers),
        appenders=_ports(options.appenders),
        schemas=schemas,
    )
    node = _without_own_errors(node, inherited=options.errors == INHERIT)
    if options.max_errors is not None and node.errors is None:
        raise GraphError(
            f"{node.id} has max_errors={options.max_errors!r} and no error queue, so there are no error messages to"
            " count.",
            f"{node.way_to_errors}; or set on_error='pause', which pauses at the first failure.",
            processor=node.name,
        )
    return node


def _ports(queues: str | AnyOf | AllOf | Mapping[str, str] | None) -> tuple[Port, ...]:
    return tuple(Port(binding, queue) for binding, queue in bindings(queues).items())


def _without_own_errors(node: Node, inherited: bool) -> Node:
    """Keep a processor from reading its own failures: each would be a larger error message than the last.

    A reader of the graph's error queue inherits no error queue: it stops at its first failure, as any
    processor without one. Raises :class:`GraphError` if its own ``errors=`` names a queue that it reads.
    """
    if node.errors not in {port.queue for port in node.reads}:
        return node
    if inherited:
        return replace(node, errors=None, options=replace(node.options, errors=None))
    raise GraphError(
        f"{node.id} reads {node.errors!r} and has errors={node.errors!r}: each of its failures would be an error"
        " message that it reads, and fails at, again.",
        f"set errors=None, so that it stops at its first failure; or another queue, such as errors='{node.errors}-of-"
        f"{node.name}'.",
        processor=node.name,
    )
