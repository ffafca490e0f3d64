"""Claims of a consumer group on a log: the member that reads it, the position, and the member that is to read it.

    \\0claim\\0<log>\\0<group>    queue identity, owner, epoch, next index, seal, paused, assignee, checkpoint, checksum

There is one row for each group and partition. The **owner** is the member that reads the partition now. The
**assignee** is the member to which the group's plan gives the partition. While they differ, the partition is being
moved from one to the other. The **epoch** grows with every claim, release and seek.

A commit compares owner, epoch and next index with their values when its messages were taken. It does so inside its
transaction. This is the fence: a member that was stopped, and continues after another member took its partitions,
finds another epoch and writes nothing.

The key begins with the log, so that the log's retention finds every group that reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple

from cues.base import logs, names
from cues.base.events import log as logger
from cues.base.texts import quoted
from cues.errors import Diverged, InvalidArgument
from cues.groups import group_rows
from cues.producers import spans
from cues.queues.committed import Isolation, identity_of
from cues.queues.log import Log, read_row
from cues.queues.readers import Kind, Reader, register
from cues.records import sealed
from cues.records.positions import NO_SEAL
from cues.storage import transaction
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction, named_rows

NOBODY: Final = bytes(8)
"""The owner of a partition without a reader."""
CHECKPOINT_BYTES_MAX: Final = 3000
"""A row must fit in one page. A larger checkpoint belongs on a queue, or with the results."""

_HEAD: Final = struct.Struct(">8s8sQQ8sBH")


class Claim(NamedTuple):
    """The claim of one group on one log."""

    identity: bytes
    owner: bytes
    """Incarnation of the member that reads it (8 random bytes), or :data:`NOBODY`."""
    epoch: int
    next: int
    """The index that is read next; all messages before it are done."""
    seal: bytes
    """Checksum of the batch that holds the message before ``next``; zeros if there was none."""
    paused: bool
    assignee: str
    """Name of the member to which the plan gives it; empty if no member reads the queue."""
    checkpoint: bytes
    """Checkpoint that the reader keeps with its position."""

    def pack(self) -> bytes:
        assignee = self.assignee.encode()
        return _HEAD.pack(*self[:6], len(assignee)) + assignee + self.checkpoint

    @staticmethod
    def unpack(key: bytes, raw: bytes, log: str, group: str) -> Claim:
        """Decode a claim. Raises :class:`StoreDamaged`, which names the group and the log."""
        what = f"claim of the group {group!r} on {log}"
        body = sealed.unseal(key, raw, what)
        if len(body) < _HEAD.size:
            raise sealed.damaged(what, f"it has {len(body)} bytes")
        identity, owner, epoch, next, seal, paused, length = _HEAD.unpack_from(body)
        rest = body[_HEAD.size :]
        try:
            assignee = rest[:length].decode()
        except UnicodeDecodeError as error:
            raise sealed.damaged(what, str(error)) from None
        return Claim(identity, owner, epoch, next, seal, bool(paused), assignee, rest[length:])


def read(txn: StoreTransaction, log: str, group: str) -> Claim | None:
    """Return the row of a group on a log; None before the group's first plan."""
    raw = txn.get(key := names.claim_key(log, group))
    return None if raw is None else Claim.unpack(key, raw, log, group)


def put(txn: StoreTransaction, log: str, group: str, claim: Claim) -> None:
    sealed.put(txn, names.claim_key(log, group), claim.pack())


def begin(txn: StoreTransaction, group: str, claims: Mapping[str, Claim]) -> None:
    """Write the first claims of a group on logs. Raises :class:`StoreDamaged` if a row is under another key."""
    transaction.refuse_lost(txn)
    for log, claim in claims.items():
        put(txn, log, group, claim)


def of_log(txn: StoreTransaction, log: str) -> Iterator[tuple[str, Claim]]:
    """Iterate over the groups that read a log, with their claims."""
    for group, key, raw in named_rows(txn, names.claim_key(log, "")):
        yield group, Claim.unpack(key, raw, log, group)


def all_rows(store: BaseStore) -> Iterator[tuple[str, str, bytes]]:
    """Iterate over log, group and row of every claim of the store, as they are on disk."""
    with store.core.view() as txn:
        rows = list(transaction.rows(txn, names.CLAIMS))
    for key, raw in rows:
        log, _, group = key[len(names.CLAIMS) :].decode("utf-8", "replace").partition("\0")
        yield log, group, raw


def first(txn: StoreTransaction, log: str, assignee: str, isolation: Isolation) -> Claim:
    """Return a claim of a group on a log that it has not read, at the first message."""
    queue, partition = names.split_log(log)
    row = read_row(txn, queue, partition)
    identity, index = row.identity, row.first
    if isolation == "committed":
        identity, index = identity_of(identity), spans.place_of(txn, log, index)
    return Claim(identity, NOBODY, 0, index, NO_SEAL, False, assignee, b"")


def check_isolation(txn: StoreTransaction, log: str, group: str, claim: Claim, isolation: Isolation) -> None:
    """Raise :class:`InvalidArgument` if the group reads the log with the other isolation."""
    records = read_row(txn, *names.split_log(log)).identity
    was = {records: "uncommitted", identity_of(records): "committed"}.get(claim.identity, isolation)
    if was != isolation:
        raise InvalidArgument(
            f"The group {group!r} reads {log!r} with isolation={was!r}, and a member asks for {isolation!r}: messages"
            " would be lost or repeated.",
            f"pass isolation={was!r}, or use another group.",
        )


def standing(txn: StoreTransaction, log: Log, group: str, claim: Claim) -> Claim:
    """Return the claim, moved past purged messages. Raises :class:`Diverged` if the log is another one."""
    row = log.row(txn)
    wrong = ""
    if row.identity != claim.identity:
        wrong = (
            f" with identity {claim.identity.hex()}, but the queue in the store has identity"
            f" {row.identity.hex()}: it was made again."
        )
    elif claim.next > row.next:
        wrong = f", but the queue ends before {row.next}: messages that were read are missing."
    elif claim.seal != NO_SEAL and (seal := log.seal_before(txn, row, claim.next)) not in (NO_SEAL, claim.seal):
        wrong = (
            f" after a batch with checksum {claim.seal.hex()}, but the batch there has {seal.hex()}: it holds other"
            " messages."
        )
    if wrong:
        raise Diverged(
            f"The group {group} is at index {claim.next} of queue {log.id!r}{wrong}",
            "restore the store that the queue came from, or start again with"
            f" seek({{({log.queue!r}, {log.partition}): 'start'}}).",
            processor=group,
        )
    return claim if claim.next >= row.first else claim._replace(next=row.first, seal=NO_SEAL)


def check_checkpoint(checkpoint: object) -> bytes:
    """Return ``checkpoint`` if it may be kept with a position, else raise :class:`InvalidArgument`."""
    if not isinstance(checkpoint, bytes):
        raise InvalidArgument(
            f"A checkpoint is bytes, found {type(checkpoint).__name__}.",
            "pass bytes, such as json.dumps(value).encode().",
        )
    if len(checkpoint) > CHECKPOINT_BYTES_MAX:
        raise InvalidArgument(
            f"The checkpoint has {len(checkpoint):,} bytes; at most {CHECKPOINT_BYTES_MAX:,} are kept with a position.",
            "write it to a queue or a file, and keep its name as the checkpoint.",
        )
    return checkpoint


def _readers(txn: StoreTransaction, log: Log) -> Iterator[Reader]:
    for group, claim in of_log(txn, log.id):
        yield Reader(GROUPS, log.store.id, f"group {group}", claim.identity, claim.next, False)


def _group(reader: Reader) -> str:
    return reader.name.removeprefix("group ")


def _hint(reader: Reader, log: str, store: str) -> str:
    return f"cues forget {quoted(store)}#group:{quoted(_group(reader))}"


def _expired(txn: StoreTransaction, store: BaseStore, reader: Reader) -> bool:
    return group_rows.expired(txn, store, _group(reader))


def _forget(txn: StoreTransaction, log: Log, reader: Reader) -> None:
    group = _group(reader)
    group_rows.delete(txn, group)
    text = "the group %s is forgotten: it had no member for its expire_s, and retention of %s waited for it"
    say = partial(logger.warning, text, group, log.id, group=group, **logs.of_log(log.id))
    log.store.core.afterwards.append(say)


GROUPS: Final = Kind("group", _readers, _hint, _expired, _forget)
"""Consumer groups. The name of a reader is the word ``group``, and the name of the group."""
register(GROUPS)
