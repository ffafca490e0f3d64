"""A worker of the chain soak: a member that takes steps over all three stages until it is told that all is done.

    first ──▸ second ──▸ third ──▸ fourth      31 partitions each, every message keyed

``python groups_soak.py STORE SEED NAME`` with NAME empty for a member without one. SIGTERM makes it quit in the middle
of the step that it is in. CUES_TEST_BREAK takes the fence away (see :data:`BROKEN`).
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import cues
from cues.base import names
from cues.groups import TRY_ABORT, TRY_COMMIT, Member, Reason, Session, claims
from cues.groups.sticky import Partition
from cues.groups.table import GroupTable, Move

STAGES = ("first", "second", "third", "fourth")
QUEUES = STAGES[:3]
PARTITIONS = 31
GROUP = "chain"
LEASE_S = 0.8
STEP_MAX = 20
"""Messages that a step takes at most."""
PAUSE_S = float(os.environ.get("CUES_TEST_PAUSE_S", 0.02))
"""In the middle of a step, at most: where kills and stops are to come."""


def done(path: Path) -> Path:
    return Path(f"{path}.done")


def pause() -> None:
    """In the middle of a step."""
    time.sleep(random.random() * PAUSE_S)


class Quit(Exception):
    """Raised in the middle of a step, once SIGTERM has come."""


quitting = False


def quit(*_: object) -> None:
    global quitting
    quitting = True


def work(path: Path, seed: int, name: str) -> None:
    chance = random.Random(seed)
    with cues.open(path) as store:
        # Some take part in a part of the chain only: loads are even as far as subscriptions allow.
        queues = QUEUES if chance.random() < 0.7 else chance.sample(QUEUES, 2)
        # A clean quit in the middle of a step: the session and the member are closed on the way out.
        with Member(store, queues, GROUP, name=name or None, lease_s=LEASE_S) as member:
            while not (done(path).exists() or quitting):
                step(member, chance)
                if chance.random() < 0.02:
                    member.subscribe(QUEUES if chance.random() < 0.7 else chance.sample(QUEUES, 2))


def step(member: Member, chance: random.Random) -> None:
    with member.session(partitions="all" if chance.random() < 0.3 else "one") as session:
        polled = session.poll(timeout=0.2, n=chance.randint(1, STEP_MAX))
        if not polled:
            return
        rest = []
        for (queue, _), messages in polled.items():
            onward = STAGES[STAGES.index(queue) + 1]
            half = chance.randrange(len(messages) + 1)
            for message in messages[:half]:
                session.write(onward, message)
            rest.append((onward, messages[half:]))
        pause()
        if quitting:
            raise Quit
        for onward, messages in rest:
            session.write_many(onward, messages)
        session.end(TRY_ABORT if chance.random() < 0.03 else TRY_COMMIT)


def zombie(path: Path, how: str) -> None:
    """One step, held open until the test continues it; its outcome is printed.

    It is held in the middle, or where the fence was taken out of the transaction right before that.
    """
    global pause

    def pause() -> None:
        print("in step", flush=True)
        sys.stdin.readline()

    break_fence(how)
    with (
        cues.open(path) as store,
        Member(store, "first", GROUP, lease_s=LEASE_S) as member,
        member.session() as session,
    ):
        for message in session.read_many(STEP_MAX, timeout=10):
            session.write("second", message)
        if how != "compared before":
            pause()
        print(*session.end(TRY_COMMIT), flush=True)


# --- negative controls ----------------------------------------------------------------------------

_commit = Session._commit


def _unfenced(self: GroupTable, txn: Any, partition: Partition, move: Move) -> Any:
    """Whoever comes may commit: the row is not compared."""
    log = names.log_id(*partition)
    found = claims.read(txn, log, self.group)
    assert found is not None
    claim = found._replace(next=move.next)
    claims.put(txn, log, self.group, claim)
    return claim


def _look_before(self: Any, checkpoint: bytes | None) -> Any:
    """Owner and epoch are compared, but before the commit, outside its transaction."""
    for held in self.parts:
        with self._member.store.core.view() as txn:
            found = claims.read(txn, names.log_id(*held.partition), GROUP)
        if found is None or (found.owner, found.epoch) != (held.claim.owner, held.claim.epoch):
            return Reason.MOVED
        pause()
    return _commit(self, checkpoint)


def break_fence(how: str) -> None:
    """Take the fence of this process away; the empty string leaves it."""
    if how:
        GroupTable.moved = _unfenced  # type: ignore[method-assign]
    if how == "compared before":
        Session._commit = _look_before  # type: ignore[method-assign]


BROKEN = ("unfenced", "compared before")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, quit)
    break_fence(os.environ.get("CUES_TEST_BREAK", ""))
    try:
        work(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
    except Quit:
        sys.exit(0)
