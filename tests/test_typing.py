"""Types of the public names: mypy accepts right uses, and refuses wrong ones, as a user's mypy sees them."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import cues
from cues.engine import local, supervised
from cues.graphs import options
from cues.overrides import override
from cues.queues.options import QUEUE_TEXTS, AllKeywords, QueueKeywords

MIXED = """
from cues.base import names
from cues.graphs.processor import Node
from cues.graphs.processor_rows import key_of, read_row
from cues.storage.transaction import StoreTransaction

def mixed(node: Node, txn: StoreTransaction) -> None:
    names.processor_key(node.id), names.state_database(node.key), read_row(txn, node.id), key_of(txn, node.id)
    names.processor_key(node.key)
    names.state_database(node.id)
    read_row(txn, node.key)
    names.tailer_id(node.id, "orders")
"""
CASES = Path(__file__).parent / "typing_cases.py"
DECLARATIONS: list[tuple[Any, type]] = [
    (cues.Source, options.SourceOptions),
    (cues.Stream, options.StreamOptions),
    (cues.Sink, options.SinkOptions),
    (cues.Graph.source, options.SourceOptions),
    (cues.Graph.stream, options.StreamOptions),
    (cues.Graph.sink, options.SinkOptions),
    (cues.Graph.frame, options.FrameOptions),
    (cues.Graph.broadcast, options.BroadcastOptions),
    (cues.broadcast, options.StreamOptions),
    (cues.Store.queue, QueueKeywords),
    (cues.Graph.start, options.StartOptions),
    (cues.Graph.run, options.StartOptions),
]


def keywords(fn: Callable[..., Any]) -> set[str]:
    """The parameters of a function that are passed by name, without ``**options``."""
    return {p.name for p in inspect.signature(fn).parameters.values() if p.kind is p.KEYWORD_ONLY}


def mypy(file: Path, tmp_path: Path) -> str:
    """The report of mypy about a file, from a directory outside of the project."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MYPYPATH", "PYTHONPATH")}
    return subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={tmp_path / 'cache'}", str(file)],
        capture_output=True, text=True, cwd=tmp_path, env=environment,
    ).stdout  # fmt: skip


@pytest.mark.slow
def test_mypy_refuses_the_wrong_uses_and_accepts_the_right_ones(tmp_path: Path) -> None:
    """The cases are outside of the project here, so mypy finds the types of the installation, editable or not."""
    file = tmp_path / "cases.py"
    file.write_text(CASES.read_text())
    report = mypy(file, tmp_path)
    found = {(int(line), code) for line, code in re.findall(r"^cases\.py:(\d+): error: .*\[([\w-]+)\]$", report, re.M)}
    lines = file.read_text().splitlines()
    wanted = {
        (number, code)
        for number, line in enumerate(lines, 1)
        for code in re.findall(r"# E: ([\w-]+)$", line)
    }  # fmt: skip
    assert len(wanted) > 30
    assert found == wanted, report


@pytest.mark.slow
def test_mypy_refuses_the_key_of_a_processor_in_place_of_its_id(tmp_path: Path) -> None:
    """Both are text, and differ after a rename: each was taken for the other in some places."""
    file = tmp_path / "mixed.py"
    file.write_text(MIXED)
    report = mypy(file, tmp_path)
    assert re.findall(r"mixed\.py:(\d+): error: .*expected \"Processor(?:Id|Key)\"", report) == ["9", "10", "11", "12"]


def test_the_types_and_the_defaults_of_options_have_the_same_names() -> None:
    by_kind = {
        "source": options.SourceOptions,
        "stream": options.StreamOptions,
        "frame": options.FrameOptions,
        "sink": options.SinkOptions,
    }
    named: set[str] = set()
    for kind, typed in by_kind.items():
        names = set(typed.__annotations__) | {"id"} | ({"fields"} if kind == "frame" else set())
        assert names == set(options.ALLOWED[kind])  # type: ignore[index]
        named |= names
    assert named == set(options.OPTION_NAMES) == set(options.OPTION_TEXTS)
    stream = set(options.StreamOptions.__annotations__)
    assert set(options.BroadcastOptions.__annotations__) == stream - {"id"}
    assert set(options.FrameOptions.__annotations__) - {"output_mode", "trigger"} < stream


def test_the_types_of_queue_options_have_the_names_of_the_dataclass() -> None:
    names = {field.name for field in fields(cues.QueueOptions)}
    assert set(QUEUE_TEXTS) == names
    assert set(QueueKeywords.__annotations__) == names - {"path", "schema"}
    assert set(AllKeywords.__annotations__) == names


def test_the_types_of_a_start_have_the_names_that_the_engines_take() -> None:
    taken = keywords(local.start) | keywords(supervised.start)
    own = keywords(cues.Graph.start)
    spark = {"spark", "master", "queues", "backfill", "conf"}
    assert set(options.EngineOptions.__annotations__) == (taken - own) | spark
    assert set(options.StartOptions.__annotations__) == own | set(options.EngineOptions.__annotations__)
    assert set(options.START_TEXTS) == set(options.StartOptions.__annotations__)
    for name, default in ((p.name, p.default) for p in inspect.signature(cues.Graph.start).parameters.values()):
        if name in own:
            assert options.START_TEXTS[name].default == default
    pytest.importorskip("pyspark")
    from cues.spark import engine

    assert keywords(engine.start) - own - {"listeners"} == spark


def test_the_types_of_a_graph_have_the_names_of_its_parameters() -> None:
    assert set(options.GraphOptions.__annotations__) == keywords(cues.Graph.__init__)


@pytest.mark.parametrize(("described", "typed"), DECLARATIONS, ids=lambda value: getattr(value, "__qualname__", ""))
def test_help_lists_every_option_with_its_default_and_effect(described: Any, typed: type) -> None:
    doc = inspect.getdoc(described) or ""
    listed = re.findall(r"^(\w+)=(.+)\n    (\S.*)$", doc.partition("\nOptions:\n")[2], re.M)
    assert {name for name, _, _ in listed} == set(typed.__annotations__)
    assert all(effect[0].isupper() or effect[0] == "`" for _, _, effect in listed)


def test_help_of_a_stream_shows_unit_default_and_effect() -> None:
    doc = inspect.getdoc(cues.Graph.stream) or ""
    assert "\nstep_s=0.25\n    Seconds: a step of a message function ends after this time; None: no limit.\n" in doc


def test_the_mark_of_an_override_is_the_method_itself() -> None:
    """A call costs the same with the mark. There is no function around the method."""
    assert override(keywords) is keywords
    assert cues.CuesError.__str__.__module__ == "cues.errors"
