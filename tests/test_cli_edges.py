"""Values and places at the edge of what the commands take: each is refused or named in a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from terminal import cues

import cues as library
from cues.cli import app
from cues.errors import InvalidArgument, QueueNotFound
from cues.ui.change import Changes
from cues.ui.look import look_of, settings_of

DEEP = "[" * 5_000 + "]" * 5_000


def test_send_names_the_line_that_is_too_deep_and_sends_those_before_it(tmp_path: Path) -> None:
    done = cues("send", "--create", f"{tmp_path}/s#q", stdin=f'{{"n": 1}}\n{{"v": {DEEP}}}\n{{"n": 2}}\n')
    assert done.code == 1 and "Line 2" in done.err and "Try:" in done.err and "Traceback" not in done.err
    with library.open(tmp_path / "s", readonly=True) as store:
        assert list(iter(store.queue("q").tailer(meta=False).read, None)) == [{"n": 1}]
    done = cues("send", "--create", f"{tmp_path}/s#q", f"v={DEEP}")
    assert done.code == 2 and "nested too deep" in done.err


@pytest.mark.parametrize("partitions", [1, 2])
def test_tail_names_a_message_that_json_cannot_hold_and_continues(tmp_path: Path, partitions: int) -> None:
    with library.open(tmp_path / "s", durability="process") as store:
        queue = store.queue("q", partitions=partitions, key=None if partitions == 1 else "k")
        queue.appender().write_many([{"n": 1, "k": 1}, {"v": 10**5000, "k": 1}, {"n": 2, "k": 1}])
    done = cues("tail", f"{tmp_path}/s#q", "-n", "all")
    assert [json.loads(line)["n"] for line in done.out.splitlines()] == [1, 2]
    assert done.code == 1 and "Message 2 of q" in done.err and "Traceback" not in done.err


@pytest.mark.parametrize("reason", [12, None, "", " ", "a\0b", "a\ud800", "x" * 1001])
def test_the_page_refuses_a_reason_that_a_command_cannot_take(reason: object) -> None:
    with pytest.raises(InvalidArgument, match="reason"):
        Changes("store", None).discard(queue="errors", index=1, reason=reason)  # type: ignore[arg-type]


@pytest.mark.parametrize("partition", [-1, 1, 99999999999])
def test_the_page_refuses_a_partition_that_is_not_there(tmp_path: Path, partition: int) -> None:
    with library.open(tmp_path / "s", durability="process") as store:
        store.queue("q").appender().write({"n": 1})
    look = look_of(settings_of(str(tmp_path / "s"), None, "s"))
    try:
        assert look.message("q", 1, 0)["index"] == 1
        for ask in (look.message, look.became):
            with pytest.raises(QueueNotFound, match="no partition"):
                ask("q", 1, partition)
    finally:
        look.close()


def test_a_discard_of_a_settled_error_message_says_why_it_does_nothing(tmp_path: Path) -> None:
    graph = tmp_path / "graph.py"
    graph.write_text(
        "import cues\n"
        f"graph = cues.Graph('g', store={str(tmp_path / 's')!r}, durability='process', errors='errors')\n"
        "graph.source('a')\n\n"
        "@graph.sink('a')\n"
        "def fail(message):\n"
        "    raise ValueError('no')\n"
    )
    cues("send", f"{graph}#a", '{"n": 1}', '{"n": 2}')
    cues("run", graph, "--idle-exit", "0")
    arguments = ("--reason", "test", "--yes", "--json")
    assert cues("discard", graph, "--index", "1", *arguments).code == 0
    again = cues("discard", graph, "--index", "1", *arguments)
    assert again.code == 1 and json.loads(again.out)["discarded"] == []
    assert "errors 1 cannot be discarded: it is discarded already." in again.err
    both = cues("discard", graph, "--index", "1", "--index", "2", *arguments)
    assert both.code == 1 and [row["index"] for row in json.loads(both.out)["discarded"]] == [2]


def test_a_shown_url_of_a_database_has_no_secrets() -> None:
    sql = pytest.importorskip("cues.checkpoints.sql")
    checkpoint = sql.SQLCheckpoint("postgresql://u:S1@host/db?sslpassword=S2&password=S3&connect_timeout=2", "name")
    for shown in (checkpoint.where, checkpoint.place):
        assert not any(secret in shown for secret in ("S1", "S2", "S3")) and "connect_timeout=2" in shown
    assert checkpoint.__getstate__()["target"].count("S2") == 1


@pytest.mark.parametrize("name", ["queue.py", "types.py"])
def test_workers_run_a_graph_file_with_the_name_of_a_module_that_they_import(tmp_path: Path, name: str) -> None:
    (tmp_path / "msgpack.py").write_text("")
    graph = tmp_path / name
    graph.write_text(
        "import cues\n"
        f"graph = cues.Graph('g', store={str(tmp_path / 's')!r}, durability='process')\n\n"
        "@graph.source('a', resume='skip')\n"
        "def numbers():\n"
        "    yield {'n': 1}\n\n"
        "@graph.stream('a', 'b')\n"
        "def same(message):\n"
        "    return message\n"
    )
    done = cues("run", graph, "--idle-exit", "0", "--workers", "1")
    assert done.code == 0, done.err
    assert json.loads(cues("tail", f"{graph}#b").out) == {"n": 1}


def test_the_hint_for_an_unknown_option_is_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert app.run(["close", "graph.py", "--stor", "x"]) == 2
    shown = capsys.readouterr().err
    assert "Error: No such option '--stor'.\nTry: cues close --store\n" in shown
