"""Programs that read or write transactions in a store, to be killed anywhere (test_committed.py)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import cues
from cues import faults
from cues.groups import TRY_COMMIT, Member
from cues.producers import spans
from cues.txn import Publisher


def let_time_pass(store: cues.Store) -> None:
    """Let every timeout of a pending transaction pass."""

    def expire(txn: Any) -> None:
        for name in store.queues():
            for producer, open in spans.opened(txn, name).items():
                if open.deadline_ns:
                    spans.put_open(txn, name, producer, open._replace(deadline_ns=1))

    store.core.commit(expire)


def graph(root: Path, store: cues.Store, sink_only: bool = False) -> cues.Graph:
    """Copies ``q`` to ``out``, and writes each call of a sink with its delivery hash into a file."""

    def copy(message: dict[str, Any]) -> dict[str, Any]:
        return {"n": message["n"]}

    def note(messages: list[dict[str, Any]], process: Any) -> None:
        with (root / "calls").open("a") as file:
            file.write(json.dumps([process.delivery_hash, [message["n"] for message in messages]]) + "\n")

    stream = cues.Stream(copy, "q", "out", isolation="committed", batch_size=3)
    sink = cues.Sink(note, "q", isolation="committed", batch=True, batch_size=4)
    return cues.Graph("g", [sink] if sink_only else [stream, sink], store=store)


def run_graph(path: str, point: str = "", hit: int = 1, sink_only: bool = False) -> list[tuple[str, int]]:
    """Run the graph to the end of the queue; die at a point. Return every point that it reached, with its hits."""
    root = Path(path)
    if point:
        faults.arm(point, hit)
    else:
        faults.count()
    with cues.open(root / "s", durability="process") as store, graph(root, store, sink_only).start() as running:
        running.wait_idle(timeout=100)
    return [(name, number) for name, count in faults.hits().items() for number in range(1, count + 1)]


def run_member(path: str, point: str = "", hit: int = 1) -> list[tuple[str, int]]:
    """The same as a session of a group."""
    if point:
        faults.arm(point, hit)
    else:
        faults.count()
    with cues.open(Path(path) / "s", durability="process") as store:
        store.queue("out")
        with Member(store, "q", "group", isolation="committed") as member:
            while True:
                with member.session() as session:
                    messages = session.read_many(3)
                    if not messages:
                        break
                    for message in messages:
                        session.write("out", {"n": message["n"]})
                    assert session.end(TRY_COMMIT).committed
    return [(name, number) for name, count in faults.hits().items() for number in range(1, count + 1)]


def run_transactions(path: str, point: str = "", hit: int = 1) -> list[tuple[str, int]]:
    """The same as transactions of the store."""
    if point:
        faults.arm(point, hit)
    else:
        faults.count()
    with cues.open(Path(path) / "s", durability="process") as store:
        store.queue("out")
        messages = [{"n": 0}]
        while messages:
            with store.transaction() as t:
                messages = t.tailer("q", "reader", isolation="committed").read_many(3)
                t.write_many("out", messages)
    return [(name, number) for name, count in faults.hits().items() for number in range(1, count + 1)]


def leave_pending(path: str, point: str = "", hit: int = 1) -> list[tuple[str, int]]:
    """A publisher of one transaction on two queues, which dies at a point."""
    with cues.open(Path(path) / "s", durability="process") as store:
        queues = [store.queue("q"), store.queue("r")]
        if point:
            faults.arm(point, hit)
        else:
            faults.count()
        with Publisher(transaction_timeout_s=3600) as publisher:
            for n in range(4):
                publisher.publish_uncommitted(lambda message: queues[message["n"] % 2], {"n": n}).wait()
            intents = publisher.build_ack_intents()
            publisher.append_ack_intents(intents)
    return [(name, number) for name, count in faults.hits().items() for number in range(1, count + 1)]


def read_all(path: str, point: str = "", hit: int = 1) -> dict[str, list[int]]:
    """Read both queues to their ends, long after, which rolls back what has expired."""
    with cues.open(Path(path) / "s", durability="process") as store:
        let_time_pass(store)
        if point:
            faults.arm(point, hit)
        return {name: [m["n"] for m in store.queue(name).tailer(isolation="committed")] for name in ("q", "r")}
