"""The format cues through Spark Connect: the client has no Java, and the server is another process."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from children import Child

import cues

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
pytest.importorskip("grpc", reason="Spark Connect is not installed (pip install 'cues-streams[test]')")

from ports import free_port
from spark_cluster import connect_server

pytestmark = pytest.mark.timeout(300)

CLIENT = """
import json, sys
import cues, cues.spark
from cues.errors import Unsupported

url, folder = sys.argv[1:]
place = f"{folder}/store#orders"
with cues.spark.session(url) as spark:
    orders = spark.read.format("cues").option("fields", "k bigint").load(place)
    facts = {"sum": orders.groupBy().sum("k").first()[0], "tasks": orders.select("index").count()}
    for _ in range(2):  # exactly once by id, start and end
        chosen = orders.where("index < 5").select("k").write.format("cues").mode("append")
        chosen.options(id="copy", start="0", end="4").save(f"{folder}/store#batch")
    copied = spark.readStream.format("cues").load(place).writeStream.format("cues").option("id", "stream")
    query = copied.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
    query.start(f"{folder}/store#streamed").awaitTermination()
    graph = cues.Graph("g", store=f"{folder}/graph")
    graph.source("orders")
    try:
        graph.start(engine="spark", spark=spark)
    except Unsupported as error:
        facts["refused"] = str(error)
print(json.dumps(facts))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with connect_server() as url:
        yield url


def test_queues_through_spark_connect(server: str, tmp_path: Path) -> None:
    """A batch read, a batch write that is repeated, and a stream. A graph needs a driver of its own, and says so."""
    store = tmp_path / "store"
    with cues.open(store, durability="process") as opened:
        opened.queue("orders").appender().write_many([{"k": n} for n in range(10)])
        for name in ("batch", "streamed"):
            opened.queue(name)
    child = Child(CLIENT, server, tmp_path, JAVA_HOME="/nowhere")
    facts = json.loads(child.end(180))
    assert (facts["sum"], facts["tasks"]) == (45, 10)
    assert "Spark Connect" in facts["refused"] and "Try: use a master" in facts["refused"]
    with cues.open(store, readonly=True) as opened:
        assert [message["k"] for message in opened.queue("batch").tailer()] == [0, 1, 2, 3]
        assert list(opened.queue("streamed").tailer()) == list(opened.queue("orders").tailer())


def test_a_server_that_does_not_answer_is_named() -> None:
    url = f"sc://127.0.0.1:{free_port()}"
    code = f"import cues.spark; cues.spark.session({url!r}).__enter__()"  # a process without another session
    assert f"Unsupported: No Spark Connect server answers at {url}" in Child(code).errors()
