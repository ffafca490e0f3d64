"""The measurements that a run needs of its own store: the positions of processors, and the messages that failed.

``cues run`` loads this module each time, so it imports little. All other measurements are in
:mod:`cues.tools.metrics`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Final

from cues.base import names
from cues.base.data import dataclass
from cues.base.names import ProcessorId
from cues.forwarding import other_stores
from cues.graphs import processor_rows
from cues.queues.committed import log_at
from cues.queues.log import Log
from cues.queues.store import Store
from cues.steps.error_records import ErrorLog

ERRORS_MAX: Final = 1000
"""Messages of an error queue that are read; if there are more, the counts are lower bounds."""


@dataclass(frozen=True)
class TailerMetrics:
    """The position of a processor on one of its inputs."""

    tailer: str
    queue: str
    position: int
    """The index that is taken next."""
    lag: int | None
    """The number of messages that are not taken yet; None if the store of the queue cannot be opened."""
    store: str = ""
    """The path of the queue's store, if it is another store; its id if the path is unknown."""


def processors(store: Store) -> list[ProcessorId]:
    """The ids of the processors that the store knows."""
    with store.core.view() as txn:
        return processor_rows.all_ids(txn)


def tailers(store: Store, processor: ProcessorId) -> list[TailerMetrics]:
    """The positions of a processor; empty for a source and for an unknown processor."""
    with store.core.view() as txn:
        topology = processor_rows.read_topology(txn, processor)
        row = processor_rows.read_row(txn, processor)
    if topology is None or row is None:
        return []
    measured = []
    with other_stores.Others(store) as others:
        for tailer, queue, id, position in zip(topology.tailers, topology.queues, topology.stores, row.positions):
            other = others.get(id)
            at, lag = position.next, None
            if other is not None:
                log = log_at(Log(other, *names.split_log(queue)), position.identity)
                with other.core.view() as txn:  # read after the position, so the lag is never negative
                    ends = log.row(txn)
                    at = max(at, ends.first)
                    lag = ends.next - at if at <= ends.next else None  # another history; the next start explains it
                    at = log.index_of(txn, at)
            where = "" if not id else other.path if other is not None else id.hex()
            measured.append(TailerMetrics(tailer, queue, at, lag, where))
    return measured


def failed_messages(logs: Iterable[ErrorLog], records: int) -> int:
    """The number of messages in the last ``records`` unresolved error records; one that cannot be read counts as one.

    Only the last :data:`ERRORS_MAX` records of each log are read. Each older one counts as one message.
    """
    inputs = [(r.time, r.count) for log in logs for r in itertools.islice(log.records(), ERRORS_MAX)]
    inputs.sort(reverse=True)
    newest = [count for _, count in inputs[:records]]
    return sum(newest) + records - len(newest)
