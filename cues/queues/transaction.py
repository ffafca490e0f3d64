"""A transaction of a store, as programs see it; :mod:`cues.steps.transaction` makes it and has the rules."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cues.queues.committed import Isolation
    from cues.queues.queue import Queue
    from cues.queues.tailer import Tailer


class Transaction(ABC):
    """Appends and moves of named tailers, in one commit; :meth:`Store.transaction` makes it, for one ``with`` block.

    The thread that began the block uses it. A second transaction of the same store inside the block is refused.
    """

    hash: str | None
    """Delivery hash of the messages, 32 hex digits, after the commit; None if no tailer was moved."""
    indices: dict[str, range]
    """The indices of the messages after the commit, by queue or partition (``orders/3``)."""

    @abstractmethod
    def tailer(
        self, queue: str | Queue, name: str, *, meta: bool = False, isolation: Isolation = "uncommitted"
    ) -> Tailer:
        """Return the tailer ``name`` of a queue of this store, at its stored position; a new name begins at the start.

        It is a :class:`cues.Tailer`, of several partitions a :class:`cues.queues.merged.MergedTailer`, and may be
        moved (``to_end()``). ``isolation`` is as for :meth:`Queue.tailer`. The second call for a queue and name returns
        the same tailer. Raises :class:`InvalidArgument` for a queue of another store, for a position that another
        tailer of this transaction has already, and for another isolation than that of the stored position.
        """

    def write(self, queue: str | Queue, message: dict[str, Any]) -> None:
        """Append a message to a queue of this store, with the commit.

        ``queue`` is a name, or a handle if its key or partitioner is a function. Raises :class:`QueueNotFound`,
        :class:`InvalidArgument` (a queue of another store, not a dict), :class:`CodecError`,
        :class:`MessageTooLarge` and :class:`ReservedKey`; then this message is not part of the transaction.
        """
        self.write_many(queue, (message,))

    @abstractmethod
    def write_many(self, queue: str | Queue, messages: Iterable[dict[str, Any]]) -> None:
        """Append messages with the commit: all of them, or none if one is refused; see :meth:`write`."""

    @abstractmethod
    def abort(self) -> None:
        """End the transaction without a commit. The end of the block then does nothing."""

    @abstractmethod
    def __enter__(self) -> Transaction: ...

    @abstractmethod
    def __exit__(self, kind: object, error: object, trace: object) -> None: ...
