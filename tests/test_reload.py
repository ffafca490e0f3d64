"""``cues run --reload``: each save starts the new code, every message is processed once, and errors wait for a save."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from small import until
from terminal import Command, cues

import cues as library
from cues.cli import reload
from cues.errors import StoreNotFound

LIMIT_S = 60

FLOWING = """
import time
import cues
import helper

graph = cues.Graph("flow", durability="process")

@graph.source("numbers")
def numbers(position):
    n = position or 0
    while True:
        time.sleep(0.002)
        n += 1
        yield n, {"n": n}

@graph.stream("numbers", "out", batch_size=5)
def mark(message):
    return {**message, "version": helper.VERSION}
"""

FED = """
import cues
graph = cues.Graph("fed", durability="process")
graph.source("orders")

@graph.stream("orders", "out")
def mark(order):
    return {**order, "version": 1}
"""


def slowly(seconds: float) -> str:
    """The graph with a function that takes this long for each message."""
    call = f"    import time; time.sleep({seconds})\n    return"
    return FED.replace("    return", call).replace('"out")', '"out", batch_size=1)')


def messages(store: Path) -> list[dict[str, Any]]:
    """The messages of the queue ``out``; none while the store, which a run is making, has none."""
    with contextlib.suppress(StoreNotFound), library.open(store, readonly=True) as opened:
        if "out" in opened.queues():
            out = opened.queue("out")
            return list(itertools.islice(out.tailer(), len(out)))
    return []


def versions(store: Path) -> set[int]:
    return {message["version"] for message in messages(store)}


# --- the parts ------------------------------------------------------------------------------------


def test_only_files_of_the_project_are_local(tmp_path: Path) -> None:
    assert reload.is_local(str(tmp_path / "helper.py"))
    for path in (json.__file__, pytest.__file__, library.__file__, str(tmp_path / "data.bin")):
        assert not reload.is_local(path), path


def test_a_save_with_the_time_and_size_of_before_is_seen_if_the_file_is_another_one(tmp_path: Path) -> None:
    path = tmp_path / "graph.py"
    path.write_text("x = 1")
    files = reload.WatchedFiles(str(path))
    files.forget()
    assert not files.changed()
    times = os.stat(path)
    (tmp_path / "new").write_text("x = 2")
    os.utime(tmp_path / "new", ns=(times.st_atime_ns, times.st_mtime_ns))
    os.replace(tmp_path / "new", path)
    assert files.changed() == str(path)


def test_a_file_of_a_new_folder_is_no_change_before_it_is_saved(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    for name in ("graph.py", "package/one.py", "package/two.py"):
        (tmp_path / name).write_text("x = 1")
    files = reload.WatchedFiles(str(tmp_path / "graph.py"))
    files.forget()
    files.note(str(tmp_path / "package/one.py"), reload.stamp_of(tmp_path / "package/one.py"))
    assert not files.changed(also_new=True)
    (tmp_path / "package" / "three.py").write_text("x = 1")
    assert not files.changed()
    assert files.changed(also_new=True) == str(tmp_path / "package" / "three.py")


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_message_is_processed_once_across_reloads(tmp_path: Path) -> None:
    """While numbers flow, the module is saved again and again: same size, often in the second of the save before."""
    (tmp_path / "helper.py").write_text("VERSION = 1\n")
    (tmp_path / "flow.py").write_text(FLOWING)
    store = tmp_path / "data" / "flow"
    with Command("run", tmp_path / "flow.py", "--reload") as command:
        until(lambda: versions(store), "the first message")
        for version in range(2, 6):
            (tmp_path / "helper.py").write_text(f"VERSION = {version}\n")
            until(lambda version=version: version in versions(store), f"a message of version {version}")  # type: ignore[misc]
        command.signal()
        assert command.wait() == 130
    found = messages(store)
    assert [message["n"] for message in found] == list(range(1, len(found) + 1))
    marks = [message["version"] for message in found]
    assert marks == sorted(marks)
    assert set(marks) == {1, 2, 3, 4, 5}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds the run by /proc")
def test_a_run_that_is_killed_at_a_save_is_followed_by_one_that_continues(tmp_path: Path) -> None:
    """With kill -9, before the watcher sees the save, while the run drains, or while the next one starts."""
    (tmp_path / "helper.py").write_text("VERSION = 1\n")
    (tmp_path / "flow.py").write_text(FLOWING)
    store = tmp_path / "data" / "flow"
    with Command("run", tmp_path / "flow.py", "--reload") as command:
        until(lambda: versions(store), "the first message")
        for version, wait_s in ((2, 0.0), (3, 0.2), (4, 0.4), (5, 0.7)):
            (tmp_path / "helper.py").write_text(f"VERSION = {version}\n")
            time.sleep(wait_s)
            for pid in Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            # A run that was killed after it had read the new code waits for a save, as after any failure.
            os.utime(tmp_path / "helper.py")
            until(lambda version=version: version in versions(store), f"a message of version {version}")  # type: ignore[misc]
        command.signal()
        assert command.wait() == 130
    found = messages(store)
    assert [message["n"] for message in found] == list(range(1, len(found) + 1))


@pytest.mark.slow
def test_an_error_is_shown_and_the_next_save_starts(tmp_path: Path) -> None:
    """A syntax error, a module that is missing, and inputs that changed: none ends the command."""
    path, store = tmp_path / "fed.py", tmp_path / "data" / "fed"
    path.write_text(FED)
    waiting = r"The run failed\. The next one starts when"
    with Command("run", path, "--reload") as command:

        def failed(words: str) -> None:
            command.until(words)
            command.until(waiting)
            command.text = ""

        until((store / "data.mdb").exists, "the store")
        assert cues("send", f"{path}#orders", "n=1").code == 0
        until(lambda: versions(store) == {1}, "version 1")
        path.write_text(FED.replace("return", "return return"))
        failed("SyntaxError")
        path.write_text("import missing_module\n" + FED.replace('"version": 1', '"version": missing_module.VERSION'))
        failed("ModuleNotFoundError")
        (tmp_path / "missing_module.py").write_text("VERSION = 2\n")
        assert cues("send", f"{store}#orders", "n=2").code == 0
        until(lambda: versions(store) == {1, 2}, "version 2")
        path.write_text(FED.replace('stream("orders"', 'stream(cues.AnyOf("orders", "more")'))
        failed("--accept-topology")
        path.write_text(FED.replace('"version": 1', '"version": 3'))
        assert cues("send", f"{store}#orders", "n=3").code == 0
        until(lambda: versions(store) == {1, 2, 3}, "version 3")
        command.signal(signal.SIGTERM)
        assert command.wait() == 130
    assert [message["n"] for message in messages(store)] == [1, 2, 3]


@pytest.mark.slow
def test_one_ctrl_c_on_a_terminal_drains(tmp_path: Path) -> None:
    """The terminal sends it to the watcher and to the run, which must take it as one signal."""
    path, store = tmp_path / "fed.py", tmp_path / "data" / "fed"
    path.write_text(slowly(0.7))
    assert cues("send", f"{path}#orders", stdin="".join(f'{{"n": {n}}}\n' for n in range(1, 5))).code == 0
    with Command("run", path, "--reload", terminal=True) as command:
        until(lambda: versions(store), "the first message")
        command.type("\x03")
        assert command.wait() == 130
        assert "Draining" in command.text
        assert "Stopping after the steps" not in command.text
    assert [message["n"] for message in messages(store)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_a_run_without_its_watcher_drains_and_ends(tmp_path: Path) -> None:
    path, store = tmp_path / "fed.py", tmp_path / "data" / "fed"
    path.write_text(FED)
    with Command("run", path, "--reload") as command:
        until((store / "data.mdb").exists, "the store")
        assert cues("send", f"{path}#orders", "n=1").code == 0
        until(lambda: versions(store) == {1}, "version 1")
        command.signal(signal.SIGKILL)
        command.wait()  # the end of the output: both processes have closed it
        assert "Draining" in command.text
    assert cues("run", path, "--idle-exit", "0").code == 0


@pytest.mark.slow
def test_fresh_is_done_once_and_a_run_that_ended_waits_for_a_save(tmp_path: Path) -> None:
    path, store = tmp_path / "fed.py", tmp_path / "data" / "fed"
    path.write_text(FED)
    assert cues("send", f"{path}#orders", "n=0").code == 0
    with Command("run", path, "--reload", "--fresh", "--yes", "--json") as command:
        command.until("fresh: no step yet")
        assert cues("send", f"{path}#orders", "n=1").code == 0
        until(lambda: versions(store) == {1}, "version 1")
        path.write_text(FED.replace('"version": 1', '"version": 2'))
        command.until("has changed")
        command.until("resume:")
        assert cues("send", f"{path}#orders", "n=2").code == 0
        until(lambda: versions(store) == {1, 2}, "version 2")
        command.signal()
        assert command.wait() == 130
    assert [message["n"] for message in messages(store)] == [1, 2]
    with Command("run", path, "--reload", "--idle-exit", "0", "--json") as command:
        command.until("The run has ended. The next one starts when")
        command.text = ""
        path.write_text(FED)
        command.until('"type": "event"')
        command.until("The run has ended")
        command.signal()
        assert command.wait() == 130


@pytest.mark.slow
def test_a_change_ends_a_run_whose_backlog_is_long(tmp_path: Path) -> None:
    """It does not drain for an hour with the old code: it ends after the step under way, and the new code continues."""
    path, store = tmp_path / "fed.py", tmp_path / "data" / "fed"
    slow = FED.replace("    return", "    import time; time.sleep(0.5)\n    return").replace(
        '"out")', '"out", batch_size=1)'
    )
    path.write_text(slow)
    lines = "".join(f'{{"n": {n}}}\n' for n in range(1, 1001))
    assert cues("send", f"{path}#orders", stdin=lines).code == 0
    with Command("run", path, "--reload") as command:
        until(lambda: versions(store) == {1}, "version 1")
        path.write_text(FED.replace('"version": 1', '"version": 2'))
        until(lambda: len(messages(store)) == 1000, "all messages")
        command.signal()
        assert command.wait() == 130
        assert "Stopping after the steps" in command.text
    assert [message["n"] for message in messages(store)] == list(range(1, 1001))
    assert {message["version"] for message in messages(store)} == {1, 2}


@pytest.mark.slow
def test_what_no_save_can_mend_ends_the_command(tmp_path: Path) -> None:
    (tmp_path / "fed.py").write_text(FED)
    result = cues("run", tmp_path / "fed.py", "--reload", "--workers", "many")
    assert result.code == 2
    assert re.search(r"--workers many", result.err)
    result = cues("run", tmp_path / "fed.py", "--reload", "--dry-run")
    assert result.code == 2
    assert "--reload" in result.err
