"""Streams that write to other stores by pending messages: killed everywhere, cut from power, overtaken; and controls.

The invariant: in every store, readers of committed messages see the same as after an undisturbed run, and
nothing is left pending.
"""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from forks import Forks
from pending_runs import COUNT, GRAPHS, OTHERS
from scenarios import copy
from sets import slow_except
from test_power import first_middle_and_last

import cues
from cues import Graph, QueueOptions, Sink, Source, Stream, faults, testing
from cues.engine.assembly import assemble
from cues.errors import Diverged, GraphError
from cues.graphs import draw
from cues.producers import clocks
from cues.queues.base import view_of, views_of
from cues.steps import ownership

Site = tuple[str, int]
Message = dict[str, Any]


class Lab:
    """One prepared place to copy, and the results of an undisturbed run."""

    def __init__(self, forks: Forks, where: Path, name: str = "spread", durability: str = "process") -> None:
        self.forks = forks
        self.name = name
        self.made = str(where / "made")
        forks.run("pending_runs:prepare", name, self.made, durability)
        path = copy(self.made, "undisturbed")
        self.sites: list[Site] = forks.run("pending_runs:sites", name, path).value
        self.expected = self.examine(path)

    def examine(self, path: str) -> Any:
        return self.forks.run("pending_runs:examine", self.name, path).value

    def at(self, *points: str) -> list[Site]:
        return [site for site in self.sites if site[0].startswith(points)]

    def wrong(self, found: Any) -> str:
        """The differences from an undisturbed run; empty if there are none."""
        if found["wrong"] or found["pending"]:
            return f"{found['wrong']} {found['pending']}"
        for what in ("positions", "state"):
            if found[what] != self.expected[what]:
                return what
        for queue, messages in self.expected["queues"].items():
            if self.by_unit(found["queues"].get(queue, [])) != self.by_unit(messages):
                return f"{queue}: {found['queues'].get(queue)}"
        return ""

    def by_unit(self, messages: list[Message]) -> dict[Any, list[Message]]:
        """Units write to one queue in any order between them."""
        found: dict[Any, list[Message]] = {}
        for message in messages:
            found.setdefault(message.get("from"), []).append(message)
        return found


KINDS = pytest.mark.parametrize(
    ("name", "durability"),
    slow_except([], [("spread", "process"), ("spread", "disk"), ("picky", "process")], names=2),
)


@KINDS
def test_death_at_every_point_changes_nothing(name: str, durability: str, forks: Forks, tmp_path: Path) -> None:
    lab = Lab(forks, tmp_path, name, durability)
    assert {*faults.PENDING_POINTS, "stamped.before", "stamped.inside"} <= {point for point, _ in lab.sites}
    everywhere = (name, durability) == ("spread", "process")
    sites = lab.sites if everywhere else lab.at("pending.", "stamped.", "commit.", "snapshot.")
    die_and_judge(lab, first_middle_and_last(sites))


@pytest.mark.long
@KINDS
def test_death_at_every_point_and_hit_changes_nothing(name: str, durability: str, forks: Forks, tmp_path: Path) -> None:
    lab = Lab(forks, tmp_path, name, durability)
    die_and_judge(lab, lab.sites)


def die_and_judge(lab: Lab, sites: list[Site]) -> None:
    found = lab.forks.run("pending_runs:every_death", lab.name, lab.made, [[site] for site in sites]).value
    for site, after in zip(sites, found, strict=True):
        assert not lab.wrong(after), f"{site}: {lab.wrong(after)}"


@pytest.mark.slow
def test_every_hit_of_what_crosses_stores(forks: Forks, tmp_path: Path) -> None:
    lab = Lab(forks, tmp_path)
    die_and_judge(lab, lab.at("pending.", "stamped."))


@pytest.mark.slow
def test_at_most_once_loses_one_message_at_most_and_repeats_none(forks: Forks, tmp_path: Path) -> None:
    lab = Lab(forks, tmp_path, "once")
    cases = [[site] for site in first_middle_and_last(lab.at("pending.", "stamped.", "commit.", "snapshot."))]
    for case, after in zip(cases, forks.run("pending_runs:every_death", "once", lab.made, cases).value, strict=True):
        found, wanted = after["queues"]["a"], lab.expected["queues"]["a"]
        assert len(wanted) == COUNT and not after["wrong"] and not after["pending"], case
        assert [message for message in wanted if message in found] == found and len(found) >= COUNT - 1, case


@pytest.mark.slow
def test_death_in_the_start_after_a_death(forks: Forks, tmp_path: Path) -> None:
    lab = Lab(forks, tmp_path)
    # Which points a start passes depends on what it finds; these it passes always, and twice where something is due.
    second = [("claim.after", 1), ("pending.settled", 1), ("pending.named", 1), ("pending.written", 1)]
    cases = [[first, *[one] * times] for first in lab.at("pending.") for one in second for times in (1, 2)]
    due = [[("pending.committed", hit), (point, 1)] for hit in (1, 2) for point in ("stamped.before", "stamped.inside")]
    cases = cases[::5] + due
    found = forks.run("pending_runs:every_death", "spread", lab.made, cases).value
    for case, after in zip(cases, found, strict=True):
        assert not lab.wrong(after), f"{case}: {lab.wrong(after)}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("break_it", "points"),
    [
        ("acknowledged before the commit", ("stamped.inside", "commit.before")),
        ("not repeated at the start", ("pending.committed",)),
        ("not dropped at the start", ("pending.written",)),
        ("acknowledged after the next step", ("commit.after",)),
    ],
)
def test_without_the_rule_messages_are_lost_or_repeated(
    break_it: str, points: tuple[str, ...], forks: Forks, tmp_path: Path
) -> None:
    lab = Lab(forks, tmp_path)
    cases = [[site] for site in lab.at(*points)][:4]
    intact = forks.run("pending_runs:every_death", "spread", lab.made, cases).value
    assert not any(lab.wrong(after) for after in intact)
    broken = forks.run("pending_runs:every_death", "spread", lab.made, cases, break_it).value
    assert any(after["queues"] != lab.expected["queues"] for after in broken)


# --- power ------------------------------------------------------------------------------------------

CUTS = [("",), ("x",), ("y",), ("x", "y"), ("", "x", "y")]


@pytest.mark.parametrize("cut", slow_except([], CUTS), ids=lambda cut: "+".join(name or "home" for name in cut))
def test_taking_back_what_was_not_synced_changes_nothing(cut: tuple[str, ...], forks: Forks, tmp_path: Path) -> None:
    lab = Lab(forks, tmp_path)
    cut_and_judge(lab, first_middle_and_last(lab.at("pending.", "commit.after", "stamped.inside")), cut)


@pytest.mark.long
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: "+".join(name or "home" for name in cut))
def test_taking_back_at_every_hit(cut: tuple[str, ...], forks: Forks, tmp_path: Path) -> None:
    lab = Lab(forks, tmp_path)
    cut_and_judge(lab, lab.sites, cut)


def cut_and_judge(lab: Lab, sites: list[Site], cut: tuple[str, ...]) -> None:
    found = lab.forks.run("pending_runs:cut_power", lab.name, lab.made, sites, cut).value
    for site, after in zip(sites, found, strict=True):
        assert "diverged" not in after, f"{site}: {after}"
        assert not lab.wrong(after), f"{site}: {lab.wrong(after)}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("break_it", "cut"), [("no sync before the commit", ("x", "y")), ("no sync after the commit", ("",))]
)
def test_without_the_sync_a_power_cut_loses_or_repeats(
    break_it: str, cut: tuple[str, ...], forks: Forks, tmp_path: Path
) -> None:
    lab = Lab(forks, tmp_path)
    cases = lab.at("pending.committed", "pending.written", "commit.after")
    found = forks.run("pending_runs:cut_power", "spread", lab.made, cases, cut, break_it).value
    assert any("diverged" in after or lab.wrong(after) for after in found)


# --- stopped owners ----------------------------------------------------------------------------------


STOPS = [
    ("pending.settled", 1),
    ("pending.named", 1),
    ("take.after", 2),
    ("pending.written", 1),
    ("pending.written", 4),
    ("commit.before", 2),
    ("pending.committed", 2),
    ("stamped.before", 3),
]


@pytest.mark.parametrize(("point", "hit"), slow_except(STOPS[4:6], STOPS, names=2))
def test_a_stopped_owner_that_continues_has_nothing_acknowledged(
    point: str, hit: int, forks: Forks, tmp_path: Path
) -> None:
    lab = Lab(forks, tmp_path)
    pid = forks.start("pending_runs:stop", "spread", lab.made, point, hit)
    assert forks.wait(pid).stopped
    assert forks.run("pending_runs:take_over", "spread", lab.made).error == ""
    assert not lab.wrong(lab.examine(lab.made))
    forks.kill(pid, signal.SIGCONT)
    assert forks.wait(pid).value == "fenced: takeover"
    assert not lab.wrong(lab.examine(lab.made))


@pytest.mark.parametrize("break_it", ["", "one producer for all owners"])
def test_a_stopped_owner_continues_while_its_successor_has_something_pending(
    break_it: str, forks: Forks, tmp_path: Path
) -> None:
    """Were both one producer, each would drop or acknowledge what the other has pending."""
    lab = Lab(forks, tmp_path)
    old = forks.start("pending_runs:stop", "spread", lab.made, "take.after", 1, break_it)
    assert forks.wait(old).stopped
    new = forks.start("pending_runs:stop", "spread", lab.made, "pending.written", 1, break_it, True)
    assert forks.wait(new).stopped
    forks.kill(old, signal.SIGCONT)
    assert forks.wait(old).value == "fenced: takeover"
    forks.kill(new, signal.SIGCONT)
    assert forks.wait(new).value == "finished"
    assert bool(lab.wrong(lab.examine(lab.made))) is bool(break_it)


# --- what a user sees --------------------------------------------------------------------------------


def same(message: Message) -> Message:
    return message


def graph(tmp_path: Path, across: str = "pending", fn: Any = same, **options: Any) -> Graph:
    return Graph(
        "g",
        [Stream(fn, "in", "out", id="s", across=across, **options)],
        store=tmp_path / "home",
        queues={"out": QueueOptions(path=tmp_path / "other")},
    )


def feed(tmp_path: Path, messages: list[Message]) -> None:
    with cues.open(tmp_path / "home") as home:
        home.queue("in").appender().write_many(messages)


def committed(tmp_path: Path) -> list[Message]:
    with cues.open(tmp_path / "other") as other:
        return list(other.queue("out").tailer(isolation="committed"))


def test_a_running_graph_writes_messages_that_carry_hash_and_producer(tmp_path: Path) -> None:
    with graph(tmp_path).start() as running:
        for n in range(20):
            running.send("in", {"n": n})
        assert running.wait_idle(timeout=60)
        with cues.open(tmp_path / "other") as other:
            tailer = other.queue("out").tailer(isolation="committed")
            assert list(tailer) == [{"n": n} for n in range(20)]
            assert tailer.envelope is not None and tailer.envelope.producer and tailer.envelope.hash
            attempt = testing.messages(running.store, "g.s")[-1]
            assert attempt["q/type"] == "q.type.try/attempt" and attempt["q/hash"] == tailer.envelope.hash
            assert list(attempt["q.try/pending-index"]) == [f"{other.id.hex()}/out"]
    with cues.open(tmp_path / "home") as home:
        assert not [queue for queue in home.queues(all=True) if "fork" in queue]


def test_messages_larger_than_a_page(tmp_path: Path) -> None:
    large = [{"n": n, "body": bytes([n]) * (3000 * (n % 4))} for n in range(12)]
    feed(tmp_path, large)
    testing.run_until_idle(graph(tmp_path))
    assert committed(tmp_path) == large


@pytest.mark.parametrize("point", ["pending.written", "pending.committed"])
def test_a_stream_that_forwards_from_now_on_finishes_what_is_pending(tmp_path: Path, point: str) -> None:
    feed(tmp_path, [{"n": 1}])
    with pytest.raises(testing.Crashed), testing.crash(point, how="raise"):
        testing.run_until_idle(graph(tmp_path))
    feed(tmp_path, [{"n": 2}])
    for across in ("forwarded", "pending"):
        testing.run_until_idle(graph(tmp_path, across))
        assert committed(tmp_path) == [{"n": 1}, {"n": 2}]
    with cues.open(tmp_path / "other") as other:
        assert not [one for one, written in clocks.rows(other, "out") if written.begin]


def test_a_failed_step_drops_what_it_wrote_before_the_next_one(tmp_path: Path) -> None:
    """The commit at home fails in a process that lives on; the next step of it is exact."""
    feed(tmp_path, [{"n": 1}])
    for point in ("commit.inside", "commit.after", "pending.committed", "stamped.inside"):
        with pytest.raises(testing.Crashed), testing.crash(point, how="raise"):
            testing.run_until_idle(graph(tmp_path))
        feed(tmp_path, [{"n": 2}])
    testing.run_until_idle(graph(tmp_path))
    assert committed(tmp_path) == [{"n": 1}] + [{"n": 2}] * 4


@pytest.mark.parametrize("back", ["home", "other"])
def test_a_store_that_was_put_back_is_found_out(tmp_path: Path, back: str) -> None:
    feed(tmp_path, [{"n": 1}])
    testing.run_until_idle(graph(tmp_path))
    with graph(tmp_path, batch_size=1).start() as running:
        running.send("in", {"n": 2})
        assert running.wait_idle(timeout=60)
        shutil.copytree(
            tmp_path / back, tmp_path / "copy", ignore=shutil.ignore_patterns("bells", "lock.mdb", "wake", "open")
        )
        running.send("in", {"n": 3})
        assert running.wait_idle(timeout=60)
    shutil.rmtree(tmp_path / back)
    (tmp_path / "copy").rename(tmp_path / back)
    with pytest.raises(Diverged, match="not of the same moment"):
        testing.run_until_idle(graph(tmp_path))
    report = testing.run_until_idle(graph(tmp_path), accept_topology=True)
    assert [event.text for event in report.events if "given up" in event.text]
    testing.run_until_idle(graph(tmp_path))


def test_a_failed_step_in_partitions_that_came_since_the_start(tmp_path: Path) -> None:
    """The messages of a dropped step in a partition that the start did not know are dropped as well."""
    made = Graph(
        "g",
        [Stream(same, "in", "out", id="s", across="pending", batch_size=8)],
        store=tmp_path / "home",
        queues={"out": QueueOptions(path=tmp_path / "other", key="n")},
    )
    assembly = assemble(made)
    (stepper,) = assembly.steppers
    assembly.queues["in"].appender().write_many([{"n": n} for n in range(8)])
    assembly.queues["out"].grow(4)
    with pytest.raises(testing.Crashed), testing.crash("commit.before", how="raise"):
        stepper.step()
    assert stepper.step() == "committed"
    assembly.close()
    with cues.open(tmp_path / "other") as other:
        logs = [list(view.tailer(isolation="committed")) for view in views_of(other.queue("out"))]
    assert len(logs) == 4 and sorted(message["n"] for log in logs for message in log) == list(range(8))


def test_a_queue_that_gets_partitions_while_its_messages_are_pending(tmp_path: Path) -> None:
    feed(tmp_path, [{"n": n} for n in range(4)])
    with cues.open(tmp_path / "other") as other:
        out = other.queue("out", key="n")
        faults.arm("pending.committed", 1, lambda point: out.grow(4))
        try:
            testing.run_until_idle(graph(tmp_path))
        finally:
            faults.disarm()
        assert list(view_of(out, 0).tailer(isolation="committed")) == [{"n": n} for n in range(4)]


def test_a_seek_while_it_runs(tmp_path: Path) -> None:
    with graph(tmp_path).start() as running:
        for n in range(5):
            running.send("in", {"n": n})
        assert running.wait_idle(timeout=60)
        ownership.seek(running.store, "g.s", {"g.s.in": 3})
        assert running.wait_idle(timeout=60)
    assert committed(tmp_path) == [{"n": n} for n in (0, 1, 2, 3, 4, 2, 3, 4)]


def test_a_seek_while_a_step_has_something_pending(tmp_path: Path) -> None:
    """The step is dropped with its messages; the owner continues under the same producer."""
    feed(tmp_path, [{"n": n} for n in range(3)])
    with cues.open(tmp_path / "home") as home:
        faults.arm("pending.written", 1, lambda point: ownership.seek(home, "g.s", {"g.s.in": 2}))
        try:
            with graph(tmp_path).start() as running:
                assert running.wait_idle(timeout=60)
        finally:
            faults.disarm()
    assert committed(tmp_path) == [{"n": 1}, {"n": 2}]
    with cues.open(tmp_path / "other") as other:
        assert len(list(clocks.rows(other, "out"))) == 1 and len(list(other.queue("out").tailer())) == 5


def test_what_it_cannot_do_is_refused_by_name(tmp_path: Path) -> None:
    near = Graph("g", [Stream(same, "in", "out", id="s", across="pending")])
    with pytest.raises(GraphError, match="none of its queues is in another store"):
        near.plan()
    read = graph(tmp_path)
    read.add(Sink(lambda m: None, "out", id="save"))
    with pytest.raises(GraphError, match=r"g\.save reads 'out': processors see messages that are pending"):
        read.plan()
    with pytest.raises(GraphError, match="'forwarded' or 'pending'"):
        graph(tmp_path, "sideways")
    for declare in (lambda: Source("in", across="pending"), lambda: Sink(same, "in", across="pending")):
        with pytest.raises(GraphError, match="takes no option 'across'"):
            declare()


def test_pictures_say_which_edges_are_pending(tmp_path: Path) -> None:
    plan = graph(tmp_path).plan()
    assert f"in → out @{tmp_path / 'other'} (pending)" in draw.text(plan)
    assert "written twice" not in draw.text(plan) and "written twice" in draw.text(graph(tmp_path, "forwarded").plan())
    assert '"pending: out"' in draw.mermaid(plan)
    assert draw.describe(plan)[0]["across"] == "pending"


def test_the_runs_write_to_all_stores(forks: Forks, tmp_path: Path) -> None:
    assert set(GRAPHS) == {"spread", "picky", "once"} and set(OTHERS) == {"x", "y"}
    queues = Lab(forks, tmp_path).expected["queues"]
    assert len(queues["a"]) == len(queues["home"]) - 1 == COUNT - 1 and len(queues["b"]) == 5
