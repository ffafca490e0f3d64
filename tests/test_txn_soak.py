"""The soak of transactions: two stages of shared consumers, three queues, two stores, everything at once.

The first queue is written by publishers that commit, abort and wait. All queues grow. Processes of both stages are
killed, stopped past their lease and continued, and asked to end; others take over. Applications abort transactions. At
the end every stage has each committed message once, and those of a key in their order. The negative control
acknowledges before it commits: the checker must find messages twice.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import seeds
import soak_lives as soak
from forks import Forks

from cues.groups import describe, list_groups
from cues.storage import locks

WORKERS = 2
"""Processes of each stage."""
CALM_S = 240
"""The longest time of the rest, when no process is disturbed any more."""


def alive(pid: int) -> bool:
    return locks.process_state(pid) not in ("gone", "dead, not reaped")


class Crowd:
    """The processes of both stages, and what happens to them."""

    def __init__(self, forks: Forks, place: str, seed: int, events: tuple[str, ...], rule: str) -> None:
        self.forks, self.place, self.rule = forks, place, rule
        self.chance = random.Random(seed)
        self.choices = events
        self.left: list[str] = []
        self.workers: dict[int, int] = {}
        """The stage of each process, by pid."""
        self.stopped: dict[int, float] = {}
        self.events: Counter[str] = Counter()

    def tend(self) -> None:
        """Continue the processes whose time has come, and replace those that ended."""
        for pid, when in list(self.stopped.items()):
            if time.monotonic() >= when:
                self.signal(pid, signal.SIGCONT)
                del self.stopped[pid]
        for pid in [pid for pid in self.workers if pid not in self.stopped and not alive(pid)]:
            self.reap(pid)
        for stage in (0, 1):
            while list(self.workers.values()).count(stage) < WORKERS:
                seed = self.chance.randrange(1 << 30)
                pid = self.forks.start("soak_lives:work", self.place, stage, seed, self.rule)
                self.workers[pid] = stage
                self.events["started"] += 1

    def disturb(self) -> None:
        if not self.left:
            self.left = self.chance.sample(self.choices, len(self.choices))
        running = [pid for pid in self.workers if pid not in self.stopped]
        if not running:
            return
        what, pid = self.left.pop(), self.chance.choice(running)
        self.events[what] += 1
        number = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "quit": signal.SIGTERM}[what]
        self.signal(pid, number)
        if what == "stop":
            self.stopped[pid] = time.monotonic() + soak.LEASE_S * self.chance.uniform(0.5, 2.5)

    def signal(self, pid: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def reap(self, pid: int) -> None:
        del self.workers[pid]
        outcome = self.forks.wait(pid)
        assert not outcome.error, outcome.error
        if outcome.value not in (None, "stopped"):
            self.events[str(outcome.value).partition(":")[0]] += 1
            # A takeover may be seen by the consumer before the group tells. Any other error is one.
            assert str(outcome.value).startswith("Fenced"), outcome.value

    def end(self, number: int) -> None:
        for pid in list(self.workers):
            self.signal(pid, signal.SIGCONT)
            self.signal(pid, number)
        for pid in list(self.workers):
            if number == signal.SIGKILL:
                del self.workers[pid]
                self.forks.wait(pid)
            else:
                self.reap(pid)


def run(
    forks: Forks, place: Path, count: int, disturbed_s: float, events: tuple[str, ...], rule: str = ""
) -> list[str]:
    """Run the soak; return what is wrong at the stages, and assert that it comes to its end."""
    seed = seeds.new()
    place.mkdir()
    where = str(place)
    a, b = soak.stores(where)
    with a, b:
        for stage, store in zip(soak.STAGES, (a, a, b)):
            store.queue(stage, partitions=soak.PARTITIONS[0])
    crowd = Crowd(forks, where, seed, events, rule)
    feeder = forks.start("soak_lives:feed", where, count, seed)
    try:
        begun = disturb_at = time.monotonic()
        a, b = soak.stores(where)
        with a, b:
            while True:
                now = time.monotonic()
                assert now < begun + disturbed_s + CALM_S, f"it did not come to its end: {crowd.events}"
                crowd.tend()
                if now < begun + disturbed_s and now >= disturb_at:
                    crowd.disturb()
                    disturb_at = now + crowd.chance.uniform(0.1, 0.5)
                named = {group.group: group for group in list_groups(a)}
                lag = [sum(part.lag for part in describe(a, name).partitions) for name in named]
                if now >= begun + disturbed_s and len(lag) == 2 and not sum(lag) and not alive(feeder):
                    break
                time.sleep(0.02)
        crowd.end(signal.SIGTERM)
        sent = forks.wait(feeder)
        assert sent.value == count, sent
        print(f"{count:,} messages in {time.monotonic() - begun:.1f} s: {dict(crowd.events)}")
    finally:
        crowd.end(signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(feeder, signal.SIGKILL)
    stages = soak.found(where)
    expected = {key: list(range(len(numbers))) for key, numbers in stages["first"].items()}
    assert sum(len(numbers) for numbers in expected.values()) == count
    wrong = []
    for stage, keys in stages.items():
        bad = [key for key in expected if keys.get(key) != expected[key]]
        if bad or set(keys) != set(expected):
            wrong.append(f"{stage}: {len(bad)} keys, {sum(map(len, keys.values()))} messages")
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize(
    ("count", "disturbed_s"),
    [
        pytest.param(3_000, 6.0, id="bounded"),
        pytest.param(100_000, 300.0, id="long", marks=[pytest.mark.long, pytest.mark.timeout(1500)]),
    ],
)
def test_every_message_once_and_in_order_at_every_stage(
    count: int, disturbed_s: float, forks: Forks, tmp_path: Path
) -> None:
    assert run(forks, tmp_path / "place", count, disturbed_s, ("kill", "kill", "stop", "quit")) == []


@pytest.mark.long
@pytest.mark.timeout(900)
def test_negative_control_the_soak_that_acknowledges_before_it_commits(forks: Forks, tmp_path: Path) -> None:
    for number in range(10):
        if run(forks, tmp_path / str(number), 2_000, 4.0, ("kill",), "hasty"):
            return
    raise AssertionError("the checker found nothing wrong, although a protection was taken off")
