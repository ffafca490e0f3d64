"""Many growing logs of one pattern, each followed through its rotations as tail.py follows one: ``follow="each"``.

    position = [version, serial, current, offset, line, log]          the log under way, its file, and the place in it
    state[log, 0] = [current, offset, line, problem, device, since]   the place in a log that is not under way
    state[log, n] = [device, inode, size, …]                          its n-th rotated file, as in tail.py

A *log* is a name that the pattern matches, with its rotated files. The engine commits position and rows together with
the messages, so each record is on the queue once. Records of one log are in their order; logs take turns.

A look lists the directories once. It reads on only in logs of which a file is not as it was, so hundreds that are quiet
cost little. A name belongs to a log as follows; of several rules the first one counts:

    a log that is known, whatever it looks like                        app-20260131.log, when it came as a log
    a known log, compressed                                            app.log.gz
    a number, a date, `old` or `bak` after a log                       app.log.1, app.log.2026-01-31, app.log.old
    a date of six digits or more, also before the ending               app.log-20260131, app-20260131.log
    a name that the pattern matches, and that is not compressed        a log, but not app.log.1 for the pattern ``*``

``rotated=`` replaces the third and fourth: ``"{stem}.*{ending}"`` for app.1.log, ``"old/{name}.*"`` for another folder.
``*`` is a number, a date, ``old`` or ``bak``.

Rotated files that are there before the first start are taken for read; those of a log that comes later are not. A log
that gets another name of the pattern continues under it. A log of which no file is there at two looks is forgotten,
with all its rows, and a later one of its name is new; but not while its directory is away, or on another device.
"""

from __future__ import annotations

import copy
import fnmatch
import glob
import itertools
import logging
import os
import re
import resource
import stat as modes
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import suppress
from typing import Any, Final, Protocol

from cues.errors import Diverged, InvalidArgument
from cues.processors import consumed, places, tail
from cues.processors.known_files import Progress, packed_identity, packed_name, read_identity
from cues.processors.opened_file import checksum, is_damage

ROWS_MAX: Final = 16
"""Rows of each log for rotated files that are gone and may be restored."""

_TURN: Final = 1_000
"""Records of one log until others have their turn."""
_OPEN_MAX: Final = 1_000
"""Logs whose files are open, at most half of those that the process may open. Others are opened when they grow."""
_AGAIN_S: Final = 5.0
"""Seconds until a log that cannot be opened is tried again."""
_LISTINGS_SHARE: Final = 10
"""The directories are listed again after so many times the time that a listing takes."""
_STEP_NS: Final = 50_000_000
"""A directory that was changed so shortly before it was listed is listed again: its time may stay the same."""
_COARSE_NS: Final = 2_000_000_000
"""The same for a time without a fraction of a second, as some network file systems have it."""
_KINDS_MAX: Final = 100_000
"""Names of which it is kept to which log they belong."""
_DATE_DIGITS: Final = 6
_STAMP: Final = r"\d[\dTZ_.:+-]*"
_MARK: Final = rf"(?:{_STAMP}|old|bak)"
_NUMBERED: Final = re.compile(rf"(?P<name>.+?)\.{_MARK}", re.ASCII)
_ROTATION: Final = re.compile(r"(?P<name>.*[A-Za-z_].*)\.\d{1,3}", re.ASCII)
"""``app.log.1`` is not a log also if ``*`` is the pattern; 10.0.0.1, the address of a machine, is."""
_DATED: Final = (
    re.compile(rf"(?P<name>.+?)-(?P<stamp>{_STAMP})", re.ASCII),
    re.compile(rf"(?P<stem>.+?)[-_.](?P<stamp>{_STAMP})(?P<ending>\.[A-Za-z]\w*)", re.ASCII),
)

_log = logging.getLogger("cues.processors")

Names = dict[str, places.Stat]


class Source(tail.Source, Protocol):
    """The options of :class:`cues.processors.file_source.Files` that are needed here."""

    poll_s: float


class Naming:
    """The names of logs and of their rotated files, by the pattern and ``rotated=``."""

    def __init__(self, pattern: str, rotated: str | None, is_folder: bool = False) -> None:
        """``is_folder``: the pattern is a directory, of which all files are logs.

        Raises :class:`cues.errors.InvalidArgument` for a template that names no log.
        """
        self.is_folder = is_folder
        folder, last = (glob.escape(pattern), "*") if is_folder else os.path.split(pattern)
        self._folder, last = (pattern, "*") if last == "**" else (folder, last)
        self._is_path = not glob.has_magic(last)
        self._is_log = re.compile(fnmatch.translate(last)).match
        self.root = pattern if is_folder else consumed.fixed(pattern)
        self._below, self._template = "", None
        if rotated is not None:
            self._below, template = os.path.split(rotated)
            if not re.search(r"\{(name|stem)\}", template) or "{" in re.sub(r"\{(name|stem|ending)\}", "", template):
                raise InvalidArgument(
                    f"rotated={rotated!r:.80} with follow='each' does not tell to which log a file belongs.",
                    "give a name with {name}, as in 'old/{name}.*'; or with {stem} and {ending}: '{stem}.*{ending}'.",
                )
            if os.path.isabs(self._below) or os.pardir in self._below.split(os.sep) or glob.has_magic(self._below):
                raise InvalidArgument(
                    f"rotated={rotated!r:.80} with follow='each' is not below the directory of the logs.",
                    "give a path from this directory, without wildcards: 'old/{name}.*'.",
                )
            self._template = re.compile(_regex_of(template))
        self._known: dict[str, tuple[bool, str | None]] = {}

    def folders(self) -> list[str]:
        """Return the directories of logs and rotated files that are there."""
        folder = self._folder
        found = glob.glob(os.path.join(folder, ""), recursive=True) if glob.has_magic(folder) else [folder]
        names = sorted({os.path.join(name, "") if name else "" for name in found})
        return [os.path.join(name, part) for name in names for part in {"", self._below}]

    def names(self, path: str) -> bool:
        """Return whether the pattern matches the path of a log."""
        folder, last = os.path.split(path)
        parts, patterns = ([part for part in name.split(os.sep) if part] for name in (folder, self._folder))
        return self._is_log(last) is not None and _is_below(parts, patterns)

    def kind(self, path: str) -> tuple[bool, str | None]:
        """Return whether a path may be a log, and the log of which it may be a rotated file."""
        found = self._known.get(path)
        if found is None:
            folder, last = os.path.split(path)
            log = self._log_of(folder, last)
            is_log = (
                self._is_log(last) is not None
                and not (log is not None and self._template is None and _is_rotation(last, log))
                and places.compression_of(last) is None
                and (self._is_path or places.is_complete(last))
            )
            if len(self._known) > _KINDS_MAX:
                self._known.clear()
            found = self._known[path] = is_log, log
        return found

    def _log_of(self, folder: str, last: str) -> str | None:
        if not places.is_complete(last):
            return None
        plain, log = places.plain_name(last), None
        if self._template is not None:
            if self._below and folder != self._below and not folder.endswith(os.sep + self._below):
                return None
            folder = folder[: len(folder) - len(self._below)].rstrip(os.sep) if self._below else folder
            log = _filled(self._template.fullmatch(plain) or self._template.fullmatch(last))
        elif found := _NUMBERED.fullmatch(plain):
            log = _filled(found)
        else:
            matches = (pattern.fullmatch(plain) for pattern in _DATED)
            found = next((m for m in matches if m and len(re.sub(r"\D", "", m["stamp"])) >= _DATE_DIGITS), None)
            log = _filled(found)
        if log is None and plain != last:
            log = plain
        return None if log is None or self._is_log(log) is None else os.path.join(folder, log)

    def beside(self, path: str) -> str:
        """Return the directory of the rotated files of a log."""
        return os.path.join(os.path.dirname(path), self._below)


class Folder:
    """The names in a directory that may be logs or rotated files."""

    def __init__(self, changed: int, folder: str, entries: list[str], naming: Naming) -> None:
        """``changed``: the time of its last change, in nanoseconds."""
        self.changed = changed
        self.paths: list[str] = []
        self.rotated: defaultdict[str, list[str]] = defaultdict(list)
        """By the name of a log, the files that may be its rotated ones."""
        for path in (os.path.join(folder, entry) for entry in entries):
            is_log, log = naming.kind(path)
            plain = places.plain_name(path)
            for name in {log, plain} - {None, path}:
                self.rotated[name].append(path)  # type: ignore[index]
            if is_log or log is not None or plain != path:
                self.paths.append(path)


class Log:
    """One log: where its reading is, and the reader."""

    def __init__(self, owner: Families, name: str, rows: dict[int, Any]) -> None:
        own = copy.copy(owner.source)
        own.pattern, own.tails = name, True
        self.name, self.key, self._state = name, packed_name(name), owner.state
        current, offset, line, self.problem, self.device, *since = rows.get(0) or [[], 0, 0, b"", 0]
        self.since = since[0] if since else 0.0
        """The first start of the source, if rotated files that were there could not be read then, nor since."""
        self.place = Progress(0, read_identity(current), offset, line)
        self._noted = self.place if 0 in rows else None
        self.tail = tail.Tail(own, owner.state, self.key, owner, ROWS_MAX, rows)
        self.idle: tail.Idle | None = None
        """There was nothing more to be read, at the last turn."""
        self.seen: Names = {}
        """The files of the log before the last turn."""
        self.missing = 0
        """The looks one after the other at which no file was there."""
        self.tried = 0.0
        """When it could not be opened."""
        self._records: Iterator[tuple[Progress, Any]] | None = None

    def records(self) -> Iterator[tuple[Progress, Any]]:
        if self._records is None:
            self._records = self.tail.records(self.place)
        return self._records

    def inode(self) -> tuple[int, ...]:
        """Device and inode of the file under way; none if nothing of it was opened."""
        if self.tail.opened is not None:
            return self.tail.opened.start_stat[:2]
        return () if self.place.current is None else self.place.current[1:3]

    def close(self) -> None:
        if self._records is not None:
            self._records.close()  # type: ignore[attr-defined]
            self._records = None

    def note(self, always: bool = False) -> None:
        """Write the place to the state, for the next commit."""
        if always or self._noted is None or self.place[1:4] != self._noted[1:4]:
            self._noted = self.place
            current = packed_identity(self.place.current)
            row = [current, self.place.offset, self.place.line, self.problem, self.device, self.since]
            self._state[self.key, 0] = row

    def forget(self) -> None:
        self.close()
        self.tail.forget()
        with suppress(KeyError):
            del self._state[self.key, 0]


class Families:
    """The records of all logs of a pattern."""

    def __init__(self, source: Source, state: MutableMapping[Any, Any], waiting: tail.Waiting) -> None:
        self.source, self.state, self._waiting = source, state, waiting
        self._where = places.Local()
        rows: defaultdict[str, dict[int, Any]] = defaultdict(dict)
        for key, row in state.items():
            if type(key) is tuple:
                rows[os.fsdecode(key[0])][key[1]] = row
        self._rows = rows
        self._naming = Naming(source.pattern, source.rotated, self._is_folder(rows))
        # A log that the pattern does not name any more keeps its rows, and is not read.
        self._logs = {name: Log(self, name, rows[name]) for name in sorted(rows) if self._naming.names(name)}
        self._current: Log | None = None
        self._serial = 0
        self._is_blind = False
        """A directory could not be listed at the last look."""
        self._folders: dict[str, Folder] = {}
        self._at_paths: set[tuple[int, ...]] = set()
        """Device and inode of the files that were at the paths of logs at the last look."""
        self._of_links: dict[str, str] = {}
        """Names without a file of which a link has a rotated one, and the link: it may be away for a moment."""
        self._open_max = max(16, min(_OPEN_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))

    def records(self, place: Progress) -> Iterator[tuple[list[Any], Any]]:
        """Yield the records after ``place``, each with the position after it, until the source ends."""
        self._serial, is_first = place.serial, place == Progress()
        if place.log:
            log = self._logs.get(place.log) or Log(self, place.log, self._rows[place.log])
            log.place = place._replace(serial=0, log="")
            if self._naming.names(log.name):
                self._current = self._logs[log.name] = log
            else:
                log.note(always=True)
        elif place.current is not None:
            raise Diverged(
                f"The position is in {place.current.name}, and not in one of several logs.",
                "give the source another id, which begins at the start; or leave out follow='each'.",
            )
        try:
            while True:
                begun = time.monotonic()
                found = self._look()
                until = time.monotonic() + max(self.source.poll_s, _LISTINGS_SHARE * (time.monotonic() - begun))
                if self._arrange(found, is_first):
                    yield self._position(), None
                is_first = False
                ready = [log for log in self._logs.values() if self._has_more(log, found)]
                for log in ready:
                    log.seen, log.idle = found.get(log.name, {}), None
                moved = False
                while ready:
                    for log in ready:
                        for after, item in self._turn(log):
                            yield after, item
                            self._waiting.moved()
                            moved = True
                    ready = [log for log in ready if log.idle is None]
                    if time.monotonic() > until:
                        break
                self._close_some()
                logs = self._logs.values()
                at_end = all(log.idle is not None and log.idle.at_end and log.missing != 1 for log in logs)
                if not (moved or ready) and not self._waiting.wait(at_end, until - time.monotonic()):
                    return
        finally:
            for log in self._logs.values():
                log.close()

    def _position(self) -> list[Any]:
        log = self._current
        place = Progress() if log is None else log.place._replace(log=log.name)
        return place._replace(serial=self._serial).packed()

    def _turn(self, log: Log) -> Iterator[tuple[list[Any], Any]]:
        """Yield some records of one log, each with the position after it."""
        try:
            if log.since:
                log.tail.begin(log.place, log.since)
                log.since = 0.0
                log.note(always=True)
            for after, item in itertools.islice(log.records(), _TURN):
                if isinstance(item, tail.Idle):
                    log.place, log.idle = after, item
                    if log is not self._current:
                        log.note()
                    return
                self._enter(log, after)
                yield self._position(), item
        except (OSError, InvalidArgument) as error:
            if not isinstance(error, InvalidArgument) and not is_damage(error, remote=False):
                raise
            log.close()
            log.idle, log.tried = tail.Idle(), time.monotonic()
            problem = f"it cannot be read: {error}"
            said = checksum(problem.encode("utf-8", "replace"))
            if log.problem != said:  # else it was said, perhaps at an earlier start
                self._enter(log, log.place)
                log.problem = said
                log.note(always=True)
                self._serial += 1
                yield self._position(), self.source.bad_file(log.name, log.place, problem)
            return

    def _enter(self, log: Log, after: Progress) -> None:
        """Move the position to a place in a log. The place in the log before becomes a row."""
        if log is not self._current:
            if self._current is not None:
                self._current.note()
            self._current = log
            self._serial += 1
            log.note()
        elif after.serial != log.place.serial:
            self._serial += 1
        log.place = after
        if log.problem and log.tail.opened is not None:
            log.problem = b""
            log.note(always=True)
            _log.info("%s can be read again.", log.name)

    def _has_more(self, log: Log, found: dict[str, Names]) -> bool:
        if log.tried and time.monotonic() - log.tried < _AGAIN_S:
            return False
        if log.tried or log.idle is None or not log.idle.at_end:
            log.tried = 0.0
            return True
        files = found.get(log.name, {})
        # A file that was deleted grows unseen.
        return files != log.seen or (log.tail.opened is not None and log.inode() not in map(_inode, files.values()))

    def _close_some(self) -> None:
        opened = [log for log in self._logs.values() if log.tail.opened is not None]
        for log in opened[: max(0, len(opened) - self._open_max)]:
            if log.idle is not None and log.idle.at_end:
                log.close()

    # --- which logs there are ---

    def _is_folder(self, logs: Iterable[str]) -> bool:
        """Return whether the pattern is a directory, or one that is away, of which there are logs."""
        pattern = self.source.pattern
        return os.path.isdir(pattern) or any(name.startswith(os.path.join(pattern, "")) for name in logs)

    def _look(self) -> dict[str, Names]:
        """Return the files that are there by log, its rotated files too."""
        if self._is_folder(self._logs) != self._naming.is_folder:  # it was made later
            self._naming = Naming(self.source.pattern, self.source.rotated, not self._naming.is_folder)
            self._folders.clear()
        self._is_blind = False
        folders = [self._folder(folder) for folder in self._naming.folders()]
        listed = _stats(path for folder in folders for path in folder.paths)
        found: dict[str, Names] = {}
        for name in self._logs.keys() - listed.keys():
            with suppress(OSError):
                listed[name] = self._where.stat(name)
        for path, stat in listed.items():
            log = self._owner(path, listed)
            if log is not None:
                found.setdefault(log, {})[path] = stat
        self._at_paths = {files[name][:2] for name, files in found.items() if name in files}
        return found

    def _folder(self, folder: str) -> Folder:
        """Return the names in a directory; none if it is not there, or may not be listed."""
        begun = time.time_ns()
        try:
            changed = os.stat(folder or ".").st_mtime_ns
            known = self._folders.get(folder)
            if known is None or known.changed != changed:
                known = Folder(changed, folder, os.listdir(folder or "."), self._naming)
                # Names may change at the same moment of a clock that moves in steps.
                if changed < begun - (_STEP_NS if changed % 1_000_000_000 else _COARSE_NS):
                    self._folders[folder] = known
            return known
        except OSError as error:
            self._folders.pop(folder, None)
            self._is_blind = self._is_blind or not isinstance(error, (FileNotFoundError, NotADirectoryError))
            return Folder(0, folder, [], self._naming)

    def _owner(self, path: str, listed: Names) -> str | None:
        """Return the log to which a listed file belongs; see the module."""
        if path in self._logs:
            return path
        is_log, log = self._naming.kind(path)
        plain = places.plain_name(path)
        if plain != path and plain in self._logs:
            return plain
        if log is not None and log not in self._logs and log not in listed:
            log = self._of_links.get(log, log)
        if log is not None and (log in self._logs or (log in listed and self._naming.kind(log)[0])):
            return log
        return path if is_log else log

    def members(self, name: str) -> Names:
        """Return the rotated files of a log. Those of a link are beside the file that it names."""
        found: Names = {}
        if os.path.islink(name):
            real = os.path.realpath(name)
            found = self._beside(real)
            base = self._naming.kind(real)[
                1
            ]  # glog: prog.INFO -> prog.host.log.INFO.20260131, without a file at the base
            if base is not None and not os.path.lexists(base):
                found |= self._beside(base)
        beside = self._folder(self._naming.beside(name)).rotated.get(name, ())
        # A log that came as one, compressed by now, is not a file of this one.
        found |= _stats(path for path in beside if self._owner(path, {}) == name)
        at_path = None
        with suppress(OSError):
            at_path = self._where.stat(name)[:2]
        inodes = set() if at_path is None else {at_path}
        named: Names = {}
        for path, stat in found.items():
            # A compressed file whose original is there may be under way.
            under_way = places.plain_name(path) != path and places.plain_name(path) in found
            if stat[:2] not in inodes and not under_way:
                inodes.add(stat[:2])
                named[path] = stat
        return named

    def _beside(self, path: str) -> Names:
        """Return the rotated files of a path that need not match the pattern."""
        naming = Naming(glob.escape(path), self.source.rotated)
        folder = naming.beside(path)
        with suppress(OSError):
            return _stats(Folder(0, folder, os.listdir(folder), naming).rotated.get(path, ()))
        return {}

    def has_left(self, file: places.Stat, members: Names) -> bool:
        """Return whether a file that is not at its path was rotated or deleted, and is not at the path of another log.

        It may have come there since the last look, which saw it at its own path.
        """
        inodes = {stat[:2] for stat in members.values()}
        return file[:2] in inodes or file[:2] not in self._at_paths

    def _arrange(self, found: dict[str, Names], is_first: bool) -> bool:
        """Add logs that are new, and forget those of which nothing is there. Return whether rows have changed."""
        changed = is_first
        held = {log.inode(): (log, log.place) for log in self._logs.values()}
        moved: set[Log] = set()
        links: dict[tuple[int, ...], str] = {
            files[name][:2]: name for name, files in found.items() if name in files and os.path.islink(name)
        }
        for name, files in sorted(found.items()):
            log, at_path = self._logs.get(name), files.get(name)
            inodes = {file: stat[:2] for file, stat in files.items()}
            # The file under way of another log has this name too, or only this one by now.
            others = ((file, *held[i]) for file, i in inodes.items() if i in held and held[i][0] is not log)
            file, other, place = next(others, (name, None, Progress()))
            has_left = other is not None and inodes[file] not in map(_inode, found.get(other.name, {}).values())
            if log is None:
                if at_path is None and (link := next((links[i] for i in inodes.values() if i in links), None)):
                    self._of_links[name] = link
                    continue
                if at_path is not None and (self._is_link(name, files) or (other is not None and not has_left)):
                    continue
                log = self._new(name)
                if at_path is not None and not has_left:
                    held[at_path[:2]] = log, log.place
            if other is not None and has_left and (log.inode() not in inodes.values()):
                self._move(other, place, log, file, other in moved)
                moved.add(log)
                changed = True
            if is_first:
                log.since = time.time()  # until its files can be read
                try:
                    log.tail.begin(log.place)
                    log.since = 0.0
                except OSError as error:
                    if not is_damage(error, remote=False):
                        raise
                    log.note(always=True)
        devices: dict[str, int] = {}
        for log in [*self._logs.values()]:
            if found.get(log.name) or os.path.lexists(log.name):
                log.missing = 0
                if found.get(log.name):
                    changed = self._see(log, devices) or changed
                continue
            log.missing += 1
            if self._is_blind:
                continue
            if log.missing > 1 and log.idle is not None and log.idle.at_end and log.tail.opened is None:
                device = self._device(log)
                if device and device == log.device:
                    self._forget(log)
                    changed = True
            else:
                log.idle = None  # one more turn reads the rest
        self._serial += changed
        return changed

    def _see(self, log: Log, devices: dict[str, int]) -> bool:
        """Note of what device a log is whose files are there; return whether it was another one."""
        folder = os.path.dirname(log.name)
        if folder not in devices:
            devices[folder] = self._device(log)
        if devices[folder] in (0, log.device):
            return False
        log.device = devices[folder]
        log.note(always=True)
        return True

    def _new(self, name: str) -> Log:
        log = self._logs[name] = Log(self, name, {})
        log.device = self._device(log)
        return log

    def _forget(self, log: Log) -> None:
        if log is self._current:
            self._current = None
        log.forget()
        del self._logs[log.name]
        self._of_links = {name: link for name, link in self._of_links.items() if link != log.name}

    def _move(self, old: Log, place: Progress, new: Log, file: str, has_another: bool) -> None:
        """Continue in a log with the file that was another one's. ``has_another``: that one got a file of a third."""
        _log.info("%s is now %s; it is read on there.", old.name, file)
        for log in (old, new):
            if log is self._current:
                self._current = None
            log.close()
            log.idle = None
        current = place.current and place.current._replace(name=file)
        new.place = place._replace(serial=0, current=current)
        old.place = old.place if has_another else Progress()
        new.note(always=True)
        old.note(always=True)

    def _is_link(self, name: str, files: Names) -> bool:
        """Return whether a name is a link to a log that has a name of its own here, and is not one of its ``files``."""
        if not os.path.islink(name):
            return False
        real = os.path.realpath(name)
        if any(path != name and os.path.realpath(path) == real for path in files):
            return False
        folders = {os.path.realpath(folder or ".") for folder in self._naming.folders()}
        return os.path.dirname(real) in folders and self._naming.kind(real)[0]

    def _device(self, log: Log) -> int:
        """The device of the directory of a log, or of the one above it that is there; 0 if the root is away."""
        folder = os.path.dirname(log.name) or "."
        while not os.path.isdir(folder) and len(folder) > len(self._naming.root):
            folder = os.path.dirname(folder)
        with suppress(OSError):
            return os.stat(folder).st_dev
        return 0


def _stats(paths: Iterable[str]) -> Names:
    """The regular files of some names, and what identifies each now."""
    found: Names = {}
    for path in paths:
        with suppress(OSError):  # it is gone by now, or a link to nothing
            stat = os.stat(path)
            if modes.S_ISREG(stat.st_mode):
                found[path] = places.Stat(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime)
    return found


def _is_rotation(last: str, log: str) -> bool:
    """Return whether a name is that of a log and a number."""
    found = _ROTATION.fullmatch(last)
    return found is not None and found["name"] == os.path.basename(log)


def _is_below(parts: list[str], patterns: list[str]) -> bool:
    """Return whether the parts of a path match those of a pattern, in which ``**`` is any number of them."""
    if not patterns or not parts:
        return not parts and all(pattern == "**" for pattern in patterns)
    if patterns[0] == "**":
        return _is_below(parts, patterns[1:]) or _is_below(parts[1:], patterns)
    return fnmatch.fnmatchcase(parts[0], patterns[0]) and _is_below(parts[1:], patterns[1:])


def _inode(stat: places.Stat) -> tuple[int, ...]:
    return stat[:2]


def _regex_of(template: str) -> str:
    """The regular expression of a template, in which ``*`` is a number, a date, ``old`` or ``bak``."""
    parts = {"{name}": "(?P<name>.+?)", "{stem}": "(?P<stem>.+?)", "{ending}": r"(?P<ending>\.[^.]+)", "*": _MARK}
    return "".join(parts.get(part, re.escape(part)) for part in re.split(r"(\{\w+\}|\*)", template))


def _filled(found: re.Match[str] | None) -> str | None:
    """The name of the log in a match of a rotated one."""
    if found is None:
        return None
    groups = found.groupdict()
    return groups["name"] if groups.get("name") else f"{groups['stem']}{groups.get('ending') or ''}"
