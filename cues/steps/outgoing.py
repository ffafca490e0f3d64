"""Outgoing messages: checked, placed and packed at the moment they are handed over.

    Packer    packs messages for one queue: returned, written, or yielded by a source
    Packed    a packed message with facts that are not in its bytes
    build     packed messages as pages, under the hash of their step

A function may change a message after it has returned, yielded or written it. The queue gets the message as
it was handed over, whatever the size of the step that commits it. Every fault of a message is found here,
while its call can still fail alone, so a message cannot make the commit of the step fail.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol

from cues import codec
from cues.base import names
from cues.errors import CodecError, CuesError
from cues.native import mypyc_attr
from cues.queues.base import PartitionShare, shares_of
from cues.queues.options import QueueOptions
from cues.queues.partitioners import EVERY, Router, is_watermark
from cues.records import batch as batches
from cues.records import columns
from cues.records import stamps as stamping
from cues.records.batch import Page
from cues.records.provenance import Provenance
from cues.records.stamps import Stamps

_WATERMARK: Final = names.WATERMARK.encode()
_ANY_HASH: Final = bytes(16)
_ANY_STAMP: Final = Stamps(1, 0, stamping.ticks(0, 1))
"""A hash and an identity of the right sizes, to test the size of a record."""


class HasOptions(Protocol):
    """The core of a queue, or another object with the options of one, which may become others."""

    @property
    def options(self) -> QueueOptions: ...


class FixedOptions(NamedTuple):
    """The options of a queue that stay as they are."""

    options: QueueOptions


@mypyc_attr(native_class=False)
class Packed(bytes):
    """A packed message with facts that are not in its bytes."""

    place: int | None = None
    """The partition chosen by its key or by a function; EVERY for a watermark; None if the append chooses."""
    marked = False
    """True if it has ``q/meta`` or ``q/uuid``, which are stored in the header of its record."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Packer:
    """Packs the messages for one queue. Safe from any thread, unless the queue's options change."""

    def __init__(self, queue: HasOptions) -> None:
        self.queue: HasOptions = queue
        self.options: QueueOptions | None = None
        self.limit_bytes = 0
        self._router: Router | None = None
        self.places = False
        """True if the message decides its partition."""

    def renew(self) -> Packer:
        """Return a packer with the present options of the queue."""
        options = self.queue.options
        if options is not self.options:
            self.limit_bytes = options.max_message_bytes
            router = Router(options.partitions, options.key, options.partitioner) if options.partitions > 1 else None
            self._router = router if router is not None and router.by_message else None
            self.places = self._router is not None
            self.options = options
        return self

    def pack(self, message: Any, provenance: Provenance | None = None) -> bytes:
        """Check, place and pack one message; raises the errors of :func:`cues.records.batch.build` and of the key.

        ``provenance`` is its provenance, if that may be too large for a page.
        """
        if provenance is None and type(message) is dict and self._router is None:
            # Most messages have no reserved keys and are small enough. The long way says why the others are refused.
            try:
                quick = codec.pack(message)
                if len(quick) <= self.limit_bytes and not (batches.SLASH in quick and batches.has_mark(quick)):
                    return quick
            except CodecError:
                pass
        options = self.options
        assert options is not None
        body = batches.pack_one(message, options.max_message_bytes, options.strips)
        if provenance and not options.strips:
            self._build_one(message, provenance)
        if isinstance(body, bytes) and self._router is None:
            return body
        packed = Packed(body if isinstance(body, bytes) else codec.pack(message))
        packed.marked = not isinstance(body, bytes)
        if self._router is not None:
            (packed.place,) = self._router.place([message])
        return packed

    def table(self, value: Any) -> tuple[Any, list[PartitionShare] | None]:
        """Check the rows of a table, as :meth:`pack` does a message; return a ``pyarrow.Table``, and its partitions.

        The partitions are None if the append chooses them.
        """
        options = self.options
        assert options is not None
        table = columns.checked(columns.table_of(value))
        for _ in columns.cut(table, options.max_message_bytes):
            pass  # a row beyond the limit is refused
        return table, None if self._router is None else shares_of(self._router.place_table(table), options.partitions)

    def check(self, packed: bytes, provenance: Provenance) -> None:
        """Raise the error that a packed message with this provenance would raise at its commit."""
        options = self.options
        if options is not None and not options.strips:
            self._build_one(codec.unpack_known(packed), provenance)

    def _build_one(self, message: dict[str, Any], provenance: Provenance) -> None:
        batches.build([message], batches.OWN_BYTES_MAX, _ANY_HASH, provenance, stamps=_ANY_STAMP)


def build(
    items: Sequence[bytes],
    strips: bool,
    digest: bytes | None,
    provenance: Provenance | None,
    stamps: Stamps | None = None,
) -> list[Page]:
    """Build pages of packed messages; ``provenance`` and ``stamps`` have an entry for each message."""
    if len(items) == 1 and type(items[0]) is bytes:
        page = batches.build_one(items[0], digest, None if strips else provenance, stamps)
        if page is not None:
            return [page]
    limit_bytes = batches.OWN_BYTES_MAX  # sizes were checked when the messages were packed
    if Packed in set(map(type, items)) and any(type(item) is Packed and item.marked for item in items):
        messages = [codec.unpack_known(item) for item in items]
        return batches.build(messages, limit_bytes, digest, provenance, strips=strips, stamps=stamps)
    return batches.build([], limit_bytes, digest, provenance, encoded=items, strips=strips, stamps=stamps)


def build_error(
    record: dict[str, Any], digest: bytes, provenance: Provenance, stamps: Stamps | None = None
) -> list[Page]:
    """Build the pages of an error message; ``provenance`` is that of what failed."""
    limit_bytes = batches.OWN_BYTES_MAX
    try:
        return batches.build([record], limit_bytes, digest, provenance, reserved=True, stamps=stamps)
    except CuesError:  # q/meta of several inputs together may fit no page; this may be the failure itself
        return batches.build([record], limit_bytes, digest, reserved=True, stamps=stamps)


def place_of(item: bytes) -> int | None:
    """The partition of an item, or EVERY; None if the append chooses."""
    if type(item) is Packed and item.place is not None:
        return item.place
    return EVERY if _WATERMARK in item and is_watermark(codec.unpack_known(item)) else None


def placed(items: Sequence[bytes]) -> dict[int, list[int]] | None:
    """The offsets of the items by partition; None if the append chooses, for any of them."""
    offsets: dict[int, list[int]] = {}
    for offset, item in enumerate(items):
        partition = item.place if type(item) is Packed else None
        if partition is None or partition == EVERY:
            return None
        offsets.setdefault(partition, []).append(offset)
    return offsets
