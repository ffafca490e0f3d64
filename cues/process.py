"""The argument ``process`` of a user's function: what it sees of its processor, its message and its delivery."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any

from cues import names
from cues.errors import CuesError
from cues.hashes import Hasher
from cues.imperative import ByBinding, Imperative, ProcessAppender, ProcessTailer
from cues.processor import Node
from cues.provenance import Provenance
from cues.state import Layer, State, key_part
from cues.taking import Slice, Taken


class Delivery:
    """What a sink can make its effects exact with; of a message function, this message's own.

    hash          32 hex digits: the same on every retry of the same messages, never the same for others
    generation    raised by a seek that asks for delivery again
    start, end    dicts by tailer id: what is delivered are the messages [start, end)
    epoch         of this owner; a lower one than the target has seen is a stopped owner that went on
    store         16 hex digits: the id of the store that the positions are in; indices and epochs of
                  another store mean nothing beside them
    """

    __slots__ = ("_digest", "end", "epoch", "generation", "start", "store")

    def __init__(
        self,
        digest: bytes,
        generation: int,
        start: dict[str, int],
        end: dict[str, int],
        epoch: int,
        store: str = "",
    ) -> None:
        self._digest = digest
        self.store = store
        self.generation = generation
        self.start = start
        self.end = end
        self.epoch = epoch

    @property
    def hash(self) -> str:
        return self._digest.hex()

    def __repr__(self) -> str:
        return f"<cues.Delivery {self.hash} generation {self.generation} {self.start} to {self.end}>"


class Process:
    """What a function sees of its processor, as the argument ``process``.

    id                    ``graph.processor``; of its unit on partition 3 ``graph.processor/3``
    partition             of the inputs that this unit reads; 0 where they have but one
    opts, system          as the graph was declared
    binding               the input that the message came from (with AnyOf)
    index, indices        place of the message, or of each message of a batch, on its queue
                          (a join: dict by binding)
    metadata              of the message; of the batch's last message in a batch function
    state                 mutable mapping, of the message's key (option ``key``) or of the processor
    delivery              :class:`Delivery`; ``delivery_hash`` for short
    connection            of a sink with ``checkpoint=``: the transaction in its target that this call is
    tailers, appenders    by binding: what an imperative function reads and writes by itself
    stopping              True when the graph drains: a source that never ends should return
    """

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
        self.id = node.id
        self.partition = node.partition
        self.opts = node.options.opts
        self.system = system
        self._node = node
        self._hasher = hasher
        self._epoch = epoch
        self._store_id = store_id
        self._layer = state
        self._key = node.options.key
        self._stopping = stopping
        self._imperative = imperative
        self._taken: Taken | None = None
        self._offset = 0
        self._provenance: list[Provenance] = []
        """Of what was taken, once somebody asked; calls that run at once share it."""
        self._chosen: list[int] | None = None
        self._connection: Any = None

    def renew(self, hasher: Hasher, epoch: int) -> None:
        """Another generation or epoch (a seek)."""
        self._hasher = hasher
        self._epoch = epoch

    def begin(self, taken: Taken) -> None:
        """A step begins."""
        self._taken, self._provenance, self._chosen, self._offset = taken, [], None, 0

    def end(self) -> None:
        """There is no message any more."""
        self._taken = self._connection = None

    def beside(self, offset: int, state: Layer) -> Process:
        """What the call of the message at ``offset`` sees while others run; the processor's own state is nobody's."""
        view = copy.copy(self)
        view._offset, view._layer = offset, None if self._key is None else state
        return view

    @property
    def stopping(self) -> bool:
        return self._stopping()

    @property
    def binding(self) -> str:
        return self._now().slices[0].binding

    @property
    def index(self) -> Any:
        return self._by_binding(lambda s: s.start + self._offset)

    @property
    def indices(self) -> Any:
        chosen = self._chosen
        if chosen is None:
            return self._by_binding(lambda s: list(range(s.start, s.stop)))
        return self._by_binding(lambda s: [s.start + offset for offset in chosen])

    @property
    def metadata(self) -> dict[str, Any]:
        taken = self._now()
        if not self._provenance:
            self._provenance.append(taken.provenance())
        offset = taken.count - 1 if self._node.options.batch else self._offset
        found = self._provenance[0].at(offset)
        carried = taken.slices[0]
        index = carried.start + offset
        for batch in carried.batches:
            if batch.first <= index < batch.next and batch.head.hash:
                found[names.HASH] = batch.head.hash.hex()
        return found

    @property
    def state(self) -> State:
        key = self._key
        if key is None:
            return self._states().view(None)
        if self._node.options.batch:
            raise CuesError(
                f"{self.id} is a batch function with key=, so its messages have many keys.", "process.state_of(key)."
            )
        # Of a join the first input's message decides.
        message = self._now().slices[0].messages[self._offset]
        return self._states().view(message.get(key) if isinstance(key, str) else key(message))

    def state_of(self, key: Any) -> State:
        """The state of one key."""
        return self._states().view(key)

    @property
    def delivery(self) -> Delivery:
        taken = self._now()
        if self._node.options.batch:
            start, stop, known = 0, taken.count, taken.hash
        else:
            start, stop, known = self._offset, self._offset + 1, None
        ranges = taken.ranges(start, stop)
        return Delivery(
            known or self._hasher.digest(ranges),
            self._hasher.generation,
            {tailer: low for tailer, _, low, _ in ranges},
            {tailer: high for tailer, _, _, high in ranges},
            self._epoch,
            self._store_id,
        )

    @property
    def tailers(self) -> ByBinding[ProcessTailer]:
        self._now()
        return self._imperative.tailers

    @property
    def appenders(self) -> ByBinding[ProcessAppender]:
        self._now()
        return self._imperative.appenders

    @property
    def connection(self) -> Any:
        if self._connection is None:
            raise CuesError(
                f"{self.id} has no transaction: a sink has one inside its function, in its checkpoint.",
                "cues.Sink(…, checkpoint=cues.checkpoints.SQLCheckpoint(…)).",
            )
        return self._connection

    @property
    def delivery_hash(self) -> str:
        return self.delivery.hash

    def lane(self, offset: int) -> Hashable:
        """What the calls of messages have in common that must not run at once: the packed key."""
        key = self._key
        if key is None:
            return offset
        message = self._now().slices[0].messages[offset]
        try:
            return key_part(message.get(key) if isinstance(key, str) else key(message))
        except Exception:
            return offset  # the call will fail of it, if it asks for the state at all

    def _states(self) -> Layer:
        if self._node.options.checkpoint is not None:
            raise CuesError(
                f"{self.id} has checkpoint=: what is in the target already is not presented again, so state in the"
                " store would miss it.",
                "process.connection: keep it in the target, in the same transaction.",
            )
        if self._layer is None:
            if self._node.kind == "source":
                raise CuesError(f"{self.id} is a source; its state is its position.", "yield position, message.")
            raise CuesError(
                f"{self.id} runs up to {self._node.options.concurrency} calls at once; they would race for the"
                " processor's state.",
                "key=… (calls of one key run one after another), or concurrency=1.",
            )
        return self._layer

    def _now(self) -> Taken:
        if self._taken is None:
            raise CuesError(f"{self.id}: there is no message now.", "use process inside the function.")
        return self._taken

    def _by_binding(self, of: Callable[[Slice], Any]) -> Any:
        slices = self._now().slices
        if self._node.mode == "join":
            return {s.binding: of(s) for s in slices}
        return of(slices[0])

    def __repr__(self) -> str:
        return f"<cues.Process {self.id}>"
