"""Redriving: a failed message goes once more through the processor that failed, exactly once."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from forks import Forks
from redrives import NAMES, copy
from sets import slow_except

FAST = ("state", "alts")


def template(forks: Forks, name: str, where: Path) -> str:
    folder = where / "template"
    folder.mkdir()
    forks.run("redrives:prepare", name, str(folder / "home"))
    return str(folder / "home")


@pytest.mark.parametrize("name", slow_except(FAST, NAMES))
def test_death_at_every_point_of_a_redrive_changes_nothing(name: str, forks: Forks, tmp_path: Path) -> None:
    """Die at every crash point of a redrive, at every hit; redrive again, and compare with an undisturbed redrive."""
    made = template(forks, name, tmp_path)
    counted = copy(made, "counted")
    sites = forks.run("redrives:sites", name, counted).value
    undisturbed = copy(made, "undisturbed")
    before = forks.run("redrives:examine", name, undisturbed).value
    result = forks.run("redrives:redrive", name, undisturbed).value
    expected = forks.run("redrives:examine", name, undisturbed).value
    failed = len(before["errors"])
    assert failed and not before["check"] and not expected["check"]
    assert result["resolved"] + result["failed_again"] == failed and not result["refused"] and not result["waiting"]
    assert {"redrive.asking", "redrive.asked", "redrive.claimed", "redrive.inside"} <= {point for point, _ in sites}
    for site, found in zip(sites, forks.run("redrives:crash_and_finish", name, made, sites).value, strict=True):
        assert found["died"] == signal.SIGKILL, f"{name}: {site} was not reached"
        for part in ("check", "problems"):
            assert not found[part], f"{name}: {site}: {found[part]}"
        for part in ("queues", "state", "errors", "unresolved"):
            assert found[part] == expected[part], f"{name}: {site}: {part}"
        # A call may be repeated, under the same hash.
        assert {tuple(call) for call in found["told"]} == {tuple(call) for call in expected["told"]}, site
