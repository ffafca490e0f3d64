"""Declarations made from other declarations, for broadcasting, renaming and merging graphs.

A declaration is never changed. :func:`rebound` and :func:`resolved` make new ones, which are checked like
any other. So a rename that cannot work raises the same errors as a declaration.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Unpack

from cues.errors import GraphError
from cues.graphs.declaration import DECLARATIONS, AllOf, AnyOf, Processor, Source, Stream, bindings
from cues.graphs.options import INHERIT, StreamOptions, lists_options
from cues.graphs.plan import REST
from cues.queues.options import QueueOptions


def unchanged(message: Any) -> Any:
    """Return the message: the function of a broadcast."""
    return message


@lists_options(StreamOptions)
def broadcast(
    inputs: str | AnyOf, outputs: str | AllOf | Mapping[str, str] | Iterable[str], **options: Unpack[StreamOptions]
) -> Stream:
    """Declare a stream that copies every message to every output: ``broadcast("orders", ["a", "b"])``.

    ``inputs`` is a queue name, or an :class:`AnyOf` of several. A join is refused, because it has no single
    message to copy. The id is ``broadcast-<input>`` without ``id=``. It is an ordinary :class:`Stream`, with
    its options (filters, error queue, …) and its guarantee: one commit writes all copies of a message, and
    each copy is the same as if it were the only one.
    """
    if not isinstance(inputs, (str, AnyOf)):
        raise GraphError(
            f"The input of a broadcast is {type(inputs).__name__} ({inputs!r}); it copies the messages of queues.",
            "give a queue name, or cues.AnyOf('a', 'b').",
            processor=str(options.get("id") or ""),
        )
    if not isinstance(outputs, AllOf):
        names = [outputs] if isinstance(outputs, str) else list(outputs) if isinstance(outputs, Iterable) else [outputs]
        if not all(isinstance(name, str) for name in names):
            raise GraphError(f"The outputs of a broadcast are {outputs!r:.60}.", "give a list of names of queues.")
        outputs = AllOf(**outputs) if isinstance(outputs, Mapping) else AllOf(*names)
    if options.get("id") is None:
        options["id"] = "-".join(["broadcast", *bindings(inputs).values()])
    return Stream(unchanged, inputs, outputs, **options)


def queues_of(processor: Processor) -> set[str]:
    """Every queue that a declaration names."""
    options = processor.options
    ports = (processor.inputs, processor.outputs, options.tailers, options.appenders)
    errors = set() if options.errors in (None, INHERIT) else {str(options.errors)}
    return errors.union(*(bindings(port).values() for port in ports))


def rebound(processor: Processor, queues: Mapping[str, str], id: str) -> Processor:
    """Return the declaration under another id, with its queues renamed; binding names stay.

    ``id`` has no effect on a source, whose id is its queue.
    """
    options = processor.given()
    if options.get("errors") in queues:
        options["errors"] = queues[options["errors"]]
    for name in ("tailers", "appenders"):
        if name in options:
            options[name] = _renamed(options[name], queues)
    if isinstance(processor.inputs, str):
        for name in ("types", "topics", "where", "fields"):  # a single input is bound under its queue's name
            if isinstance(options.get(name), Mapping):
                options[name] = {queues.get(binding, binding): value for binding, value in options[name].items()}
    return _declared(processor, id, _renamed(processor.inputs, queues), _renamed(processor.outputs, queues), options)


def resolved(processor: Processor, errors: str | None, strategy: str) -> Processor:
    """Return the declaration with the error queue and strategy of its graph, unless it has its own.

    Values that are the default of every graph are not added.
    """
    options = {**inherited(processor, errors, strategy), **processor.given()}
    return _declared(processor, processor.id, processor.inputs, processor.outputs, options)


def inherited(processor: Processor, errors: str | None, strategy: str) -> dict[str, str]:
    """Return the options that a processor takes from its graph."""
    given, options = processor.given(), {}
    if errors is not None and "errors" not in given:
        options["errors"] = errors
    if strategy != "exactly-once" and "strategy" not in given and processor.kind != "source":
        options["strategy"] = strategy
    return options


def gives_way(source: Processor, other: Processor) -> bool:
    """Return whether ``source`` only declares the queue that ``other`` feeds: it has no function."""
    return source.kind == other.kind == "source" and source.fn is None


def merged_options(
    given: Mapping[str, QueueOptions], parts: Iterable[tuple[str, Mapping[str, QueueOptions], Iterable[str]]]
) -> dict[str, QueueOptions]:
    """Return the options of the queues of several graphs. ``given`` options replace those of the graphs.

    In a graph, options by name replace those of ``"*"``. ``parts`` are id, options and queues of each graph. Raises
    :class:`GraphError` if the options of two graphs differ.
    """
    named: dict[str, tuple[str, QueueOptions]] = {}
    rest: dict[str, tuple[str, QueueOptions]] = {}
    for graph, options, queues in parts:
        mentioned = [(named, queue, mine) for queue, mine in options.items() if queue != REST]
        if REST in options:
            mentioned += [(rest, queue, options[REST]) for queue in queues if queue not in options]
        for known, queue, mine in mentioned:
            other, theirs = known.setdefault(queue, (graph, mine))
            if theirs != mine and queue not in given:
                raise GraphError(
                    f"The queue {queue!r} has two different options: {theirs.to_dict()} in the graph {other!r},"
                    f" {mine.to_dict()} in {graph!r}.",
                    f"call merge(…, queues={{{queue!r}: …}}), or rebind({{{queue!r}: …}}) on one of them.",
                )
            if mine.keeps_all:  # equal to options without a retention, for which there would be a default
                known[queue] = graph, mine
    return {**{queue: options for queue, (_, options) in {**rest, **named}.items()}, **given}


def _renamed(ports: Any, queues: Mapping[str, str]) -> Any:
    if ports is None:
        return None
    if isinstance(ports, str):
        return queues.get(ports, ports)
    renamed = {binding: queues.get(queue, queue) for binding, queue in bindings(ports).items()}
    return type(ports)(**renamed) if isinstance(ports, (AnyOf, AllOf)) else renamed


def _declared(processor: Processor, id: str, inputs: Any, outputs: Any, options: dict[str, Any]) -> Processor:
    if processor.kind == "source":
        return Source(outputs, processor.fn, **options)
    assert processor.fn is not None
    ports = (inputs,) if processor.kind == "sink" else (inputs, outputs)
    declared: Processor = DECLARATIONS[processor.kind](processor.fn, *ports, id=id, **options)
    return declared
