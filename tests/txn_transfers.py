"""A program that publishes transactions over two stores, decided by a checkpoint in a file; to be killed anywhere.

Message n of the input becomes {"n": n} in both stores. The checkpoint holds how many were taken, and the
intents of the last transaction.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import cues
from cues import faults
from cues.txn import AckIntent, Publisher, ReadCommitted

COUNT = 6
EACH = 2
"""Messages a transaction."""


def restore(path: Path) -> tuple[int, list[AckIntent]]:
    if not path.exists():
        return 0, []
    found = json.loads(path.read_text())
    return found["taken"], [AckIntent(journal, bytes.fromhex(intent)) for journal, intent in found["intents"]]


def commit(path: Path, taken: int, intents: list[AckIntent]) -> None:
    beside = path.with_suffix(".part")
    beside.write_text(json.dumps({"taken": taken, "intents": [[i.journal, i.intent.hex()] for i in intents]}))
    os.replace(beside, path)


def transfer(directory: str, acknowledges_first: bool = False, repeats_intents: bool = True) -> None:
    """Go on where the checkpoint says, to the end of the input. The controls break one rule each."""
    home = Path(directory)
    with cues.open(home / "a", durability="process") as a, cues.open(home / "b", durability="process") as b:
        queues = [a.queue("left"), b.queue("right")]
        taken, intents = restore(home / "checkpoint")
        with Publisher() as publisher:
            if repeats_intents:
                publisher.append_ack_intents(intents)
            while taken < COUNT:
                for n in range(taken, taken + EACH):
                    for queue in queues:
                        publisher.publish_uncommitted(lambda message, queue=queue: queue, {"n": n}).wait()
                taken += EACH
                intents = publisher.build_ack_intents()
                if acknowledges_first:
                    publisher.append_ack_intents(intents)
                    commit(home / "checkpoint", taken, intents)
                else:
                    commit(home / "checkpoint", taken, intents)
                    publisher.append_ack_intents(intents)


def transfer_and_count(directory: str, **rules: bool) -> list[tuple[str, int]]:
    """Every point that a run reaches, with its hits."""
    faults.count()
    transfer(directory, **rules)
    return [(point, hit) for point, hits in faults.hits().items() for hit in range(1, hits + 1)]


def transfer_and_die(directory: str, point: str, hit: int, rules: dict[str, bool] | None = None) -> None:
    faults.arm(point, hit)
    transfer(directory, **(rules or {}))


def finish(directory: str, rules: dict[str, bool] | None = None) -> dict[str, list[Any]]:
    """Run to the end, and say what readers of what is committed see in each store."""
    faults.disarm()
    transfer(directory, **(rules or {}))
    found: dict[str, list[Any]] = {}
    for store, queue in (("a", "left"), ("b", "right")):
        with cues.open(Path(directory) / store) as opened:
            for ring in (1, 8192):
                reader = ReadCommitted(opened.queue(queue), ring, message_type=None)
                found[f"{store} {ring}"] = [one.message["n"] for one in reader if not one.acknowledgement]
            assert opened.check() == []
    return found
