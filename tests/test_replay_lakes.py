"""cues replay and cues redrive with tables in files: a Delta table is the source, one of Delta or Iceberg the target.

Each row is in the target once: after failed messages were redriven, also by a process that died in the middle, and
after a replay, which neither calls the source nor writes to the target.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from children import Child

import cues
from cues import testing
from cues.errors import Diverged
from cues.processors.delta import DeltaTarget
from cues.processors.delta_source import DeltaSource
from cues.processors.iceberg import IcebergTarget

deltalake = pytest.importorskip("deltalake")
pytestmark = pytest.mark.slow

N = pa.schema({"n": pa.int64()})
KINDS = ("delta", "iceberg")


def add(home: Path, *numbers: int) -> None:
    deltalake.write_deltalake(home / "in", pa.table({"n": list(numbers)}), mode="append")


def target_of(kind: str, home: Path) -> Any:
    if kind == "delta":
        return DeltaTarget(str(home / "out"), schema=N)
    pytest.importorskip("pyiceberg")
    lake = {"type": "sql", "uri": f"sqlite:///{home}/catalog.db", "warehouse": f"file://{home}"}
    return IcebergTarget("lake.t", catalog=lake, schema=N)


def rows(kind: str, home: Path) -> list[int]:
    table = target_of(kind, home).open()
    read = table.to_pyarrow_table() if kind == "delta" else table.scan().to_arrow()
    return sorted(read.column("n").to_pylist())


def graph(kind: str, home: Path, *, wrong: bool) -> cues.Graph:
    """The wrong code fails for two numbers in the stream, and for two others in the sink."""

    def check(row: dict[str, Any]) -> dict[str, Any]:
        if wrong and row["n"] % 5 == 3:
            raise ValueError("three")
        return row

    def save(row: dict[str, Any], process: cues.Process) -> None:
        if wrong and row["n"] % 5 == 4:
            raise ValueError("four")
        process.connection.write(row)

    made = cues.Graph("g", store=home / "old", errors="errors", durability="process")
    made.add(cues.Source("rows", DeltaSource(str(home / "in"))))
    made.add(cues.Stream(check, "rows", "checked", id="check"))
    made.add(cues.Sink(save, "checked", id="save", checkpoint=target_of(kind, home)))
    return made


def finish(kind: str, home: str) -> None:
    """Redrive everything with the right code, and do what is new."""
    made = graph(kind, Path(home), wrong=False)
    cues.redrive(made, all=True)
    testing.run_until_idle(made)


@pytest.fixture
def home(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    add(tmp_path, *range(5))
    add(tmp_path, *range(5, 10))
    testing.run_until_idle(graph(request.getfixturevalue("kind"), tmp_path, wrong=True))
    assert rows(request.getfixturevalue("kind"), tmp_path) == [0, 1, 2, 5, 6, 7]
    return tmp_path


@pytest.mark.parametrize("kind", KINDS)
def test_redriven_messages_and_those_of_a_replay_are_in_the_table_once(kind: str, home: Path) -> None:
    for _ in range(2):  # the second redrive finds nothing
        finish(kind, str(home))
        assert rows(kind, home) == [*range(10)]
    right = graph(kind, home, wrong=False)
    report = cues.replay(right, into=home / "new")
    assert not report.equal  # of the old outputs, some came later, by the redrive
    assert sorted(row["n"] for row in messages(home / "new", "checked")) == [*range(10)]
    assert rows(kind, home) == [*range(10)]  # a replay runs no sink
    add(home, 10, 11)
    with pytest.raises(cues.CuesError) as refused:  # nor does a replay with sinks write each row again
        cues.replay(right, into=home / "sinks", with_sinks=True)
    assert "Diverged" in repr(refused.value.__cause__) + repr(refused.value), refused.value
    assert rows(kind, home) == [*range(10)]
    with pytest.raises(cues.errors.ProcessorStopped) as stopped:
        testing.run_until_idle(right, home / "new")
    assert isinstance(stopped.value.__cause__, Diverged)
    assert sorted(row["n"] for row in messages(home / "new", "rows")) == [*range(12)]  # from its position
    assert rows(kind, home) == [*range(10)]
    testing.run_until_idle(right)  # the old store was only read
    assert rows(kind, home) == [*range(12)]


def messages(store: Path, queue: str) -> list[dict[str, Any]]:
    with cues.open(store) as opened:
        return list(testing.messages(opened, queue))


@pytest.mark.parametrize("point", ["checkpoint.inside", "checkpoint.after", "commit.after"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_redrive_that_dies_leaves_each_row_once(kind: str, point: str, home: Path) -> None:
    code = "import sys; from test_replay_lakes import finish; finish(*sys.argv[1:])"
    with Child(code, kind, home, CUES_FAULT=f"{point}:1") as child:
        assert child.returncode() == -signal.SIGKILL, child.errors()
    finish(kind, str(home))
    assert rows(kind, home) == [*range(10)]
