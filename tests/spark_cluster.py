"""A standalone Spark cluster on this machine, from the pip-installed package: a master and workers, loopback only.

    with Cluster() as cluster:
        ...start(engine="spark", master=cluster.master)
    with connect_server() as url:                            a server of Spark Connect, a process of its own
        cues.spark.session(url)

All ports are free ones that the system chooses. Every process of the cluster, executors and their Python
workers included, carries a mark in its environment, by which it is found and ended: nothing is left behind.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar
from urllib.request import urlopen

import pyspark
from ports import free_port

from cues.spark import java

WORKERS = 2
WORKER_MEMORY = "600m"
EXECUTOR_MEMORY = "512m"
"""Spark's own default, 1 GB, is more than a worker has; and under 450 MB it refuses to start."""
START_TIMEOUT_S = 120
END_TIMEOUT_S = 60

_HOME = Path(pyspark.__file__).parent
_MARK = "CUES_TEST_CLUSTER"
Found = TypeVar("Found")


class Cluster:
    """A master and workers of one core each."""

    def __init__(self, workers: int = WORKERS) -> None:
        self._workers = workers
        self._mark = uuid.uuid4().hex
        self._stack = contextlib.ExitStack()
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="cues-cluster-")))
        self._processes: list[subprocess.Popen[bytes]] = []
        self._stack.callback(self._end)

    def __enter__(self) -> Cluster:
        try:
            log = self._start("master.Master", "--port", "0")
            self.master = until(lambda: _find(log, r"Starting Spark master at (spark://\S+)"), log)
            self._ui = until(lambda: _find(log, r"MasterWebUI.* started at (http://\S+)"), log)
            self.fill()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def environment(self) -> dict[str, str]:
        """For drivers: executors that fit into the workers."""
        return {"SPARK_EXECUTOR_MEMORY": EXECUTOR_MEMORY}

    def fill(self) -> None:
        """Start workers until all are there, and wait until the master knows them."""
        log = None
        for _ in range(self._workers - len(self.alive("deploy.worker.Worker"))):
            folder = self._folder / f"work-{len(self._processes)}"
            size = ("--cores", "1", "--memory", WORKER_MEMORY, "--port", "0", "--work-dir", str(folder))
            log = self._start("worker.Worker", *size, self.master)
        until(lambda: self.status()["aliveworkers"] == self._workers, log)

    def status(self) -> dict[str, Any]:
        """The status that the master reports."""
        with urlopen(f"{self._ui}/json/", timeout=100) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def processes(self) -> list[int]:
        """The pids of the cluster: daemons, executors, Python workers."""
        mark = f"{_MARK}={self._mark}".encode()
        found = []
        for place in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (place / "environ").read_bytes().split(b"\0"):
                    found.append(int(place.name))
        return found

    def alive(self, command: str) -> list[int]:
        """The processes whose command line has ``command``."""
        return [pid for pid in self.processes() if command in command_of(pid)]

    def _start(self, daemon: str, *arguments: str) -> Path:
        """Start a daemon; returns its log."""
        log = self._folder / f"{len(self._processes)}.log"
        environment = {
            **os.environ,
            _MARK: self._mark,
            "JAVA_HOME": str(java.find().home),
            "SPARK_HOME": str(_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_LOCAL_DIRS": str(self._folder),
            "SPARK_DAEMON_MEMORY": "256m",
        }
        with open(log, "wb") as file:
            self._processes.append(_spark_class(daemon, arguments, environment, file))
        return log

    def _end(self) -> None:
        """End everything: workers end their executors themselves; what is left then is killed."""
        for process in reversed(self._processes):
            process.terminate()
        with contextlib.suppress(TimeoutError):
            until(
                lambda: all(p.poll() is not None for p in self._processes) and not self.processes(), None, END_TIMEOUT_S
            )
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes:
            process.wait()
        until(lambda: not self.processes(), None, END_TIMEOUT_S)


@contextlib.contextmanager
def connect_server() -> Iterator[str]:
    """A Spark Connect server on the loopback interface, ended by its process id. The result is its URL."""
    port = free_port()
    options = {"spark.connect.grpc.binding.port": port, "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1"}
    settings = [f"--conf={name}={value}" for name, value in options.items()]
    main = "--class=org.apache.spark.sql.connect.service.SparkConnectServer"
    environment = {
        **os.environ,
        "JAVA_HOME": str(java.find().home),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    process = subprocess.Popen(
        [str(_HOME / "bin" / "spark-submit"), main, "--master=local[2]", *settings, "spark-internal"],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: _answers(port) or process.poll() is not None, timeout_s=120)
        assert process.poll() is None, "the server ended"
        yield f"sc://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _spark_class(
    daemon: str, arguments: tuple[str, ...], environment: dict[str, str], log: IO[bytes]
) -> subprocess.Popen[bytes]:
    """``spark-class`` becomes the Java process: its pid is the daemon's."""
    command = [str(_HOME / "bin" / "spark-class"), f"org.apache.spark.deploy.{daemon}"]
    place = ["--host", "127.0.0.1", "--webui-port", "0"]
    return subprocess.Popen(
        [*command, *place, *arguments], env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )


def command_of(pid: int) -> str:
    """The command line of a process; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def ancestors(pid: int) -> Iterator[int]:
    """The process, its parent, and so on."""
    while pid > 1:
        yield pid
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def until(look: Callable[[], Found], log: Path | None = None, timeout_s: float = START_TIMEOUT_S) -> Found:
    """The first result of ``look`` that is true. Raises TimeoutError, with the end of the log, when it is late."""
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        if time.monotonic() > deadline:
            told = log.read_text(errors="replace")[-3000:] if log is not None else ""
            raise TimeoutError(f"not within {timeout_s} s\n{told}")
        time.sleep(0.05)
    return found


def _find(log: Path, pattern: str) -> str:
    match = re.search(pattern, log.read_text(errors="replace"))
    return match[1] if match else ""
