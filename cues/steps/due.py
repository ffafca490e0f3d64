"""Work of a unit that has a time, in a table by time. It has two kinds.

    Timers    timers.py    a function is called at a time that it chose; rows of the state
    Held      delays.py    a message is delivered at its time; rows of a table of their own

    1. move   when something is due, one commit deletes its rows in the table and appends messages to queues of
              the unit
    2. take   a stepper beside that of the unit takes these messages, by the protocol of every step (beside.py)

Each of both is one commit, so a crash between them leaves what is in the table, or a message that is taken.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from cues.native import mypyc_attr

if TYPE_CHECKING:
    from cues.records.batch import Page
    from cues.steps.state import StateTable


class Moved(NamedTuple):
    """The rows that one commit takes off the table."""

    entries: int
    pages: dict[str, list[Page]]
    """Its messages, by queue."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Due:
    """The table of one kind of one unit. Its owner alone writes it."""

    place: ClassVar[int] = 0
    """Numbers the inputs of its stepper for the supervisor (:meth:`Stepper.watch_with`); 0: it watches no calls."""

    def __init__(self, kind: str, lane: Any, table: StateTable) -> None:
        """``kind``: the first word of the names of its crash points. ``table``: has its rows."""
        self.kind = kind
        self.lane: Any = lane
        self.table = table
        self.looks = False
        """True if the queues of what was moved may have messages: False after a look that found none."""

    def first_ns(self) -> int | None:
        """Return the time of the first entry; None without one. Safe in any thread."""
        raise NotImplementedError

    def take(self, count: int) -> Moved:
        """Delete up to ``count`` entries that are due, with the next write; return their messages."""
        raise NotImplementedError

    def committed(self) -> None:
        """Follow the commit of the deletions."""
        self.table.committed()

    def forget(self) -> None:
        """Drop the deletions."""
        self.table.forget()

    def asked(self) -> bool:
        """Return whether somebody asked for something, and waits for the result."""
        return False

    def rest(self, stepper: Any) -> None:
        """Follow a look that found nothing that is due."""
