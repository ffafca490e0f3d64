"""The messages of a processor for queues of other stores, and the two ways on which they reach them.

    ForkQueues        this module:  they are written to a fork queue in the home store, and a forwarder copies them
    PendingMessages   pending.py:   they are written there directly, and are pending until the step has committed

A step calls the methods of :class:`Abroad` in their order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cues.base import names
from cues.native import mypyc_attr
from cues.overrides import override

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cues.graphs.processor import Node
    from cues.queues.queue import Queue
    from cues.queues.store import Store
    from cues.records.batch import Page
    from cues.records.stamps import Stamps
    from cues.steps.part import Part
    from cues.storage.transaction import StoreTransaction

Appends = list[tuple["Queue", list["Page"]]]
"""The pages that a part appends, by queue."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Abroad:
    """One way on which messages reach other stores."""

    def __init__(self) -> None:
        self.forks: dict[bytes, Queue] = {}
        """The fork queues, by the id of their other store; empty if steps write to other stores directly."""

    def settle(self) -> None:
        """Bring the other stores to the last home commit, before the decision of a start."""

    def stamps(self, queue: Queue, count: int) -> Stamps | None:
        """Return the identities of ``count`` messages for a queue; most messages have none."""
        return None

    def at_home(self, appends: Appends, digest: bytes) -> Appends:
        """Return the appends of a part, with those to other stores as the home store has them."""
        return appends

    def commit(self, parts: list[Part], write: Callable[[], None]) -> None:
        """Call ``write``, which commits the step in the home store."""
        write()

    def write(self, txn: StoreTransaction, parts: list[Part]) -> None:
        """Write in the home commit of the step what this way needs."""


class ForkQueues(Abroad):
    """Messages go into the fork queue for their store, in the home commit of their step."""

    def __init__(self, home: Store, node: Node, others: Iterable[bytes]) -> None:
        """``others`` are the ids of the other stores."""
        super().__init__()
        self._home = home
        self.forks = {other: home.queue(names.fork_id(node.key, other)) for other in others}

    @override
    def at_home(self, appends: Appends, digest: bytes) -> Appends:
        home = [(queue, pages) for queue, pages in appends if queue.store.id == self._home.id]
        for other, fork_queue in self.forks.items():
            bound = [(queue.core.log.id, pages) for queue, pages in appends if queue.store.id == other]
            if bound:
                from cues.forwarding import fork

                home.append((fork_queue, fork.pack(bound, digest)))
        return home
