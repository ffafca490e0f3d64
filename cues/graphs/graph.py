"""Graphs: what the user declares.

    graph = cues.Graph("example", errors="errors")

    @graph.source("orders")
    def orders(position): ...

    @graph.stream("orders", "priced")
    def price(order): ...

    @graph.sink("priced")
    def save(order, process): ...

Decorators, a list of :class:`Source`, :class:`Stream`, :class:`Sink`, and plain data
(:meth:`Graph.from_dict`) make the same graph. A processor is checked when it is declared, the
whole graph when it is planned. Nothing is opened or started before both checks.

A graph can be a part of another one: :meth:`Graph.rebind` renames queues and processors, and :func:`merge` joins graphs
at queues with the same name.

    part = cues.Graph("clean", [Source("raw"), Stream(clean, "raw", "good")])
    whole = cues.merge("shop", part.rebind({"raw": "orders", "good": "orders-good"}), pricing)
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack

from cues.base import lazy, names
from cues.base.checks import nearest
from cues.base.option_texts import describes
from cues.base.shown import Shown
from cues.errors import CuesError, GraphError, InvalidArgument
from cues.graphs import plan, typed
from cues.graphs.declaration import DECLARATIONS, AllOf, AnyOf, Frame, Processor, Sink, Source, Stream
from cues.graphs.options import (
    BATCH_SIZE,
    START_TEXTS,
    STRATEGIES,
    BroadcastOptions,
    EngineOptions,
    FrameOptions,
    Function,
    GraphOptions,
    SinkOptions,
    SourceOptions,
    StartOptions,
    Strategy,
    StreamOptions,
    lists_options,
)
from cues.graphs.plan import REST, Plan
from cues.graphs.processor import function_name
from cues.graphs.retry import Retry
from cues.overrides import override
from cues.queues.options import FUNCTIONS, QueueOptions, size_of

if TYPE_CHECKING:
    from cues.graphs import compose
    from cues.graphs.running import Running
    from cues.graphs.topology import Topology
    from cues.queues.store import Store
else:
    compose = lazy.module("cues.graphs.compose")

_MODULES = {"embedded": "cues.engine.local", "workers": "cues.engine.supervised", "spark": "cues.spark.engine"}
"""The module that starts a graph."""
ENGINES = ("embedded", "spark")
_OF_SPARK = ("spark", "master", "queues", "backfill", "conf")
"""Options of a start that only Spark has."""

importing_for_worker = False
"""A worker process is importing a graph file. A start there would run the graph again in every worker."""

F = TypeVar("F", bound=Callable[..., Any])


class Graph(Shown):
    """A graph of processors.

    id          the name of the graph. Processor ids begin with it, so it must stay the same
    processors  declarations, besides those by decorators
    store       directory or :class:`Store`; default ``data/<id>`` (see the command line for more)
    errors      queue for messages that failed for good; None stops their processor instead
    strategy    ``"exactly-once"`` or ``"at-most-once"``, for processors without their own
    system      any object, handed to functions as ``process.system``
    source      queue that ``send`` writes to by default
    queues      ``{name: cues.QueueOptions(…)}``, ``"*"`` for the rest
    durability  the durability of a new store; None: ``"disk"``
    """

    def __init__(
        self,
        id: str,
        processors: Iterable[Processor] = (),
        *,
        store: str | os.PathLike[str] | Store | None = None,
        errors: str | None = None,
        strategy: Strategy = "exactly-once",
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
                f"The graph {id!r} has strategy {strategy!r}.", f"give {' or '.join(map(repr, STRATEGIES))}."
            )
        self.strategy: Strategy = strategy
        self.system = system
        self.default_source = source
        self.queues: dict[str, QueueOptions] = {}
        for what, value, kind in (("queues", queues or {}, Mapping), ("processors", processors, Iterable)):
            if not isinstance(value, kind):
                raise GraphError(
                    f"The {what} of the graph {id!r} are {value!r:.60}.",
                    "give queues={name: cues.QueueOptions(…)}, and a list of processors.",
                )
        for name, options in (queues or {}).items():
            if name != REST:
                names.check("queue", name)
            if not isinstance(options, (QueueOptions, Mapping)):
                raise GraphError(
                    f"The options of queue {name!r} are {type(options).__name__}.", "give cues.QueueOptions(…)."
                )
            self.queues[name] = options if isinstance(options, QueueOptions) else QueueOptions.from_dict(options)
        self.durability = durability
        self.directory: Path | None = None
        """The directory for relative paths of stores; None: the current directory. The command line sets it."""
        self.processors: dict[str, Processor] = {}
        for processor in processors:
            self.add(processor)

    # --- declaring ---

    def add(self, processor: Processor) -> None:
        """Add a declaration; a second one of the same id is refused."""
        if not isinstance(processor, Processor):
            raise GraphError(
                f"The graph {self.id!r} was given {type(processor).__name__} ({processor!r}).",
                "give it Source(…), Stream(…), Frame(…) or Sink(…).",
            )
        other = self.processors.get(processor.id)
        if other is not None:
            raise GraphError(
                f"The graph {self.id!r} has two processors with the id {processor.id!r}: a {other.kind}"
                f" ({function_name(other.fn)}) and a {processor.kind} ({function_name(processor.fn)}).",
                "give one of them another name with id='…'.",
                processor=processor.id,
            )
        self.processors[processor.id] = processor

    @lists_options(SourceOptions)
    def source(self, id: str, **options: Unpack[SourceOptions]) -> Callable[[F], F]:
        """Declare a source: as a decorator, with the function below it; as a bare call, for a queue fed by ``send``."""
        names.check("queue", id)
        self.add(Source(id, None, **options))

        def declare(fn: F) -> F:
            replaced = self.processors[id]
            if replaced.fn is not None:
                raise GraphError(
                    f"The source {id!r} has a function already ({function_name(replaced.fn)}).",
                    "give each source one function; merge several sources with a stream over cues.AnyOf(…).",
                    processor=id,
                )
            self.processors[id] = Source(id, fn, **options)
            return fn

        return declare

    @lists_options(StreamOptions)
    def stream(
        self,
        inputs: str | AnyOf | Mapping[str, str],
        outputs: str | AllOf | Mapping[str, str] | Iterable[str] | None,
        **options: Unpack[StreamOptions],
    ) -> Callable[[F], F]:
        """Declare the function below as a stream; see :class:`Stream`."""
        return self._declares(lambda fn: Stream(fn, inputs, outputs, **options))

    @lists_options(SinkOptions)
    def sink(self, inputs: str | AnyOf | Mapping[str, str], **options: Unpack[SinkOptions]) -> Callable[[F], F]:
        """Declare the function below as a sink; see :class:`Sink`."""
        return self._declares(lambda fn: Sink(fn, inputs, **options))

    def timer(self, processor: str) -> Callable[[F], F]:
        """Declare the function below as the ``timer=`` of a stream or sink that was declared before.

        It is called when a timer that ``process.timer(key, at)`` set is due, with the timer: a dict of ``key``,
        ``name`` and ``at`` (an aware datetime). It returns what the processor's function returns.
        """
        declared = self.processors.get(processor)
        if declared is None:
            raise self._unknown("processor", processor, self.processors)
        if declared.options.timer is not None:
            raise GraphError(
                f"The processor {processor!r} has a timer function already ({function_name(declared.options.timer)}).",
                "use one function, which reads timer['name'].",
                processor=processor,
            )

        def declare(fn: F) -> F:
            declared.set_timer(fn)
            return fn

        return declare

    def _declares(self, make: Callable[[Function], Processor]) -> Callable[[F], F]:
        def declare(fn: F) -> F:
            self.add(make(fn))
            return fn

        return declare

    @lists_options(FrameOptions)
    def frame(
        self,
        inputs: str | Mapping[str, str],
        outputs: str,
        fields: str | Mapping[str, str] | None = None,
        **options: Unpack[FrameOptions],
    ) -> Callable[[F], F]:
        """Declare the function below as a stage for Spark: from DataFrame to DataFrame.

        The columns are ``index``, ``time``, ``hash``, ``value`` (msgpack), and those that ``fields`` declares
        (``"origin string, delay double"``). Each row of the result is a message. If the plan keeps no state, the
        function is called with the messages of each step, up to ``batch_size`` (50,000). If it keeps state (aggregates,
        watermarks, windows, deduplication, joins of streams), it runs as a streaming query of Spark, with queues in a
        shared directory; ``output_mode`` chooses the rows that it writes. ``inputs`` may then be a dict of bindings:
        the function gets a stream for each, and ``fields`` may be a dict too. At the start the function is called once
        more, with an empty stream, to see its plan. The embedded engine refuses a graph with such a stage.
        """
        return self._declares(lambda fn: Frame(fn, inputs, outputs, fields, **options))

    @lists_options(BroadcastOptions)
    def broadcast(
        self,
        inputs: str | AnyOf,
        outputs: str | AllOf | Mapping[str, str] | Iterable[str],
        id: str | None = None,
        **options: Unpack[BroadcastOptions],
    ) -> None:
        """Declare a stream that copies every message of ``inputs`` to every output; see :func:`cues.broadcast`."""
        self.add(compose.broadcast(inputs, outputs, id=id, **options))

    # --- graphs from graphs ---

    def rebind(self, queues: Mapping[str, str] | None = None, *, processors: Mapping[str, str] | None = None) -> Graph:
        """Return a new graph with renamed ``queues`` and ``processors``: ``graph.rebind({"old": "new"})``.

        A queue is renamed in inputs, outputs, error queues, sources (whose id is their queue), the default
        source and queue options. The names that functions see stay: a binding of a dict or an :class:`AnyOf`
        keeps its name, and so do the outputs that a function returns by name. All renames happen at once, so
        two queues can exchange their names.

        Two queues may become one; this connects parts. It is refused if a processor would read the queue
        under two bindings, if two sources would feed it, or if the two queues had different options.
        ``processors`` renames streams and sinks.

        The graph keeps its id. A processor that is renamed, or reads another queue, has other positions. In a
        store that has run the old graph, the start is refused (:class:`TopologyChanged`) or the new processor
        starts from the beginning. Raises :class:`GraphError` for an unknown name.
        """
        queues, processors = dict(queues or {}), dict(processors or {})
        known = self._queue_names()
        for old, new in queues.items():
            if old not in known:
                also = f"; processors={{{old!r}: …}} renames a processor" if old in self.processors else ""
                raise self._unknown("queue", old, known, also)
            names.check("queue", new)
        for old in processors:
            if old not in self.processors:
                raise self._unknown("processor", old, self.processors)
            if self.processors[old].kind == "source":
                raise GraphError(
                    f"processors={{{old!r}: …}} would rename a source, whose id is the queue that it feeds.",
                    f"rename the queue: rebind({{{old!r}: {processors[old]!r}}}).",
                    processor=old,
                )
        graph = Graph(
            self.id,
            store=self.store,
            errors=None if self.errors is None else queues.get(self.errors, self.errors),
            strategy=self.strategy,
            system=self.system,
            source=None if self.default_source is None else queues.get(self.default_source, self.default_source),
            queues=self._rebound_options(queues),
            durability=self.durability,
        )
        graph.directory = self.directory
        was: dict[str, str] = {}
        for processor in self.processors.values():
            renamed = compose.rebound(processor, queues, processors.get(processor.id, processor.id))
            other = was.setdefault(renamed.id, processor.id)
            if other != processor.id:
                raise GraphError(
                    f"The {self.processors[other].kind} {other!r} and the {processor.kind} {processor.id!r} of the"
                    f" graph {self.id!r} would both be {renamed.id!r}.",
                    "give one of them another name; a source has the name of its queue.",
                    processor=processor.id,
                )
            graph.add(renamed)
        return graph

    def _rebound_options(self, queues: Mapping[str, str]) -> dict[str, QueueOptions]:
        rebound: dict[str, QueueOptions] = {}
        was: dict[str, str] = {}
        for name, options in self.queues.items():
            renamed = queues.get(name, name)
            other = was.setdefault(renamed, name)
            if rebound.setdefault(renamed, options) != options:
                raise GraphError(
                    f"The queues {other!r} and {name!r} of the graph {self.id!r} have different options"
                    f" ({rebound[renamed].to_dict()}, {options.to_dict()}) and would both be {renamed!r}.",
                    "give them two names, or the same options.",
                )
        return rebound

    def _queue_names(self) -> list[str]:
        """Every queue that the graph names anywhere, in the order of declaration."""
        queues = [queue for processor in self.processors.values() for queue in sorted(compose.queues_of(processor))]
        queues += [name for name in self.queues if name != REST]
        queues += [name for name in (self.errors, self.default_source) if name is not None]
        return list(dict.fromkeys(queues))

    def _unknown(self, kind: str, name: str, known: Iterable[str], also: str = "") -> GraphError:
        return GraphError(
            f"The graph {self.id!r} has no {kind} {name!r} to rename; it has {', '.join(known) or 'none'}{also}.",
            nearest(name, known, "use {!r}.", "use one of those."),
        )

    # --- inspection ---

    def plan(self) -> Plan:
        """Return the graph, resolved and checked, as engines run it."""
        if not self.processors:
            raise GraphError(
                f"The graph {self.id!r} has no processors.",
                "declare some with @graph.source(…), @graph.stream(…), @graph.sink(…).",
            )
        return plan.build(
            self.id,
            self.processors.values(),
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
        """Return the path of the store: as declared, else ``CUES_STORE``, else ``data/<id>`` beside ``beside``."""
        if self.store is not None:
            return Path(getattr(self.store, "path", None) or os.fspath(self.store))  # type: ignore[arg-type]
        if os.environ.get("CUES_STORE"):
            return Path(os.environ["CUES_STORE"])
        return Path(beside or self.directory or ".") / "data" / self.id

    def place(self, path: str | os.PathLike[str]) -> Path:
        """Return the directory of the store of a queue with the option ``path``."""
        return (self.directory or Path()) / Path(path).expanduser()

    # --- plain data ---

    def to_dict(self) -> dict[str, Any]:
        """Return the graph as plain data, without ``system``; functions are ``"module:qualname"``."""
        data = {
            "id": self.id,
            "store": None if self.store is None else str(getattr(self.store, "path", self.store)),
            "directory": None if self.directory is None else str(self.directory),
            "errors": self.errors,
            "strategy": None if self.strategy == "exactly-once" else self.strategy,
            "source": self.default_source,
            "durability": self.durability,
            "queues": {name: options.to_dict() for name, options in self.queues.items()} or None,
            "processors": [_declared(processor) for processor in self.processors.values()],
        }
        return {name: value for name, value in data.items() if value is not None}

    @staticmethod
    def from_dict(data: Mapping[str, Any], **overrides: Unpack[GraphOptions]) -> Graph:
        """Return the graph that plain data describe; functions are callables or ``"module:qualname"``.

        ``overrides`` are arguments of :class:`Graph` (store, system, …). Raises :class:`GraphError` for other data, and
        for a value of another type that only the plan would use.
        """
        try:
            graph = Graph._from_dict(data, overrides)
            with contextlib.suppress(CuesError):
                graph.plan()  # a graph with a mistake can be made, and its plan names the mistake
        except CuesError:
            raise
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise GraphError(
                f"The plain data of a graph, {data!r:.200}, cannot be used ({type(error).__name__}: {error}).",
                "compare the type of each value with that in the result of to_dict() of a similar graph.",
            ) from error
        return graph

    @staticmethod
    def _from_dict(data: Mapping[str, Any], overrides: Mapping[str, Any]) -> Graph:
        rest = dict(data)
        try:
            id = rest.pop("id")
            declared = rest.pop("processors")
        except KeyError as error:
            raise GraphError(
                f"A graph as plain data needs {error}.", "give {'id': …, 'processors': [{'kind': 'stream', …}]}."
            ) from None
        directory = rest.pop("directory", None)
        for name in rest:
            if name not in GraphOptions.__annotations__:
                known = ", ".join(sorted(GraphOptions.__annotations__))
                raise GraphError(f"A graph has no {name!r}.", f"use one of {known}.")
        if "queues" in rest:
            rest["queues"] = {name: _queue_options(options) for name, options in rest["queues"].items()}
        rest.update(overrides)
        graph = Graph(id, [_processor(declaration) for declaration in declared], **rest)
        graph.directory = None if directory is None else Path(directory)
        return graph

    # --- running (the one step upward) ---

    @describes(START_TEXTS, START_TEXTS)
    def start(
        self,
        *,
        engine: Literal["embedded", "spark"] = "embedded",
        workers: int | Literal["auto"] | None = None,
        store: str | os.PathLike[str] | Store | None = None,
        accept_topology: bool = False,
        take_over: bool = False,
        min_free: int | str | None = None,
        **options: Unpack[EngineOptions],
    ) -> Running:
        """Start the graph in threads of this process. Return a :class:`Running`, which is a context manager.

        With ``workers=4`` its processors run in four processes of their own. With ``"auto"`` the number fits the
        machine and the graph. A worker that dies is started again, and all workers end with this process. They import
        the graph, so it must be a global of a file, and a program must start it under
        ``if __name__ == "__main__":``. For a graph that a function returns, pass ``target="graph.py:make(3)"``.
        Raises :class:`GraphError` if the workers cannot import the graph.

        With ``engine="spark"`` its functions run on Spark's executors. ``spark`` is your own session, which
        is never stopped. Without it a session is made, for ``master``, the URL of a cluster (default ``local[*]``).

        Raises :class:`AlreadyRunning`, :class:`TopologyChanged`, :class:`Diverged` before a function is called.
        """
        if engine not in ENGINES:
            raise InvalidArgument(f"There is no engine {engine!r}.", f"use {' or '.join(map(repr, ENGINES))}.")
        if importing_for_worker:
            raise GraphError(
                f"The graph {self.id!r} is started by the import of its file, and every worker process imports it.",
                'write if __name__ == "__main__": before the start.',
            )
        least = size_of(min_free)
        module, given = _MODULES[engine], dict[str, Any](options)
        foreign = next((name for name in _OF_SPARK if given.get(name)), None)
        if foreign is not None and engine != "spark":
            raise InvalidArgument(
                f"{foreign}= is an option of Spark, and the engine is {engine!r}.",
                f"add engine='spark', or leave {foreign}= out.",
            )
        if workers is not None:
            if engine != "embedded":
                raise InvalidArgument(
                    f"workers={workers!r} are processes of the embedded engine, and the engine is {engine!r}.",
                    "set workers= or engine='spark', but not both, because Spark has its own workers.",
                )
            module, given["workers"] = _MODULES["workers"], workers
        running: Running = importlib.import_module(module).start(
            self, store=store, accept_topology=accept_topology, take_over=take_over, **given
        )
        try:
            running.guard(least)
        except BaseException:  # such as Ctrl-C, or a store that was removed
            running.close()
            raise
        return running

    @describes(START_TEXTS, START_TEXTS)
    def run(self, **options: Unpack[StartOptions]) -> None:
        """Run until every source has ended and every queue is drained, as ``cues run`` does."""
        with self.start(**options) as running:
            running.wait_done()

    @override
    def __repr__(self) -> str:
        return f"<cues.Graph {self.id}: {', '.join(self.processors) or 'empty'}>"


def merge(
    id: str,
    *graphs: Graph,
    store: str | os.PathLike[str] | Store | None = None,
    errors: str | None = None,
    system: Any = None,
    source: str | None = None,
    queues: Mapping[str, QueueOptions | Mapping[str, Any]] | None = None,
    durability: str | None = None,
) -> Graph:
    """Return a new graph with the processors of all ``graphs``, connected at queues with the same name.

    The processors of each part keep its error queue and its strategy. ``errors`` is for the processors of parts
    without an error queue. Options in ``queues`` replace those of the parts. Without an argument, ``system`` and
    ``source`` are taken from the parts if only one part has them, ``store`` and ``durability`` if all parts have
    the same.

    A source without a function only declares its queue, so another source with the same id replaces it. Any other
    two processors with one id raise :class:`GraphError`; so do different options of one queue, and several
    systems. The error names both graphs; :meth:`Graph.rebind` renames.

    Processor ids begin with the id of the graph. So the new graph has its own positions, state and try logs: in
    the store of a part, it reads everything from the beginning.
    """
    for graph in graphs:
        if not isinstance(graph, Graph):
            raise GraphError(f"merge was given {type(graph).__name__} ({graph!r}).", "give it graphs.")
    if not graphs:
        raise GraphError(f"The graph {id!r} would be merged from no graphs.", "give one or more graphs.")
    merged: dict[str, tuple[Graph, Processor]] = {}
    for graph in graphs:
        for processor in graph.processors.values():
            _put_together(merged, graph, processor)
    parts = [(graph.id, graph.queues, graph._queue_names()) for graph in graphs]
    if system is None:
        system = _only_system(graphs)
    declared = {graph.default_source for graph in graphs if graph.default_source is not None}
    first = graphs[0]
    return Graph(
        id,
        [compose.resolved(processor, graph.errors, graph.strategy) for graph, processor in merged.values()],
        store=first.store if store is None and all(g.store == first.store for g in graphs) else store,
        errors=errors,
        system=system,
        source=declared.pop() if source is None and len(declared) == 1 else source,
        queues=compose.merged_options(Graph(id, queues=queues).queues, parts),
        durability=first.durability
        if durability is None and all(g.durability == first.durability for g in graphs)
        else durability,
    )


def _put_together(merged: dict[str, tuple[Graph, Processor]], graph: Graph, processor: Processor) -> None:
    other, known = merged.setdefault(processor.id, (graph, processor))
    if compose.gives_way(processor, known):
        return
    if compose.gives_way(known, processor):
        merged[processor.id] = graph, processor
        return
    inherited = compose.inherited(processor, graph.errors, graph.strategy)
    if known is not processor or inherited != compose.inherited(known, other.errors, other.strategy):
        raise GraphError(
            f"The graphs {other.id!r} and {graph.id!r} both have a processor {processor.id!r}: a {known.kind}"
            f" ({function_name(known.fn)}) and a {processor.kind} ({function_name(processor.fn)})"
            + (", with different error queues or strategies." if known is processor else "."),
            f"rename one with rebind({'' if processor.kind == 'source' else 'processors='}{{{processor.id!r}: …}}).",
            processor=processor.id,
        )


def _only_system(graphs: Iterable[Graph]) -> Any:
    """The system of the parts; raises if they have several."""
    having = [graph for graph in graphs if graph.system is not None]
    for graph in having:
        if graph.system is not having[0].system:
            raise GraphError(
                f"The graphs {having[0].id!r} and {graph.id!r} have a system each"
                f" ({type(having[0].system).__name__}, {type(graph.system).__name__}); a graph has one.",
                "call merge(…, system=…) with an object that serves both.",
            )
    return having[0].system if having else None


def _declared(processor: Processor) -> dict[str, Any]:
    data: dict[str, Any] = {"kind": processor.kind, "id": processor.id}
    if processor.fn is not None:
        data["fn"] = function_name(processor.fn)
    inputs, outputs = processor.inputs, processor.outputs
    if inputs is not None:
        data["inputs"] = {"any_of": inputs.bindings} if isinstance(inputs, AnyOf) else inputs
    if processor.kind in ("stream", "frame"):
        data["outputs"] = {"all_of": outputs.bindings} if isinstance(outputs, AllOf) else outputs
    for name, value in processor.given().items():
        if name == "schema":
            value = typed.to_plain(value)
        elif isinstance(value, Retry):
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
        data[name] = value
    return data


def _processor(data: Mapping[str, Any]) -> Processor:
    rest = dict(data)
    kind = rest.pop("kind", None)
    if kind not in DECLARATIONS:
        raise GraphError(
            f"A processor as plain data has kind {kind!r}.",
            "use 'source', 'stream', 'frame' or 'sink'.",
            processor=str(rest.get("id")),
        )
    if kind == "stream" and rest.get("batch") == "frame":  # the plain data of a frame before it had a kind of its own
        kind = "frame"
        rest = {"batch_size": BATCH_SIZE, **rest}
        del rest["batch"]
    id = rest.pop("id", None)
    fn = _function(rest.pop("fn", None))
    if isinstance(rest.get("retries"), Mapping):
        retries = dict(rest["retries"])
        if "on" in retries:
            kinds = [retries["on"]] if isinstance(retries["on"], str) else retries["on"]
            retries["on"] = tuple(_function(error) for error in kinds)
        rest["retries"] = Retry(**retries)
    for name in ("where", "key", "timer"):
        value = rest.get(name)
        if isinstance(value, str) and ":" in value:
            rest[name] = _function(value)
        elif isinstance(value, Mapping):
            rest[name] = {b: _function(f) for b, f in value.items()}
    if "schema" in rest:
        rest["schema"] = typed.from_plain(rest["schema"], _function)
    if kind == "source":
        return Source(id, fn, **rest)
    inputs = _bound(AnyOf, "any_of", rest.pop("inputs", None))
    if id is not None:
        rest["id"] = id
    ports = (inputs,) if kind == "sink" else (inputs, _bound(AllOf, "all_of", rest.pop("outputs", None)))
    declared: Processor = DECLARATIONS[kind](fn, *ports, **rest)
    return declared


def _bound(form: type[AnyOf] | type[AllOf], name: str, ports: Any) -> Any:
    """``{"any_of": …}`` as :class:`AnyOf`; a dict with a queue under the binding ``any_of`` stays a dict."""
    if not isinstance(ports, Mapping) or set(ports) != {name} or isinstance(ports[name], str):
        return ports
    return form(**ports[name]) if isinstance(ports[name], Mapping) else form(*ports[name])


def _queue_options(options: Any) -> Any:
    """The options of a queue, with ``{"function": "module:qualname"}`` as the function."""
    if not isinstance(options, Mapping):
        return options
    return {
        name: _function(value["function"]) if name in FUNCTIONS and isinstance(value, Mapping) else value
        for name, value in options.items()
    }


def _function(name: Any) -> Function | None:
    """A callable, or the one that ``"module:qualname"`` names."""
    if not isinstance(name, str):
        return name  # type: ignore[no-any-return]
    module, _, qualname = name.partition(":")
    try:
        value: Any = importlib.import_module(module)
        for part in qualname.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError, ValueError) as error:  # ValueError: an empty name of a module
        raise GraphError(
            f"The function {name!r} cannot be loaded ({error}).", "give 'module:function' that can be imported here."
        ) from error
    return value  # type: ignore[no-any-return]
