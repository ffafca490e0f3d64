"""Redriving: a failed message goes once more through the processor that failed, exactly once."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from forks import Forks
from redrives import NAMES, copy
from sets import slow_except, thinned

import cues
from cues import testing
from cues.cli.app import run as cli
from cues.errors import InvalidArgument
from cues.graphs import graphfile
from cues.steps import redrive

FAST = ("state", "alts")


def template(forks: Forks, name: str, where: Path) -> str:
    folder = where / "template"
    folder.mkdir()
    forks.run("redrives:prepare", name, str(folder / "home"))
    return str(folder / "home")


@pytest.mark.parametrize("name", slow_except(FAST, NAMES))
def test_death_at_every_point_of_a_redrive_changes_nothing(
    name: str, stride: int, forks: Forks, tmp_path: Path
) -> None:
    """Die at every crash point of a redrive; redrive again, and compare with an undisturbed redrive."""
    made = template(forks, name, tmp_path)
    counted = copy(made, "counted")
    sites = forks.run("redrives:sites", name, counted).value
    undisturbed = copy(made, "undisturbed")
    before = forks.run("redrives:examine", name, undisturbed).value
    result = forks.run("redrives:redrive", name, undisturbed).value
    forks.run("redrives:finish", name, undisturbed)
    expected = forks.run("redrives:examine", name, undisturbed).value
    failed = len(before["errors"])
    assert failed and not before["check"] and not expected["check"]
    assert result["resolved"] + result["failed_again"] == failed and not result["refused"] and not result["waiting"]
    assert {"redrive.asking", "redrive.asked", "redrive.claimed", "redrive.inside"} <= {point for point, _ in sites}
    sites = thinned(sites, stride)
    for site, found in zip(sites, forks.run("redrives:crash_and_finish", name, made, sites).value, strict=True):
        assert found["died"] == signal.SIGKILL, f"{name}: {site} was not reached"
        for part in ("check", "problems"):
            assert not found[part], f"{name}: {site}: {found[part]}"
        for part in ("queues", "state", "errors", "unresolved"):
            assert judged(name, found[part]) == judged(name, expected[part]), f"{name}: {site}: {part}"
        # A call may be repeated, under the same hash. (The queues of redriven messages have other identities here.)
        assert calls(found) == calls(expected), f"{name}: {site}: {found['told']}"


def judged(name: str, part: Any) -> Any:
    """A part of the results, to compare. After alts the order between the inputs is free, and so are new indices."""
    if name != "alts":
        return part
    if isinstance(part, dict):
        return {key: sorted(map(str, value)) if isinstance(value, list) else value for key, value in part.items()}
    return sorted(str(error[2:6]) for error in part) if isinstance(part, list) else part


def calls(found: dict[str, Any]) -> Counter[tuple[str, int]]:
    """The number of delivery hashes, by processor and message."""
    return Counter((who, what) for who, what, _ in {tuple(call) for call in found["told"]})


@pytest.fixture
def shop(tmp_path: Path) -> Path:
    """A graph file whose function fails for odd numbers unless the file ``fixed`` is there."""
    path = tmp_path / "shop.py"
    path.write_text(
        """
import pathlib
import cues

graph = cues.Graph("shop", errors="errors", store=str(pathlib.Path(__file__).parent / "store"))
graph.source("orders")

@graph.stream("orders", "priced")
def price(order):
    if order["n"] % 2 and not (pathlib.Path(__file__).parent / "fixed").exists():
        raise ValueError(f"order {order['n']} of 'shop {order['n']}' is odd")
    return {"n": order["n"]}
"""
    )
    with cues.open(tmp_path / "store", durability="process") as store:
        store.queue("orders").appender().write_many([{"n": n} for n in range(1, 6)])
    assert cli(["run", str(path), "--idle-exit", "0", "--quiet", "--json"]) == 0
    return path


def test_the_commands_list_redrive_and_discard(shop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Errors are counted until they are resolved, by a redrive or by a reason that is kept."""

    def run(*arguments: str) -> tuple[int, list[dict[str, Any]], str]:
        capsys.readouterr()
        code = cli([*arguments, "--json"])
        out, err = capsys.readouterr()
        return code, [json.loads(line) for line in out.splitlines()], err

    _, listed, _ = run("errors", str(shop))
    assert [(row["index"], row["state"], row["inputs"]) for row in listed] == [
        (3, "unresolved", {"orders": [{"n": 5}]}),
        (2, "unresolved", {"orders": [{"n": 3}]}),
        (1, "unresolved", {"orders": [{"n": 1}]}),
    ]
    _, groups, _ = run("errors", str(shop), "--group")
    assert [(row["count"], row["cause"]) for row in groups] == [(3, "ValueError: order N of '…' is odd")]
    code, _, err = run("redrive", str(shop), "--index", "1")
    assert code == 2 and "Try: add --yes" in err
    code, (result,), _ = run("redrive", str(shop), "--index", "1", "--yes")
    assert code == 1 and result["failed_again"] == [{"queue": "errors", "index": 1}]
    (shop.parent / "fixed").touch()
    code, (result,), _ = run("redrive", str(shop), "--where", "input.n == 3", "--yes")
    assert code == 0 and result["resolved"] == [{"queue": "errors", "index": 2}]
    code, _, err = run("redrive", str(shop), "--index", "2", "--yes")
    assert code == 1 and "it is resolved already" in err
    code, (result,), _ = run("discard", str(shop.parent / "store"), "--index", "3", "--reason", "a test", "--yes")
    assert code == 0 and result["discarded"] == [{"queue": "errors", "index": 3}]
    _, (again,), _ = run("errors", str(shop))
    assert (again["index"], again["redriven"]) == (4, [{"queue": "errors", "index": 1}])
    _, (row,), _ = run("errors", str(shop), "--index", "3")
    assert row["resolution"]["reason"] == "a test" and row["resolution"]["by"]
    _, status, _ = run("status", str(shop))
    assert [row["errors"] for row in status if row.get("processor") == "shop.price"] == [1]
    assert cli(["run", str(shop), "--idle-exit", "0", "--quiet", "--fail-on-errors", "--json"]) == 1
    assert run("redrive", str(shop), "--all", "--yes")[0] == 0
    assert run("run", str(shop), "--idle-exit", "0", "--quiet", "--fail-on-errors")[0] == 0
    with cues.open(shop.parent / "store") as store:
        assert sorted(message["n"] for message in store.queue("priced").tailer()) == [1, 2, 3, 4]
        assert not store.check()


def test_a_program_discards_for_a_reason_that_is_kept(shop: Path) -> None:
    """Of the three errors one fits. The error queue keeps it, and nothing else is settled."""
    store = shop.parent / "store"
    for wrong in ({"reason": " ", "all": True}, {"reason": "known"}):
        with pytest.raises(InvalidArgument):
            cues.discard(store, **wrong)  # type: ignore[arg-type]
    (found,) = cues.discard(store, reason="a test order", where=lambda error: error["input"]["n"] == 3)
    assert (found.index, found.inputs) == (2, {"orders": [{"n": 3}]})
    assert cues.discard(store, reason="again", index=[2]) == []
    assert [error.index for error in cues.list_errors(store)] == [1, 3]
    states = {error.index: error.state for error in cues.list_errors(store, settled=True)}
    assert states == {1: "unresolved", 2: "discarded", 3: "unresolved"}


def test_a_request_is_made_once_and_waits_for_the_next_start(shop: Path) -> None:
    """Two callers that ask for the same error at the same time ask once; a store alone cannot run the function."""
    (shop.parent / "fixed").touch()
    with cues.open(shop.parent / "store") as store:
        records = cues.list_errors(store)
        assert len(redrive.ask(store, records).records) == 3
        again = redrive.ask(store, records)
        assert not again.records and len(again.already) == 3
        assert not redrive.discard(store, records, "too late").records
        graph = graphfile.load(str(shop)).graph
        testing.run_until_idle(graph, store)
        assert sorted(message["n"] for message in store.queue("priced").tailer()) == [1, 2, 3, 4, 5]
        assert not cues.list_errors(store)


def test_a_running_graph_redrives_also_after_retention_removed_the_error(shop: Path) -> None:
    """The request has a copy of the input."""
    (shop.parent / "fixed").touch()
    with cues.open(shop.parent / "store") as store:
        records = cues.list_errors(store)
        redrive.ask(store, records)
        store.queue("errors").purge(before=4)
        graph = graphfile.load(str(shop)).graph
        with graph.start(store=store) as running:
            assert running.wait_idle(timeout=60)
        assert sorted(message["n"] for message in store.queue("priced").tailer()) == [1, 2, 3, 4, 5]
        with pytest.raises(InvalidArgument, match="no error message 1"):
            cues.redrive(graph, store=store, index=[1])
        assert not store.check()


def test_an_input_that_the_processor_has_no_more_is_refused(shop: Path) -> None:
    """The error stays unresolved, with the reason; an at-most-once processor is refused before."""
    with cues.open(shop.parent / "store") as store:
        graph = cues.Graph("shop", errors="errors")
        graph.source("orders")
        graph.stream("orders", "priced", id="price", strategy="at-most-once")(lambda order: order)
        result = cues.redrive(graph, store=store, all=True)
        assert [why for _, _, why in result.refused] == [
            "shop.price is at-most-once, so no message is given to it a second time"
        ] * 3
        redrive.ask(store, cues.list_errors(store))
        testing.run_until_idle(graph, store)
        assert [record.state for record in cues.list_errors(store)] == ["refused"] * 3


def test_a_renamed_processor_takes_the_failed_messages_of_its_former_name(tmp_path: Path) -> None:
    def graph(broken: bool, **options: str) -> cues.Graph:
        graph = cues.Graph("g", errors="errors", store=tmp_path / "store", durability="process")
        graph.source("in")

        def count(message: dict[str, Any], process: Any) -> dict[str, Any]:
            process.state["count"] = process.state.get("count", 0) + 1
            if broken and message["n"] % 2:
                raise ValueError("odd")
            return {**message, "count": process.state["count"]}

        graph.stream("in", "out", **options)(count)
        return graph

    with cues.open(tmp_path / "store", durability="process") as opened:
        opened.queue("in").appender().write_many([{"n": n} for n in range(4)])
    testing.run_until_idle(graph(True, id="count"))
    renamed = graph(False, id="tally", renamed_from="count")
    assert [record.processor for record in cues.list_errors(renamed)] == ["g.count"] * 2
    testing.run_until_idle(renamed)
    assert [record.processor for record in cues.list_errors(renamed)] == ["g.tally"] * 2
    assert len(cues.redrive(renamed, all=True).resolved) == 2
    assert not cues.list_errors(renamed)
    with cues.open(tmp_path / "store") as store:
        out = [(message["n"], message["count"]) for message in store.queue("out").tailer()]
        assert out == [(0, 1), (2, 2), (1, 3), (3, 4)] and not list(store.check())
