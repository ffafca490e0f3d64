"""``cues run`` killed by SIGKILL at random moments, again and again; then it finishes, and whole queues are compared.

Beside it runs its negative control: the same loop over commits that were taken apart on purpose must
be found wrong, or the loop shows nothing.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path
from typing import Any

import kill_graph
import pytest
import seeds
from sets import slow_except
from terminal import Command

import cues
from cues import testing

KILLS = 25
DEADLINE_S = 30


def command(path: Path, **variables: str) -> Command:
    return Command("run", kill_graph.__file__, "--store", path, CUES_TEST_OUTSIDE=f"{path}.outside", **variables)


def kill_at_random(path: Path, kills: int, seed: int, **variables: str) -> int:
    """Start and kill so often; returns how many of them met a graph that was working."""
    chance = random.Random(seed)
    outside = Path(f"{path}.outside")
    met = 0
    for _ in range(kills):
        before = outside.stat().st_size if outside.exists() else 0
        with command(path, **variables) as running:
            # From the start on as well: claims and recoveries are killed too.
            whole_life = chance.random() < 0.2
            deadline = time.monotonic() + (chance.uniform(0.02, 0.5) if whole_life else DEADLINE_S)
            while running.process.poll() is None and time.monotonic() < deadline:
                if outside.exists() and outside.stat().st_size > before:
                    break
                time.sleep(0.005)
            if not whole_life:
                time.sleep(chance.uniform(0, 0.1))
            running.process.kill()
            code = running.wait()
        assert code in (-signal.SIGKILL, 0), running.text
        met += code == -signal.SIGKILL
    return met


def finish(path: Path) -> None:
    with command(path, CUES_TEST_FAST="1") as running:
        assert running.wait() == 0, running.text


def histories(path: Path) -> dict[str, testing.History]:
    with cues.open(path) as store:
        found = {queue: testing.messages(store, queue) for queue in store.queues()}
    found["errors"] = [message["err.proc/messages"]["counted"][0] for message in found["errors"]]
    return {queue: testing.check_history(series, found[queue]) for queue, series in kill_graph.expected().items()}


def check_exact(path: Path, checked: Any) -> None:
    for queue, history in histories(path).items():
        assert history.exact, f"{queue}: {history}"
    with cues.open(path) as store:
        assert not testing.check_attempts(store)
        for key in range(7):
            count = len(range(key, kill_graph.COUNT, 7))
            assert testing.state(store, "kill.count", key) == {"count": count}
    calls = [line.split() for line in Path(f"{path}.outside").read_text().splitlines()]
    assert not testing.check_hashes([((n, part), hash) for n, part, hash in calls])
    saved = {(int(n), int(part)) for n, part, _ in calls}
    expected = kill_graph.expected()
    assert saved == {(m["n"], m["part"]) for m in expected["even"] + expected["odd"]}
    checked(path)


@pytest.mark.parametrize("kills", slow_except([5], [5, KILLS]))
def test_random_kills_change_nothing(tmp_path: Path, checked: Any, kills: int) -> None:
    seed = seeds.new()
    path = tmp_path / "store"
    met = kill_at_random(path, kills, seed)
    assert met >= (0.6 if kills == KILLS else 0.4) * kills  # of five, one pause of the machine can let two end before
    finish(path)
    check_exact(path, checked)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["before", "after"])
def test_negative_control_positions_in_a_transaction_of_their_own(tmp_path: Path, order: str) -> None:
    """Positions written before the outputs lose messages, positions written after them double some."""
    seed = seeds.new()
    path = tmp_path / "store"
    for round in range(KILLS // 5):
        kill_at_random(path, 5, seed + round, CUES_TEST_BREAK=order)
        done = histories(path)
        wrong = [h for h in done.values() if (h.duplicated or h.unexpected or h.reordered)]
        if wrong:
            break
    else:
        finish(path)
        wrong = [history for history in histories(path).values() if not history.exact]
    assert wrong, "the checker found nothing wrong with a broken commit"


@pytest.mark.long
@pytest.mark.parametrize("round", range(10))
def test_many_more_random_kills(tmp_path: Path, checked: Any, round: int) -> None:
    seed = seeds.new()
    path = tmp_path / "store"
    kill_at_random(path, 4 * KILLS, seed)
    finish(path)
    check_exact(path, checked)
