"""Die, let an operator do something to the store, start again, finish, and compare with an undisturbed run."""

from __future__ import annotations

import signal
from pathlib import Path

import between
import pytest
from forks import Forks
from scenarios import SCENARIOS
from sets import thinned
from test_crashes import BEGINS_A_TIMELINE, judge, template, undisturbed


@pytest.mark.slow
@pytest.mark.parametrize("name", SCENARIOS)
def test_what_an_operator_does_between_a_death_and_a_start_changes_no_message(
    name: str, stride: int, forks: Forks, tmp_path: Path
) -> None:
    """The commands take turns, each graph begins with another one."""
    made = template(forks, name, tmp_path)
    sites, expected = undisturbed(forks, name, made)
    commands = list(between.SAME)
    first = list(SCENARIOS).index(name)
    cases = [
        (site, commands[(first + number) % len(commands)])
        for number, site in enumerate(thinned(sites, stride)[::stride])
    ]
    found = forks.run("between:crash_and_command", name, made, cases).value
    for (site, command), after in zip(cases, found, strict=True):
        where = f"{name}: {site}: {command}"
        assert after["died"] == [signal.SIGKILL], where
        assert not after["error"], f"{where}\n{after['error']}"
        judge(SCENARIOS[name], expected, after, f"{where}: {BEGINS_A_TIMELINE}")  # most commands begin one
