"""One worker process, as its supervisor uses it: spawned, sent messages, and read.

    control     supervisor to worker; when this pipe ends, the worker knows that the supervisor is gone
    reports     worker to supervisor (wire.py)
    out, err    the output of the worker, in whole lines
    marks       shared memory with WORDS 64-bit words for each unit:
                0  1 while the unit is in a step
                1  the input of the call under way
                2  the index of its first message
                3  the number of its messages
    pidfd       readable when the process is dead (Linux; elsewhere the end of `reports` shows it)

The worker also keeps the reading ends of its own `out` and `err` open, so that a print never fails. Otherwise, after
the death of the supervisor and before the end of the worker, a print would raise in the user's function, and its
message would fail.
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
    "import os, sys; path = sys.argv.pop(1).split(os.pathsep); sys.path += path;"
    " from cues.engine.workers import main; sys.path[:] = path; main(*map(int, sys.argv[1:]))"
)
"""The modules of the worker come first from the places of the interpreter: a graph file may be named queue.py."""
_READ_BYTES: Final = 1 << 16
UNITS_MAX: Final = 1 << 16
"""Most units of one worker, with those of partitions that come while it runs. Untouched memory costs nothing."""

Status = Literal["loading", "assembling", "running", "waiting", "left"]
"""waiting: it could not begin now, and another is started later; left: it has nothing more to do."""


class Child:
    """A worker process. Only the supervisor's thread uses it, and the same thread must make it."""

    def __init__(self, name: str, units: Sequence[str]) -> None:
        """Spawn it. It ends when the calling thread ends."""
        self.name = name
        self.units = tuple(units)
        self.status: Status = "loading"
        self.status_reply: wire.StatusReply | None = None
        """The last status of its processors."""
        self.answer: wire.StatusReply | None = None
        """The last status that was asked for."""
        self.stopped_since: float | None = None
        """The time at which it was first seen stopped (SIGSTOP)."""
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
                [sys.executable, "-P", "-c", _BOOT, *arguments], pass_fds=theirs, stdout=out[1], stderr=err[1]
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
        """The descriptors to poll for reading."""
        return [*self._open, *([] if self._pidfd is None else [self._pidfd])]

    @property
    def in_step(self) -> set[str]:
        """The units that are in a step, or were in one when the worker died."""
        return {unit for place, unit in enumerate(self.units) if self._marks[place * WORDS]}

    @property
    def calls(self) -> dict[str, tuple[int, int, int]]:
        """By unit: input, index and count of the messages of the call that is, or was, under way."""
        calls = {}
        for place, unit in enumerate(self.units):
            at = place * WORDS
            if self._marks[at] and self._marks[at + 3]:
                calls[unit] = (self._marks[at + 1], self._marks[at + 2], self._marks[at + 3])
        return calls

    def send(self, message: Any) -> None:
        """Send a message. It is lost if the worker is dead, or was stopped for so long that the pipe is full."""
        os.set_blocking(self._control, isinstance(message, (wire.LoadGraph, wire.AssignUnits, wire.More)))
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(self._control, wire.pack(message))

    def give(self, units: Sequence[str]) -> None:
        """Let the worker run these units too."""
        self.units += tuple(units)
        self.send(wire.More(tuple(units)))

    def read(self, fd: int) -> Iterator[Any]:
        """Yield the input of a descriptor: messages of :mod:`wire`, or pairs (True for stderr, line)."""
        while fd in self._open:
            try:
                raw = os.read(fd, _READ_BYTES)
            except BlockingIOError:
                return
            if not raw:
                self._open.discard(fd)
            if fd == self._reports:
                yield from self._unpacker.feed(raw)
            else:
                yield from ((fd == self._err, line) for line in self._lines[fd].feed(raw))

    def read_all(self) -> Iterator[Any]:
        """Yield the rest of the input of all descriptors, after the worker died."""
        for fd in (self._reports, *self._lines):
            yield from self.read(fd)
            if fd in self._lines:
                yield from ((fd == self._err, line) for line in self._lines[fd].feed(b""))

    def dead(self) -> bool:
        return self.process.poll() is not None

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)

    def close(self) -> None:
        """Close the descriptors of a worker that is dead."""
        for fd in (self._reports, self._control, *self._lines, *([] if self._pidfd is None else [self._pidfd])):
            os.close(fd)
        self._marks.release()
        self._mapping.close()

    def death(self) -> str:
        """Describe how it died."""
        code = self.process.returncode
        if code is None or code >= 0:
            return f"ended with exit code {code}"
        try:
            return f"was killed by {signal.Signals(-code).name}"
        except ValueError:
            return f"was killed by signal {-code}"


class _Lines:
    """Cuts bytes into whole lines. No bytes mean the end, and give the rest as a line."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, raw: bytes) -> list[str]:
        if not raw:
            lines, self._rest = ([self._rest] if self._rest else []), b""
        else:
            *lines, self._rest = (self._rest + raw).split(b"\n")
        return [line.decode("utf-8", "replace") for line in lines]


def _shared_memory(size: int) -> int:
    """Return a descriptor of ``size`` bytes, all 0, that two processes can map."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("cues worker")
    else:
        fd, path = tempfile.mkstemp()
        os.unlink(path)
    os.truncate(fd, size)
    return fd
