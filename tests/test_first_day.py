"""The first day of a new user: renamed functions, misspelt queues, exit codes, the README."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small import feed, numbers, run

import cues
from cues import AnyOf, Graph, QueueOptions, Sink, Source, Store, Stream, testing
from cues.base import events
from cues.cli import progress
from cues.cli.app import run as cli
from cues.engine import standing
from cues.engine.assembly import assemble
from cues.errors import TopologyChanged
from cues.graphs import draw
from cues.steps.error_records import ErrorLogs
from cues.steps.failure import failed_event, retry_event
from cues.tools import metrics


def same(message: Any) -> Any:
    return message


# --- renamed processors -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["stream", "sink", "alts", "tailers"])
def test_a_renamed_processor_is_refused_before_it_takes_anything_again(store: Store, kind: str) -> None:
    seen: list[Any] = []

    def reader(id: str) -> Any:
        if kind == "stream":
            return Stream(lambda m: seen.append(m["n"]), "a", "out", id=id)
        if kind == "alts":
            return Sink(lambda m: seen.append(m["n"]), AnyOf(x="b", y="a"), id=id)
        if kind == "tailers":
            return Sink(lambda m, process: seen.append(m["n"]), "c" if id == "new" else "a", tailers="b", id=id)
        return Sink(lambda m: seen.append(m["n"]), "a", id=id)

    feed(store, a=range(3), b=[], c=[7])
    run(store, reader("old"))
    with pytest.raises(
        TopologyChanged, match=r"g.new is new and reads .*, which g.old has read; .*renamed_from='old'"
    ) as caught:
        run(store, reader("new"))
    assert caught.value.processor == "g.new" and seen == [0, 1, 2]
    run(store, reader("new"), accept_topology=True)
    assert seen == ([0, 1, 2, 7] if kind == "tailers" else [0, 1, 2, 0, 1, 2])
    run(store, reader("new"))  # it has positions of its own now


def test_a_second_reader_beside_the_first_is_not_a_renamed_one(store: Store) -> None:
    feed(store, a=range(3))
    run(store, Stream(same, "a", "out", id="old"))
    run(store, Stream(same, "a", "out", id="old"), Stream(same, "a", "copies", id="new"))
    run(store, Stream(same, "a", "copies", id="new"))  # one that is taken away changes nothing
    run(store, Stream(same, "a", "copies", id="new"), Stream(same, "copies", "more", id="third"))
    assert numbers(store, "more") == [0, 1, 2] and numbers(store, "out") == [0, 1, 2]


def test_a_renamed_processor_over_partitions_is_refused_by_its_name(store: Store) -> None:
    queues = {"a": QueueOptions(partitions=3, key="n")}
    store.queue("a", partitions=3, key="n").appender().write_many([{"n": n} for n in range(9)])
    run(store, Stream(same, "a", "out", id="old"), queues=queues)
    with pytest.raises(TopologyChanged, match=r"^g.new is new .* which g.old has read"):
        run(store, Stream(same, "a", "out", id="new"), queues=queues)
    assert len(numbers(store, "out")) == 9


# --- the command line -------------------------------------------------------------------------------


GRAPH = """
import cues
graph = cues.Graph("shop", errors="errors")
graph.source("orders")

@graph.stream("orders", "priced")
def price(order):
    return {"total": order["count"] * 2}
"""


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUES_STORE", raising=False)
    path = tmp_path / f"shop_{tmp_path.name}.py"  # a module is imported once under its name
    path.write_text(GRAPH)
    yield path
    sys.modules.pop(path.stem, None)  # the directory of a test that passed is removed, and its name is free again


def test_fail_on_errors_and_the_count_of_unresolved_errors(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def runs(*arguments: str) -> tuple[int, dict[str, Any]]:
        code = cli(["run", str(shop), "--idle-exit", "0", "--quiet", "--json", *arguments])
        return code, json.loads(capsys.readouterr().out)

    assert cli(["send", str(shop), '{"count": 1}', "{}", "{}"]) == 0
    capsys.readouterr()
    code, summary = runs()
    assert (code, summary["failed"], summary["unresolved"]) == (0, 2, {"errors": 2})
    code, summary = runs("--fail-on-errors")
    assert (code, summary["failed"], summary["unresolved"]) == (1, 0, {"errors": 2})
    assert cli(["run", str(shop), "--idle-exit", "0", "--quiet", "--table"]) == 0
    assert f"2 failed messages unresolved on errors, all of them in earlier runs: cues errors {shop}" in (
        capsys.readouterr().out
    )
    assert cli(["send", str(shop), "{}", "--store", "other", "--create"]) == 0
    assert cli(["run", str(shop), "--idle-exit", "0", "--quiet", "--table", "--store", "other"]) == 0
    assert f"1 message failed: cues errors {shop} --store other" in capsys.readouterr().out
    assert cli(["status", str(shop), "--store", "other", "--table"]) == 0
    assert f"cues errors {shop}#errors --store other --index 1" in capsys.readouterr().out
    with cues.open(shop.parent / "data" / "shop") as store:
        store.queue("errors").delete()
    code, summary = runs("--fail-on-errors")
    assert (code, summary["unresolved"]) == (0, {})


def test_a_store_that_is_deleted_ends_tail_follow(shop: Path) -> None:
    assert cli(["send", str(shop), '{"count": 1}']) == 0
    follow = [sys.executable, "-m", "cues", "tail", "data/shop#orders", "--follow"]
    child = subprocess.Popen(follow, cwd=shop.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert json.loads(child.stdout.readline())["count"] == 1
    store = shop.parent / "data" / "shop"
    while not list((store / "bells").iterdir()):  # it makes this file when it begins to wait
        assert child.poll() is None
        time.sleep(0.001)
    shutil.rmtree(store)
    _, error = child.communicate(timeout=60)
    assert child.returncode == 1 and "was deleted" in error


def test_errors_that_a_processor_takes_are_resolved_and_fail_the_run_that_made_them(
    shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shop.write_text(GRAPH + '\n@graph.sink("errors", errors=None)\ndef repair(error):\n    pass\n')
    assert cli(["send", str(shop), "{}"]) == 0
    codes = [cli(["run", str(shop), "--idle-exit", "0.3", "--quiet", "--fail-on-errors"]) for _ in range(2)]
    assert codes == [1, 0]
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["unresolved"] for one in found[1:]] == [{}, {}]


def test_tail_takes_json(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["send", str(shop), "count=1"]) == 0
    capsys.readouterr()
    assert cli(["tail", f"{shop}#orders", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"count": 1}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_that_asks_us(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["completion", shell]) == 0
    assert f"_CUES_COMPLETE={shell}_complete" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("cues ta", {"tail"}),
        ("cues tail --fo", {"--follow"}),
        ("cues completion z", {"zsh"}),
        ("cues tail data/shop#o", {"data/shop#orders"}),
        ("cues tail data/shop#", {"data/shop#orders", "data/shop#priced", "data/shop#errors"}),
        ("cues tries data/shop#", {"data/shop#shop.price"}),
        ("cues tail data/none#", set()),
        ("cues tail #p", set()),
    ],
)
def test_what_is_offered_after_the_words(
    shop: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, offered: set[str]
) -> None:
    assert cli(["run", str(shop), "--idle-exit", "0", "--quiet"]) == 0
    capsys.readouterr()
    for name, value in (
        ("_CUES_COMPLETE", "bash_complete"),
        ("COMP_WORDS", words),
        ("COMP_CWORD", str(len(words.split()) - 1)),
    ):
        monkeypatch.setenv(name, value)
    assert cli([]) == 0
    assert {line.partition(",")[2] for line in capsys.readouterr().out.splitlines() if line} == offered


# --- misspelt queues --------------------------------------------------------------------------------


def misspelt(*processors: Any, **options: Any) -> Graph:
    return Graph("g", [Source("orders"), Stream(same, "orders", "priced", id="price"), *processors], **options)


def test_a_queue_that_nothing_writes_is_named_with_the_one_that_it_is_most_like(tmp_path: Path) -> None:
    graph = misspelt(Sink(same, "pricd", id="save"), Sink(same, "erors", id="mend"), errors="errors")
    assert graph.plan().misspelt == {"pricd": "priced", "erors": "errors"}
    assert "'pricd', which no source and no stream writes; did you mean 'priced'?" in draw.text(graph.plan())
    told: list[str] = []
    with graph.start(store=tmp_path / "store", listeners=(lambda one: told.append(f"{one.processor} {one.text}"),)):
        pass
    assert [one for one in told if "did you mean" in one] == [
        "g.mend reads 'erors', which no source and no stream writes; did you mean 'errors'? If it is fed by send,"
        " declare it: graph.source('erors')",
        "g.save reads 'pricd', which no source and no stream writes; did you mean 'priced'? If it is fed by send,"
        " declare it: graph.source('pricd')",
    ]


@pytest.mark.parametrize(
    "graph",
    [
        misspelt(Sink(same, "pricd", id="save"), Source("pricd")),
        misspelt(Sink(same, "orders-2", id="save"), Source("orders-1")),
        misspelt(Sink(same, "weather", id="save")),
        misspelt(Sink(same, "pricd", id="save"), queues={"pricd": QueueOptions(path="elsewhere")}),
    ],
    ids=["declared", "a series", "another name", "in another store"],
)
def test_a_queue_that_is_meant_is_not_called_misspelt(graph: Graph) -> None:
    assert graph.plan().misspelt == {}


def test_a_queue_that_has_messages_is_not_reported_at_the_start(store: Store) -> None:
    feed(store, pricd=[1])
    told: list[str] = []
    assemble(misspelt(Sink(same, "pricd", id="save")), store, emit=lambda event: told.append(event.text)).close()
    assert not [one for one in told if "did you mean" in one]


# --- starting over ----------------------------------------------------------------------------------

TARGET = """
from cues.processors import sql
db = sql.SQLite("priced.db", schema="create table if not exists priced (total integer)")

@graph.sink("priced", checkpoint=db)
def save(priced, process):
    process.connection.execute("insert into priced values (?)", [priced["total"]])
"""
ALCHEMY = """
from cues.checkpoints import SQLCheckpoint
from sqlalchemy import text
db = SQLCheckpoint("priced.db", schema="create table if not exists priced (total integer)")

@graph.sink("priced", checkpoint=db)
def save(priced, process):
    process.connection.execute(text("insert into priced values (:total)"), priced)
"""


@pytest.mark.slow
@pytest.mark.parametrize("target", [TARGET, ALCHEMY], ids=["sqlite3", "sqlalchemy"])
def test_fresh_names_a_target_that_would_refuse_before_it_deletes_anything(
    shop: Path, capsys: pytest.CaptureFixture[str], target: str
) -> None:
    shop.write_text(GRAPH + target)

    def runs(*arguments: str) -> tuple[int, str]:
        code = cli(["run", str(shop), "--idle-exit", "0.3", "--quiet", "--table", *arguments])
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    assert runs("--fresh", "--yes")[0] == 0  # nothing is filled yet
    assert cli(["send", str(shop), "count=1"]) == 0 and runs()[0] == 0
    code, said = runs()
    assert code == 0 and "nothing new. Without priced.db, --fresh starts over" in said.replace("sqlite:///", "")
    code, said = runs("--fresh", "--yes")
    assert code == 1 and "(by shop.save) was filled" in said and "nothing was deleted" in said
    with cues.open(shop.parent / "data" / "shop") as store:
        assert testing.messages(store, "priced") == [{"total": 2}]
    sys.modules[shop.stem].db.close()  # here all commands are one process
    for path in shop.parent.glob("priced.db*"):
        path.unlink()
    assert runs("--fresh", "--yes")[0] == 0
    with cues.open(shop.parent / "data" / "shop") as store:
        assert testing.messages(store, "priced") == []


def numbers_of(store: Store, queue: str) -> list[Any]:
    return testing.messages(store, queue)


# --- errors of several lines ------------------------------------------------------------------------


def test_an_error_of_several_lines_is_one_line_in_our_sentences_and_whole_on_the_error_queue(store: Store) -> None:
    """SQLAlchemy adds the statement, its parameters and a link; a traceback and the error queue have them."""
    text = "no such table: nowhere\n[SQL: select 1]\n(Background on this error at: https://example.org)"

    def fail(message: Any) -> Any:
        raise OSError(text)

    feed(store, a=[1])
    with pytest.raises(cues.ProcessorStopped) as caught:
        run(store, Sink(fail, "a", id="s", retries=1))
    assert "OSError: no such table: nowhere …" in caught.value.message and "SQL" not in str(caught.value)
    told: list[str] = []
    graph = Graph("g", [Sink(fail, "a", id="s", retries=1)], errors="errors")
    assembly = assemble(graph, store, emit=lambda event: told.append(event.text))
    while assembly.steppers[0].step() == "committed":
        pass
    assembly.close()
    assert len([one for one in told if "no such table: nowhere …" in one]) == 2 and "SQL" not in "".join(told)
    assert testing.messages(store, "errors")[0]["err/cause"][0]["message"] == text


def test_a_misspelt_graph_file_or_store_is_answered_with_what_is_beside_it(
    shop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(["status", shop.name.removesuffix("y")]) == 1
    assert f"Try: give {shop.name}." in capsys.readouterr().err


# --- events that repeat, failures that are counted ---------------------------------------------------


def test_identical_events_are_printed_once_and_then_counted(capsys: pytest.CaptureFixture[str]) -> None:
    refused = events.Event("g.save", "the server is away", logging.WARNING)
    with progress.Progress("g") as quiet:
        for _ in range(5):
            quiet.event(refused)
        quiet.event(events.Event("g.save", "another", logging.WARNING))
    assert capsys.readouterr().err.splitlines() == [
        "g.save: the server is away",
        "g.save: another",
        "g.save: the server is away (×5 in this run)",
    ]
    with progress.Progress("g") as quiet:
        for attempt in range(1, 4):
            quiet.event(retry_event("g.save", attempt, 9, OSError("away"), wait_s=0.1 * 2**attempt))
            quiet.event(failed_event("g.save", "errors", attempt, 9, "OSError: away"))
    assert capsys.readouterr().err.splitlines() == [
        "g.save: attempt 1 of 9 failed (OSError: away); again in 0.2 s",
        "g.save: 1 message to 'errors' after 9 attempts: OSError: away",
        "g.save: attempt 1 of 9 failed (OSError: away); again in 0.2 s (×3 in this run)",
        "g.save: 1 message to 'errors' after 9 attempts: OSError: away (×3 in this run)",
    ]
    with progress.Lines("g") as lines:
        for _ in range(3):
            lines.event(refused)
    printed = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [event.get("total") for event in printed] == [None, 3]


def test_a_batch_that_failed_counts_as_its_messages(store: Store) -> None:
    """The run and ``cues status`` count failed messages, not error records."""
    store.queue("in").appender().write_many([{"n": n} for n in range(5)])

    def fail(messages: list[dict[str, Any]]) -> None:
        raise ValueError("no")

    sink = Sink(fail, "in", id="s", batch=True, retries=0, bisect=False)
    testing.run_until_idle(Graph("g", [sink], errors="errors"), store)
    records = len(testing.messages(store, "errors"))
    assert 1 <= records < 5
    assert [one.errors for one in metrics.of_store(store).processors] == [5]
    with ErrorLogs(store) as logs:
        assert standing.failed_messages(logs.logs, records) == 5
