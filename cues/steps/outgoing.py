"""Outgoing messages: checked, placed and packed at the moment they are handed over.

    Packer    packs messages for one queue: what a call returned, what it wrote, what a source yielded
    Packed    a packed message with the facts that its bytes do not say
    build     packed messages as pages, under the hash of their step

A function may go on changing what it returned, yielded or wrote. So the queue holds the message as it was
handed over, whatever the size of the step that commits it. And everything that can be wrong with a message
is found here, while its call can still fail alone: nothing of this can fail when the step commits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from cues import codec
from cues.queues.options import QueueOptions
from cues.queues.partitioners import Router
from cues.records import batch as batches
from cues.records import stamps as stamping
from cues.records.batch import Page
from cues.records.provenance import Provenance
from cues.records.stamps import Stamps

_ANY_HASH: Final = bytes(16)
_ANY_STAMP: Final = Stamps(1, 0, stamping.ticks(0, 1))
"""A hash and an identity in the sizes that they have."""


class Packed(bytes):
    """A packed message with the facts that its bytes do not say."""

    place: int | None = None
    """The partition chosen by its key or by a function; None where the append chooses."""
    marked = False
    """Whether it holds ``q/meta`` or ``q/uuid``, which its record's header takes."""


class Packer:
    """Packs the messages for one queue. Safe from any thread, unless the queue's options change."""

    def __init__(self, options_of: Callable[[], QueueOptions]) -> None:
        self._options_of = options_of
        self._options: QueueOptions | None = None
        self.limit_bytes = 0
        self._router: Router | None = None
        self.places = False
        """Whether the message decides its partition."""

    def renew(self) -> Packer:
        """Follow the options that are in force now."""
        options = self._options_of()
        if options is not self._options:
            self.limit_bytes = options.max_message_bytes
            router = Router(options.partitions, options.key, options.partitioner) if options.partitions > 1 else None
            self._router = router if router is not None and router.by_message else None
            self.places = self._router is not None
            self._options = options
        return self

    def pack(self, message: Any, came: Provenance | None = None) -> bytes:
        """Check, place and pack one message; raises what :func:`cues.records.batch.build` and the user's key would.

        ``came`` is its provenance, where that may be too large for a page.
        """
        options = self._options
        assert options is not None
        found = batches.pack_one(message, options.max_message_bytes, options.strips)
        if came and not options.strips:
            self._build_one(message, came)
        if isinstance(found, bytes) and self._router is None:
            return found
        packed = Packed(found if isinstance(found, bytes) else codec.pack(message))
        packed.marked = not isinstance(found, bytes)
        if self._router is not None:
            (packed.place,) = self._router.place([message])
        return packed

    def check(self, packed: bytes, came: Provenance) -> None:
        """Raise what a packed message with this provenance would raise at its commit."""
        options = self._options
        if options is not None and not options.strips:
            self._build_one(codec.unpack_known(packed), came)

    def _build_one(self, message: dict[str, Any], came: Provenance) -> None:
        batches.build([message], batches.OWN_BYTES_MAX, _ANY_HASH, came, stamps=_ANY_STAMP)


def build(
    items: Sequence[bytes], strips: bool, digest: bytes, came: Provenance | None, stamps: Stamps | None = None
) -> list[Page]:
    """Packed messages as pages; ``came`` and ``stamps`` are of as many."""
    limit_bytes = batches.OWN_BYTES_MAX  # sizes were checked when the messages were packed
    if Packed in set(map(type, items)) and any(type(item) is Packed and item.marked for item in items):
        messages = [codec.unpack_known(item) for item in items]
        return batches.build(messages, limit_bytes, digest, came, strips=strips, stamps=stamps)
    return batches.build([], limit_bytes, digest, came, encoded=items, strips=strips, stamps=stamps)


def placed(items: Sequence[bytes]) -> dict[int, list[int]] | None:
    """The offsets of the items by partition; None where the append chooses, for some at least."""
    found: dict[int, list[int]] = {}
    for offset, item in enumerate(items):
        partition = item.place if type(item) is Packed else None
        if partition is None:
            return None
        found.setdefault(partition, []).append(offset)
    return found
