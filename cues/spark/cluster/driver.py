"""The objects that the threads of one driver share: the session, the directory, and a bell."""

from __future__ import annotations

import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from cues import faults
from cues.base import events, names
from cues.errors import Diverged
from cues.spark.cluster.files import ID, folder_of, name_of, parsed, sealed_json
from cues.spark.cluster.ledger import Ledger

if TYPE_CHECKING:
    from cues.spark.cluster.directory import QueueDirectory
    from cues.spark.cluster.files import Files
    from cues.spark.cluster.ledger import LedgerRecord


def id_of_graph(graph: str) -> str:
    """The file with the id of a graph that was started over. Other graphs have the id of the directory."""
    return f"_cues/{folder_of(graph)}.id.json"


def new_owner() -> str:
    """A name for a driver, which no other driver has."""
    return f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(6)}"


class Driver:
    def __init__(
        self,
        session: Any,
        files: Files,
        graph: str,
        system: Any,
        emit: Callable[[events.Event], None],
        sleep: Callable[[float], bool],
        owner: str | None = None,
    ) -> None:
        """``session`` is None for an operator's command, which runs nothing; ``owner`` is a :func:`new_owner`."""
        self.session = session
        self.context: Any = None if session is None else session.sparkContext
        self.files = files
        self.graph = graph
        self.system = system
        self.emit = emit
        self.sleep = sleep
        self.owner = owner or new_owner()
        draft = sealed_json({"id": secrets.token_hex(8)})
        own = files.read(id_of_graph(graph))
        made = files.ensure(ID, draft)  # after the other read, because it makes both names durable
        self.store_id = str(
            (parsed(files, id_of_graph(graph), own, {"id": str}) if own else parsed(files, ID, made, {"id": str}))["id"]
        )
        self.queues: dict[str, QueueDirectory] = {}
        self.without_delays: frozenset[str] = frozenset()
        """The queues whose messages may have no time of delivery."""
        self.conf: Mapping[str, str] = {}
        """The settings of Spark that the user gave for this start."""
        self.closed = False
        self.bell = threading.Condition()
        """Rung for each change: messages on a queue, or a processor that is idle now or has stopped."""
        self.rings = 0

    def claim(
        self, ledger: Ledger, positions: Callable[[LedgerRecord | None], dict[str, tuple[str, int]]]
    ) -> LedgerRecord | None:
        """Own a processor after its last record, and return that record.

        First the files that the last record committed are added to the logs of their queues. ``positions`` returns the
        positions of the claim. Raises :class:`Diverged` if records and queues do not belong together.
        """
        while True:
            last = ledger.read()
            try:
                self._compare(ledger.processor, last)
            except Diverged:
                if ledger.read() != last:  # another driver still runs the processor, and has made a step
                    continue
                raise
            self._forward(ledger.processor, last)
            if ledger.claim(last, positions(last)):
                return last

    def forward_others(self, processors: Collection[str]) -> None:
        """Add to the logs what other processors of the graph have committed, such as those that it no longer has."""
        for folder in self.files.names("_cues/steps"):
            processor = name_of(folder)
            if processor.startswith(f"{self.graph}.") and processor not in processors:
                self._forward(processor, Ledger(self.files, processor, self.owner).read())

    def _forward(self, processor: str, last: LedgerRecord | None) -> None:
        """Add the files that the last record of a processor has committed to the logs of their queues."""
        for queue, new in last.files.items() if last is not None else ():
            if queue not in self.queues:
                raise Diverged(
                    f"The last step of {processor} wrote to the queue {queue!r}, which the graph does not have.",
                    "run the graph once as it was, with this queue, and change it after that.",
                    processor=processor,
                )
            assert last is not None
            self.queues[queue].publish(processor, last.number, new)
            faults.point("spark.forwarded")

    def _compare(self, processor: str, last: LedgerRecord | None) -> None:
        """Raise :class:`Diverged` if the queues lack messages of the processor's records, or the records are older."""
        number = last.number if last is not None else -1
        for directory in self.queues.values():
            newest = directory.published(processor)
            if newest > number:
                raise Diverged(
                    f"The queue {directory.queue!r} holds messages of record {newest} of {processor}, and its"
                    f" records in {self.files.url} " + (f"end at {number}." if last else "are gone."),
                    "use the records that belong to the queues, or start over with --fresh or another --queues DIR.",
                    processor=processor,
                )

        for id, end in last.ends.items() if last is not None else ():
            queue, partition = names.split_log(id)
            if queue in self.queues and not (log := self.queues[queue].log(partition)).reaches(end):
                raise Diverged(
                    f"{processor} has written messages up to {end - 1} of the queue {id!r}, whose log in"
                    f" {self.files.url} ends with message {log.next - 1}.",
                    "restore the directory from a copy; or start over with --fresh or another --queues DIR.",
                    processor=processor,
                )

    def ring(self) -> None:
        """Wake the threads that wait for a change."""
        with self.bell:
            self.rings += 1
            self.bell.notify_all()
