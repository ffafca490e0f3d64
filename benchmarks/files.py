"""The cost of a row in each format, through a source and through a sink: ``python benchmarks/files.py [ROWS]``.

Prints CPU microseconds a row: of reading files into a queue, and of writing a queue to files, each with its commits.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
import time
from pathlib import Path

import cues
from cues import testing
from cues.processors.file_sink import FileSink
from cues.processors.file_source import Files

ROWS = 50_000


def measured(graph: cues.Graph, store: cues.Store, rows: int) -> float:
    start = time.process_time()
    testing.run_until_idle(graph, store)
    return (time.process_time() - start) * 1e6 / rows


def main(rows: int) -> None:
    formats = ["text", "jsonl", "csv"]
    if importlib.util.find_spec("pyarrow"):
        formats += ["parquet", "arrow"]
    print("| format | sink, µs a row | source, µs a row |\n|---|---|---|")
    for format in formats:
        with tempfile.TemporaryDirectory() as path, testing.temporary_store(map_size=1 << 30) as store:
            message = {"line": "x" * 40} if format == "text" else {"id": 1, "name": "a name", "total": 12.5}
            store.queue("out").appender().write_many([message] * rows)
            out = FileSink(Path(path, "files"), format, durability="process")
            writing = measured(cues.Graph("w", [cues.Source("out", None), out.sink("out", step_s=None)]), store, rows)
            out.finish()
            reading = measured(cues.Graph("r", [cues.Source("in", Files(out.path))]), store, rows)
            assert len(testing.messages(store, "in")) == rows
            print(f"| {format} | {writing:.1f} | {reading:.1f} |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROWS)
