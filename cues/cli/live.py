"""A few lines at the bottom of a terminal that are redrawn while other code prints.

While they are shown, ``sys.stdout`` and ``sys.stderr`` are replaced by objects that remove the lines,
write, and draw the lines again after the next whole line. So a ``print`` inside a graph looks normal.

``print`` writes the texts of a line one by one, and other threads print between them. So each thread's line
is kept until it is whole, is flushed, or has waited for a redraw.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, TextIO, TypeVar

from cues.base.texts import count
from cues.cli.output import cut, width
from cues.cli.printing import Printable, err, escaped, is_terminal, put, uncoloured

_SAY_AFTER_S: Final = 1.0
"""The time until the first progress report, and between two reports; shorter work reports none."""


_Plan = TypeVar("_Plan", bound=Any)


@contextlib.contextmanager
def slowly() -> Iterator[Callable[..., None]]:
    """Report progress on stderr: call ``say(text, **facts)`` at each progress.

    A terminal shows the text, a pipe gets the facts as a JSON object a second.
    """
    reported_at = time.monotonic()
    if is_terminal("stderr"):
        with Live() as live:
            yield lambda text, **facts: live.draw([text]) if time.monotonic() - reported_at > _SAY_AFTER_S else None
        return

    def say(text: str, **facts: Any) -> None:
        nonlocal reported_at
        if time.monotonic() - reported_at > _SAY_AFTER_S:
            reported_at = time.monotonic()
            err(json.dumps({"type": "progress", **facts}))

    yield say


def by_queue(
    plans: Sequence[_Plan], carry_out: Callable[[_Plan, Callable[[int, int], None]], _Plan], done: str
) -> list[_Plan]:
    """Carry out plans that have a ``queue``, and report the files of each that are ``done``; return what was done."""
    with slowly() as say:

        def progress(queue: str) -> Callable[[int, int], None]:
            return lambda n, of: say(f"{queue}: {done} {n:,} of {count(of, 'file')}", queue=queue, done=n, files=of)

        return [carry_out(plan, progress(plan.queue)) for plan in plans]


_Writing = tuple[int, TextIO]
"""A thread, and the file to which it writes."""


class Live:
    """Lines on a terminal, stderr or stdout. A context manager, whose end removes them."""

    def __init__(self, name: Literal["stdout", "stderr"] = "stderr") -> None:
        self._file: TextIO = getattr(sys, name)
        self._lines: list[Printable] = []
        self._drawn = 0
        self._midline: _Writing | None = None
        """The one whose line, not whole, is on the terminal."""
        self._begun: dict[_Writing, str] = {}
        """The lines that are not whole, by thread and file."""
        self._waited: set[_Writing] = set()
        """Those of them that were there at the last redraw."""
        self._lock = threading.RLock()
        self._kept = (sys.stdout, sys.stderr)

    def __enter__(self) -> Live:
        self._kept = (sys.stdout, sys.stderr)
        sys.stdout, sys.stderr = (
            _Beside(self, file) if file is not None and file.isatty() else file for file in self._kept
        )
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._erase()
            self._lines = []
            self._write_all_begun(set(self._begun))
        sys.stdout, sys.stderr = self._kept

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines instead of the last ones, as many as fit on the terminal."""
        import shutil

        columns, rows = shutil.get_terminal_size()
        with self._lock:
            self._write_all_begun(self._waited & self._begun.keys())
            self._waited = set(self._begun)
            self._erase()
            self._lines = [_fit(escaped(line), columns - 1) for line in lines[: max(1, rows - 2)]]
            self._show()

    def write(self, file: TextIO, text: str) -> int:
        """Write the whole lines to ``file`` as if the lines of the display were not there; keep the rest."""
        writing = threading.get_ident(), file
        with self._lock:
            lines, newline, rest = (self._begun.pop(writing, "") + text).rpartition("\n")
            if newline:
                self._waited.discard(writing)
                self._write(writing, lines + newline)
            if rest:
                self._begun[writing] = rest
        return len(text)

    def flush(self, file: TextIO) -> None:
        """Write the line that this thread has begun."""
        with self._lock:
            self._write_begun((threading.get_ident(), file))

    def _write_all_begun(self, writings: set[_Writing]) -> None:
        # Here is not the thread that wrote them, and an error of their terminal is not the display's.
        for writing in writings:
            with contextlib.suppress(OSError, ValueError):
                self._write_begun(writing)

    def _write_begun(self, writing: _Writing) -> None:
        if text := self._begun.pop(writing, ""):
            self._write(writing, text)

    def _write(self, writing: _Writing, text: str) -> None:
        self._erase()
        _, file = writing
        file.write(f"\n{text}" if self._midline not in (None, writing) else text)
        self._midline = None if text.endswith("\n") else writing
        file.flush()
        self._show()

    def _erase(self) -> None:
        if self._drawn:
            up = f"\033[{self._drawn - 1}A" if self._drawn > 1 else ""
            self._put(Printable(f"\r{up}\033[J"))
            self._drawn = 0

    def _show(self) -> None:
        if self._lines and not self._midline:
            self._put(Printable("\n".join(self._lines)))
            self._drawn = len(self._lines)

    def _put(self, text: Printable) -> None:
        put(self._file, text)
        with contextlib.suppress(OSError):
            self._file.flush()


class _Beside:
    """Replaces a terminal file while lines are shown."""

    def __init__(self, live: Live, file: TextIO) -> None:
        self._live = live
        self._beside = file

    def write(self, text: str) -> int:
        return self._live.write(self._beside, text)

    def writelines(self, lines: Sequence[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._live.flush(self._beside)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._beside, name)


def _fit(line: Printable, columns: int) -> Printable:
    """Cut a line to the width of the terminal; colour codes have no width."""
    plain = uncoloured(line)
    return line if width(plain) <= columns else Printable(cut(plain, columns))
