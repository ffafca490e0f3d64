"""The command line from outside: in pipes, and on a terminal of its own.

with Command("run", graph) as running:
    running.until('"type": "progress"')        # told, not slept
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
import subprocess
import sys
import termios
import time
from pathlib import Path
from typing import NamedTuple

CUES = [sys.executable, "-c", "from cues.cli import main; main()"]
TIMEOUT_S = 40


class Result(NamedTuple):
    code: int
    out: str
    err: str


def environment(**more: str) -> dict[str, str]:
    """This process's, without what would change a command's manners."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("CUES_") and k not in ("NO_COLOR", "COLUMNS")}
    return {**kept, "TERM": "xterm", "NO_COLOR": "1", **more}


def cues(*arguments: object, stdin: str | bytes = b"", cwd: Path | None = None, **env: str) -> Result:
    """Run a command in pipes until it ends."""
    found = subprocess.run(
        [*CUES, *map(str, arguments)],
        input=stdin.encode() if isinstance(stdin, str) else stdin,
        capture_output=True,
        timeout=TIMEOUT_S,
        cwd=cwd,
        env=environment(**env),
    )
    return Result(found.returncode, found.stdout.decode(), found.stderr.decode())


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
        self.process = subprocess.Popen(
            [*CUES, *map(str, arguments)],
            stdin=stdin if terminal else subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=cwd,
            env=environment(**env),
            start_new_session=True,
            preexec_fn=_take_terminal if terminal else None,
        )
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


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
