"""Graphs: what the user declares.

    graph = cues.Graph("example", errors="errors")

    @graph.source("orders")
    def orders(position): ...

    @graph.stream("orders", "priced")
    def price(order): ...

    @graph.sink("priced")
    def save(order, process): ...

Decorators, a list of :class:`Source`, :class:`Stream`, :class:`Sink`, and plain data
(:meth:`Graph.from_dict`) make the same graph. A processor is checked where it is declared, the
graph as a whole when it is planned; nothing is opened or started before both hold.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from cues import names, plan
from cues.errors import GraphError
from cues.options import QueueOptions
from cues.plan import Plan
from cues.processor import STRATEGIES, AnyOf, Function, Processor, Retry, Sink, Source, Stream, function_name
from cues.topology import Topology

if TYPE_CHECKING:
    from cues.engine.local import Running
    from cues.store import Store

F = TypeVar("F", bound=Callable[..., Any])


class Graph:
    """A graph of processors.

    id          its name; with a processor's name the id of a processor, so it must stay the same
    processors  declarations, if not by decorators
    store       directory or :class:`Store`; default ``data/<id>`` (see the command line for more)
    errors      queue for messages that failed for good; None stops their processor instead
    strategy    ``"exactly-once"`` or ``"at-most-once"``, for processors that do not say
    system      any object, handed to functions as ``process.system``
    source      queue that ``send`` writes to by default
    queues      ``{name: cues.QueueOptions(…)}``, ``"*"`` for the rest
    durability  of a store that is made; None: ``"disk"``
    """

    def __init__(
        self,
        id: str,
        processors: Iterable[Processor] = (),
        *,
        store: str | os.PathLike[str] | Store | None = None,
        errors: str | None = None,
        strategy: str = "exactly-once",
        system: Any = None,
        source: str | None = None,
        queues: Mapping[str, QueueOptions | Mapping[str, Any]] | None = None,
        durability: str | None = None,
    ) -> None:
        self.id = names.check("graph", id)
        self.store = store
        self.errors = None if errors is None else names.check("queue", errors)
        if strategy not in STRATEGIES:
            raise GraphError(
                f"The graph {id!r} has strategy {strategy!r}.", " or ".join(map(repr, STRATEGIES)) + ".", processor=""
            )
        self.strategy = strategy
        self.system = system
        self.default_source = source
        self.queues: dict[str, QueueOptions] = {}
        for name, options in (queues or {}).items():
            if name != "*":
                names.check("queue", name)
            if not isinstance(options, (QueueOptions, Mapping)):
                raise GraphError(
                    f"The options of queue {name!r} are {type(options).__name__}.",
                    "cues.QueueOptions(…).",
                    processor="",
                )
            self.queues[name] = options if isinstance(options, QueueOptions) else QueueOptions.from_dict(options)
        self.durability = durability
        self.processors: dict[str, Processor] = {}
        for processor in processors:
            self.add(processor)

    # --- declaring ---

    def add(self, processor: Processor) -> None:
        """Add a declaration; a second one of the same id is refused."""
        if not isinstance(processor, Processor):
            raise GraphError(
                f"The graph {self.id!r} was given {type(processor).__name__} ({processor!r}).",
                "Source(…), Stream(…) or Sink(…).",
                processor="",
            )
        other = self.processors.get(processor.id)
        if other is not None:
            raise GraphError(
                f"The graph {self.id!r} has two processors with the id {processor.id!r}: a {other.kind}"
                f" ({function_name(other.fn)}) and a {processor.kind} ({function_name(processor.fn)}).",
                "id='…' for one of them.",
                processor=processor.id,
            )
        self.processors[processor.id] = processor

    def source(self, id: str, **options: Any) -> Callable[[F], F]:
        """Declare a source; as a decorator, of the function below it, as a bare call, of a queue fed by ``send``."""
        names.check("queue", id)
        self.add(Source(id, None, **options))

        def declare(fn: F) -> F:
            replaced = self.processors[id]
            if replaced.fn is not None:
                raise GraphError(
                    f"The source {id!r} has a function already ({function_name(replaced.fn)}).",
                    "one function a source; merge several with a stream over cues.AnyOf(…).",
                    processor=id,
                )
            self.processors[id] = Source(id, fn, **options)
            return fn

        return declare

    def stream(
        self,
        inputs: str | AnyOf | Mapping[str, str],
        outputs: str | Mapping[str, str] | Iterable[str] | None,
        **options: Any,
    ) -> Callable[[F], F]:
        """Declare the function below as a stream; see :class:`Stream`."""

        def declare(fn: F) -> F:
            self.add(Stream(fn, inputs, outputs, **options))
            return fn

        return declare

    def sink(self, inputs: str | AnyOf | Mapping[str, str], **options: Any) -> Callable[[F], F]:
        """Declare the function below as a sink; see :class:`Sink`."""

        def declare(fn: F) -> F:
            self.add(Sink(fn, inputs, **options))
            return fn

        return declare

    # --- looking ---

    def plan(self) -> Plan:
        """The graph resolved and checked, as engines run it."""
        if not self.processors:
            raise GraphError(
                f"The graph {self.id!r} has no processors.",
                "@graph.source(…), @graph.stream(…), @graph.sink(…).",
                processor="",
            )
        return plan.build(
            self.id,
            list(self.processors.values()),
            errors=self.errors,
            strategy=self.strategy,
            system=self.system,
            source=self.default_source,
            queues=self.queues,
        )

    def topology(self) -> Topology:
        """Dependencies, order, cycles and components of the processors."""
        return self.plan().topology()

    def store_path(self, beside: str | os.PathLike[str] | None = None) -> Path:
        """Where the store lies: as declared, else ``CUES_STORE``, else ``data/<id>`` beside ``beside``."""
        if self.store is not None:
            return Path(getattr(self.store, "path", None) or os.fspath(self.store))  # type: ignore[arg-type]
        if os.environ.get("CUES_STORE"):
            return Path(os.environ["CUES_STORE"])
        return Path(beside or ".") / "data" / self.id

    # --- plain data ---

    def to_dict(self) -> dict[str, Any]:
        """The graph as plain data; functions are ``"module:qualname"``."""
        found: dict[str, Any] = {"id": self.id}
        for name, value, default in (
            ("errors", self.errors, None),
            ("strategy", self.strategy, "exactly-once"),
            ("source", self.default_source, None),
            ("durability", self.durability, None),
        ):
            if value != default:
                found[name] = value
        if self.queues:
            found["queues"] = {name: options.to_dict() for name, options in self.queues.items()}
        found["processors"] = [_declared(processor) for processor in self.processors.values()]
        return found

    @staticmethod
    def from_dict(data: Mapping[str, Any], **overrides: Any) -> Graph:
        """The graph that plain data describe; functions are callables or ``"module:qualname"``.

        ``overrides`` are arguments of :class:`Graph` (store, system, …).
        """
        rest = dict(data)
        try:
            id = rest.pop("id")
            declared = rest.pop("processors")
        except KeyError as error:
            raise GraphError(
                f"A graph as plain data needs {error}.",
                "{'id': …, 'processors': [{'kind': 'stream', …}]}.",
                processor="",
            ) from None
        known = {"store", "errors", "strategy", "system", "source", "queues", "durability"}
        for name in rest:
            if name not in known:
                raise GraphError(f"A graph has no {name!r}.", f"one of {', '.join(sorted(known))}.", processor="")
        rest.update(overrides)
        return Graph(id, [_processor(one) for one in declared], **rest)

    # --- running (the one step upward) ---

    def start(
        self,
        *,
        store: str | os.PathLike[str] | Store | None = None,
        accept_topology: bool = False,
        take_over: bool = False,
    ) -> Running:
        """Start the graph in threads of this process; returns a :class:`Running`, a context manager.

        Raises :class:`AlreadyRunning`, :class:`TopologyChanged`, :class:`Diverged` before anything ran.
        """
        engine = importlib.import_module("cues.engine.local")
        return engine.start(self, store=store, accept_topology=accept_topology, take_over=take_over)  # type: ignore[no-any-return]

    def run(self, **options: Any) -> None:
        """Run until every source has ended and every queue is drained, as ``cues run`` does."""
        with self.start(**options) as running:
            running.wait_done()

    def __repr__(self) -> str:
        return f"<cues.Graph {self.id}: {', '.join(self.processors) or 'empty'}>"


def _declared(processor: Processor) -> dict[str, Any]:
    found: dict[str, Any] = {"kind": processor.kind, "id": processor.id}
    if processor.fn is not None:
        found["fn"] = function_name(processor.fn)
    if processor.inputs is not None:
        inputs = processor.inputs
        found["inputs"] = {"any_of": inputs.bindings} if isinstance(inputs, AnyOf) else inputs
    if processor.kind == "stream":
        found["outputs"] = processor.outputs
    defaults = type(processor.options)()
    for name, value in vars(processor.options).items():
        if name == "id" or value == getattr(defaults, name):
            continue
        if isinstance(value, Retry):
            kinds = value.on if isinstance(value.on, tuple) else (value.on,)
            value = {"attempts": value.attempts, "backoff_s": value.backoff_s, "max_s": value.max_s}
            if kinds != (Exception,):
                value["on"] = [function_name(kind) for kind in kinds]
        elif callable(value):
            value = function_name(value)
        elif isinstance(value, (set, frozenset)):
            value = sorted(value)
        elif isinstance(value, dict):
            value = {k: function_name(v) if callable(v) else v for k, v in value.items()}
        found[name] = value
    return found


def _processor(data: Mapping[str, Any]) -> Processor:
    rest = dict(data)
    kind = rest.pop("kind", None)
    if kind not in ("source", "stream", "sink"):
        raise GraphError(
            f"A processor as plain data has kind {kind!r}.",
            "'source', 'stream' or 'sink'.",
            processor=str(rest.get("id")),
        )
    id = rest.pop("id", None)
    fn = _function(rest.pop("fn", None))
    if isinstance(rest.get("retries"), Mapping):
        retries = dict(rest["retries"])
        if "on" in retries:
            found = [retries["on"]] if isinstance(retries["on"], str) else retries["on"]
            retries["on"] = tuple(_function(kind) for kind in found)
        rest["retries"] = Retry(**retries)
    for name in ("where", "key"):
        value = rest.get(name)
        if isinstance(value, str) and ":" in value:
            rest[name] = _function(value)
        elif isinstance(value, Mapping):
            rest[name] = {b: _function(f) for b, f in value.items()}
    if kind == "source":
        return Source(id, fn, **rest)
    inputs = rest.pop("inputs", None)
    if isinstance(inputs, Mapping) and set(inputs) == {"any_of"} and not isinstance(inputs["any_of"], str):
        inputs = AnyOf(**inputs["any_of"]) if isinstance(inputs["any_of"], Mapping) else AnyOf(*inputs["any_of"])
    if id is not None:
        rest["id"] = id
    if kind == "sink":
        return Sink(fn, inputs, **rest)  # type: ignore[arg-type]
    return Stream(fn, inputs, rest.pop("outputs", None), **rest)  # type: ignore[arg-type]


def _function(found: Any) -> Function | None:
    """A callable, or the one that ``"module:qualname"`` names."""
    if not isinstance(found, str):
        return found  # type: ignore[no-any-return]
    module, _, qualname = found.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in qualname.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise GraphError(
            f"The function {found!r} cannot be loaded ({error}).", "'module:function', importable here.", processor=""
        ) from error
    return value  # type: ignore[no-any-return]
