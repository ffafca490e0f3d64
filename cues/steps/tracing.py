"""OpenTelemetry spans of steps, and the trace context in the metadata of messages.

    span        one for each step: from its take to its commit
    parent      the context that all messages of the step carry; if they carry several, the span has links to them
    traceparent, tracestate     the context of the step, under ``q/meta`` of its outputs and error messages

Steps are traced if the process has a tracer provider when the graph starts. Without one, nothing of
OpenTelemetry is imported, and a step pays two comparisons.
(W3C Trace Context, https://www.w3.org/TR/trace-context/; OpenTelemetry semantic conventions for messaging)
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Protocol

from cues.base import names
from cues.imported import loaded

if TYPE_CHECKING:
    from cues.graphs.processor import Node
    from cues.steps.taking import Taken

LINKS_MAX: Final = 128
"""The most links of a span, as in the defaults of the OpenTelemetry SDK."""
_STATE_CHARACTERS_MAX: Final = 512
"""The longest ``tracestate`` that is passed on, which W3C asks for at least."""

Context = dict[str, str]


def tracer() -> Tracer | None:
    """Return the tracer of steps; None if the process has no tracer provider."""
    provider_of = loaded("opentelemetry.trace", "get_tracer_provider")  # who has set a provider has imported it
    if provider_of is None:
        return None
    api, provider = sys.modules["opentelemetry.trace"], provider_of()
    return None if isinstance(provider, (api.ProxyTracerProvider, api.NoOpTracerProvider)) else Tracer(provider)


def flush(timeout_s: float = 5.0) -> None:
    """Export the spans that have ended, before a process ends without its exit handlers."""
    provider_of = loaded("opentelemetry.trace", "get_tracer_provider")
    export = getattr(provider_of(), "force_flush", None) if provider_of is not None else None
    if export is not None:
        with contextlib.suppress(Exception):  # an exporter of the user must not keep the process
            export(round(timeout_s * 1000))


class StepSpan:
    """The span of the step under way."""

    def __init__(self, span: Any, context: Context | None) -> None:
        self._span = span
        self.context = context
        """The entries for the metadata of the step's outputs; None if the span has no valid identity."""

    def committed(self, hashes: list[str], written: int, failed: int) -> None:
        """Note the commit: the hash of each part, and the numbers of its outputs and of its failed messages."""
        self._span.set_attributes(
            {
                "cues.committed": True,
                "cues.step.hashes": hashes,
                "cues.messages.out": written,
                "cues.messages.failed": failed,
            }
        )


class Traced(Protocol):
    """The commits of a stepper, as its tracer uses them."""

    node: Node
    span: StepSpan | None


class Tracer:
    """Makes the spans of steps."""

    def __init__(self, provider: Any) -> None:
        from opentelemetry import trace
        from opentelemetry.context import Context as Ambient
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = provider.get_tracer("cues")
        self._trace: Any = trace
        self._propagator = TraceContextTextMapPropagator()
        self._root = Ambient()

    @contextlib.contextmanager
    def step(self, commits: Traced, count: int, taken: Taken | None = None) -> Iterator[None]:
        """The span of a step of ``count`` messages, which is the current one inside the block.

        ``taken`` gets the context for the outputs. A step that ends without a commit has ``cues.committed`` false, and
        the status and the exception of what stopped it.
        """
        node = commits.node
        operation = "process" if taken is not None else "publish"
        attributes: dict[str, Any] = {
            "messaging.system": "cues",
            "messaging.operation.name": operation,
            "messaging.operation.type": "process" if taken is not None else "send",
            "messaging.batch.message_count": count,
            "cues.processor": node.id,
            "cues.partition": node.partition,
            "cues.messages.in": count * len(taken.slices) if taken is not None else count,
            "cues.committed": False,
        }
        headers: list[tuple[str, str] | None] = []
        if taken is not None:
            attributes["cues.queues.in"] = [piece.input.log.id for piece in taken.slices]
            attributes["cues.repeated"] = taken.hash is not None
            headers = _headers(taken)
        parent, links = self._root, []
        if len(headers) == 1 and headers[0] is not None:
            parent = self._extract(headers[0])
        else:
            for header in headers:
                context = self._trace.get_current_span(self._extract(header)).get_span_context() if header else None
                if context is not None and context.is_valid:
                    links.append(self._trace.Link(context))
        kind = self._trace.SpanKind.CONSUMER if taken is not None else self._trace.SpanKind.PRODUCER
        span = self._tracer.start_span(
            f"{operation} {node.id}", context=parent, kind=kind, attributes=attributes, links=links[:LINKS_MAX]
        )
        context = {}
        self._propagator.inject(context, self._trace.set_span_in_context(span, self._root))
        commits.span = StepSpan(span, context or None)
        if taken is not None:
            taken.context = commits.span.context
        try:
            with self._trace.use_span(span, end_on_exit=True):
                yield
        finally:
            commits.span = None

    def _extract(self, header: tuple[str, str]) -> Any:
        return self._propagator.extract(dict(zip(names.TRACE_CONTEXT, header)), self._root)


def _headers(taken: Taken) -> list[tuple[str, str] | None]:
    """Return the distinct contexts that the messages of a step carry; None stands for messages without one."""
    slices = taken.slices
    parts = [taken.provenance()] if len(slices) == 1 else [piece.provenance() for piece in slices]
    distinct: dict[tuple[str, str] | None, None] = {}
    for part in parts:
        for extra in part.extra if isinstance(part.extra, list) else [part.extra]:
            distinct[_header(extra)] = None
    return list(distinct)


def _header(extra: dict[str, Any] | None) -> tuple[str, str] | None:
    parent, state = map(extra.get, names.TRACE_CONTEXT) if extra else (None, None)
    if type(parent) is not str:
        return None
    return parent, state if type(state) is str and len(state) <= _STATE_CHARACTERS_MAX else ""
