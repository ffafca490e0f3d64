"""A few lines at the bottom of a terminal that are redrawn while other code prints.

While they are shown, ``sys.stdout`` and ``sys.stderr`` are replaced by objects that remove the lines,
write, and draw the lines again after the next whole line. So a ``print`` inside a graph looks normal.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Literal, TextIO

from cues.cli.output import cut, width
from cues.cli.printing import Printable, err, escaped, is_terminal, put, uncoloured

_SAY_AFTER_S: Final = 1.0
"""The time until the first progress report, and between two reports; shorter work reports none."""


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


class Live:
    """Lines on a terminal, stderr or stdout. A context manager, whose end removes them."""

    def __init__(self, name: Literal["stdout", "stderr"] = "stderr") -> None:
        self._file: TextIO = getattr(sys, name)
        self._lines: list[Printable] = []
        self._drawn = 0
        self._midline = False
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
        sys.stdout, sys.stderr = self._kept

    def draw(self, lines: Sequence[str]) -> None:
        """Show these lines instead of the last ones, as many as fit on the terminal."""
        import shutil

        columns, rows = shutil.get_terminal_size()
        with self._lock:
            self._erase()
            self._lines = [_fit(escaped(line), columns - 1) for line in lines[: max(1, rows - 2)]]
            self._show()

    def write(self, file: TextIO, text: str) -> int:
        """Write ``text`` to ``file`` as if the lines were not there."""
        with self._lock:
            self._erase()
            count = file.write(text)
            if text:
                self._midline = not text.endswith("\n")
            file.flush()
            self._show()
            return count

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

    def __getattr__(self, name: str) -> Any:
        return getattr(self._beside, name)


def _fit(line: Printable, columns: int) -> Printable:
    """Cut a line to the width of the terminal; colour codes have no width."""
    plain = uncoloured(line)
    return line if width(plain) <= columns else Printable(cut(plain, columns))
