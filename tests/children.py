"""Python programs that a test starts: unrelated to its process, as a user's other terminal is."""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

import forks

LINE_TIMEOUT_S = 60


class Child:
    """A Python process that runs ``code`` with ``arguments`` as ``sys.argv[1:]`` and tells the test what it did."""

    def __init__(self, code: str, *arguments: object, **environment: str) -> None:
        given, writing = os.pipe()
        reading, out = os.pipe()
        self._input, self._output = os.fdopen(writing, "w"), os.fdopen(reading)
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.rest = ""
        try:
            variables = {**os.environ, "PYTHONUNBUFFERED": "1", **environment}
            files = given, out, self._errors.fileno()
            self.process = forks.shared().program(code, arguments, files, Path(__file__).parent, variables)
        finally:
            os.close(given)
            os.close(out)
        self.pid = self.process.pid

    def line(self) -> str:
        """The next printed line. If the child has ended, fail with its standard error."""
        found = self._output.readline()
        if not found:
            code = self.returncode()
            raise AssertionError(f"the child ended ({code}) instead of speaking:\n{self.errors()}")
        return found.strip()

    def speaks(self) -> bool:
        """True if it has printed something since the last line that was read, or has ended."""
        return bool(select.select([self._output], [], [], 0)[0])

    def say(self, text: str = "") -> None:
        """Give it a line of input."""
        self._input.write(text + "\n")
        self._input.flush()

    def end(self, timeout_s: float = LINE_TIMEOUT_S * 2) -> str:
        """Wait until it ends well; returns the rest of what it printed."""
        code = self.returncode(timeout_s)
        assert code == 0, f"the child ended with {code}:\n{self.errors()}"
        return self.rest.strip()

    def wait_stopped(self) -> None:
        """Until it has stopped, by a fault or a signal."""
        assert forks.shared().wait(self.pid).stopped

    def errors(self) -> str:
        """Wait until it ends, however; returns what it wrote to its standard error."""
        self.returncode()
        self._errors.seek(0)
        return self._errors.read()

    def returncode(self, timeout_s: float = LINE_TIMEOUT_S * 2) -> int:
        """Wait until it ends, however."""
        with contextlib.suppress(BrokenPipeError):
            self._input.close()
        if not self._output.closed:
            self.rest += self._output.read()
        return self.process.wait(timeout_s)

    def signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """``kill -9``, and wait until it is gone."""
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.kill()
        for file in (self._input, self._output, self._errors):
            with contextlib.suppress(BrokenPipeError):
                file.close()


def run(code: str, *arguments: object, **environment: str) -> str:
    """Run ``code`` to its end and return what it printed."""
    with Child(code, *arguments, **environment) as child:
        return child.end()


def fresh(code: str) -> str:
    """Run ``code`` in an interpreter that has imported nothing yet, and return what it printed."""
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
