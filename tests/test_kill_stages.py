"""Three processes that share queues, killed at random moments, a hundred times; then they finish, and all is compared.

Each process runs one stage (kill_stages.py). Single ones are killed, or several at the same moment; now
and then one is stopped for a while, and continues or is killed while it is stopped. Every queue, the keyed
state and the SQLite table must be those of an independent computation.

Beside it runs its negative control: the same loop over commits that were taken apart on purpose must
be found wrong, or the loop shows nothing.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kill_stages
import pytest
import seeds
from kill_stages import STAGES, layout

import cues
from cues import testing

pytestmark = pytest.mark.slow

KILLS = 100
KILLS_LONG = 2000
MARGIN = 1500
"""Numbers that the source makes after the last kill, beyond all that it can have made by then."""
PAUSE_S_MAX = 2.0
"""Between two kills at most, however slowly processes start here."""
STOP_S_MAX = 0.3
WARM_UP_S_MAX = 60


class Stages:
    """The processes of one run under ``root``."""

    def __init__(self, root: Path, **variables: str) -> None:
        self.root = root
        self.variables = variables
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.kills = 0
        self.pause_s = PAUSE_S_MAX
        root.mkdir(exist_ok=True)

    def start(self, stage: str, *options: str, **variables: str) -> subprocess.Popen[bytes]:
        log = (self.root / f"{stage}.log").open("ab")
        command = [sys.executable, "-c", "from cues.cli import main; main()", "run", "--quiet", *options]
        with log:
            self.running[stage] = subprocess.Popen(
                [*command, f"{kill_stages.__file__}:{stage}"],
                env={**os.environ, "CUES_TEST_ROOT": str(self.root), **self.variables, **variables},
                stdout=log,
                stderr=log,
            )
        return self.running[stage]

    def warm_up(self) -> None:
        """Start all, and wait until something has come through to the table.

        Pauses between kills are then up to twice as long as that took: most kills meet a process at
        work, and some one that starts.
        """
        begun = time.monotonic()
        for stage in STAGES:
            self.start(stage)
        while not layout(self.root).table.exists():
            assert time.monotonic() - begun < WARM_UP_S_MAX, [self.said(stage) for stage in STAGES]
            time.sleep(0.01)
        self.pause_s = min(PAUSE_S_MAX, 2 * (time.monotonic() - begun))

    def kill(self, *stages: str) -> None:
        """SIGKILL, to all of them before any is waited for."""
        for stage in stages:
            self.running[stage].kill()
        for stage in stages:
            code = self.running.pop(stage).wait()
            assert code == -signal.SIGKILL, f"{stage} ended with {code}: {self.said(stage)}"
            self.kills += 1

    def said(self, stage: str) -> str:
        return (self.root / f"{stage}.log").read_text()[-3000:]

    def kill_at_random(self, kills: int, chance: random.Random) -> None:
        """Start the stages that do not run, and kill until so many were killed; at the end all are dead."""
        kills += self.kills
        while self.kills < kills:
            for stage in STAGES:
                if stage not in self.running:
                    self.start(stage)
            time.sleep(chance.uniform(0, self.pause_s))
            victims = chance.sample(STAGES, chance.choice([1, 1, 1, 2, 3]))
            if chance.random() < 0.2:
                self.running[victims[0]].send_signal(signal.SIGSTOP)
                time.sleep(chance.uniform(0, STOP_S_MAX))
                if chance.random() < 0.5:
                    self.running[victims[0]].send_signal(signal.SIGCONT)
                    continue
            self.kill(*victims)
        self.kill(*self.running)

    def finish(self) -> int:
        """Let every stage come to its end, in order; returns how many numbers there are."""
        where = layout(self.root)
        total = self.made() + MARGIN
        (self.root / "count.part").write_text(str(total))
        os.rename(self.root / "count.part", where.count)
        for stage, options in zip(STAGES, ((), ("--idle-exit", "0.2"), ("--idle-exit", "0.2"))):
            code = self.start(stage, *options, CUES_TEST_FAST="1").wait(120)
            assert code == 0, f"{stage} ended with {code}: {self.said(stage)}"
        return total

    def made(self) -> int:
        """The count of numbers that the source has committed."""
        with cues.open(layout(self.root).queues["numbers"], readonly=True) as store:
            return store.queue("numbers").last_index

    def close(self) -> None:
        for process in self.running.values():
            process.kill()
            process.wait()


@contextlib.contextmanager
def stages(root: Path, **variables: str) -> Iterator[Stages]:
    made = Stages(root, **variables)
    try:
        yield made
    finally:
        made.close()


def histories(root: Path, total: int) -> dict[str, testing.History]:
    """The judgement of every queue and of the table."""
    where = layout(root)
    expected, _ = kill_stages.expected(total)
    both = {queue: expected[queue] for queue in ("even", "odd")}
    found: dict[str, Any] = {}
    for queue, path in where.queues.items():
        with cues.open(path, readonly=True) as store:
            found[queue] = testing.messages(store, queue) if queue in store.queues() else []
    found["errors"] = [message["err.proc/messages"]["numbers"][0] for message in found["errors"]]
    judged = {queue: testing.check_history(series, found[queue]) for queue, series in expected.items()}
    judged["merged"] = testing.check_history(both, found["merged"])
    judged["the table"] = testing.check_history(both, saved(where.table))
    return judged


def saved(table: Path) -> list[dict[str, int]]:
    if not table.exists():
        return []
    with contextlib.closing(sqlite3.connect(table)) as connection:
        rows = connection.execute("select n, count, part from saved order by rowid")
        return [{"n": n, "count": count, "part": part} for n, count, part in rows]


def expect_exact(root: Path, total: int, checked: Any) -> None:
    for queue, history in histories(root, total).items():
        assert history.exact, f"{queue}: {history}"
    where = layout(root)
    _, counts = kill_stages.expected(total)
    with cues.open(where.stores["second"]) as store:
        assert {key: testing.state(store, "second.count", key) for key in counts} == {
            key: {"count": count} for key, count in counts.items()
        }
    for path in set(where.stores.values()) | set(where.queues.values()):
        with cues.open(path) as store:
            assert not testing.check_attempts(store)
        checked(path)


def seeded() -> random.Random:
    seed = seeds.new()
    return random.Random(seed)


def kill_and_compare(root: Path, kills: int, checked: Any) -> None:
    with stages(root) as running:
        running.warm_up()
        running.kill_at_random(kills, seeded())
        assert running.kills >= kills
        assert running.made() > 10 * kills, "nothing was at work when it was killed"
        total = running.finish()
    expect_exact(root, total, checked)


def test_a_hundred_random_kills_of_three_processes_change_nothing(tmp_path: Path, checked: Any) -> None:
    kill_and_compare(tmp_path / "run", KILLS, checked)


def test_a_hundred_random_kills_across_four_stores_change_nothing(
    tmp_path: Path, checked: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with a store for each stage, and one between: forwarders and readers abroad are killed as well."""
    monkeypatch.setenv("CUES_TEST_STORES", "1")
    kill_and_compare(tmp_path / "run", KILLS, checked)


@pytest.mark.parametrize("stores", ["", "1"], ids=["one store", "four stores"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_negative_control_positions_in_a_transaction_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, stores: str
) -> None:
    """Positions written before the outputs lose messages, positions written after them double some."""
    monkeypatch.setenv("CUES_TEST_STORES", stores)
    chance = seeded()
    with stages(tmp_path / "run", CUES_TEST_BREAK=order) as running:
        running.warm_up()
        for _ in range(KILLS // 10):
            running.kill_at_random(10, chance)
            if wrong_already(running.root, running.made()):
                return
        total = running.finish()
        wrong = [history for history in histories(running.root, total).values() if not history.exact]
    assert wrong, "the checker found nothing wrong with a broken commit"


def wrong_already(root: Path, made: int) -> bool:
    """Return True if there is an error that no later step can repair: any except missing messages at the end."""
    return any(h.duplicated or h.unexpected or h.reordered for h in histories(root, made + MARGIN).values())


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_many_more_random_kills(tmp_path: Path, checked: Any) -> None:
    kill_and_compare(tmp_path / "run", KILLS_LONG, checked)
