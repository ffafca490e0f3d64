"""Sources over many files: globs, directories that are watched, and logs that are followed.

    graph.add(cues.Source("rows", Files("in/*.csv.gz")))                      read what is there, and end
    graph.add(cues.Source("rows", Files("in/*.parquet", watch=True)))         and wait for new files
    graph.add(cues.Source("lines", Files("app-*.log", follow=True)))          the last file by name grows
    graph.add(cues.Source("lines", Files("/var/log/app.log", follow=True)))   as ``tail -F``: through rotations
    graph.add(cues.Source("lines", Files("/var/log/*.log", follow="each")))   the same for each of many logs

The position names the file that is read by its identity, and the place in it. What was read of all others is in rows of
the source's state (known_files.py):

    position = [version, serial, [name, device, inode, bytes, fingerprint] or [], offset, line]

``fingerprint`` is a checksum of the first ``bytes`` bytes of the file, at most 1,024, so a file is known again after a
rename, and a file that was replaced is noticed although it has the inode of the old one. ``serial`` grows with each
change of the rows. The engine commits position and rows together with the messages, so no record is lost or read twice,
wherever the run is killed.

**Files of a directory or pattern** (all but ``tail -F``). A file is read once to its end, whatever its name and
whenever it comes: the next one is always the first by ``order=`` that was not read. A file that cannot be read, or not
to its end, is one error message with its name; the others are read, and it is tried again when it has changed, and at
each start: the same problem is not said again. A file that has changed after it was read is named in the log, and is
not read again.

**tail -F.** The file at the path is read while it grows. When another file is at the path (rotation by rename), the old
one is read to its end, then all rotated files that were not read, the oldest first, then the new one. When it became
shorter, or begins otherwise (copy and truncate), the rest is read from the copy that begins with the same bytes. Files
are known by their device, inode and fingerprint, or by their size, beginning and end after they were compressed, copied
or restored; never by their names. Their order is the number or the time in the name (tail.py), then the time of the
last write. A last line without a line end waits until it is whole.

**Each log of a pattern.** ``follow="each"`` does this for every name that the pattern matches; families.py says which
names are rotated files of which log. Logs come and go while the source runs.

Not guaranteed: lines that no file has any more. Rotation by copy and truncate itself loses lines that are written
between the copy and the truncation. A file that was deleted, or truncated without a copy, before it was read to its
end is reported as a warning, and reading continues after it. Rotated files that were there before the first start
are not read: give them a source of their own. A file that begins with the same 1,024 bytes as the one
before, in the same inode, and is longer, is taken for it. Write files under a name that begins with ``.`` or ends with
``.tmp``, and rename them: a file is read as it is when its turn comes.

**A file that is replaced or cut before it was read to its end.** It is refused if it has fewer bytes than were read,
begins otherwise, or has no line end at the place (:class:`cues.processors.files.FileChanged`): at a start, for the file
under way; else it is an error message with its name. A file that was replaced while it is open is read to its end,
from the old one. One that was written anew in place is found at its end, and lines of both may have come by then. Not
noticed are: a cut after the place, and another file with the same first 1,024 bytes and a line end at the place.
"""

from __future__ import annotations

import copy
import glob
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from cues.arguments import check_number, path_of, text_of, texts_of
from cues.errors import CuesError, Diverged, InvalidArgument
from cues.overrides import override
from cues.processors import (
    SOURCE,
    blocks,
    checks,
    consumed,
    documents,
    families,
    files,
    foreign,
    listings,
    places,
    takes,
    waits,
)
from cues.processors.known_files import Former, Identity, Known, KnownFiles, Progress, read_position
from cues.processors.opened_file import NUMBERED, TABLES, Opened, checksum, is_damage, is_inode
from cues.processors.tail import followed

FORMATS: Final = ("text", "jsonl", "csv", "parquet", "arrow", "json", "avro", "xlsx")
"""The formats of a source."""
ORDERS: Final = ("name", "modified")
EACH: Final = "each"
"""Of ``follow=``."""

_TYPES: Final = -1
"""The row of the state with the inferred schema."""
_COMMIT_S: Final = 0.01
"""Seconds between two looks at whether messages are committed."""
_LISTINGS_SHARE: Final = 10
"""A directory is listed again after so many times the time that its listing takes."""
_ENDINGS: Final = {
    ".txt": "text", ".log": "text", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl", ".csv": "csv",
    ".avro": "avro", ".xlsx": "xlsx", ".parquet": "parquet", ".arrow": "arrow", ".arrows": "arrow", ".ipc": "arrow",
}  # fmt: skip

_log = logging.getLogger("cues.processors")

Row = files.Row
Position = list[Any]
Item = tuple[Position, Row | Exception | None]


@takes(SOURCE)
class Files(checks.Owned):
    """A source of the records of files; see the module. Give it to ``cues.Source(id, Files(...))``.

    ``pattern``      a path, a directory or a glob pattern (``**`` too); a URL is read through fsspec (not followed)
    ``format``       ``"text"`` (``{"line": text}``), ``"jsonl"``, ``"csv"`` (strings by column), ``"parquet"``,
                     ``"arrow"`` (IPC file or stream), ``"json"`` (a file is one object, or one array of objects) or
                     ``"avro"`` or ``"xlsx"`` (Excel); None: by the ending of each name, before ``.gz`` and the like;
                     ``.json`` is jsonl
    ``order``        of files that were not read: ``"name"`` (with numbers as numbers: ``part-9`` before ``part-10``) or
                     ``"modified"`` (the time of the last write, then the name)
    ``settle_s``     read a file when it did not change for so many seconds, for programs that write it under its name.
                     Of a store that does not say the times of objects it is refused, as ``order="modified"`` is
    ``after``        ``"keep"`` files; ``"delete"`` each one, or ``"move:DIR"`` it to this directory of the same
                     filesystem, when all its messages are committed (:mod:`cues.processors.consumed`); also those that
                     earlier runs have read. A file that has changed since it was read stays, and the log says so; so
                     does one that cannot be read to its end. A file of which some records are on the error queue goes.
                     A later file of the same name is a new one. Of objects, DIR is a URL in the same bucket, and one
                     that was overwritten is a new one
    ``watch``        True: wait for new files; otherwise the source ends with the last one
    ``follow``       True: the last file grows; a path without wildcards is followed through its rotations. ``"each"``:
                     each file that the pattern names is a log that grows, and is followed through its own rotations
    ``bad``          ``"error"``: a record that cannot be read is a failed message: it is written to the error queue, or
                     stops the source (:class:`cues.processors.files.Malformed`, with file, line and problem).
                     ``"row"``: it is a message of the type ``files.MALFORMED``. A file that cannot be read is one such
                     record (:class:`cues.processors.files.BadFile`)
    ``schema``       of CSV and JSON lines: a ``pyarrow.Schema``, or types by column (``{"n": "int64", "at":
                     "timestamp[us]"}``). ``"infer"``: that of the first records, which is kept for all files and
                     starts. Rows are read as columns; one that does not fit is a record that cannot be read.
                     CSV: other columns are text, and an empty cell of a typed column is null. JSON lines: a missing
                     field is null, and other fields are left out; with ``"infer"`` a record that has some does not fit
    ``columns``      of CSV, of JSON lines with ``schema=``, and of tables: the names of those to read; None: all
    ``encoding``     of text, which must write line ends as the byte 0x0A: UTF-8, Latin, and others, but not UTF-16
    ``reserved``     ``"q/type"`` or ``"q/topics"``, which rows may set then (:mod:`cues.processors.foreign`)
    ``rotated``      pattern of the names that a followed file gets by rotation; None: ``path.*`` and ``path-*``. For
                     ``follow="each"``: a template with ``{name}``, or ``{stem}`` and ``{ending}``, of the name of the
                     log, such as ``"old/{name}.*"``; None: those of :mod:`cues.processors.families`
    ``poll_s``       seconds between two looks at files that had nothing new; ten times as long as the listing of the
                     directory or bucket took, if that is longer
    ``idle_exit_s``  end the source after so many seconds without a record; 0: at the end of what is there; None: never
    ``grace_s``      a rotated file counts as whole when it did not grow for so many seconds, because a program may
                     write to it until it opens the new one
    ``header``       of CSV and Excel without a header: the names of the columns; None: the first line has them
    ``quote``        of CSV: the sign around fields with delimiters or line ends, doubled in them; None: there is none
    ``escape``       of CSV: a sign such as a backslash, which makes the next character a part of the field
    ``sheet``        of Excel: the name of the sheet; None: the first one
    ``begins``       of text: a regular expression for the first line of a record, such as ``r"\\d{4}-"`` for a log in
                     which the lines of a stack trace follow. ``{"line": text}`` has all its lines, of at most
                     ``line_bytes_max`` bytes. In a file that is followed, the last record waits for the beginning of
                     the next one, or until the file did not grow for ``grace_s``
    ``delimiter``, ``record_lines_max``, ``line_bytes_max``, ``at``   as :func:`cues.processors.files.read_csv` has them

    Kind: source
    Needs: nothing for text, JSON and CSV; extra `files` for Parquet, Arrow, Avro, Excel, zstd and URLs
    Guarantee: exactly once: each record of each file is on the queue once, also after kill -9
    Mechanism: position of file identity (device, inode, fingerprint) and offset, and a row of state for each file that
    was read, committed with the messages
    """

    def __init__(
        self,
        pattern: str | os.PathLike[str],
        format: str | None = None,
        *,
        order: str = "name",
        settle_s: float = 0.0,
        after: str = consumed.KEEP,
        watch: bool = False,
        follow: bool | str = False,
        bad: str = "error",
        encoding: str = "utf-8",
        schema: Any = None,
        columns: Sequence[str] | None = None,
        delimiter: str = ",",
        header: Sequence[str] | None = None,
        quote: str | None = '"',
        escape: str | None = None,
        begins: str | None = None,
        sheet: str | None = None,
        record_lines_max: int = files.RECORD_LINES_MAX,
        line_bytes_max: int = files.LINE_BYTES_MAX,
        at: str | None = None,
        reserved: Sequence[str] = (),
        rotated: str | None = None,
        poll_s: float = 0.2,
        idle_exit_s: float | None = None,
        grace_s: float = 1.0,
    ) -> None:
        given = path_of("pattern", pattern)
        self.pattern = given if places.is_remote(given) else places.local_path(given)
        self.format, self.watch, self.follow, self.bad = format, watch, follow, bad
        self.shape = files.Shape(delimiter, encoding, record_lines_max, line_bytes_max, header, quote, escape, begins)
        self.order, self.at = order, at
        self.schema = blocks.checked_schema(schema)
        self.types: Any = None if self.schema == blocks.INFER else self.schema
        self.columns = None if columns is None else texts_of("columns", columns)
        self.rotated, self.poll_s, self.idle_exit_s, self.grace_s = rotated, poll_s, idle_exit_s, grace_s
        self.may = foreign.allowed(reserved)
        self.__name__ = "files"
        if follow not in (False, True, EACH):
            raise InvalidArgument(f"follow={follow!r:.60} is unknown.", f"use True, False or {EACH!r}.")
        self.each = follow == EACH
        is_path = not glob.has_magic(self.pattern) and not os.path.isdir(self.pattern)
        self.tails = bool(follow) and not self.each and is_path
        if format is not None and format not in FORMATS:
            raise InvalidArgument(f"The format {format!r} is unknown.", f"use one of {', '.join(FORMATS)}.")
        if order not in ORDERS:
            raise InvalidArgument(f"order={order!r} is unknown.", f"use one of {', '.join(ORDERS)}.")
        if bad not in ("error", "row"):
            raise InvalidArgument(f"bad={bad!r} is unknown.", "use 'error' or 'row'.")
        if follow and places.is_remote(self.pattern):
            raise InvalidArgument(
                f"{self.pattern} cannot be followed: an object does not grow.", "use watch=True, for new objects."
            )
        for name, seconds in {"settle_s": settle_s, "poll_s": poll_s, "grace_s": grace_s}.items():
            check_number(name, seconds, 0)
        if idle_exit_s is not None:
            check_number("idle_exit_s", idle_exit_s, 0)
        self.settle_s = settle_s
        self.consumed = consumed.Consumed(text_of("after", after), self.pattern)
        for option, is_on in ((f"after={after!r}", self.consumed.is_on), (f"settle_s={settle_s:g}", settle_s > 0)):
            if is_on and follow:
                raise InvalidArgument(f"{option} needs files that do not grow.", "use watch=True in place of follow=.")
        self.sheet = None if sheet is None else text_of("sheet", sheet)
        self._held: set[str] = set()
        """Files that are followed, whose last record of several lines may go on."""
        if self.each:
            families.Naming(self.pattern, rotated, os.path.isdir(self.pattern))
        elif rotated is not None and not self.tails:
            raise InvalidArgument(
                f"rotated={rotated!r:.60} needs a path that is followed.",
                "leave it out; or give follow=True and a path without wildcards, or follow='each'.",
            )
        if follow and self.schema == blocks.INFER:
            raise InvalidArgument(
                "schema='infer' needs files that do not grow.", "give the types: schema={'n': 'int64'}."
            )
        if self.columns is not None and not self.columns:
            raise InvalidArgument("columns= names no column.", "leave it out, to read all.")
        if format is not None:
            self._fits(format)
        for library, of in ((documents.avro, "avro"), (documents.excel, "xlsx")):
            if format == of:
                library()
        if follow and format in NUMBERED:
            raise InvalidArgument(f"A file of the format {format!r} cannot be followed.", "use watch=True.")

    @property
    def is_typed(self) -> bool:
        """True if ``schema=`` or ``columns=`` was given."""
        return self.schema is not None or self.columns is not None

    def __call__(self, position: Position | None, process: Any = None) -> Iterator[Item]:
        """Yield ``(position, message)`` after ``position``; an Exception in place of a message is a failed one.

        ``process`` has the state in which the files that were read are known. Without it, as in a loop of your own, the
        source begins at the start. Raises :class:`cues.errors.InvalidArgument` for a position without it.
        """
        return self._items(position, process, False)

    def in_columns(self, position: Position | None, process: Any = None) -> Iterator[Item]:
        """Yield the same records, many at once with the position after them: tables, or lists of messages."""
        return self._items(position, process, True)

    def _items(self, position: Position | None, process: Any, by_columns: bool) -> Iterator[Item]:
        if position is not None and process is None:
            raise InvalidArgument(
                "Files was called with a position and without process=, whose state has the files that were read.",
                "give it to cues.Source(id, Files(…)); or pass on the process of your own source.",
            )
        place, former = read_position(position)
        state = {} if process is None else process.state
        waiting = Waiting(self, process)
        if self.each:
            return families.Families(self, state, waiting).records(place)
        if place.log:
            raise Diverged(
                f"The position is in the log {place.log}, which is one of several.",
                "leave follow='each'; or give the source another id, which begins at the start.",
            )
        if self.tails:
            return followed(self, state, waiting, place, former)
        if self.consumed.is_on:
            self.own(
                process,
                f"{self!r} with after={self.consumed.after!r}",
                "give each source files of its own: the first one to read a file would take it from the other.",
            )
        self.consumed = self.consumed.again()
        run = copy.copy(self)  # with the types that this run has inferred
        run._held = set()
        if self.schema == blocks.INFER and (kept := state.get(_TYPES)) is not None:
            run.types = places.arrow().ipc.read_schema(places.arrow().py_buffer(kept))
        return run._in_order(place, former, KnownFiles(state), waiting, Pieces(process, state, by_columns))

    def committed(self, position: Position) -> None:
        """Delete or move the files whose messages are committed; the engine calls it after each commit."""
        if self.consumed.is_on:
            self.consumed.committed(position[1])

    # --- the files of a directory or pattern ---

    def _in_order(
        self, place: Progress, former: Former | None, known: KnownFiles, waiting: Waiting, pieces: Pieces
    ) -> Iterator[Item]:
        where = places.place_of(self.pattern)
        looked: dict[str, tuple[places.Stat, bool]] = {}
        """The files that have nothing more to be read, as they were then, and whether they grew."""
        settled = Settled(self.settle_s)
        looks = listings.Looks(where, self.pattern, self.order == "name")
        is_first = True
        unsettled: set[str] = set()
        while True:
            begun = time.monotonic()
            current = {place.current.name} if place.current is not None else set()
            entries = looks.entries(unsettled | current)
            if where.remote:
                self._check(entries)
            pause_s = _LISTINGS_SHARE * (time.monotonic() - begun)
            until = time.monotonic() + max(self.poll_s, pause_s)
            place = self._renamed(where, entries, place)
            changed = self._compare(where, entries, former, known, place)
            if self.consumed.is_on and is_first:
                self.consumed.resumed([row for row in known.done() if row.end], entries)
            for name in self.consumed.gone(looks):
                known.forget(name)
                looked.pop(name, None)
                entries.pop(name, None)  # it is listed again, if there is a new one
                changed = True
            if changed:
                place = place.reread()
                yield place.packed(), None
            former, is_first = None, False
            grows = self._growing(entries)
            todo = [
                n
                for n, stat in entries.items()
                if (looked.get(n) != (stat, n in grows) or self._is_over(n, stat))
                and self._has_more(known.get(n), stat)
            ]
            unsettled = settled.take_away(todo, entries, place)
            todo.sort(key=self._order_of(entries, place))
            for name in todo:
                try:
                    for after, item in self._file(where, name, entries[name], place, known, name in grows, pieces):
                        place = after
                        yield place.packed(), item
                        waiting.moved()
                except FileNotFoundError:
                    looks.whole()
                    break  # it is listed again, and then it is missing
                looked[name] = entries[name], name in grows
                if time.monotonic() > until:
                    break  # earlier ones may have come
            if todo:
                continue
            while self.consumed.waits and waiting.commits():
                pass
            if self.consumed.has_gone:
                continue
            at_end = not unsettled and not self._held
            if not ((self.watch or self.follow or unsettled) and waiting.wait(at_end, pause_s)):
                return

    def _check(self, entries: dict[str, places.Stat]) -> None:
        """Raise :class:`cues.errors.InvalidArgument` for an option that needs what the store does not say."""
        self.consumed.check(entries)
        for option, is_on in (
            (f"settle_s={self.settle_s:g}", self.settle_s),
            (f"order={self.order!r}", self.order == "modified"),
        ):
            name = next((n for n, stat in entries.items() if not stat.modified and not stat.inode), None)
            if is_on and name is not None:
                raise InvalidArgument(
                    f"{option} needs the times of objects, and the store does not say that of {name}.", "leave it out."
                )

    def _order_of(self, entries: dict[str, places.Stat], place: Progress) -> Any:
        """Return the key by which files are read: first the one that is under way."""
        current = place.current.name if place.current is not None else None
        if self.order == "modified":
            return lambda name: (name != current, entries[name].modified, natural(name))
        return lambda name: (name != current, natural(name))

    def _growing(self, entries: dict[str, places.Stat]) -> set[str]:
        """Return the files that a program may still write to: the last one, and those that it has just left."""
        if not self.follow or not entries:
            return set()
        last = max(entries, key=self._order_of(entries, Progress()))
        now = time.time()  # a time of the future counts as one of long ago
        return {
            name
            for name, stat in entries.items()
            if (name == last or abs(now - stat.modified) < self.grace_s) and places.compression_of(name) is None
        }

    def _is_over(self, name: str, stat: places.Stat) -> bool:
        """Return whether the last record of a file has waited for its other lines, and has all."""
        return name in self._held and abs(time.time() - stat.modified) >= self.grace_s

    def _has_more(self, row: Known | None, stat: places.Stat) -> bool:
        return row is None or not row.done or (bool(self.follow) and stat.size > row.size)

    def _renamed(self, where: places.Place, entries: dict[str, places.Stat], place: Progress) -> Progress:
        """Return the position under the present name of the file that is under way.

        Raises :class:`files.FileChanged` if it is gone, unless files are followed.
        """
        current = place.current
        if current is None or current.name in entries:
            return place
        for name, stat in entries.items():
            if not where.remote and is_inode(stat, current):
                moved = place._replace(current=current._replace(name=name))
                try:
                    Opened(self, where, name, moved).close()
                except (FileNotFoundError, files.FileChanged):
                    continue
                return moved
        if not self.follow:
            raise files.FileChanged(
                f"{current.name} is gone; it was read up to byte {place.offset:,}, not to its end.",
                "restore the file; or give the source another id, which begins at the start.",
                path=current.name,
                position=place.packed(),
            )
        _log.warning("%s is gone; it was read up to byte %d.", current.name, place.offset)
        return place.next()

    def _compare(
        self,
        where: places.Place,
        entries: dict[str, places.Stat],
        former: Former | None,
        known: KnownFiles,
        place: Progress,
    ) -> bool:
        """Compare the files with what is known of them, and say what is not as it was; return whether rows changed."""
        changed = False
        if former is not None:
            read = [name for name in entries if former.has(name)]
            for name in read:
                known.put(Known(Identity(name, *entries[name][:2], 0, b""), *entries[name][2:4], b"", 0, 0, True))
            changed = True
            _log.warning(
                "%s: %d files up to %s count as read: the position is of an earlier version, which names no more than"
                " the last 16. Rename those that were not read.",
                self, sum(name <= former.floor for name in read), former.floor or "the start",
            )  # fmt: skip

        def is_same(name: str, row: Known) -> bool:
            try:
                with Opened(self, where, name, Progress(0, row.identity, row.offset, row.line)) as opened:
                    return opened.end() == row.end
            except Exception as error:
                if not isinstance(error, FileNotFoundError) and not is_damage(error, where.remote):
                    raise
                return False

        current = place.current.name if place.current is not None else None
        unread = {name: stat for name, stat in entries.items() if name != current}
        for old, new in known.moved(unread, is_same):
            _log.info("%s is %s, which was read; it is not read again.", new, old)
            changed = True
        for row, stat in [*known.changed(entries)]:
            if self.follow and stat.size > row.size:
                continue
            if self.consumed.is_on and self._is_another(where, row, stat):
                known.forget(row.identity.name)
                changed = True
                continue
            self._say_changed(row, stat)
            known.put(row._replace(size=stat.size, modified=stat.modified, end=b""))
            changed = True
        return changed

    def _is_another(self, where: places.Place, row: Known, stat: places.Stat) -> bool:
        """Return whether a file is another one than that which was read under its name. An object cannot change."""
        if where.remote or not is_inode(stat, row.identity):
            return True
        try:
            Opened(self, where, row.identity.name, Progress(0, row.identity, row.offset, row.line)).close()
        except FileNotFoundError:
            return False
        except Exception as error:
            if not is_damage(error, where.remote):
                raise
            return True
        return False

    def _file(
        self,
        where: places.Place,
        name: str,
        stat: places.Stat,
        place: Progress,
        known: KnownFiles,
        grows: bool,
        pieces: Pieces,
    ) -> Iterator[tuple[Progress, Any]]:
        """Yield the records of one file after what is known of it. Unless it grows, the last one finishes it."""
        current, row = place.current, known.get(name)
        is_current = current is not None and current.name == name
        if current is not None and not is_current:  # another one is under way: it continues later
            known.put(Known(current, 0, 0.0, b"", place.offset, place.line, False))
        if not is_current:
            place = place.next() if row is None else Progress(place.serial + 1, row.identity, row.offset, row.line)
        self._held.discard(name)
        held: tuple[Progress, Any] | None = None
        try:
            with Opened(self, where, name, place) as opened:
                if self.schema == blocks.INFER and self.types is None:
                    self.types = pieces.inferred(opened)
                for record in opened.records(complete=False) if grows else pieces.of(self, name, opened):
                    if held is not None:
                        yield held
                    identity = opened.identity(record.offset)
                    place = place._replace(current=identity, offset=record.offset, line=record.line)
                    held = place, self.item(name, record)
                    if grows:
                        yield held
                        held = None
                if grows:
                    (self._held.add if opened.waits else self._held.discard)(name)
                    return
                opened.check_end(place)
                found = stat if where.remote else opened.start_stat
                row = Known(
                    opened.identity(opened.offset),
                    *found[2:4],
                    stat.tag.encode() or opened.end(),
                    opened.offset,
                    opened.line,
                    True,
                )
                known.put(row)
                self.consumed.read(place.next().serial, row)
        except FileNotFoundError:
            raise
        except Exception as error:
            is_changed = isinstance(error, files.FileChanged)
            if not is_damage(error, where.remote) or (is_current and is_changed):
                raise
            if held is not None:
                yield held
            if is_changed and row is not None and row.done:
                self._say_changed(row, stat)
                known.put(row._replace(size=stat.size, modified=stat.modified, end=b""))
                yield place.next(), None
                return
            problem = self.problem(name, place, error)
            said = checksum(problem.encode("utf-8", "replace"))
            if row is not None and not row.done and (is_changed or row.is_as(stat)) and row.end == said:
                return  # an earlier look has said it
            identity = place.current or Identity(name, *stat[:2], 0, b"")
            known.put(Known(identity, *stat[2:4], said, place.offset, place.line, False))
            yield place.next(), self.bad_file(name, place, problem)
            return
        yield place.next(), None if held is None else held[1]

    def _say_changed(self, row: Known, stat: places.Stat) -> None:
        sizes = f"{row.size:,} bytes, now {stat.size:,}" if row.size != stat.size else f"still {stat.size:,} bytes"
        _log.warning(
            "%s has changed since it was read (%s). It is not read again; give it another name to have it read.",
            row.identity.name, sizes,
        )  # fmt: skip

    def problem(self, name: str, place: Progress, error: Exception) -> str:
        """Say why a file cannot be read after ``place``."""
        reason = error.message if isinstance(error, files.FileChanged) else str(error).removeprefix(f"{name}: ")
        unit = "record" if self.format_of(name) in NUMBERED else "line"
        where = f", after {unit} {place.line:,}" if place.line else ""
        return f"it cannot be read{where}: {reason or type(error).__name__}"

    def bad_file(self, name: str, place: Progress, problem: str) -> Row | Exception:
        """Return the message or error that stands for the rest of a file."""
        if self.bad == "error":
            return files.BadFile(f"{name}: {problem}")
        record = files.Record(place.offset, place.line, place.line + 1, None, problem, "")
        return files.malformed(os.path.basename(name), record)

    def item(self, name: str, record: files.Record | blocks.Block) -> Any:
        """Return the message, table or error for a record or a block."""
        last = os.path.basename(name)
        if isinstance(record, blocks.Block):
            return record.rows
        if record.row is None:
            if self.bad == "error":
                expected = self.format_of(name)
                unit = "record" if expected in NUMBERED else "line"
                return files.Malformed(
                    f"{name}, {unit} {record.first_line}: {record.problem}; expected a {unit} of {expected}"
                    f" ({self.shape.encoding}). The {unit}: {record.raw[:200]!r}"
                )
            row = files.malformed(last, record)
        else:
            row = record.row
        if self.at is not None:
            row[self.at] = f"{last}:{record.first_line}"
        return row

    def _fits(self, format: str) -> str:
        """Return the format, or refuse it with options that it has not."""
        shape = self.shape
        if shape.begins is not None and format != "text":
            raise InvalidArgument(
                f"The format {format!r} has no begins=.", "leave it out; records of text may have it."
            )
        if self.sheet is not None and format != "xlsx":
            raise InvalidArgument(f"The format {format!r} has no sheet=.", "leave it out; Excel files have sheets.")
        if format != "csv":
            for name, value, default in (
                ("header", shape.header, None), ("quote", shape.quote, '"'), ("escape", shape.escape, None),
            ):  # fmt: skip
                if value != default and not (name == "header" and format == "xlsx"):
                    raise InvalidArgument(f"The format {format!r} has no {name}=.", "leave it out; CSV has it.")
        if self.is_typed and format in ("text", "json", "avro", "xlsx"):
            raise InvalidArgument(f"The format {format!r} has neither schema= nor columns=.", "leave them out.")
        if self.columns is not None and self.schema is None and format == "jsonl":
            raise InvalidArgument("The format 'jsonl' has columns= only with types.", "give schema= too, or 'infer'.")
        if self.schema is not None and format in TABLES:
            raise InvalidArgument(f"The format {format!r} has its own schema.", "leave schema= out.")
        return format

    def format_of(self, name: str) -> str:
        """Return the format of a file.

        Raises :class:`cues.errors.InvalidArgument` if the name does not tell, or if the options are for another format.
        """
        if self.format is not None:
            return self.format
        name = self.pattern if self.tails else name  # not app.csv.1
        ending = os.path.splitext(places.plain_name(name))[1]
        if ending not in _ENDINGS:
            raise InvalidArgument(
                f"The name {name} does not tell the format of the file.", f"give format=: {', '.join(FORMATS)}."
            )
        return self._fits(_ENDINGS[ending])

    @override
    def __repr__(self) -> str:
        return f"Files({self.pattern!r})"


class Pieces:
    """The records of the files of one run: many at once, if the engine asks for that and can write them."""

    def __init__(self, process: Any, state: Any, by_columns: bool) -> None:
        self._process, self._state, self._by_columns = process, state, by_columns

    def of(self, source: Files, name: str, opened: Opened) -> Iterator[blocks.Block | files.Record]:
        """Yield the records of a file that does not grow. A block with a row that cannot be written is read by rows."""
        if not self._by_columns:
            yield from opened.records(complete=True)
            return
        for piece in opened.pieces():
            if not isinstance(piece, blocks.Block):
                yield piece
            elif (rows := self._checked(source, name, piece)) is None:
                yield from piece.records()
            else:
                yield piece._replace(rows=rows)

    def _checked(self, source: Files, name: str, block: blocks.Block) -> Any:
        """Return the rows of a block as the engine takes them; None if one of them cannot be written."""
        rows = block.rows
        if source.at is not None:
            if not block.first_line:
                return None
            rows = block.with_place(source.at, os.path.basename(name))
        try:
            return rows if self._process is None else self._process.check(rows)
        except CuesError:
            return None

    def inferred(self, opened: Opened) -> Any:
        """Return the schema of the first records of a file, and keep it with the position."""
        types = opened.inferred()
        if types is not None:
            self._state[_TYPES] = types.serialize().to_pybytes()
        return types


class Settled:
    """Which files have not changed for ``settle_s``: by the time of their last write, or as this process has seen."""

    def __init__(self, settle_s: float) -> None:
        self._settle_s = settle_s
        self._seen: dict[str, tuple[places.Stat, float]] = {}

    def take_away(self, names: list[str], entries: dict[str, places.Stat], place: Progress) -> set[str]:
        """Remove the names of files that may still be written to; return them."""
        if not self._settle_s:
            return set()
        current = place.current.name if place.current is not None else None
        now, seen = time.monotonic(), self._seen
        # A clock may have jumped, and some programs set the time of a file: then what was seen counts.
        self._seen = {
            name: seen[name] if name in seen and seen[name][0] == entries[name] else (entries[name], now)
            for name in names
        }
        young = {
            name
            for name, (stat, since) in self._seen.items()
            if time.time() - stat.modified < self._settle_s and now - since < self._settle_s and name != current
        }
        names[:] = [name for name in names if name not in young]
        return young


class Waiting:
    """The end of a source that waits: a drain of the graph, or a time without records."""

    def __init__(self, source: Files, process: Any) -> None:
        self._source, self._process = source, process
        self._since = time.monotonic()

    def clock(self) -> float:
        return time.monotonic()

    def moved(self) -> None:
        self._since = self.clock()

    def commits(self) -> bool:
        """Wait a moment for a commit; False if none will come while the source waits."""
        return hasattr(self._process, "wait") and bool(self._process.wait(_COMMIT_S))

    def wait(self, at_end: bool = True, pause_s: float = 0.0) -> bool:
        """Wait for ``poll_s``, or ``pause_s`` if it is longer; False if the source should end.

        ``at_end``: no known file has more to be read.
        """
        waits.answered(self._process)
        limit = self._source.idle_exit_s if at_end else None
        if waits.stops(self._process) or (limit is not None and self.clock() - self._since >= limit):
            return False
        until = self.clock() + max(self._source.poll_s, pause_s)
        if limit is not None:
            until = min(until, self._since + limit)
        while (left := until - self.clock()) > 0 and not waits.stops(self._process):
            time.sleep(min(left, max(self._source.poll_s, waits.LOOK_S)))
        return True


def natural(name: str) -> tuple[Any, ...]:
    """Return the key of a name by which numbers are in the order of their values."""
    return *((int(part) if at % 2 else part) for at, part in enumerate(re.split(r"(\d+)", name, flags=re.ASCII))), name
