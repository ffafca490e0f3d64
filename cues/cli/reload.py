"""``cues run --reload``: the graph starts anew, with the new code, when its file or a module that it imported changes.

    watcher    the process that the user started: watches files, holds the signals, imports no graph
    run        a process for each start: ``cues run`` with the same arguments

1. The run reports each local Python file to the watcher before Python reads it, with the stamp (time, size, inode) that
   the file has then. So a save in the middle of an import differs from the reported stamp, and is not missed.
2. When a file has another stamp, the watcher waits until no file changes any more, and sends the run SIGTERM: it
   drains, as after a Ctrl-C. After :data:`DRAIN_S` a second signal ends it after the steps under way.
3. When the run has ended, the next one starts. Every end of a run is one after which the next continues exactly, also
   the kill of the watcher; the reload adds nothing to the protocol.
4. A run that ends by itself, with or without an error, is not started again before the next save.
5. The terminal sends a Ctrl-C to both processes. The run ignores it and gets SIGTERM from the watcher instead, so that
   one Ctrl-C is one signal. A run whose watcher is gone drains too: it sees the end of their socket.

Python takes compiled code from its cache if a file has the same second and size as before. A run does not write that
cache, so two saves in a second are two versions.
"""

from __future__ import annotations

import contextlib
import importlib.machinery
import json
import os
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import cues
from cues.cli import options
from cues.graphs import graphfile
from cues.overrides import override

DRAIN_S: Final = 5.0
"""Seconds for which a run whose code changed drains; then it ends after the steps under way."""
_POLL_S: Final = 0.2
"""Seconds between two looks at the files."""

Stamp = tuple[int, int, int] | None


def stamp_of(path: str | Path) -> Stamp:
    """Time, size and inode of a file; None without the file."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size, stat.st_ino


# --- the run --------------------------------------------------------------------------------------


class Watcher:
    """The watcher, as the run sees it. Make it with :func:`watcher`."""

    def __init__(self, descriptor: int, started_before: bool) -> None:
        self.started_before = started_before
        """True if an earlier run has started its graph, so that --fresh has been done."""
        self._socket = socket.socket(fileno=descriptor)
        self._socket.set_inheritable(False)
        self._guard = threading.Lock()
        self._reported: set[str] = set()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        threading.Thread(target=self._wait_for_its_end, name="cues reload", daemon=True).start()

    def follow_imports(self, graph: str) -> None:
        """Report the graph file, and from now on each local file that Python finds for an import."""
        path, _, _ = graphfile.split(graph)
        self.report(str(path.resolve()))
        sys.meta_path.insert(0, _Finder(self))

    def started(self) -> None:
        """Tell that the graph has started."""
        for module in list(sys.modules.values()):  # those that were found by finders of others, and reported by none
            origin = getattr(module, "__file__", None)
            if isinstance(origin, str) and is_local(origin):
                self.report(origin)
        self._send(started=True)

    def report(self, path: str) -> None:
        """Report a file, once, with its stamp."""
        if path not in self._reported:
            self._reported.add(path)
            self._send(file=path, stamp=stamp_of(path))

    def _send(self, **facts: Any) -> None:
        with self._guard, contextlib.suppress(OSError):  # the watcher is gone; the thread below ends the run
            self._socket.sendall(json.dumps(facts).encode() + b"\n")

    def _wait_for_its_end(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.recv(1)
        os.kill(os.getpid(), signal.SIGTERM)


class _Finder(MetaPathFinder):
    """Finds nothing: reports the file that the usual finder will find."""

    def __init__(self, watcher: Watcher) -> None:
        self._watcher = watcher

    @override
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.has_location and spec.origin and is_local(spec.origin):
            self._watcher.report(os.path.abspath(spec.origin))


def is_local(path: str) -> bool:
    """Return whether a Python file belongs to the user's project: not to Python, an installed package or Cues."""
    whole = Path(path).resolve()
    return whole.suffix == ".py" and not any(whole.is_relative_to(folder) for folder in _INSTALLED)


def _installed() -> list[Path]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [*site.getsitepackages(), site.getusersitepackages()]
    ours = Path(cues.__file__).resolve().parent
    return [Path(folder).resolve() for folder in folders] + [ours, (ours / "processors").resolve()]


_INSTALLED: Final = _installed()


def watcher() -> Watcher | None:
    """The watcher that started this process; None in the process that the user started."""
    value = os.environ.pop(options.WATCHER, None)
    if value is None:
        return None
    descriptor, _, before = value.partition(":")
    return Watcher(int(descriptor), before == "1")


# --- the watcher ----------------------------------------------------------------------------------


def watch(arguments: Sequence[str], graph: str, say: Callable[[str], object]) -> int:
    """Start runs, one after another, until a signal ends them; returns the exit code of the last one.

    ``arguments`` are those of the whole command. A run that ends with wrong usage before any has started ends the
    watcher too, because no save can mend a command line.
    """
    files = WatchedFiles(graph)
    has_started = False
    with _Signals() as signals:
        while True:
            run = _Run(arguments, has_started)
            changed = _until_end(run, files, signals, say)
            has_started |= run.started
            code = run.process.returncode
            if signals.came():
                return code if code >= 0 else options.INTERRUPTED
            if code == options.WRONG_USAGE and not has_started:
                return code
            if not changed:
                how = "has ended" if code == 0 else "failed"
                say(f"The run {how}. The next one starts when {files} is saved; Ctrl-C ends.")
                while not files.changed(also_new=code != 0):
                    if signals.came():
                        return options.INTERRUPTED
                    time.sleep(_POLL_S)
            files.settle()


def _until_end(run: _Run, files: WatchedFiles, signals: _Signals, say: Callable[[str], object]) -> bool:
    """Wait until the run has ended; return whether it was ended because a file changed."""
    files.forget()
    forwarded = 0
    changed_at: float | None = None
    is_halted = False
    while True:
        has_ended = run.process.poll() is not None  # before the reports are read, which then are all
        for report in run.reports(0.0 if has_ended else _POLL_S):
            if "file" in report:
                files.note(report["file"], report["stamp"])
            run.started |= "started" in report
        if has_ended:
            run.close()
            return changed_at is not None
        if forwarded < signals.count:
            forwarded += 1
            run.process.terminate()
        elif forwarded:
            continue
        elif changed_at is None:
            path = files.changed()
            if path:
                changed_at = time.monotonic()
                say(f"{graphfile.shown(path)} has changed: the graph ends, and starts with the new code.")
                run.process.terminate()
        elif not is_halted and time.monotonic() - changed_at > DRAIN_S:
            is_halted = True
            run.process.terminate()


class _Run:
    """One process that runs the graph."""

    def __init__(self, arguments: Sequence[str], started_before: bool) -> None:
        self.started = False
        self._socket, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "cues", *arguments],
                pass_fds=(theirs.fileno(),),
                env={
                    **os.environ,
                    options.WATCHER: f"{theirs.fileno()}:{int(started_before)}",
                    "PYTHONDONTWRITEBYTECODE": "1",
                },
            )
        self._rest = b""

    def close(self) -> None:
        """Close the socket, after the end of the process."""
        self._socket.close()

    def reports(self, timeout_s: float) -> Iterable[dict[str, Any]]:
        """The reports that have arrived; wait for at most ``timeout_s`` for the first."""
        self._socket.settimeout(timeout_s)
        pieces = [self._rest]
        with contextlib.suppress(TimeoutError, BlockingIOError, ConnectionError):
            while piece := self._socket.recv(1 << 16):
                pieces.append(piece)
                self._socket.settimeout(0.0)
            if timeout_s:  # its end of the socket is closed: it is about to end
                time.sleep(_POLL_S)
        *lines, self._rest = b"".join(pieces).split(b"\n")
        return [json.loads(line) for line in lines]


class WatchedFiles:
    """The files of the last run, with the stamps that they had when Python read them."""

    def __init__(self, graph: str) -> None:
        self._graph = str(graphfile.split(graph)[0].resolve())
        self.stamps: dict[str, Stamp] = {}
        self._folders: set[str] = set()
        self._beside: dict[str, Stamp] = {}
        """The Python files in the directories of the files: a module that a failed import misses may be made there."""

    @override
    def __str__(self) -> str:
        others = len(self.stamps.keys() - {self._graph})
        more = f" or one of {others} imported files" if others > 1 else " or the imported file" if others else ""
        return f"{graphfile.shown(self._graph)}{more}"

    def forget(self) -> None:
        """Begin a run, which reports its own files."""
        self.stamps, self._folders, self._beside = {}, set(), {}
        self.note(self._graph, stamp_of(self._graph))

    def note(self, path: str, stamp: Sequence[int] | None) -> None:
        """Watch a file, which had this stamp when the run read it."""
        self.stamps[path] = None if stamp is None else (stamp[0], stamp[1], stamp[2])
        folder = os.path.dirname(path)
        if folder not in self._folders:
            self._folders.add(folder)
            self._beside |= _python_files(folder)

    def changed(self, also_new: bool = False) -> str:
        """Return a file that has changed since it was read; with ``also_new`` also one beside the files. Else ""."""
        for path, stamp in self.stamps.items():
            if stamp_of(path) != stamp:
                return path
        if also_new:
            for folder in self._folders:
                for path, stamp in _python_files(folder).items():
                    if path not in self.stamps and stamp != self._beside.get(path):
                        return path
        return ""

    def settle(self) -> None:
        """Wait until no file changes any more: an editor may write in several steps."""
        before: dict[str, Stamp] = {}
        while (now := {path: stamp_of(path) for path in self.stamps}) != before:
            before = now
            time.sleep(_POLL_S / 2)


def _python_files(folder: str) -> dict[str, Stamp]:
    return {str(path): stamp_of(path) for path in Path(folder).glob("*.py")}


class _Signals:
    """Counts SIGINT and SIGTERM inside the block."""

    def __init__(self) -> None:
        self.count = 0
        self._kept: dict[int, Any] = {}

    def _handle(self, number: int, frame: Any) -> None:
        self.count += 1

    def came(self) -> bool:
        """Return whether the user wants the end."""
        return self.count > 0

    def __enter__(self) -> _Signals:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._kept[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._kept.items():
            signal.signal(number, handler)
