"""Waits of sources and sinks, which a drain or a stop of the graph ends."""

from __future__ import annotations

import time
from typing import Any, Final

LOOK_S: Final = 0.1
"""Seconds between two looks at whether the graph drains."""


def answered(process: Any) -> None:
    """Tell the engine that the source has answered, and waits for something new."""
    if hasattr(process, "wait"):
        process.wait(0)


def stops(process: Any) -> bool:
    """Return whether the graph drains, or (sink) stops; False if the source is called without a process."""
    return process is not None and bool(process.stopping)


def wait(process: Any, seconds: float, *, new: bool = True) -> bool:
    """Wait; return False at once when the graph drains, or (sink) stops.

    ``new``: for something new, because the source has answered.
    """
    if new:
        answered(process)
    end = time.monotonic() + seconds
    while True:
        if stops(process):
            return False
        left = end - time.monotonic()
        if left <= 0:
            return True
        time.sleep(min(left, LOOK_S))
