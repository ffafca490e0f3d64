"""The guard of a run against a full disk: steps wait while there is room for its last commits.

    every second    the free space of the file system of each store of the graph (storage/free_space.py),
                    and at once when a commit of this process takes new blocks of a disk that is low
    near the limit  one warning, and another one after there was enough space again
    below it        every processor waits after its current step, until there is enough space again; a run that starts
                    there ends at once, and raises :class:`DiskLow`

The steps under way are committed into the reserve. Without the guard a full disk would stop the same processors in the
middle of steps: nothing would be lost either, but functions with side effects would be called again.

Not guaranteed: that a commit which is larger than the limit still fits.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from cues.base import events
from cues.base.texts import duration, size
from cues.engine.engine import Host
from cues.engine.threads import report_stop
from cues.errors import DiskLow
from cues.storage import free_space
from cues.storage.base_store import BaseStore

_LOOK_S: Final = 1.0


class DiskGuard:
    """Looks at the disks of a run, in a thread, until the run is halted."""

    def __init__(
        self,
        host: Host,
        stores: Sequence[BaseStore],
        min_free: int | None,
        stop: Callable[[DiskLow], None],
        set_low: Callable[[bool], None],
    ) -> None:
        """``stop`` is called once, with the error; ``set_low`` whenever a disk gets low, or all have space again."""
        self._host = host
        self._paths = list(dict.fromkeys(store.directory for store in stores))
        self._allocations = [store.core.environment.allocation for store in stores if not store.readonly]
        self._now = threading.Event()
        """Set to look at once."""
        self._min_free = min_free
        self._stop = stop
        self._set_low = set_low
        self._low_since: float | None = None
        self._warned: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="cues disk guard", daemon=True)

    def start(self) -> None:
        """Look for the first time, and go on in a thread."""
        if self._min_free == 0:
            return
        low = self._lowest()
        if low is not None:
            error = free_space.low(*low, "the run stops, and everything that it did is committed")
            self._stop(error)
            report_stop(self._host, self._host.plan.id, error)
            self._host.halt()
            return
        for allocation in self._allocations:
            allocation.run_min_free, allocation.on_low = self._min_free, self._note
        self._thread.start()

    def _note(self, space: free_space.Space) -> None:
        if space.is_low:
            self._now.set()

    def join(self) -> None:
        """Wait for the end of the thread, after the run was halted."""
        for allocation in self._allocations:
            allocation.on_low = None
        self._now.set()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while not self._host.halted:
            low = self._lowest()
            if low is not None and self._low_since is None:
                self._low_since = time.monotonic()
                self._set_low(True)
                path, space = low
                text = (
                    f"waiting for space on the disk of the store {Path(path).name}: {size(space.free)} are free, less"
                    f" than {size(space.limit)} (--min-free)"
                )
                self._tell(events.Away(self._host.plan.id, text, logging.WARNING, what=path))
            elif low is None and self._low_since is not None:
                away_s, self._low_since = time.monotonic() - self._low_since, None
                self._set_low(False)
                text = f"goes on: the disk has space again after {duration(away_s)}"
                self._tell(events.Away(self._host.plan.id, text, logging.WARNING, over=True))
            self._now.wait(_LOOK_S)
            self._now.clear()

    def _lowest(self) -> tuple[str, free_space.Space] | None:
        """Return the first disk that is low, and its space. Warn of those that are near their limit."""
        found = None
        for path in self._paths:
            with contextlib.suppress(OSError):  # the store was deleted, which its next commit reports
                space = free_space.look(path, self._min_free)
                if space.is_low:
                    found = found or (str(path), space)
                elif not space.is_near:
                    self._warned.discard(path)
                elif path not in self._warned:
                    self._warned.add(path)
                    text = (
                        f"the disk of the store {Path(path).name} has {size(space.free)} free; the run waits below"
                        f" {size(space.limit)} (--min-free)"
                    )
                    self._tell(events.Event(self._host.plan.id, text, logging.WARNING))
        return found

    def _tell(self, event: events.Event) -> None:
        self._host.emit(event)
