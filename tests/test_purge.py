"""``cues purge`` and purges that readers refuse: what goes, what stays, and who had not read it.

The last part is about a shared directory: one entry in the log, whatever happens around it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import terminal

import cues
from cues import Graph, QueueOptions, Sink, Stream, groups
from cues.errors import CuesError, InvalidArgument, QueueInUse

GRAPH = """
import cues
graph = cues.Graph("g", [cues.Sink(lambda m: None, "orders", id="save"), cues.Sink(lambda m: None, "orders", id="new")])
"""


def filled(path: Path, count: int = 10, **options: Any) -> Path:
    with cues.open(path, durability="process") as store:
        store.queue("orders", **options).appender().write_many([{"n": n} for n in range(1, count + 1)])
    return path


def left(path: Path, queue: str = "orders") -> list[int]:
    with cues.open(path, readonly=True) as store:
        return [message["n"] for message in store.queue(queue).tailer()]


def purged(*arguments: object) -> dict[str, Any]:
    result = terminal.cues("purge", *arguments)
    assert result.code == 0, result
    (line,) = result.out.splitlines()
    return json.loads(line)  # type: ignore[no-any-return]


def refused(code: int, *arguments: object) -> str:
    result = terminal.cues("purge", *arguments)
    assert result.code == code and "Try: " in result.err and result.out == "", result
    return result.err


# --- stores ---------------------------------------------------------------------------------------


def test_a_purge_names_each_reader_that_has_not_read(tmp_path: Path) -> None:
    """A processor, one that has not run, a named tailer, a group, and a processor of another store."""
    path = filled(tmp_path / "s")
    file = tmp_path / "graph.py"
    file.write_text(GRAPH)
    other = Graph("far", [Sink(lambda m: None, "orders", id="save")], queues={"orders": QueueOptions(path=path)})
    with other.start(store=tmp_path / "far") as running:
        assert running.wait_idle(timeout=30)
    with Graph("g", [Sink(lambda m: None, "orders", id="save")]).start(store=path) as running:
        assert running.wait_idle(timeout=30)
    with cues.open(path) as store:
        queue = store.queue("orders")
        reader = queue.tailer("reader")
        reader.read_many(3)
        with groups.Member(store, "orders", "team") as member:
            for _ in range(5):
                assert member.read(block=True, timeout=60)
            member.commit()
        assert queue.purge(4, unread="refuse") == 3
        with pytest.raises(
            QueueInUse, match=r"'orders' before 11 .* not read: reader is at 4, group team is at 6\."
        ) as e:
            queue.purge(11, unread="refuse")
        assert e.value.queue == "orders" and "purge before 4, or wait" in e.value.hint
        with pytest.raises(InvalidArgument, match="unread='no'"):
            queue.purge(4, unread="no")  # type: ignore[arg-type]
        assert left(path) == list(range(4, 11))
    error = refused(1, f"{path}#orders", "--before", "end", "--yes")
    assert "reader is at 4, group team is at 6" in error and "add --force" in error and "g.save" not in error
    error = refused(1, f"{file}#orders", "--store", path, "--before", "end", "--yes")
    assert "g.new is at 4" in error and "g.save" not in error
    assert left(path) == list(range(4, 11))
    looked = purged(f"{path}#orders", "--before", "9", "--dry-run")
    assert looked["messages"] == 5 and looked["unread"] == {"reader": 5, "group team": 3} and looked["dry_run"]
    assert left(path) == list(range(4, 11))
    asked = terminal.cues("purge", f"{path}#orders", "--before", "9", "--force")
    assert asked.code == 2 and "5 messages of orders, about" in asked.err and "no terminal to ask" in asked.err
    assert "reader is at 4: it has not read 5 messages of orders" in asked.err and left(path) == list(range(4, 11))
    gone = purged(f"{path}#orders", "--before", "9", "--force", "--yes")
    assert gone["messages"] == 5 and gone["first_index"] == 9 and gone["bytes"] > 0 and left(path) == [9, 10]
    with cues.open(path) as store:
        assert [m["n"] for m in store.queue("orders").tailer("reader")] == [9, 10]
    assert purged(f"{path}#orders", "--before", "9", "--yes")["messages"] == 0


def test_a_step_under_way_has_not_read_its_messages(tmp_path: Path) -> None:
    """The snapshot of a sink whose step has not committed: the next start takes the same messages again."""
    path = filled(tmp_path / "s")

    def fails(message: dict[str, Any]) -> None:
        raise ValueError

    running = Graph("g", [Sink(fails, "orders", id="p")]).start(store=path)
    with pytest.raises(CuesError):
        running.wait_done()
    running.close()
    assert "g.p is at 1 and has a step under way" in refused(1, f"{path}#orders", "--before", "3", "--yes")
    with cues.open(path) as store:
        (plan,) = store.queue("orders").plan_purge(3)
        assert (plan.count, plan.first, plan.index, [reader.under_way for reader in plan.behind]) == (2, 1, 3, [True])
    assert purged(f"{path}#orders", "--before", "3", "--force", "--yes")["unread"] == {"g.p": 2}
    assert left(path) == list(range(3, 11))


def test_a_purge_of_partitions(tmp_path: Path) -> None:
    """By a time all, in one transaction; by an index one. A reader of one partition keeps all of them."""
    path = filled(tmp_path / "s", partitions=3, key="n")
    assert "give a time" in refused(2, f"{path}#orders", "--before", "2", "--yes")
    with cues.open(path) as store:
        part = store.queue("orders").partition(1)
        count, whole = len(part), len(left(path))
        part.tailer("reader").read()
    before = purged(f"{path}#orders/0", "--before", "2", "--yes")
    assert before["messages"] == 1 and before["queue"] == "orders" and len(left(path)) == whole - 1
    assert "orders/1" in refused(1, f"{path}#orders", "--before", "0s", "--yes") and len(left(path)) == whole - 1
    gone = purged(f"{path}#orders", "--before", "0s", "--force", "--yes")
    assert gone["messages"] == whole - 1 and gone["unread"] == {"reader": count - 1} and left(path) == []


def test_a_purge_while_the_graph_runs(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    with Graph("g", [Stream(lambda m: m, "orders", "out", id="p")]).start(store=path) as running:
        assert running.wait_idle(timeout=30)
        assert purged(f"{path}#orders", "--before", "8", "--yes")["messages"] == 7
        running.send("orders", {"n": 11})
        assert running.wait_idle(timeout=30)
        assert [m["n"] for m in running.messages("out")] == list(range(1, 12))
    assert left(path) == [8, 9, 10, 11]


def test_wrong_command_lines(tmp_path: Path) -> None:
    path = filled(tmp_path / "s")
    assert "'ordres'" in refused(1, f"{path}#ordres", "--before", "2")
    assert "the queue ends before 11" in refused(1, f"{path}#orders", "--before", "12", "--yes")
    assert "is not a place" in refused(2, f"{path}#orders", "--before", "soon")
    with Graph("g", [Sink(lambda m: None, "orders", id="p")]).start(store=path) as running:
        assert running.wait_idle(timeout=30)
    assert "try log" in refused(1, f"{path}#g.p", "--before", "end", "--force", "--yes")
    assert left(path) == list(range(1, 11))
