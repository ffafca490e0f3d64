"""Pipelines of tables from files into files, killed with SIGKILL at any time: nothing is lost, doubled or reordered.

A run kills itself soon after its graph is loaded, or soon after its first step. A step takes at least ``STEP_S``, so no
run does many of the 60 steps, and a fast machine is killed as often as a slow one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import pytest
import seeds

KILLS = 25
ROWS = 30_000
STEP_S = 0.02
GRAPH = """
import os
import signal
import threading
import time

import pyarrow as pa
import pyarrow.compute as pc
import cues
from cues.processors import blocks, opened_file
from cues.processors.file_sink import FileSink
from cues.processors.file_source import Files

blocks.BLOCK_BYTES = 4_096
blocks.ROWS_MIN = 1
opened_file._BLOCK_ROWS = 200

def kill_after(seconds):
    if seconds is not None:
        threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL)).start()


kill_after(os.environ.pop("KILL_AFTER_LOAD", None))
graph = cues.Graph("g", errors="errors")
graph.add(cues.Source("rows", Files("in/*", schema=None if KIND == "parquet" else "infer")))


@graph.stream("rows", "out", batch="arrow", batch_size=500, id="double")
def double(rows):
    kill_after(os.environ.pop("KILL_AFTER_STEP", None))
    time.sleep(STEP_S)
    rows = rows.filter(pc.not_equal(rows["n"], 7)).append_column("twice", pc.multiply(rows["n"], 2))
    return rows.append_column("part", pc.divide(rows["n"], 3_000))


graph.add(FileSink("parquet", "parquet", roll_bytes=60_000, durability="process").sink("out", id="p", batch_size=700))
graph.add(
    FileSink("parts", "parquet", partition_by="part", open_files_max=2, roll_bytes=30_000, durability="process").sink(
        "out", id="parts", batch_size=900
    )
)
graph.add(FileSink("csv", "csv", roll_bytes=60_000, durability="process").sink("out", id="c", batch_size=300))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_killed_at_any_time(kind: str, tmp_path: Path) -> None:
    dice = random.Random(seeds.new())
    (tmp_path / "graph.py").write_text(GRAPH.replace("KIND", repr(kind)).replace("STEP_S", repr(STEP_S)))
    (tmp_path / "in").mkdir()
    table = pa.table({"n": range(ROWS), "name": [f"x{n}" if n % 5 else 'a "b", c' for n in range(ROWS)]})
    for number, at in enumerate(range(0, ROWS, 7_000)):
        part = table.slice(at, 7_000)
        if kind == "csv":
            arrow_csv.write_csv(part, tmp_path / f"in/{number}.csv")
        elif kind == "jsonl":
            (tmp_path / f"in/{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part.to_pylist()))
        else:
            pq.write_table(part, tmp_path / f"in/{number}.parquet", row_group_size=1_500)
    cues = str(Path(sys.executable).with_name("cues"))
    command = [cues, "run", "graph.py", "--store", "store", "--durability", "process"]
    kills = 0
    while True:
        kill = {"KILL_AFTER_STEP" if kills % 2 else "KILL_AFTER_LOAD": str(6 * STEP_S * dice.random())}
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=os.environ | (kill if kills < KILLS else {}),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        said = process.communicate(timeout=120)[1]
        if process.returncode == 0:
            break
        assert process.returncode == -signal.SIGKILL, said.decode()
        kills += 1
    assert kills >= 5, "it ended before it was killed often enough"
    expected = [n for n in range(ROWS) if n != 7]
    found = [
        row for path in sorted((tmp_path / "parquet").glob("*.parquet")) for row in pq.read_table(path).to_pylist()
    ]
    assert [row["n"] for row in found] == expected
    assert all(row["twice"] == 2 * row["n"] for row in found)
    names = {row["n"]: row["name"] for row in found}
    assert names[5] == 'a "b", c' and names[6] == "x6"
    lines = pa.concat_tables([arrow_csv.read_csv(path) for path in sorted((tmp_path / "csv").glob("*.csv"))])
    assert lines["n"].to_pylist() == expected and lines["name"].to_pylist() == [names[n] for n in expected]
    parts = pa.concat_tables(
        [
            pq.ParquetFile(path)
            .read()
            .append_column("part", pa.array([path.parent.name] * pq.read_metadata(path).num_rows))
            for path in sorted((tmp_path / "parts").rglob("*.parquet"))
        ]
    )
    assert parts["n"].to_pylist() == expected
    assert parts["part"].to_pylist() == [f"part={n // 3_000}" for n in expected]
