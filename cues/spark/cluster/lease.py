"""The lease of a driver: which driver runs a graph on a shared directory, and whether it still does.

It is not a lock. Two drivers are kept apart because a record is put only once (ledger.py). With the lease a second
driver is refused at its start, with the host and the pid of the first one, before it has changed anything.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Literal

from cues.base import clock
from cues.base.data import dataclass
from cues.errors import AlreadyRunning
from cues.records import sealed
from cues.spark.cluster.files import folder_of, name_of, time_of
from cues.spark.place import this_machine
from cues.steps.ownership import LEASE_BEAT_S, LEASE_S
from cues.storage import locks

if TYPE_CHECKING:
    from cues.spark.cluster.files import Files

_LOOK_S: Final = 0.25
_FORM: Final = {"owner?": str, "host?": str, "pid?": int, "machine?": str, "beat?": int, "since?": str, "time?": str}
_mine: set[str] = set()
"""The owners in this process."""


@contextlib.contextmanager
def held(files: Files, graph: str, owner: str, take_over: bool) -> Iterator[None]:
    """Hold the lease of a graph during the block. Raises :class:`AlreadyRunning` as :meth:`DriverLease.acquire`."""
    lease, ended = DriverLease(files, graph, owner), threading.Event()

    def beat() -> None:
        while not ended.wait(LEASE_BEAT_S):
            with contextlib.suppress(Exception):  # safety does not depend on the lease
                lease.beat()

    beating = threading.Thread(target=beat, name="cues lease on the directory", daemon=True)
    try:
        lease.acquire(take_over)
        beating.start()
        yield
    finally:
        ended.set()
        if beating.ident is not None:
            beating.join()
        lease.release()


class DriverLease:
    def __init__(self, files: Files, graph: str, owner: str) -> None:
        self._files = files
        self._name = f"_cues/{folder_of(graph)}.driver.json"
        self._graph = graph
        self._owner = owner
        self._beats = 0
        self._since = _now()

    def acquire(self, take_over: bool) -> None:
        """Take the lease, after a wait of up to :data:`LEASE_S` for a beat of another owner.

        Raises :class:`AlreadyRunning` if there is a beat, unless ``take_over``.
        """
        text = self._files.read(self._name)
        deadline = time.monotonic() + LEASE_S
        # An empty file is being written at this moment.
        while text is not None and not take_over and not _is_dead(_parsed(text)) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
            now = self._files.read(self._name)
            if now and now != text:
                other = _parsed(now)
                raise AlreadyRunning(
                    f"The driver {other.get('pid')} on {other.get('host')} runs the graph {self._graph!r} on"
                    f" {self._files.url}.",
                    "stop that driver, or start with take_over=True (cues run --take-over); that driver then commits"
                    " nothing more.",
                    pid=other.get("pid") or 0,
                )
            if now is None:
                break  # it was given back
        _mine.add(self._owner)
        self._write()

    def beat(self) -> None:
        """Show that this driver is alive, unless another one has taken the lease over."""
        text = self._files.read(self._name)
        if not text or _parsed(text).get("owner", self._owner) == self._owner:
            self._write()

    def _write(self) -> None:
        self._beats += 1
        lease = {"owner": self._owner, "host": socket.gethostname(), "pid": os.getpid(), "machine": this_machine()}
        lease |= {"beat": self._beats, "since": self._since, "time": _now()}
        self._files.write(self._name, json.dumps(lease).encode())

    def release(self) -> None:
        """Give the lease back, if this driver still has it."""
        _mine.discard(self._owner)
        text = self._files.read(self._name)
        if text and _parsed(text).get("owner") == self._owner:
            self._files.delete(self._name)


@dataclass(frozen=True)
class LeaseHolder:
    """The driver of a graph, as its lease tells it. Times are by the clock of its machine."""

    graph: str
    host: str
    pid: int
    since: datetime | None
    beat: datetime | None
    """When it last showed that it is alive."""
    state: Literal["runs", "does not answer", "has ended"]


_ENDING: Final = ".driver.json"


def holders(files: Files) -> Iterator[LeaseHolder]:
    """The drivers that have not given their lease back."""
    for name in files.names("_cues"):
        lease = _parsed(files.read(f"_cues/{name}") or b"") if name.endswith(_ENDING) else {}
        if lease:
            since, beat = (
                time_of(files, f"_cues/{name}", lease[key]) if key in lease else None for key in ("since", "time")
            )
            late = beat is not None and (clock.to_datetime(clock.now_ns()) - beat).total_seconds() > LEASE_S
            state: Any = "has ended" if _is_dead(lease) else "does not answer" if late else "runs"
            graph = name_of(name.removesuffix(_ENDING))
            yield LeaseHolder(graph, lease.get("host", "?"), lease.get("pid", 0), since, beat, state)


def _is_dead(lease: dict[str, Any]) -> bool:
    """Return True if its owner was a process of this machine and has ended.

    A container with process ids of its own is another machine: the owner's pid means nothing there.
    """
    if lease.get("machine") != this_machine():
        return False
    if lease.get("pid") == os.getpid():
        return lease.get("owner") not in _mine
    return locks.process_state(int(lease.get("pid", 0))) == "gone"


def _now() -> str:
    return clock.to_datetime(clock.now_ns()).isoformat()


def _parsed(text: bytes) -> dict[str, Any]:
    """The lease in a file; nothing while it is being written, and of another form: no version wrote that lease."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if sealed.fits(found, _FORM) else {}
