"""A graph in worker processes: the supervisor is killed, each worker, all at once, again and again; all is compared.

The graph is that of kill_stages.py, in one piece (worker_graph.py). Every kill meets one that works: it
comes when something has come through since the kill before. Beside it runs the negative control, the
same kills over commits that were taken apart on purpose.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import kill_stages
import pytest
import worker_graph
from kill_stages import layout
from test_kill_stages import MARGIN, histories, seeded

import cues
from cues import testing
from cues.engine.record import WorkersRecord
from cues.storage import locks

pytestmark = pytest.mark.slow

KILLS = 5
KILLS_LONG = 20
CONTROL_KILLS_MAX = 60
WORKERS = 3
WAIT_S_MAX = 60
PAUSE_S_MAX = 0.1
Victim = Literal["supervisor", "worker", "all"]


class Run:
    """``cues run --workers`` under ``root``, and what the test does to it."""

    def __init__(self, root: Path, **variables: str) -> None:
        self.root = root
        self.variables = variables
        self.process: subprocess.Popen[bytes] | None = None
        root.mkdir(exist_ok=True)
        self.store = str(layout(root).stores["first"])

    def start(self) -> None:
        with (self.root / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-c", "from cues.cli import main; main()", "run", "--quiet"),
                    *("--workers", str(WORKERS), f"{worker_graph.__file__}:graph"),
                ],
                env={**os.environ, "CUES_TEST_ROOT": str(self.root), **self.variables},
                stdout=log,
                stderr=log,
            )

    def said(self) -> str:
        lines = (self.root / "log").read_text().splitlines()
        return "\n".join(line for line in lines if set(line) != {"."})[-3000:]

    @property
    def pids(self) -> list[int]:
        record = WorkersRecord.of(self.store, "work")
        return [] if record is None else [worker.pid for worker in record.workers.values()]

    def merged(self) -> int:
        """The number of messages on the last queue."""
        if not Path(self.store, "data.mdb").exists():
            return 0
        with contextlib.suppress(cues.CuesError), cues.open(self.store, readonly=True) as store:
            return store.queue("merged").last_index if "merged" in store.queues() else 0
        return 0

    def until(self, reached: Any, what: str) -> None:
        deadline = time.monotonic() + WAIT_S_MAX
        while not reached():
            assert time.monotonic() < deadline, f"{what}\n{self.said()}"
            assert self.process is None or self.process.poll() is None, self.said()
            time.sleep(0.005)

    def until_more(self) -> None:
        """Until something new has come through."""
        before = self.merged()
        self.until(lambda: self.merged() > before, "nothing comes through")

    def kill(self, victim: Victim, chance: random.Random) -> None:
        """Let it work, and kill; then it works again (a worker) or is started again."""
        if self.process is None:
            self.start()
        self.until_more()
        time.sleep(chance.uniform(0, PAUSE_S_MAX))
        assert self.process is not None
        if victim == "worker":
            for pid in self.pids:
                os.kill(pid, signal.SIGKILL)
                self.until(lambda pid=pid: pid not in self.pids, "a worker is not started again")
                self.until_more()
            return
        pids = self.pids
        if victim == "all":
            for pid in chance.sample([self.process.pid, *pids], 1 + len(pids)):
                with contextlib.suppress(ProcessLookupError):  # a worker whose parent is gone ends itself
                    os.kill(pid, signal.SIGKILL)
        self.process.kill()
        self.process.wait()
        self.process = None
        self.until(lambda: all(locks.process_state(pid) in ("gone", "dead, not reaped") for pid in pids), "orphans")

    def finish(self) -> int:
        """Let the source come to its end; returns how many numbers there are."""
        with cues.open(self.store, readonly=True) as store:
            total = store.queue("numbers").last_index + MARGIN
        (self.root / "count.part").write_text(str(total))
        os.rename(self.root / "count.part", layout(self.root).count)
        if self.process is None:
            self.start()
        assert self.process is not None
        assert self.process.wait(WAIT_S_MAX) == 0, self.said()
        return total

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def run(root: Path, **variables: str) -> Iterator[Run]:
    made = Run(root, **variables)
    try:
        yield made
    finally:
        made.close()


def kill_and_compare(root: Path, victim: Victim, kills: int, checked: Any) -> None:
    chance = seeded()
    with run(root) as running:
        for _ in range(kills):
            running.kill(victim, chance)
        total = running.finish()
        said = running.said()
    for queue, history in histories(root, total).items():
        assert history.exact, f"{queue}: {history}\n{said}"
    _, counts = kill_stages.expected(total)
    with cues.open(running.store) as store:
        assert {key: testing.state(store, "work.count", key) for key in counts} == {
            key: {"count": count} for key, count in counts.items()
        }
        assert not testing.check_attempts(store)
    checked(running.store)
    record = WorkersRecord.of(running.store, "work")
    assert record is not None and not record.stopped
    if victim == "worker":
        assert [worker.restarts for worker in record.workers.values()] == [kills] * WORKERS
        assert all(worker.last_failure and "SIGKILL" in worker.last_failure.text for worker in record.workers.values())


@pytest.mark.parametrize("victim", ["supervisor", "worker", "all"])
def test_kills_change_nothing_and_leave_no_orphans(tmp_path: Path, victim: Victim, checked: Any) -> None:
    kill_and_compare(tmp_path / "run", victim, KILLS, checked)


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("victim", ["supervisor", "worker", "all"])
def test_twenty_kills_each(tmp_path: Path, victim: Victim, checked: Any) -> None:
    kill_and_compare(tmp_path / "run", victim, KILLS_LONG, checked)


@pytest.mark.parametrize(("order", "victim"), [("before", "worker"), ("after", "all")])
def test_negative_control_positions_in_a_transaction_of_their_own(tmp_path: Path, order: str, victim: Victim) -> None:
    """Positions written before the outputs lose messages, positions written after them double some."""
    chance = seeded()
    with run(tmp_path / "run", CUES_TEST_BREAK=order) as running:
        for _ in range(CONTROL_KILLS_MAX):
            running.kill(victim, chance)
            with cues.open(running.store, readonly=True) as store:
                made = store.queue("numbers").last_index
            if _wrong(running.root, made):
                return
    raise AssertionError("the checker found nothing wrong with a broken commit")


def _wrong(root: Path, made: int) -> bool:
    """Return True if some queue is not the beginning of its expected content."""
    expected, _ = kill_stages.expected(made + MARGIN)
    with cues.open(layout(root).stores["first"], readonly=True) as store:
        for queue in ("numbers", "even", "odd"):
            found = testing.messages(store, queue)
            if found != expected[queue][: len(found)]:
                print(json.dumps({"queue": queue, "found": len(found)}))
                return True
    return False
