"""Die at every named crash point, at every hit; restart, finish, compare whole queues and state.

The invariant: after any death, the final queues, state, error queue and positions
are those of an undisturbed run. Functions of steps that had not committed may be called
again, with the same messages under the same hashes.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forks import Forks
from scenarios import SCENARIOS, Scenario, copy
from sets import slow_except, thinned

from cues import faults, testing

FAST = ("alts with side effects", "state", "stream abroad")
"""A choice between inputs, keyed state, and two stores; the slow set has the others."""
BEGINS_A_TIMELINE = "compact.renamed"
"""Death there costs a timeline: messages that are appended later have other delivery hashes."""
Site = tuple[str, int]
"""A crash point, and at which time that it is reached."""


def template(forks: Forks, name: str, where: Path) -> str:
    """A store with the scenario's queues, to be copied."""
    made = str(where / "template")
    forks.run("scenarios:prepare", name, made)
    return made


def undisturbed(forks: Forks, name: str, made: str) -> tuple[list[tuple[str, int]], dict[str, Any]]:
    """Every site of the scenario, and the results of an undisturbed run."""
    path = copy(made, "undisturbed")
    sites = forks.run("scenarios:sites", name, path).value
    return sites, forks.run("scenarios:examine", name, path).value


@pytest.mark.parametrize("name", slow_except(FAST, SCENARIOS))
def test_death_at_every_point_changes_nothing(name: str, stride: int, forks: Forks, tmp_path: Path) -> None:
    """At some of the times that a point is reached; in the long set at all of them."""
    made = template(forks, name, tmp_path)
    sites, expected = undisturbed(forks, name, made)
    assert len(sites) > 10
    sites = thinned(sites, stride)
    found = forks.run("scenarios:crash_and_finish", name, made, [[site] for site in sites]).value
    for site, after in zip(sites, found, strict=True):
        assert after["died"] == [signal.SIGKILL], f"{name}: {site} was not reached"
        judge(SCENARIOS[name], expected, after, f"{name}: {site}")


def judge(scenario: Scenario, expected: dict[str, Any], found: dict[str, Any], where: str) -> None:
    assert not found["problems"], f"{where}: {found['problems']}"
    assert not found["check"], f"{where}: {found['check']}"
    assert found["positions"] == expected["positions"], where
    assert found["sources"] == expected["sources"], where
    compare = judge_at_most_once if scenario.at_most_once else judge_exact
    compare(scenario, expected, found, where)
    # A message has one hash for ever: on every retry, and in an undisturbed run.
    told = found["told"] if BEGINS_A_TIMELINE in where else expected["told"] + found["told"]
    for processor in {call[0] for call in expected["told"]}:
        calls = [(what, hash) for who, what, hash in told if who == processor]
        if not is_batch(scenario, processor):
            assert not testing.check_hashes(calls), f"{where}: {testing.check_hashes(calls)}"


def judge_exact(scenario: Scenario, expected: dict[str, Any], found: dict[str, Any], where: str) -> None:
    for queue, messages in expected["queues"].items():
        if queue in scenario.merges:
            by_input: dict[Any, list[Any]] = {}
            for message in messages:
                by_input.setdefault(message.get("from"), []).append(message)
            history = testing.check_history(by_input, found["queues"][queue])
        else:
            history = testing.check_history(messages, found["queues"][queue])
        assert history.exact, f"{where}: queue {queue}: {history}"
    assert found["state"] == expected["state"], f"{where}: state"
    compared = 2 if BEGINS_A_TIMELINE in where else 3
    missed = {str(call[:compared]) for call in expected["told"]} - {str(call[:compared]) for call in found["told"]}
    if not any(is_batch(scenario, call[0]) for call in expected["told"]):
        assert not missed, f"{where}: never called for {missed}"


def judge_at_most_once(scenario: Scenario, expected: dict[str, Any], found: dict[str, Any], where: str) -> None:
    """Nothing twice, and at most one step lost."""
    size = next(iter(scenario.build().processors.values())).options.batch_size
    for queue, messages in expected["queues"].items():
        history = testing.check_history(messages, found["queues"][queue])
        assert history.at_most_once and len(history.lost) <= size, f"{where}: queue {queue}: {history}"
        lost = [finding.place for finding in history.lost]
        assert lost == list(range(lost[0], lost[0] + len(lost))) if lost else True, where
    told = [call[1] for call in found["told"]]
    assert len(told) == len(set(told)), f"{where}: called twice"
    assert len(told) >= len(expected["told"]) - size


def is_batch(scenario: Scenario, processor: str) -> bool:
    return scenario.build().processors[processor.rpartition(".")[2].partition("/")[0]].options.batch


def test_every_crash_point_is_reached_by_some_scenario(forks: Forks, tmp_path: Path) -> None:
    reached = set()
    for name in ("sink", "purge", "compaction", "side effects from abroad", "partitions that become more"):
        made = template(forks, name, tmp_path / name)
        reached |= {point for point, _ in undisturbed(forks, name, made)[0]}
    # The others have enumerations of their own: test_pending.py, test_txn_publisher_crashes.py, test_txn_crashes.py,
    # test_sessions.py, test_spark_queues.py, test_map_growth.py and test_copies.py.
    assert reached == {*faults.STORE_POINTS, *faults.STEP_POINTS, *faults.ABROAD_POINTS}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["alts with messages on both", "alts across stores with messages on both"])
def test_alts_with_side_effects_killed_in_its_function_takes_the_same_input_again(
    name: str, forks: Forks, tmp_path: Path
) -> None:
    """A processor with side effects reads from two queues, messages wait on both, and it is killed in its function.

    Whichever input it had chosen, the next start gives it that input again, the same messages under
    the same hashes, before anything of the other one. A system that writes its snapshot under one
    type and looks for another takes whichever comes first.
    """
    made = template(forks, name, tmp_path)
    sites, _ = undisturbed(forks, name, made)
    cases = [(point, hit) for point, hit in sites if point in ("function.before", "function.after", "snapshot.after")]
    chosen: list[str] = []
    for number, (point, hit) in enumerate(cases):
        path = copy(made, str(number))
        assert forks.run("scenarios:crash", name, path, point, hit).killed
        before = told(path)
        pending = forks.run("scenarios:pending", name, path).value
        if not pending["waiting"]:
            continue
        chosen.append(pending["tailer"])
        assert forks.run("scenarios:drive", name, path).error == ""
        after = told(path)[len(before) :]
        # The messages of the snapshot come first, all of them, in order.
        binding = pending["tailer"].rpartition(".")[2]
        taken = [[binding, n] for n in pending["messages"]]
        assert [what for _, what, _ in after[: len(taken)]] == taken, f"{point}:{hit}"
        # Those that had been called already are called under the hash that they were called under.
        hashes = {str(what): hash for _, what, hash in before}
        assert all(hashes.get(str(what), hash) == hash for _, what, hash in after)
    assert set(chosen) == {"g.tagged.a", "g.tagged.b"} and len(chosen) > 20


def told(path: str) -> list[Any]:
    lines = Path(path + ".outside")
    return [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "state",
        "chain",
        "alts with side effects",
        "error step with side effects",
        "error step abroad",
        "alts across stores with messages on both",
    ],
)
def test_death_again_at_the_same_point_on_the_way_back(name: str, stride: int, forks: Forks, tmp_path: Path) -> None:
    """Recovery may be killed as well: die at a point, then at its first hit on the next start, then finish."""
    twice(name, forks, tmp_path, lambda site: [(site[0], 1)], stride)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, scenario in SCENARIOS.items() if not scenario.at_most_once])
def test_death_at_every_pair_of_points(name: str, forks: Forks, tmp_path: Path) -> None:
    """Die at every point, then at every other on the way back."""
    points = [*faults.STEP_POINTS, *faults.ABROAD_POINTS, "grow.inside", "purge.inside"]
    twice(name, forks, tmp_path, lambda site: [(other, hit) for other in points for hit in (1, 2)])


def twice(name: str, forks: Forks, tmp_path: Path, second: Callable[[Site], list[Site]], stride: int = 1) -> None:
    made = template(forks, name, tmp_path)
    sites, expected = undisturbed(forks, name, made)
    cases = [[site, again] for site in thinned(sites, stride) for again in second(site)]
    for start in range(0, len(cases), 500):
        some = cases[start : start + 500]
        found = forks.run("scenarios:crash_and_finish", name, made, some).value
        for case, after in zip(some, found, strict=True):
            assert after["died"][0] == signal.SIGKILL
            judge(SCENARIOS[name], expected, after, f"{name}: {case}")
