"""The fence that an object raised, which is valid only in the process that raised it; and commits that were begun."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from cues.errors import CuesError, Fenced, Forked
from cues.producers.sequencer import Checkpoint

A = TypeVar("A")


class OpenCommit(Generic[A]):
    """A commit that was begun, and whose ``argument`` may be read and changed before :meth:`commit`."""

    def __init__(self, argument: A, commit: Callable[[Checkpoint, Any], None], undo: Callable[[], object]) -> None:
        self.argument = argument
        self._commit = commit
        self._undo = undo

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager for code that uses the argument; here it does nothing."""
        return contextlib.nullcontext()

    def commit(self, checkpoint: Checkpoint, work: Any = None) -> None:
        """Write the changes of the argument, those of ``work(argument)`` and ``checkpoint``."""
        self._commit(checkpoint, work)

    def roll_back(self) -> None:
        """Write nothing. May be repeated, also after a commit."""
        self._undo()


class RestoredFence(NamedTuple):
    """The fence after ``restore``, and the process that called it."""

    fence: int
    pid: int

    @staticmethod
    def now(fence: int) -> RestoredFence:
        """Return the fence as raised by this process."""
        return RestoredFence(fence, os.getpid())


class OwnsFence:
    """The base of a checkpoint: the fence that this object raised."""

    _held: RestoredFence | None = None
    """The fence that this object restored, and the process that did."""

    @property
    def fence(self) -> int:
        """The fence that this object raised; 0 before :meth:`restore`."""
        return self._held.fence if self._held else 0


def own_fence(held: RestoredFence | None, what: str, hint: str) -> int:
    """Return the fence to commit under; ``what`` names the checkpoint.

    Raises :class:`CuesError` before ``restore``, and :class:`Forked`, with ``hint``, in a child of the
    process that restored.
    """
    if held is None:
        raise CuesError(f"The checkpoint {what} was committed before it was restored.", "call restore() first.")
    if held.pid != os.getpid():
        raise Forked(
            f"The checkpoint {what} was restored in process {held.pid}; this is a child, {os.getpid()}.",
            hint,
            pid=held.pid,
        )
    return held.fence


def restored_since(name: str, what: str, fence: int, stored: int | None = None) -> Fenced:
    """Return the error of a commit after another object restored the checkpoint, and raised its fence to ``stored``."""
    now = "" if stored is None else f", and has fence {stored}"
    return Fenced(
        f"The checkpoint {what} was restored by another owner since{now}; this one has fence {fence}. Nothing was"
        " written.",
        "stop this process: another owner has taken over.",
        processor=name,
        reason="takeover",
    )
