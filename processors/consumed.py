"""Files of a source that go when all their messages are committed: ``after="delete"`` or ``"move:DIR"``.

    1. read      a file to its end; its row of state (known_files.py) says so
    2. commit    the last messages, the position and the row, by the engine
    3. finish    delete or move the file, if it is as it was when it was read
    4. sync      the directory: else a power cut could bring back a file whose row is forgotten
    5. forget    the row, with the next commit, so that a later file of this name is read

A kill between 2 and 5 leaves a row of a file that was read; the next start repeats 3 to 5. So no file goes before its
messages are committed, and none is read twice. A file is moved by a link and an unlink, so nothing in the other
directory is replaced: of two files of one name, the second one gets a number.

An object of a store is copied and deleted by the thread of the source: when the store is away, the source waits, and
does it again. The ETag and the time say whether the object is as it was; a store that says neither is refused. One
that was overwritten since it was read is a new object, which is read, too. An object of the same name and bytes that is
in the directory, and is not older, is the copy of a run that was killed.

Not guaranteed: that a program does not write to a file between the look at it and its deletion, or writes the same
bytes to an object within the same second; and that a power cut brings no file back to a directory that may not be
read, which cannot be synced. With ``durability="process"`` of the store, a power cut may take back the
messages of a file that is deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fnmatch
import glob
import itertools
import logging
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from cues.checkpoints import sync_directory, sync_names
from cues.errors import InvalidArgument
from cues.processors import listings, opened_file, places
from cues.processors.known_files import Known

KEEP: Final = "keep"
_MOVE: Final = "move:"
_TURN_S: Final = 1.0
"""Seconds for which objects are deleted or moved before the source reads on."""
_NO_LINKS: Final = frozenset((errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS))
"""Errors of filesystems that have no hard links."""

_log = logging.getLogger("cues.processors")


class Consumed:
    """The files of one start of a source. The engine's thread commits; that of the source does the rest."""

    def __init__(self, after: str, pattern: str) -> None:
        """Raises :class:`cues.errors.InvalidArgument` for a value of ``after=`` that cannot be done."""
        self.after, self.pattern = after, pattern
        self.root = fixed(pattern)
        self.is_remote = places.is_remote(pattern)
        self.directory = _absolute(after.removeprefix(_MOVE)) if after.startswith(_MOVE) else None
        if after not in (KEEP, "delete") and not after.removeprefix(_MOVE).strip():
            raise InvalidArgument("after='move:' names no directory.", "give one, as in after='move:done'.")
        if after not in (KEEP, "delete") and self.directory is None:
            raise InvalidArgument(f"after={after!r:.60} is unknown.", "use 'keep', 'delete' or 'move:DIR'.")
        if self.directory is not None and _store(self.directory) != _store(pattern):
            raise InvalidArgument(
                f"after={after!r} is in another place than {pattern}, so no file can be moved to it.",
                "give a directory of the same bucket or filesystem.",
            )
        if self.directory is not None and _takes(pattern, self.directory, self.is_remote):
            raise InvalidArgument(
                f"after={after!r} moves files to where {pattern} finds them, and they would be read again.",
                "move them to a directory that the pattern does not match.",
            )
        self._waiting: deque[tuple[int, Known]] = deque()
        self._gone: deque[str] = deque()
        self._due: deque[Known] = deque()
        """Objects whose messages are committed."""

    @property
    def is_on(self) -> bool:
        """True if files are deleted or moved when their messages are committed."""
        return self.after != KEEP

    @property
    def waits(self) -> bool:
        """True if files that were read are not committed."""
        return bool(self._waiting)

    def again(self) -> Consumed:
        """Return the same for another start. What the former one has read, and has not committed, is forgotten.

        Raises :class:`cues.errors.InvalidArgument` for a directory to which no file can be renamed.
        """
        if self.directory is not None and not self.is_remote:
            os.makedirs(self.directory, exist_ok=True)
            if os.path.isdir(self.root) and os.stat(self.directory).st_dev != os.stat(self.root).st_dev:
                raise InvalidArgument(
                    f"after={self.after!r} is on another filesystem than {self.root}, so no file can be renamed to it.",
                    "give a directory of the same filesystem.",
                )
        return Consumed(self.after, self.pattern)

    def read(self, serial: int, row: Known) -> None:
        """Note that a file was read to its end, which is committed with the position of this serial."""
        if self.is_on:
            self._waiting.append((serial, row))

    def committed(self, serial: int) -> None:
        """Finish the files that are committed."""
        while self._waiting and self._waiting[0][0] <= serial:
            _, row = self._waiting[0]
            if self.is_remote:
                self._due.append(row)
            elif self.finish(row):
                self._gone.append(row.identity.name)
            self._waiting.popleft()  # afterwards: the source waits for it

    @property
    def has_gone(self) -> bool:
        """True if files are gone, or may go, since the last call of :meth:`gone`."""
        return bool(self._gone or self._due)

    def gone(self, looks: listings.Looks) -> list[str]:
        """Return the names of the files that are durably gone since the last call.

        Delete or move objects for a second.
        """
        until = time.monotonic() + _TURN_S
        while isinstance(looks.where, places.Remote) and self._due and time.monotonic() < until:
            if self._finish_object(looks.where, self._due[0]):
                self._gone.append(self._due[0].identity.name)
            else:
                looks.whole()
            self._due.popleft()
        names = [self._gone.popleft() for _ in range(len(self._gone))]
        for folder in () if self.is_remote else {os.path.dirname(name) for name in names}:
            with contextlib.suppress(FileNotFoundError, PermissionError):  # it was removed, or may not be read
                sync_directory(Path(folder))
        return names

    def resumed(self, rows: list[Known], entries: Mapping[str, places.Stat]) -> None:
        """Finish the files that an earlier run has read: ``rows`` of those, ``entries`` of all that are there."""
        for row in rows:
            name = row.identity.name
            if name in entries and self.is_remote:
                self._due.append(row)
            elif name not in entries or self.finish(row):
                self._gone.append(name)

    def check(self, entries: Mapping[str, places.Stat]) -> None:
        """Raise :class:`cues.errors.InvalidArgument` for an object of which it cannot be known whether it changes."""
        name = next((name for name, stat in entries.items() if not stat.tag), None)
        if self.is_on and self.is_remote and name is not None:
            raise InvalidArgument(
                f"after={self.after!r} needs the ETags or times of objects, and the store says none of {name}.",
                "use after='keep'; rules of the store can delete objects.",
            )

    def _finish_object(self, where: places.Remote, row: Known) -> bool:
        name = row.identity.name
        try:
            stat = where.stat(name)
            is_later = abs(stat.modified - row.modified) >= 1.0  # some stores say parts of seconds only in listings
            if is_later or (stat.size, stat.tag.encode()) != (row.size, row.end):
                _log.info("%s has changed since it was read, so it is read again (after=%r).", name, self.after)
                return False
            if self.directory is not None:
                base, directory = where.name(self.pattern), where.name(self.directory)
                base = base if name.startswith(f"{base}/") else where.name(fixed(self.pattern))
                target = f"{directory}/{os.path.relpath(name, base)}"
                next(one for one in _numbered(target) if where.copy(name, one))
            where.delete(name)
        except FileNotFoundError:
            return True
        except NotImplementedError:
            raise InvalidArgument(
                f"after={self.after!r}: the filesystem of {self.pattern} has no deletion of objects, or no copy.",
                "use after='keep'; rules of the store can delete objects.",
            ) from None
        return True

    def finish(self, row: Known) -> bool:
        """Delete or move a file whose messages are committed; return whether it is gone."""
        name = row.identity.name
        try:
            with open(name, "rb") as file:
                found = os.fstat(file.fileno())
                stat = places.Stat(found.st_dev, found.st_ino, found.st_size, found.st_mtime)
                if not row.is_as(stat) or not row.end or opened_file.end_of(file) != row.end:
                    _log.warning("%s has changed since it was read, so it stays (after=%r).", name, self.after)
                    return False
            if self.directory is None:
                os.unlink(name)
            else:
                _move(name, os.path.join(self.directory, os.path.relpath(name, self.root)))
        except FileNotFoundError:
            return True
        except OSError as error:
            _log.warning("%s was read, and stays: %s (after=%r). The next start tries again.", name, error, self.after)
            return False
        return True


def _move(name: str, target: str) -> None:
    """Move a file, and replace none. A kill leaves it at both places, and a second call ends that."""
    folder = Path(target).parent
    folder.mkdir(parents=True, exist_ok=True)
    for one in _numbered(target):
        try:
            os.link(name, one)
            break
        except FileExistsError:
            if os.path.samefile(name, one):
                break
        except OSError as error:
            if error.errno not in _NO_LINKS or os.path.lexists(one):
                raise
            sync_names(folder)  # else a power cut may take a new directory back, with the file
            os.rename(name, one)
            sync_directory(folder)
            return
    sync_names(folder)  # else a power cut may leave it at neither place
    os.unlink(name)


def _numbered(target: str) -> Iterator[str]:
    """Yield a path, and the same with 2, 3, … before its ending."""
    yield target
    folder, last = os.path.split(target)
    stem, dot, ending = last.partition(".") if not last.startswith(".") else (last, "", "")
    for number in itertools.count(2):
        yield os.path.join(folder, f"{stem}.{number}{dot}{ending}")


def _absolute(directory: str) -> str:
    return directory.rstrip("/") if places.is_remote(directory) else os.path.abspath(places.local_path(directory))


def _store(path: str) -> str:
    """The scheme and the bucket or host of a URL; empty for a path of this machine."""
    return "/".join(path.split("/")[:3]) if places.is_remote(path) else ""


def fixed(pattern: str) -> str:
    """The directory of a pattern up to its first wildcard."""
    if os.path.isdir(pattern):
        return pattern
    folder = os.path.dirname(pattern)
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)
    return folder or "."


def _takes(pattern: str, directory: str, is_remote: bool) -> bool:
    """Return whether a pattern may find files in a directory, or in one below it that is made for them."""
    inside = os.path.join(glob.escape(pattern), "*")
    patterns = [inside] if os.path.isdir(pattern) else [pattern]
    if is_remote and not glob.has_magic(pattern):  # an object, or a directory
        patterns.append(inside)
    folders = os.path.abspath(directory).split(os.sep)
    # A moved file keeps its directories below the fixed part of the pattern.
    return any(
        _matches(parts, [*folders, *["?"] * more], is_remote)
        for parts in (os.path.abspath(one).split(os.sep) for one in patterns)
        for more in range(1, len(parts))
    )


def _matches(pattern: list[str], parts: list[str], hidden: bool) -> bool:
    """Return whether parts of a path match those of a pattern; ``?`` is any name.

    ``hidden``: wildcards match names that begin with a point, as in fsspec.
    """
    if not pattern:
        return not parts
    if pattern[0] == "**":
        points = (at for at, part in enumerate(parts) if part.startswith(".") and not hidden)
        seen, rest = next(points, len(parts)), pattern[1:] or ["*"]
        return any(_matches(rest, parts[at:], hidden) for at in range(seen + 1))
    if not parts:
        return False
    is_hidden = parts[0].startswith(".") and not pattern[0].startswith(".") and not hidden
    is_same = parts[0] == "?" or (not is_hidden and fnmatch.fnmatchcase(parts[0], pattern[0]))
    return is_same and _matches(pattern[1:], parts[1:], hidden)
