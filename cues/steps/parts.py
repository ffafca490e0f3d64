"""The parts of a step: messages that commit under one hash.

A step without failures is one part. A message that fails for good becomes a part of its own, and its error message
is written to the error queue. So a step of n messages has at most 2n + 1 parts, and they all commit in one transaction.

    messages     1 2 3 4 5        3 fails
    parts        [1 2] [3] [4 5]  each with the hash of its own ranges

Everything that can fail about a message was checked while the function ran (:mod:`cues.steps.outgoing`). So
building the parts does not fail because of a message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cues.records import batch as batches
from cues.records import columns
from cues.steps import outgoing, tries
from cues.steps.failure import Failure, error_message
from cues.steps.part import Part, divided, divided_rows
from cues.steps.results import TableOutput

if TYPE_CHECKING:
    from cues.queues.queue import Queue
    from cues.steps.abroad import Abroad, Appends
    from cues.steps.copies import Copies
    from cues.steps.hashes import Hasher
    from cues.steps.ports import Ports
    from cues.steps.results import Results
    from cues.steps.taking import Taken


class PartBuilder:
    """Cuts the steps of one processor at their failures; builds the outputs of each part under its own hash."""

    def __init__(
        self, ports: Ports, hasher: Hasher, abroad: Abroad | None = None, copies: Copies | None = None
    ) -> None:
        """``abroad``: the way on which messages reach other stores; None if no queue is in one. ``copies``: rules for
        steps that take copies of messages."""
        self._node = node = ports.node
        self.hasher = hasher
        """The delivery hashes. A seek that asks for delivery again replaces them."""
        self._targets = ports.targets
        self._errors = ports.errors
        self.abroad: Abroad | None = abroad
        self.copies: Copies | None = copies
        self._alts = node.mode == "alts"

    def parts(self, taken: Taken, results: Results) -> tuple[Taken, list[Part], Failure | None]:
        """Cut the step at its failures; build the outputs of each part under its own hash.

        Returns the messages that commit, their parts, and the failure before which the processor stops.
        """
        stop: Failure | None = None
        if results.closed is not None:
            taken = taken.before(results.closed)
        if not results.failures:
            return taken, [self.part(taken, 0, taken.count, results)] if taken.count else [], None
        offset = results.stop(self._node)
        if offset is not None:
            stop = results.failures[offset]
            if not offset or self._node.options.batch:
                return taken, [], stop
            taken, results = taken.before(offset), results.before(offset)
        parts = [
            self.part(taken, cut.start, cut.stop, results)
            if cut.failure is None
            else self.failed(taken, cut.start, cut.stop, cut.failure)
            for cut in results.cuts(self._node, taken.count)
        ]
        return taken, parts, stop

    def part(self, taken: Taken, start: int, stop: int, results: Results) -> Part:
        digest, taking = self.identify(taken, start, stop)
        abroad = self.abroad
        appends: Appends = []
        written = 0
        provenance = None
        for binding, queue, imperative in self._targets:
            outputs = results.writes if imperative else results.outputs
            if binding not in outputs:
                continue
            output = outputs[binding]
            if not output.items:
                if isinstance(output, TableOutput):
                    written += self._append_table(appends, queue, output, digest, taken)
                continue
            if stop - start < taken.count:
                output = output.between(start, stop)
                if not output.items:
                    continue
            strips = queue.core.strips
            if provenance is None and not strips and taken.traced:
                provenance = taken.carried()
            for log, items, origins in divided(queue, output, start):
                own = None
                if provenance is not None and not strips:
                    if self._node.options.batch:
                        own = provenance.spread(len(items))
                    elif origins is None:
                        own = provenance.slice(start, stop)
                    else:
                        own = provenance.select(origins)
                stamps = None if abroad is None else abroad.stamps(log, len(items))
                appends.append((log, outgoing.build(items, strips, digest, own, stamps)))
                written += len(items)
        if abroad is not None:
            appends = abroad.at_home(appends, digest)
        return Part(start, stop, digest, taking, None, appends, written)

    def _append_table(self, appends: Appends, queue: Queue, output: TableOutput, digest: bytes, taken: Taken) -> int:
        """Build the records of a table that the function returned, on each partition; return the number of rows."""
        options, written = queue.core.options, 0
        provenance = taken.carried() if taken.traced and not options.strips else None
        for log, rows, offsets in divided_rows(queue, output):
            count = rows.num_rows
            origins = provenance
            if provenance is not None:
                origins = provenance.spread(count) if offsets is None else provenance.select(offsets)
            stamps = None if self.abroad is None else self.abroad.stamps(log, count)
            if stamps is None:
                limit = batches.OWN_BYTES_MAX  # rows were measured when the call returned
                pages = batches.build_table(rows, limit, digest, origins, options.strips, options.compression)
            else:  # each message has an identity of its own
                messages = [row for some in rows.to_batches() for row in columns.rows(some)]
                pages = batches.build(messages, batches.OWN_BYTES_MAX, digest, origins, stamps=stamps)
            appends.append((log, pages))
            written += count
        return written

    def failed(self, taken: Taken, start: int, stop: int, failure: Failure) -> Part:
        assert self._errors is not None
        digest, taking = self.identify(taken, start, stop)
        messages = {s.binding: s.pristine_between(start, stop) for s in taken.slices}
        record = error_message(self._node, messages, failure)
        if self.copies is not None:
            record |= self.copies.origins(taken, start, stop)
        provenance = taken.carried().slice(start, stop).spread(1)
        stamps = None if self.abroad is None else self.abroad.stamps(self._errors, 1)
        pages = outgoing.build_error(record, digest, provenance, stamps)
        appends = self.at_home([(self._errors, pages)], digest)
        return Part(start, stop, digest, taking, failure, appends, 1)

    def at_home(self, appends: Appends, digest: bytes) -> Appends:
        """Return the appends of a part, with those to other stores as the home store has them."""
        return appends if self.abroad is None else self.abroad.at_home(appends, digest)

    def identify(self, taken: Taken, start: int, stop: int) -> tuple[bytes, tries.Taking]:
        """Return the delivery hash of the messages ``start`` to ``stop``, and their ranges for the try log."""
        ranges = [piece.range(start, stop) for piece in taken.slices]
        tailers, _, starts, ends = zip(*ranges)
        taking = tries.Taking(tailers, starts, ends, tailers[0] if self._alts else None)
        if taken.hash is not None and start == 0 and stop == taken.count:
            return taken.hash, taking
        return self.hasher.digest(ranges), taking
