"""The rows of consumer groups and their members; groups that have no members.

    \\0group\\0<group>              generation, planned, changes, used, expire, checksum
    \\0member\\0<group>\\0<name>     msgpack of the member's row, checksum

A member lives while it holds the lock of its name and its lease has not expired. The lease is a file, which each call
of a living member writes. So the time of its last write is the time at which a killed member was last alive.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from cues import codec
from cues.base import clock, names
from cues.errors import StoreReadOnly
from cues.graphs.processor_rows import boot
from cues.records import sealed
from cues.storage import leases, locks, transaction
from cues.storage.base_store import BaseStore
from cues.storage.transaction import StoreTransaction

_GROUP: Final = struct.Struct(">QQQQd")


class GroupRow(NamedTuple):
    """The row of a group."""

    generation: int = 0
    """Grows when a member joins or leaves."""
    planned: int = 0
    """The generation for which the assignees in the claims were planned."""
    changes: int = 0
    """Grows with every change that members must react to."""
    used_ns: int = 0
    """Wall time of the last change: a member that joined or left, a plan, a seek. 0 in a row of an older version."""
    expire_s: float = 0.0
    """Seconds without a member after which the group may be forgotten; 0: never."""

    def pack(self) -> bytes:
        return _GROUP.pack(*self)


_MEMBER: Final[list[Any]] = [bytes, int, bytes, (float, int), bool, int, [str, ...]]


@dataclass(frozen=True, slots=True)
class MemberRow:
    """The row of a member."""

    id: bytes
    """8 random bytes, drawn at each join. They are the owner in its claims."""
    pid: int
    boot: bytes
    lease_s: float
    static: bool
    """True if it was given a name. Its place is then kept for the length of its lease after it closes or dies."""
    kept_ns: int
    """The time of the monotonic clock until which the place of a closed member is kept; 0 while it runs."""
    queues: tuple[str, ...]
    """The names of the queues that it subscribes to, sorted."""
    together: tuple[tuple[str, ...], ...] = ()
    """Sets of these queues that belong together: partitions of one number go to one member. Sorted."""
    patterns: tuple[str, ...] = ()
    """Patterns whose queues it subscribes to, also those that are made later."""

    def set_of(self, queue: str) -> tuple[str, ...]:
        """Return the queues to which ``queue`` belongs; itself alone if there are none."""
        return next((queues for queues in self.together if queue in queues), (queue,))

    def pack(self) -> bytes:
        row: list[object] = [self.id, self.pid, self.boot, self.lease_s, self.static, self.kept_ns, list(self.queues)]
        if self.together or self.patterns:
            row += [[list(queues) for queues in self.together], list(self.patterns)]
        return codec.pack(row)

    @staticmethod
    def unpack(key: bytes, raw: bytes, name: str) -> MemberRow:
        """Read a row. Raises :class:`StoreDamaged`, which names the member."""
        id, pid, boot, lease_s, static, kept_ns, queues, *more = sealed.unseal_value(
            key, raw, f"row of the group member {name!r}", (_MEMBER, [*_MEMBER, [[str, ...], ...], [str, ...]])
        )
        together, patterns = more or ((), ())
        sets = tuple(map(tuple, together))
        return MemberRow(id, pid, boot, lease_s, static, kept_ns, tuple(queues), sets, tuple(patterns))


def read(txn: StoreTransaction, group: str) -> GroupRow:
    """Return the row of a group; one of zeros if there is none."""
    raw = txn.get(key := names.group_key(group))
    return GroupRow() if raw is None else unpack_group(key, raw, group)


def unpack_group(key: bytes, raw: bytes, group: str) -> GroupRow:
    """Decode the row of a group. Raises :class:`StoreDamaged`."""
    what = f"row of the group {group!r}"
    body = sealed.unseal(key, raw, what)
    if len(body) > _GROUP.size:
        raise sealed.damaged(what, f"it has {len(body)} bytes, not {_GROUP.size}")
    return GroupRow._make(_GROUP.unpack(body.ljust(_GROUP.size, b"\0")))  # older rows are shorter


def members(txn: StoreTransaction, group: str) -> dict[str, MemberRow]:
    """Return the members of a group by name, also closed ones whose place is kept."""
    rows = transaction.named_rows(txn, names.member_key(group, ""))
    return {name: MemberRow.unpack(key, raw, name) for name, key, raw in rows}


def lock_of(group: str, name: str) -> int:
    """Return the byte of the lock file that a member keeps locked while it lives."""
    return locks.offset_of(f"\0member\0{group}\0{name}")


def alive(store: BaseStore, group: str, name: str, row: MemberRow) -> bool:
    """Return whether a member lives: it holds its lock, and its lease has not expired."""
    if row.kept_ns or row.boot != boot():
        return False
    offset = lock_of(group, name)
    try:
        held = store.core.locks.mine(offset) or store.core.locks.holder(offset) is not None
    except StoreReadOnly:  # without locks there are no members
        return False
    return held and left_s(store, row) > 0


def left_s(store: BaseStore, row: MemberRow) -> float:
    """Return the seconds for which a member that does not answer keeps its place; 0 or less after that."""
    if row.boot != boot():
        return 0.0
    if row.kept_ns:
        return (row.kept_ns - clock.monotonic_ns()) / 1e9
    return leases.left_s(store, row.id, row.lease_s)


def idle_since_ns(txn: StoreTransaction, store: BaseStore, group: str) -> int | None:
    """Return the wall time since which a group has no member; None if it has one, 0 if the time is not known.

    A closed member whose place is kept counts as a member until the end of its lease.
    """
    rows = members(txn, group)
    for name, row in rows.items():
        if alive(store, group, name, row) or (row.static and left_s(store, row) > 0):
            return None
    return max([read(txn, group).used_ns, *[leases.beaten_ns(store, row.id) for row in rows.values()]])


def expired(txn: StoreTransaction, store: BaseStore, group: str) -> bool:
    """Return whether a group may be forgotten: it had no member for the time that its members asked for."""
    expire_s = read(txn, group).expire_s
    if not expire_s:
        return False
    since_ns = idle_since_ns(txn, store, group)
    return since_ns is not None and clock.now_ns() - since_ns > expire_s * 1e9


def delete(txn: StoreTransaction, group: str) -> bool:
    """Delete all rows of a group; returns False if there are none."""
    suffix = b"\0" + group.encode()
    rows = [key for key, _ in transaction.rows(txn, names.CLAIMS) if key.endswith(suffix)]
    rows += [key for key, _ in transaction.rows(txn, names.member_key(group, ""))]
    rows += [key for key in (names.group_key(group),) if txn.get(key) is not None]
    for key in rows:
        txn.delete(key)
    return bool(rows)
