"""A checkpoint in one JSON file, together with a state of the user.

    {"cues": 1, "fence": 3, "checkpoint": {…}, "state": {…}}

    1. lock       a POSIX lock on <path>.lock, held until 5
    2. fence      the fence in the file is that of this object; otherwise Fenced
    3. write      <path>.next, and sync it
    4. rename     over the file, and sync the directory
    5. unlock

Rename alone is not a fence: an owner that was stopped before it would later replace the file of its successor. The
lock makes 2 and 4 one action. It ends with its process. An owner that is *stopped* between them keeps the lock; a
process that waits for it gets :class:`cues.errors.CheckpointError` with the owner's pid.

Not guaranteed: anything on filesystems without POSIX locks (some network filesystems). Every commit writes the whole
file, so it is for small states.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from cues import faults
from cues.arguments import check_number, path_of, version_hint
from cues.base.closing import Closing
from cues.checkpoints import packing
from cues.checkpoints.fence import OpenCommit, OwnsFence, RestoredFence, own_fence, restored_since
from cues.checkpoints.leasefile import LeaseFile
from cues.checkpoints.sqlite_wal import make_directory
from cues.errors import CheckpointError
from cues.overrides import override
from cues.producers.sequencer import Checkpoint
from cues.storage import door, locks
from cues.storage.datafile import sync_directory

TIMEOUT_S: Final = 10.0
"""The time for which a process waits for the lock. The lock is held while a file is written."""
_LOOK_S: Final = 0.002
_VERSION: Final = 1

Work = Callable[[dict[str, Any]], Any]
"""Changes the state in place. Its result is ignored."""


class JSONFileCheckpoint(OwnsFence, Closing):
    """A checkpoint and a state (a dict that JSON can hold) in the file at ``path``.

    ``state`` is the state after the last commit or restore. Change it only in the ``work`` of a commit. A missing
    directory is created.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout_s: float = TIMEOUT_S) -> None:
        self.path = Path(path_of("path", path))
        check_number("timeout_s", timeout_s, 0)
        self.timeout_s = timeout_s
        self.state: dict[str, Any] = {}
        self._lease = LeaseFile(self.path.with_name(self.path.name + ".lease"))

    @property
    def name(self) -> str:
        """The name of the file, without its ending."""
        return self.path.stem

    @property
    def place(self) -> str:
        """The place of the checkpoint: equal for all objects on the same file."""
        return str(self.path.resolve())

    def restore(self, fence: int | None = None, lease: str = "") -> Checkpoint | None:
        """Raise the fence, read ``state`` and return the checkpoint; None when there is none yet.

        Every object that restored before is refused from now on. With ``fence``, raises :class:`cues.Fenced` and
        changes nothing if the fence is not that of an earlier :meth:`lease` any more. ``lease`` is written with it.
        Raises :class:`~cues.errors.CheckpointError` for a file that is not a checkpoint, or that stays locked.
        """
        make_directory(self.path)
        with self._locked():
            record = self._read() or {"cues": _VERSION, "fence": 0, "checkpoint": None, "state": {}}
            if fence is not None and record["fence"] != fence:
                raise restored_since(str(self.path), str(self.path), fence, record["fence"])
            record["fence"] += 1
            if lease:  # first: an instance that waits must not see the new fence without it
                self._lease.write(lease)
            self._write(record)
        self._held = RestoredFence.now(record["fence"])
        self.state = record["state"]
        faults.point("checkpoint.restored")
        return None if record["checkpoint"] is None else packing.from_plain(record["checkpoint"])

    def read(self) -> Checkpoint | None:
        """Return the last checkpoint, and leave the fence as it is. Raises :class:`~cues.errors.CheckpointError`."""
        record = self._read()  # without the lock: a rename replaces the file
        return None if record is None or record["checkpoint"] is None else packing.from_plain(record["checkpoint"])

    def lease(self) -> tuple[int, str]:
        """Return the fence, and the lease of the consumer that runs (:mod:`cues.txn.turns`); empty if none does."""
        record = self._read()
        return record["fence"] if record else 0, self._lease.read()

    def set_lease(self, text: str) -> None:
        """Write the lease. Raises :class:`cues.Fenced` after another object restored."""
        self._check_fence()
        self._lease.write(text)

    def _own_fence(self) -> int:
        return own_fence(self._held, str(self.path), "call restore() here, which refuses the parent from then on.")

    def _check_fence(self) -> None:
        fence, _ = self.lease()
        if fence != (own := self._own_fence()):
            raise restored_since(str(self.path), str(self.path), own, fence)

    def commit(self, checkpoint: Checkpoint, work: Work | None = None) -> None:
        """Write ``checkpoint`` and the state with the changes of ``work(state)``: both, or nothing.

        Raises :class:`cues.Fenced` after another object restored, the exceptions of ``work``, and TypeError for
        values that JSON cannot hold. Then nothing was written.
        """
        fence = self._own_fence()
        state = copy.deepcopy(self.state)
        if work is not None:
            work(state)
        # The state as the next start reads it: JSON has no tuples, and only strings as keys.
        state = json.loads(_text(state))
        written = {"cues": _VERSION, "fence": fence, "checkpoint": packing.to_plain(checkpoint), "state": state}
        # 1. Lock.
        with self._locked():
            # 2. The fence.
            record = self._read()
            if record is None or record["fence"] != fence:
                raise restored_since(str(self.path), str(self.path), fence, record["fence"] if record else None)
            # 3 and 4. Write, rename.
            self._write(written)
        self.state = state
        faults.point("checkpoint.after")

    def begin(self) -> OpenCommit[dict[str, Any]]:
        """Begin the next commit, for a consumer that reads the state before it decides.

        Its ``argument`` is a copy of the state, which ``commit(checkpoint, work)`` writes. Raises
        :class:`cues.Fenced` after another object restored.
        """
        self._check_fence()
        changed = copy.deepcopy(self.state)

        def commit(checkpoint: Checkpoint, work: Work | None) -> None:
            def replace(state: dict[str, Any]) -> None:
                state.clear()
                state.update(changed)
                if work is not None:
                    work(state)

            self.commit(checkpoint, replace)

        return OpenCommit(changed, commit, lambda: None)

    @override
    def close(self) -> None:
        """Do nothing: no file is open between two commits."""

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock_file = locks.open_locks(self.path.with_name(self.path.name + ".lock"))
        try:
            deadline = time.monotonic() + self.timeout_s
            while not lock_file.try_lock(0):
                if time.monotonic() >= deadline:
                    pid = lock_file.holder(0)
                    who = "this process" if pid is None else f"process {pid} ({locks.process_state(pid)})"
                    raise CheckpointError(
                        f"The checkpoint {self.path} has been locked by {who} for more than {self.timeout_s:g} s.",
                        "end that process (kill -9 is safe), or wait.",
                        where=str(self.path),
                    )
                time.sleep(_LOOK_S)
            try:
                yield
            finally:
                lock_file.unlock(0)
        finally:
            lock_file.close()

    def _read(self) -> dict[str, Any] | None:
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return None
        try:
            record = json.loads(text)
            version = record["cues"]
        except (ValueError, KeyError, TypeError):
            record, version = {}, None
        if version != _VERSION:
            what = "is not a checkpoint" if version is None else f"is a checkpoint of version {version!r}"
            raise CheckpointError(
                f"The file {self.path} {what}; this version of Cues reads version {_VERSION}.",
                version_hint(version, _VERSION, "use another path, or the version of Cues that wrote the file."),
                where=str(self.path),
            )
        return record  # type: ignore[no-any-return]

    def _write(self, record: dict[str, Any]) -> None:
        text = _text(record)
        # An existing file of that name was left by an owner that died here; it is replaced.
        following = self.path.with_name(self.path.name + ".next")
        with door.new(following) as file:
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())
        faults.point("checkpoint.inside")
        os.replace(following, self.path)
        sync_directory(self.path.parent)

    @override
    def __repr__(self) -> str:
        return f"<cues.JSONFileCheckpoint {self.path}>"


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
