"""The queues of one processor, opened: the inputs, the tailers and appenders of its function, outputs, errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cues.queues.base import read_as, view_of
from cues.steps.imperative import Imperative, ProcessAppender, ProcessTailer
from cues.steps.taking import Input

if TYPE_CHECKING:
    from cues.graphs.processor import Node
    from cues.queues.queue import Queue
    from cues.queues.store import Store


class Ports:
    """The queues of one processor."""

    def __init__(self, store: Store, node: Node, queues: Mapping[str, Queue], imperative: Imperative | None) -> None:
        """``queues``: handles by name, needed for queues of other stores. ``imperative``: the tailers and appenders of
        the unit, if they are shared."""

        def queue_of(id: str) -> Queue:
            return queues[id] if id in queues else store.queue(id)

        def log_of(id: str) -> Queue:
            return read_as(view_of(queue_of(id), node.input_partition), node.options.isolation)

        self.store = store
        self.node = node
        inputs = {node.tailer(port.queue): port for port in node.inputs}
        self.inputs = [Input(port.binding, tailer, log_of(port.queue)) for tailer, port in inputs.items()]
        for input in self.inputs:
            input.as_tables = node.takes_columns
        if imperative is None:
            imperative = Imperative(
                node.id,
                {p.binding: ProcessTailer(log_of(p.queue), node.tailer(p.queue)) for p in node.tailers},
                {p.binding: ProcessAppender(queue_of(p.queue)) for p in node.appenders},
            )
        self.imperative = imperative
        self.readers: list[Input | ProcessTailer] = [*self.inputs, *imperative.tailers.values()]
        """The tailers that have a position in the row of the processor."""
        self.outputs = {port.binding: queue_of(port.queue) for port in node.outputs}
        self.targets = [(binding, queue, False) for binding, queue in self.outputs.items()]
        """The queues that a step appends to, in this order, and whether through an appender of the function."""
        self.targets += [(binding, appender.queue, True) for binding, appender in imperative.appenders.items()]
        self.errors: Queue | None = None
        """The log for error messages. They have no key, so all those of a unit are on one partition."""
        if node.errors:
            errors = queue_of(node.errors)
            self.errors = view_of(errors, node.partition % errors.options.partitions)
        self.written = [*(queue for _, queue, _ in self.targets), *([self.errors] if self.errors else [])]
        self.away = [queue for queue in self.written if queue.store.id != store.id]
        """The queues in other stores."""
        self.directories = list(dict.fromkeys([store.directory, *(r.queue.store.directory for r in self.readers)]))
        """Those of the stores that it reads from."""

    def mask(self, *own: Queue) -> int:
        """Return the doorbells of the home store that a commit rings: of ``own`` queues too."""
        mask = 0
        for queue in (*self.written, *own):
            if queue.store.id == self.store.id:
                mask |= queue.core.log.mask
        for reader in self.readers:
            if reader.queue.core.bounded and reader.queue.store.id == self.store.id:
                mask |= reader.queue.core.log.mask  # its writers may wait for this reader
        return mask
