"""Older versions of Spark, as clusters have them: each is installed into an environment of its own, and runs a graph.

CUES_SPARKS="4.0 4.1" pytest -m long tests/test_spark_versions.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import cues

VERSIONS = os.environ.get("CUES_SPARKS", "4.0 4.1").split()

GRAPH = """
import cues

COUNT = 3000
graph = cues.Graph("g", errors="errors")


@graph.source("in")
def numbers(position):
    for n in range(position or 0, COUNT):
        yield n + 1, {"n": n, "user": f"u{n % 7}"}


@graph.stream("in", "squares")
def square(message):
    if message["n"] == 1700:
        raise ValueError("1700")
    return {**message, "square": message["n"] ** 2}


@graph.stream("squares", "batches", batch=True, batch_size=100)
def batches(messages):
    return [{"n": message["n"], "size": len(messages)} for message in messages]


@graph.stream("squares", "counts", key="user")
def counts(message, process):
    count = process.state.get(message["user"], 0) + 1
    process.state[message["user"]] = count
    return {"user": message["user"], "count": count}


@graph.frame("squares", "even")
def even(squares):
    return squares.where("index % 2 = 0").selectExpr("index as place", "value")
"""

FORMAT = """
import sys
import cues.spark
from cues.errors import CuesError

with cues.spark.session("local[2]") as spark:
    table = spark.read.format("cues").option("fields", "n bigint").load("s#squares")
    print("rows", table.count(), "sum", table.groupBy().sum("n").first()[0])
    table.selectExpr("n as m").write.format("cues").mode("append").save("s2#out")
    try:
        stream = spark.readStream.format("cues").load("s#squares")
        stream.writeStream.format("noop").option("checkpointLocation", "c").start().awaitTermination()
    except Exception as error:
        print("refused" if "needs Spark 4.2 or newer" in str(error) else error)
"""


def python_of(version: str, folder: Path) -> Path:
    """An environment with this version of pyspark before the packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, f"pyspark=={version}.*"], check=True, timeout=600)
    (site,) = (folder / "lib").glob("python*/site-packages")
    here = [str(Path(cues.__file__).parents[1]), *(path for path in sys.path if path.endswith("site-packages"))]
    (site / "others.pth").write_text("\n".join(here) + "\n")
    return python


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_graph_runs_on_this_version_of_spark(version: str, tmp_path: Path) -> None:
    python = python_of(version, tmp_path / "venv")
    environment = {**os.environ, "PYSPARK_PYTHON": str(python), "PYSPARK_DRIVER_PYTHON": str(python)}

    def ran(*arguments: str) -> str:
        done = subprocess.run(
            [python, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        return done.stdout

    found = ran("-c", "import pyspark; print(pyspark.__version__)")
    assert found.startswith(version)
    (tmp_path / "graph.py").write_text(GRAPH)
    (tmp_path / "format.py").write_text(FORMAT)
    ran("-m", "cues", "run", "graph.py", "--store", "s", "--engine", "spark")
    ran("-m", "cues", "run", "graph.py", "--store", "d", "--engine", "spark", "--queues", "q")
    (tmp_path / "plain.py").write_text(GRAPH.partition("@graph.frame")[0])
    ran("-m", "cues", "run", "plain.py", "--store", "embedded")
    for queue in ("squares", "counts", "batches"):
        whole = ran("-m", "cues", "tail", f"embedded#{queue}", "-n", "all").splitlines()
        assert len(whole) >= 2999
        for other in (f"s#{queue}", f"q#{queue}"):
            lines = ran("-m", "cues", "tail", other, "-n", "all").splitlines()
            assert len(lines) == len(whole), (queue, other)
    assert len(ran("-m", "cues", "tail", "q#even", "-n", "all").splitlines()) == 1499
    said = ran("format.py")
    assert f"rows 2999 sum {sum(range(3000)) - 1700}" in said and "refused" in said


def test_a_stream_is_refused_by_name_on_an_older_spark(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
    from cues.spark.datasource import CuesSource
    from cues.spark.reading import ROW

    with cues.open(tmp_path / "s", durability="process") as store:
        store.queue("out").appender().write({"n": 1})
    monkeypatch.setitem(sys.modules, "pyspark.sql.streaming.datasource", None)
    stream = CuesSource({"path": f"{tmp_path / 's'}#out"}).streamReader(ROW)
    for look in (stream.initialOffset, stream.latestOffset):
        with pytest.raises(cues.CuesError, match=r"needs Spark 4\.2 or newer"):
            look()
