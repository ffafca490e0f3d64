"""The lag and rate of each processor, and the size of each queue, in Spark's own metrics.

They are gauges of the driver, in the source ``AccumulatorSource`` that Spark has for such values. So every sink that is
set in ``metrics.properties`` gets them, and Spark's page has them under ``/metrics/json/``:

    <graph>.<processor>.lag         messages on its inputs that it has not taken
                       .rate        messages that it has taken a second, since the last look
                       .taken, .written, .failed    messages since the start of the graph
    <graph>.<queue>.messages, .bytes                messages and bytes that the queue holds

Not guaranteed: that values are newer than :data:`cues.steps.ownership.LEASE_BEAT_S`, and that they go to zero when the
graph ends. Spark keeps a metric as long as its context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Final

from cues.base import clock

if TYPE_CHECKING:
    from cues.spark.cluster.directory import QueueDirectory
    from cues.spark.cluster.step import Stage

_registered: Final[dict[tuple[str, str], Any]] = {}
"""The value of each metric, by the id of the Spark application and its name. Spark registers a name only once."""


class SparkMetrics:
    """The metrics of one graph."""

    def __init__(self, context: Any, graph: str) -> None:
        self._context = context
        self._graph = graph
        self._application = str(context.applicationId)
        self._taken: dict[str, tuple[int, int]] = {}
        """By processor: the time of the last look in nanoseconds, and the messages taken until then."""

    def update(self, stages: Collection[Stage], queues: Iterable[QueueDirectory]) -> None:
        """Look at the processors and queues, and set the values."""
        values: Counter[str] = Counter()
        for stage in stages:
            id = stage.node.processor  # the values of its units together
            values[f"{id}.lag"] += stage.lag
            for name in ("taken", "written", "failed"):
                values[f"{id}.{name}"] += getattr(stage.counters, name)
        now_ns = clock.monotonic_ns()
        for id in dict.fromkeys(stage.node.processor for stage in stages):
            taken = values[f"{id}.taken"]
            before_ns, before = self._taken.get(id, (now_ns, taken))
            self._taken[id] = now_ns, taken
            values[f"{id}.rate"] = (taken - before) * 1_000_000_000 // max(1, now_ns - before_ns)
        for queue in queues:
            values[f"{self._graph}.{queue.queue}.messages"] = sum(file.count for file in queue.live)
            values[f"{self._graph}.{queue.queue}.bytes"] = sum(file.size for file in queue.live)
        for name, value in values.items():
            gauge = self._gauge(name)
            gauge.reset()
            gauge.add(value)

    def _gauge(self, name: str) -> Any:
        key = self._application, name
        if key not in _registered:
            jvm, context = self._context._jvm, self._context._jsc.sc()
            gauge = context.longAccumulator(name)
            source = getattr(getattr(jvm.org.apache.spark.metrics.source, "LongAccumulatorSource$"), "MODULE$")
            source.register(context, jvm.PythonUtils.toScalaMap({name: gauge}))
            _registered[key] = gauge
        return _registered[key]
