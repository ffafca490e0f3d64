"""``cues run`` as a service: what it tells a service manager, when it is ready, how it ends as the first process."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminal import LIVE, Command, environment
from terminal import cues as command

import cues as library
from cues.cli.options import INTERRUPTED, RUNNING

SLOW = """
import time
import cues
graph = cues.Graph("slow", durability="process")

@graph.source("numbers", resume="skip")
def numbers():
    yield from ({"n": n} for n in range(10_000))

@graph.stream("numbers", "copies")
def copy(number):
    time.sleep(0.05)
    return number
"""

FIRST = [
    "unshare",
    "--fork",
    "--pid",
    "--mount-proc",
    "--kill-child",
    *([] if os.getuid() == 0 else ["--map-root-user"]),
]
"""Runs a command as the first process of a pid namespace, as the entry point of a container is."""


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket of a service manager."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as found:
        found.bind(str(tmp_path / "notify"))
        found.settimeout(40)
        yield found


def graph(folder: Path, text: str) -> Path:
    path = folder / "graph.py"
    path.write_text(text)
    return path


@pytest.mark.parametrize("workers", [(), ("--workers", "1")], ids=["here", "workers"])
def test_a_service_manager_is_told_that_the_run_is_ready_and_that_it_stops(
    tmp_path: Path, manager: socket.socket, workers: tuple[str, ...]
) -> None:
    with Command("run", graph(tmp_path, LIVE), *workers, NOTIFY_SOCKET=str(tmp_path / "notify")) as run:
        assert manager.recv(100) == b"READY=1"
        run.signal(signal.SIGTERM)
        assert manager.recv(100) == b"STOPPING=1"
        assert run.wait() == INTERRUPTED


def test_an_abstract_name_is_a_socket_too_and_a_run_that_ends_by_itself_says_so(tmp_path: Path) -> None:
    name = f"cues-{os.getpid()}"
    if sys.platform != "linux":
        pytest.skip("only Linux has names of sockets outside of the file system")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"\0{name}")
        manager.settimeout(40)
        ended = command("run", graph(tmp_path, SLOW.replace("10_000", "3")), NOTIFY_SOCKET=f"@{name}")
        assert ended.code == 0, ended.err
        assert [manager.recv(100), manager.recv(100)] == [b"READY=1", b"STOPPING=1"]


def test_a_start_that_fails_is_never_ready_and_a_manager_that_is_gone_hurts_nobody(
    tmp_path: Path, manager: socket.socket
) -> None:
    path, place = graph(tmp_path, SLOW.replace("10_000", "3")), str(tmp_path / "notify")
    path.write_text(path.read_text() + "1 / 0\n")
    assert command("run", path, NOTIFY_SOCKET=place).code == 1
    manager.setblocking(False)
    with pytest.raises(BlockingIOError):
        manager.recv(100)
    path.write_text(path.read_text().replace("1 / 0\n", ""))
    assert command("run", path, NOTIFY_SOCKET=str(tmp_path / "nobody")).code == 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(), ("--workers", "1")], ids=["here", "workers"])
def test_a_drain_ends_in_time_and_the_next_run_continues(tmp_path: Path, workers: tuple[str, ...]) -> None:
    path = graph(tmp_path, SLOW)
    with Command("run", path, *workers, "--drain", "0.5", "--json") as run:
        run.until('"type": "progress"')
        began = time.monotonic()
        run.signal(signal.SIGTERM)
        run.until("the drain took 0.5 s")
        assert time.monotonic() - began > 0.4
        assert run.wait() == INTERRUPTED
    assert '"outcome": "aborted"' in run.text
    path.write_text(SLOW.replace("time.sleep(0.05)", "pass"))
    ended = command("run", path, "--drain", "100")  # a limit that is not reached is not waited for
    assert ended.code == 0
    assert '"copies": {"messages": 10000, ' in ended.out


def test_ready_is_answered_200_only_while_the_graph_runs(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    with Command("run", graph(tmp_path, SLOW), "--metrics", 0) as run:
        found = re.search(r"(http://127\.0\.0\.1:\d+)/metrics", run.until("/metrics"))
        assert found
        url = f"{found[1]}/ready"
        with urllib.request.urlopen(url, timeout=30) as answer:
            assert (answer.status, answer.read()) == (200, b"ready\n")
        with urllib.request.urlopen(f"{found[1]}/", timeout=30) as answer:
            assert b"cues_up 1.0" in answer.read()
        run.signal(signal.SIGTERM)
        run.until("Draining")
        until = time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(url, timeout=30).close()
            except urllib.error.HTTPError as error:
                refused = error
                break
            assert time.monotonic() < until
        assert (refused.code, refused.read()) == (503, b"not ready\n")
        run.signal(signal.SIGTERM)
        assert run.wait() == INTERRUPTED


def namespaces() -> bool:
    tried = shutil.which("unshare") and subprocess.run([*FIRST, "true"], capture_output=True, check=False)
    return bool(tried) and tried.returncode == 0  # type: ignore[union-attr]


@contextlib.contextmanager
def first(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start a command of Cues as process 1 of a container; its parent here is unshare, which passes on no signal."""
    words = [*FIRST, sys.executable, "-m", "cues", *map(str, arguments)]
    with subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def children(pid: int) -> list[int]:
    """The processes that a process has started, by any of its threads."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, path.read_text().split())
    return sorted(found)


def inside(unshared: subprocess.Popen[str]) -> int:
    """The number, here, of the process that unshare started; it has printed something."""
    (found,) = children(unshared.pid)
    return found


def read_until(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    kill = threading.Timer(60, process.kill)
    kill.start()
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            break
    else:
        pytest.fail("".join(seen))
    kill.cancel()


def ended(process: subprocess.Popen[str]) -> int:
    process.communicate(timeout=60)
    return process.returncode


needs_namespaces = pytest.mark.skipif(not namespaces(), reason="this user may not make pid namespaces")


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["here", "workers"])
def test_the_first_process_of_a_container_drains_at_sigterm_and_reaps_its_workers(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    with first("run", graph(tmp_path, LIVE), *workers, "--json") as run:
        read_until(run, '"type": "progress"')
        number = inside(run)
        assert len(children(number)) == (2 if workers else 0)
        if workers:
            dead = children(number)[0]
            os.kill(dead, signal.SIGKILL)
            read_until(run, "is started again")
            until = time.monotonic() + 30
            while dead in children(number) or len(children(number)) < 2:  # no zombie, and a new worker
                assert time.monotonic() < until
                time.sleep(0.01)
        os.kill(number, signal.SIGTERM)
        read_until(run, '"outcome": "drained"')
        assert ended(run) == INTERRUPTED


@needs_namespaces
def test_the_first_process_of_a_container_ends_at_a_sigterm_during_the_import_of_the_graph(tmp_path: Path) -> None:
    """Without a handler the kernel would drop the signal, and the container would be killed after its grace time."""
    path = graph(tmp_path, 'print("importing", flush=True)\nimport time\ntime.sleep(50)\n' + LIVE)
    began = time.monotonic()
    with first("run", path, "--json") as run:
        read_until(run, "importing")
        os.kill(inside(run), signal.SIGTERM)
        assert ended(run) == INTERRUPTED
    assert time.monotonic() - began < 45


@needs_namespaces
def test_a_command_that_serves_ends_at_sigterm_as_the_first_process(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    library.open(tmp_path / "store").close()
    with first("metrics", tmp_path / "store", "--listen", "0") as serving:
        read_until(serving, "metrics: http://")
        os.kill(inside(serving), signal.SIGTERM)
        assert ended(serving) == INTERRUPTED


@pytest.mark.slow
@needs_namespaces
@pytest.mark.parametrize("workers", [(), ("--workers", "2")], ids=["here", "workers"])
def test_a_container_that_was_killed_is_started_again_with_the_same_process_numbers(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    """The record of the dead owner names process 1, which lives again in the new container: it is another one."""
    path = graph(tmp_path, LIVE)
    for _ in range(3):
        with first("run", path, *workers, "--json") as run:
            read_until(run, '"type": "progress"')
            os.kill(inside(run), signal.SIGKILL)
            run.communicate(timeout=60)
    with first("run", path, *workers, "--json") as run:
        read_until(run, '"type": "progress"')
        os.kill(inside(run), signal.SIGTERM)
        read_until(run, '"outcome": "drained"')
        assert ended(run) == INTERRUPTED
    assert command("check", tmp_path / "data" / "live").code == 0
    with library.open(tmp_path / "data" / "live", readonly=True) as store:
        taken = [message["n"] for message in store.queue("tocks").tailer()]
    assert taken == list(range(len(taken)))


@pytest.mark.slow
@needs_namespaces
def test_a_second_container_with_the_same_volume_ends_with_code_7(tmp_path: Path) -> None:
    """Both processes have the number 1, which is what LMDB knows its readers by; the first one is not disturbed."""
    path = graph(tmp_path, LIVE)
    with first("run", path, "--json") as run:
        read_until(run, '"type": "progress"')
        with first("run", path, "--json") as second:
            said, _ = second.communicate(timeout=60)
            assert second.returncode == RUNNING, said
            assert "in another container" in said
        assert command("run", path).code == RUNNING  # a process with another number: the graph runs already
        read_until(run, '"type": "progress"')
        os.kill(inside(run), signal.SIGTERM)
        assert ended(run) == INTERRUPTED
    assert command("check", tmp_path / "data" / "live").code == 0
