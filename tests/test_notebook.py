"""What a notebook shows, and queues as tables."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

import cues
from cues.errors import InvalidArgument, SchemaError

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install 'cues-streams[test]')")

EVIL = '<script>alert("1")</script>'


def shop() -> cues.Graph:
    graph = cues.Graph("shop", errors="errors")
    graph.source("orders")
    graph.add(cues.Stream(lambda order: order, "orders", "priced", id="price"))
    graph.add(cues.Sink(lambda order: None, "priced", id="save"))
    return graph


def texts(html: str) -> list[str]:
    """The texts of all elements; the HTML must be well-formed."""
    return [text for text in ET.fromstring(html).itertext() if text.strip()]


def test_a_graph_is_a_picture_of_its_processors_and_queues() -> None:
    html = shop()._repr_html_()
    for name in ("orders", "price", "priced", "save"):
        assert name in texts(html)
    lines = re.findall(r"<polyline", html)
    assert len(lines) == 3, "orders → price → priced → save"
    assert "<script" not in html and "http://www.w3.org/2000/svg" in html


def test_a_queue_is_a_table_of_its_last_messages(store: cues.Store) -> None:
    queue = store.queue("a")
    queue.appender().write_many([{"n": n} for n in range(100)])
    queue.appender().write({"n": 100, "name": EVIL, "deep": [[[1]]], "bytes": b"\0", "turned": "a\u202eb", 5: "five"})
    html = queue._repr_html_()
    shown = texts(html)
    assert "a: 101 messages, the last 10" in shown
    assert EVIL in shown and "<script" not in html, "it is text, not markup"
    assert "a\\u202eb" in shown and "five" in shown
    assert [n for n in ("91", "100") if n in shown] and "90" not in shown


def test_a_queue_of_strange_messages_is_cut(store: cues.Store) -> None:
    queue = store.queue("a")
    queue.appender().write({"long": "x" * 100_000, **{f"field {n}": n for n in range(200)}})
    html = queue._repr_html_()
    assert len(html) < 10_000
    assert "181 more fields" in html and "x" * 79 + "…" in html


def test_an_empty_queue_and_one_of_partitions(store: cues.Store) -> None:
    assert "a: 0 messages" in store.queue("a")._repr_html_()
    queue = store.queue("b", partitions=3, key="k")
    queue.appender().write_many([{"k": str(n)} for n in range(9)])
    shown = texts(queue._repr_html_())
    assert "partition" in shown and "b: 9 messages" in shown


def test_a_run_is_a_table_of_its_processors(store: cues.Store) -> None:
    with shop().start(store=store) as running:
        running.send("orders", {"n": 1})
        running.wait_idle()
        shown = texts(running._repr_html_())
        assert "shop: idle" in shown and "shop.price" in shown and "1 of 1" in shown
    assert "shop: closed" in running._repr_html_()


def test_messages_as_arrow_and_pandas(store: cues.Store) -> None:
    queue = store.queue("a")
    queue.appender().write_many([{"n": n, "name": f"m{n}"} for n in range(10)])
    assert queue.to_arrow().to_pylist() == [{"n": n, "name": f"m{n}"} for n in range(10)]
    part = queue.to_arrow(3, 6, metadata=True)
    assert part.column_names == ["q/partition", "q/index", "q/time", "n", "name"]
    assert part["q/index"].to_pylist() == [3, 4, 5] and part["n"].to_pylist() == [2, 3, 4]
    frame = queue.to_pandas(stop=3)
    assert frame["n"].tolist() == [0, 1] and str(frame["n"].dtype) == "Int64"
    later = datetime.now(UTC) + timedelta(hours=1)
    assert queue.to_arrow(later).num_rows == 0 and queue.to_arrow(stop=later).num_rows == 10
    assert queue.to_arrow(schema=pa.schema([("n", pa.int8())])).schema.names == ["n"]


def test_partitions_are_merged_by_time_and_have_no_common_index(store: cues.Store) -> None:
    queue = store.queue("a", partitions=4, key="k")
    for n in range(20):
        queue.appender().write({"k": str(n), "n": n})
    assert queue.to_arrow()["n"].to_pylist() == list(range(20))
    with pytest.raises(InvalidArgument, match=r"4 partitions, each with indices of its own"):
        queue.to_arrow(3)
    view = queue.partition(2)
    assert view.to_arrow(1, 2, metadata=True)["q/partition"].to_pylist() == [2]


def test_a_value_that_does_not_fit_its_column_is_named(store: cues.Store) -> None:
    queue = store.queue("a")
    queue.appender().write_many([{"n": 1}, {"n": "two"}])
    with pytest.raises(SchemaError, match=r"\$\[1\]\.n: .*'two'"):
        queue.to_arrow()


@pytest.mark.slow
def test_in_a_real_notebook_a_cell_that_waits_shows_the_run(tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (pip install 'cues-streams[test]')")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (pip install 'cues-streams[test]')")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed (pip install 'cues-streams[test]')")
    cells = [
        "import time, cues\n"
        "graph = cues.Graph('shop', store='shop', durability='process')\n"
        "graph.source('orders')\n"
        "graph.add(cues.Stream(lambda order: time.sleep(0.05) or order, 'orders', 'priced', id='price', step_s=0.1))\n"
        "graph",
        "with graph.start() as running:\n"
        "    for n in range(20):\n"
        "        running.send('orders', {'n': n})\n"
        "    running.wait_idle()\n",
        "with cues.open('shop') as store:\n    display(store.queue('priced'))",
    ]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    updates: list[Any] = []

    class Client(nbclient.NotebookClient):  # type: ignore[misc, name-defined]
        def process_message(self, message: Any, cell: Any, cell_index: int) -> Any:
            if message["msg_type"] == "update_display_data":
                updates.append(message["content"]["data"]["text/html"])
            return super().process_message(message, cell, cell_index)

    Client(book, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    picture, run, queue = ([output["data"]["text/html"] for output in cell["outputs"]] for cell in book.cells)
    assert "<svg" in picture[0]
    assert "shop.price" in run[0] and "20" in updates[-1] and "shop: idle" in updates[-1]
    assert "20 of 20" in texts(updates[-1]) and any("20 of 20" not in texts(each) for each in updates)
    assert "priced: 20 messages" in queue[0]


@pytest.mark.slow
def test_the_page_of_notebooks_runs_in_one(tmp_path: Path) -> None:
    """Its blocks are cells, the first one cut where its comments say so; and run_until_idle shows its progress."""
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed (pip install 'cues-streams[test]')")
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed (pip install 'cues-streams[test]')")
    pytest.importorskip("ipykernel", reason="ipykernel is not installed (pip install 'cues-streams[test]')")
    page = (Path(__file__).parent.parent / "docs" / "how-to" / "notebooks.md").read_text()
    first, *others = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    cells = [*re.split(r"\n\n(?=[^\n]*# in the next cell)", first), *others]
    assert len(cells) == 4
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(book, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    picture, run, tested, table = ("".join(map(str, cell["outputs"])) for cell in book.cells)
    assert "<svg" in picture and "shop.price" in run and "<progress" in run
    assert "shop: run until idle" in tested and "3 of 3" in tested
    assert "1 ['q/partition', 'q/index', 'q/time', 'count', 'price', 'total']" in table
