"""The pictures of a graph: every processor, its guarantee, its queues, and where messages go round."""

from __future__ import annotations

from pathlib import Path

import pytest

import cues
from cues.cli import app
from cues.graphs import draw

ROOT = Path(__file__).parents[1]


def keep(message):  # type: ignore[no-untyped-def]
    return message


def joined(left, right):  # type: ignore[no-untyped-def]
    return left


def take(message):  # type: ignore[no-untyped-def]
    return None


def shop() -> cues.Graph:
    return cues.Graph(
        "shop",
        [
            cues.Stream(keep, cues.AnyOf("priced", old="archive"), {"x": "x", "more": "y"}, id="merge", where=bool),
            cues.Source("orders"),
            cues.Stream(joined, {"left": "orders", "right": "rates"}, "priced", id="price", retries=2, key="id"),
            cues.Sink(take, "x", id="save", strategy="at-most-once", errors=None, batch=True),
        ],
        errors="errors",
    )


def test_the_text_says_everything_of_every_processor() -> None:
    assert (
        draw.text(shop().plan())
        == """\
shop: 1 source, 2 streams, 1 sink; 7 queues; failures are written to errors

  source  orders   → orders
                   each send is one commit
  stream  price    orders as left + rates as right → priced
                   exactly-once · state by id · up to 3 attempts
  stream  merge    priced | archive as old → x, y as more
                   exactly-once · filtered by where
  sink    save     x
                   at-most-once: a death loses at most one step · in batches of up to 1,000 · an error stops it

  Fed from outside (cues send): archive, orders, rates
  Read by no processor: y, errors
  Retention of priced, x: those of the last 7 d, and messages that a reader has not read
  a + b: one message from each
  a | b: one message from any"""
    )


def test_a_cycle_is_named_with_its_queues() -> None:
    graph = cues.Graph(
        "ring",
        [
            cues.Stream(keep, "c", "a", id="third"),
            cues.Stream(keep, "a", "b", id="first"),
            cues.Stream(keep, "b", "c", id="second"),
            cues.Stream(keep, "b", "out", id="leaves"),
        ],
    )
    text = draw.text(graph.plan())
    assert "Cycle: first → (b) → second → (c) → third → (a) → first" in text
    assert "%% Cycle: first" in draw.mermaid(graph.plan())
    cycles = {row["processor"]: row["cycle"] for row in draw.describe(graph.plan())}
    assert cycles["ring.leaves"] is None
    assert cycles["ring.first"] == ["first", "second", "third"]


def test_the_mermaid_chart_has_a_node_for_each_and_an_edge_for_each_binding() -> None:
    chart = draw.mermaid(shop().plan())
    assert chart.startswith("flowchart LR\n")
    for queue in ("orders", "rates", "priced", "archive", "x", "y", "errors"):
        assert f'[("{queue}")]' in chart
    assert chart.count('(["cues send"])') == 3
    assert 'price<br>exactly-once"' in chart
    assert ' -- "left" --> ' in chart
    assert chart.count(" -.-> ") == 2  # merge and price; save has no error queue


def test_labels_cannot_break_the_chart() -> None:
    graph = cues.Graph("g", [cues.Stream(keep, 'a"b', "<c>", id="x")])
    chart = draw.mermaid(graph.plan())
    drawn = [line for line in chart.splitlines() if not line.startswith("%%")]
    assert not any('a"b' in line or "<c" in line for line in drawn)
    assert '[("a#quot;b")]' in chart


def test_the_picture_of_the_readme_is_that_of_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    """It is made by ``cues show examples/flights.py --format svg > docs/images/flights.svg``."""
    assert app.run(["show", str(ROOT / "examples" / "flights.py"), "--format", "svg"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "images" / "flights.svg").read_text()
