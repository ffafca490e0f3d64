"""A program that publishes transactions over two stores is killed at every point, and what it does is seen once.

Two controls break a rule each, and the same enumeration finds what they lose or repeat.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from forks import Forks
from txn_transfers import COUNT

from cues import faults

EXACT = list(range(COUNT))


def every_death(
    forks: Forks, tmp_path: Path, rules: dict[str, bool], points: tuple[str, ...] = tuple(faults.PUBLISHER_POINTS)
) -> list[tuple[str, dict[str, list[Any]]]]:
    """The messages that are visible at the end, for each place where the first run was killed."""
    sites = forks.run("txn_transfers:transfer_and_count", str(tmp_path / "whole")).value
    assert {point for point, _ in sites} >= set(faults.PUBLISHER_POINTS)
    found = []
    for point, hit in sites:
        if not point.startswith(points):
            continue
        path = str(tmp_path / f"{point}-{hit}")
        assert forks.run("txn_transfers:transfer_and_die", path, point, hit, rules).killed
        found.append((f"{point}:{hit}", forks.run("txn_transfers:finish", path, rules).value))
    return found


def test_killed_at_every_point_each_message_is_committed_once_in_both_stores(forks: Forks, tmp_path: Path) -> None:
    found = every_death(forks, tmp_path, {})
    assert len(found) > 40
    for where, seen in found:
        for reader, messages in seen.items():
            assert messages == EXACT, f"{where}: {reader}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rules", "what"),
    [({"acknowledges_first": True}, "repeated"), ({"repeats_intents": False}, "lost")],
    ids=["acknowledged before the checkpoint", "intents not appended again"],
)
def test_without_the_rule_messages_are_repeated_or_lost(
    rules: dict[str, bool], what: str, forks: Forks, tmp_path: Path
) -> None:
    found = every_death(forks, tmp_path, rules, ("stamped", "intents"))
    wrong = [where for where, seen in found if any(messages != EXACT for messages in seen.values())]
    assert wrong, "the control finds nothing"
    everything = [messages for _, seen in found for messages in seen.values()]
    if what == "repeated":
        assert any(len(messages) > len(set(messages)) for messages in everything)
    else:
        assert any(set(messages) != set(EXACT) for messages in everything)


def test_a_checkpoint_that_was_lost_repeats_messages_and_loses_none(forks: Forks, tmp_path: Path) -> None:
    """An older copy of the checkpoint replaces a lost one: messages that were committed since are seen again.

    Not fewer times than once: that is why a checkpoint has to be durable before its acknowledgements.
    """
    path = tmp_path / "one"
    assert forks.run("txn_transfers:transfer_and_die", str(path), "intents.built", 2).killed
    older = (path / "checkpoint").read_text()
    assert forks.run("txn_transfers:transfer_and_die", str(path), "intents.built", 1).killed
    assert (path / "checkpoint").read_text() == older  # nothing was decided in between
    seen = forks.run("txn_transfers:finish", str(path)).value
    assert all(messages == EXACT for messages in seen.values())
    (path / "checkpoint").write_text(older)
    seen = forks.run("txn_transfers:finish", str(path)).value
    for messages in seen.values():
        assert set(messages) == set(EXACT) and len(messages) > COUNT
