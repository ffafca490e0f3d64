"""Who runs a graph on a shared directory, and whether it still does: a courtesy, no lock.

What keeps two drivers apart is that a record is put once (ledger.py). The lease spares them finding out: who
starts and sees another one beat is told its host and pid, and has changed nothing.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import TYPE_CHECKING, Any, Final

from cues.base import clock
from cues.errors import AlreadyRunning
from cues.spark.cluster.files import folder_of
from cues.steps.ownership import LEASE_S
from cues.storage import locks

if TYPE_CHECKING:
    from cues.spark.cluster.files import Files

_LOOK_S: Final = 0.25
_mine: set[str] = set()
"""Owners in this process."""


class DriverLease:
    """The lease of one driver."""

    def __init__(self, files: Files, graph: str, owner: str) -> None:
        self._files = files
        self._name = f"_cues/{folder_of(graph)}.driver.json"
        self._graph = graph
        self._owner = owner
        self._beats = 0

    def acquire(self, take_over: bool) -> None:
        """Have the lease; waits up to :data:`LEASE_S` for a beat of another owner.

        Raises :class:`AlreadyRunning` where there is one, unless ``take_over``.
        """
        text = self._files.read(self._name)
        deadline = time.monotonic() + LEASE_S
        # An empty file is one that is being written just now.
        while text is not None and not take_over and not self._is_dead(text) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            found = self._files.read(self._name)
            if found and found != text:
                other = _parsed(found)
                raise AlreadyRunning(
                    f"The graph {self._graph!r} is run on {self._files.url} by the driver"
                    f" {other.get('pid')} on {other.get('host')}.",
                    "stop that one, or start with take_over=True (cues run --take-over): then it commits nothing more.",
                    pid=other.get("pid") or 0,
                )
            if found is None:
                break  # it was given back
        _mine.add(self._owner)
        self.beat()

    def _is_dead(self, text: str) -> bool:
        """Return True where its owner was a process of this boot and has ended."""
        found = _parsed(text)
        if found.get("boot") != clock.boot_id():
            return False
        if found.get("pid") == os.getpid():
            return found.get("owner") not in _mine
        return locks.process_state(int(found.get("pid", 0))) == "gone"

    def beat(self) -> None:
        """Say that this driver lives."""
        self._beats += 1
        found = {"owner": self._owner, "host": socket.gethostname(), "pid": os.getpid(), "boot": clock.boot_id()}
        self._files.write(self._name, json.dumps({**found, "beat": self._beats}))

    def release(self) -> None:
        """Give it back, if it is still this driver's."""
        _mine.discard(self._owner)
        text = self._files.read(self._name)
        if text and _parsed(text).get("owner") == self._owner:
            self._files.delete(self._name)


def _parsed(text: str) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(text)
    except ValueError:  # it is being written
        return {}
    return found
