"""Objects of Cues in a notebook, as HTML that ``cues.ui.notebook`` makes, loaded when it is asked for."""

from __future__ import annotations

import sys
import time
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_EVERY_S: Final = 0.25
"""Between two pictures of a run."""


def html(shown: object) -> str:
    """Return the picture or table of an object, for its ``_repr_html_``."""
    made: str = import_module("cues.ui.notebook").html(shown)
    return made


class Shown:
    """An object that a notebook shows as a picture or a table."""

    def _repr_html_(self) -> str:
        return html(self)


class RunRow(NamedTuple):
    """A processor in the table of a run."""

    processor: str
    state: str
    counters: Any
    """Its :class:`cues.base.events.Counters`."""
    waiting: int | None
    """The messages that wait for it; None if that is not known, or if it takes none."""


class RunTable(Shown):
    """A run as a table of its processors."""

    def __init__(self, title: str, rows: Callable[[], Iterable[RunRow]]) -> None:
        """``rows`` is called for each picture."""
        self.title = title
        self.rows = rows


class Progress:
    """A picture of a run that is renewed while a cell of a notebook waits for it; elsewhere it does nothing."""

    def __init__(self, running: Shown) -> None:
        self._running = running
        self._handle: Any = None
        self._shown_at: float | None = None
        self._notebook = in_notebook()

    def look(self, last: bool = False) -> None:
        """Show the run as it is now, if the last picture is old or ``last`` is set."""
        if not self._notebook:
            return
        now = time.monotonic()
        if last or self._shown_at is None or now - self._shown_at >= _EVERY_S:
            self._shown_at = now
            if self._handle is None:
                self._handle = import_module("IPython.display").display(self._running, display_id=True)
            else:
                self._handle.update(self._running)


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook. Imports nothing."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None
