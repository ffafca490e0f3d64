"""A partition that a member holds: what is committed of it, and what was handed out.

    purged │ done with │ handed out, not committed │ to be read
           │           ╰ claim.next               ╰ next

Between the two marks lies what comes again when the member dies, aborts or is fenced.
"""

from __future__ import annotations

import time
from typing import Any

from cues.claims import Claim
from cues.groups.sticky import Partition
from cues.groups.table import Move
from cues.queue import Queue
from cues.tailer import Tailer


class Held:
    """One partition of a member. Used by the member's thread only."""

    def __init__(self, partition: Partition, queue: Queue, claim: Claim) -> None:
        """``queue`` is the handle on the one partition."""
        self.partition = partition
        self.log = queue.log
        self.claim = claim
        self.tailer = Tailer(queue)
        self.next = claim.next
        """Behind the last message that was handed out."""
        self.heir = True
        """Whether the plan leaves it where it is."""
        self.leaving_ns = 0
        """Since when it is on its way to another."""
        self.served = 0
        """The turn in which it was read last."""
        self.rewind()

    @property
    def dirty(self) -> bool:
        """Whether messages were handed out that are not committed."""
        return self.next != self.claim.next

    @property
    def readable(self) -> bool:
        return self.heir and not self.claim.paused

    def waiting(self, txn: Any) -> bool:
        """Whether there is something to be read."""
        return self.log.row(txn).next > self.tailer.index

    def read(self, n: int) -> list[dict[str, Any]]:
        """The next messages, at most ``n``."""
        found = self.tailer.read_many(n)
        if found:
            self.next = self.tailer.index
        return found

    def follow(self, claim: Claim, name: str) -> None:
        """Take over what the table says of it by now."""
        if claim.epoch != self.claim.epoch:  # a seek
            self.claim = claim
            self.rewind()
        self.claim = claim
        if self.heir and claim.heir != name:
            self.leaving_ns = time.monotonic_ns()
        self.heir = claim.heir == name

    def rewind(self) -> None:
        """Forget everything that was read ahead, and go back to what is committed."""
        self.tailer.to_index(self.claim.next)
        self.next = self.claim.next

    def move(self, checkpoint: bytes | None = None) -> Move:
        """What a commit of all that was handed out does."""
        return Move(self.log, self.claim, self.next, checkpoint)
