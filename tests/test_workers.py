"""Graphs in worker processes: what runs where, what is refused before anything starts, what is stopped alone."""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import random
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import seeds
from sets import slow_except
from small import queue_of, until
from terminal import LIVE, Command
from terminal import cues as command

import cues
from cues.base import events, names
from cues.engine import origin, supervised, supervisor
from cues.engine.assignment import SLACK, assign
from cues.engine.record import WorkersRecord
from cues.errors import AlreadyRunning, Fenced, GraphError, InvalidArgument, ProcessorStopped, WorkerDied
from cues.graphs import graphfile
from cues.graphs.processor_rows import read_row
from cues.records import sealed
from cues.storage import locks, wakeup

WAIT_S = 60

Write = Callable[..., cues.Graph]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """Write a graph file and import it; its graph is called as the file."""
    before = dict(sys.modules), list(sys.path)

    def written(text: str, name: str = "graph") -> cues.Graph:
        path = tmp_path / f"{name}.py"
        path.write_text(f"import cues, os, signal, sys, time\nHERE = {str(tmp_path)!r}\n" + textwrap.dedent(text))
        sys.modules.pop(name, None)
        return graphfile.load(str(path)).graph

    yield written
    for name in set(sys.modules) - set(before[0]):
        if getattr(sys.modules[name], "__file__", "") and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]
    sys.path[:] = before[1]


FED = """
graph = cues.Graph("fed", store=HERE + "/store", durability="process", errors="errors")
graph.source("numbers")

@graph.stream("numbers", "squares")
def square(message):
    return {"n": message["n"] ** 2, "pid": os.getpid()}

@graph.stream("squares", "roots")
def root(message):
    return {"n": int(message["n"] ** 0.5), "pids": [message["pid"], os.getpid()]}
"""


class Told:
    """Waits for events, as a listener of a graph."""

    def __init__(self) -> None:
        self.all: list[events.Event] = []
        self._inbox: queue.SimpleQueue[events.Event] = queue.SimpleQueue()

    def __call__(self, event: events.Event) -> None:
        self.all.append(event)
        self._inbox.put(event)

    def until(self, text: str) -> events.Event:
        deadline = time.monotonic() + WAIT_S
        while True:
            event = self._inbox.get(timeout=max(0.0, deadline - time.monotonic()))
            if text in event.text:
                return event


# --- running --------------------------------------------------------------------------------------


def test_messages_go_through_two_processes_that_are_not_this_one(write: Write, checked: Any) -> None:
    graph = write(FED)
    with graph.start(workers=2) as running:
        assert isinstance(running.engine, supervised.SupervisedEngine)
        assert [running.send("numbers", {"n": n}) for n in range(10)] == list(range(1, 11))
        assert running.wait_idle(timeout=WAIT_S)
        roots = running.messages("roots")
        pids = {pid for message in roots for pid in message["pids"]}
        assert [message["n"] for message in roots] == list(range(10))
        assert pids == set(running.pids.values()) and len(pids) == 2 and os.getpid() not in pids
        running.send({"n": 10})
        assert running.wait_idle(timeout=WAIT_S)
        assert running.messages("roots")[-1]["n"] == 10
        counters = running.counters()
    assert counters["fed.square"].taken == counters["fed.root"].written == 11
    assert all(locks.process_state(pid) == "gone" for pid in pids)
    checked(running.store.path)


def test_a_finite_graph_ends_by_itself_and_the_next_run_finds_nothing_new(tmp_path: Path, write: Write) -> None:
    write(
        """
        graph = cues.Graph("finite", errors="errors", durability="process")

        @graph.source("numbers", resume="skip")
        def numbers():
            for n in range(1000):
                yield {"n": n}

        @graph.stream("numbers", "squares")
        def square(number):
            if number["n"] == 99:
                print("to stdout")
                print("to stderr", file=sys.stderr)
                import logging
                logging.getLogger("mine").warning("logged")
                raise ValueError("unlucky")
            return number
        """
    )
    first = command("run", tmp_path / "graph.py", "--workers", 2, "--json")
    assert first.code == 0, first.err
    lines = first.out.splitlines()
    summary = json.loads(lines[-1])
    assert lines[:-1] == ["to stdout"]
    assert (summary["outcome"], summary["failed"]) == ("done", 1)
    assert summary["processors"]["finite.square"]["taken"] == 1000
    assert summary["queues"]["squares"] == {"messages": 999, "new": 999}
    (printed,) = [line for line in first.err.splitlines() if "to stderr" in line]
    assert printed in ("worker-1: to stderr", "worker-2: to stderr")
    said = [json.loads(line) for line in first.err.splitlines() if line != printed]
    (logged,) = [one for one in said if one["type"] == "log"]
    assert logged["level"] == "warning" and logged["text"].endswith(": logged") and "worker-" in logged["text"]
    assert [one for one in said if "ValueError: unlucky" in one.get("text", "")], first.err
    again = command("run", tmp_path / "graph.py", "--workers", "auto")
    assert again.code == 0 and json.loads(again.out)["nothing_new"]


def test_what_workers_print_is_not_mixed_with_the_table(tmp_path: Path, write: Write) -> None:
    write(LIVE.replace("    return tick\n", "    print('saw', tick['n'])\n    return tick\n"))
    with Command("run", tmp_path / "graph.py", "--workers", 2, terminal=True) as running:
        running.until("saw 300\r\n")
        running.type("\x03")
        assert running.wait() == 130, running.text
    saw = [line for line in running.screen.split("\n") if "saw" in line]
    assert saw[:250] == [f"saw {n}" for n in range(250)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_drains_also_when_the_workers_get_it(tmp_path: Path, write: Write, number: int) -> None:
    """A Ctrl-C reaches the whole terminal, and a service manager sends SIGTERM to all of a service."""
    write(LIVE)
    with Command("run", tmp_path / "graph.py", "--workers", 2, "--json") as running:
        running.until(r'"taken": [1-9]')
        record = WorkersRecord.of(str(tmp_path / "data" / "live"), "live")
        assert record is not None
        for worker in record.workers.values():
            os.kill(worker.pid, number)
        running.signal(number)
        assert running.wait() == 130, running.text
    assert "Draining" in running.text and "started again" not in running.text
    with cues.open(tmp_path / "data" / "live") as store:
        ticks = list(store.queue("ticks").tailer())
        assert ticks and list(store.queue("tocks").tailer()) == ticks == [{"n": n} for n in range(len(ticks))]


def test_the_second_signal_does_not_wait_for_a_function_that_does_not_return(tmp_path: Path, write: Write) -> None:
    write(LIVE.replace("    return tick\n", "    print('stuck')\n    time.sleep(1000)\n"))
    with Command("run", tmp_path / "graph.py", "--workers", 2, "--json") as running:
        running.until("stuck")
        running.signal(signal.SIGINT)
        running.until("Draining")
        running.signal(signal.SIGINT)
        assert running.wait() == 130, running.text
    assert '"outcome": "aborted"' in running.text
    record = WorkersRecord.of(str(tmp_path / "data" / "live"), "live")
    assert record is not None
    assert all(locks.process_state(worker.pid) == "gone" for worker in record.workers.values())


def test_a_graph_that_is_fed_ends_when_it_was_idle_for_long_enough(tmp_path: Path, write: Write) -> None:
    write(FED)
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("numbers").appender().write_many([{"n": n} for n in range(100)])
    found = command("run", tmp_path / "graph.py", "--workers", 2, "--idle-exit", 0.3)
    assert found.code == 0 and json.loads(found.out)["outcome"] == "idle", found.err
    with cues.open(tmp_path / "store") as store:
        assert [message["n"] for message in store.queue("roots").tailer()] == list(range(100))


def test_workers_forward_what_their_processors_write_for_another_store(write: Write, tmp_path: Path) -> None:
    graph = write(
        """
        away = cues.QueueOptions(path="other")
        graph = cues.Graph("two", store=HERE + "/store", durability="process", queues={"a": away, "b": away})
        graph.source("numbers")

        @graph.stream("numbers", "a")
        def to_a(message):
            return message

        @graph.stream("numbers", "b")
        def to_b(message):
            return message

        @graph.sink(cues.AnyOf("a", "b"))
        def save(message):
            pass
        """
    )
    with graph.start(workers=3) as running:
        for n in range(100):
            running.send("numbers", {"n": n})
        assert running.wait_idle(timeout=WAIT_S)
        assert running.messages("a") == running.messages("b") == [{"n": n} for n in range(100)]
        assert running.counters()["two.save"].taken == 200


def test_a_second_start_names_the_supervisor(write: Write, tmp_path: Path) -> None:
    """Not one of its workers, who would only be started again when they are killed."""
    graph = write(FED)
    with graph.start(workers=1), pytest.raises(AlreadyRunning, match="in workers of this process") as refused:
        graph.start(workers=1)
    assert refused.value.pid == os.getpid()
    with graph.start(workers=1) as running:
        found = command("run", tmp_path / "graph.py")
        (worker,) = running.pids.values()
    assert found.code == 7 and f"by process {worker}, a worker of process {os.getpid()}" in found.err
    assert f"kill {os.getpid()}" in found.err


# --- what is refused ------------------------------------------------------------------------------


def nothing_began(store: Path) -> None:
    with cues.open(store, readonly=True) as opened, opened.core.view() as txn:
        assert not list(opened.rows(txn, b"p/")) and "work" not in opened.queues()


def test_a_file_that_workers_cannot_import_says_why_before_anything_starts(write: Write, tmp_path: Path) -> None:
    graph = write("if os.path.exists(HERE + '/mark'):\n    import nothing_of_that_name\n" + FED)
    (tmp_path / "mark").touch()
    with pytest.raises(graphfile.FileFailed, match="cannot be imported") as refused:
        graph.start(workers=2)
    assert "ModuleNotFoundError: No module named 'nothing_of_that_name'" in refused.value.trace
    assert "import nothing_of_that_name" in refused.value.trace, "the user's own line"
    with cues.open(tmp_path / "store", readonly=True) as store:
        assert command("status", store.path, "--json").out.count('"processor"') == 0
    (tmp_path / "mark").unlink()
    with graph.start(workers=2) as running:
        running.send({"n": 1})
        assert running.wait_idle(timeout=WAIT_S)


def test_a_graph_that_is_another_one_in_a_worker_is_refused_with_what_differs(write: Write, tmp_path: Path) -> None:
    graph = write(FED)
    path = tmp_path / "graph.py"
    path.write_text(path.read_text().replace('** 2, "pid"', '** 3 + 0, "pid"'))
    with pytest.raises(GraphError, match=r"builds another one than this start has \(fed\.square\)"):
        graph.start(workers=2)


def test_digests_are_the_same_in_another_process(write: Write, tmp_path: Path) -> None:
    """Whatever its hash seed, also of functions with sets, nested functions and lambdas in them."""
    graph = write(
        """
        graph = cues.Graph("same")
        graph.source("in")

        @graph.stream("in", "out", types={"a", "b", "c"}, opts={"x": {1, 2}}, key=lambda m: m["k"])
        def stream(message):
            def inner(x):
                return x in {"p", "q", "r"} and [y for y in x]
            return message if inner(message) else None
        """
    )
    mine = origin.digests(graph.plan())
    code = (
        "import json, sys; from cues.graphs import graphfile; from cues.engine import origin;"
        "print(json.dumps(origin.digests(graphfile.load(sys.argv[1]).graph.plan())))"
    )
    for seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "graph.py")],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        )
        assert json.loads(found.stdout) == mine
    graph.add(cues.Sink(print, "out", id="more"))
    assert origin.digests(graph.plan()) != mine


def test_a_graph_that_no_file_holds_is_refused() -> None:
    graph = cues.Graph("local", [cues.Source("in"), cues.Sink(print, "in", id="out")])
    with pytest.raises(GraphError, match="is not a global of a file") as refused:
        graph.start(workers=1)
    assert "target='graph.py:make()'" in refused.value.hint
    found = subprocess.run(
        [sys.executable, "-c", "import cues\ng = cues.Graph('g', [cues.Source('q')])\ng.start(workers=1)"],
        capture_output=True,
        text=True,
    )
    assert "is not a global of a file" in found.stderr


PROGRAM = """
import cues
graph = cues.Graph("program", store={store!r}, durability="process")

@graph.source("numbers")
def numbers(position):
    for n in range(position or 0, 10):
        yield n + 1, {{"n": n}}

@graph.sink("numbers")
def out(message):
    print(message["n"])

{guard}
    graph.run(workers=1)
"""


def test_a_program_starts_its_graph_behind_a_guard(tmp_path: Path) -> None:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM.format(store=str(tmp_path / "store"), guard="if True:"))
    found = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert "is started by the import of its file" in found.stderr
    assert 'if __name__ == "__main__":' in found.stderr
    path.write_text(PROGRAM.format(store=str(tmp_path / "store"), guard="if __name__ == '__main__':"))
    found = subprocess.run([sys.executable, path], capture_output=True, text=True, check=True)
    assert found.stdout.split() == [str(n) for n in range(10)]


def test_a_graph_that_a_function_returns_is_named_by_its_call(write: Write, tmp_path: Path) -> None:
    write("graph = None\n" + FED.replace("graph = cues", "made = cues").replace("graph.", "made.") + "graph = made")
    path = tmp_path / "maker.py"
    path.write_text(
        "import cues\ndef make(times):\n"
        f"    graph = cues.Graph('made', store={str(tmp_path / 'made')!r}, durability='process')\n"
        "    graph.source('in')\n"
        "    graph.add(cues.Stream(lambda m: [m] * times, 'in', 'out', id='repeat', opts=times))\n"
        "    return graph\n"
    )
    target = f"{path}:make(3)"
    graph = graphfile.load(target).graph
    with pytest.raises(GraphError, match=r"another one than this start has \(made.repeat\)"):
        graph.start(workers=1, target=f"{path}:make(2)")
    with graph.start(workers=1, target=target) as running:
        running.send({"n": 1})
        assert running.wait_idle(timeout=WAIT_S)
        assert len(running.messages("out")) == 3


def test_a_worker_that_dies_at_the_start_is_an_error_of_the_start(write: Write, tmp_path: Path) -> None:
    graph = write("if os.path.exists(HERE + '/mark'):\n    os.kill(os.getpid(), signal.SIGSEGV)\n" + FED)
    (tmp_path / "mark").touch()
    with pytest.raises(WorkerDied, match="was killed by SIGSEGV before it was ready; nothing ran") as died:
        graph.start(workers=1)
    assert died.value.worker == "worker-1" and died.value.returncode == -signal.SIGSEGV


def test_what_a_start_would_refuse_is_refused_as_without_workers(write: Write, tmp_path: Path) -> None:
    graph = write(FED)
    with graph.start():
        pass
    changed = write(FED.replace('@graph.stream("squares"', '@graph.stream("numbers"').replace("** 0.5", ""))
    with pytest.raises(cues.errors.TopologyChanged, match=r"fed\.root"):
        changed.start(workers=2)
    with changed.start(workers=1, accept_topology=True):
        pass
    for wrong in (0, -1, True, "many", 1.5):
        with pytest.raises(InvalidArgument, match="is not a number of worker processes"):
            graph.start(workers=wrong)
    with pytest.raises(InvalidArgument, match="Spark has its own workers"):
        graph.start(workers=1, engine="spark")
    assert command("run", tmp_path / "graph.py", "--workers", "x").code == 2


# --- failures -------------------------------------------------------------------------------------


def test_a_processor_that_an_error_stops_is_stopped_alone(write: Write, tmp_path: Path) -> None:
    graph = write(
        FED.replace(', errors="errors"', "").replace('    return {"n": int', '    1 / 0\n    return {"n": int')
    )
    told = Told()
    running = graph.start(workers=2, listeners=(told,))
    running.send({"n": 1})
    event = told.until("the others continue")
    assert isinstance(event, events.Stopped) and event.alone and event.processor == "fed.root"
    with pytest.raises(ProcessorStopped, match="ZeroDivisionError") as stopped:
        running.wait_idle(timeout=WAIT_S)
    assert isinstance(stopped.value.__cause__, ZeroDivisionError)
    assert "1 / 0" in stopped.value.trace  # type: ignore[attr-defined]
    running.send({"n": 2})
    until(lambda: len(running.messages("squares")) >= 2, "the other does not go on")
    seen = command("status", running.store.path, "--table").out
    assert "fed.root was stopped alone" in seen and "ZeroDivisionError" in seen
    assert f"fed is run by process {os.getpid()} and its workers" in seen
    with pytest.raises(ProcessorStopped):
        running.__exit__(None, None, None)


@pytest.mark.slow
def test_a_processor_that_kills_its_worker_is_found_and_stopped_alone(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four that share a worker, three are in a step when it dies: one is at fault, one waits, one works on."""
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.01)
    graph = write(
        """
        import ctypes
        graph = cues.Graph("bad", store=HERE + "/store", durability="process")
        graph.source("in")

        @graph.stream("in", "slow", batch_size=1)
        def slow(message):
            if message["n"] == 1:
                time.sleep(1)
            return message

        @graph.stream("in", "crashed", batch_size=1)
        def crash(message):
            if message["n"] == 3:
                time.sleep(0.1)
                ctypes.string_at(0)
            return message

        @graph.stream("in", "good", batch_size=1)
        def good(message):
            time.sleep(0.01)
            return message

        @graph.stream("crashed", "behind")
        def behind(message):
            return message
        """
    )
    told = Told()
    running = graph.start(workers=1, listeners=(told,))
    for n in range(50):
        running.send({"n": n})
    assert "bad.crash" in told.until("in a worker of its own from now on").text
    stop = told.until("the others continue")
    assert stop.processor == "bad.crash" and "killed by SIGSEGV" in stop.text
    with pytest.raises(
        ProcessorStopped, match=r"bad\.crash stopped after \d attempts: WorkerDied: the worker died \d times in a row"
    ):
        running.wait_done(idle_exit_s=2)
    assert not running.idle()  # the others go on until the run ends
    running.end_sources()
    until(lambda: running.idle(), "the others do not finish")
    assert [message["n"] for message in running.messages("slow")] == list(range(50))
    assert [message["n"] for message in running.messages("good")] == list(range(50))
    assert [message["n"] for message in running.messages("behind")] == [0, 1, 2]
    record = WorkersRecord.of(str(running.store.path), "bad")
    assert record is not None and set(record.stopped) == {"bad.crash"}
    assert "SIGSEGV in a step of" in str(record.workers["worker-1"].last_failure)
    running.close()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["stream", "sink", "batch", "batch sink"])
def test_a_message_that_kills_its_worker_goes_to_the_error_queue_and_holds_up_no_other(
    write: Write, monkeypatch: pytest.MonkeyPatch, checked: Any, kind: str
) -> None:
    """All come in one step. A batch sink's snapshot is not divided: a target may have a part of that batch."""
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.01)
    declared = {
        "stream": 'graph.stream("in", "out")',
        "sink": 'graph.sink("in")',
        "batch": 'graph.stream("in", "out", batch=True)',
        "batch sink": 'graph.sink("in", batch=True, batch_size=10, step_s=None)',
    }[kind]
    graph = write(
        f"""
        graph = cues.Graph("bad", store=HERE + "/store", durability="process", errors="errors")
        graph.source("in")

        @{declared}
        def crash(given):
            messages = given if isinstance(given, list) else [given]
            for message in messages:
                if message["n"] in (30, 31):
                    os.kill(os.getpid(), signal.SIGKILL)
            with open(HERE + "/seen", "a") as file:
                file.writelines(f"{{message['n']}}\\n" for message in messages)
            return given if {kind in ("stream", "batch")} else None
        """
    )
    store = cues.open(str(graph.store), durability="process")
    store.queue("in").appender().write_many({"n": n} for n in range(60))
    store.close()
    with graph.start(workers=1) as running:
        assert running.wait_idle(WAIT_S)
        failed = running.messages("errors")
        bad = [30, 31] if kind != "batch sink" else list(range(30, 40))
        assert [m["n"] for one in failed for m in one["err.proc/messages"]["in"]] == bad
        assert all("killed by SIGKILL" in one["err/cause"][0]["message"] for one in failed)
        good = [n for n in range(60) if n not in bad]
        if kind in ("stream", "batch"):
            assert [m["n"] for m in running.messages("out")] == good
        seen = [int(line) for line in (Path(str(graph.store)).parent / "seen").read_text().split()]
        assert sorted(set(seen)) == good


@pytest.mark.parametrize("kind", slow_except(["function"], ["function", "aggregate"]))
def test_a_row_that_kills_its_worker_goes_to_the_error_queue_and_holds_up_no_other(
    write: Write, monkeypatch: pytest.MonkeyPatch, checked: Any, kind: str
) -> None:
    """Of a step of columns, whether the function takes tables, or the processor reduces columns with its function.

    The step is not taken row by row from its beginning: in smaller steps, up to the step that kills.
    """
    monkeypatch.setattr(supervisor, "BACKOFF_S", 0.01)
    monkeypatch.setattr(supervisor, "NARROWING", 20)
    rows, bad = 5_000, 2_499
    declared = {
        "function": """
            @graph.stream("in", "out", batch="arrow")
            def crash(rows):
                for n in rows["n"].to_pylist():
                    die(n)
                return rows
            """,
        "aggregate": """
            reduce = {"n": reducer(lambda: -1, lambda state, row: die(row["n"]), merge=max)}
            graph.add(aggregates.aggregate("in", "out", by="all", reduce=reduce))
            """,
    }[kind]
    graph = write(
        f"""
        from cues.processors import aggregates
        from cues.processors.reducers import reducer

        graph = cues.Graph("bad", store=HERE + "/store", durability="process", errors="errors")
        graph.source("in")

        def die(n):
            if n == {bad}:
                os.kill(os.getpid(), signal.SIGKILL)
            return n
        """
        + textwrap.indent(textwrap.dedent(declared), " " * 8)
    )
    pa = pytest.importorskip("pyarrow")
    with cues.open(str(graph.store), durability="process") as store:
        store.queue("in").appender().write_table(pa.table({"n": range(rows), "all": [True] * rows}))
    with graph.start(workers=2) as running:
        assert running.wait_idle(WAIT_S)
        failed = running.messages("errors")
        assert [m["n"] for one in failed for m in one["err.proc/messages"]["in"]] == [bad]
        assert all("killed by SIGKILL" in one["err/cause"][0]["message"] for one in failed)
        out = running.store.queue("out")
        assert out.to_arrow(columns=["n"])["n"].to_pylist() == [n for n in range(rows) if n != bad]
        steps = {piece.batch.head.hash for piece in out.pieces(None, None)}
        assert len(steps) < (150 if kind == "function" else bad)


def test_a_file_that_was_changed_is_refused_by_the_worker_that_starts_again(write: Write, tmp_path: Path) -> None:
    """Else one part of a run would be of the old file, and one of the new."""
    graph = write(FED)
    told = Told()
    with (
        pytest.raises(ProcessorStopped, match="builds another one"),
        graph.start(workers=1, listeners=(told,)) as running,
    ):
        path = tmp_path / "graph.py"
        path.write_text(path.read_text().replace('** 2, "pid"', '** 3 + 0, "pid"'))
        (pid,) = running.pids.values()
        os.kill(pid, signal.SIGKILL)
        assert "start again if the file was changed" in str(told.until("builds another one").error.__cause__)  # type: ignore[attr-defined]


@pytest.mark.slow
def test_a_worker_that_is_stopped_past_its_lease_is_replaced_and_fenced_when_it_continues(
    write: Write, tmp_path: Path, checked: Any
) -> None:
    """SIGSTOP in the middle of its work; the other that takes its units over does the work; SIGCONT; exact."""
    graph = write(
        """
        graph = cues.Graph("stopped", store=HERE + "/store", durability="process")

        @graph.source("numbers", batch_size=10)
        def numbers(position):
            n = position or 0
            while not os.path.exists(HERE + "/enough"):
                yield n + 1, {"n": n}
                n += 1
                time.sleep(0.002)

        @graph.stream("numbers", "counted", key=lambda m: m["n"] % 3, batch_size=5)
        def count(message, process):
            time.sleep(0.001)
            process.state["count"] = process.state.get("count", 0) + 1
            return {**message, "count": process.state["count"]}
        """
    )
    told = Told()
    with graph.start(workers=1, listeners=(told,)) as running:
        until(lambda: len(running.messages("counted")) >= 50)
        (old,) = running.pids.values()
        stop_outside_of_transactions(tmp_path / "store", [old])
        told.until(f"process {old}) is stopped")
        told.until("another takes its place")
        there = running.messages("counted")
        until(lambda: len(running.messages("counted")) >= len(there) + 50)
        (new,) = running.pids.values()
        assert new != old and locks.process_state(old) == "stopped"
        os.kill(old, signal.SIGCONT)
        until(lambda: locks.process_state(old) in ("gone", "dead, not reaped"), "the fenced process did not end")
        before = len(running.messages("counted"))
        until(lambda: len(running.messages("counted")) >= before + 50)
        assert list(running.pids.values()) == [new]
        (tmp_path / "enough").touch()
        assert running.wait_done()
        numbers, counted = running.messages("numbers"), running.messages("counted")
    assert numbers == [{"n": n} for n in range(len(numbers))]
    assert counted == [{"n": n, "count": n // 3 + 1} for n in range(len(numbers))]
    checked(tmp_path / "store")


def stop_outside_of_transactions(store: Path, pids: list[int]) -> None:
    """SIGSTOP; once more where one was inside of a write transaction, in which it would hold up all who write."""
    with cues.open(store) as opened:
        deadline = time.monotonic() + WAIT_S
        while True:
            assert time.monotonic() < deadline, "one of them is always in a write transaction"
            for pid in pids:
                os.kill(pid, signal.SIGSTOP)
            until(lambda: all(locks.process_state(pid) == "stopped" for pid in pids))
            assert opened.core.doorbells is not None
            alone = opened.core.doorbells.words[wakeup.BUSY_WRITER] not in pids
            if alone and opened.core.locks.holder(locks.WRITER) not in pids:
                return
            for pid in pids:
                os.kill(pid, signal.SIGCONT)
            time.sleep(0.01)


def leases(store: Path) -> list[float]:
    """Seconds that are left to those who run the processors."""
    rows = [json.loads(line) for line in command("status", store, "--json").out.splitlines()[1:]]
    return [row["owner"]["lease_s"] for row in rows]


@pytest.mark.slow
def test_two_supervisors_of_one_graph_do_no_harm(write: Write, tmp_path: Path, checked: Any) -> None:
    """One is stopped with its workers past the lease, another takes the graph, the first continues: it is fenced."""
    write(LIVE)
    store = tmp_path / "data" / "live"
    with Command("run", tmp_path / "graph.py", "--workers", 2, "--json") as first:
        first.until('"taken": ')
        record = WorkersRecord.of(str(store), "live")
        assert record is not None
        everybody = [first.process.pid, *(worker.pid for worker in record.workers.values())]
        os.kill(everybody[0], signal.SIGSTOP)
        stop_outside_of_transactions(store, everybody[1:])
        refused = command("run", tmp_path / "graph.py", "--workers", 2)
        assert refused.code == 7 and f"by process {everybody[0]} and its workers" in refused.err
        until(lambda: all(left <= 0 for left in leases(store)), "the lease does not end")
        with Command("run", tmp_path / "graph.py", "--workers", 2, "--take-over", "--json") as second:
            second.until('"taken": ')
            for pid in everybody:
                os.kill(pid, signal.SIGCONT)
            assert first.wait() == 6, first.text
            assert "was taken over by process" in first.text
            second.signal(signal.SIGINT)
            assert second.wait() == 130, second.text
    with cues.open(store) as opened:
        ticks = list(opened.queue("ticks").tailer())
        assert list(opened.queue("tocks").tailer()) == ticks == [{"n": n} for n in range(len(ticks))]
    checked(store)


@pytest.mark.interpreted
def test_a_worker_stopped_inside_a_transaction_is_named_and_the_others_continue_when_it_does(
    write: Write, checked: Any, tmp_path: Path
) -> None:
    graph = write(
        """
        from cues import faults
        from cues.queues.store import Store
        (Store.__init__.__kwdefaults__ or {})["writer_timeout_s"] = 0.2
        graph = cues.Graph("stuck", store=HERE + "/store", durability="process")
        graph.source("a")
        graph.source("b")

        @graph.stream("a", "a-out")
        def first(message):
            if os.path.exists(HERE + "/stop"):
                os.unlink(HERE + "/stop")
                faults.arm("commit.inside", 1, faults.stop)
            return message

        @graph.stream("b", "b-out")
        def second(message):
            open(HERE + "/begun", "w").close()
            while not os.path.exists(HERE + "/go"):
                time.sleep(0.01)
            return message
        """
    )
    told = Told()
    (tmp_path / "stop").touch()
    with graph.start(workers=2, listeners=(told,)) as running:
        running.send("b", {"n": 2})
        until(lambda: (tmp_path / "begun").exists())
        running.send("a", {"n": 1})
        until(lambda: any(locks.process_state(pid) == "stopped" for pid in running.pids.values()))
        ((name, stuck),) = [one for one in running.pids.items() if locks.process_state(one[1]) == "stopped"]
        (tmp_path / "go").touch()
        waits = told.until(f"{name}, process {stuck} (stopped) is writing")
        assert isinstance(waits, events.Waiting) and waits.processor == "stuck.second"
        assert not running.wait_idle(timeout=0)
        os.kill(stuck, signal.SIGCONT)
        assert running.wait_idle(timeout=WAIT_S)
        assert running.messages("a-out") == [{"n": 1}] and running.messages("b-out") == [{"n": 2}]
    checked(tmp_path / "store")


# --- who carries what -----------------------------------------------------------------------------


def chains(*lengths: int) -> cues.Graph:
    """A graph of chains; each is a source, streams and a sink, so many in all."""
    graph = cues.Graph("g")
    for number, length in enumerate(lengths):
        queues = [f"c{number}-q{place}" for place in range(length - 1)]
        graph.add(cues.Source(queues[0], lambda position: iter(())))
        for before, behind in itertools.pairwise(queues):
            graph.add(cues.Stream(lambda message: message, before, behind, id=f"{before}-on"))
        graph.add(cues.Sink(lambda message: None, queues[-1], id=f"c{number}-sink"))
    return graph


def shared(graph: cues.Graph, workers: int | Literal["auto"]) -> dict[str, tuple[str, ...]]:
    plan = graph.plan()
    return assign(plan.topology(), plan.running, workers)


def cuts(graph: cues.Graph, found: dict[str, tuple[str, ...]]) -> int:
    """The number of queues between two workers."""
    carrier = {unit.partition(".")[2]: worker for worker, units in found.items() for unit in units}
    return sum(carrier[a] != carrier[b] for a, _, b in graph.topology().edges)


def test_short_chains_stay_whole_and_long_ones_are_cut_for_the_balance() -> None:
    graph = chains(3, 3)
    assert list(shared(graph, 2).values()) == [
        ("g.c0-q0", "g.c0-q0-on", "g.c0-sink"),
        ("g.c1-q0", "g.c1-q0-on", "g.c1-sink"),
    ]
    assert cuts(graph, shared(graph, 1)) == 0
    graph = chains(*[3] * 8)
    assert cuts(graph, shared(graph, 3)) == 0, "9, 9 and 6"
    graph = chains(8)
    assert [len(units) for units in shared(graph, 4).values()] == [2, 2, 2, 2]
    assert len(shared(graph, "auto")) == 1, "more workers would only hand messages to one another"
    assert len(shared(chains(3, 3), 100)) == 6


@pytest.mark.parametrize("round", range(20))
def test_every_unit_is_assigned_once_and_no_worker_has_much_more_than_a_fair_share(round: int) -> None:
    seed = seeds.new()
    chance = random.Random(seed)
    lengths = [chance.randint(2, 9) for _ in range(chance.randint(1, 8))]
    workers = chance.randint(1, 12)
    graph = chains(*lengths)
    found = shared(graph, workers)
    carried = [unit for units in found.values() for unit in units]
    assert sorted(carried) == sorted(node.id for node in graph.plan().running)
    assert len(found) == min(workers, len(carried))
    assert max(map(len, found.values())) <= -(-len(carried) * SLACK // len(found))
    assert found == shared(graph, workers)


def test_two_workers_that_need_one_duckdb_file_are_refused_and_one_worker_is_not(tmp_path: Path) -> None:
    """Two sinks, two instances of one, or a source of the file; two files, or only sources, are all right."""
    from cues.processors.sql_sink import Table
    from cues.processors.sql_source import Rows

    def graph_of(*places: str, reads: Sequence[str] = ()) -> cues.Graph:
        graph = cues.Graph("g")
        for number, place in enumerate(places):
            graph.add(cues.Source(f"q{number}", lambda position: iter(())))
            graph.add(Table(tmp_path / place, "t", {"n": "integer"}).sink(f"q{number}", id=f"save-{number}"))
        for number, place in enumerate(reads):
            graph.add(cues.Source(f"r{number}", Rows(str(tmp_path / place), "t", "n")))
        return graph

    one = "a.duckdb"
    (tmp_path / "link.duckdb").symlink_to(tmp_path / one)
    for graph in (graph_of(one, one), graph_of(one, "link.duckdb"), graph_of(one, reads=[one])):
        with pytest.raises(InvalidArgument, match=r"a\.duckdb open, and .* need it: g\..* in worker-\d, g"):
            shared(graph, len(graph.plan().running))
        assert len(shared(graph, 1)) == 1
    assert len(shared(graph_of(one, "b.duckdb", "c.db", "c.db"), 4)) == 4
    assert len(shared(graph_of(reads=[one, one]), 2)) == 2


def test_logging_of_a_worker_goes_to_the_handlers_of_the_program(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    graph = write(
        FED.replace(
            '    return {"n": message',
            "    import logging; logging.getLogger('mine').error('seen')\n    return {\"n\": message",
        )
    )
    with caplog.at_level(logging.WARNING), graph.start(workers=1) as running:
        running.send({"n": 1})
        assert running.wait_idle(timeout=WAIT_S)
    assert ("mine", logging.ERROR, "worker-1: seen") in caplog.record_tuples


def test_a_fenced_worker_is_reported_as_such(write: Write) -> None:
    """Another process took the graph: the supervisor does not start it again, and says so."""
    graph = write(FED)
    running = graph.start(workers=1)
    with running.store.core.view() as txn:
        row = read_row(txn, "fed.root")
    assert row is not None
    stolen = row._replace(owner=b"somebody", epoch=row.epoch + 1)
    running.store.core.commit(lambda txn: sealed.put(txn, names.processor_key("fed.root"), stolen.pack()))
    running.send({"n": 1})
    with pytest.raises(Fenced, match="was taken over"):
        running.wait_idle(timeout=WAIT_S)
    running.close()


def test_a_pid_that_another_process_has_by_now_does_not_keep_a_start_out(write: Write, tmp_path: Path) -> None:
    """The owner died and its pid was given away: the lock is free, and that is what counts."""
    graph = write(FED)
    with graph.start(workers=1):
        pass
    with cues.open(tmp_path / "store") as store:
        with store.core.view() as txn:
            row = read_row(txn, "fed.root")
        assert row is not None
        store.core.commit(
            lambda txn: sealed.put(txn, names.processor_key("fed.root"), row._replace(pid=os.getppid()).pack())
        )
    with graph.start(workers=1) as running:
        running.send({"n": 2})
        assert running.wait_idle(timeout=WAIT_S)
        assert len(running.messages("roots")) == 1


PARTITIONED = """
graph = cues.Graph(
    "parts", store=HERE + "/store", durability="process", queues={"in": cues.QueueOptions(partitions=6, key="user")}
)
graph.source("in")

@graph.stream("in", "counted", key="user", instances=3)
def count(message, process):
    process.state["count"] = process.state.get("count", 0) + 1
    return {**message, "count": process.state["count"], "pid": os.getpid()}
"""


@pytest.mark.slow
def test_workers_take_new_partitions_in(write: Write, checked: Any) -> None:
    """Also one that is started again after the queue has grown, although its graph file names fewer partitions."""
    graph = write(PARTITIONED)
    told = Told()
    with graph.start(workers=2, listeners=(told,)) as running:
        for n in range(100):
            running.send("in", {"user": f"user {n % 17}", "n": n})
        running.store.queue("in").grow(9)
        running.store.queue("counted").grow(5)
        for n in range(100, 300):
            running.send("in", {"user": f"user {n % 17}", "n": n})
        assert running.wait_idle(timeout=WAIT_S)
        os.kill(next(iter(running.pids.values())), signal.SIGKILL)
        told.until("it is started again")
        for n in range(300, 400):
            running.send("in", {"user": f"user {n % 17}", "n": n})
        assert running.wait_idle(timeout=WAIT_S)
        assert sorted(message["n"] for message in running.messages("counted")) == list(range(400))
        assert sum(one.processor == "parts.count" for one in running.standings()) == 9
    assert sum("more partition" in event.text and event.processor == "parts.count" for event in told.all) == 1


@pytest.mark.slow
def test_a_call_that_hangs_ends_with_its_worker(write: Write) -> None:
    """Its message has failed by then; the process in which it hangs is gone, and the next worker continues."""
    graph = write(
        """
        graph = cues.Graph("hung", store=HERE + "/store", durability="process", errors="errors")
        graph.source("in")

        @graph.stream("in", "out", timeout_s=1)
        def hang(message):
            while message["n"] == 3:
                time.sleep(60)
            return {**message, "pid": os.getpid()}
        """
    )
    told = Told()
    with graph.start(workers=1, listeners=(told,)) as running:
        (first,) = running.pids.values()
        for n in range(6):
            running.send({"n": n})
        told.until("ends its worker")
        assert running.wait_idle(WAIT_S)
        for n in range(6, 9):
            running.send({"n": n})
        assert running.wait_idle(WAIT_S)
        assert [m["n"] for m in running.messages("out")] == [0, 1, 2, 4, 5, 6, 7, 8]
        (error,) = running.messages("errors")
        assert error["err/cause"][0]["type"] == "cues.errors.CallTimedOut"
        assert first not in running.pids.values() and locks.process_state(first) == "gone"


@pytest.mark.slow
def test_a_batch_that_hangs_is_halved_before_its_worker_ends(write: Write) -> None:
    """The parts are known in its memory only: the next worker would begin with the whole batch, for ever."""
    graph = write(
        """
        graph = cues.Graph("hung", store=HERE + "/store", durability="process", errors="errors")
        graph.source("in")

        @graph.stream("in", "out", batch=True, step_s=None, timeout_s=2)
        def hang(messages):
            while any(message["n"] == 3 for message in messages):
                time.sleep(60)
            return messages
        """
    )
    with cues.open(graph.store, durability="process") as store:
        store.queue("in").appender().write_many([{"n": n} for n in range(4)])
    told = Told()
    with graph.start(workers=1, listeners=(told,)) as running:
        told.until("ends its worker")
        running.send({"n": 4})
        assert running.wait_idle(WAIT_S)
        assert [m["n"] for m in running.messages("out")] == [0, 1, 2, 4]
        (error,) = running.messages("errors")
        assert error["err.proc/messages"] == {"in": [{"n": 3}]}
        assert error["err/cause"][0]["type"] == "cues.errors.CallTimedOut"
    assert sum("ends its worker" in event.text for event in told.all) == 1


@pytest.mark.slow
def test_a_worker_waits_for_room_in_its_store_and_continues(write: Write) -> None:
    """A full map stops no unit for good: it tries again, ends when it is told to, and continues when there is room."""
    graph = write(
        """
        graph = cues.Graph("full", store=HERE + "/store", durability="process", errors="errors")
        graph.source("in")

        @graph.stream("in", "out", batch_size=10)
        def grow(message):
            return {**message, "text": "x" * 50_000}
        """
    )
    cues.open(str(graph.store), durability="process", max_map_size=8 << 20).close()
    told = Told()
    with graph.start(workers=1, listeners=(told,)) as running:
        queue_of(running, "in").appender().write_many({"n": n} for n in range(400))
        told.until("waiting for the store")
        assert not running.idle() and not running.stopped
        running.close()
    assert running.counters()["full.grow"].written < 400
    cues.open(str(graph.store), max_map_size=64 << 20).close()
    with graph.start(workers=1) as running:
        assert running.wait_idle(WAIT_S)
        assert [m["n"] for m in running.messages("out")] == list(range(400))


def test_instances_are_spread_over_workers_and_keep_order_and_state_of_each_key(write: Write, checked: Any) -> None:
    graph = write(PARTITIONED)
    with graph.start(workers=3) as running:
        for n in range(300):
            running.send("in", {"user": f"user {n % 17}", "n": n})
        assert running.wait_idle(timeout=WAIT_S)
        counted = running.messages("counted")
        pids = running.pids
        assert running.counters()["parts.count"].written == 300
        assert len(running.standings()) == 6
    assert {message["pid"] for message in counted} == set(pids.values()) and len(pids) == 3
    for user in range(17):
        mine = [message for message in counted if message["user"] == f"user {user}"]
        assert [message["n"] for message in mine] == list(range(user, 300, 17))
        assert [message["count"] for message in mine] == list(range(1, len(mine) + 1))
    record = WorkersRecord.of(running.store.path, "parts")
    assert record is not None
    carried = [worker.units for worker in record.workers.values()]
    assert sorted(carried) == [
        ["parts.count", "parts.count/3"],
        ["parts.count/1", "parts.count/4"],
        ["parts.count/2", "parts.count/5"],
    ]
    checked(running.store.path)
