"""The plan of a frame: whether it keeps state, and whether Spark can run it as a query.

A frame is a function from DataFrame to DataFrame. Before anything is written, it is called with an empty stream, and
Spark's analysed plan of its result is read:

    stateless     each row depends on one row of the stream   runs in steps; each step is a table
    stateful      aggregates, watermarks, windows,            runs as a query, which keeps the state between batches
                  deduplication, joins of streams, limits
    by group      applyInPandas and the like                  refused: Spark applies them to each batch on its own

``output_mode`` overrides it: ``"append"``, ``"update"`` and ``"complete"`` make a query of every plan, and ``"step"``
runs every plan in steps. A function that cannot be called with a stream, because it runs a job, is called with an empty
table instead. If that plan is stateful, it is refused, else it runs in steps.

Not guaranteed: that a query gives the same rows again if a Python function inside the plan does not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cues.errors import GraphError
from cues.graphs.processor import Node, wants_process
from cues.spark.columns import frame_encoder
from cues.spark.failures import in_short
from cues.spark.installed import require_streams
from cues.steps.hashes import Hasher
from cues.steps.imperative import Imperative
from cues.steps.process import Delivery, Process

if TYPE_CHECKING:
    from cues.graphs.plan import Plan

ROWS: Final = "index BIGINT, time TIMESTAMP_LTZ, hash STRING, value BINARY"
"""The columns of a message, before the declared fields."""
_STATELESS: Final = {
    *("Project", "Filter", "SubqueryAlias", "View", "Generate", "Expand", "Union", "MapInPandas", "MapInArrow"),
    *("PythonMapInArrow", "MapPartitions", "MapElements", "DeserializeToObject", "SerializeFromObject", "TypedFilter"),
    *("AppendColumns", "Repartition", "RepartitionByExpression", "RebalancePartitions", "ResolvedHint", "Sample"),
    *("CollectMetrics", "ScriptTransformation", "BatchEvalPython", "ArrowEvalPython", "WithCTE", "CTERelationDef"),
    *("CTERelationRef", "StreamingRelationV2", "StreamingRelation", "OneRowRelation", "LocalRelation", "Range"),
    *("LogicalRDD", "LogicalRelation", "DataSourceV2Relation", "PythonDataSourceV2", "Join", "LateralJoin"),
}
"""Operators that give the same rows, however a stream is cut. A join is one if only one side streams."""
_STATEFUL: Final = {
    *("Aggregate", "Distinct", "Deduplicate", "DeduplicateWithinWatermark", "EventTimeWatermark"),
    *("UpdateEventTimeWatermarkColumn", "FlatMapGroupsWithState", "FlatMapGroupsInPandasWithState"),
    *("TransformWithState", "TransformWithStateInPandas", "TransformWithStateInPySpark"),
    *("JoinOfStreams", "GlobalLimit", "LocalLimit", "Offset", "Tail", "Sort", "Window", "Intersect", "Except"),
}
"""Operators that see rows of earlier batches. Spark refuses some of them on a stream, and says so."""
_CLOCKS: Final = {"CurrentTimestamp", "CurrentDate", "CurrentTime", "LocalTimestamp", "Now", "CurrentBatchTimestamp"}
_STEP: Final = "set output_mode='step', which applies the plan to the messages of each step on their own"


def call(node: Node, given: Mapping[str, Any], process: Process) -> Any:
    """Call a frame with the DataFrame of each binding."""
    assert node.fn is not None
    keywords = {"process": process} if wants_process(node.fn) else {}
    if node.mode == "join":
        return node.fn(**given, **keywords)
    return node.fn(*given.values(), **keywords)


class _ProcessOfAnyStep(Process):
    """The argument ``process`` of a function that is called only to see its plan of a table."""

    delivery = property(lambda self: Delivery(bytes(16), 0, {}, {}, 0))
    binding = property(lambda self: self._node.inputs[0].binding)
    index = property(lambda self: 1)
    indices = property(lambda self: [1])
    metadata = property(lambda self: {})


def process_of(
    node: Node, system: Any, epoch: int = 0, store: str = "", process_type: type[Process] = Process
) -> Process:
    """The argument ``process`` of a frame. Outside of a step it has no delivery, index or metadata."""
    imperative = Imperative(node.id, {}, {})
    return process_type(node, system, Hasher(node.key, 0), epoch, store, None, lambda: False, imperative)


def fields_of(node: Node, binding: str) -> str | None:
    """The declared fields of an input."""
    fields = node.options.fields
    return fields.get(binding) if isinstance(fields, Mapping) else fields


class QueryPlan(NamedTuple):
    """The query of a frame."""

    mode: str
    """The output mode."""
    closes: bool
    """True if it has a watermark: when there are no more messages, a batch without them gives what was closed."""


def queries_of(session: Any, plan: Plan) -> dict[str, QueryPlan]:
    """The frames that run as a query, by processor id.

    Raises :class:`GraphError` for a frame that can run neither in steps nor as a query. Nothing is written.
    """
    frames = [node for node in plan.running if node.kind == "frame"]
    queries = {node.id: _query_of(session, plan.system, node) for node in frames}
    return {id: query for id, query in queries.items() if query is not None}


def require_steps(queries: Mapping[str, QueryPlan]) -> None:
    """Raise :class:`GraphError` if a frame must run as a query, for an engine that has only steps."""
    for id, query in queries.items():
        raise GraphError(
            f"The plan of {id} keeps state (output mode {query.mode!r}), so it runs as a streaming query, which needs"
            " queues in a shared directory.",
            f"run the graph with --queues DIR; or {_STEP}.",
            processor=id.rpartition(".")[2],
        )


def _query_of(session: Any, system: Any, node: Node) -> QueryPlan | None:
    """The query of a frame; None if it runs in steps."""
    asked = node.options.output_mode
    if asked == "step":
        if node.mode == "join":
            raise _refused(node, "reads several queues, and a step of a frame reads one", "leave output_mode= out.")
        return None
    try:
        given = {port.binding: _empty(session, node, port.binding, True) for port in node.inputs}
        result = call(node, given, process_of(node, system))
    except Exception as error:
        if asked is not None or node.mode == "join" or _batch_is_stateful(session, node, system):
            raise _refused(
                node,
                f"cannot be called with a stream ({in_short(error)})",
                f"let the function only make a plan; or {_STEP}.",
            ) from error
        return None  # a step calls it with a table, and handles the error
    if not hasattr(result, "mapInArrow"):
        frame_encoder(node.id, result)
    top = _analysed(result)
    names = _operators(top)
    unknown = next((name for name in names if name not in _STATELESS | _STATEFUL), None)
    if unknown is not None and asked is None:
        text = f"has the operator {unknown}, which Spark applies to each batch of a stream on its own"
        raise _refused(node, text, f"{_STEP}; or use an operator that keeps state.")
    if asked is None and node.mode != "join" and not any(name in _STATEFUL for name in names):
        if node.options.trigger is not None:
            raise _refused(node, "has trigger=, and runs in steps, because it keeps no state", "leave trigger= out.")
        return None
    mode = asked or "append"
    require_streams(f"{node.id}, a frame that keeps state,")
    _check_query(session, node, top, mode)
    frame_encoder(node.id, result)
    return QueryPlan(mode, any("EventTimeWatermark" in name for name in names))


def _check_query(session: Any, node: Node, top: Any, mode: str) -> None:
    """Refuse a query that Spark cannot run, or that would give other rows when a batch is repeated."""
    if not top.isStreaming():
        raise _refused(node, "does not use its stream", "make the result from the DataFrames that the function gets.")
    jvm = session._jvm
    modes = jvm.org.apache.spark.sql.streaming.OutputMode
    jvm_mode = {"append": modes.Append, "update": modes.Update, "complete": modes.Complete}[mode]()
    try:
        jvm.org.apache.spark.sql.catalyst.analysis.UnsupportedOperationChecker.checkForStreaming(top, jvm_mode)
    except Exception as error:
        why = str(error).partition("\n")[0].rstrip(";. ")
        raise _refused(
            node,
            f"cannot run as a query in the output mode {mode!r}: {why}",
            "set another output_mode= ('update' gives each changed row after a batch, 'complete' the whole result), or"
            f" a watermark; or {_STEP}.",
        ) from error
    clock = next((name for name in _expressions(top) if name in _CLOCKS), None)
    timeouts = (n for n in _nodes(top) if "WithState" in _name(n) and "ProcessingTime" in n.toString())
    if clock is None and next(timeouts, None) is not None:
        clock = "a timeout in processing time"
    if clock is not None or not top.deterministic():
        cause = f"asks for the time ({clock})" if clock else "has a random expression"
        raise _refused(
            node,
            f"{cause}. A query repeats batches after a crash, and must get the same rows again",
            "use the column time, or a field of the messages, instead.",
        )
    if node.options.trigger is not None:
        try:
            jvm.org.apache.spark.sql.streaming.Trigger.ProcessingTime(node.options.trigger)
        except Exception as error:
            raise _refused(
                node, f"has trigger={node.options.trigger!r}, which is not an interval", "write '10 seconds'."
            ) from error
    if "retries" in node.options.given():
        raise _refused(
            node, "runs as a query, and has retries=", "leave retries= out; an error stops it, and no message is lost."
        )


def _refused(node: Node, why: str, hint: str) -> GraphError:
    return GraphError(f"The frame {node.id} {why}.", hint, processor=node.name)


def _empty(session: Any, node: Node, binding: str, streaming: bool) -> Any:
    """A stream or a table without rows, with the columns of an input."""
    from pyspark.sql import types as T

    fields = fields_of(node, binding)
    schema: Any = T.StructType.fromDDL(f"{ROWS}, {fields}" if fields else ROWS)
    if not streaming:
        return session.createDataFrame([], schema)
    columns = [f"cast(null as {f.dataType.simpleString()}) as `{f.name}`" for f in schema.fields]
    types = [column.replace("timestamp)", "timestamp_ltz)") for column in columns]
    return session.readStream.format("rate").load().selectExpr(*types)


def _batch_is_stateful(session: Any, node: Node, system: Any) -> bool:
    """Return True if the function makes a plan with state of a table."""
    try:
        given = {port.binding: _empty(session, node, port.binding, False) for port in node.inputs}
        result = call(node, given, process_of(node, system, process_type=_ProcessOfAnyStep))
        names = set(_operators(_analysed(result), streaming=False))
    except Exception:
        return False  # it fails with every input
    return not names <= _STATELESS


def _analysed(result: Any) -> Any:
    return result._jdf.queryExecution().analyzed()


def _name(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _children(node: Any) -> Iterator[Any]:
    children = node.children()
    return (children.apply(number) for number in range(children.size()))


def _nodes(top: Any) -> Iterator[Any]:
    yield top
    for child in _children(top):
        yield from _nodes(child)


def _operators(top: Any, streaming: bool = True) -> Iterable[str]:
    """The names of the operators over a stream. A join that keeps rows of both sides has a name of its own."""
    names = []
    for node in _nodes(top):
        if streaming and not node.isStreaming():
            continue  # a table beside the stream
        name = _name(node)
        if streaming and name == "Join" and all(child.isStreaming() for child in _children(node)):
            name = "JoinOfStreams"
        names.append(name)
    return names


def _expressions(top: Any) -> Iterator[str]:
    """The names of all expressions of a plan."""

    def collect(expression: Any) -> Iterator[str]:
        yield _name(expression)
        for child in _children(expression):
            yield from collect(child)

    for node in _nodes(top):
        found = node.expressions()
        for number in range(found.size()):
            yield from collect(found.apply(number))
