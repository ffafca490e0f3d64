"""Processes that a test starts with ``sys.executable -c``: unrelated to it, as a user's other terminal is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType

LINE_TIMEOUT_S = 60


class Child:
    """A Python process that runs ``code`` with ``arguments`` as ``sys.argv[1:]`` and tells the test what it did."""

    def __init__(self, code: str, *arguments: object, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
            env={**os.environ, **environment},
        )
        self.pid = self._process.pid

    def line(self) -> str:
        """The next printed line. If the child has ended, fail with its standard error."""
        assert self._process.stdout is not None
        found = self._process.stdout.readline()
        if not found:
            _, errors = self._process.communicate(timeout=LINE_TIMEOUT_S)
            raise AssertionError(f"the child ended ({self._process.returncode}) instead of speaking:\n{errors}")
        return found.strip()

    def say(self, text: str = "") -> None:
        """Give it a line of input."""
        assert self._process.stdin is not None
        self._process.stdin.write(text + "\n")
        self._process.stdin.flush()

    def end(self, timeout_s: float = LINE_TIMEOUT_S * 2) -> str:
        """Wait until it ends well; returns the rest of what it printed."""
        out, errors = self._process.communicate(timeout=timeout_s)
        assert self._process.returncode == 0, f"the child ended with {self._process.returncode}:\n{errors}"
        return out.strip()

    def errors(self) -> str:
        """Wait until it ends, however; returns what it wrote to its standard error."""
        return self._process.communicate(timeout=LINE_TIMEOUT_S * 2)[1]

    def returncode(self, timeout_s: float = LINE_TIMEOUT_S * 2) -> int:
        """Wait until it ends, however."""
        self._process.communicate(timeout=timeout_s)
        return self._process.returncode

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """``kill -9``, and wait until it is gone."""
        self._process.kill()
        self._process.communicate()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._process.poll() is None:
            self.kill()


def run(code: str, *arguments: object, **environment: str) -> str:
    """Run ``code`` to its end and return what it printed."""
    with Child(code, *arguments, **environment) as child:
        return child.end()
