"""One worker process, as its supervisor holds it: how it is spawned, spoken to and heard.

    control     supervisor to worker; its end is how a worker hears that the supervisor is gone
    reports     worker to supervisor (wire.py)
    out, err    what the worker prints, in whole lines
    marks       shared memory: WORDS 64-bit words for each unit: 1 while it is in a step; and of the function
                that is called in it the input, the index of its first message, and how many these are
    pidfd       readable when the process is dead (Linux; elsewhere the end of `reports` says it)

The worker also holds the reading ends of its own `out` and `err`, so that a print never fails: behind
the death of a supervisor it would fail the function that prints, and its message with it, in the moment
before the worker ends as well.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

from cues.engine import wire
from cues.engine.wire import WORDS

_BOOT: Final = (
    "import os, sys; sys.path[:] = sys.argv.pop(1).split(os.pathsep);"
    " from cues.engine.workers import main; main(*map(int, sys.argv[1:]))"
)
_READ_BYTES: Final = 1 << 16
UNITS_MAX: Final = 1 << 16
"""Room for what one worker may carry, with the partitions that come while it runs; untouched pages cost nothing."""

Status = Literal["loading", "assembling", "running", "waiting", "left"]
"""waiting: it could not begin now, and another is started later; left: it has nothing to do any more."""


class Child:
    """A worker process. Used by the supervisor's thread alone, which must be the one that made it."""

    def __init__(self, name: str, units: Sequence[str]) -> None:
        """Spawn it. It ends when the calling thread does, so that must be one that stays."""
        self.name = name
        self.units = tuple(units)
        self.status: Status = "loading"
        self.stand: wire.StatusReply | None = None
        """What it said last of its processors."""
        self.answer: wire.StatusReply | None = None
        """What it answered last."""
        self.stopped_since: float | None = None
        """When it was first seen stopped (SIGSTOP)."""
        self.started_at = time.monotonic()
        control, self._control = os.pipe()
        self._reports, reports = os.pipe()
        out = os.pipe()
        err = os.pipe()
        marks = _shared_memory(UNITS_MAX * WORDS * 8)
        self._mapping = mmap.mmap(marks, 0)
        self._marks = memoryview(self._mapping).cast("Q")
        theirs = (control, reports, marks, out[0], err[0])
        arguments = [os.pathsep.join(sys.path), *map(str, (control, reports, marks, os.getpid()))]
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *arguments], pass_fds=theirs, stdout=out[1], stderr=err[1]
            )
        finally:
            for fd in (control, reports, marks, out[1], err[1]):
                os.close(fd)
        self.pid = self.process.pid
        self._unpacker = wire.Unpacker()
        self._lines = {out[0]: _Lines(), err[0]: _Lines()}
        self._err = err[0]
        self._open = {self._reports, *self._lines}
        for fd in self._open:
            os.set_blocking(fd, False)
        self._pidfd = os.pidfd_open(self.pid) if hasattr(os, "pidfd_open") else None

    @property
    def descriptors(self) -> list[int]:
        """What to poll for reading."""
        return [*self._open, *([] if self._pidfd is None else [self._pidfd])]

    @property
    def in_step(self) -> set[str]:
        """The units that are, or were at the death, between taking messages and finding none."""
        return {unit for place, unit in enumerate(self.units) if self._marks[place * WORDS]}

    @property
    def calls(self) -> dict[str, tuple[int, int, int]]:
        """By unit: input, index and count of the messages that its function is, or was, called for."""
        found = {}
        for place, unit in enumerate(self.units):
            at = place * WORDS
            if self._marks[at] and self._marks[at + 3]:
                found[unit] = (self._marks[at + 1], self._marks[at + 2], self._marks[at + 3])
        return found

    def send(self, message: Any) -> None:
        """Say something; to a worker that is dead, or stopped and has not read for long, it is lost."""
        os.set_blocking(self._control, isinstance(message, (wire.LoadGraph, wire.AssignUnits, wire.More)))
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._control, wire.pack(message))

    def give(self, units: Sequence[str]) -> None:
        """Let it carry these too."""
        self.units += tuple(units)
        self.send(wire.More(tuple(units)))

    def hear(self, fd: int) -> Iterator[wire.StatusReply | Any]:
        """What came in on a descriptor: messages of :mod:`wire`, and pairs of (is it of stderr, line)."""
        while fd in self._open:
            try:
                found = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not found:
                self._open.discard(fd)
            if fd == self._reports:
                yield from self._unpacker.feed(found)
            else:
                for line in self._lines[fd].feed(found):
                    yield fd == self._err, line

    def hear_all(self) -> Iterator[Any]:
        """What is left on all descriptors; for a worker that is dead."""
        for fd in (self._reports, *self._lines):
            yield from self.hear(fd)
            if fd in self._lines:
                for line in self._lines[fd].feed(b""):
                    yield fd == self._err, line

    def dead(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Let go of a worker that is dead."""
        for fd in (self._reports, self._control, *self._lines, *([] if self._pidfd is None else [self._pidfd])):
            os.close(fd)
        self._marks.release()
        self._mapping.close()

    def death(self) -> str:
        """How it died, in words."""
        code = self.process.returncode
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"


class _Lines:
    """Bytes in, whole lines out; the end gives what is left."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, found: bytes) -> list[str]:
        if not found:
            lines, self._rest = ([self._rest] if self._rest else []), b""
        else:
            *lines, self._rest = (self._rest + found).split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]


def _shared_memory(size: int) -> int:
    """A descriptor of so many bytes, all 0, that two processes can map."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("cues worker")
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
    os.truncate(fd, size)
    return fd
