"""A partition that a member holds, with its two positions.

    purged │ committed │ handed out, not committed │ not read yet
                       ╰ claim.next                ╰ next

The messages between the two positions are read again after the member dies, aborts or is fenced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from cues.base import clock
from cues.groups.claims import Claim
from cues.groups.sticky import Partition
from cues.groups.table import Move
from cues.queues.queue import Queue
from cues.queues.tailer import Envelope, Tailer
from cues.storage.transaction import StoreTransaction


class HeldPartition:
    """One partition of a member. Used by the member's thread only."""

    def __init__(self, partition: Partition, queue: Queue, claim: Claim) -> None:
        """``queue`` is the handle on this partition alone."""
        self.partition = partition
        self.queue = queue
        self.log = queue.core.log
        self.claim = claim
        self.next = claim.next
        """The index after the last message that was handed out."""
        self.assignee = True
        """True if the plan assigns it to this member."""
        self.leaving_ns = 0
        """The time at which the plan assigned it to another member."""
        self.assigned = False
        """True after ``on_assigned`` has returned."""
        self.revoked = False
        """True after ``on_revoked`` has returned. It is released next, even if a new plan assigns it to this member."""
        self.served = 0
        """The number of the turn in which it was read last."""
        self.runs: list[tuple[int, int]] = []
        """The indices of the messages of the last read: in each run all from the first to before the second."""
        self.on_pending: Callable[[str], None] | None = None
        """Called with the id of a publisher whose pending messages are read as if they were committed."""
        self._tailer: Tailer | None = None
        """Reads ahead of :attr:`next`; None if the next read must begin at :attr:`next`."""
        self._last_tailer: Tailer | None = None
        """The tailer that read the last message."""

    @property
    def dirty(self) -> bool:
        """True if messages were handed out that are not committed."""
        return self.next != self.claim.next

    @property
    def readable(self) -> bool:
        return self.assignee and not self.revoked and not self.claim.paused

    @property
    def envelope(self) -> Envelope | None:
        """Index, time, hash and metadata of the last message that was read; None before the first."""
        return None if self._last_tailer is None else self._last_tailer.envelope

    def waiting(self, txn: StoreTransaction) -> bool:
        """Return whether there are messages to read."""
        return self.log.row(txn).next > (self.next if self._tailer is None else self._tailer.position)

    def read(self, n: int) -> list[dict[str, Any]]:
        """Return the next messages, at most ``n``."""
        tailer = self._tailer
        if tailer is None:
            tailer = Tailer(self.queue)
            tailer.on_pending = self.on_pending
            tailer.go_to(self.next)
            self._tailer = tailer
        self.runs = tailer.cursors[0].runs = []
        messages = tailer.read_many(n)
        if messages:
            self.next = tailer.position
            self._last_tailer = tailer
        return messages

    def follow(self, claim: Claim, name: str) -> None:
        """Take over the claim as it is in the table now. Only assignments: no exception can end it halfway."""
        if claim.epoch != self.claim.epoch:  # a seek
            self.next = claim.next
            self._tailer = None
        self.claim = claim
        assignee = claim.assignee == name
        if self.assignee and not assignee:
            self.leaving_ns = clock.monotonic_ns()
        self.assignee = assignee

    def reopen(self) -> None:
        """Drop the messages that were read ahead. The next read begins at :attr:`next`."""
        self._tailer = None

    def rewind(self) -> None:
        """Go back to the committed position. Messages that were handed out and not committed are read again."""
        self.next = self.claim.next
        self._tailer = None

    def move(self, checkpoint: bytes | None = None, upto: int | None = None) -> Move:
        """Return the move of the position that commits the messages up to the index ``upto``, or all handed out."""
        return Move(self.log, self.claim, self.next if upto is None else upto + 1, checkpoint)
