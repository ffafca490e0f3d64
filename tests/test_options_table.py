"""The table of the options of processors: each refusal can be told, and holds for declarations and for graphs."""

from __future__ import annotations

from typing import Any

import pytest

import cues
from cues.errors import GraphError
from cues.graphs.option import FACTS
from cues.graphs.options import OPTION_NAMES, TABLE
from cues.processors import sql


def work(message: Any, process: Any) -> None:
    """Take a message."""


@pytest.mark.parametrize("name", OPTION_NAMES)
def test_each_refusal_names_options_and_known_facts(name: str) -> None:
    entry, facts = TABLE[name], dict.fromkeys(FACTS, "x")
    for each in (*entry.without, *([entry.spark] if entry.spark else [])):
        assert each.wrong.format(**facts) and each.hint.format(**facts)
    assert {other for each in entry.without for other in each.others} <= {*OPTION_NAMES} - {name}
    assert entry.wrong.format(**facts, error="x") is not None and entry.text


@pytest.mark.parametrize(
    ("declared", "text"),
    [
        (lambda: cues.Stream(work, "in", "out", id="p", batch="frame"), "The frame 'p' is at-most-once"),
        (lambda: cues.Sink(work, "in", id="p", checkpoint=sql.SQLite("x.db")), "has checkpoint= and is at-most-once"),
        (lambda: cues.Stream(work, "in", "out", id="p", timer=work), r"g\.p has timer= and is at-most-once"),
        (lambda: cues.Stream(work, "in", "out", id="p", retries=1), "is at-most-once, which never calls"),
    ],
)
def test_the_strategy_of_a_graph_is_refused_as_that_of_a_processor_is(declared: Any, text: str) -> None:
    """A graph gave its strategy to frames and to sinks with a checkpoint, which refuse it as an option of their own."""
    graph = cues.Graph("g", [cues.Source("in"), declared()], strategy="at-most-once")
    with pytest.raises(GraphError, match=text):
        graph.plan()
    cues.Graph("g", [cues.Source("in", retries=1)], strategy="at-most-once").plan()
