"""LMDB's table of readers: the read transactions that all processes have under way in a store.

A page that a commit frees is used again when no read transaction is older than that commit. So one that never ends
makes the file grow with each commit, although the store keeps no more than before.

Not guaranteed: when a transaction began. The table has the number of the commit that it reads.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from cues.storage import locks

OLD_COMMITS: Final = 10_000
"""Commits after which a read transaction counts as old. A store makes so many in a second or two at the most, and a
read takes milliseconds; a commit frees some pages, so 120 MiB or more wait for the transaction then."""


class ReadSlot(NamedTuple):
    """A slot of the table, which a thread of a process has."""

    pid: int
    thread: int
    commit: int | None
    """The number of the commit that its transaction reads; None if it has none under way."""


class OldRead(NamedTuple):
    """The oldest read transaction of a store."""

    pid: int
    commits: int
    """The number of commits since the one that it reads."""

    @property
    def text(self) -> str:
        return (
            f"process {self.pid} ({locks.process_state(self.pid)}) has a read transaction that is {self.commits:,}"
            " commits old; pages that were freed since then cannot be used again, and the store grows"
        )

    @property
    def hint(self) -> str:
        state = locks.process_state(self.pid)
        if state == "stopped":
            return f"continue the process (kill -CONT {self.pid}), or end it (kill -9 {self.pid})."
        if state == "gone":
            return (
                "look for the process in other containers; after a death, the next opening for writing frees its place."
            )
        return f"wait for its end, if it is a backup or a check; else end the process (kill {self.pid})."


def read_slots(env: Any) -> list[ReadSlot]:
    """Return the slots in use. An environment without locks has none."""
    found = []
    for line in env.readers().splitlines():
        words = line.split()
        if len(words) == 3 and words[0].isdigit():
            found.append(ReadSlot(int(words[0]), int(words[1], 16), None if words[2] == "-" else int(words[2])))
    return found


def old_read(env: Any, least: int = OLD_COMMITS) -> OldRead | None:
    """Return the oldest read transaction, if there were at least so many commits since the one that it reads."""
    under_way = [(slot.commit, slot.pid) for slot in read_slots(env) if slot.commit is not None]
    if not under_way:
        return None
    commit, pid = min(under_way)
    commits = int(env.info()["last_txnid"]) - commit
    return OldRead(pid, commits) if commits >= least else None
