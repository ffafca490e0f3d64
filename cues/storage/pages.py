"""The pages of a data file, read without LMDB: for the check of its structure, and for a salvage.

    page 0, 1    the meta pages: the roots after the last two commits
    free tree    by transaction, the pages that are free
    main tree    the unnamed database; entries with a flag are the roots of the named databases
    other pages  branches, leaves, and overflow pages with the values that fit no leaf

LMDB follows page numbers without a look at where they lead, so a wrong one may end the process, or give the pages of
one database to another. This module trusts no number: a page must have its own number, the expected kind and keys
within the bounds of its branch, and each page of the file is either free or named exactly once (:class:`Census`). A
page that is wrong is told with the range of keys that it had, and the walk continues with the next one.

Nothing is locked. The caller holds a read transaction, or no process writes to the store.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

META_PAGES: Final = 2
_MAGIC: Final = 0xBEEFC0DE
_DATA_VERSION: Final = 1
_META: Final = struct.Struct("=IIQQ")
"""Of a meta page, from byte 16 on: magic number, version, address, size of the map. The two roots follow."""
_ROOT: Final = struct.Struct("=IHHQQQQQ")
_LAST: Final = struct.Struct("=QQ")
"""After the roots: the last page, and the number of the transaction."""
_HEAD: Final = struct.Struct("=QHHHH")
_HEAD_BYTES: Final = 16
_META_BYTES: Final = _HEAD_BYTES + _META.size + 2 * _ROOT.size + _LAST.size
_NODE: Final = struct.Struct("=HHHH")
_BRANCH, _LEAF, _OVERFLOW = 1, 2, 4
_INTEGER_KEYS: Final = 8
_NO_DIRECTORY: Final = 0x4000
"""A flag of the environment, which LMDB keeps with those of the list of free pages: how the file was made."""
_BIG, _ROOT_NODE = 1, 2
"""Flags of a node of a leaf: its value is on overflow pages; its value is a root."""
_DEPTH_MAX: Final = 32
_NONE: Final = (1 << 64) - 1


class Root(NamedTuple):
    """The root of a tree, with the counts that LMDB keeps."""

    pad: int
    flags: int
    page: int
    depth: int
    branches: int
    leaves: int
    overflows: int
    entries: int


class Meta(NamedTuple):
    """The state after one commit."""

    txnid: int
    last: int
    """The last page that was ever used."""
    free: Root
    main: Root


class Entry(NamedTuple):
    """A key with its value; or, for a named database, with its root."""

    key: bytes
    value: bytes
    root: Root | None = None


class Lost(NamedTuple):
    """A range of keys, to ``high`` exclusive (None: to the end), of which at least one cannot be read."""

    low: bytes
    high: bytes | None
    why: str


class WrongPage(Exception):
    """A page, or an entry of one, that cannot be what its place says; the text is the reason."""


class _Node(NamedTuple):
    key: bytes
    flags: int
    size: int
    """The size of the value; on a branch, the page."""
    at: int
    """The offset of the value in the page."""


Claim = Callable[[int, int, str, int], None]
"""Called with a page that is named, the number of pages from it on, the database, and the kind of the pages; raises
:class:`WrongPage`."""


def _root(raw: bytes, at: int) -> Root:
    pad, flags, depth, branches, leaves, overflows, entries, page = _ROOT.unpack_from(raw, at)
    return Root(pad, flags, page, depth, branches, leaves, overflows, entries)


class DataFile:
    """An open data file."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.bytes = os.fstat(fd).st_size
        self.page_bytes = 0
        self.metas = sorted(self._metas(), reverse=True)
        """The states that the meta pages describe, the last commit first. Empty if neither is one of LMDB."""

    def _metas(self) -> Iterator[Meta]:
        for page_bytes in (4096, 16384, 65536, 8192, 32768):
            for number in range(META_PAGES):
                raw = os.pread(self.fd, _META_BYTES, number * page_bytes)
                if len(raw) < _META_BYTES or self.page_bytes not in (0, page_bytes):
                    continue
                magic, version, _, _ = _META.unpack_from(raw, _HEAD_BYTES)
                at = _HEAD_BYTES + _META.size
                last, txnid = _LAST.unpack_from(raw, at + 2 * _ROOT.size)
                pages: int = struct.unpack_from("=I", raw, at)[0]
                # LMDB writes transaction n into meta page n & 1; the first two pages of a new file are both 0.
                if (magic, version, pages) == (_MAGIC, _DATA_VERSION, page_bytes) and (
                    txnid & 1 == number or not txnid
                ):
                    self.page_bytes = page_bytes
                    yield Meta(txnid, last, _root(raw, at), _root(raw, at + _ROOT.size))

    def page(self, number: int, kind: int, size: int = 0) -> bytes:
        """Read a page of a kind, or its first ``size`` bytes. Raises :class:`WrongPage`."""
        size = size or self.page_bytes
        raw = os.pread(self.fd, size, number * self.page_bytes) if number < 1 << 48 else b""
        if len(raw) < size:
            raise WrongPage(f"page {number} is beyond the end of the file")
        found, _, flags, _, _ = _HEAD.unpack_from(raw)
        if found != number:
            raise WrongPage(f"page {number} has the number {found}")
        if flags != kind:
            raise WrongPage(f"page {number} is of kind {flags:#x} and should be of kind {kind:#x}")
        return raw

    def nodes(self, number: int, kind: int) -> tuple[bytes, list[_Node | None]]:
        """Return a page and its nodes in order; None for a node that has no place in it."""
        raw = self.page(number, kind)
        lower, upper = _HEAD.unpack_from(raw)[3:]
        if not _HEAD_BYTES <= lower <= upper <= self.page_bytes or lower % 2:
            raise WrongPage(f"page {number} says that it is filled to {lower} and from {upper}")
        return raw, [self._node(raw, kind, upper, *at) for at in struct.iter_unpack("=H", raw[_HEAD_BYTES:lower])]

    def _node(self, raw: bytes, kind: int, upper: int, at: int) -> _Node | None:
        if not upper <= at <= self.page_bytes - _NODE.size:
            return None
        low, high, flags, length = _NODE.unpack_from(raw, at)
        start = at + _NODE.size + length
        key = raw[at + _NODE.size : start]
        size = low | high << 16
        if kind == _BRANCH:
            return None if start > len(raw) else _Node(key, 0, size | flags << 32, start)
        there = 8 if flags & _BIG else size
        if start + there > len(raw) or flags not in (0, _BIG, _ROOT_NODE) or not length:
            return None
        return None if flags == _ROOT_NODE and size != _ROOT.size else _Node(key, flags, size, start)

    def walk(
        self, root: Root, name: str, claim: Claim, ordered: bool = True, values: bool = True
    ) -> Iterator[Entry | Lost]:
        """Iterate over the entries of a tree, in the order of its pages, and over what is lost of it.

        With a ``claim`` that raises for a page, what is there is lost. The keys of the list of free pages are integers,
        and are not ``ordered`` as bytes are. Without ``values`` only the heads of overflow pages are read.
        """
        if root.page == _NONE:
            if root.entries:
                yield Lost(b"", None, f"there is no root for {root.entries} entries")
            return
        if not 1 <= root.depth <= _DEPTH_MAX:
            yield Lost(b"", None, f"the tree has a depth of {root.depth}")
            return
        stack: list[tuple[int, int, bytes, bytes | None]] = [(root.page, root.depth, b"", None)]
        while stack:
            number, level, low, high = stack.pop()
            kind = _LEAF if level == 1 else _BRANCH
            try:
                raw, nodes = self.nodes(number, kind)
                if root.depth == 1 and len(nodes) != root.entries:
                    raise WrongPage(f"page {number} has {len(nodes)} entries instead of {root.entries}")
                inside = [
                    node if not ordered or self._fits(node, low, high, kind, place) else None
                    for place, node in enumerate(nodes)
                ]
                if not any(inside):
                    raise WrongPage(f"no entry of page {number} can be read, or has a key within its bounds")
                claim(number, 1, name, kind)
            except WrongPage as error:
                yield Lost(low, high, str(error))
                continue
            # The bounds of the node at a place are its own key and the next key that can be read.
            ends: list[bytes | None] = [high] * len(inside)
            for place in range(len(inside) - 2, -1, -1):
                after = inside[place + 1]
                ends[place] = ends[place + 1] if after is None else after.key
            before, below = low, []
            for place, node in enumerate(inside):
                if node is None:
                    yield Lost(before, ends[place], f"entry {place} of page {number} cannot be read")
                elif kind == _BRANCH:
                    below.append((node.size, level - 1, low if place == 0 else node.key, ends[place]))
                else:
                    yield self._entry(raw, node, name, claim, values)
                    before = node.key + b"\0"
                if node is not None and kind == _BRANCH:
                    before = node.key
            stack.extend(reversed(below))

    @staticmethod
    def _fits(node: _Node | None, low: bytes, high: bytes | None, kind: int, place: int) -> bool:
        """Return whether the key of a node is within the bounds; the first node of a branch has no key."""
        if node is None or (kind == _BRANCH and place == 0):
            return node is not None
        return node.key >= low and (high is None or node.key < high)

    def _entry(self, raw: bytes, node: _Node, name: str, claim: Claim, values: bool) -> Entry | Lost:
        if node.flags == _ROOT_NODE:
            return Entry(node.key, b"", _root(raw, node.at))
        if node.flags != _BIG:
            return Entry(node.key, raw[node.at : node.at + node.size])
        (number,) = struct.unpack_from("=Q", raw, node.at)
        pages = (_HEAD_BYTES + node.size + self.page_bytes - 1) // self.page_bytes
        try:
            first = self.page(number, _OVERFLOW, 0 if values else _HEAD_BYTES)
            (found,) = struct.unpack_from("=I", first, 12)
            if found != pages:
                raise WrongPage(f"page {number} is the first of {found} pages instead of {pages}")
            claim(number, pages, name, _OVERFLOW)
            if not values:
                return Entry(node.key, b"")
            value = first[_HEAD_BYTES:] + os.pread(
                self.fd, (pages - 1) * self.page_bytes, (number + 1) * self.page_bytes
            )
            if len(value) < node.size:
                raise WrongPage(f"page {number} is cut by the end of the file")
        except WrongPage as error:
            return Lost(node.key, node.key + b"\0", str(error))
        return Entry(node.key, value[: node.size])


class Census:
    """A count of the pages after one commit: each must be free, or named once.

    It finds every wrong page number: the page that should have been named is then not named. Of a page that is
    named twice it cannot be said which name is right, so :meth:`claim` gives it to no owner.
    """

    def __init__(self, file: DataFile, meta: Meta, told: Callable[[int, int], None] = lambda done, total: None) -> None:
        self.file = file
        self.meta = meta
        self.problems: list[str] = []
        """What is wrong with the structure, one sentence each."""
        self.bad: dict[int, str] = {}
        """Pages that may not be read, with the reason."""
        self.is_readable = True
        """False if a part of a tree with rows cannot be read: LMDB may end the process there."""
        self._told = told
        self._done = 0
        self._kinds: dict[str, dict[int, int]] = {}
        """The number of pages of each kind, by database."""
        end = min(meta.last + 1, file.bytes // file.page_bytes)
        self._named = bytearray(end)
        self._free = bytearray(end)
        self._freed: set[int] = set()
        """Pages that the last commit freed."""
        self._count(end)

    def claim(self, number: int, pages: int, name: str, kind: int) -> None:
        """Raise :class:`WrongPage` for a page that is free, or that is named more than once."""
        for page in range(number, number + pages) if self.bad else ():
            if page in self.bad:
                raise WrongPage(self.bad[page])

    def follows(self, before: Meta) -> bool:
        """Return whether this commit came after that one.

        Each commit writes the first page of the rows anew, and frees the one before. If a wrong bit made the number of
        the last commit smaller by two, LMDB takes the one before it for the last, and this shows it. A compacted store
        has one state under both numbers.
        """
        return not before.main.entries or before.main == self.meta.main or before.main.page in self._freed

    def _count(self, end: int) -> None:
        whole = self._list_free()
        for page in range(META_PAGES):
            self._named[page : page + 1] = b"\1"
        roots = [("the rows of the store", self.meta.main)]
        for name, root in roots:  # grows
            found, last, lost = 0, b"", False
            for entry in self.file.walk(root, name, self._name, values=False):
                if isinstance(entry, Lost):
                    self.problems.append(f"A part of {name} cannot be read: {entry.why}.")
                    lost, self.is_readable = True, False
                    continue
                if entry.key <= last:
                    self.problems.append(f"The keys of {name} are out of order at {entry.key[:40]!r}.")
                found, last = found + 1, entry.key
                if entry.root is not None:
                    roots.append((f"the database {entry.key.decode(errors='backslashreplace')}", entry.root))
            if not lost:
                self._compare(name, root, found, 0)
        if not whole:
            self.problems.append("The list of free pages cannot be read, so free pages are not known.")
            return
        for page in range(end):
            if self._free[page] and self._named[page]:
                self.bad[page] = f"page {page} is free, but it is named"
                self.problems.append(f"Page {page} is free, but it is named.")
        unnamed = [page for page in range(end) if not self._free[page] and not self._named[page]]
        if unnamed and not self.problems:
            some = ", ".join(map(str, unnamed[:5])) + (" …" if len(unnamed) > 5 else "")
            self.problems.append(f"The pages {some} ({len(unnamed)} in all) are neither free nor named.")

    def _compare(self, name: str, root: Root, entries: int, flags: int) -> None:
        """Compare a root with what was found of its tree; its padding is zero, but that of the free list has a size."""
        kinds = self._kinds.get(name, {})
        branches, leaves, overflows = (kinds.get(kind, 0) for kind in (_BRANCH, _LEAF, _OVERFLOW))
        pad, flags = (self.file.page_bytes, flags | root.flags & _NO_DIRECTORY) if flags else (0, 0)
        found = Root(pad, flags, root.page, root.depth if entries else 0, branches, leaves, overflows, entries)
        if root != found:
            self.problems.append(f"The root of {name} says {root[1:]}, and its pages say {found[1:]}.")

    def _list_free(self) -> bool:
        """Note the free pages; return whether the whole list can be read."""
        entries = list(self.file.walk(self.meta.free, "the list of free pages", self._name, ordered=False))
        for entry in entries:
            if isinstance(entry, Lost) or len(entry.key) != 8 or len(entry.value) < 8 or len(entry.value) % 8:
                return False
            count, *pages = struct.unpack(f"={len(entry.value) // 8}Q", entry.value)
            # LMDB may reserve more room than it fills, so the count is what counts.
            (txnid,) = struct.unpack("=Q", entry.key)
            if count > len(pages) or txnid > self.meta.txnid:
                return False
            if txnid == self.meta.txnid:
                self._freed.update(pages[:count])
            for page in pages[:count]:
                if not META_PAGES <= page < len(self._free) or self._free[page]:
                    return False
                self._free[page] = 1
        self._compare("the list of free pages", self.meta.free, len(entries), _INTEGER_KEYS)
        return len(entries) == self.meta.free.entries

    def _name(self, number: int, pages: int, name: str, kind: int) -> None:
        for page in range(number, number + pages):
            if page >= len(self._named):
                raise WrongPage(f"page {page} is beyond the last one")
            if self._named[page]:
                self.bad[page] = f"page {page} is named twice, the second time in {name}"
                raise WrongPage(self.bad[page])
        for page in range(number, number + pages):
            self._named[page] = 1
        kinds = self._kinds.setdefault(name, {})
        kinds[kind] = kinds.get(kind, 0) + pages
        self._done += pages
        self._told(self._done, len(self._named))
