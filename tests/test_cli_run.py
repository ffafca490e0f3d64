"""``cues run``: how it ends, how it is interrupted, what it says, what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from terminal import LIVE, Command, cues

import cues as library

COUNTING = """
import cues
graph = cues.Graph("counting", errors="errors", durability="process")

@graph.source("numbers", resume="skip")
def numbers():
    for n in range(1000):
        yield {"n": n}

@graph.stream("numbers", "squares")
def square(number):
    if number["n"] % 100 == 99:
        raise ValueError(f"{number['n']} is unlucky")
    return {"n": number["n"], "square": number["n"] ** 2}
"""

FED = """
import cues
graph = cues.Graph("fed", durability="process")
graph.source("orders")

@graph.stream("orders", "priced")
def price(order):
    return {**order, "total": order["count"] * 2}
"""


@pytest.fixture
def graph(tmp_path: Path):  # type: ignore[no-untyped-def]
    def write(text: str, name: str = "graph.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    return write


def contents(store: Path, queue: str) -> list[dict[str, object]]:
    with library.open(store, readonly=True) as opened:
        return list(opened.queue(queue).tailer())


def test_a_run_ends_by_itself_and_a_second_one_finds_nothing_new(graph, checked) -> None:  # type: ignore[no-untyped-def]
    path = graph(COUNTING)
    first = cues("run", path, "--json")
    assert first.code == 0, first.err
    said = json.loads(first.out)
    assert said["outcome"] == "done"
    assert not said["nothing_new"]
    assert said["failed"] == 10
    assert said["processors"]["counting.square"]["taken"] == 1000
    assert said["queues"]["squares"] == {"messages": 990, "new": 990}
    for line in first.err.splitlines():
        assert json.loads(line)["type"] in ("event", "progress")
    assert "1,000 numbers processed" in first.err

    store = path.parent / "data" / "counting"
    assert [m["n"] for m in contents(store, "squares")] == [n for n in range(1000) if n % 100 != 99]
    again = cues("run", path)
    assert again.code == 0
    assert json.loads(again.out)["nothing_new"]
    assert "1,000 numbers already processed; nothing new. --fresh starts over" in again.err
    assert f"10 failed messages unresolved on errors, all of them in earlier runs: cues errors {path}" in again.err
    checked(store)


def test_a_run_says_which_delayed_messages_wait_and_a_later_run_takes_them(graph) -> None:  # type: ignore[no-untyped-def]
    """A journal says what waits, as a terminal does; a run after that time finishes."""
    path = graph("""
import cues
graph = cues.Graph("late", durability="process")

@graph.source("rows")
def rows(position):
    for n, delay in enumerate(["0s", "0s", "2s"], start=1):
        if n > (position or 0):
            yield n, cues.delayed({"n": n}, delay=delay)

@graph.stream("rows", "out")
def copy(row):
    return row
""")
    first = cues("run", path)
    said = json.loads(first.out)
    assert first.code == 0 and said["delayed"]["late.copy"]["messages"] == 1
    assert "late.copy holds 1 delayed message, until " in first.err and ": run again then" in first.err
    assert [m["n"] for m in contents(path.parent / "data" / "late", "out")] == [1, 2]
    time.sleep(2.1)
    second = cues("run", path)
    assert second.code == 0 and not json.loads(second.out)["delayed"]
    assert "delayed message" not in second.err
    assert [m["n"] for m in contents(path.parent / "data" / "late", "out")] == [1, 2, 3]


def test_on_a_terminal_a_table_is_drawn_and_taken_away_and_the_summary_stays(graph) -> None:  # type: ignore[no-untyped-def]
    path = graph(COUNTING)
    with Command("run", path, terminal=True) as run:
        assert run.wait() == 0
    assert "\033[?" not in run.text
    shown = run.screen.split("\n")
    assert any(line.startswith("PROCESSOR") for line in shown)
    assert sum("square " in line for line in shown) == 1, run.screen
    assert "counting: 1,000 numbers processed in" in run.screen
    assert f"10 messages failed: cues errors {path}" in run.screen
    with Command("run", path, terminal=True) as again:
        assert again.wait() == 0
    assert [line.strip()[:66] for line in again.screen.strip().splitlines()] == [
        "1,000 numbers already processed; nothing new. --fresh starts over",
        "10 failed messages unresolved on errors, all of them in earlier runs: cues errors"[:66],
    ]


def test_what_a_function_prints_is_not_mixed_with_the_table(graph) -> None:  # type: ignore[no-untyped-def]
    path = graph(LIVE.replace("    return tick\n", "    print('saw', tick['n'])\n    return tick\n"))
    with Command("run", path, terminal=True) as run:
        run.until("saw 500\r\n")
        run.type("\x03")
        assert run.wait() == 130
    lines = run.screen.split("\n")
    saw = [line for line in lines if "saw" in line]
    # The terminal itself writes the ^C, between any two others: what came well before it is looked at.
    assert saw[:400] == [f"saw {n}" for n in range(400)]


def test_lines_that_threads_print_are_not_mixed_with_each_other(graph) -> None:  # type: ignore[no-untyped-def]
    """``print`` writes each argument by itself: the line of one thread used to end up in that of another."""
    shout = """
import threading

def shout(name):
    for n in range(2000):
        print(name, n)

@graph.stream("ticks", "tocks")
def tock(tick):
    if tick["n"] == 0:
        threads = [threading.Thread(target=shout, args=(name,)) for name in ("ping", "pong")]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print("begun", end="")
    return tick
"""
    path = graph(LIVE[: LIVE.index("@graph.stream")] + shout)
    with Command("run", path, terminal=True) as run:
        run.until("begun")  # it is shown, although the line does not end
        run.type("\x03")
        assert run.wait() == 130
    lines = run.screen.split("\n")
    for name in ("ping", "pong"):
        assert [line for line in lines if name in line] == [f"{name} {n}" for n in range(2000)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_drains_a_live_graph_and_the_next_run_continues(graph, checked, number: int) -> None:  # type: ignore[no-untyped-def]
    path = graph(LIVE)
    with Command("run", path, "--json") as run:
        run.until(r'"written": [1-9]')
        run.signal(number)
        assert run.wait() == 130
    assert "Draining" in run.text
    summary = json.loads(next(line for line in run.text.splitlines() if line.startswith('{"graph"')))
    assert summary["outcome"] == "drained"
    store = path.parent / "data" / "live"
    ticks = contents(store, "ticks")
    assert ticks
    assert contents(store, "tocks") == ticks == [{"n": n} for n in range(len(ticks))]
    with Command("run", path, "--json") as run:
        run.until(r'"written": [1-9]')
        run.signal(number)
        assert run.wait() == 130
    more = contents(store, "tocks")
    assert len(more) > len(ticks)
    assert more == [{"n": n} for n in range(len(more))]
    checked(store)


def test_the_second_ctrl_c_does_not_wait_for_a_function_that_does_not_return(graph, checked) -> None:  # type: ignore[no-untyped-def]
    path = graph(LIVE.replace("    return tick\n", "    print('stuck', flush=True)\n    time.sleep(1000)\n"))
    with Command("run", path, terminal=True) as run:
        run.until("stuck")
        run.type("\x03")
        run.until("Draining")
        run.type("\x03")
        assert run.wait() == 130
    assert "interrupted" in run.screen
    store = path.parent / "data" / "live"
    assert contents(store, "tocks") == []
    checked(store)


def test_killed_at_random_the_next_run_continues_exactly(graph, checked) -> None:  # type: ignore[no-untyped-def]
    path = graph(LIVE)
    store = path.parent / "data" / "live"
    for _ in range(3):
        with Command("run", path, "--json") as run:
            run.until('"type": "progress"')
            run.signal(signal.SIGKILL)
            assert run.wait() == -signal.SIGKILL
    with Command("run", path, "--json") as run:
        run.until('"type": "progress"')
        run.signal(signal.SIGINT)
        assert run.wait() == 130
    ticks = contents(store, "ticks")
    assert ticks == contents(store, "tocks") == [{"n": n} for n in range(len(ticks))]
    checked(store)


def test_an_error_without_an_error_queue_stops_the_run_with_the_users_traceback(graph) -> None:  # type: ignore[no-untyped-def]
    path = graph(COUNTING.replace(', errors="errors"', ""))
    result = cues("run", path)
    assert result.code == 6
    assert json.loads(result.out)["outcome"] == "stopped"
    assert "ValueError: 99 is unlucky" in result.err
    assert f'File "{path}"' in result.err
    assert "in square" in result.err
    assert f"{os.sep}cues{os.sep}runner.py" not in result.err
    assert "Error: counting.square stopped" in result.err
    assert result.err.count("counting.square stopped") == result.err.count("stopped after 1 attempt") == 1
    assert "give the graph an error queue: cues.Graph(…, errors='errors')" in result.err
    store = path.parent / "data" / "counting"
    assert len(contents(store, "squares")) == 99
    # Mended, it continues at that message.
    path.write_text(COUNTING.replace(', errors="errors"', "").replace("== 99:", "== 100:"))
    assert cues("run", path).code == 0
    assert len(contents(store, "squares")) == 1000


def test_a_second_run_fails_at_once_and_names_the_process(graph) -> None:  # type: ignore[no-untyped-def]
    path = graph(LIVE)
    with Command("run", path, "--json") as run:
        run.until('"type": "progress"')
        second = cues("run", path)
        assert second.code == 7
        assert f"process {run.pid}" in second.err
        assert "Try: " in second.err
        assert second.out == ""
        fresh = cues("run", path, "--fresh", "--yes")
        assert fresh.code == 7
        assert f"process {run.pid}" in fresh.err
        assert "nothing was deleted" in fresh.err
        run.signal()
        assert run.wait() == 130


def test_a_graph_fed_by_send_takes_what_comes_and_ends_when_idle(graph) -> None:  # type: ignore[no-untyped-def]
    waits = "    while not os.path.exists(__file__ + '.go'):\n        time.sleep(0.01)\n    return"
    path = graph("import os, time" + FED.replace("    return", waits))
    store = path.parent / "data" / "fed"
    with library.open(store, durability="process") as opened:
        opened.queue("orders").appender().write({"count": 1})
    with Command("run", path, "--idle-exit", "0.5", "--json") as run:
        run.until('"type": "progress"')  # it is not idle: the function has the first message, and waits
        sent = cues("send", f"{path}#orders", "count=4", "item=pear")
        assert sent.code == 0, sent.err
        assert json.loads(sent.out) == {"queue": "orders", "sent": 1, "first_index": 2, "last_index": 2}
        path.with_name("graph.py.go").touch()
        assert run.wait() == 0
    assert "fed: 2 orders processed in" in run.text
    assert contents(store, "priced") == [{"count": 1, "total": 2}, {"count": 4, "item": "pear", "total": 8}]
    assert cues("send", f"{path}#orders", "count=5").code == 0
    assert "1 message of orders processed in" in cues("run", path, "--idle-exit", "0").err


def test_status_queues_tail_and_check_work_while_the_graph_runs(graph) -> None:  # type: ignore[no-untyped-def]
    path = graph(LIVE)
    with Command("run", path, "--json") as run:
        run.until('"type": "progress"')
        store, *processors = map(json.loads, cues("status", path).out.splitlines())
        assert store["durability"] == "process"
        tock = next(p for p in processors if p["processor"] == "live.tock")
        assert tock["running"]
        assert tock["owner"]["pid"] == run.pid
        assert tock["rate"] > 0
        with Command("tail", f"{path}#tocks", "-f", "--from", "end", "-n", "3") as tail:
            assert tail.wait() == 0
        seen = [json.loads(line)["n"] for line in tail.text.splitlines()]
        assert seen == list(range(seen[0], seen[0] + 3))
        queues = [json.loads(line) for line in cues("queues", path).out.splitlines()]
        assert [q["queue"] for q in queues] == ["ticks", "tocks"]
        check = cues("check", path)
        assert (check.code, json.loads(check.out)["problems"]) == (0, 0), check
        run.signal()
        assert run.wait() == 130


def test_fresh_asks_and_deletes_only_the_store(graph) -> None:  # type: ignore[no-untyped-def]
    path = graph(COUNTING)
    store = path.parent / "data" / "counting"
    assert cues("run", path).code == 0
    (store / "mine.txt").write_text("keep")

    refused = cues("run", path, "--fresh")
    assert refused.code == 2
    assert "--yes" in refused.err
    assert (store / "data.mdb").exists()

    with Command("run", path, "--fresh", terminal=True) as run:
        run.until(r"Delete it\? \[y/N\]")
        assert "3 queues, 2,000 messages" in run.text
        run.type("n\n")
        assert run.wait() == 1
    assert (store / "data.mdb").exists()

    with Command("run", path, "--fresh", terminal=True) as run:
        run.until(r"Delete it\? \[y/N\]")
        run.type("y\n")
        assert run.wait() == 0
    assert "1,000 numbers processed" in run.screen
    assert (store / "mine.txt").read_text() == "keep"


def test_fresh_deletes_nothing_that_is_not_a_store(graph, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = graph(COUNTING)
    other = tmp_path / "other"
    other.mkdir()
    (other / "data.mdb").write_bytes(b"somebody else's" * 1000)
    result = cues("run", path, "--store", other, "--fresh", "--yes")
    assert result.code == 1
    assert "not an LMDB file" in result.err
    assert (other / "data.mdb").read_bytes() == b"somebody else's" * 1000


@pytest.mark.damages_stores
def test_fresh_is_the_way_out_of_a_damaged_store(graph) -> None:  # type: ignore[no-untyped-def]
    path = graph(COUNTING.replace(', durability="process"', ""))
    assert cues("run", path).code == 0
    data = path.parent / "data" / "counting" / "data.mdb"
    with data.open("r+b") as file:
        file.truncate(20_000)
    damaged = cues("run", path)
    assert damaged.code == 1
    assert "is truncated" in damaged.err
    fresh = cues("run", path, "--fresh", "--yes")
    assert fresh.code == 0, fresh.err
    assert "it is damaged" in fresh.err
    assert json.loads(fresh.out)["queues"]["numbers"]["new"] == 1000


def test_a_users_warnings_are_lines_of_their_own_and_ours_appear_once(graph) -> None:  # type: ignore[no-untyped-def]
    text = COUNTING.replace("    for n in", "    import logging; logging.warning('about to count')\n    for n in")
    path = graph(text)
    result = cues("run", path, "--json")
    lines = [json.loads(line) for line in result.err.splitlines()]
    assert {"type": "log", "level": "warning", "text": "about to count"} in lines
    with Command("run", path, "--fresh", "--yes", terminal=True) as run:
        assert run.wait() == 0
    assert run.screen.count("warning: about to count") == 1
    failures = [line for line in run.screen.split("\n") if "is unlucky" in line]
    assert failures
    assert all(line.startswith("counting.square: ") for line in failures)


def test_a_dry_run_starts_nothing_and_says_where_spark_calls_the_functions(graph) -> None:  # type: ignore[no-untyped-def]
    path = graph(COUNTING)
    drawn = cues("run", path, "--dry-run", cwd=path.parent)
    assert drawn.code == 0 and "square" in drawn.out and "On Spark" not in drawn.out
    spark = cues("run", path, "--engine", "spark", "--dry-run", cwd=path.parent)
    assert spark.code == 0 and "  square: on all executors" in spark.out, spark.out
    shared = cues("run", path, "--engine", "spark", "--queues", "shared", "--dry-run", cwd=path.parent)
    assert "  numbers: in the driver, into its machine's store" in shared.out
    assert sorted(file.name for file in path.parent.iterdir() if file.name != "__pycache__") == [path.name]


def test_a_durability_is_taken_for_a_new_store_and_refused_for_another(graph) -> None:  # type: ignore[no-untyped-def]
    path = graph(COUNTING.replace(', durability="process"', ""))
    assert cues("run", path, "--durability", "process").code == 0
    assert cues("run", path).code == 0
    result = cues("run", path, "--durability", "disk")
    assert result.code == 1
    assert "'process', not 'disk'" in result.err


def test_the_place_of_the_store(graph, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = graph(COUNTING)
    assert cues("run", path, CUES_STORE=str(tmp_path / "from-variable")).code == 0
    assert cues("run", path, "--store", tmp_path / "given", CUES_STORE=str(tmp_path / "from-variable")).code == 0
    assert not (tmp_path / "data").exists()
    assert (tmp_path / "from-variable" / "data.mdb").exists()
    assert (tmp_path / "given" / "data.mdb").exists()


def test_a_changed_topology_stops_the_start_until_it_is_accepted(graph) -> None:  # type: ignore[no-untyped-def]
    path = graph(COUNTING)
    assert cues("run", path).code == 0
    path.write_text(COUNTING.replace('@graph.stream("numbers", "squares")', '@graph.stream("others", "squares")'))
    result = cues("run", path, "--idle-exit", "0")
    assert result.code == 1
    assert "--accept-topology" in result.err
    assert cues("run", path, "--idle-exit", "0", "--accept-topology").code == 0


RAISING = """
import cues
graph = cues.Graph("g", errors={errors!r})

@graph.source("in")
def read(position):
    n = position or 0
    while n < 5:
        n += 1
        if {place!r} == "source" and n > 3:
            raise ValueError("mark 77")
        yield n, {{"n": n}}

@graph.stream("in", "out")
def change(message):
    if {place!r} == "stream":
        raise ValueError("mark 77")
    return message

@graph.sink("out", batch=True, errors=None)
def save(messages):
    if {place!r} == "sink":
        raise ValueError("mark 77")
"""


@pytest.mark.parametrize("place", ["source", "stream", "sink", "errors"])
@pytest.mark.parametrize("json", [[], ["--json"]])
def test_an_error_is_told_once(graph, place: str, json: list[str]) -> None:  # type: ignore[no-untyped-def]
    """Beside the last line of its traceback. Errors on an error queue are one line with their number."""
    given = {"errors": "errors", "place": "stream"} if place == "errors" else {"errors": None, "place": place}
    path = graph(RAISING.format(**given))
    result = cues("run", "graph.py", *json, cwd=path.parent)
    told = [line for line in result.err.splitlines() if "mark 77" in line]
    told = [line for line in told if line != "ValueError: mark 77" and "raise ValueError" not in line]
    assert len(told) == 1, result.err
    assert place == "errors" or told[0].startswith("Error: g."), told


# --- graph files that are wrong -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "target", "words"),
    [
        ("import nothing_of_that_name\n", "graph.py", ["ModuleNotFoundError", "line 1", "cannot be imported"]),
        ("import os\nos.environ['NO_SUCH_URL']\n", "graph.py", ["KeyError", "line 2", "set the variable NO_SUCH_URL"]),
        ("{}['NO_SUCH_KEY']\n", "graph.py", ["KeyError", "Try: python graph.py"]),
        ("x = (\n", "graph.py", ["SyntaxError", "graph.py"]),
        ("x = 1\n", "graph.py", ["holds no graph"]),
        ("def make():\n    pass\n", "graph.py:make", ["is a function", "graph.py:make()"]),
        ("def make():\n    pass\n", "graph.py:make()", ["returned a NoneType"]),
        ("import cues\na = cues.Graph('a'); b = cues.Graph('b')\n", "graph.py", ["2 graphs: a, b", "graph.py:a"]),
        ("import cues\norders = cues.Graph('a')\n", "graph.py:order", ["has no 'order'", "graph.py:orders"]),
        ("import cues\na = cues.Graph('a')\n", "graph.py", ["no processors"]),
        ("raise SystemExit('No data. Try: pip install data')\n", "graph.py", ["No data. Try: pip install data"]),
        (
            COUNTING + "\n@graph.stream('a', 'b')\ndef numbers(x, y): ...\n",
            "graph.py",
            ["asks for 'y'", "@graph.stream('a', 'b')"],
        ),
        (COUNTING.replace('"squares"', '"a/b"'), "graph.py", ["a slash", "line 10"]),
        ("\0\0", "graph.py", ["cannot be imported"]),
    ],
)
def test_a_graph_file_that_is_wrong(graph, text: str, target: str, words: list[str]) -> None:  # type: ignore[no-untyped-def]
    path = graph(text)
    result = cues("run", target, cwd=path.parent)
    assert result.code == 1
    assert result.out == ""
    assert "Error: " in result.err
    for word in words:
        assert word in result.err, result.err
    assert f"{os.sep}cues{os.sep}cli{os.sep}" not in result.err, "our own frames"
    assert "<frozen importlib" not in result.err
    assert not (path.parent / "data").exists()


@pytest.mark.parametrize(
    ("target", "code", "words"),
    [
        ("grap.py", 1, ["no file grap.py", "Try: cues run graph.py"]),
        ("notes.txt", 1, ["not a Python file"]),
        ("folder", 2, ["not a graph file"]),
    ],
)
def test_files_that_are_not_graph_files(graph, target: str, code: int, words: list[str]) -> None:  # type: ignore[no-untyped-def]
    path = graph(COUNTING)
    graph("hello", "notes.txt")
    (path.parent / "folder").mkdir()
    result = cues("run", target, cwd=path.parent)
    assert result.code == code
    for word in words:
        assert word in result.err, result.err


def test_a_factory_with_arguments_and_a_module_of_the_same_folder(graph) -> None:  # type: ignore[no-untyped-def]
    graph("limit = 5\n", "settings.py")
    path = graph(
        """
import cues, pickle, settings
def make(name, *, top):
    graph = cues.Graph(name)
    graph.add(cues.Source("n", numbers, resume="skip", opts=top))
    return graph
def numbers(process):
    assert pickle.loads(pickle.dumps(numbers)) is numbers
    yield from ({"n": n} for n in range(min(settings.limit, process.opts)))
""",
        "json.py",  # a name that the standard library has
    )
    result = cues("run", f"{path}:make('small', top=3)")
    assert result.code == 0, result.err
    assert contents(path.parent / "data" / "small", "n") == [{"n": 0}, {"n": 1}, {"n": 2}]


def test_off_a_terminal_progress_is_plain_lines(graph) -> None:  # type: ignore[no-untyped-def]
    """The start, what happens, and the end; each with the time."""
    path = graph(COUNTING)
    done = cues("run", path)
    lines = done.err.splitlines()
    stamp = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "
    assert done.code == 0 and all(re.match(stamp, line) for line in lines), done.err
    *happened, ended, failed, unresolved = (line[20:] for line in lines)
    assert all(line.startswith("counting") for line in happened) and happened[0] == "counting: started"
    assert "1,000 numbers processed" in ended
    assert failed.startswith("10 messages failed: ") and unresolved.startswith(
        "10 failed messages unresolved on errors"
    )
    assert any("10 messages to 'errors'" in line or "to 'errors' after 1 attempt" in line for line in lines)


def test_plain_lines_say_what_moved(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cues.cli import progress

    made = library.Graph("g", store=tmp_path / "s")
    made.stream("in", "out", id="same")(lambda message: message)
    with made.start() as running, progress.PlainLines("g") as lines:
        running.send("in", {"n": 1})
        assert running.wait_idle(60)
        lines.told_at -= 60
        lines.tick(running)
        lines.told_at -= 60
        lines.tick(running)
    said = capsys.readouterr().err.splitlines()
    assert [line[20:] for line in said] == ["g: started", "g: took in the last minute: same 1; 0 wait"]
