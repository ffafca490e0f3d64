"""The common part of sources of changes: the rows of tables first, then each change of them, under one position.

    Changes   the source: its options, the check of a position, one reading at a time
    Reading   one call of it: set-up, the rest of the snapshot, the changes

A connector has a subclass of each (``mysql_changes.py``, ``postgres_changes.py``), which knows its protocol.

**A position** is a list. In a snapshot it is ``[1, table, key, …]``: the place of the table, and a list of the values
of the key. In the log its third item is not a list.

**The snapshot** is read table by table, in the order of the key. Each start reads the rest as the server has it then.
``state["snapshot"]["segments"]`` keeps up to which key a start has read, and its view:

    [[0, ["4711"], view 1], [2, None, view 2]]    table 0 to the key 4711; all after it, of two tables

A change is left out if the view in which the place of its key was read has the change. So each row is a message once,
and the rows and changes of a key follow each other without a hole. The segments are forgotten when the log is after
all these views.

**The number** of a message in its transaction depends only on the log, and not on the snapshot, so a position in the
middle of a transaction stays valid.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final, NamedTuple

from cues.arguments import check_number, text_of, texts_of
from cues.errors import Diverged, InvalidArgument
from cues.processors import checks, waits

VERSION: Final = 1
TELL_S: Final = 10.0
"""Seconds after which the position moves, also if no table of the source has changed."""
PAGE_ROWS: Final = 1_000

Message = dict[str, Any]
Position = list[Any]


def message(
    operation: str, table: str, key: Message, row: Message | None, before: Message | None = None, **facts: Any
) -> Message:
    """Return a message about a row, or about a whole table (``truncate``)."""
    return {"operation": operation, "table": table, "key": key, "row": row, "before": before, **facts}


class Segment(NamedTuple):
    """The rows up to a key, of a table by its place, and those of all tables before: what one start has read."""

    table: int
    key: list[Any] | None
    """The key as :meth:`Reading._ordered` returns it; None: all rows of the table."""
    view: Any
    """The view of that start, as :meth:`Reading._view` returns it."""


class Changes(checks.Reads):
    """The base of the sources: the options that all have."""

    _NAME: ClassVar[str]
    """The name of the database."""
    _URL: ClassVar[tuple[str, str]]
    """A pattern of its URLs, and an example."""

    def __init__(
        self, url: str, tables: str | Sequence[str], *, snapshot: bool, follow: bool, timeout_s: float
    ) -> None:
        self.url, self.tables = text_of("url", url), texts_of("tables", tables)
        self.snapshot, self.follow, self.timeout_s = snapshot, follow, timeout_s
        self.__name__ = "changes"
        pattern, example = self._URL
        if not re.match(pattern, url):
            raise InvalidArgument(f"url= is not a URL of {self._NAME}.", f"give {example!r}.")
        if not self.tables:
            raise InvalidArgument("tables= is empty.", "name the tables.")
        for name, flag in (("snapshot", snapshot), ("follow", follow)):
            if not isinstance(flag, bool):
                raise InvalidArgument(f"{name}={flag!r:.40} is not a flag.", "use True or False.")
        check_number("timeout_s", timeout_s, 1)

    def __call__(self, position: Position | None, process: Any = None) -> Iterator[tuple[Position, Any]]:
        """Yield ``(position, message)`` after ``position``."""
        if position is not None:
            if not isinstance(position, list) or position[:1] != [VERSION] or not self._is_place(position[1:]):
                raise checks.foreign_position(position, type(self).__module__, VERSION)
            if process is None:
                raise InvalidArgument(
                    "Changes was called with a position and without process=, whose state it needs.",
                    "give it to cues.Source(id, Changes(…)); or pass on the process of your own source.",
                )
        yield from self._read(position, process)

    def _is_place(self, place: list[Any]) -> bool:
        """Return whether this is a position without its version."""
        raise NotImplementedError

    def interrupt(self) -> None:
        """End the query that runs now; the engine calls it when the source ends."""
        if self._reading is not None:
            self._reading.interrupt()


class Reading:
    """One call of a source. A subclass has the methods that raise NotImplementedError here."""

    def __init__(self, source: Any, position: Position | None, process: Any) -> None:
        self._source, self._position, self._process = source, position, process
        self._state: Any = {} if process is None else process.state
        self._tables: list[Any] = []
        """The tables of the snapshot, or of the source; each has a ``name``."""
        self._segments: list[Segment] = []

    def messages(self) -> Iterator[tuple[Position, Any]]:
        """Yield messages until the end (``follow``: until the graph drains)."""
        if not self._set_up():
            return
        if self._in_snapshot or (self._position is None and self._source.snapshot):
            yield from self._snapshot()
            if waits.stops(self._process):
                return
        if self._position is None or self._in_snapshot:
            self._position = self._first()
            yield self._position, None
        kept = self._state.get("snapshot", {"segments": []})
        self._segments = [
            Segment(at, None if key is None else self._ordered(at, key), self._view(view))
            for at, key, view in kept["segments"]
        ]
        yield from self._changes(self._position)

    def _set_up(self) -> bool:
        """Connect to the server and check it; return False if the source ends before."""
        raise NotImplementedError

    def _snapshot(self) -> Iterator[tuple[Position, Any]]:
        """Yield the rows after the position, as they are in one view; note the view in the state."""
        raise NotImplementedError

    def _rows(self, at: int, after: list[Any] | None) -> Iterator[tuple[Position, Any]]:
        """Yield the rows of the table at a place after a key, in the order of the key."""
        raise NotImplementedError

    def _first(self) -> Position:
        """Return the position at which the changes begin."""
        raise NotImplementedError

    def _changes(self, position: Position) -> Iterator[tuple[Position, Any]]:
        """Yield the changes after a position."""
        raise NotImplementedError

    def _ordered(self, at: int, key: list[Any]) -> list[Any]:
        """Return the key of a segment of the table at a place as values that have the order of the snapshot."""
        raise NotImplementedError

    def _view(self, kept: Any) -> Any:
        """Return the view that the state keeps."""
        raise NotImplementedError

    def _sees(self, view: Any, moment: Any) -> bool:
        """Return whether a view has the changes of a transaction, which the subclass names by ``moment``."""
        raise NotImplementedError

    def _diverged(self, problem: str) -> Diverged:
        """Return the error for a server that ``problem``."""
        raise NotImplementedError

    @property
    def _in_snapshot(self) -> bool:
        return self._position is not None and isinstance(self._position[2], list)

    # --- the snapshot ---

    @property
    def _after(self) -> tuple[int, list[Any] | None]:
        """The place of the table, and the key, after which the snapshot goes on."""
        return (0, None) if self._position is None else (self._position[1], list(self._position[2]))

    def _parts(self, view: Any) -> list[list[Any]]:
        """Return the segments for the state when a start reads the rest in a view."""
        parts = self._state.get("snapshot", {"segments": []})["segments"]
        if parts:
            parts = [*parts[:-1], [*self._after, parts[-1][2]]]
        return [*parts, [len(self._tables), None, view]]

    def _rest(self) -> Iterator[tuple[Position, Any]]:
        """Yield the rows of all tables after the position."""
        place, after = self._after
        for at in range(place, len(self._tables)):
            yield from self._rows(at, after)
            after = None
            if waits.stops(self._process):
                return

    # --- the changes ---

    def _place_of(self, table: str) -> int | None:
        return next((at for at, each in enumerate(self._tables) if each.name == table), None)

    def _is_new(self, at: int, key: list[Any], moment: Any) -> bool:
        """Return whether the snapshot does not have the change of a row; ``key`` has the order of the snapshot."""
        for segment in self._segments:
            if segment.table > at or (segment.table == at and (segment.key is None or key <= segment.key)):
                return not self._sees(segment.view, moment)
        return True

    def _is_new_truncate(self, at: int, moment: Any) -> bool:
        """Return whether the snapshot does not have a truncate. Raises if a part of it does."""
        seen = set()
        for segment in self._segments:
            if segment.table >= at:
                seen.add(self._sees(segment.view, moment))
            if segment.table > at or (segment.table == at and segment.key is None):
                break
        if len(seen) > 1:
            raise self._diverged(f"truncated {self._tables[at].name} while its snapshot was interrupted")
        return seen != {True}

    def _forget_snapshot(self, is_passed: bool) -> None:
        """Forget the segments when the log is after their views."""
        if self._segments and is_passed:
            self._segments = []
            del self._state["snapshot"]

    # --- other threads ---

    def interrupt(self) -> None:
        """End the query that runs now."""
        raise NotImplementedError

    def end(self) -> None:
        """Close the connections after a complete reading."""
        self.close()

    def close(self) -> None:
        """Close the connections at once."""
        raise NotImplementedError
