"""Runs and redrives side by side, killed at random, compared with what must be there in the end."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import redrive_runs
import seeds
from forks import Forks


def mend(place: Path, chance: random.Random, sent: int, share: float) -> None:
    """Let the graph refuse other messages from now on."""
    bad = {where: [n for n in range(sent) if chance.random() < share] for where in ("count", "keep")}
    part = place / "bad.part"
    part.write_text(json.dumps(bad))
    part.rename(place / "bad.json")


@pytest.mark.slow
@pytest.mark.parametrize("rounds", [20, pytest.param(1000, marks=[pytest.mark.long, pytest.mark.timeout(3600)])])
def test_runs_and_redrives_that_are_killed_have_each_effect_once(rounds: int, forks: Forks, tmp_path: Path) -> None:
    chance = random.Random(seeds.new())
    place, sent = str(tmp_path), 0
    mend(tmp_path, chance, 0, 0)
    for _ in range(rounds):
        mend(tmp_path, chance, sent + 30, chance.choice((0, 0.1, 0.3)))
        more = chance.randrange(30)
        forks.run("redrive_runs:send", place, sent, sent + more)
        sent += more
        children = [forks.start("redrive_runs:run", place)]
        children += [forks.start("redrive_runs:redrive", place, chance.randrange(-1, 2))] * (chance.random() < 0.8)
        chance.shuffle(children)
        for child in children:
            if chance.random() < 0.7:
                time.sleep(chance.uniform(0, 0.08))
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
        for child in children:
            outcome = forks.wait(child)
            assert not outcome.error, outcome.error
            assert outcome.signal in (0, signal.SIGKILL)
    mend(tmp_path, chance, 0, 0)
    forks.run("redrive_runs:run", place)
    for _ in range(3):  # an error of the second processor can come of a redrive of the first
        forks.run("redrive_runs:redrive", place, -1)
        forks.run("redrive_runs:run", place)
    found = forks.run("redrive_runs:seen", place).value
    assert not found["unresolved"] and not found["check"] and not found["attempts"]
    every = Counter(range(sent))
    assert found["out"] == every and found["kept"] == every
    assert found["state"] == {key: len(range(key, sent, redrive_runs.KEYS)) for key in range(redrive_runs.KEYS)}
