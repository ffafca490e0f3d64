"""Processes to kill, cheaply: a clean process that forks, since forking costs a millisecond and importing 200.

    test  ──socket──▶  this file as a program: one thread, everything imported, no store open
                        └─ fork ─▶ a child for each call: runs one function, or dies in it

A function is named ``"module:name"``, takes and returns what pickle takes, and runs in a child that
may open stores, start threads and be killed; nothing of it reaches the next child.
A program (``python -c``) runs in a child as well, which has the files and the variables that it is given
and ends as a Python program does.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import os
import pickle
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

TIMEOUT_S = 120
"""A child that takes longer gets SIGALRM, which no test mistakes for a crash that it asked for."""


class Outcome(NamedTuple):
    """The end of a child: its result, or the signal that killed or stopped it, or its error; and its exit code."""

    pid: int
    value: Any = None
    signal: int = 0
    stopped: bool = False
    error: str = ""
    code: int = 0

    @property
    def killed(self) -> bool:
        return self.signal == signal.SIGKILL and not self.stopped


class Forks:
    """The test's end. The children have imported ``modules``, and the usual ones."""

    def __init__(self, *modules: str) -> None:
        self._modules, self._lock = modules, threading.Lock()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._begin()

    def _begin(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), *self._modules],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a function prints is shown beside its errors
                pass_fds=(theirs.fileno(),),
                cwd=Path(__file__).parent,
            )
        self._processes.append(process)

    def start(self, function: str, *arguments: Any) -> int:
        """Begin a call in a child of its own; returns its pid."""
        return self._ask("start", function, arguments)  # type: ignore[no-any-return]

    def program(
        self,
        code: str,
        words: Iterable[object],
        files: tuple[int, int, int],
        cwd: Path,
        variables: Mapping[str, str],
        leads: bool = False,
    ) -> Started:
        """Begin ``python -c code words`` with these standard files; ``leads``: in a session of its own."""
        reading, writing = os.pipe()
        try:
            pid = self._ask("program", code, [*map(str, words)], cwd, dict(variables), leads, files=(*files, writing))
        finally:
            os.close(writing)
        return Started(self, pid, reading)

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
        self._socket.close()
        for process in self._processes:
            process.wait(10)

    def _ask(self, *question: Any, files: tuple[int, ...] = ()) -> Any:
        with self._lock:
            try:
                _send(self._socket, question, files)
                return _receive(self._socket)[0]
            except BaseException:
                # A time limit came between: the next test would take the answer to this question for its own.
                self._socket.close()
                self._begin()
                raise


class Started:
    """A program that runs, in the words of ``subprocess.Popen``; the pipe ``ends`` is closed when it has ended."""

    def __init__(self, forks: Forks, pid: int, ends: int) -> None:
        self.pid, self.returncode = pid, None
        self._forks, self._ends = forks, ends

    def poll(self) -> int | None:
        """The exit code, as far as it has ended."""
        if self.returncode is None and select.select([self._ends], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Until it ends; raises TimeoutExpired."""
        if self.returncode is None:
            if not select.select([self._ends], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("python -c", timeout or 0)
            os.close(self._ends)
            outcome = self._forks.wait(self.pid)
            self.returncode: int | None = -outcome.signal or outcome.code
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


@functools.cache
def shared(*modules: str) -> Forks:
    """The one of this process with these modules, from its first use to its end."""
    found = Forks(*modules)
    atexit.register(found.close)
    return found


def _send(other: socket.socket, value: Any, files: tuple[int, ...] = ()) -> None:
    raw = pickle.dumps(value)
    socket.send_fds(other, [struct.pack(">I", len(raw))], files)
    other.sendall(raw)


def _receive(other: socket.socket) -> tuple[Any, list[int]]:
    head, files, _, _ = socket.recv_fds(other, 4, 4)
    if len(head) < 4:
        raise EOFError
    return pickle.loads(other.recv(struct.unpack(">I", head)[0], socket.MSG_WAITALL)), files


def _child(function: str, arguments: tuple[Any, ...], result: str) -> None:
    signal.alarm(TIMEOUT_S)
    try:
        module, _, name = function.partition(":")
        value = getattr(importlib.import_module(module), name)(*arguments)
        answer = (list(value) if isinstance(value, Iterator) else value, "")
    except BaseException:
        answer = (None, traceback.format_exc())
    try:
        with open(result + ".part", "wb") as file:
            file.write(pickle.dumps(answer))
        os.rename(result + ".part", result)
    finally:  # without its directory, nobody waits for the result
        os._exit(0)


def _program(code: str, words: list[str], cwd: Path, variables: dict[str, str], leads: bool, files: list[int]) -> None:
    """Run the code as ``python -c`` does, to the end of the process."""
    if leads:
        os.setsid()
        if os.isatty(files[0]):
            fcntl.ioctl(files[0], termios.TIOCSCTTY, 0)
    for number in range(3):
        os.dup2(files[number], number)
        os.close(files[number])
    os.set_inheritable(files[3], False)  # open until this process has ended
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(variables)
    time.tzset()
    sys.argv = ["-c", *words]
    sys.path[:2] = ["", *filter(None, variables.get("PYTHONPATH", "").split(os.pathsep))]  # for the tests' directory
    unbuffered = "PYTHONUNBUFFERED" in variables
    sys.stdout.reconfigure(line_buffering=os.isatty(1), write_through=unbuffered)  # type: ignore[union-attr]
    gc.enable()
    from cues import faults

    faults.arm_from_environment()
    main = sys.modules["__main__"] = ModuleType("__main__")
    status: Any = 0
    try:
        exec(compile(code, "<string>", "exec", dont_inherit=True), main.__dict__)
    except SystemExit as ended:
        status = ended.code
        if not isinstance(status, int | None):
            print(status, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status or 0)


def _serve(test: socket.socket) -> None:
    directory = tempfile.mkdtemp(prefix="cues-forks-")
    try:
        while True:
            question, files = _receive(test)
            _send(test, _answer(test, directory, files, *question))
    except (EOFError, ConnectionError):  # the test has closed its end
        shutil.rmtree(directory)


def _answer(test: socket.socket, directory: str, files: list[int], question: str, *rest: Any) -> Any:
    if question in ("start", "program"):
        pid = os.fork()
        if pid == 0:
            test.close()
            if question == "program":
                _program(*rest, files)
            _child(*rest, os.path.join(directory, str(os.getpid())))
        for file in files:
            os.close(file)
        return pid
    (pid,) = rest
    _, status = os.waitpid(pid, os.WUNTRACED)
    result = os.path.join(directory, str(pid))
    if os.WIFSTOPPED(status):
        return Outcome(pid, signal=os.WSTOPSIG(status), stopped=True)
    if os.WIFSIGNALED(status):
        return Outcome(pid, signal=os.WTERMSIG(status))
    if os.path.exists(result):
        with open(result, "rb") as file:
            value, error = pickle.loads(file.read())
        os.unlink(result)
        return Outcome(pid, value, error=error)
    return Outcome(pid, code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    # Under one name for both ends of the pipe, so that what one pickles the other knows.
    sys.path.insert(0, str(Path(__file__).parent))
    import forks

    for module in ("scenarios", "cues.testing", "cues.engine.local", "consumers", "httpx", *sys.argv[2:]):
        with contextlib.suppress(ImportError):  # of an extra that is not installed
            importlib.import_module(module)
    from cues.cli import app

    for command in app.COMMANDS:
        app.load(command)
    gc.disable()  # collecting would copy every page that a child shares with its parent
    gc.freeze()
    forks._serve(socket.socket(fileno=int(sys.argv[1])))
