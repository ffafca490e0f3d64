"""Doorbells, which wake sleeping readers, and the words that processes share.

    1. a reader takes a slot: a flag byte and an interest mask in a shared mapping, and a FIFO
    2. it raises its flag, checks its queues once more, and sleeps on the FIFO
    3. a writer checks the flags after its commit (0.08 µs when no reader waits) and writes one byte
       into the FIFO of each waiting reader that is interested; it lowers the flag, so that the next
       writer does not ring again

Not guaranteed: that a ring arrives. A writer may be killed between its commit and the ring, and no
barrier orders the flag and the commit; so a sleeper checks its queues by itself after
:data:`SAFETY_S`. A lost ring costs latency, never a message. All wake-up calls of the kernel cost the
same 25 µs, so the FIFO was chosen for its properties: it works between unrelated processes, with
``poll`` over many stores, and ``kill -9`` leaves only a slot, whose lock is released, and which the
next reader takes.

The mapping also holds the few words that processes share without a transaction (see WORDS).
"""

from __future__ import annotations

import contextlib
import functools
import mmap
import operator
import os
import select
import stat
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, TypeVar

import xxhash

from cues.errors import StoreForeign, StoreNotFound
from cues.storage import door
from cues.storage.locks import SLOTS, LockFile

SAFETY_S: Final = 0.1
"""Longest sleep before a reader checks its queues by itself."""

# WORDS: 64-bit, in the machine's order; all are hints, which correctness does not need.
SHARED_WRITERS: Final = 1
"""1 while several processes have the store open for writing (writer_lock.py)."""
BUSY_WRITER: Final = 2
"""The pid of the only writer while it is inside a transaction."""
PURGES: Final = 3
"""Increases with every purge and deletion: tailers then drop the messages that they read ahead."""
ROOM: Final = 4
"""Pages that may be written before the file's allocation must be checked (datafile.py)."""
ALLOCATED: Final = 5
"""The page after the last that is known to be allocated."""

COMMITTED: Final = 6
"""The number of the last commit: a data file with fewer was put back (timeline.py)."""

UNREADABLE: Final = (-1,) * 7
"""The words of a store whose file ``wake`` cannot be opened."""

FILE_BYTES: Final = 8192
_SLOT_COUNT: Final = 256
FLAGS_AT: Final = 512
FLAGS_END: Final = FLAGS_AT + _SLOT_COUNT
_MASKS_WORD: Final = 128
_UP: Final = b"\1"

T = TypeVar("T")


def mask_of(queue: str, partition: int = 0) -> int:
    """Return the bit of a log in interest masks. Logs may share one, which causes unnecessary wake-ups."""
    return 1 << (xxhash.xxh3_64_intdigest(f"{queue}/{partition}".encode()) & 63)


def union(masks: Iterable[int]) -> int:
    """Return the interest mask of several logs."""
    return functools.reduce(operator.or_, masks, 0)


class Bell:
    """The slot and the FIFO of one sleeper."""

    def __init__(self, doorbells: Doorbells, slot: int, fd: int) -> None:
        self._doorbells = doorbells
        self.slot = slot
        self.fd = fd
        self._rung = False
        """True if a ring may be in the FIFO."""

    def listen(self, mask: int) -> None:
        if self._rung:
            self.drain()
        bells = self._doorbells
        with contextlib.suppress(ValueError):  # closed meanwhile, which the sleeper notices itself
            bells.words[_MASKS_WORD + self.slot] = mask
            bells.mapping[FLAGS_AT + self.slot] = 1

    def quiet(self) -> None:
        """Lower the flag. If a writer did so already, its ring is removed later, before the next sleep."""
        mapping, at = self._doorbells.mapping, FLAGS_AT + self.slot
        with contextlib.suppress(ValueError):
            if mapping[at]:
                mapping[at] = 0
            else:
                self._rung = True

    def drain(self) -> None:
        """Remove every ring. A late one, or one of a closed handle, would end every later sleep."""
        self._rung = False
        with contextlib.suppress(BlockingIOError):
            os.read(self.fd, 4096)


class Doorbells:
    """The doorbells of one store, as one process sees them."""

    def __init__(self, directory: Path, locks: LockFile) -> None:
        """Map the words, and make the file if it is missing. Raises OSError if it cannot be written."""
        self._fifos = directory / "bells"
        self._locks = locks
        door.folder(self._fifos)
        door.look(self._fifos, stat.S_IFDIR)
        fd = door.opened(directory / "wake", os.O_RDWR | os.O_CREAT)
        try:
            allocate(fd, FILE_BYTES)
            self.mapping = mmap.mmap(fd, FILE_BYTES)
        finally:
            os.close(fd)
        self.words = memoryview(self.mapping).cast("Q")
        self._guard = threading.RLock()
        self._idle: list[Bell] = []
        self._all: dict[int, Bell] = {}
        self._writers: dict[int, int] = {}
        self._find = self.mapping.find
        self._closed = False

    def ring(self, mask: int) -> None:
        """Wake every sleeper that is interested in a log of ``mask``."""
        try:
            at = self._find(_UP, FLAGS_AT, FLAGS_END)
            while at >= 0:
                slot = at - FLAGS_AT
                if self.words[_MASKS_WORD + slot] & mask:
                    self.mapping[at] = 0
                    self._ring(slot)
                at = self._find(_UP, at + 1, FLAGS_END)
        except ValueError:  # closed after the commit
            if not self._closed:
                raise

    def ring_own(self) -> None:
        """Wake every sleeper of this process, so that it sees that something was closed."""
        for bell in tuple(self._all.values()):
            self._ring(bell.slot)

    def _ring(self, slot: int) -> None:
        with self._guard:
            for _ in range(0 if self._closed else 2):
                fd = self._writers.get(slot)
                try:
                    if fd is None:
                        fd = door.opened(self._fifos / str(slot), os.O_WRONLY, stat.S_IFIFO)
                        self._writers[slot] = fd
                    os.write(fd, _UP)
                    return
                except BlockingIOError:
                    return  # the FIFO is full: the sleeper was rung already
                except (OSError, StoreForeign):
                    # ENXIO, ENOENT, EPIPE: the sleeper died, and another may have its slot by now.
                    fd = self._writers.pop(slot, None)
                    if fd is not None:
                        os.close(fd)

    def acquire(self) -> Bell | None:
        """Return a bell for one sleeper, or None when all slots are taken (then sleep for :data:`SAFETY_S`)."""
        with self._guard:
            if self._closed:
                return None
            if self._idle:
                return self._idle.pop()
            for slot in range(_SLOT_COUNT):
                if self._locks.try_lock(SLOTS + slot):
                    try:
                        fd = door.fifo(self._fifos / str(slot))
                    except BaseException as error:
                        self._locks.unlock(SLOTS + slot)
                        if isinstance(error, FileNotFoundError):
                            raise removed(str(self._fifos.parent)) from error
                        raise
                    bell = self._all[slot] = Bell(self, slot, fd)
                    return bell
        return None

    def release(self, bell: Bell) -> None:
        with self._guard:
            if self._closed:
                os.close(bell.fd)
            else:
                self._idle.append(bell)

    def close(self) -> None:
        """Give the slots back. A bell that a sleeper holds is closed when it wakes and releases it."""
        self.ring_own()
        with self._guard:
            if self._closed:
                return
            self._closed = True
            for slot in self._all:
                self.mapping[FLAGS_AT + slot] = 0
                (self._fifos / str(slot)).unlink(missing_ok=True)
                self._locks.unlock(SLOTS + slot)
            for bell in self._idle:
                os.close(bell.fd)
            self._forget()

    def forget_in_child(self) -> None:
        """Drop the slots in a forked child: they belong to the parent, and so may the guard."""
        self._guard = threading.RLock()
        self._closed = True
        for bell in self._all.values():
            os.close(bell.fd)
        self._forget()

    def _forget(self) -> None:
        for fd in self._writers.values():
            os.close(fd)
        self._all.clear()
        self._idle.clear()
        self._writers.clear()
        self.words.release()
        self.mapping.close()


def allocate(fd: int, size: int) -> None:
    """Make a file that will be mapped at least ``size`` long, with blocks: a hole on a full disk is a SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size)
    elif os.fstat(fd).st_size < size:
        os.truncate(fd, size)


def wait(
    interests: Sequence[tuple[Doorbells | None, int]],
    ready: Callable[[], T],
    timeout_s: float | None,
    sleep_s: Callable[[], float | None] = lambda: None,
) -> T:
    """Sleep until ``ready()`` is true, or the timeout is over; returns its last result.

    ``interests`` pairs the doorbells of a store (None if they cannot be written) with the mask
    of the logs that may make ``ready`` true. An exception of ``ready`` (a closed store) is
    raised. ``sleep_s`` is called before each sleep: after this time, ``ready`` may be true without a ring.
    """
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    rung: dict[Doorbells, int] = {}
    for doorbells, mask in interests:
        if doorbells is not None:
            rung[doorbells] = rung.get(doorbells, 0) | mask
    bells: list[tuple[Doorbells, Bell, int]] = []
    try:
        for doorbells, mask in rung.items():
            bell = doorbells.acquire()
            if bell is not None:
                bells.append((doorbells, bell, mask))
        poll = select.poll()
        for _, bell, _ in bells:
            poll.register(bell.fd, select.POLLIN)
        while True:
            for _, bell, mask in bells:
                bell.listen(mask)
            result = ready()
            if result:
                return result
            left = SAFETY_S
            if deadline is not None:
                left = min(left, deadline - time.monotonic())
                if left <= 0:
                    return result
            change_s = sleep_s()
            if change_s is not None:
                left = min(left, change_s)
            if poll.poll(max(left, 0) * 1000):  # a negative time would be no limit
                result = ready()  # first of all: a message waits
                if result:
                    return result
                for _, bell, _ in bells:
                    bell.drain()
    finally:
        for doorbells, bell, _ in bells:
            bell.quiet()
            doorbells.release(bell)


def removed(path: str) -> StoreNotFound:
    """Return the error of a store whose files are not those that were opened."""
    return StoreNotFound(
        f"The store {path} was deleted, or another was put in its place, while it was open.",
        "put the right store at this path, and start again.",
        path=path,
    )
