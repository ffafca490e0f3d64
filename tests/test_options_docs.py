"""docs/options.md has a row for every option that the library takes, with the default that it has."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pages import names_of_tests

import cues
from cues import groups, txn
from cues.checkpoints import SQLCheckpoint
from cues.engine import local, supervised
from cues.graphs.options import OPTION_TEXTS, START_TEXTS, TABLE, Options, engines, kinds
from cues.processors import sql
from cues.queues.options import QUEUE_TEXTS

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "options.md").read_text()
MISSING = inspect.Parameter.empty


def rows(section: str) -> dict[str, str]:
    """The default that the page names, by option, of one section."""
    found = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert found, f"no section {section}"
    return dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", found[1], re.M))


def taken(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """The parameters of a function and their defaults, without ``self``, ``graph`` and ``**options``."""
    for parameter in inspect.signature(fn).parameters.values():
        if parameter.name not in ("self", "graph") and parameter.kind is not parameter.VAR_KEYWORD:
            yield parameter.name, parameter.default


def of_fields(options: type[Any]) -> Iterator[tuple[str, Any]]:
    return ((field.name, field.default) for field in dataclasses.fields(options))


OPTIONS: list[tuple[str, Iterator[tuple[str, Any]]]] = [
    ("Processors", of_fields(Options)),
    ("cues.Retry", of_fields(cues.Retry)),
    ("cues.Graph", taken(cues.Graph.__init__)),
    ("cues.Graph", ((name, MISSING) for name, _ in taken(cues.merge))),
    ("Graph.start", taken(cues.Graph.start)),
    ("Graph.start", taken(local.start)),
    ("Graph.start", ((name, default) for name, default in taken(supervised.start) if name != "workers")),
    ("cues.QueueOptions", taken(cues.QueueOptions.__init__)),
    ("cues.Retention", of_fields(cues.Retention)),
    ("cues.open", taken(cues.Store.__init__)),
    ("Queue.tailer", taken(cues.Queue.tailer)),
    ("groups.Member", taken(groups.Member.__init__)),
    ("txn.Consumer", taken(txn.Consumer.__init__)),
    ("sql.SQLite", taken(sql.SQLite.__init__)),
    ("checkpoints.SQLCheckpoint", taken(SQLCheckpoint.__init__)),
]


# The tables that are generated from the texts of the code, which help() shows as well.
GENERATED = {
    "Processors": [
        "| option | default | of | engines | ready-made | meaning |",
        "|---|---|---|---|---|---|",
        *(
            f"| `{name}` | `{o.shown}` | {kinds(name)} | {engines(name)} | {TABLE[name].ready or ''} | {o.text} |"
            for name, o in OPTION_TEXTS.items()
        ),
    ],
    "Graph.start": [
        "| option | default | meaning |",
        "|---|---|---|",
        *(f"| `{name}` | `{o.shown}` | {o.text} |" for name, o in START_TEXTS.items()),
    ],
    "cues.QueueOptions": [
        "| option | default | meaning |",
        "|---|---|---|",
        *(f"| `{name}` | `{o.shown}` | {o.text} |" for name, o in QUEUE_TEXTS.items()),
    ],
}


def with_refusals(page: str) -> str:
    """The page of Spark with the options for which the driver calls the function, and those that Spark refuses."""
    driven = ", ".join(f"`{name}=`" for name, entry in TABLE.items() if entry.in_driver)
    page, count = re.subn(r"^\| functions with .*?(?= \| the driver)", f"| functions with {driven}", page, flags=re.M)
    assert count == 1
    by_hint: dict[str, list[str]] = {}
    for name, entry in TABLE.items():
        if entry.shared:
            by_hint.setdefault(entry.shared.hint, []).append(name)
    rows = [
        f"| {', '.join(f'`{name}=`' for name in names)} | {hint.format(name='= or '.join(names))} |\n"
        for hint, names in by_hint.items()
    ]
    replaced, count = re.subn(r"(?:^\| `\w+=`(?:, `\w+=`)* \|.*\n)+", lambda _: "".join(rows), page, flags=re.M)
    assert count == 1
    return replaced


REFUSED = {
    "`max_lag=` and `max_bytes=` of a queue": "test_a_queue_for_which_writers_wait_is_refused_in_a_shared_directory",
    "`path=` of a queue that a processor on Spark writes": "test_what_has_no_form_there_is_refused_by_name",
    "a queue of a source as the output of a processor": "test_what_has_no_form_there_is_refused_by_name",
    "`idle=` of windows and joins": "test_silent_inputs_are_refused_by_name_in_a_directory",
    "a delayed message on a queue that a frame reads": "test_frames_refuse_messages_that_are_not_due",
    "frames with state over several partitions": "test_a_frame_that_keeps_state_over_partitions_is_refused_by_name",
    "`spark.speculation` with sinks or `side_effects=True`": "test_speculation_is_refused_for_functions_with_effects",
    "`renamed_from=` of a processor that DIR has under its former name": (
        "test_a_processor_of_a_shared_directory_cannot_be_renamed"
    ),
}
"""The other rows of that table: no option of a processor is refused there by itself. Each has its test."""


def test_the_page_of_spark_has_the_options_that_spark_refuses() -> None:
    page = (DOCS / "spark.md").read_text()
    assert with_refusals(page) == page, "run: python tests/test_options_docs.py"
    (table,) = re.findall(r"^\| refused with `--queues` \| instead \|\n\|---\|---\|\n((?:\|.*\n)+)", page, re.M)
    rows = [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()]
    assert [row for row in rows if not re.fullmatch(r"`\w+=`(?:, `\w+=`)*", row)] == list(REFUSED)
    assert set(REFUSED.values()) <= names_of_tests()


@pytest.mark.parametrize("section", GENERATED)
def test_the_tables_of_the_page_are_the_texts_of_the_code(section: str) -> None:
    """``python tests/test_options_docs.py`` writes the tables anew."""
    assert with_table(PAGE, section, GENERATED[section]) == PAGE


def with_table(page: str, section: str, table: list[str]) -> str:
    """The page with another table in one section."""
    pattern = rf"(^## {re.escape(section)}\n(?:(?!^[|#]).*\n)*)((?:^\|.*\n)+)"
    replaced, count = re.subn(pattern, lambda found: found[1] + "\n".join(table) + "\n", page, count=1, flags=re.M)
    assert count == 1, f"no table in section {section}"
    return replaced


def is_literal(text: str, value: Any) -> bool:
    """Return True if a text of the page is this value; ``0`` is ``0.0`` too."""
    try:
        return bool(ast.literal_eval(text) == value)
    except (SyntaxError, ValueError):
        return False


def differences(section: str, options: Iterator[tuple[str, Any]]) -> Iterator[str]:
    there = rows(section)
    for name, default in options:
        if name not in there:
            yield f"docs/options.md, {section}: no row for `{name}`"
        elif default is not MISSING and isinstance(default, (bool, int, float, str, tuple, type(None))):
            shown = there[name].strip("`")
            if not is_literal(shown, default):
                yield f"docs/options.md, {section}: `{name}` is {shown} there, and {default!r} in the code"


@pytest.mark.parametrize(("section", "options"), OPTIONS, ids=[f"{n}-{name}" for n, (name, _) in enumerate(OPTIONS)])
@pytest.mark.interpreted
def test_every_option_has_a_row_with_its_default(section: str, options: Iterator[tuple[str, Any]]) -> None:
    assert list(differences(section, options)) == []


def test_the_options_of_a_start_on_spark_have_rows() -> None:
    pytest.importorskip("pyspark")
    from cues.spark import engine

    assert list(differences("Graph.start", taken(engine.start))) == []


def test_an_option_without_a_row_and_another_default_are_found() -> None:
    """The comparison itself: it finds what it is for."""
    found = list(differences("cues.Retry", iter([("jitter_s", 0), ("attempts", 2), ("max_s", 30)])))
    assert len(found) == 2 and "no row for `jitter_s`" in found[0] and "`attempts` is 1 there, and 2" in found[1]


if __name__ == "__main__":
    written = PAGE
    for section, table in GENERATED.items():
        written = with_table(written, section, table)
    (DOCS / "options.md").write_text(written)
    (DOCS / "spark.md").write_text(with_refusals((DOCS / "spark.md").read_text()))
