"""Consumers that share the partitions of queues, in any number of processes.

    SharedConsumer(application, store, "orders", "billing", checkpoint).run()        in each process

A member of a group (:mod:`cues.groups.membership`) holds some of the partitions. Each partition that it holds has a
:class:`cues.txn.Consumer` of its own, in a thread of its own:

    member of the group ──┬── orders     application, publisher, checkpoint, fence
                          ├── orders/1   application, publisher, checkpoint, fence
                          ╰── orders/4   …

The group decides only who works where. The checkpoint of a partition decides which of its transactions took place, as
for any consumer (:mod:`cues.txn.consumer`). A hand-over, with the numbers of docs/checkpoints.md:

    1. The plan assigns the partition to another member. Its consumer is told to stop.
    2. The consumer commits what it has consumed, acknowledges it, drops what is pending, and ends.
    3. The group's position moves to that of the checkpoint, and the partition is released.
    4. The other member claims the partition, and starts a consumer. It raises the fence of the checkpoint, repeats the
       acknowledgements, drops what is pending, and continues at the checkpoint.

A member that dies, or is stopped for longer than its lease, does not make the steps 1 to 3. Then step 4 is sufficient:
the fence refuses every later commit of the old consumer, the acknowledgements of its last commit are repeated, and its
pending messages are dropped.

The position of the group follows the checkpoints, for lag and retention. The group writes its position after a
checkpoint is committed, so the position is never higher than the checkpoint. A partition without a checkpoint begins at
the position of the group (``start=``).

Not guaranteed: a transaction over messages of several partitions; an end of a ``consume`` that hangs: its process keeps
the partition until it is ended; an effect of :func:`cues.groups.seek`, because the checkpoints decide.
"""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Final

from cues import faults
from cues.base import clock
from cues.base.closing import Closing
from cues.errors import CuesError, Diverged, Fenced, InvalidArgument
from cues.groups.membership import Member
from cues.groups.places import Start
from cues.groups.sticky import Partition
from cues.groups.table import Move
from cues.overrides import override
from cues.queues.queue import Queue
from cues.queues.store import Store
from cues.steps.ownership import LEASE_S
from cues.storage import wakeup
from cues.txn.consumer import Consumer
from cues.txn.registration import NOTE_S
from cues.txn.sources import ReadFrom

_LOOK_S: Final = 0.1
"""The longest time after which a stop, or the end of a consumer, is seen."""
_OPTIONS: Final = frozenset(inspect.signature(Consumer).parameters) - {"app", "sources", "checkpoint", "lease_s", "now"}
"""The options of a consumer that a partition has too; no lease, because the group says whose turn it is."""
_MARK: Final = b"cues consumer"
"""The value beside a position of the group that a checkpoint has reached."""


class SharedConsumer(Closing):
    """One process of consumers that share the partitions of queues; see the module.

    ``application``   ``application(queue, partition)`` returns a new application (:class:`cues.txn.App`) for a
                      partition, whenever this process gets it; ``queue`` is the name of the queue
    ``store``         the store of the queues, which also keeps the group
    ``queues``        queues, names or patterns, as of :class:`Member`
    ``group``         the name of the group. Only consumers with the same checkpoints are to be its members
    ``checkpoint``    ``checkpoint(queue, partition)`` returns a new checkpoint object, with a name or place that is the
                      same in every process and is that of this partition only. It is closed when the partition leaves
    ``name, lease_s, start, expire_s``
                      as of :class:`Member`
    ``options``       further options of each :class:`cues.txn.Consumer`, except its lease

    The functions run in the thread of the partition. An error of one of them, or of an application, ends all consumers
    of this process and the membership, and :meth:`run` raises it. One thread uses a shared consumer; any thread may
    call :meth:`stop`.
    """

    def __init__(
        self,
        application: Callable[[str, int], Any],
        store: Store,
        queues: str | Queue | Iterable[str | Queue],
        group: str,
        checkpoint: Callable[[str, int], Any],
        *,
        name: str | None = None,
        lease_s: float = LEASE_S,
        start: Start = "earliest",
        expire_s: float | None = None,
        **options: Any,
    ) -> None:
        for what, given in (("application", application), ("checkpoint", checkpoint)):
            if not callable(given):
                raise InvalidArgument(
                    f"The {what} is {given!r:.60}, which cannot be called.",
                    f"pass a function of a queue's name and a partition that returns the {what}.",
                )
        unknown = sorted(set(options) - _OPTIONS)
        if unknown:
            raise InvalidArgument(
                f"The consumer of a partition has no option {unknown[0]!r}.",
                f"pass some of {', '.join(sorted(_OPTIONS))}.",
            )
        self._application, self._checkpoint, self._options = application, checkpoint, options
        self._units: dict[Partition, _Unit] = {}
        self._stopping = self._ended = False
        self._due = 0.0
        self._fenced_ns: dict[Partition, int] = {}
        """The time at which a consumer was fenced although this member had its partition."""
        self.member = Member(
            store,
            queues,
            group,
            name=name,
            lease_s=lease_s,
            start=start,
            expire_s=expire_s,
            on_assigned=self._assigned,
            on_revoked=self._revoked,
            on_lost=self._lost,
        )

    # --- running ------------------------------------------------------------------------------

    def run(self) -> None:
        """Consume until :meth:`stop`. Then commit, hand over all partitions and leave the group."""
        self._run(draining=False)

    def drain(self) -> bool:
        """Consume until the group has read every partition to its end; returns True then.

        Waits for the other processes of the group, and for the end of transactions that are pending in the queues. Then
        hands over all partitions and leaves the group. Returns False if :meth:`stop` ended it.
        """
        return self._run(draining=True)

    def stop(self) -> None:
        """End :meth:`run` or :meth:`drain` soon. Any thread or signal handler may call it: it takes no lock."""
        self._stopping = True

    @property
    def assigned(self) -> list[Partition]:
        """The partitions, as (queue, number), on which this process works at the moment."""
        return sorted(self._units)

    @override
    def close(self) -> None:
        """Stop the consumers of this process, hand over its partitions and leave the group. May be repeated."""
        if self._ended:
            return
        try:
            self._end(list(self._units))
        finally:
            self._ended = True
            self.member.close()

    def _run(self, draining: bool) -> bool:
        if self._ended:
            raise CuesError("This shared consumer has ended.", "make a new SharedConsumer, which continues.")
        member = self.member
        try:
            while not self._stopping:
                member.follow_group()
                self._check()
                self._note(at_once=draining)
                if draining and self._units_idle() and not sum(member.lag().values()):
                    break
                self._wait()
            return not self._stopping
        finally:
            self.close()

    def _wait(self) -> None:
        """Sleep until the group changes, for a moment at most."""
        member = self.member
        seen = member.changes()
        wakeup.wait(
            [(member.store.core.doorbells, member.table.mask)],
            lambda: self._stopping or member.changes() != seen,
            _LOOK_S,
        )

    def _units_idle(self) -> bool:
        return all(unit.consumer is not None for unit in self._units.values())

    def _check(self) -> None:
        """Raise the error of a consumer, unless another member has its partition, or had it for a moment."""
        failed = [partition for partition, unit in self._units.items() if unit.error is not None]
        if not failed:
            return
        if all(isinstance(self._units[partition].error, Fenced) for partition in failed):
            # Perhaps this process was stopped, and another member has the partition: then on_lost ends the consumer.
            self.member.holdings.stale()
            self.member.follow_group()
        for partition in failed:
            unit = self._units.get(partition)
            if unit is None or unit.error is None:
                continue
            held = self.member.holdings.held.get(partition)
            fenced_ns, self._fenced_ns[partition] = self._fenced_ns.get(partition), clock.monotonic_ns()
            recent = fenced_ns is not None and clock.monotonic_ns() - fenced_ns < self.member.lease_s * 1e9
            if held is None or recent or not isinstance(unit.error, Fenced):
                raise unit.error
            # Another process was stopped between its claim and its restore. When it continued, it raised the fence,
            # although this member has the partition now. It does so once, and then learns that it lost the partition.
            self._units[partition] = _Unit(self, partition, held.claim.next, held.claim.checkpoint == _MARK)

    # --- the group ----------------------------------------------------------------------------

    def _assigned(self, partitions: list[Partition]) -> None:
        for partition in partitions:
            held = self.member.holdings.held.get(partition)
            if held is not None and partition not in self._units:
                self._units[partition] = _Unit(self, partition, held.claim.next, held.claim.checkpoint == _MARK)
                faults.point("shared.started")

    def _revoked(self, partitions: list[Partition]) -> None:
        self._end(partitions)

    def _lost(self, partitions: list[Partition]) -> None:
        self._end(partitions, lost=True)

    def _end(self, partitions: Iterable[Partition], lost: bool = False) -> None:
        """Stop consumers, wait for their ends, and move the group's positions; raise the first of their errors."""
        units = [(partition, self._units[partition]) for partition in partitions if partition in self._units]
        for _, unit in units:
            unit.stop()
        errors = []
        for _, unit in units:
            while not unit.ended.wait(min(_LOOK_S, self.member.lease_s / 4)):
                self.member.keepalive()
            if unit.error is not None and not (lost and isinstance(unit.error, Fenced)):
                errors.append(unit.error)
        faults.point("shared.stopped")
        if not lost and not self.member.store.closed:
            self._note(at_once=True)
        for partition, _ in units:
            self._units.pop(partition, None)
        faults.point("shared.noted")
        if errors:
            raise errors[0]

    def _note(self, at_once: bool = False) -> None:
        """Move the positions of the group to those of the checkpoints, at intervals.

        A position that has changed meanwhile stays: another member, or a seek, has moved it.
        """
        if not (at_once or time.monotonic() >= self._due):
            return
        self._due = time.monotonic() + NOTE_S
        held = self.member.holdings.held
        moves: dict[Partition, Move] = {}
        for partition, unit in self._units.items():
            position = unit.position
            if position is not None and partition in held:
                claim = held[partition].claim
                if position > claim.next or claim.checkpoint != _MARK:
                    moves[partition] = Move(held[partition].log, claim, max(position, claim.next), _MARK)
        if moves:
            for partition, claim in self.member.table.move(moves).items():
                held[partition].next, held[partition].claim = claim.next, claim


class _Unit:
    """The consumer of one partition, in its thread."""

    def __init__(self, shared: SharedConsumer, partition: Partition, start: int, has_checkpoint: bool) -> None:
        self._shared = shared
        self._queue, self._number = partition
        self._start = start
        self._has_checkpoint = has_checkpoint
        self._stopping = False
        self.consumer: Consumer | None = None
        self.error: BaseException | None = None
        self.ended = threading.Event()
        thread = threading.Thread(target=self._live, name=f"cues consumer {self._queue}/{self._number}", daemon=True)
        thread.start()

    @property
    def position(self) -> int | None:
        """The index before which all messages are consumed, committed and acknowledged; None if it is not known yet."""
        consumer = self.consumer
        return None if consumer is None else next(iter(consumer.read_through.values()), None)

    def stop(self) -> None:
        """Let the consumer commit and end."""
        self._stopping = True
        if self.consumer is not None:
            self.consumer.stop()

    def _live(self) -> None:
        try:
            with contextlib.ExitStack() as closing:
                self._consume(closing)
        except BaseException as error:
            self.error = error
        finally:
            self.ended.set()

    def _consume(self, closing: contextlib.ExitStack) -> None:
        shared = self._shared
        checkpoint = shared._checkpoint(self._queue, self._number)
        if hasattr(checkpoint, "close"):
            closing.callback(checkpoint.close)
        self._check_target(checkpoint)
        queue = closing.enter_context(shared.member.store.queue(self._queue).partition(self._number))
        consumer = closing.enter_context(
            Consumer(
                shared._application(self._queue, self._number),
                [ReadFrom(queue, start=self._start)],
                checkpoint,
                lease_s=0,
                **shared._options,
            )
        )
        self.consumer = consumer
        if not self._stopping:
            consumer.run()

    def _check_target(self, checkpoint: Any) -> None:
        """Refuse a checkpoint that is empty, although one of this partition has reached a position."""
        if self._has_checkpoint and hasattr(checkpoint, "read") and checkpoint.read() is None:
            raise Diverged(
                f"The group {self._shared.member.group} is at {self._start} of {self._queue}/{self._number}, but"
                f" {checkpoint!r} is empty: what the messages before made there is missing.",
                "put back the checkpoint and its data; or begin again from the first message, with another group.",
            )
