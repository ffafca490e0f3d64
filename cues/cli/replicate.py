"""``cues run --replicate``: the follower of a run, in a process of its own.

    parent                                        child (cues follow STORE DEST --with-parent)
    starts it, waits for its first line       →   holds DEST, prints a line
    prints its warnings                       ←   warns when the copy is further behind than --max-lag
    starts it again if it dies                    continues the turn that was interrupted
    ends, however                             →   reads the end of its standard input, copies the last commits, ends

A process of its own, because a copy holds a read transaction for long, and must not take time from the graph. So after
``kill -9`` of the run the copy gets the last commits too, if the machine lives.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import Final

from cues.errors import StoreError

_AGAIN_S: Final = 1.0
"""Time before a follower that died is started again."""
_END_S: Final = 60.0
"""Time that the last turn has before the run ends without it. It goes on, and ends by itself."""


class Replication:
    """The follower of a run. Close it after the run."""

    def __init__(self, store: str, dest: str, max_lag_s: float, say: Callable[[str], None]) -> None:
        """Start it. ``say`` is called, in a thread, with each line that it prints.

        Raises :class:`StoreError` if ``dest`` cannot be used.
        """
        self._command = [store, dest, "--max-lag", str(max_lag_s)]
        self._dest = dest
        self._say = say
        self._ending = threading.Event()
        self._lines: deque[str] = deque(maxlen=20)
        self._guard = threading.Lock()
        """Held while the process is exchanged."""
        self._process = self._start()
        if not self._is_ready():
            self._process.wait()
            raise StoreError(
                f"--replicate {dest} cannot be used: {' '.join(self._lines) or 'its process ended'}",
                "give a directory for the copy, on another disk or a mount; an empty one, or that of an earlier run.",
                path=dest,
            )
        self._watcher = threading.Thread(target=self._watch, name="cues replicate", daemon=True)
        self._watcher.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "cues", "follow", *self._command, "--with-parent"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a Ctrl-C is for the run; the copy gets what the run still commits
        )

    def _is_ready(self) -> bool:
        """Return whether the process follows; keep what it printed instead."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == READY:
                return True
            self._lines.append(line.strip())
        return False

    def _watch(self) -> None:
        while True:
            assert self._process.stdout is not None
            for line in self._process.stdout:
                if line.strip() != READY:
                    self._say(line.strip())
            code = self._process.wait()
            if self._ending.is_set():
                return
            self._say(f"The process that copies to {self._dest} ended ({code}); it is started again.")
            if self._ending.wait(_AGAIN_S):
                return
            with self._guard:
                if not self._ending.is_set():
                    self._process = self._start()

    def close(self) -> bool:
        """Copy the last commits, and end; return whether the copy has everything."""
        with self._guard:
            self._ending.set()
        if self._process.poll() is None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        elif self._process.returncode:  # it died, and has not been started again
            self._process = self._start()
            assert self._process.stdin is not None
            self._process.stdin.close()
            for line in self._process.stdout or ():
                if line.strip() != READY:
                    self._say(line.strip())
        try:
            return self._process.wait(_END_S) == 0
        except subprocess.TimeoutExpired:
            self._say(f"Process {self._process.pid} still copies to {self._dest}, and ends by itself.")
            return False


READY: Final = "following"
"""The line of a follower that holds its directory."""
