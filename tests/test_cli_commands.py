"""The commands that look at a store, and those that write to it: what they print, and what they refuse."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import uuid
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest
from click.testing import CliRunner
from terminal import CUES, Command, cues, environment

import cues as library
from cues.cli.app import COMMANDS, commands
from cues.native import implementation
from cues.operate.refused import Refused
from cues.operate.where import Where

SHOP = """
import cues
graph = cues.Graph("shop", errors="errors", durability="process")
graph.source("orders")

@graph.stream("orders", "priced")
def price(order):
    return {**order, "total": order["count"] * 2}

@graph.sink("priced")
def save(order): ...
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph file whose graph has run: 30 orders, of which two failed. Tests only read it."""
    folder = tmp_path_factory.mktemp("shop")
    path = folder / "shop.py"
    path.write_text(SHOP)
    lines = "".join(
        json.dumps({"n": n, "count": None if n in (7, 21) else n, "city": "Rome" if n % 3 else "Oslo"}) + "\n"
        for n in range(1, 31)
    )
    assert cues("send", f"{path}#orders", stdin=lines).code == 0
    run = cues("run", path, "--idle-exit", "0")
    assert run.code == 0, run.err
    return path


def rows(text: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in text.splitlines()]


# --- the group ------------------------------------------------------------------------------------


def test_help_and_version_load_neither_the_store_nor_the_engine() -> None:
    code = (
        "import sys\nfrom cues.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "print([m for m in sys.modules if m in ('lmdb', 'msgpack', 'cues.storage.environment', 'cues.engine.local')])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.splitlines()[-1] == "[]"
    assert cues("--version").out == f"cues {library.__version__}\ncore: {implementation()}\n"


def test_every_command_has_help_with_examples_and_names_its_variables() -> None:
    for name, summary in COMMANDS.items():
        text = CliRunner().invoke(commands, [name, "--help"], prog_name="cues", terminal_width=120).output
        assert f"  cues {name} " in text, name
        assert len(summary) < 72
        for option in re.findall(r"^  (?:-\w, )?--([a-z-]+)", text, re.M):
            assert option == "help" or re.search(rf"(?s)--{option}\b.*?\[env\s+var:\s+CUES_", text) or option == "table"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rum"], ["no command 'rum'", "Try: cues run"]),
        (["graph.py"], ["no command", "Try: cues run graph.py"]),
        (["run", "x.py", "--idle-exits", "3"], ["--idle-exits", "Try: cues run --idle-exit"]),
        (["run"], ["Missing argument", "Try: cues run --help"]),
        (["status"], ["No store is named.", "CUES_STORE"]),
        (["tail", "#x"], ["No store is named."]),
        (["run", "x.py", "--idle-exit", "-1"], ["-1"]),
    ],
)
def test_wrong_usage_ends_with_2_and_says_what_to_try(arguments: list[str], words: list[str]) -> None:
    result = cues(*arguments)
    assert result.code == 2
    assert result.out == ""
    for word in words:
        assert word in result.err


def test_on_windows_one_sentence_and_2() -> None:
    code = "import os; os.name = 'nt'\nfrom cues.cli import main\nmain([])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (found.returncode, len(found.stderr.splitlines()), found.stdout) == (2, 1, "")


@pytest.mark.slow
def test_a_reader_that_closes_the_pipe_early_is_not_an_error(shop: Path) -> None:
    command = subprocess.Popen(
        [*CUES, "tail", f"{shop}#orders", "-f", "-n", "all"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(),
    )
    assert command.stdout is not None
    assert command.stderr is not None
    assert command.stdout.readline()
    command.stdout.close()
    # It learns of it at its next line.
    with library.open(shop.parent / "data" / "shop") as store:
        store.queue("orders").appender().write({"n": 31, "count": 31, "city": "Rome"})
    assert command.stderr.read() == b""
    assert command.wait(60) == 0
    with library.open(shop.parent / "data" / "shop") as store:
        assert len(store.queue("orders")) == 31


# --- targets --------------------------------------------------------------------------------------


def test_a_graph_file_a_store_and_the_variable_mean_the_same(shop: Path) -> None:
    store = shop.parent / "data" / "shop"
    expected = cues("queues", shop).out
    assert [row["queue"] for row in rows(expected)] == ["errors", "orders", "priced"]
    assert [r["last_index"] for r in rows(cues("queues", store).out)] == [r["last_index"] for r in rows(expected)]
    assert rows(cues("queues", CUES_STORE=str(store)).out)[0]["queue"] == "errors"
    assert rows(cues("tail", "#priced", "-n", "1", CUES_STORE=str(store)).out)[0]["n"] == 30


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("{store}#price", ["no queue 'price'", "Try: cues tail {store}#priced"]),
        ("{folder}", ["There is no store", "Try: give {store}"]),
        ("{folder}/data/shap", ["There is no store", "Try: give {store}"]),
        ("{shop}#priced/3", ["no partition 3"]),
        ("{shop}#price/3", ["no queue 'price/3'"]),
    ],
)
def test_unknown_names_suggest_the_nearest(shop: Path, target: str, words: list[str]) -> None:
    names = {"store": shop.parent / "data" / "shop", "folder": shop.parent, "shop": shop}
    result = cues("tail", target.format(**names))
    assert result.code == 1
    for word in words:
        assert word.format(**names) in result.err


def test_a_graph_that_has_not_run_has_no_store(tmp_path: Path) -> None:
    path = tmp_path / "graph.py"
    path.write_text(SHOP)
    for command in ("status", "queues", "check"):
        result = cues(command, path)
        assert result.code == 1
        assert "has not run yet" in result.err
        assert f"Try: cues run {path}" in result.err
    assert not (tmp_path / "data").exists()


# --- tail -----------------------------------------------------------------------------------------


def numbers(*arguments: object) -> list[object]:
    result = cues("tail", *arguments)
    assert result.code == 0, result.err
    return [row["n"] for row in rows(result.out)]


def test_tail_from_wherever(shop: Path) -> None:
    priced = f"{shop}#priced"
    all_of_them = [n for n in range(1, 31) if n not in (7, 21)]
    assert numbers(priced) == all_of_them[-10:]
    assert numbers(priced, "-n", "3") == [28, 29, 30]
    assert numbers(priced, "-n", "0") == []
    assert numbers(priced, "-n", "all") == all_of_them
    assert numbers(priced, "--from", "start", "-n", "2") == [1, 2]
    assert numbers(priced, "--from", "27") == [29, 30]
    assert numbers(priced, "--from", "29") == []
    assert numbers(priced, "--from", "end") == []
    assert numbers(priced, "--from", "1h") == all_of_them
    assert numbers(priced, "--from", "2013-01-01T00:00Z", "-n", "1") == [1]
    assert numbers(priced, "--from", "2100-01-01T00:00+01:00") == []
    assert numbers(priced, "--where", "city == 'Oslo'", "-n", "2") == [27, 30]
    assert numbers(priced, "--where", "total > 50 and city == 'Oslo'", "--from", "start", "-n", "1") == [27]


@pytest.mark.parametrize(
    ("place", "code", "words"),
    [
        ("-5", 2, "the first index is 1"),
        ("0", 2, "the first index is 1"),
        ("999", 1, "ends before 29"),
        ("2013-01-01", 2, "2013-01-01T00:00Z"),
        ("soon", 2, "not a place"),
    ],
)
def test_places_that_cannot_be_meant(shop: Path, place: str, code: int, words: str) -> None:
    result = cues("tail", f"{shop}#priced", f"--from={place}")
    assert result.code == code
    assert words in result.err
    assert "Try: " in result.err


def test_tail_with_metadata_gives_index_time_and_hash(shop: Path) -> None:
    (row,) = rows(cues("tail", f"{shop}#priced", "--meta", "--from", "5", "-n", "1").out)
    meta = row["q/meta"]
    assert isinstance(meta, dict)
    assert re.fullmatch("[0-9a-f]{32}", meta["q/hash"])
    assert meta["q/queue"]["priced"]["q/t"] == 5
    assert datetime.fromisoformat(meta["q/queue"]["priced"]["q/time"]).tzinfo is not None
    assert row["n"] == 5


def test_a_field_that_no_message_has_is_reported(shop: Path) -> None:
    result = cues("tail", f"{shop}#priced", "--where", "citty == 'Rome'")
    assert (result.code, result.out) == (0, "")
    assert "did you mean 'city'?" in result.err


def test_tail_follows_until_ctrl_c(shop: Path, tmp_path: Path) -> None:
    with library.open(tmp_path / "s", durability="process") as store:
        appender = store.queue("q").appender()
        appender.write({"n": 1})
        with Command("tail", f"{tmp_path / 's'}#q", "-f", terminal=True) as tail:
            tail.until('"n": 1')
            appender.write({"n": 2})
            tail.until('"n": 2')
            tail.type("\x03")
            assert tail.wait() == 130
        assert "Traceback" not in tail.text


def test_every_type_has_a_form_in_json(tmp_path: Path) -> None:
    message = {
        "datetime": datetime(2026, 1, 31, 12, tzinfo=UTC),
        "date": date(2026, 1, 31),
        "delta": timedelta(minutes=1.5),
        "decimal": Decimal("1.10"),
        "uuid": uuid.UUID(int=7),
        "bytes": b"\xff\0",
        "nan": float("nan"),
        "set": {3, 1, 2},
        "tuple": (1, (2,)),
        "big": 1 << 80,
        "text": "Zürich 日本",
        "nested": [{"inf": float("inf")}],
    }
    with library.open(tmp_path / "s", durability="process") as store:
        store.queue("q").appender().write(message)
    result = cues("tail", f"{tmp_path / 's'}#q")
    assert json.loads(result.out) == {
        "datetime": "2026-01-31T12:00:00Z",
        "date": "2026-01-31",
        "delta": 90.0,
        "decimal": "1.10",
        "uuid": "00000000-0000-0000-0000-000000000007",
        "bytes": {"$bytes": "/wA="},
        "nan": {"$float": "nan"},
        "set": [1, 2, 3],
        "tuple": [1, [2]],
        "big": 1 << 80,
        "text": "Zürich 日本",
        "nested": [{"inf": {"$float": "inf"}}],
    }
    # And what tail prints, send reads.
    assert cues("send", f"{tmp_path / 't'}#q", "--create", stdin=result.out).code == 0
    assert cues("tail", f"{tmp_path / 't'}#q").out == result.out
    with library.open(tmp_path / "t") as store:
        (copied,) = store.queue("q").tailer()
    assert copied["bytes"] == b"\xff\0"
    assert copied["nested"] == [{"inf": float("inf")}]


# --- where ----------------------------------------------------------------------------------------

ORDER = {"n": 3, "city": "Oslo", "item": {"name": "pear", "tags": ["a", "b"]}, "none": None, "q/type": "order"}


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("n == 3", True),
        ("1 < n <= 3", True),
        ("n > 3 or city == 'Oslo'", True),
        ("not n", False),
        ("missing > 3", False),
        ("missing > 3 or n == 3", True),
        ("missing is None", True),
        ("item.name == 'pear'", True),
        ("item['tags'][1] == 'b' and item.tags[-1] == 'b'", True),
        ("item.missing.deeper is None", True),
        ("city in ('Rome', 'Oslo')", True),
        ("'b' in item.tags", True),
        ("city.lower().startswith('os')", True),
        ("match(city, '^O.*o$')", True),
        ("get('q/type') == 'order'", True),
        ("has('none') and not has('missing')", True),
        ("len(item.tags) * 2 + 1 == 5", True),
        ("n % 2 == 1 if city == 'Oslo' else False", True),
        ("-n < 0", True),
        ("str(n) == '3'", True),
        ("city * 1000000000 == 3", False),
        ("'%1000000000d' % n == ''", False),
        ("round(n, 2) == 3", True),
        ("round(n, -30000000) == 0", False),
        ("round(2.5) == 2 and round(2.567, 2) == 2.57", True),
        (" * ".join(["9223372036854775807"] * 60) + " > 0", True),
        (" * ".join(["9223372036854775807"] * 70) + " > 0", False),
        ("city + city == 'OsloOslo' and (1, 2) + (3,) == (1, 2, 3)", True),
    ],
)
def test_what_expressions_say(text: str, matches: bool) -> None:
    assert Where(text)(ORDER) is matches


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "item.__class__()",
        "city.format(n)",
        "city.encode()",
        "(lambda: 1)()",
        "[x for x in item]",
        "9 ** 9 ** 9",
        "1 << 99",
        "f'{n}'",
        "n := 3",
        "n ==",
        "len(n=3)",
        "(yield)",
        "city[0:9]",
        "",
    ],
)
def test_what_expressions_cannot_do(text: str) -> None:
    with pytest.raises(Refused):
        Where(text)


def test_texts_that_are_put_together_are_bounded() -> None:
    assert not Where(" + ".join(["text"] * 200) + " != ''")({"text": "x" * 10_000})


@pytest.mark.parametrize(
    "text", ["(" * 1_000 + "1" + ")" * 1_000, "not " * 2_400 + "n", "-" * 9_000 + "n", "n" * 10_001]
)
def test_an_expression_that_is_too_deep_or_too_long_says_so(text: str) -> None:
    with pytest.raises(Refused, match=r"nested|characters|not an expression"):
        Where(text)


def test_attributes_are_fields_and_never_pythons(shop: Path) -> None:
    assert Where("city.__class__ is None")(ORDER)
    assert Where("item.keys is None")(ORDER)


# --- send -----------------------------------------------------------------------------------------


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A store with an empty queue ``q``."""
    with library.open(tmp_path / "s", durability="process") as store:
        store.queue("q", max_message_bytes=1000)
    return tmp_path / "s"


def sent(store: Path) -> list[dict[str, object]]:
    with library.open(store, readonly=True) as opened:
        return list(opened.queue("q").tailer())


def test_messages_as_arguments(empty: Path) -> None:
    result = cues("send", f"{empty}#q", "x=1", "name=Ada", "ok=true", 'tags=["a"]', 'zip="01"', "empty=", "e=a=b")
    assert rows(result.out) == [{"queue": "q", "sent": 1, "first_index": 1, "last_index": 1}]
    result = cues("send", f"{empty}#q", '{"y": 1}', ' {"y": 2.5}', "--table")
    assert result.out == "2 messages sent to q (index 2 to 3)\n"
    assert sent(empty) == [
        {"x": 1, "name": "Ada", "ok": True, "tags": ["a"], "zip": "01", "empty": "", "e": "a=b"},
        {"y": 1},
        {"y": 2.5},
    ]


@pytest.mark.parametrize(
    "arguments", [["x"], ["=1"], ["x=1", "{}"], ["x=1", "x=2"], ['{"x": 1'], ['{"$bytes": "!"}', "{}"], ["{}", "[]"]]
)
def test_arguments_that_are_not_a_message_send_nothing(empty: Path, arguments: list[str]) -> None:
    result = cues("send", f"{empty}#q", *arguments)
    assert result.code == 2, result
    assert "Try: " in result.err
    assert sent(empty) == []


def test_what_to_try_is_what_would_work(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with library.open(path) as store:
        store.queue("a", partitions=2, key="user")
        store.queue("b")
    result = cues("send", f"{path}#a/7", "user=1")
    assert result.code == 1 and "0 to 1" in result.err and "--create" not in result.err
    (tmp_path / "m.jsonl").write_text("{}\n")
    result = cues("import", path, tmp_path / "m.jsonl")
    assert result.code == 2 and "Try: cues import" in result.err


def test_lines_are_sent_as_they_come_and_what_is_there_is_one_commit(empty: Path) -> None:
    lines = "".join(f'{{"n": {n}}}\n' for n in range(1000))
    assert rows(cues("send", f"{empty}#q", stdin=lines + "\n\n" + '{"n": "last"}').out)[0]["sent"] == 1001
    assert [m["n"] for m in sent(empty)] == [*range(1000), "last"]
    with library.open(empty, readonly=True) as store:
        tailer = store.queue("q").tailer()
        times = {tailer.envelope.time for _ in tailer if tailer.envelope}
    assert len(times) < 20
    # A slow writer's line does not wait for the next.
    command = subprocess.Popen([*CUES, "send", f"{empty}#q"], stdin=subprocess.PIPE, env=environment())
    assert command.stdin is not None
    with library.open(empty) as store:
        tailer = store.queue("q").tailer()
        tailer.to_end()
        for n in (1, 2):
            command.stdin.write(f'{{"slow": {n}}}\n'.encode())
            command.stdin.flush()
            assert tailer.read(block=True, timeout=60) == {"slow": n}
        command.stdin.close()
        assert command.wait(60) == 0


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"n": 3', "Line 3 is not a JSON object"),
        ("[1]", "Line 3 is not a JSON object (it is list)"),
        ('{"n": "' + "x" * 2000 + '"}', "Line 3 and the following ones cannot be sent"),
        ('{"q/hash": "x"}', "Line 3 and the following ones cannot be sent"),
        ("\udcff", "Line 3 is not a JSON object"),
    ],
)
def test_a_line_that_is_not_a_message_is_named_and_nothing_after_it_is_sent(empty: Path, line: str, words: str) -> None:
    text = f'{{"n": 1}}\n\n{line}\n{{"n": 4}}\n'
    result = cues("send", f"{empty}#q", stdin=text.encode("utf-8", "surrogateescape"))
    assert result.code == 1
    assert words in result.err
    assert "Try: " in result.err
    assert rows(result.out)[0]["sent"] == 1
    assert sent(empty) == [{"n": 1}]


def test_an_unknown_queue_is_not_made_unasked(empty: Path) -> None:
    result = cues("send", f"{empty}#queue", "x=1")
    assert result.code == 1
    assert "no queue 'queue'" in result.err
    assert "--create" in result.err
    assert cues("send", f"{empty}#new", "x=1", "--create").code == 0
    assert cues("send", empty.parent / "nowhere#q", "x=1").code == 1
    assert not (empty.parent / "nowhere").exists()
    with library.open(empty, readonly=True) as store:
        assert store.queues() == ["new", "q"]


def test_a_send_to_a_try_log_is_refused(shop: Path) -> None:
    result = cues("send", f"{shop}#shop.price", "x=1")
    assert result.code == 2
    assert "try log" in result.err


# --- status, queues, tries, show, seek ------------------------------------------------------------


def test_status_shows_the_position_and_the_failures_of_each_processor(shop: Path) -> None:
    store, *processors = rows(cues("status", shop).out)
    assert store["durability"] == "process"
    found = {p["processor"]: p for p in processors}
    price = found["shop.price"]
    assert price["kind"] == "stream"
    assert price["running"] is False
    assert price["tailers"] == {"shop.price.orders": {"queue": "orders", "position": 31, "lag": price["lag"]}}
    assert price["errors"] == 2
    last = price["last_error"]
    assert isinstance(last, dict)
    assert (last["queue"], last["index"]) == ("errors", 2)
    table = cues("status", shop, "--table").out
    assert "survives kill -9, not power loss" in table
    assert "Not running" in table
    assert "Last error of shop.price" in table


def test_the_output_is_a_table_on_a_terminal_and_json_in_a_pipe(shop: Path) -> None:
    with Command("queues", shop, terminal=True) as command:
        assert command.wait() == 0
    assert command.text.startswith("QUEUE ")
    with Command("queues", shop, "--json", terminal=True) as command:
        assert command.wait() == 0
    assert command.text.startswith("{")
    assert cues("queues", shop, "--table").out.startswith("QUEUE ")
    assert cues("queues", shop, CUES_OUTPUT="table").out.startswith("QUEUE ")
    assert cues("queues", shop).out.startswith("{")


def test_tries_are_the_maps_and_a_table_of_steps(shop: Path) -> None:
    maps = rows(cues("tries", f"{shop}#price").out)
    assert {m["q/type"] for m in maps} == {"q.type.try/snapshot", "q.type.try/attempt", "q.type.try/error-attempt"}
    table = cues("tries", f"{shop}#shop.price", "--table").out
    assert "orders [7, 8)" in table
    assert "errors from 1" in table
    assert "Try: cues tries" in cues("tries", f"{shop}#prize").err


def test_show_draws_and_gives_data(shop: Path) -> None:
    assert "stream  price" in cues("show", shop).out
    assert cues("show", shop, "--format", "mermaid").out.startswith("flowchart")
    assert [row["processor"] for row in rows(cues("show", shop, "--json").out)] == [
        "shop.orders",
        "shop.price",
        "shop.save",
    ]
    assert cues("show", shop.parent / "data" / "shop").code == 2


SEEKABLE = """
import cues
graph = cues.Graph("again", durability="process")
graph.source("orders")

@graph.sink("orders")
def see(order, process):
    print(order["n"], process.delivery.generation, flush=True)
"""


@pytest.mark.slow
def test_seek_moves_a_processor_that_runs_and_is_idle(tmp_path: Path) -> None:
    path = tmp_path / "graph.py"
    path.write_text(SEEKABLE)
    target = f"{path}#see"
    assert cues("send", f"{path}#orders", stdin='{"n": 1}\n{"n": 2}\n').code == 0
    with Command("run", path, "--json") as run:
        run.until(r"2 0\n(.*\n)*.*progress")
        refused = cues("seek", target, "--to", "start")
        assert refused.code == 2
        assert "orders from 3 to 1" in refused.err
        assert cues("seek", target, "--to", "2", "--yes").code == 0
        run.until(r"2 0\n(.*\n)*2 0\n")
        assert cues("seek", target, "--to", "start", "--again", "--yes").code == 0
        run.until(r"1 1\n(.*\n)*2 1\n")
        run.signal()
        assert run.wait() == 130
    # And one that does not run.
    moved = cues("seek", target, "--to", "end", "--yes")
    assert rows(moved.out)[0]["positions"] == {"again.see.orders": 3}
    assert cues("seek", target, "--to", "9", "--yes").code == 1
    assert cues("seek", target, "--to", "1", "--tailer", "others", "--yes").code == 2
    assert cues("seek", f"{path}#sea", "--to", "1", "--yes").code == 1


def test_the_queues_of_a_store_with_options(tmp_path: Path) -> None:
    with library.open(tmp_path / "s", durability="process") as store:
        store.queue("kept", metadata={"t", "time"}, retention=500)
    table = cues("queues", tmp_path / "s", "--table").out
    assert "metadata=t,time" in table
    assert "keeps 500 messages" in table


def test_help_loads_no_more_than_it_shows() -> None:
    """Of Cues only the command line is loaded, of other packages only click. So --help is fast."""
    look = (
        "import sys; from cues.cli import main; sys.argv = ['cues', '--help']\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print(*sorted(name for name in sys.modules if name.partition('.')[0] == 'cues' or hasattr(sys.modules[name],"
        " '__file__') and 'site-packages' in (sys.modules[name].__file__ or '')), file=sys.stderr)"
    )
    found = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    loaded = {name for name in found.stderr.split() if not name.startswith(("click", "__editable__", "_distutils"))}
    known = {"cues", "cues.cli", "cues.cli.app", "cues.cli.options", "cues.cli.printing", "cues.errors"}
    known |= {"cues.base", "cues.base.collector", "cues.overrides"}
    assert {"cues", "cues.cli"} <= loaded <= known


@pytest.mark.interpreted
def test_nothing_of_the_environment_is_needed(shop: Path) -> None:
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "LANG": "C"}
    found = subprocess.run([*CUES, "tail", f"{shop}#priced", "-n", "1"], capture_output=True, env=env)
    assert found.returncode == 0
    assert json.loads(found.stdout)["n"] == 30
