"""A checkpoint in one JSON file, beside a state of the user's that it stands for.

    {"cues": 1, "fence": 3, "checkpoint": {…}, "state": {…}}

    1. lock       a POSIX lock on <path>.lock, held until 5
    2. fence      the file's fence is mine, or Fenced
    3. write      <path>.next, and sync it
    4. rename     over the file, and sync the directory
    5. unlock

Rename alone is no fence: an owner that was stopped in front of it would put its file over its
successor's. The lock makes 2 and 4 one; it dies with its process. An owner that is *stopped* between
them holds it, and nobody can pass; who waits gets :class:`cues.CheckpointError` with its pid.

Not guaranteed: anything on filesystems without POSIX locks (some network ones). The whole file is
written by every commit, so it is for small states.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cues import faults, locks
from cues.checkpoints import packing
from cues.errors import CheckpointError, CuesError, Fenced, Forked

if TYPE_CHECKING:
    from cues.txn.sequencer import Checkpoint

TIMEOUT_S: Final = 10.0
"""How long the lock is waited for. It is held for as long as a file takes to be written."""
_LOOK_S: Final = 0.002
_VERSION: Final = 1

Work = Callable[[dict[str, Any]], Any]
"""Changes the state in place; what it returns means nothing."""


class JSONFileCheckpoint:
    """A checkpoint and a state (a dict of what JSON can hold) in the file at ``path``.

    ``state`` is as the last commit left it, or the restore; change it in a commit's ``work``. The
    directory is made when it is missing.
    """

    def __init__(self, path: str | os.PathLike[str], *, timeout_s: float = TIMEOUT_S) -> None:
        self.path = Path(path)
        self.timeout_s = timeout_s
        self.state: dict[str, Any] = {}
        self._fence: tuple[int, int] | None = None
        """The fence that this object restored, and the process that did."""

    def restore(self) -> Checkpoint | None:
        """Raise the fence, read ``state`` and return the checkpoint; None when there is none yet.

        Every other object that restored before is refused from now on. Raises
        :class:`cues.CheckpointError` for a file that is none of ours, or that stays locked.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            found = self._read() or {"cues": _VERSION, "fence": 0, "checkpoint": None, "state": {}}
            found["fence"] += 1
            self._write(found)
        self._fence = found["fence"], os.getpid()
        self.state = found["state"]
        if faults.active:
            faults.point("checkpoint.restored")
        return None if found["checkpoint"] is None else packing.from_plain(found["checkpoint"])

    def commit(self, checkpoint: Checkpoint, work: Work | None = None) -> None:
        """Write ``checkpoint`` and the state, with what ``work(state)`` changed in it; both or nothing.

        Raises :class:`cues.Fenced` when somebody restored since; what ``work`` raises, or TypeError for
        what JSON cannot hold, and then nothing was written.
        """
        fence = self._mine()
        state = copy.deepcopy(self.state)
        if work is not None:
            work(state)
        # As it would be read again, now and not after the next start: JSON knows no tuples, and no keys but strings.
        state = json.loads(_text(state))
        made = {"cues": _VERSION, "fence": fence, "checkpoint": packing.to_plain(checkpoint), "state": state}
        # 1. Lock.
        with self._locked():
            # 2. The fence.
            found = self._read()
            if found is None or found["fence"] != fence:
                raise Fenced(
                    f"The checkpoint {self.path} was restored by somebody else since: it has fence"
                    f" {found and found['fence']}, this one {fence}; nothing was written.",
                    "nothing here: another owner has taken over.",
                    processor=str(self.path),
                    reason="takeover",
                )
            # 3 and 4. Write, rename.
            self._write(made)
        self.state = state
        if faults.active:
            faults.point("checkpoint.after")

    def close(self) -> None:
        """Nothing is open between two commits."""

    def __enter__(self) -> JSONFileCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _mine(self) -> int:
        if self._fence is None:
            raise CuesError(f"The checkpoint {self.path} is committed before it was restored.", "restore() first.")
        fence, pid = self._fence
        if pid != os.getpid():
            raise Forked(
                f"The checkpoint {self.path} was restored in process {pid}; this is a child, {os.getpid()}.",
                "restore() here, which refuses the parent from then on.",
                pid=pid,
            )
        return fence

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock_file = locks.open_locks(self.path.with_name(self.path.name + ".lock"))
        try:
            deadline = time.monotonic() + self.timeout_s
            while not lock_file.try_lock(0):
                if time.monotonic() >= deadline:
                    raise self._stuck(lock_file.holder(0))
                time.sleep(_LOOK_S)
            try:
                yield
            finally:
                lock_file.unlock(0)
        finally:
            lock_file.close()

    def _stuck(self, pid: int | None) -> CheckpointError:
        who = "this process" if pid is None else f"process {pid} ({locks.process_state(pid)})"
        return CheckpointError(
            f"The checkpoint {self.path} is locked by {who} for more than {self.timeout_s:g} s.",
            "end that process (kill -9 is safe), or wait.",
            where=str(self.path),
        )

    def _read(self) -> dict[str, Any] | None:
        try:
            text = self.path.read_text()
        except FileNotFoundError:
            return None
        try:
            found = json.loads(text)
            version = found["cues"]
        except (ValueError, KeyError, TypeError):
            found, version = {}, None
        if version != _VERSION:
            what = "is no checkpoint" if version is None else f"is a checkpoint of version {version!r}"
            raise CheckpointError(
                f"The file {self.path} {what}; this version of Cues reads version {_VERSION}.",
                "another path, or the Cues that wrote it.",
                where=str(self.path),
            )
        return found  # type: ignore[no-any-return]

    def _write(self, made: dict[str, Any]) -> None:
        text = _text(made)
        # A file of that name is of an owner that died here; its contents mean nothing.
        following = self.path.with_name(self.path.name + ".next")
        with open(following, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if faults.active:
            faults.point("checkpoint.inside")
        os.replace(following, self.path)
        directory = os.open(self.path.parent, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)

    def __repr__(self) -> str:
        return f"<cues.JSONFileCheckpoint {self.path}>"


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
