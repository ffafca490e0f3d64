"""The data file, read without LMDB: checks before it is mapped, and disk space for writes.

LMDB maps its file as the meta pages describe it, and a map cannot report errors: access to a page that a truncated
file does not have, or that a full disk cannot allocate, is a SIGBUS. So this module checks both, with plain reads and
allocations, and raises errors with a hint.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Final

from cues import codec
from cues.errors import StoreDamaged, StoreForeign, StoreFull, StoreVersion
from cues.records import batch
from cues.storage import door, free_space
from cues.storage.wakeup import ALLOCATED, ROOM

FORMAT: Final = 1
ALWAYS: Final = frozenset({"keys", "seals"})
"""Features that every store requires after its first opening for writing.

``seals``: the rows that had no checksum before have one (sealed.py), and the seals of state cover the keys of the rows.
``keys``: the seals of all rows cover their keys.
"""
FEATURES: Final = ALWAYS | {"blocks", "columns", "unread"}
"""Features that a format record may require beyond format 1; a store that requires others is refused.

``blocks``: the state of a join may have blocks of rows (processors/kept.py); required from the join's first start on.
``columns``: there are records of columns (records/columns.py). A store requires it from its first such record on.
``unread``: the retention of a queue spares what is unread (queues/options.py).
"""
DURABILITIES: Final = ("disk", "process")
PAGE_BYTES: Final = 4096

_META: Final = struct.Struct("=II")
_META_AT: Final = 16
_PAGE_SIZE_AT: Final = _META_AT + 24
_MAP_SIZE_AT: Final = _META_AT + 16
_LAST_PAGE_AT: Final = _META_AT + 120
_TXNID_AT: Final = _LAST_PAGE_AT + 8
_ROOT_AT: Final = _META_AT + 112
"""The root page of the unnamed database, which has the rows and the names of the others."""
_NO_PAGE: Final = (1 << 64) - 1
_LEAF: Final = 2
"""The flag of a page that has keys and values; others have keys and pages."""
_LOOKS: Final = 5
_LOOK_PAGES: Final = 2000
_MAGIC: Final = 0xBEEFC0DE
_DATA_VERSION: Final = 1

COMMIT_PAGES: Final = 24
"""Pages that a small commit may write besides its values: the branches above a few leaves."""
_MARGIN_PAGES: Final = 128
"""Allocated beyond every estimate, for LMDB's own list of free pages."""
_GROW_PAGES_MIN: Final = 256
_GROW_PAGES_MAX: Final = 16384


def pages_of(figures: dict[str, int]) -> int:
    """Return the number of pages of a database, from LMDB's figures."""
    return int(figures["branch_pages"] + figures["leaf_pages"] + figures["overflow_pages"])


def sync_directory(path: Path) -> None:
    """Make the names of the files in a directory durable."""
    directory = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def sync_names(path: Path) -> None:
    """Make the names in a new directory durable, and its own name: up to the root of its file system.

    Which of the directories above are new is not known, because another process may have made them.
    """
    sync_directory(path)
    device = path.stat().st_dev
    for above in path.resolve().parents:
        with contextlib.suppress(PermissionError):  # a directory of others is not new
            if above.stat().st_dev != device:
                return
            sync_directory(above)


def sync_file(path: str | os.PathLike[str]) -> None:
    """Make a file that another program has written durable, and its name as :func:`sync_names` does."""
    sync_directory(Path(path))  # a descriptor for reading syncs a file too
    sync_names(Path(path).parent)


def used(path: Path) -> int:
    """Return the bytes that the data file uses; 0 without a file.

    Refuses a file that is not LMDB's, or is shorter than its meta pages say.
    """
    data = path / "data.mdb"
    try:
        with door.reading(data) as file:
            size = os.fstat(file.fileno()).st_size
            head = file.read(2 * PAGE_BYTES)
    except FileNotFoundError:
        return 0
    metas = []
    for at in range(0, len(head), PAGE_BYTES):
        if len(head) < at + _META_AT + 136:
            break
        magic, version = _META.unpack_from(head, at + _META_AT)
        if magic == _MAGIC:
            last, txnid = struct.unpack_from("=QQ", head, at + _LAST_PAGE_AT)
            metas.append((txnid, last, version))
    if not metas:
        if size < 2 * PAGE_BYTES:
            raise _truncated(path, size, 2 * PAGE_BYTES)
        raise unknown(path, f"The first pages of {data} are not those of an LMDB file.", f"{data} is not an LMDB file.")
    _, last, version = max(metas)
    if version != _DATA_VERSION:
        what = f"{data} has LMDB data version {version}, and Cues uses {_DATA_VERSION}."
        raise unknown(path, what, what)
    if size < (last + 1) * PAGE_BYTES:
        raise _truncated(path, size, (last + 1) * PAGE_BYTES)
    return int(last + 1) * PAGE_BYTES


def cut(path: Path) -> None:
    """Cut the data file to the pages that it uses; the caller holds the register of writers, and is the last of them.

    The file of a ``"process"`` store is as long as its map, so a program that copies holes writes all of it. Another
    process may have the store mapped and not have written: it reads no page beyond the last one, and its first commit
    allocates the pages that it writes (:class:`Allocation`), which makes the file longer again.
    """
    end = used(path)
    fd = door.opened(path / "data.mdb", os.O_RDWR)
    try:
        if os.fstat(fd).st_size > end:
            os.ftruncate(fd, end)
    finally:
        os.close(fd)


def map_bytes(path: Path) -> int:
    """Return the size of the largest map with which a process has committed, from the meta pages."""
    with door.reading(path / "data.mdb") as file:
        head = file.read(2 * PAGE_BYTES)
    return max(int(struct.unpack_from("=Q", head, at + _MAP_SIZE_AT)[0]) for at in (0, PAGE_BYTES))


def row_keys(path: Path, prefix: bytes) -> list[bytes]:
    """Return the keys of the rows that begin with ``prefix``, without opening the store: nothing is locked or written.

    A writer uses the pages of transaction n again from transaction n + 3 on. So what was read is of one moment if at
    most one transaction has committed meanwhile; else it is read again, a few times, and the last result is returned
    as it is. So this is good for suggestions only. At most :data:`_LOOK_PAGES` pages are read. Raises OSError without
    the file, and ValueError or struct.error for pages that are not LMDB's.
    """
    keys: list[bytes] = []
    with door.reading(path / "data.mdb") as file:
        for _ in range(_LOOKS):
            number, root, size = _newest_meta(file.fileno())
            keys = list(_keys_below(file.fileno(), root, size, prefix, [_LOOK_PAGES]))
            if _newest_meta(file.fileno())[0] <= number + 1:
                break
    return keys


def _newest_meta(fd: int) -> tuple[int, int, int]:
    """The number of the last transaction, the root page of the unnamed database, and the size of a page."""
    (size,) = struct.unpack("=I", os.pread(fd, 4, _PAGE_SIZE_AT))
    if size < 256 or size > 1 << 16:
        raise ValueError(size)
    metas = []
    for at in (0, size):
        head = os.pread(fd, _TXNID_AT + 8, at)
        if _META.unpack_from(head, _META_AT) == (_MAGIC, _DATA_VERSION):
            metas.append((*struct.unpack_from("=Q", head, _TXNID_AT), *struct.unpack_from("=Q", head, _ROOT_AT), size))
    return max(metas)


def _keys_below(fd: int, page: int, size: int, prefix: bytes, pages: list[int]) -> Iterator[bytes]:
    """The keys in the tree below a page; ``pages`` is the number of pages that may still be read."""
    if page == _NO_PAGE or pages[0] <= 0:
        return
    pages[0] -= 1
    raw = os.pread(fd, size, page * size)
    flags, lower = struct.unpack_from("=HH", raw, 10)
    nodes = []
    for (at,) in struct.iter_unpack("=H", raw[16:lower]):
        low, high, more, length = struct.unpack_from("=HHHH", raw, at)
        nodes.append((raw[at + 8 : at + 8 + length], low | high << 16 | more << 32))
    if flags & _LEAF:
        yield from (key for key, _ in nodes if key.startswith(prefix))
        return
    ends: list[bytes | None] = [*(key for key, _ in nodes[1:]), None]
    for place, ((key, child), end) in enumerate(zip(nodes, ends)):
        begins_after = place > 0 and key > prefix and not key.startswith(prefix)
        if not begins_after and (end is None or end >= prefix):
            yield from _keys_below(fd, child, size, prefix, pages)


def unknown(path: Path, damaged: str, foreign: str) -> StoreDamaged | StoreForeign:
    """Return the error for a data file that is not a store: damaged if Cues has opened it before, else foreign.

    The first opening of a store makes the files ``locks`` and ``wake``, which show that it is a store.
    """
    if (path / "locks").exists() and (path / "wake").exists():
        return StoreDamaged(
            f"The store {path} is damaged. {damaged}",
            "restore the store from a backup; Cues did not change it.",
            path=str(path),
        )
    return StoreForeign(
        foreign, "use another directory; Cues does not overwrite files that it does not know.", path=str(path)
    )


def carry_on(copy: BinaryIO, txnid: int) -> None:
    """Give a compacted copy the numbers of its original: ``txnid`` in one meta page, ``txnid`` - 1 in the other.

    LMDB gives a copy new numbers, with an empty tree in the first meta page. A process that has opened the data
    file, but not yet LMDB's table of readers, may write the original's number into that table. A transaction
    that begins from this number must find everything, whichever page the number selects.
    """
    copy.seek(0)
    head = copy.read(_PAGE_SIZE_AT + 4)
    size = int(struct.unpack_from("=I", head, _PAGE_SIZE_AT)[0])
    copy.seek(0)
    pages = [copy.read(size) for _ in range(2)]
    latest = max(pages, key=lambda page: int(struct.unpack_from("=Q", page, _TXNID_AT)[0]))
    for number in (txnid - 1, txnid):
        page = bytearray(latest)
        struct.pack_into("=Q", page, 0, number & 1)
        struct.pack_into("=Q", page, _TXNID_AT, number)
        copy.seek((number & 1) * size)
        copy.write(page)


def _truncated(path: Path, size: int, expected: int) -> StoreDamaged:
    return StoreDamaged(
        f"The data file of {path} is truncated: it has {size:,} bytes, and its meta pages say {expected:,}.",
        "restore it from a backup; Cues did not open or change it.",
        path=str(path),
    )


def check_format(path: Path, raw: bytes) -> dict[str, Any]:
    """Decode the format record. Raises :class:`StoreVersion` if this version cannot read the store.

    Its checksum is one of its fields, because every version must be able to read it. An invalid record raises
    :class:`StoreDamaged`; also one that names another format or feature, if its checksum fails.
    """
    damaged = StoreDamaged(
        f"The format record of {path} cannot be read.", "restore the store from a backup.", path=str(path)
    )
    try:
        stored: dict[str, Any] = dict(codec.unpack(raw))
        record = unsealed(stored)
        lacking = set(map(str, record.get("requires", ()))) - FEATURES
    except Exception:
        raise damaged from None
    if "seal" in stored and stored["seal"] != seal_of(record):
        raise damaged
    if record.get("format") != FORMAT or lacking:
        what = f"requires {', '.join(sorted(lacking))}" if lacking else f"has format {record.get('format')}"
        raise StoreVersion(
            f"The store {path} {what}; this version of Cues reads format {FORMAT}.",
            "install a newer version of Cues (pip install -U cues-streams).",
            path=str(path),
            found=record.get("format"),
            supported=FORMAT,
        )
    id = record.get("id")
    if not isinstance(id, bytes) or len(id) != 8 or record.get("durability") not in DURABILITIES:
        raise damaged
    return record


def seal_of(record: dict[str, Any]) -> bytes:
    """Return the checksum of a format record without its seal."""
    return batch.checksum(codec.pack(record))


def unsealed(record: dict[str, Any]) -> dict[str, Any]:
    """Return a format record without its seal."""
    return {name: value for name, value in record.items() if name != "seal"}


class Allocation:
    """Allocates the blocks of the file, in chunks, before they are written.

    It also keeps the file as long as its meta pages say, which :func:`used` checks. All processes share
    a word with the remaining room; each call is made inside a write transaction.
    """

    def __init__(self, path: Path, info: Callable[[], Any], words: Any, free: Callable[[], object]) -> None:
        """``free`` is called before the file grows: it frees pages that killed readers still hold."""
        self._path = path
        self._info = info
        self._words = words
        self._free = free
        self.min_free: int | None = None
        """The limit of free space that a program gave; None for the default, 0 for none (free_space.py)."""
        self.guarded = 0
        """The number of runs of this process that guard the disk themselves, so that steps may use the reserve."""
        self.on_low: Callable[[free_space.Space], object] | None = None
        """Called inside a write transaction when a run is guarded here, and the file grows; it only takes notes."""
        self.run_min_free: int | None = None
        """The limit of that run."""

    def forget(self) -> None:
        """Check the file at the next call, whatever the value of the shared word."""
        self._words[ROOM] = self._words[ALLOCATED] = 0

    def ensure(self, pages: int) -> None:
        """Allocate ``pages`` pages, for which there is no room.

        Raises :class:`StoreFull` when the disk is full, and for a commit with values :class:`DiskLow` when it is low.
        """
        info = self._info()
        used = int(info["last_pgno"]) + 1
        needed = used + pages + _MARGIN_PAGES
        allocated = self._words[ALLOCATED]
        if allocated < needed:
            self._free()
            # The end of the map is not a limit here: LMDB may find free pages, or report that the map is full.
            wanted = needed + min(_GROW_PAGES_MAX, max(_GROW_PAGES_MIN, used // 4))
            wanted = max(used + 1, min(wanted, int(info["map_size"]) // PAGE_BYTES))
            if self.on_low is not None or (self.min_free != 0 and not self.guarded):
                space = free_space.look(self._path, self.min_free if self.on_low is None else self.run_min_free)
                if self.on_low is not None:
                    self.on_low(space)
                elif space.is_low and pages > COMMIT_PAGES:
                    raise free_space.low(self._path, space, "nothing was written")
                wanted = min(wanted, needed + max(0, space.free - space.limit) // PAGE_BYTES)
            # On a disk that is nearly full, allocate only what this commit needs. A commit without values (a purge,
            # a position) uses the margin of the commit before it, so that a full disk can be purged; so does an append
            # of one small message, which may find free pages.
            least = used + pages + (_MARGIN_PAGES if pages > COMMIT_PAGES + 1 else 0)
            if self._allocate(used, wanted):
                allocated = wanted
            elif allocated < least:
                if not self._allocate(used, least):
                    import shutil

                    free = shutil.disk_usage(self._path).free
                    raise StoreFull(
                        f"The disk of the store {self._path} is full ({free:,} bytes free); nothing was written.",
                        "free space on the disk, purge queues, or move the store.",
                        path=str(self._path),
                    )
                allocated = least
            self._words[ALLOCATED] = allocated
        self._words[ROOM] = max(0, allocated - needed)

    def _allocate(self, start: int, end: int) -> bool:
        """Allocate the blocks of the pages from ``start`` to ``end``; return False when the disk is full."""
        if not hasattr(os, "posix_fallocate"):
            return True
        fd = door.opened(self._path / "data.mdb", os.O_RDWR)
        try:
            os.posix_fallocate(fd, start * PAGE_BYTES, (end - start) * PAGE_BYTES)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                return False
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
            # This file system cannot allocate. LMDB may report a full disk, or the full disk is not reported.
            if os.fstat(fd).st_size < end * PAGE_BYTES:
                os.ftruncate(fd, end * PAGE_BYTES)
        finally:
            os.close(fd)
        return True
