"""A consumer over two stores and a PostgreSQL: killed everywhere, cut from power, overtaken; and each rule's control.

The invariant: readers of what is committed see every order once and in order, on the left and on the right, and
the ledger has a row for each. A control lives without one rule and must break it somewhere.
"""

from __future__ import annotations

import itertools
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from consumers import LEFT, ORDERS, RIGHT, lose_power
from forks import Forks

from cues import faults

Site = tuple[str, int]


class Lab:
    """Copies of one prepared place, each with a life of its own in one database."""

    def __init__(self, forks: Forks, where: Path, url: str) -> None:
        self.forks = forks
        self.url = url
        self._where = where
        self._count = itertools.count()
        self._made = str(where / "made")
        forks.run("consumers:prepare", self._made)
        self._engine = sa.create_engine(url)

    def place(self) -> tuple[str, str]:
        """A new place, and the name of the life in it."""
        life = f"life {next(self._count)}"
        place = str(self._where / life)
        shutil.copytree(
            self._made, place, ignore=shutil.ignore_patterns("bells", "lock.mdb", "wake", "open", "lease-*")
        )
        return place, life

    def ledger(self, life: str) -> list[int]:
        with self._engine.connect() as connection:
            found = connection.execute(sa.text("select n from ledger where life = :life order by n"), {"life": life})
            return [n for (n,) in found]

    def found(self, place: str, life: str) -> tuple[list[int], list[int], list[int]]:
        left, right = self.forks.run("consumers:committed", place).value
        shutil.rmtree(place)
        return left, right, self.ledger(life)

    def close(self) -> None:
        self._engine.dispose()


WANTED = (LEFT, RIGHT, list(range(ORDERS)))


@pytest.fixture
def lab(forks: Forks, tmp_path: Path, postgres: Any) -> Iterator[Lab]:
    found = Lab(forks, tmp_path, postgres.database())
    yield found
    found.close()


def sites_of(lab: Lab) -> list[Site]:
    place, life = lab.place()
    sites = lab.forks.run("consumers:sites", place, lab.url, life).value
    assert lab.found(place, life) == WANTED
    return [tuple(site) for site in sites]


def die_and_finish(
    lab: Lab, site: Site, rule: str = "", between: Callable[[str], None] = lambda place: None
) -> tuple[bool, Any]:
    """One death, then a life to the end; whether it died at all, and what is there."""
    place, life = lab.place()
    died = lab.forks.run("consumers:crash", place, lab.url, life, rule, *site).killed
    between(place)
    lab.forks.run("consumers:live", place, lab.url, life, rule)
    return died, lab.found(place, life)


def some(sites: list[Site]) -> list[Site]:
    """The first and the last hit of each point; the long mode takes all."""
    found: list[Site] = []
    for _, hits in itertools.groupby(sites, key=lambda site: site[0]):
        each = list(hits)
        found += sorted({each[0], each[-1]})
    return found


@pytest.mark.slow
def test_death_changes_nothing_wherever_it_comes(lab: Lab) -> None:
    sites = sites_of(lab)
    reached = {point for point, _ in sites}
    assert {*faults.CHECKPOINT_POINTS, *faults.CONSUMER_POINTS, *faults.PUBLISHER_POINTS} <= reached
    die_at_each(lab, some(sites))


@pytest.mark.long
def test_death_changes_nothing_at_every_hit(lab: Lab) -> None:
    die_at_each(lab, sites_of(lab))


def die_at_each(lab: Lab, sites: list[Site]) -> None:
    deaths = 0
    for site in sites:
        died, found = die_and_finish(lab, site)
        deaths += died
        assert found == WANTED, site
    assert deaths > 0.8 * len(sites)  # how many appends share a transaction is the threads' affair


@pytest.mark.slow
def test_death_again_while_the_dead_is_mended(lab: Lab) -> None:
    """Die after the commit, then at each point of the recovery and of the next transaction."""
    for again in ("checkpoint.restored", "consumer.restored", "stamped.inside", "consumer.repeated", "consumer.before"):
        place, life = lab.place()
        for site in (("consumer.committed", 2), (again, 1)):
            assert lab.forks.run("consumers:crash", place, lab.url, life, "", *site).killed
        lab.forks.run("consumers:live", place, lab.url, life)
        assert lab.found(place, life) == WANTED, again


# --- power --------------------------------------------------------------------------------------

COMMIT: list[Site] = [
    (point, hit)
    for point in ("intents.built", "consumer.before", "consumer.committed", "consumer.acknowledged")
    for hit in (1, 2, 3)
]
"""Around the commit of the first three transactions."""


@pytest.mark.slow
def test_lost_power_takes_nothing_that_was_committed(lab: Lab) -> None:
    """Around each commit: what b had not synced is gone as well."""
    for site in COMMIT:
        died, found = die_and_finish(lab, site, between=lose_power)
        assert died and found == WANTED, site


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["unsynced", "unsynced acknowledgement"])
def test_control_without_a_sync_lost_power_loses_messages(rule: str, lab: Lab) -> None:
    """Of what is published, before the commit; and of its acknowledgements, before the next forgets them."""
    sites = COMMIT if rule == "unsynced" else [("consumer.committed", 3)]
    assert any(die_and_finish(lab, site, rule, lose_power)[1] != WANTED for site in sites)


# --- order --------------------------------------------------------------------------------------


def test_control_acknowledged_before_the_commit_a_death_between_doubles(lab: Lab) -> None:
    _, (left, right, ledger) = die_and_finish(lab, ("consumer.before", 1), "hasty")
    assert left == [0, *LEFT] and right == [0, 1, *RIGHT] and ledger == WANTED[2]


def test_control_acknowledgements_that_are_not_repeated_are_lost_with_what_they_commit(lab: Lab) -> None:
    _, (left, right, ledger) = die_and_finish(lab, ("consumer.committed", 1), "forgetful")
    assert left == LEFT[1:] and right == RIGHT[2:] and ledger == WANTED[2]


@pytest.mark.parametrize("rule", ["slow", "impatient"])
def test_a_message_in_front_of_the_last_acknowledgement_would_be_dropped_by_it(rule: str, lab: Lab) -> None:
    """The next transaction is read while a commit is slow. The control does not wait for the acknowledgement."""
    place, life = lab.place()
    lab.forks.run("consumers:live", place, lab.url, life, rule)
    assert (lab.found(place, life) == WANTED) == (rule == "slow")


# --- zombies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["", "unfenced"])
@pytest.mark.parametrize("hit", [1, 2])
def test_a_zombie_that_wakes_up_in_front_of_its_commit_is_refused(hit: int, rule: str, lab: Lab) -> None:
    """Stopped there, overtaken by one that finishes, continued. The control commits under any fence."""
    place, life = lab.place()
    pid = lab.forks.start("consumers:zombie", place, lab.url, life, rule, "consumer.before", hit)
    assert lab.forks.wait(pid).stopped
    lab.forks.run("consumers:live", place, lab.url, life, rule)
    lab.forks.kill(pid, signal.SIGCONT)
    ended = lab.forks.wait(pid)
    assert not ended.error, ended.error
    found = lab.found(place, life)
    assert (ended.value, found == WANTED) == (("finished", False) if rule else ("Fenced", True))


def test_a_zombie_after_its_commit_only_repeats_its_acknowledgements(lab: Lab) -> None:
    """Its successor has acknowledged for it; that it does so too changes nothing, and then it is refused."""
    place, life = lab.place()
    pid = lab.forks.start("consumers:zombie", place, lab.url, life, "", "consumer.committed", 2)
    assert lab.forks.wait(pid).stopped
    lab.forks.run("consumers:live", place, lab.url, life)
    lab.forks.kill(pid, signal.SIGCONT)
    assert lab.forks.wait(pid).value == "Fenced"
    assert lab.found(place, life) == WANTED
