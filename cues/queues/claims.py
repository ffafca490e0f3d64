"""Claims of a consumer group on a log: its reader, the reader's position, and its assignee.

    \\0claim\\0<log>\\0<group>    queue identity, owner, epoch, next index, seal, paused, assignee, checkpoint, checksum

One row a group and partition. The **owner** is the member that reads the partition now, the **assignee** the one
that the group's plan gives it to; while they differ, the partition is on its way from one to the other. The
**epoch** grows with every claim, release and seek. A commit compares owner, epoch and next index with what its messages
were taken under, inside its transaction, and that comparison is the fence: a member that was stopped, and continues
after another took its partitions, finds another epoch there and writes nothing.

The key begins with the log, so that its retention finds every group that reads it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final, NamedTuple

from cues.base import names
from cues.errors import Diverged, InvalidArgument
from cues.queues.log import Log, read_row
from cues.queues.processor_rows import NO_SEAL
from cues.records import sealed
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction, named_rows

NOBODY: Final = bytes(8)
"""The owner of a partition without a reader."""
CHECKPOINT_BYTES_MAX: Final = 3000
"""A row stays within one page. What is larger belongs on a queue, or beside the results."""

_HEAD: Final = struct.Struct(">8s8sQQ8sBH")


class Claim(NamedTuple):
    """One row."""

    identity: bytes
    owner: bytes
    """Incarnation of the member that reads it (8 random bytes), or :data:`NOBODY`."""
    epoch: int
    next: int
    """The index that is read next; everything before it is done with."""
    seal: bytes
    """Checksum of the batch that holds the message before that; zeros where there was none."""
    paused: bool
    assignee: str
    """Name of the member that the plan gives it to; empty where no member reads the queue."""
    checkpoint: bytes
    """Checkpoint that the reader keeps with its position."""

    def pack(self) -> bytes:
        assignee = self.assignee.encode()
        return sealed.seal(_HEAD.pack(*self[:6], len(assignee)) + assignee + self.checkpoint)

    @staticmethod
    def unpack(raw: bytes, log: str, group: str) -> Claim:
        """Raises :class:`StoreDamaged`, which names the group and the log."""
        body = sealed.unseal(raw, f"claim of the group {group!r} on {log}")
        identity, owner, epoch, next, seal, paused, length = _HEAD.unpack_from(body)
        rest = body[_HEAD.size :]
        return Claim(identity, owner, epoch, next, seal, bool(paused), rest[:length].decode(), rest[length:])


def read(txn: StoreTransaction, log: str, group: str) -> Claim | None:
    """The row of a group on a log; None before the group's first plan."""
    raw = txn.get(names.claim_key(log, group))
    return None if raw is None else Claim.unpack(raw, log, group)


def put(txn: StoreTransaction, log: str, group: str, claim: Claim) -> None:
    txn.put(names.claim_key(log, group), claim.pack())


def of_log(txn: StoreTransaction, log: str) -> Iterator[tuple[str, Claim]]:
    """The groups that read a log."""
    for group, raw in named_rows(txn, names.claim_key(log, "")):
        yield group, Claim.unpack(raw, log, group)


def all_rows(store: BaseStore) -> Iterator[tuple[str, str, bytes]]:
    """Log, group and row of every claim of the store, as they are on disk."""
    with store.view() as txn:
        found = list(store.rows(txn, names.CLAIMS))
    for key, raw in found:
        log, _, group = key[len(names.CLAIMS) :].decode("utf-8", "replace").partition("\0")
        yield log, group, raw


def first(txn: StoreTransaction, log: str, assignee: str, latest: bool = False) -> Claim:
    """The row of a group that has never read the log: at its first message, or, with ``latest``, after its last."""
    queue, partition = names.log_parts(log)
    row = read_row(txn, queue, partition)
    return Claim(row.identity, NOBODY, 0, row.next if latest else row.first, NO_SEAL, False, assignee, b"")


def standing(txn: StoreTransaction, log: Log, group: str, claim: Claim) -> Claim:
    """Return the claim with a position after the purged messages. Raises :class:`Diverged` for another log."""
    row = log.row(txn)
    wrong = ""
    if row.identity != claim.identity:
        wrong = (
            f" with identity {claim.identity.hex()}, but the queue there has identity {row.identity.hex()}: it was"
            " made anew."
        )
    elif claim.next > row.next:
        wrong = f", but the queue ends before {row.next}: messages that were read are missing."
    elif claim.seal != NO_SEAL and (seal := log.seal_before(txn, row, claim.next)) not in (NO_SEAL, claim.seal):
        wrong = (
            f" behind a batch with checksum {claim.seal.hex()}, but the batch there has {seal.hex()}: it is another"
            " message."
        )
    if wrong:
        raise Diverged(
            f"The group {group} stands at {claim.next} of queue {log.id!r}{wrong}",
            f"the store that the queue came from, or seek({{({log.queue!r}, {log.partition}): 'start'}}) to start"
            " over.",
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
            "write it to a queue or a file, and keep the name of that as the checkpoint.",
        )
    return checkpoint
