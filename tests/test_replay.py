"""cues replay: the streams of a graph again over the messages of an old store, into a fresh one, and the comparison."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sets import slow_except
from small import feed, numbers

import cues
from cues import Graph, QueueOptions, Sink, Source, Store, Stream, faults
from cues.cli.app import run as cli
from cues.errors import Diverged, GraphError, MessagesPurged, StoreError
from cues.testing import messages, run_until_idle
from cues.txn import Publisher


def double(message: Any) -> dict[str, Any]:
    if message["n"] % 7 == 3:
        raise ValueError(f"no {message['n']}")
    return {"n": message["n"] * 2, "k": message["n"] % 3}


def double_wrongly(message: Any) -> dict[str, Any]:
    if message["n"] % 7 == 3:
        raise ValueError(f"no {message['n']}")
    return {"n": message["n"] * (3 if message["n"] % 5 == 0 else 2), "k": message["n"] % 3}


def total(message: Any, process: Any) -> dict[str, Any]:
    process.state["sum"] = process.state.get("sum", 0) + message["n"]
    return {"k": message["k"], "sum": process.state["sum"]}


def both(left: Any, right: Any) -> dict[str, Any]:
    return {"left": left["n"], "right": right["n"]}


def orders(position: Any) -> Any:
    for n in range((position or 0) + 1, 41):
        yield n, {"n": n}


def graph(fn: Any = double, **options: Any) -> Graph:
    def same(message: Any) -> Any:
        return message

    return Graph(
        "g",
        [
            Source("orders", orders, batch_size=7),
            Stream(fn, "orders", "doubled", id="double"),
            Stream(total, "doubled", "sums", id="total", key="k"),
            Stream(same, "doubled", "spread", id="spread"),
            Stream(both, {"left": "orders", "right": "doubled"}, "joined", id="both"),
            Stream(same, "spread", "fanned", id="fan"),
            Sink(lambda message: None, "sums", id="save"),
        ],
        errors="errors",
        queues={"spread": QueueOptions(partitions=3, key="k"), **options},
    )


@pytest.fixture
def old(tmp_path: Path) -> Path:
    path = tmp_path / "old"
    with cues.open(path, durability="process") as store:
        run_until_idle(graph(), store)
    return path


def by_queue(report: Any) -> dict[str, Any]:
    return {diff.queue: diff for diff in report.queues}


def checked(path: Path) -> None:
    with Store(path) as store:
        assert store.check() == []


def test_unchanged_code_gives_equal_queues(old: Path, tmp_path: Path) -> None:
    """State by key, partitions, a join and errors: every message is equal, and every queue has some."""
    report = cues.replay(graph(), into=tmp_path / "new", store=old)
    assert report.equal and report.whole
    with Store(old, readonly=True) as store:
        counts = {queue: len(store.queue(queue)) for queue in store.queues() if queue != "orders"}
    assert {diff.queue: diff.equal for diff in report.queues} == counts
    assert all(counts.values()) and counts["errors"] > 1
    assert by_queue(report)["doubled"].basis == "order"
    assert by_queue(report)["fanned"].basis == "multiset"
    assert report.copied == {"orders": 40}
    checked(tmp_path / "new")


def test_copied_records_are_the_same_bytes(old: Path, tmp_path: Path) -> None:
    cues.replay(graph(), into=tmp_path / "new", store=old)
    raws = []
    for path in (old, tmp_path / "new"):
        with Store(path, readonly=True) as store:
            log = store.queue("orders").core.log
            with store.core.view() as txn:
                row = log.row(txn)
                raws.append((row.identity, row.first, row.next, row.time_ns, log.read(txn, row, 1, 1000)))
    assert raws[0] == raws[1]


@pytest.mark.parametrize("kept", [frozenset(), frozenset({"t"})])
def test_changed_code_shows_exactly_the_changed_messages(tmp_path: Path, kept: Any) -> None:
    options = {"orders": QueueOptions(metadata=kept)}
    with cues.open(tmp_path / "old", durability="process") as store:
        run_until_idle(graph(double_wrongly, **options), store)
        was = messages(store, "doubled")
    report = cues.replay(graph(**options), into=tmp_path / "new", store=tmp_path / "old", diff_limit=100)
    naive = [double({"n": n}) for n in range(1, 41) if n % 7 != 3]
    expected = [(i, a["n"], b["n"]) for i, (a, b) in enumerate(zip(was, naive), 1) if a["n"] != b["n"]]
    assert expected
    diff = by_queue(report)["doubled"]
    assert diff.basis == ("provenance" if kept else "order")
    shown = [(e.old_index, e.fields["n"][0][0], e.fields["n"][1][0]) for e in diff.examples]
    assert shown == expected and diff.different == len(expected)
    assert diff.equal == len(naive) - len(expected) and not diff.only_old and not diff.only_new
    assert by_queue(report)["errors"].same and not by_queue(report)["sums"].same
    assert not report.equal


def test_a_filter_that_was_added_shows_messages_of_the_old_store_only(old: Path, tmp_path: Path) -> None:
    def fewer(message: Any) -> Any:
        result = double(message)
        return None if message["n"] % 4 == 0 else result

    report = cues.replay(graph(fewer), into=tmp_path / "new", store=old, processors=["double"])
    diff = by_queue(report)["doubled"]
    gone = [n for n in range(1, 41) if n % 4 == 0 and n % 7 != 3]
    assert (diff.different, diff.only_old, diff.only_new) == (0, len(gone), 0)
    assert [e.fields["n"][0][0] for e in diff.examples] == [2 * n for n in gone][:10]


def test_messages_that_the_old_store_has_not_processed_are_no_difference(old: Path, tmp_path: Path) -> None:
    with Store(old) as store:
        feed(store, orders=[41, 42])
    report = cues.replay(graph(), into=tmp_path / "new", store=old)
    assert report.equal
    assert by_queue(report)["doubled"].beyond == 2


def test_messages_that_the_old_store_wrote_since_are_no_difference(old: Path, tmp_path: Path) -> None:
    cues.replay(graph(), into=tmp_path / "new", store=old)
    with Store(old) as store:
        feed(store, orders=[41, 42])
        run_until_idle(graph(), store)
    report = cues.replay(graph(), into=tmp_path / "new", store=old)
    assert report.equal and by_queue(report)["doubled"].since == 2


def test_a_source_continues_after_the_copied_messages(old: Path, tmp_path: Path) -> None:
    """The position of the source is taken along, so the graph goes on without a repetition."""
    cues.replay(graph(), into=tmp_path / "new", store=old)
    with Store(tmp_path / "new") as store:
        run_until_idle(graph(), store)
        assert numbers(store, "orders") == list(range(1, 41))
        assert len(messages(store, "sums")) == len(messages(store, "doubled"))
        assert store.check() == []


def test_retention_waits_until_the_replay_is_done(tmp_path: Path) -> None:
    bounds = {"orders": QueueOptions(retention="1s", max_lag=1), "doubled": QueueOptions(retention=1)}
    with cues.open(tmp_path / "old", durability="process") as store:
        run_until_idle(graph(), store)
        store.queue("sums", retention=1000)
    report = cues.replay(graph(**bounds), into=tmp_path / "new", store=tmp_path / "old")
    assert report.equal and by_queue(report)["doubled"].equal > 1


def test_a_partial_replay_is_refused_by_a_start(old: Path, tmp_path: Path) -> None:
    report = cues.replay(graph(), into=tmp_path / "new", store=old, until=21)
    assert not report.whole and report.copied == {"orders": 14}  # whole records of seven
    assert not by_queue(report)["doubled"].different and by_queue(report)["doubled"].only_new == 0
    with pytest.raises(Diverged, match="of a part"), graph().start(store=tmp_path / "new"):
        pass


def test_refusals(old: Path, tmp_path: Path) -> None:
    """Each is refused by name, and nothing is made."""
    new = tmp_path / "new"
    with pytest.raises(GraphError, match="is in another store"):
        cues.replay(graph(doubled=QueueOptions(path=str(tmp_path / "x"))), into=new, store=old)
    with pytest.raises(GraphError, match="is a source"):
        cues.replay(graph(), into=new, store=old, processors=["orders"])
    with Store(old) as store:
        store.queue("orders").purge(before=5, unread="drop")
    with pytest.raises(MessagesPurged, match="first 4 messages"):
        cues.replay(graph(), into=new, store=old)
    assert not new.exists()
    with cues.open(tmp_path / "used", durability="process") as store:
        feed(store, other=[1])
    with pytest.raises(StoreError, match="not empty"):
        cues.replay(graph(), into=tmp_path / "used", store=old, from_first=True)
    report = cues.replay(graph(), into=new, store=old, from_first=True)
    assert report.copied == {"orders": 36}
    with pytest.raises(StoreError, match="another replay"):
        cues.replay(graph(), into=new, store=old, from_first=True, processors=["double"])
    checked(new)


FAULTS = [*(f"{point}:1" for point in faults.REPLAY_POINTS), "replay.copied:4", "commit.inside:1", "commit.after:3"]


@pytest.mark.parametrize("fault", slow_except(["replay.copied:4", "commit.inside:1"], FAULTS))
def test_a_replay_that_died_continues(old: Path, tmp_path: Path, fault: str) -> None:
    """kill -9 at each point: an unfinished replay is not started by the graph, and the same call finishes it."""
    new = tmp_path / "new"
    script = tmp_path / "die.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import cues, test_replay\nfrom cues.tools import replay\nreplay.COPY_BYTES_MAX = 1\n"
        f"cues.replay(test_replay.graph(), into={str(new)!r}, store={str(old)!r})\n"
    )
    environment = {**os.environ, "CUES_FAULT": fault}
    died = subprocess.run([sys.executable, script], env=environment, capture_output=True, timeout=300, check=False)
    assert died.returncode == -9, died.stderr.decode()
    if fault != "replay.done:1":
        with pytest.raises(Diverged, match="not done"), graph().start(store=new):
            pass
    report = cues.replay(graph(), into=new, store=old)
    assert report.equal and len(report.queues) == 6
    assert by_queue(report)["sums"].equal == by_queue(report)["doubled"].equal == 34
    checked(new)


FILE = """
import cues

graph = cues.Graph("shop", errors="errors", store="data/shop")

@graph.source("orders")
def orders(position):
    for n in range((position or 0) + 1, {most} + 1):
        yield n, {{"n": n}}

@graph.stream("orders", "priced")
def price(order):
    return {{"n": order["n"], "price": order["n"] * {factor}}}

@graph.stream("priced", "totals")
def total(priced, process):
    process.state["sum"] = process.state.get("sum", 0) + priced["price"]
    return {{"sum": process.state["sum"]}}
"""


@pytest.mark.slow
def test_a_wrong_deploy_is_rolled_back_by_a_replay(tmp_path: Path, monkeypatch: Any) -> None:
    """A right function, a wrong one for a while, the right one again: the replay has what was never wrong."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUES_STORE", raising=False)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # files of one size, written within a second
    file = tmp_path / "graph.py"

    def deploy(most: int, factor: int) -> None:
        file.write_text(FILE.format(most=most, factor=factor))

    def command(*words: str) -> int:
        """A process of its own: the module of a graph file is loaded once in a process."""
        words = (sys.executable, "-m", "cues", *words)
        done = subprocess.run(words, stdout=subprocess.PIPE, timeout=300, check=False)
        out.append(done.stdout.decode())
        return done.returncode

    out: list[str] = []
    deploy(500, 10)
    assert command("run", "graph.py", "--quiet") == 0
    deploy(900, 11)  # the wrong deploy
    assert command("run", "graph.py", "--quiet") == 0
    deploy(900, 10)
    assert command("replay", "graph.py", "--into", "data/again", "--json", "--diff-limit", "2") == 1
    rows = {row["queue"]: row for row in map(json.loads, out[-1].splitlines())}
    assert (rows["priced"]["equal"], rows["priced"]["different"]) == (500, 400)
    assert rows["priced"]["examples"][0]["fields"] == {"price": [[501 * 11], [501 * 10]]}
    assert (rows["totals"]["equal"], rows["totals"]["different"]) == (500, 400)
    deploy(1000, 10)
    assert command("run", "graph.py", "--store", "data/again", "--quiet") == 0
    with Store("data/again") as store:
        assert numbers(store, "orders") == list(range(1, 1001))
        assert [m["price"] for m in messages(store, "priced")] == [10 * n for n in range(1, 1001)]
        assert [m["sum"] for m in messages(store, "totals")] == [5 * n * (n + 1) for n in range(1, 1001)]
        assert store.check() == []


def test_the_command_shows_a_table_and_its_exit_code(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUES_STORE", raising=False)
    file = tmp_path / "graph.py"
    file.write_text(FILE.format(most=5, factor=10))
    assert cli(["replay", "graph.py", "--into", "data/again"]) == 1  # no store yet
    assert cli(["run", "graph.py", "--quiet"]) == 0
    assert cli(["replay", "graph.py", "--into", "data/again", "--table"]) == 0
    (tmp_path / "changed.py").write_text(FILE.format(most=5, factor=9))
    capsys.readouterr()
    assert cli(["replay", "changed.py", "--into", "data/other", "--table", "--diff-limit", "1"]) == 1
    shown = capsys.readouterr()
    assert "priced different: old 1, new 1\n  price: 10 -> 9\n" in shown.out
    assert "cues run changed.py --store data/other" in shown.err


def test_transactions_of_publishers_are_copied_with_their_rows(tmp_path: Path) -> None:
    """A reader of committed messages sees those of committed transactions only, in both stores."""

    def graph() -> Graph:
        return Graph("g", [Stream(lambda m: {"n": m["n"]}, "a", "out", id="copy", isolation="committed")])

    with cues.open(tmp_path / "old", durability="process") as store, Publisher() as one, Publisher() as other:
        queue = store.queue("a")
        for n in range(5):
            one.publish_uncommitted(lambda message: queue, {"n": n})
            # Later than the run it would be a message that the old store has not processed.
            other.publish_uncommitted(lambda message: queue, {"n": 100 + n}).wait()
        one.append_ack_intents(one.build_ack_intents())
        run_until_idle(graph(), store)
        assert sorted(numbers(store, "out")) == [0, 1, 2, 3, 4]
    report = cues.replay(graph(), into=tmp_path / "new", store=tmp_path / "old")
    assert report.equal and by_queue(report)["out"].equal == 5
    checked(tmp_path / "new")
    more = Graph("g", [Stream(lambda m: [{"n": m["n"]}] * 2, "a", "out", id="copy", isolation="committed")])
    report = cues.replay(more, into=tmp_path / "more", store=tmp_path / "old")
    assert (by_queue(report)["out"].only_new, by_queue(report)["out"].beyond) == (5, 0)
    with pytest.raises(StoreError, match="cannot be cut"):
        cues.replay(graph(), into=tmp_path / "part", store=tmp_path / "old", until=3)


def test_a_renamed_source_is_refused(tmp_path: Path) -> None:
    """Its position is not taken along: on the store of the replay it would begin anew."""

    def graph(source: str, **options: Any) -> Graph:
        same = Stream(lambda message: message, source, "doubled", id=f"of_{source}")
        return Graph("g", [Source(source, orders, **options), same], store=tmp_path / "old")

    run_until_idle(graph("orders"))
    renamed = graph("bought", renamed_from="orders")
    with renamed.start() as running:
        running.store.queue("bought").appender().write({"n": 0})  # the source itself has nothing new
        running.wait_idle(timeout=60)
    for _ in range(2):
        with pytest.raises(StoreError, match=r"source g\.bought was renamed"):
            cues.replay(renamed, into=tmp_path / "new", from_first=True)
        renamed = graph("bought")  # the option may be removed after the rename
    assert not (tmp_path / "new").exists()
