"""The chain soak: keyed messages through three stages of 31 partitions, by workers that come, go, die and stop.

Workers join and quit in the middle of steps, some are killed with SIGKILL, some are stopped past their lease, lose
their partitions, and continue with an open step. At the end every key is at every stage exactly once and in its
order. The negative controls are part of it: without the fence the checker must find an error.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import groups_soak as soak
import pytest
import seeds
from children import Child

import cues
from cues import testing
from cues.groups import TRY_COMMIT, Member
from cues.groups.table import GroupTable

KEYS = 500
WORKERS = 4
CALM_S = 240
"""The longest time of the rest, when no member is disturbed any more."""


class Crowd:
    """The workers, and what happens to them."""

    def __init__(self, path: Path, chance: random.Random, events: Sequence[str], **environment: str) -> None:
        self.path = path
        self.choices = events
        self.left: list[str] = []
        """The choices that come before any of them comes again: every kind of event happens in a short run too."""
        self.chance = chance
        self.environment = {**os.environ, **environment}
        self.workers: dict[int, tuple[subprocess.Popen[bytes], str]] = {}
        self.stopped: dict[int, float] = {}
        """The time at which each stopped worker continues, by pid."""
        self.events: Counter[str] = Counter()

    def join(self) -> None:
        # Half of them have names, of which some come back within their lease and some do not.
        living = {name for _, name in self.workers.values()}
        free = [name for name in ("ann", "bob", "cyd") if name not in living]
        name = self.chance.choice(free) if free and self.chance.random() < 0.5 else ""
        process = subprocess.Popen(
            [sys.executable, soak.__file__, str(self.path), str(self.chance.randrange(1 << 32)), name],
            env=self.environment,
            stderr=subprocess.PIPE,
        )
        self.workers[process.pid] = process, name
        self.events["joined"] += 1

    def disturb(self) -> None:
        """One random event."""
        if not self.left:
            self.left = self.chance.sample(self.choices, len(self.choices))
        what = self.left.pop()
        running = [pid for pid in self.workers if pid not in self.stopped]
        if what == "join" or not running:
            if len(self.workers) < WORKERS + 2:
                self.join()
            return
        pid = self.chance.choice(running)
        if what == "stop":
            os.kill(pid, signal.SIGSTOP)
            # Most beyond their lease; some come back in time, and may not notice anything.
            self.stopped[pid] = time.monotonic() + soak.LEASE_S * self.chance.uniform(0.3, 2.5)
        else:
            os.kill(pid, signal.SIGKILL if what == "kill" else signal.SIGTERM)
        self.events[what] += 1

    def tend(self, wanted: int) -> None:
        """Continue the workers whose time has come, and replace the dead ones."""
        for pid, when in list(self.stopped.items()):
            if time.monotonic() >= when:
                os.kill(pid, signal.SIGCONT)
                del self.stopped[pid]
        for pid, (process, _) in list(self.workers.items()):
            if process.poll() is not None:
                self.reap(pid)
        while len(self.workers) < wanted:
            self.join()

    def reap(self, pid: int) -> None:
        process, name = self.workers.pop(pid)
        self.stopped.pop(pid, None)
        errors = process.communicate()[1].decode()
        # A name may be taken: of one that was stopped, or that its parent has not seen dead yet.
        ended_well = process.returncode in (0, -signal.SIGKILL, -signal.SIGTERM)
        taken = name and ("AlreadyRunning" in errors or "Fenced" in errors)
        # Without the fence a zombie moves the position of a partition that another member holds. That member then finds
        # messages that were handed out and not committed, and refuses to begin a session.
        noticed = self.environment.get("CUES_TEST_BREAK") and "were handed out and are not committed" in errors
        assert ended_well or taken or noticed, errors
        self.events["noticed" if noticed else "name taken"] += bool(not ended_well)

    def end(self) -> None:
        for pid in list(self.stopped):
            os.kill(pid, signal.SIGCONT)
        for pid, (process, _) in list(self.workers.items()):
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
            self.reap(pid)


def feed(path: Path, count: int) -> dict[str, list[dict[str, Any]]]:
    """Make the queues, fill the first; returns the messages by key, in their order."""
    series: dict[str, list[dict[str, Any]]] = {f"key-{n}": [] for n in range(min(KEYS, count))}
    with cues.open(path, durability="process") as store:
        for queue in soak.STAGES:
            store.queue(queue, partitions=soak.PARTITIONS, key="key")
        messages = []
        for n in range(count):
            key = f"key-{n % len(series)}"
            message = {"key": key, "n": len(series[key])}
            series[key].append(message)
            messages.append(message)
        for start in range(0, count, 5000):
            store.queue(soak.STAGES[0]).appender().write_many(messages[start : start + 5000])
    return series


ALL = ("kill", "kill", "stop", "stop", "quit", "join")


def run(
    path: Path, count: int, seed: int, disturbed_s: float, events: Sequence[str] = ALL, **environment: str
) -> tuple[Crowd, dict[str, Any]]:
    """The whole soak; returns what happened, and the history of each stage."""
    chance = random.Random(seed)
    series = feed(path, count)
    crowd = Crowd(path, chance, events, **environment)
    begun = time.monotonic()
    try:
        with cues.open(path) as store:
            table = GroupTable(store, soak.GROUP)
            disturb_at = begun
            while sum(table.lag(soak.QUEUES).values()) and time.monotonic() < begun + disturbed_s + CALM_S:
                disturbed = time.monotonic() < begun + disturbed_s
                crowd.tend(WORKERS)
                if disturbed and time.monotonic() >= disturb_at:
                    crowd.disturb()
                    disturb_at = time.monotonic() + chance.uniform(0.05, 0.4)
                time.sleep(0.02)
            assert environment or not sum(table.lag(soak.QUEUES).values()), "it did not come to its end"
            soak.done(path).touch()
            crowd.end()
            print(f"{count:,} messages in {time.monotonic() - begun:.1f} s: {dict(crowd.events)}")
            return crowd, {
                stage: testing.check_history(
                    series,
                    [m for n in range(soak.PARTITIONS) for m in testing.messages(store, f"{stage}/{n}")],
                )
                for stage in soak.STAGES
            }
    finally:
        for process, _ in crowd.workers.values():
            process.kill()
            process.communicate()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "disturbed_s"),
    [
        pytest.param(10_000, 10.0, id="bounded"),
        pytest.param(100_000, 600.0, id="long", marks=[pytest.mark.long, pytest.mark.timeout(1500)]),
    ],
)
def test_every_key_once_and_in_order_at_every_stage(
    count: int, disturbed_s: float, tmp_path: Path, checked: Any
) -> None:
    seed = seeds.new()
    crowd, histories = run(tmp_path / "store", count, seed, disturbed_s)
    for stage, history in histories.items():
        assert history.exact, f"{stage}: {history}"
    assert min(crowd.events[what] for what in ("kill", "stop", "quit")) > 0
    checked(tmp_path / "store")


@pytest.mark.parametrize("how", ["", *soak.BROKEN], ids=["fenced", *soak.BROKEN])
def test_a_step_in_the_hands_of_a_stopped_process_is_refused(how: str, tmp_path: Path, checked: Any) -> None:
    """A worker is stopped in the middle of a step, past its lease; another takes all partitions and finishes; then the
    first continues and commits.

    It is refused, and every message is there once. The negative controls: nothing compared at all, and the same
    comparison right before the transaction instead of inside it. They commit, and messages are there twice.
    """
    path = tmp_path / "store"
    series = feed(path, 200)
    code = f"import groups_soak, pathlib; groups_soak.zombie(pathlib.Path({str(path)!r}), {how!r})"
    with Child(code) as child, cues.open(path) as store:
        assert child.line() == "in step"
        child.signal(signal.SIGSTOP)
        with Member(store, "first", soak.GROUP) as member:
            while sum(member.lag().values()):
                with member.session() as session:
                    for message in session.read_many(50, timeout=1):
                        session.write("second", message)
                    assert session.end(TRY_COMMIT).committed
            child.signal(signal.SIGCONT)
            child.say()
            answer = child.line()
        found = testing.check_history(
            series, [m for n in range(soak.PARTITIONS) for m in testing.messages(store, f"second/{n}")]
        )
        child.end()
    checked(path)
    if how:
        assert answer == "True None" and found.duplicated
    else:
        assert answer == "False moved" and found.exact


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("how", soak.BROKEN)
def test_negative_control_the_soak_without_the_fence(how: str, tmp_path: Path) -> None:
    """Steps are slow here, so that a stopped worker has an open one, which others take before it continues."""
    seed = seeds.new()
    for round in range(40):
        broken = {"CUES_TEST_BREAK": how, "CUES_TEST_PAUSE_S": "0.15"}
        _, histories = run(tmp_path / f"store-{round}", 400, seed + round, 4.0, ("stop",), **broken)
        if any(not history.exact for history in histories.values()):
            return
    raise AssertionError("the checker found nothing wrong where nothing was fenced")
