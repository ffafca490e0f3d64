"""A part of a step: messages that commit under one hash (parts.py)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cues import codec
from cues.native import mypyc_attr
from cues.queues.base import view_of
from cues.records import columns
from cues.steps import outgoing

if TYPE_CHECKING:
    from cues.queues.queue import Queue
    from cues.records.batch import Page
    from cues.steps.failure import Failure
    from cues.steps.results import Output, TableOutput
    from cues.steps.tries import Taking


@mypyc_attr(allow_interpreted_subclasses=True)
class Part:
    """A run of messages that commits under one hash: the whole step, or a run between two failures, or a failure."""

    def __init__(
        self,
        start: int,
        stop: int,
        digest: bytes,
        taking: Taking,
        failure: Failure | None,
        appends: Iterable[tuple[Queue, list[Page]]],
        written: int,
        values: int | None = None,
    ) -> None:
        """``values``: the largest number of LMDB values that it appends, if ``appends`` may be read only once."""
        self.start = start
        self.stop = stop
        self.digest = digest
        self.taking = taking
        self.failure = failure
        self.appends = appends
        """Its appends in the home store: to outputs there, and to fork queues."""
        self.written = written
        """The number of messages for outputs, in all stores."""
        if values is None:
            values = 0
            for _, pages in appends:
                for page in pages:
                    values += 1 + len(page.pieces) if page.pieces else 1
        self.values = values
        """The largest number of LMDB values that it appends, for which the disk must have room."""
        self.pending: dict[str, int] = {}
        """The index of its first pending message in each log of another store (pending.py)."""
        self.indices: dict[str, int] = {}
        """The index of its first message in each log of the home store, after it was written."""


def divided_table(queue: Queue, output: TableOutput) -> list[tuple[Queue, Any]]:
    """Return the rows of a table for each log of its queue."""
    return [(log, rows) for log, rows, _ in divided_rows(queue, output)]


def divided_rows(queue: Queue, output: TableOutput) -> list[tuple[Queue, Any, list[int] | None]]:
    """Return the rows of a table for each log of its queue, and the offsets of the messages that they came from."""
    if not output.table.num_rows:
        return []
    origins = output.origins
    if not queue.core.is_partitioned:
        return [(queue, output.table, origins)]
    shares = queue.core.table_shares(output.table) if output.shares is None else output.shares
    return [
        (
            view_of(queue, share.partition),
            columns.taken(output.table, share.offsets),
            None if origins is None else [origins[offset] for offset in share.offsets],
        )
        for share in shares
    ]


def divided(queue: Queue, output: Output, start: int) -> list[tuple[Queue, list[bytes], list[int] | None]]:
    """Return the items of an output for each log of its queue, and the offsets of the messages that they came from.

    ``start`` is the offset of the message of the first item, if each item was made from one message.
    """
    if not queue.core.is_partitioned:
        return [(queue, output.items, output.origins)]
    items = output.items
    origins = output.origins if output.origins is not None else list(range(start, start + len(items)))
    shares = outgoing.placed(items)
    if shares is None:  # the append chooses; or the queue had one partition when the calls returned
        shares = dict(queue.core.shares([codec.unpack_known(item) for item in items]))
    return [
        (view_of(queue, partition), [items[offset] for offset in offsets], [origins[offset] for offset in offsets])
        for partition, offsets in shares.items()
    ]
