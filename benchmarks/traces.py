"""The cost of OpenTelemetry spans: ``python benchmarks/traces.py [ROUNDS]``.

CPU microseconds a message, in steps of one message (the dearest case) and in usual steps. *Off* is a process without a
tracer provider; *on* has one, with a batch processor and an exporter that drops what it is given. Both run in turns,
each in a process of its own; a ratio is the median over the rounds.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

CASES = {"steps of one": (1, 20_000), "usual steps": (1000, 500_000)}


def once(traced: bool, batch_size: int, count: int) -> float:
    """The CPU time of a message, in this process."""
    if traced:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

        class Nowhere(SpanExporter):
            def export(self, spans: Sequence[Any]) -> SpanExportResult:
                return SpanExportResult.SUCCESS

        provider = TracerProvider()
        provider.add_span_processor(BatchSpanProcessor(Nowhere()))
        trace.set_tracer_provider(provider)
    import cues
    from cues import testing

    graph = cues.Graph("traced", [cues.Source("in"), cues.Stream(dict, "in", "out", id="s", batch_size=batch_size)])
    with testing.temporary_store(map_size=4 << 30) as store:
        appender = store.queue("in").appender()
        for start in range(0, count, 1000):
            appender.write_many([{"n": n, "name": "flight"} for n in range(start, start + 1000)])
        began = time.process_time()
        testing.run_until_idle(graph, store)
        return (time.process_time() - began) / count * 1e6


def main() -> None:
    if sys.argv[1:2] == ["--once"]:
        print(once(sys.argv[2] == "on", *map(int, sys.argv[3:])))
        return
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    print("| | off, CPU \u00b5s a message | on | on / off |\n|---|---|---|---|")
    for name, sizes in CASES.items():
        taken: dict[str, list[float]] = {"off": [], "on": []}
        for number in range(rounds):
            for mode in ("off", "on") if number % 2 else ("on", "off"):
                command = [sys.executable, __file__, "--once", mode, *map(str, sizes)]
                taken[mode].append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
        ratio = statistics.median(on / off for on, off in zip(taken["on"], taken["off"]))
        off, on = (statistics.median(taken[mode]) for mode in ("off", "on"))
        print(f"| {name} | {off:.2f} | {on:.2f} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
