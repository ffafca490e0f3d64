"""The parts of a step: messages that commit under one hash.

A step without failures is one part. A message that fails for good becomes a part of its own, and its error message
is written to the error queue. So a step of n messages has at most 2n + 1 parts, and they all commit in one transaction.

    messages     1 2 3 4 5        3 fails
    parts        [1 2] [3] [4 5]  each with the hash of its own ranges

Everything that can fail about a message was checked while the function ran (:mod:`cues.steps.outgoing`). So
building the parts does not fail because of a message.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cues import codec
from cues.errors import CuesError
from cues.forwarding import fork
from cues.native import mypyc_attr
from cues.queues.base import view_of
from cues.queues.queue import Queue
from cues.records import batch as batches
from cues.records.batch import Page
from cues.steps import outgoing, tries
from cues.steps.failure import Failure, error_message
from cues.steps.results import Output, Results
from cues.steps.stepper_base import StepperBase
from cues.steps.taking import Taken

if TYPE_CHECKING:
    from cues.records.stamps import Stamps


@mypyc_attr(allow_interpreted_subclasses=True)
class Part:
    """A run of messages that commits under one hash: the whole step, or a run between two failures, or a failure."""

    def __init__(
        self,
        start: int,
        stop: int,
        digest: bytes,
        taking: tries.Taking,
        failure: Failure | None,
        appends: Iterable[tuple[Queue, list[Page]]],
        written: int,
    ) -> None:
        self.start = start
        self.stop = stop
        self.digest = digest
        self.taking = taking
        self.failure = failure
        self.appends = appends
        """Its appends in the home store: to outputs there, and to fork queues."""
        self.written = written
        """The number of messages for outputs, in all stores."""
        self.pending: dict[str, int] = {}
        """The index of its first pending message in each log of another store (pending.py)."""
        self.indices: dict[str, int] = {}
        """The index of its first message in each log of the home store, after it was written."""

    def values(self) -> int:
        """Return the largest number of LMDB values that it appends, for which the disk must have room."""
        count = 0
        for _, pages in self.appends:
            for page in pages:
                count += 1 + len(page.pieces)
        return count


@mypyc_attr(allow_interpreted_subclasses=True)
class PartBuilder(StepperBase):
    """Cut a step at its failures; build the outputs of each part under its own hash."""

    def _parts(self, taken: Taken, results: Results) -> tuple[Taken, list[Part], Failure | None]:
        """Cut the step at its failures; build the outputs of each part under its own hash.

        Returns the messages that commit, their parts, and the failure before which the processor stops.
        """
        stop: Failure | None = None
        if results.closed is not None:
            taken = taken.before(results.closed)
        if not results.failures:
            return taken, [self._part(taken, 0, taken.count, results)] if taken.count else [], None
        offset = results.stop(self.node)
        if offset is not None:
            stop = results.failures[offset]
            if not offset or self.node.options.batch:
                return taken, [], stop
            taken, results = taken.before(offset), results.before(offset)
        parts = [
            self._part(taken, cut.start, cut.stop, results)
            if cut.failure is None
            else self._failed_part(taken, cut.start, cut.stop, cut.failure)
            for cut in results.cuts(self.node, taken.count)
        ]
        return taken, parts, stop

    def _part(self, taken: Taken, start: int, stop: int, results: Results) -> Part:
        digest = self._digest(taken, start, stop)
        appends: list[tuple[Queue, list[Page]]] = []
        written = 0
        provenance = None
        for binding, queue, imperative in self._targets:
            output = (results.writes if imperative else results.outputs).get(binding)
            if output is None or not output.items:
                continue
            if stop - start < taken.count:
                output = output.between(start, stop)
                if not output.items:
                    continue
            strips = queue.core.options.strips
            if provenance is None and not strips and taken.traced:
                provenance = taken.carried()
            for log, items, origins in divided(queue, output, start):
                came = None
                if provenance is not None and not strips:
                    if self.node.options.batch:
                        came = provenance.spread(len(items))
                    elif origins is None:
                        came = provenance.slice(start, stop)
                    else:
                        came = provenance.select(origins)
                pages = outgoing.build(items, strips, digest, came, self._stamps(log, len(items)))
                appends.append((log, pages))
                written += len(items)
        appends = self._at_home(appends, digest)
        return Part(start, stop, digest, self._taking(taken, start, stop), None, appends, written)

    def _failed_part(self, taken: Taken, start: int, stop: int, failure: Failure) -> Part:
        assert self.errors is not None
        digest = self._digest(taken, start, stop)
        messages = {s.binding: [s.pristine(o) for o in range(start, stop)] for s in taken.slices}
        record = error_message(self.node, messages, failure) | self._redriven(taken, start, stop)
        came = taken.carried().slice(start, stop).spread(1)
        stamps = self._stamps(self.errors, 1)
        try:
            pages = batches.build([record], batches.OWN_BYTES_MAX, digest, came, reserved=True, stamps=stamps)
        except CuesError:  # q/meta of several inputs together may fit no page; this may be the failure itself
            pages = batches.build([record], batches.OWN_BYTES_MAX, digest, reserved=True, stamps=stamps)
        appends = self._at_home([(self.errors, pages)], digest)
        return Part(start, stop, digest, self._taking(taken, start, stop), failure, appends, 1)

    def _redriven(self, taken: Taken, start: int, stop: int) -> dict[str, Any]:
        """Return fields for an error message that say which error messages these messages came from."""
        return {}

    def _stamps(self, queue: Queue, count: int) -> Stamps | None:
        """Return the identities of ``count`` messages for a queue; most messages have none."""
        return None

    def _at_home(self, appends: list[tuple[Queue, list[Page]]], digest: bytes) -> list[tuple[Queue, list[Page]]]:
        """Put messages for another store into the fork queue for that store, which a forwarder reads."""
        if not self.forks:
            return appends
        home = [(queue, pages) for queue, pages in appends if queue.store.id == self.store.id]
        for other, fork_queue in self.forks.items():
            bound = [(queue.core.log.id, pages) for queue, pages in appends if queue.store.id == other]
            if bound:
                home.append((fork_queue, fork.pack(bound, digest)))
        return home

    def _digest(self, taken: Taken, start: int, stop: int) -> bytes:
        if taken.hash is not None and start == 0 and stop == taken.count:
            return taken.hash
        return self.hasher.digest(taken.ranges(start, stop))

    def _taking(self, taken: Taken, start: int, stop: int) -> tries.Taking:
        tailers: list[str] = []
        starts: list[int] = []
        ends: list[int] = []
        for piece in taken.slices:
            tailers.append(piece.input.tailer)
            starts.append(piece.start + start)
            ends.append(piece.start + stop)
        return tries.Taking(tailers, starts, ends, tailers[0] if self.node.mode == "alts" else None)


def divided(queue: Queue, output: Output, start: int) -> list[tuple[Queue, list[bytes], list[int] | None]]:
    """Return the items of an output for each log of its queue, and the offsets of the messages that they came from.

    ``start`` is the offset of the message of the first item, if each item was made from one message.
    """
    if not queue.is_partitioned:
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
