"""Measurements for Prometheus, over HTTP or as text. Needs the extra ``metrics`` (prometheus-client).

    serve(running, "127.0.0.1:9464")    for a running graph, until it closes (``cues run --metrics``)
    serve(store, "127.0.0.1:9464")      for a store, whatever runs on it
    text(store)                         once, as text

:data:`METRICS` is the whole list, from which docs/how-to/metrics.md has its table. A scrape measures the store as
``cues status`` does (:mod:`cues.tools.metrics`), in read transactions, so it costs the graph nothing. Between scrapes
nothing happens. One process answers for all workers of a graph, because what they counted is in the store's directory.

Not guaranteed: that counters survive a restart, except those that are read from positions and indices
(``cues_processor_taken_total``, ``cues_queue_appended_total``, ``cues_queue_removed_total``). The others begin at 0
with the graph. Prometheus knows that counters do so.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final, cast
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from cues.base import names
from cues.base.closing import Closing
from cues.base.data import dataclass
from cues.base.events import Counters
from cues.base.histogram import Histogram
from cues.base.hosts import is_loopback, is_ours
from cues.engine.status import processor_of
from cues.errors import CuesError, InvalidArgument
from cues.graphs.running import Running
from cues.imported import package
from cues.overrides import override
from cues.queues.store import Store
from cues.tools import metrics
from cues.tools.figures import FIGURES
from cues.tools.measurement import Measurement, ProcessorFigures
from cues.txn.operate import TransactionMetrics

if TYPE_CHECKING:
    from prometheus_client import Metric

HOST: Final = "127.0.0.1"
"""The address of a server that is given a port only: other machines do not reach it."""
HEAD_S: Final = 5.0
"""Seconds in which the head of a request must arrive."""
_ANSWER_S: Final = 60.0
"""Seconds for the measurement and the answer; a store with 10,000 queues needs sixteen."""
CONNECTIONS_MAX: Final = 32
"""Connections at once, of which each has a thread; more are closed."""

_PROCESSOR: Final = ("graph", "processor")
_WORKER: Final = ("graph", "worker")

METRICS: Final[dict[str, tuple[str, tuple[str, ...], str]]] = {
    "cues_up": ("gauge", (), "1 if the store could be measured."),
    **{figure.metric: ("gauge", _PROCESSOR, figure.text) for figure in FIGURES if figure.metric},
    "cues_processor_taken": ("counter", _PROCESSOR, "Messages taken, by its positions: also those of earlier runs."),
    "cues_processor_written": ("counter", _PROCESSOR, "Messages written to its outputs."),
    "cues_processor_failed": ("counter", _PROCESSOR, "Messages that failed for good."),
    "cues_processor_retries": ("counter", _PROCESSOR, "Calls that were repeated after an error."),
    "cues_processor_steps": ("counter", _PROCESSOR, "Committed steps."),
    "cues_processor_calls": ("counter", _PROCESSOR, "Calls of its function that returned."),
    "cues_processor_call_seconds": ("counter", _PROCESSOR, "Seconds spent in calls of its function."),
    "cues_processor_calls_in_flight": ("gauge", _PROCESSOR, "Calls of its function that have not returned."),
    "cues_processor_paused": ("gauge", _PROCESSOR, "1 if it is paused until somebody resumes it."),
    "cues_processor_away": ("gauge", _PROCESSOR, "1 if it waits for something outside that is away."),
    "cues_processor_away_seconds": ("counter", _PROCESSOR, "Seconds of such waits that are over."),
    "cues_processor_running": ("gauge", _PROCESSOR, "1 if a process runs it."),
    "cues_processor_stopped": ("gauge", _PROCESSOR, "1 if an error stopped it and it was not started again."),
    "cues_processor_last_step_timestamp_seconds": ("gauge", _PROCESSOR, "The time of its last step."),
    "cues_processor_latency_seconds": (
        "histogram",
        _PROCESSOR,
        "From the append of a message to the commit of the step that took it. Not for sources.",
    ),
    "cues_processor_batch_size": ("histogram", _PROCESSOR, "Messages of a step."),
    "cues_queue_messages": ("gauge", ("queue",), "Messages on the queue."),
    "cues_queue_bytes": ("gauge", ("queue",), "Bytes of the queue on the disk."),
    "cues_queue_appended": ("counter", ("queue",), "Messages that were ever appended."),
    "cues_queue_removed": ("counter", ("queue",), "Messages that were removed, by retention or a purge."),
    "cues_queue_last_append_timestamp_seconds": ("gauge", ("queue",), "The time of the last append."),
    "cues_queue_growth_bytes_per_hour": ("gauge", ("queue",), "Bytes appended in the last hour."),
    "cues_queue_retention": (
        "gauge",
        ("queue", "limit"),
        "A limit of its retention: count (messages), bytes, age (seconds), read (1), or unread (1).",
    ),
    "cues_store_used_bytes": ("gauge", (), "Bytes of the data file that were ever used."),
    "cues_store_disk_bytes": ("gauge", (), "Bytes of the data file on the disk."),
    "cues_store_map_bytes": ("gauge", (), "The bound on the size of the store."),
    "cues_store_room_bytes": ("gauge", (), "Bytes that can still be written, by the map and by the disk."),
    "cues_store_full_in_seconds": ("gauge", (), "Seconds until there is no room at this growth; no sample if never."),
    "cues_worker_up": ("gauge", _WORKER, "1 if the worker process is alive."),
    "cues_worker_cpu_seconds": ("counter", _WORKER, "Processor time of the process that is the worker now."),
    "cues_worker_memory_bytes": ("gauge", _WORKER, "Memory of the worker process."),
    "cues_worker_restarts": ("counter", _WORKER, "How often the worker was started again."),
    "cues_process_cpu_seconds": ("counter", ("pid",), "Processor time of a process that runs processors, no worker."),
    "cues_process_memory_bytes": ("gauge", ("pid",), "Memory of a process that runs processors and is not a worker."),
    "cues_forward_waiting": ("gauge", ("graph", "processor", "store"), "Messages that wait for another store."),
    "cues_reader_position": (
        "gauge",
        ("processor", "store", "queue"),
        "The position of a processor of another store on a queue of this one.",
    ),
    "cues_group_lag": ("gauge", ("group",), "Messages that the consumer group has not read."),
    "cues_group_members": ("gauge", ("group",), "Members of the consumer group."),
    "cues_group_partitions_unread": ("gauge", ("group",), "Partitions that no member reads."),
    "cues_member_lag": ("gauge", ("group", "member"), "Messages on its partitions that a member has not read."),
    "cues_member_partitions": ("gauge", ("group", "member"), "Partitions that a member reads."),
    "cues_consumer_lag": ("gauge", ("consumer", "queue"), "Messages that a consumer of cues.txn has not read."),
    "cues_consumer_running": ("gauge", ("consumer",), "1 if a process runs the consumer."),
    "cues_transactions_pending": ("gauge", ("queue",), "Transactions that are pending on the queue."),
    "cues_transactions_pending_messages": ("gauge", ("queue",), "Their messages, where the number is known."),
    "cues_transactions_oldest_timestamp_seconds": ("gauge", ("queue",), "The time at which the oldest of them began."),
}
"""By name (a counter has ``_total`` after it): kind, labels, text."""

_LATENCY_POWERS: Final = range(9, 37, 2)
"""Bounds of latencies: 2 to these powers, in microseconds: 0.5 ms to 19 hours, each four times the one before."""
_SIZE_POWERS: Final = range(1, 15)
"""Bounds of batch sizes: below 2 to these powers, 1 to 16,383 messages."""


def table() -> str:
    """The table of docs/how-to/metrics.md."""
    lines = ["| metric | kind | labels | value |", "|---|---|---|---|"]
    for name, (kind, labels, text) in METRICS.items():
        shown = f"{name}_total" if kind == "counter" else name
        lines.append(f"| `{shown}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {text} |")
    return "\n".join(lines) + "\n"


@dataclass
class Measured:
    """The values of one scrape."""

    seen: Measurement
    processors: Sequence[ProcessorFigures]
    queues: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Messages, and messages ever, of queues in a shared directory."""

    @staticmethod
    def of_store(store: Store) -> Measured:
        """Measure a store; the counters are those of the processes that run its processors now."""
        seen = metrics.of_store(store)
        return Measured(seen, seen.figures())

    @staticmethod
    def of_running(running: Running) -> Measured:
        """Measure a graph that this process runs; its counters include those of workers that died."""
        seen, counters = metrics.of_store(running.store), running.counters()
        lags: dict[str, int] = {}
        queues: dict[str, tuple[int, int]] = {}
        if running.shared is not None:
            progress = running.shared.now()
            queues = {name: (progress.messages[name], end) for name, end in progress.ends.items()}
            for unit in running.standings():
                lags[unit.processor] = lags.get(unit.processor, 0) + running.shared.lag(unit.id)
        figures = seen.figures(counters)
        return Measured(
            seen,
            [replace(each, known=counters.get(each.processor), known_lag=lags.get(each.processor)) for each in figures],
            queues,
        )


class _Families:
    """The families of one answer, made as they are needed."""

    def __init__(self) -> None:
        self.made: dict[str, Any] = {}

    def _of(self, name: str) -> Any:
        if name not in self.made:
            from prometheus_client import core

            kind, labels, text = METRICS[name]
            made = getattr(core, f"{kind.capitalize()}MetricFamily")
            self.made[name] = made(name, text, labels=labels)
        return self.made[name]

    def add(self, name: str, value: float | None, *labels: str) -> None:
        """Add a sample, unless there is no value."""
        if value is not None:
            self._of(name).add_metric(labels, value)

    def histogram(self, name: str, counts: Histogram, powers: range, bounds: Callable[[int], float], unit: float,
                  *labels: str) -> None:  # fmt: skip
        counts = counts.copy()
        buckets = [(repr(float(bounds(p))), below) for p, below in zip(powers, counts.below(powers))]
        self._of(name).add_metric(labels, [*buckets, ("+Inf", counts.count)], counts.total * unit)


def families(measured: Measured) -> Iterable[Metric]:
    """The values as metric families of prometheus_client."""
    into, seen = _Families(), measured.seen
    into.add("cues_up", 1)
    for processor in measured.processors:
        _add_processor(into, processor)
    in_store = {queue.queue for queue in seen.queues}
    for name, (messages, ever) in measured.queues.items():
        if name not in in_store:
            into.add("cues_queue_messages", messages, name)
            into.add("cues_queue_appended", ever, name)
    for queue in seen.queues:
        logs = queue.partitions or (queue,)
        into.add("cues_queue_messages", queue.messages, queue.queue)
        into.add("cues_queue_bytes", queue.bytes, queue.queue)
        into.add("cues_queue_appended", sum(log.last for log in logs), queue.queue)
        into.add("cues_queue_removed", sum(log.first - 1 for log in logs), queue.queue)
        appended = None if queue.appended is None else queue.appended.timestamp()
        into.add("cues_queue_last_append_timestamp_seconds", appended, queue.queue)
        into.add("cues_queue_growth_bytes_per_hour", queue.growth_bytes, queue.queue)
        for limit, value in (queue.kept or {}).items():
            into.add("cues_queue_retention", float(value), queue.queue, limit)
    for name in ("used_bytes", "disk_bytes", "map_bytes", "room_bytes"):
        into.add(f"cues_store_{name}", getattr(seen, name))
    into.add("cues_store_full_in_seconds", seen.full_s)
    _add_processes(into, seen)
    for forward in seen.forwards:
        into.add("cues_forward_waiting", forward.waiting, *_labels(processor_of(forward.processor)), forward.store)
    for reader in seen.readers:
        into.add("cues_reader_position", reader.position, reader.processor, reader.store, reader.queue)
    for group in seen.groups:
        into.add("cues_group_lag", group.lag, group.group)
        into.add("cues_group_members", len(group.members), group.group)
        unread = sum(partition.member is None for partition in group.partitions)
        into.add("cues_group_partitions_unread", unread, group.group)
        for member in group.members:
            held = [partition for partition in group.partitions if partition.member == member.member]
            into.add("cues_member_lag", sum(partition.lag for partition in held), group.group, member.member)
            into.add("cues_member_partitions", len(held), group.group, member.member)
    _add_consumers(into, seen)
    return into.made.values()


def _add_consumers(into: _Families, seen: Measurement) -> None:
    """Add the consumers of cues.txn, and pending transactions; two consumers of one name are one."""
    running: dict[str, bool] = {}
    lags: dict[tuple[str, str], int] = {}
    for consumer in seen.consumers:
        running[consumer.consumer] = running.get(consumer.consumer, False) or consumer.pid is not None
        for source in consumer.sources:
            labels = consumer.consumer, names.split_log(source.log)[0]
            lags[labels] = lags.get(labels, 0) + source.lag
    for name, runs in running.items():
        into.add("cues_consumer_running", runs, name)
    for labels, lag in lags.items():
        into.add("cues_consumer_lag", lag, *labels)
    queues: dict[str, list[TransactionMetrics]] = {}
    for pending in seen.transactions:
        queues.setdefault(names.split_log(pending.log)[0], []).append(pending)
    for queue, some in queues.items():
        into.add("cues_transactions_pending", len(some), queue)
        into.add("cues_transactions_pending_messages", sum(pending.messages or 0 for pending in some), queue)
        oldest = min(pending.since for pending in some).timestamp()
        into.add("cues_transactions_oldest_timestamp_seconds", oldest, queue)


def _labels(processor: str) -> tuple[str, str]:
    graph, _, name = processor.partition(".")
    return graph, name


def _add_processor(into: _Families, processor: ProcessorFigures) -> None:
    counters, labels = processor.counters or Counters(), _labels(processor.processor)
    stepped, stop = processor.stepped, processor.stop
    for figure in FIGURES:
        if figure.metric:
            into.add(figure.metric, figure.of(processor), *labels)
    into.add("cues_processor_taken", processor.taken or 0, *labels)
    for name in ("written", "failed", "retries", "steps", "calls"):
        into.add(f"cues_processor_{name}", getattr(counters, name), *labels)
    into.add("cues_processor_call_seconds", counters.calling_ns / 1e9, *labels)
    into.add("cues_processor_calls_in_flight", counters.in_flight, *labels)
    into.add("cues_processor_paused", bool(processor.paused), *labels)
    into.add("cues_processor_away", processor.away is not None, *labels)
    into.add("cues_processor_away_seconds", counters.away_s, *labels)
    into.add("cues_processor_running", processor.is_running or not processor.units, *labels)
    into.add("cues_processor_stopped", stop is not None and not stop.restarted, *labels)
    into.add("cues_processor_last_step_timestamp_seconds", None if stepped is None else stepped.timestamp(), *labels)
    if processor.kind != "source":
        name = "cues_processor_latency_seconds"
        into.histogram(name, counters.latency, _LATENCY_POWERS, lambda power: (1 << power) / 1e6, 1e-6, *labels)
    into.histogram(
        "cues_processor_batch_size", counters.sizes, _SIZE_POWERS, lambda power: (1 << power) - 1, 1, *labels
    )


def _add_processes(into: _Families, seen: Measurement) -> None:
    for process in seen.processes:
        if process.worker:
            into.add("cues_worker_cpu_seconds", process.cpu_s, process.graph, process.worker)
            into.add("cues_worker_memory_bytes", process.memory_bytes, process.graph, process.worker)
        else:
            into.add("cues_process_cpu_seconds", process.cpu_s, str(process.pid))
            into.add("cues_process_memory_bytes", process.memory_bytes, str(process.pid))
    alive = {process.pid for process in seen.processes}
    for supervisor in seen.supervisors:
        for name, worker in supervisor.record.workers.items() if supervisor.alive else ():
            into.add("cues_worker_up", worker.pid in alive, supervisor.record.graph, name)
            into.add("cues_worker_restarts", worker.restarts, supervisor.record.graph, name)


def text(store: Store) -> str:
    """The measurements of a store once, in the text format of Prometheus. Raises :class:`NotInstalled`."""
    _require()
    from prometheus_client.exposition import generate_latest

    return generate_latest(_Collector(lambda: Measured.of_store(store))).decode()


def serve(source: Store | Running, address: str | int = 9464) -> MetricsServer:
    """Answer scrapes of a running graph or of a store, in a thread, until the server, the graph or the store closes.

    ``address`` is a port, or ``"host:port"``; without a host only this machine reaches it. Port 0 is a free one
    (:attr:`MetricsServer.url`). Raises :class:`NotInstalled`, and :class:`InvalidArgument` if the port is taken.
    """
    server = MetricsServer(address)
    server.source = source
    return server


class MetricsServer(Closing):
    """An HTTP server for Prometheus. It begins to answer at once, with ``cues_up 0`` until it has a :attr:`source`."""

    def __init__(self, address: str | int) -> None:
        _require()
        from prometheus_client import make_wsgi_app

        host, port = parse(address)
        self._is_local = is_loopback(host)
        self.source: Store | Running | None = None
        self._scraping = threading.Lock()
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            kind = type("_Server", (_Server,), {"address_family": family})
            self._server: WSGIServer = make_server(host, port, self._answer, kind, _Request)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            what = "the port is in use" if taken else os.strerror(error.errno or 0) or str(error)
            raise InvalidArgument(
                f"The metrics cannot be served at {host}:{port}: {what}.",
                "give another port, or 0 for a free one." if taken else "give an address of this machine.",
            ) from error
        self._answer_metrics = make_wsgi_app(_Collector(self._measured))
        self._thread = threading.Thread(target=self._server.serve_forever, name="cues metrics", daemon=True)
        self._thread.start()
        bound: int = self._server.server_port
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{bound}/metrics"

    @property
    def ready(self) -> bool:
        """True while its graph runs and does not drain, or while its store is open."""
        source = self.source
        return (
            not (source.draining or source.halted or source.stopped)
            if isinstance(source, Running)
            else source is not None
        )

    def _answer(self, environ: dict[str, Any], start: Any) -> Iterable[bytes]:
        """Answer ``/ready`` without a measurement: 200 or 503, for probes of containers. Other paths have metrics.

        On a loopback address another ``Host`` than an address or localhost is refused, as that of the page is.
        """

        def started(status: str, headers: list[tuple[str, str]]) -> Any:
            return start(status, [*headers, ("X-Content-Type-Options", "nosniff"), ("Cache-Control", "no-store")])

        if self._is_local and not is_ours(environ.get("HTTP_HOST", "")):
            status, text = "403 Forbidden", b"Ask for the metrics by the address of this machine, or as localhost.\n"
        elif environ["PATH_INFO"] != "/ready":
            return cast(Iterable[bytes], self._answer_metrics(environ, started))
        else:
            status, text = ("200 OK", b"ready\n") if self.ready else ("503 Service Unavailable", b"not ready\n")
        started(status, [("Content-Type", "text/plain; charset=utf-8")])
        return [text]

    def _measured(self) -> Measured | None:
        source = self.source
        with self._scraping:  # one at a time
            try:
                if isinstance(source, Running):
                    return Measured.of_running(source)
                return None if source is None else Measured.of_store(source)
            except CuesError:  # it was closed, or is damaged; the graph itself says so
                return None

    @override
    def close(self) -> None:
        """End the server. Closing again does nothing."""
        self.source = None
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Request(WSGIRequestHandler):
    """A request, with limits of time. Nothing of it is logged."""

    @override
    def handle(self) -> None:
        self._limit = self._cut_in(HEAD_S)
        try:
            super().handle()
        finally:
            self._limit.cancel()

    @override
    def get_environ(self) -> dict[str, Any]:
        """Called when the head is there."""
        self._limit.cancel()
        self._limit = self._cut_in(_ANSWER_S)
        return super().get_environ()

    def _cut_in(self, seconds: float) -> threading.Timer:
        """End the connection after this time, whatever the client has sent or read until then."""

        def cut() -> None:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)

        timer = threading.Timer(seconds, cut)
        timer.daemon = True
        timer.start()
        return timer

    @override
    def log_message(self, format: str, *args: Any) -> None: ...


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each connection, with a bound on their number."""

    daemon_threads = True

    @override
    def server_activate(self) -> None:
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().server_activate()

    @override
    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread was started, which would release it
            self._room.release()
            raise

    @override
    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    @override
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that left, or was too slow. Errors of a measurement do not get here."""


class _Collector:
    """Measures at each scrape. It stands for a whole registry, so that no other metric of the process is answered."""

    def __init__(self, measure: Callable[[], Measured | None]) -> None:
        self._measure = measure

    def collect(self) -> Iterator[Metric]:
        measured = self._measure()
        if measured is not None:
            yield from families(measured)
            return
        down = _Families()
        down.add("cues_up", 0)
        yield from down.made.values()

    def restricted_registry(self, names: list[str]) -> _Collector:
        return self  # name[]= in a request is not supported: everything is answered


def parse(address: str | int) -> tuple[str, int]:
    """The host and the port of ``9464``, ``:9464``, ``host:9464`` or ``[::1]:9464``."""
    host, _, port = str(address).rpartition(":")
    if not (port.isdecimal() and int(port) < 1 << 16):
        raise InvalidArgument(
            f"{address!r} is not an address to serve metrics at.",
            f"give a port, such as 9464, or host:port, such as {HOST}:9464.",
        )
    return host.removeprefix("[").removesuffix("]") or HOST, int(port)


def _require() -> None:
    package("Metrics for Prometheus need prometheus-client", "metrics", "prometheus_client")
