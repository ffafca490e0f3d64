"""The argument ``process`` of a user's function: its processor, its message and its delivery."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable, Sequence
from datetime import datetime
from typing import Any, ClassVar, Final

from cues.base import clock, names
from cues.errors import CuesError, InvalidArgument
from cues.graphs.processor import Node
from cues.native import mypyc_attr
from cues.overrides import override
from cues.steps.hashes import Hasher
from cues.steps.imperative import ByBinding, Imperative, ProcessAppender, ProcessTailer
from cues.steps.state import Layer
from cues.steps.state_keys import key_segment
from cues.steps.state_view import State
from cues.steps.taking import Input, Slice, Taken

_STATES_MAX: Final = 1_000
"""Keys whose views of the state are kept: they recur."""
LOOK_S: Final = 0.1
"""Seconds between two looks of a source that waits at whether the graph drains."""


class Delivery:
    """The delivery of a call: a sink uses it to ignore repetitions. In a message function it covers one message.

    hash          32 hex digits: the same on every retry of the same messages, never the same for others
    generation    raised by a seek that asks for delivery again
    start, end    dicts by tailer id: what is delivered are the messages [start, end)
    epoch         of this owner; a delivery with a lower epoch than the target has seen is from a previous owner
    store         16 hex digits: the id of the store of the positions; indices and epochs of different
                  stores cannot be compared
    seal(t, i)    checksum of the record batch before index i of tailer t, in hex: a target that keeps it with
                  its position notices that a store was replaced by an older copy. Empty if it is not known
                  (purged), None if the queue ends before i
    """

    __slots__ = ("_digest", "_seals", "end", "epoch", "generation", "start", "store")

    def __init__(
        self,
        digest: bytes,
        generation: int,
        start: dict[str, int],
        end: dict[str, int],
        epoch: int,
        store: str = "",
        seals: Callable[[str, int], str | None] = lambda tailer, index: "",
    ) -> None:
        self._digest = digest
        self._seals = seals
        self.store = store
        self.generation = generation
        self.start = start
        self.end = end
        self.epoch = epoch

    @property
    def hash(self) -> str:
        return self._digest.hex()

    def seal(self, tailer: str, index: int) -> str | None:
        """Return the checksum of the record batch before ``index`` of a tailer of this delivery."""
        return self._seals(tailer, index)

    @override
    def __repr__(self) -> str:
        return f"<cues.Delivery {self.hash} generation {self.generation} {self.start} to {self.end}>"


def key_of(node: Node, message: dict[str, Any]) -> Any:
    """Return the key of a message by ``key=``. Raises :class:`InvalidArgument` if the field is missing or None."""
    key = node.options.key
    if not isinstance(key, str):
        return None if key is None else key(message)
    value = message.get(key)
    if value is None:
        there = "it is None" if key in message else f"it has {', '.join(map(repr, message)) or 'nothing'}"
        import difflib

        near = [] if key in message else difflib.get_close_matches(key, map(str, message), 1)
        raise InvalidArgument(
            f"The message has no {key!r}, the key= of {node.id}; {there}.",
            f"use key={near[0]!r}."
            if near
            else f"add {key!r} to every message; or use key=lambda message: message.get({key!r}).",
        )
    return value


def _instant_ns(at: datetime | float) -> int:
    """Return the time of a timer in nanoseconds since the epoch."""
    return clock.instant_ns(at, "The time of a timer")


@mypyc_attr(allow_interpreted_subclasses=True)
class ProcessCore:
    """The step and the call that a :class:`Process` is about, as the engine sets them. ``Process`` is its face."""

    def __init__(
        self, node: Node, hasher: Hasher, epoch: int, state: Layer | None, stopping: Callable[[], bool]
    ) -> None:
        self.node = node
        self.hasher = hasher
        self.epoch = epoch
        self.layer = state
        self.key = node.options.key
        self.stopping = stopping
        self.waits = True
        """False in a run in which nothing waits (:func:`cues.testing.run_until_idle`)."""
        self.checked: Callable[[Any], Any] | None = None
        """Of a source: raises the error of a message that cannot be written."""
        self.answered: Callable[[], None] = lambda: None
        """Notes that the function of a source has answered: it waits for something new."""
        self.inputs: Sequence[Input] = ()
        """The inputs of the unit, also in a call of its timers."""
        self.taken: Taken | None = None
        self.offset = 0
        self.chosen: list[int] | None = None
        """The offsets of the messages of a batch function that it is called with, if not all."""
        self.connection: Any = None
        self.now_ns = 0
        self.own_state: Any = None
        """The :class:`State` of the key of the message at ``state_offset``: a function asks for it several times."""
        self.state_offset = -1
        """The offset of the message that ``own_state`` is of; -1 if it is of none."""
        self.states_by_key: dict[str | None, State] = {}

    def renew(self, hasher: Hasher, epoch: int) -> None:
        """Follow a new generation or epoch, after a seek."""
        self.hasher = hasher
        self.epoch = epoch

    def use(self, state: Layer | None) -> None:
        """Let the function of a source, which is called now, use this state."""
        self.layer = state
        self.state_offset = -1
        self.states_by_key = {}

    def begin(self, taken: Taken) -> None:
        """Set the current step."""
        self.taken, self.chosen, self.offset = taken, None, 0
        self.now_ns = 0
        self.state_offset = -1

    def end(self) -> None:
        """Clear the current step."""
        self.taken = self.connection = self.own_state = None
        self.state_offset = -1

    def step(self) -> Taken:
        """Return the messages of the current step."""
        if self.taken is None:
            raise CuesError(f"{self.node.key} has no current message.", "use process inside the function.")
        return self.taken

    def key_at(self, offset: int) -> Any:
        """Return the key of the message at ``offset``; of a join, the key of the first input's message."""
        message = (self.taken or self.step()).slices[0].messages[offset]
        value = message.get(self.key) if type(self.key) is str else None  # the usual way, without a call
        return value if value is not None else key_of(self.node, message)

    def lane(self, offset: int) -> Hashable:
        """Return the lane of a message: its packed key. Calls of one lane run one after another."""
        if self.key is None:
            return offset
        try:
            return key_segment(self.key_at(offset))
        except Exception:
            return offset  # the call raises the same error

    def states(self) -> Layer:
        """Return the state, of all keys. Raises :class:`CuesError` if the function cannot have one."""
        node, id = self.node, self.node.key
        if node.options.checkpoint is not None:
            raise CuesError(
                f"{id} has checkpoint=: messages that the target has are not delivered again, so state in the"
                " store would miss them.",
                "keep the state in the target, in the same transaction: use process.connection.",
            )
        if self.layer is None:
            if node.kind == "source":
                raise CuesError(
                    f"{id} is a source that takes no position, so it has no state: what it has read is not known.",
                    "declare def …(position, process), and yield position, message.",
                )
            raise CuesError(
                f"{id} runs up to {node.options.concurrency} calls at once; they would race for the processor's state.",
                "declare key=… (calls of one key run one after another), or concurrency=1.",
            )
        return self.layer

    def fires(self, timer: dict[str, Any]) -> bool:
        """Return whether a due timer is still set, and delete it."""
        states = self.states()
        if states.timer(timer["key"], timer["name"]) != clock.to_ns(timer["at"]):
            return False
        states.set_timer(timer["key"], timer["name"], None)
        return True


@mypyc_attr(allow_interpreted_subclasses=True)
class Process:
    """The argument ``process`` of a function.

    id                    ``graph.processor``; of its unit on partition 3 ``graph.processor/3``. With ``renamed_from=``
                          it stays the id of the first start, because targets know the processor by it
    partition             of the inputs that this unit reads; 0 if they have only one
    opts, system          as the graph was declared
    binding               the input that the message came from (with AnyOf)
    index, indices        index of the message, or of each message of a batch, on its queue
                          (a join: dict by binding)
    metadata              of the message; of the batch's last message in a batch function
    state                 mutable mapping, of the message's key (option ``key``) or of the processor. Of a source that
                          takes its position: its changes are committed with the next message (or None) that it yields
    delivery              :class:`Delivery`; ``delivery_hash`` for short
    connection            of a sink with ``checkpoint=``: the open transaction of this call in its target
    now                   aware datetime, in UTC: the time of this step (with ``concurrency=``: of this call)
    unread(binding)       whether a message waits on an input: :meth:`unread`
    timer(key, at)        call ``timer=`` for a key at a time: :meth:`timer`
    tailers, appenders    by binding: the queues that an imperative function reads and writes itself
    stopping              True when the graph drains: a source that never ends should return
    wait(seconds)         of a source: wait, and return False when the graph drains: :meth:`wait`
    check(message)        of a source: raise the error for which the message would be refused: :meth:`check`
    """

    core_type: ClassVar[type[ProcessCore]] = ProcessCore

    def __init__(
        self,
        node: Node,
        system: Any,
        hasher: Hasher,
        epoch: int,
        store_id: str,
        state: Layer | None,
        stopping: Callable[[], bool],
        imperative: Imperative,
    ) -> None:
        self.id = node.key
        self.partition = node.partition
        self.opts = node.options.opts
        self.system = system
        self.core = self.core_type(node, hasher, epoch, state, stopping)
        """For the engine."""
        self._store_id = store_id
        self._imperative = imperative

    @property
    def stopping(self) -> bool:
        return self.core.stopping()

    def wait(self, seconds: float) -> bool:
        """Wait in the function of a source; return False at once when the graph drains, and the source should return.

        A source that waits has answered: before its first message, its first wait (``wait(0)`` is one) or its end,
        :meth:`Running.wait_idle` does not take it for idle.

        In :func:`cues.testing.run_until_idle` nothing waits: it returns False, because a source that waits is idle. The
        next run calls the source again, with its committed position.
        """
        self.core.answered()
        end = time.monotonic() + seconds
        while self.core.waits and not self.core.stopping():
            left = end - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(left, LOOK_S))
        return False

    def pause(self, seconds: float) -> bool:
        """Do as :meth:`wait`: an older name, which has nothing to do with :func:`cues.pause`."""
        return self.wait(seconds)

    def check(self, message: Any) -> Any:
        """Raise the error for which the queue of this source would refuse what is given, if it were yielded now.

        A message, a list of messages, or a table. Return what the source may yield in its place: a list and a table are
        then not checked again. It may be called in any thread. A source that answers others calls it before it says
        yes: what is wrong with a message (what cannot be stored, its size, its schema, its key) is then said to whoever
        sent it.
        """
        if self.core.checked is None:
            raise CuesError(
                f"{self.id} is not a source: its messages are checked when they are returned.", "return them."
            )
        return self.core.checked(message)

    @property
    def binding(self) -> str:
        return self.core.step().slices[0].binding

    @property
    def index(self) -> Any:
        return self._by_binding(lambda s: s.start + self.core.offset)

    @property
    def indices(self) -> Any:
        chosen = self.core.chosen
        if chosen is None:
            return self._by_binding(lambda s: list(range(s.start, s.stop)))
        return self._by_binding(lambda s: [s.start + offset for offset in chosen])

    @property
    def metadata(self) -> dict[str, Any]:
        taken = self.core.step()
        offset = taken.count - 1 if self.core.node.options.batch else self.core.offset
        fields = taken.provenance().at(offset)
        carried = taken.slices[0]
        index = carried.start + offset
        for batch in carried.batches:
            if batch.first <= index < batch.next and batch.head.hash:
                fields[names.HASH] = batch.head.hash.hex()
            if batch.first <= index < batch.next and batch.delays:
                own = batch.provenance("", frozenset(), index - batch.first, index - batch.first + 1).at(0)
                fields |= {names.DELIVER_AT: own[names.DELIVER_AT]} if names.DELIVER_AT in own else {}
        return fields

    @property
    def state(self) -> State:
        core = self.core
        if core.state_offset != core.offset:
            core.own_state = self._state_of_message()
            core.state_offset = core.offset
        state: State = core.own_state
        return state

    def _state_of_message(self) -> State:
        core = self.core
        value = None
        if core.key is not None:
            if core.node.options.batch:
                raise CuesError(
                    f"{self.id} is a batch function with key=, so its messages have many keys.",
                    "call process.state_of(key).",
                )
            value = core.key_at(core.offset)
            if type(value) is not str:
                return core.states().view(value)
        known = core.states_by_key.get(value)
        if known is None:
            if len(core.states_by_key) == _STATES_MAX:
                core.states_by_key.clear()
            known = core.states_by_key[value] = core.states().view(value)
        return known

    def state_of(self, key: Any) -> State:
        """Return the state of one key."""
        return self.core.states().view(key)

    @property
    def now(self) -> datetime:
        """The time of this step, in UTC: the clock when a call of the step first asks for it."""
        self.core.step()
        self.core.now_ns = self.core.now_ns or clock.now_ns()
        return clock.to_datetime(self.core.now_ns)

    def unread(self, binding: str | None = None) -> bool:
        """Return whether a message waits that this step did not take: on an input, or on any.

        An input without one has been silent; one that has them has only not been read, for example after a pause.
        """
        return any(input.waits() for input in self.core.inputs if binding in (None, input.binding))

    def timer(self, key: Any, at: datetime | float | None, name: str | None = None) -> None:
        """Call the function ``timer=`` of this processor for ``key``, once, at the time ``at`` or soon after it.

        ``at`` is an aware datetime, or seconds since the epoch; None cancels. A key has one timer of each ``name``, so
        a second call replaces the first. A timer is a change of the state: it is written with the step or not at all,
        and a timer in the past fires after this step. Raises :class:`CuesError` without ``timer=``, and
        :class:`InvalidArgument` for a time that is not an instant.
        """
        if self.core.node.options.timer is None:
            raise CuesError(
                f"{self.id} sets a timer, and has no function for it.",
                f"declare one: @graph.timer({self.core.node.options.id!r}), def fire(timer, process): …",
            )
        if name is not None and not isinstance(name, str):
            raise InvalidArgument(f"The name of a timer is {name!r}.", "give a text, or None.")
        self.core.states().set_timer(key, name, None if at is None else _instant_ns(at))

    @property
    def delivery(self) -> Delivery:
        taken = self.core.step()
        if self.core.node.options.batch:
            start, stop, known = 0, taken.count, taken.hash
        else:
            start, stop, known = self.core.offset, self.core.offset + 1, None
        ranges = taken.ranges(start, stop)
        return Delivery(
            known or self.core.hasher.digest(ranges),
            self.core.hasher.generation,
            {tailer: low for tailer, _, low, _ in ranges},
            {tailer: high for tailer, _, _, high in ranges},
            self.core.epoch,
            self._store_id,
            lambda tailer, index: next(s for s in taken.slices if s.tailer == tailer).seal_before(index),
        )

    @property
    def tailers(self) -> ByBinding[ProcessTailer]:
        self.core.step()
        return self._imperative.tailers

    @property
    def appenders(self) -> ByBinding[ProcessAppender]:
        self.core.step()
        return self._imperative.appenders

    @property
    def connection(self) -> Any:
        if self.core.connection is None:
            raise CuesError(
                f"{self.id} has no transaction: a sink has one inside its function, in its checkpoint.",
                "declare it as cues.Sink(…, checkpoint=cues.checkpoints.SQLCheckpoint(…)).",
            )
        return self.core.connection

    @property
    def delivery_hash(self) -> str:
        return self.delivery.hash

    def _by_binding(self, of: Callable[[Slice], Any]) -> Any:
        slices = self.core.step().slices
        if self.core.node.mode == "join":
            return {s.binding: of(s) for s in slices}
        return of(slices[0])

    @override
    def __repr__(self) -> str:
        return f"<cues.Process {self.id}>"


def beside(process: Process, offset: int, state: Layer) -> Process:
    """Return the view of a concurrent call for the message at ``offset``, without the processor's own state."""
    view, core = copy.copy(process), copy.copy(process.core)
    view.core = core
    raced = core.key is None and core.node.options.concurrency > 1
    core.offset = offset
    core.use(None if raced else state)
    return view
