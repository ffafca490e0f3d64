"""Spans of steps, and the trace context that messages carry from one step to the next."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import terminal
from small import run

from cues import Sink, Store, Stream
from cues.errors import ProcessorStopped

pytest.importorskip("opentelemetry.sdk", reason="needs the extra traces")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
OTHER = "00-1af7651916cd43dd8448eb211c80319d-c7ad6b7169203332-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    yield exporter
    provider.shutdown()


def same(message: dict[str, Any]) -> dict[str, Any]:
    return message


def ignored(message: dict[str, Any]) -> None:
    pass


def sent(store: Store, *parents: Any) -> None:
    with store.queue("a").appender() as appender:
        for n, parent in enumerate(parents):
            appender.write({"n": n} | ({"q/meta": {"traceparent": parent}} if parent is not None else {}))


def traceparent(span: Any) -> str:
    return f"00-{span.context.trace_id:032x}-{span.context.span_id:016x}-{span.context.trace_flags:02x}"


def test_a_step_continues_the_trace_of_its_message_and_its_output_carries_the_step(
    store: Store, spans: InMemorySpanExporter
) -> None:
    sent(store, PARENT)
    run(store, Stream(same, "a", "b"), Sink(ignored, "b"))
    first, second = spans.get_finished_spans()
    assert first.parent is not None and f"{first.parent.span_id:016x}" in PARENT
    assert second.parent is not None and second.parent.span_id == first.context.span_id
    assert first.context.trace_id == second.context.trace_id == int(PARENT.split("-")[1], 16)
    (message,) = store.queue("b").tailer(meta=True)
    assert message["q/meta"]["traceparent"] == traceparent(first)
    assert first.attributes is not None and first.attributes["cues.committed"] is True
    assert first.attributes["cues.step.hashes"] == (message["q/meta"]["q/hash"],)
    assert (first.attributes["cues.messages.in"], first.attributes["cues.messages.out"]) == (1, 1)


def test_a_step_over_several_contexts_has_links_to_them_and_a_malformed_one_is_left_out(
    store: Store, spans: InMemorySpanExporter
) -> None:
    sent(store, PARENT, OTHER, "nonsense", 7, None)
    run(store, Stream(same, "a", "b", batch_size=8))
    (span,) = spans.get_finished_spans()
    assert span.parent is None
    assert [f"{link.context.trace_id:032x}" for link in span.links] == [PARENT.split("-")[1], OTHER.split("-")[1]]
    assert {m["q/meta"]["traceparent"] for m in store.queue("b").tailer(meta=True)} == {traceparent(span)}


def test_the_span_of_a_step_that_did_not_commit_says_so(store: Store, spans: InMemorySpanExporter) -> None:
    def fails(message: dict[str, Any]) -> None:
        raise ValueError("no")

    sent(store, PARENT)
    with pytest.raises(ProcessorStopped):
        run(store, Stream(fails, "a", "b"))
    (span,) = spans.get_finished_spans()
    assert span.attributes is not None and span.attributes["cues.committed"] is False
    assert span.status.status_code is trace.StatusCode.ERROR


def test_without_a_provider_the_context_passes_through_unchanged(store: Store) -> None:
    sent(store, PARENT)
    run(store, Stream(same, "a", "b"))
    (message,) = store.queue("b").tailer(meta=True)
    assert message["q/meta"]["traceparent"] == PARENT


GRAPH_WITH_SPANS = """
import os
from pathlib import Path

import cues
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult


class Lines(SpanExporter):
    def export(self, spans):
        with open(Path(__file__).with_name("spans.txt"), "a") as file:
            file.writelines(f"{span.name} {os.getpid()} {span.attributes['cues.committed']}\\n" for span in spans)
        return SpanExportResult.SUCCESS

    def shutdown(self):
        pass


provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(Lines()))
trace.set_tracer_provider(provider)

graph = cues.Graph("g", durability="process")


@graph.source("numbers", resume="skip")
def count():
    for n in range(10):
        yield {"n": n}


@graph.stream("numbers", "doubled")
def double(message):
    return {"n": message["n"] * 2}


@graph.sink("doubled")
def save(message): ...
"""


@pytest.mark.slow
def test_each_worker_exports_its_own_spans(tmp_path: Path) -> None:
    """The spans wait in the exporter of each process, and its end exports them."""
    (tmp_path / "graph.py").write_text(GRAPH_WITH_SPANS)
    result = terminal.cues("run", tmp_path / "graph.py", "--workers", "2")
    assert result.code == 0, result.err
    lines = [line.rsplit(" ", 2) for line in (tmp_path / "spans.txt").read_text().splitlines()]
    assert {name for name, _, _ in lines} == {"publish g.numbers", "process g.double", "process g.save"}
    assert all(committed == "True" for _, _, committed in lines)
    assert len({process for _, process, _ in lines}) == 2
