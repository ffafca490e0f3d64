"""Notes in the source for the compiler of the core (mypyc, see docs/how-to/compiled.md), and the core that runs.

mypyc_attr        decorates a class; in pure Python it does nothing
ThreadPacker      a class that cannot be compiled
implementation    "pure Python", or what the core was compiled with
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr
else:

    def mypyc_attr(*arguments: Any, **options: Any) -> Any:
        """``native_class=False``: the class stays an ordinary one, for those that inherit from builtins."""
        return lambda decorated: decorated


class ThreadPacker(threading.local):
    """A packer for each thread, of those that ``new`` makes: a msgpack Packer may not be used by two threads at once,
    and making one costs as much as a message. Compiled, such a class would share its memory with its base."""

    def __init__(self, new: Callable[[], Callable[[Any], bytes]]) -> None:
        self.pack = new()
        self.depth = 0
        """The number of extensions that are being encoded inside one another."""
        self.reading = 0
        """The number of extensions that are being decoded inside one another."""


def implementation() -> str:
    """Return ``"pure Python"`` or ``"compiled by mypyc"``, by the file of a module of the core."""
    module = importlib.util.find_spec("cues.codec")
    return "pure Python" if module and str(module.origin).endswith(".py") else "compiled by mypyc"


__all__ = ["ThreadPacker", "implementation", "mypyc_attr"]
