"""Turns: an instance of a consumer waits while another one runs, so that two of them do not fence each other for ever.

    1. wait     read the lease until it ends: it was given back, its process is gone, or it has not changed for
                ``lease_s``
    2. restore  raise the fence of the checkpoint if it is still that of 1, and write a lease; otherwise 1 again
    3. beat     write the lease with another number every quarter of ``lease_s``, in a thread
    4. end      when the run ends, whatever ends it: give the lease back

The lease is kept with the checkpoint. It holds no time, only an owner and a number that changes: each waiting instance
measures by its own clock how long the number has not changed. So the clocks of several machines need not agree.

Not guaranteed: that one instance runs at a time. An owner that is stopped for longer than ``lease_s`` is replaced. The
fence of the checkpoint refuses its commits; safety never depends on the lease. An owner that hangs but beats is not
replaced: end its process, or start the other one with ``lease_s=0``, which does not wait.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Protocol

from cues.base import clock
from cues.errors import CuesError, Fenced
from cues.producers.sequencer import Checkpoint
from cues.storage import locks

LEASE_S: Final = 10.0
"""Seconds without a beat after which another instance takes over."""
_LOOKS: Final = 40
"""The number of looks at the lease in the time of one lease."""
_LOOK_S: Final = 0.1
"""The longest time between two looks, so that a stop ends the wait soon."""

_numbers = itertools.count(1)
_running: set[str] = set()
"""The owners of leases that run in this process."""


class LeasedCheckpoint(Protocol):
    """A checkpoint that keeps a lease, as those of :mod:`cues.checkpoints`."""

    def restore(self, fence: int | None = None, lease: str = "") -> Checkpoint | None:
        """Raise the fence and write the lease, so that nobody sees one without the other.

        With ``fence``, raise :class:`cues.Fenced` and do nothing if the fence is another one.
        """

    def lease(self) -> tuple[int, str]:
        """Return the fence and the text of the lease; an empty text if there is none."""

    def set_lease(self, text: str) -> None:
        """Write the lease. Raises :class:`cues.Fenced`, and writes nothing, after another object restored."""


class Turn:
    """The turn of one instance."""

    def __init__(self, checkpoint: LeasedCheckpoint, lease_s: float) -> None:
        self._checkpoint = checkpoint
        self._lease_s = lease_s
        self.waits = lease_s > 0
        self._owner = ""
        self._beats = itertools.count(1)
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.lost: Fenced | None = None
        """The error of a beat after another instance has taken over."""

    def wait(self, stopped: Callable[[], bool]) -> int | None:
        """Wait until no other instance runs; return the fence at that moment, or None if ``stopped()`` ended the wait.

        The restore that follows is for this fence only. Otherwise two instances that waited would both take over.
        """
        last = self._checkpoint.lease()
        changed = time.monotonic()
        while not is_over(last[1]) and time.monotonic() - changed < self._lease_s:
            if stopped():
                return None
            time.sleep(min(_LOOK_S, self._lease_s / _LOOKS))
            now = self._checkpoint.lease()
            if now != last:  # a beat, or another instance was faster
                last, changed = now, time.monotonic()
        return None if stopped() else last[0]

    def begin(self, restore: Callable[..., Any] | None, *fence: int) -> Any:
        """Take the lease together with ``restore(fence, lease)``, or again for another run; return its result.

        Raises :class:`cues.Fenced` if another instance has taken over since.
        """
        self._owner = f"{_process(os.getpid())} {next(_numbers)}"
        self._ended = threading.Event()
        _running.add(self._owner)
        try:
            restored = None if restore is None else restore(*fence or (None,), self._text())
            if restore is None:
                self._beat()
        except BaseException:
            _running.discard(self._owner)
            raise
        if self.waits:
            self._thread = threading.Thread(
                target=self._keep, args=(self._ended,), name="cues consumer lease", daemon=True
            )
            self._thread.start()
        return restored

    def end(self) -> None:
        """Give the lease back. May be repeated, and does nothing before :meth:`begin`."""
        self._ended.set()
        owner, thread, self._thread = self._owner, self._thread, None
        if not owner:
            return
        if thread is not None and thread is not threading.current_thread():
            thread.join()  # a late beat would look like a new lease
        self._owner = ""
        try:
            with contextlib.suppress(CuesError, OSError):  # taken over, or not reachable: the lease ends by itself
                self._checkpoint.set_lease("")
        finally:
            _running.discard(owner)  # last: who sees it sooner writes its own lease, which would be deleted here

    def _keep(self, ended: threading.Event) -> None:
        while not ended.wait(self._lease_s / 4):
            try:
                self._beat()
            except Fenced as error:
                self.lost = error
                return
            except (CuesError, OSError):
                continue  # the database is away, for example: the next commit of the consumer tells

    def _beat(self) -> None:
        self._checkpoint.set_lease(self._text())

    def _text(self) -> str:
        return f"{self._owner} {next(self._beats)}"


def _process(pid: int) -> str:
    """Return the identity of a process: boot, namespace of process ids, id and time of its start."""
    namespace = start = "-"
    with contextlib.suppress(OSError, IndexError):  # Linux only
        namespace = str(os.stat("/proc/self/ns/pid").st_ino)
        start = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{clock.boot_id()} {namespace} {pid} {start}"


def is_over(text: str) -> bool:
    """Return whether a lease was given back, or its process is known to be gone."""
    if not text:
        return True
    owner, _, _ = text.rpartition(" ")
    process, _, _ = owner.rpartition(" ")
    own = _process(os.getpid())
    if process == own:
        return owner not in _running
    *place, pid, start = process.split(" ")
    if place != own.split(" ")[:2] or not pid.isdecimal():
        return False  # on another machine, or in another container: only its beats tell
    return locks.process_state(int(pid)) in ("gone", "dead, not reaped") or _process(int(pid)).split(" ")[-1] != start
