"""Processes to kill, cheaply: a clean process that forks, since forking costs a millisecond and importing 200.

    test  ──pipe──▶  this file as a program: one thread, everything imported, no store open
                        └─ fork ─▶ a child for each call: runs one function, or dies in it

A function is named ``"module:name"``, takes and returns what pickle takes, and runs in a child that
may open stores, start threads and be killed; nothing of it reaches the next child.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import signal
import struct
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

TIMEOUT_S = 120
"""A child that takes longer gets SIGALRM, which no test mistakes for a crash that it asked for."""


class Outcome(NamedTuple):
    """The end of a child: its result, or the signal that killed or stopped it, or its error."""

    pid: int
    value: Any = None
    signal: int = 0
    stopped: bool = False
    error: str = ""

    @property
    def killed(self) -> bool:
        return self.signal == signal.SIGKILL and not self.stopped


class Forks:
    """The test's end."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parent
        )

    def start(self, function: str, *arguments: Any) -> int:
        """Begin a call in a child of its own; returns its pid."""
        return self._ask("start", function, arguments)  # type: ignore[no-any-return]

    def wait(self, pid: int) -> Outcome:
        """Until the child ends or stops."""
        return self._ask("wait", pid)  # type: ignore[no-any-return]

    def run(self, function: str, *arguments: Any) -> Outcome:
        """Start and wait; raises AssertionError with the child's traceback when it failed."""
        outcome = self.wait(self.start(function, *arguments))
        assert not outcome.error, outcome.error
        assert outcome.signal != signal.SIGALRM, f"{function}{arguments} took longer than {TIMEOUT_S} s"
        return outcome

    def kill(self, pid: int, number: int = signal.SIGKILL) -> None:
        os.kill(pid, number)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(10)

    def _ask(self, *question: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        _send(self._process.stdin, question)
        return _receive(self._process.stdout)


def _send(file: Any, value: Any) -> None:
    raw = pickle.dumps(value)
    file.write(struct.pack(">I", len(raw)) + raw)
    file.flush()


def _receive(file: Any) -> Any:
    head = file.read(4)
    if len(head) < 4:
        raise EOFError
    return pickle.loads(file.read(struct.unpack(">I", head)[0]))


def _child(function: str, arguments: tuple[Any, ...], result: str) -> None:
    signal.alarm(TIMEOUT_S)
    try:
        module, _, name = function.partition(":")
        value = getattr(importlib.import_module(module), name)(*arguments)
        answer = (list(value) if isinstance(value, Iterator) else value, "")
    except BaseException:
        answer = (None, traceback.format_exc())
    with open(result + ".part", "wb") as file:
        file.write(pickle.dumps(answer))
    os.rename(result + ".part", result)
    os._exit(0)


def _serve() -> None:
    source, target = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    with tempfile.TemporaryDirectory(prefix="cues-forks-") as directory:
        while True:
            try:
                question, *rest = _receive(source)
            except EOFError:
                return
            if question == "start":
                pid = os.fork()
                if pid == 0:
                    _child(*rest, os.path.join(directory, str(os.getpid())))
                _send(target, pid)
            else:
                (pid,) = rest
                _, status = os.waitpid(pid, os.WUNTRACED)
                result = os.path.join(directory, str(pid))
                outcome = Outcome(pid)
                if os.WIFSTOPPED(status):
                    outcome = Outcome(pid, signal=os.WSTOPSIG(status), stopped=True)
                elif os.WIFSIGNALED(status):
                    outcome = Outcome(pid, signal=os.WTERMSIG(status))
                elif os.path.exists(result):
                    with open(result, "rb") as file:
                        value, error = pickle.loads(file.read())
                    os.unlink(result)
                    outcome = Outcome(pid, value, error=error)
                _send(target, outcome)


if __name__ == "__main__":
    # Under one name for both ends of the pipe, so that what one pickles the other knows.
    sys.path.insert(0, str(Path(__file__).parent))
    import forks

    for module in ("scenarios", "cues.testing", "cues.engine.local", "consumers", "httpx"):
        with contextlib.suppress(ImportError):  # of an extra that is not installed
            importlib.import_module(module)
    gc.disable()  # collecting would copy every page that a child shares with its parent
    gc.freeze()
    forks._serve()
