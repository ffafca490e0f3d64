"""The command line from outside: with files, in pipes, and on a terminal of its own. It runs in a forked process.

with Command("run", graph) as running:
    running.until("started")  # told, not slept
    running.signal(SIGINT)
assert running.code == 130
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import tempfile
import termios
import time
from pathlib import Path
from typing import NamedTuple

import forks

CUES = [sys.executable, "-c", "from cues.cli import main; main()"]
TIMEOUT_S = 100

LIVE = """
import itertools, time
import cues
graph = cues.Graph("live", durability="process")

@graph.source("ticks")
def ticks(position, process):
    for n in itertools.count(position or 0):
        if process.stopping:
            return
        yield n + 1, {"n": n}
        time.sleep(0.001)

@graph.stream("ticks", "tocks")
def tock(tick):
    return tick
"""
"""A graph that does not end: a source of numbers, and a stage that copies them."""


class Result(NamedTuple):
    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """This process's, without what would change a command's manners."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("CUES_") and k not in ("NO_COLOR", "COLUMNS")}
    return {**kept, "TERM": "xterm", "NO_COLOR": "1", **more}


def cues(*arguments: object, stdin: str | bytes = b"", cwd: Path | None = None, **env: str) -> Result:
    """Run a command until it ends; none of its files is a terminal."""
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode() if isinstance(stdin, str) else stdin)
        given.seek(0)
        process = _start(arguments, (given.fileno(), out.fileno(), err.fileno()), cwd, env)
        try:
            code = process.wait(TIMEOUT_S)
        finally:
            process.kill()
        out.seek(0)
        err.seek(0)
        return Result(code, out.read().decode(), err.read().decode())


def _start(
    arguments: tuple[object, ...],
    files: tuple[int, int, int],
    cwd: Path | None,
    env: dict[str, str],
    leads: bool = False,
) -> forks.Started:
    return forks.shared().program(CUES[-1], arguments, files, cwd or Path.cwd(), environment(**env), leads)


class Command:
    """A command that continues to run, in pipes (stdout and stderr as one text) or on a terminal."""

    def __init__(self, *arguments: object, terminal: bool = False, cwd: Path | None = None, **env: str) -> None:
        self.text = ""
        self.code: int | None = None
        master = stdin = None
        if terminal:
            master, slave = pty.openpty()
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
            stdin = out = slave
            self._read = master
        else:
            self._read, out = os.pipe()
        self._master = master
        given = os.open(os.devnull, os.O_RDONLY) if stdin is None else stdin
        try:
            self.process = _start(arguments, (given, out, out), cwd, env, leads=True)
        finally:
            if given != out:
                os.close(given)
        os.close(out)

    @property
    def pid(self) -> int:
        return self.process.pid

    def until(self, pattern: str) -> str:
        """Read until the text matches; returns what was read by then."""
        deadline = time.monotonic() + TIMEOUT_S
        while not re.search(pattern, self.text):
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._read], [], [], max(0.0, left))
            assert ready, f"no {pattern!r} in {self.text[-2000:]!r}"
            piece = self._piece()
            assert piece, f"ended without {pattern!r}: {self.text[-2000:]!r}"
        return self.text

    def type(self, text: str) -> None:
        """Press keys; ``\\x03`` is Ctrl-C."""
        assert self._master is not None
        os.write(self._master, text.encode())

    def signal(self, number: int = signal.SIGINT) -> None:
        os.kill(self.pid, number)

    def wait(self) -> int:
        """Until it ends; returns the exit code."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"does not end: {self.text[-2000:]!r}"
            if not self._piece():
                break
        self.code = self.process.wait(TIMEOUT_S)
        return self.code

    def _piece(self) -> bool:
        try:
            found = os.read(self._read, 65536)
        except OSError:  # a terminal whose last user ended
            return False
        self.text += found.decode("utf-8", "replace")
        return bool(found)

    @property
    def screen(self) -> str:
        """The final text of a terminal, without the text that was erased."""
        lines: list[str] = [""]
        at = 0
        for piece in re.split(r"(\r\n|\n|\r|\033\[\d*[A-Za-z])", self.text):
            if piece in ("\n", "\r\n"):
                at += 1
                if at == len(lines):
                    lines.append("")
            elif piece.startswith("\033["):
                if piece.endswith("A"):
                    at -= int(piece[2:-1] or 1)
                elif piece.endswith("J"):
                    del lines[at:]
                    lines.append("")
            elif piece and piece != "\r":
                lines[at] += piece
        return "\n".join(lines)

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._read)
