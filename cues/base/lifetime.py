"""The end of a handle, and of the handles that it has made."""

from __future__ import annotations

import threading
import weakref

_guard = threading.RLock()


class Lifetime:
    """The lifetime of a handle. Its end is the end of the handles made by it too, which it does not keep alive.

    It is a class of its own because a compiled class such as the handle has no weak references (cues/native.py).
    """

    __slots__ = ("__weakref__", "_made", "closed")

    def __init__(self, maker: Lifetime | None = None) -> None:
        """``maker``: the lifetime of the handle that makes this one."""
        self.closed = False
        self._made: weakref.WeakSet[Lifetime] = weakref.WeakSet()
        if maker is not None:
            with _guard:
                maker._made.add(self)
                self.closed = maker.closed

    def end(self) -> None:
        with _guard:
            self.closed = True
            made = list(self._made)
        for lifetime in made:
            lifetime.end()
