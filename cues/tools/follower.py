"""A follower: a second copy of a store and of the stores that it uses, brought up to date again and again.

    DEST/follow.json              the stores, and the moment that the copy has
    DEST/follow.lock              held by the follower, and by a promotion
    DEST/.following/data.mdb      the copy of the first store; with the row ``copied`` when it is whole
    DEST/others/<name>/.following/data.mdb
    DEST/redo/                    changes of several stores, between 2 and 3
    <store>/follow-<hash>.json    for ``cues status``: where the copy is, and the moment that it has

The copy always has one moment of all stores. It is brought to a later one as a backup is made (tools/changes.py):

1. A transaction of each store, all of one moment. Writers are not held up.
2. If there are several stores: their changes are written into ``redo``, which gets its name when it is whole and
   synced.
3. Each copy gets its changes in one transaction, with the number of this turn. One that has the number is left.
4. ``redo`` is deleted.

After a death between 2 and 4 the next start continues at 3. A copy of one store needs no ``redo``.

A promotion makes stores of the copies:

1. If the original stores are there: their writers are held up by their locks, in the order of the stores' ids, while
   the last changes are copied. Each original is *retired*: the file ``retired`` names the copy, and ``data.mdb`` gets
   the name ``data.mdb.retired``. The locks are held a little longer than the time after which every open handle looks
   for its file. So no commit is acknowledged after the one that was copied last, and no later opening makes a new
   store there.
2. ``follow.json`` says that the promotion has begun: when it is called again, it continues here.
3. A timeline begins, the copies are checked, and get their names, the first store's last.

Not guaranteed: that the copy is never further behind than ``max_lag_s``; a slow disk makes it so, and it is said. If
the originals cannot be reached, nobody can stop a process that still writes to them.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from datetime import datetime
from pathlib import Path
from typing import Final

import xxhash

from cues import codec, faults
from cues.base import clock
from cues.base.closing import Closing
from cues.base.data import dataclass
from cues.base.texts import quoted
from cues.errors import AlreadyRunning, StoreDamaged, StoreError, StoreForeign, StoreNotFound
from cues.forwarding import other_stores
from cues.overrides import override
from cues.queues.store import Store
from cues.records import sealed
from cues.storage import door, locks, retirement
from cues.storage.datafile import sync_directory, sync_names
from cues.storage.format_record import read_format
from cues.storage.replica import (
    Replica,
    ReplicaWriter,
    is_opened,
    last_commit,
    open_databases,
    put_in_place,
    same_moment,
)
from cues.storage.store_core import LOOK_S
from cues.tools import backup, changes, check
from cues.tools.changes import Changes, Cut

STATE: Final = retirement.COPY_STATE
COPY: Final = retirement.COPY
PATTERN: Final = "follow-*.json"
_LOCK: Final = "follow.lock"
_REDO: Final = "redo"
_INFO: Final = "turn.json"
_COPIED: Final = b"\0\0copied"
"""Key of the row in a copy that has the number of its last turn. It is before every row of a store."""
_RATE_S: Final = 60.0
"""The time over which the rate of appended messages is measured."""


@dataclass(frozen=True)
class Followed:
    """A store that is followed."""

    id: str
    """In hex."""
    name: str
    path: str
    copy: str
    """The directory of the copy, relative to the directory of the follower."""


@dataclass
class Following:
    """The state of a follower, in ``follow.json``."""

    stores: list[Followed]
    copied: str = ""
    """The moment that the copy has, in ISO 8601; empty before the first copy is whole."""
    rate: float | None = None
    """Messages that were appended in a second, over the last minute before that."""
    promoting: bool = False
    """True from the moment on at which the last changes are copied and the originals retired, or abandoned."""

    @property
    def when(self) -> datetime | None:
        return datetime.fromisoformat(self.copied) if self.copied else None

    def save(self, file: Path) -> None:
        door.replace(file, json.dumps({**vars(self), "stores": [vars(store) for store in self.stores]}), durable=True)

    @staticmethod
    def load(dest: Path) -> Following | None:
        """Return the state of the follower in a directory; None if there is none. Raises :class:`StoreDamaged`."""
        file = dest / STATE
        try:
            data = json.loads(door.read_text(file))
            return Following(
                [Followed(**store) for store in data["stores"]],
                data["copied"],
                data["rate"],
                data.get("promoting", False),
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreDamaged(
                f"{file} cannot be used: {error}.",
                "rename the directory, and follow into a new one; or restore a backup. Keep the renamed directory if a"
                " promotion has begun: its copy may be the only one.",
                path=str(dest),
            ) from error


@contextlib.contextmanager
def _held(dest: Path) -> Iterator[None]:
    lock = locks.open_locks(dest / _LOCK)
    try:
        if not lock.try_lock(0):
            pid = lock.holder(0) or os.getpid()
            raise AlreadyRunning(
                f"Process {pid} ({locks.process_state(pid)}) keeps the copy in {dest}.",
                f"stop that process first (kill {pid}).",
                pid=pid,
            )
        yield
    finally:
        lock.unlock(0)
        lock.close()


class Follower(Closing):
    """Keeps a copy of a store, and of those that it uses, in a directory. Used by one thread."""

    def __init__(
        self,
        store: Store,
        dest: str | os.PathLike[str],
        max_lag_s: float = 10.0,
        note: Callable[[str], None] | None = None,
    ) -> None:
        """Raises :class:`StoreError` if ``dest`` has something else, :class:`AlreadyRunning` for a second follower."""
        self.dest = Path(dest)
        self.max_lag_s = max_lag_s
        self.bytes = 0
        """Bytes that were copied since the start."""
        self._store = store
        self._note = note or (lambda text: None)
        if not self.dest.is_dir() and self.dest.exists():
            raise StoreError(f"{dest} is a file; a copy is kept in a directory.", "give a directory.", path=str(dest))
        if (self.dest / "data.mdb").exists():
            raise StoreError(
                f"{dest} is a store; a copy is kept in a directory of its own.",
                "give another directory.",
                path=str(dest),
            )
        if any(self.dest.glob("[0-9]*/" + retirement.MANIFEST)):
            raise StoreError(f"{dest} has backups.", "give another directory.", path=str(dest))
        door.folder(self.dest)
        self._opened = contextlib.ExitStack()
        self._copies: dict[str, Replica] = {}
        self._cuts: dict[str, Cut] = {}
        self._rates: deque[tuple[float, int]] = deque()
        self._stores: list[Store] = []
        self._group = self._opened.enter_context(contextlib.ExitStack())
        """The other stores that are open."""
        try:
            self._opened.enter_context(_held(self.dest))
            self.state = Following.load(self.dest) or Following([])
            if self.state.stores and self.state.stores[0].id != store.id.hex():
                raise StoreError(
                    f"{dest} has the copy of another store ({self.state.stores[0].path}).",
                    "give each store, or each graph, a directory of its own.",
                    path=str(dest),
                )
            if self.state.promoting:
                raise StoreError(
                    f"A promotion of the copy in {dest} was begun and did not end.",
                    f"run it again: cues follow --promote {quoted(dest)} --yes",
                    path=str(dest),
                )
            self._recover()
            self._look_for_others()
        except BaseException:
            self.close()
            raise

    @property
    def lag_s(self) -> float | None:
        """Seconds since the moment that the copy has; None before the first copy is whole."""
        when = self.state.when
        return None if when is None else max(0.0, (clock.to_datetime(clock.now_ns()) - when).total_seconds())

    def step(self) -> bool:
        """Bring the copy to the present; return whether there was anything to copy."""
        if set(other_stores.places(self._store)) - {store.id for store in self._stores}:
            self._look_for_others()
        return self._turn(self._stores)

    def _turn(self, stores: Sequence[Store]) -> bool:
        now = clock.to_datetime(clock.now_ns())
        cuts = [self._cuts.get(store.id.hex()) for store in stores]
        if self.state.copied and all(cut and cut.number == last_commit(store) for cut, store in zip(cuts, stores)):
            self._said(now)
            return False
        turn = 1 + max((_turn_of(copy)[0] for copy in self._copies.values()), default=0)
        with same_moment(stores) as moments:
            now = clock.to_datetime(clock.now_ns())
            found = [
                Changes(moment, store.id, self._cuts.get(store.id.hex()), store.path)
                for store, moment in zip(stores, moments)
            ]
            if not self.state.copied:
                self._copy_whole(stores, found, turn)
            elif len(stores) == 1:
                _apply(
                    self._copy_of(stores[0].id.hex()), self._counting(iter(found[0])), turn, lambda: found[0].cut.number
                )
            else:
                self._keep(stores, found, turn, now)
        if (self.dest / _REDO).exists():
            self._redo()
        for store, done in zip(stores, found):
            self._cuts[store.id.hex()] = done.cut
        self._rates.append((time.monotonic(), sum(cut.appended for cut in self._cuts.values())))
        while len(self._rates) > 2 and self._rates[1][0] < self._rates[-1][0] - _RATE_S:
            self._rates.popleft()
        self._said(now)
        return True

    def _said(self, now: datetime) -> None:
        """Note the moment that the copy has."""
        (first, count), (last, total) = (self._rates[0], self._rates[-1]) if self._rates else ((0.0, 0), (0.0, 0))
        self.state.copied = now.isoformat()
        self.state.rate = (total - count) / (last - first) if last - first > 1 else None
        self.state.save(self.dest / STATE)
        mark = f"follow-{xxhash.xxh3_64_hexdigest(os.path.realpath(self.dest).encode())}.json"
        with contextlib.suppress(OSError):  # a user who may only read the store may follow it
            file = Path(self._store.directory) / mark
            facts = {"dest": os.path.realpath(self.dest), "pid": os.getpid(), "max_lag_s": self.max_lag_s}
            door.replace(file, json.dumps({**facts, "copied": self.state.copied}))

    # --- copies ---

    def _look_for_others(self) -> None:
        """Open the other stores, those that were added since included."""
        self._group.close()
        self._stores, missing = self._group.enter_context(backup.together(self._store))
        for text in missing:
            self._note(text)
        known = {followed.id for followed in self.state.stores}
        for store, name in zip(self._stores, backup.names_of(self._stores)):
            if store.id.hex() not in known:
                copy = "." if store is self._store else f"others/{name}"
                self.state.stores.append(Followed(store.id.hex(), name, store.directory, copy))

    def _copy_of(self, id: str, followed: Followed | None = None) -> Replica:
        if id not in self._copies:
            followed = followed or next(store for store in self.state.stores if store.id == id)
            self._copies[id] = _replica(self.dest, followed)
        return self._copies[id]

    @property
    def is_prepared(self) -> bool:
        """True if a step opens no other store and no database."""
        known = {store.id for store in self._stores}
        return set(other_stores.places(self._store)) <= known and all(map(is_opened, self._stores))

    def _copy_whole(self, stores: Sequence[Store], found: Sequence[Changes], turn: int) -> None:
        """Make the first copy; it is whole when every store has its row."""
        for store, parts in zip(stores, found):
            copy = self._copy_of(store.id.hex())
            copy.fill(functools.partial(changes.apply, change=change) for change in self._counting(iter(parts)))
        for store, parts in zip(stores, found):
            row = _row(turn, parts.cut.number)
            self._copy_of(store.id.hex()).commit(lambda writer, row=row: writer.txn.put(_COPIED, row))  # type: ignore[misc]
        self.state.save(self.dest / STATE)
        sync_directory(self.dest)

    def _counting(self, parts: Iterator[changes.Change]) -> Iterator[changes.Change]:
        for change in parts:
            if change[0] == b"rows":
                self.bytes += sum(map(len, change[2]))
            yield change

    def _keep(self, stores: Sequence[Store], found: Sequence[Changes], turn: int, now: datetime) -> None:
        """Write the changes of several stores into ``redo``."""
        part = self.dest / f"{_REDO}{backup.UNFINISHED}"
        shutil.rmtree(part, ignore_errors=True)
        door.folder(part)
        for store, parts in zip(stores, found):
            with open(part / f"{store.id.hex()}.part", "xb", opener=door.private) as file:
                backup.write_frames(file, self._counting(iter(parts)), lambda size: None)
                backup.settle(file)
        with open(part / _INFO, "x", opener=door.private) as text:
            numbers = {store.id.hex(): parts.cut.number for store, parts in zip(stores, found)}
            facts = {"turn": turn, "copied": now.isoformat(), "numbers": numbers}
            json.dump({**facts, "stores": [vars(store) for store in self.state.stores]}, text)
            backup.settle(text)
        sync_directory(part)
        part.rename(self.dest / _REDO)
        sync_directory(self.dest)
        faults.point("follow.kept")

    def _redo(self) -> None:
        redo(self.dest, lambda store: self._copy_of(store.id, store))
        self.state.stores = _state(self.dest).stores

    def _recover(self) -> None:
        """Continue a turn that was interrupted. A first copy that is not whole begins anew."""
        shutil.rmtree(self.dest / f"{_REDO}{backup.UNFINISHED}", ignore_errors=True)
        if (self.dest / _REDO).exists():
            self._redo()
        turns = {store.id: _turn_of(self._copy_of(store.id)) for store in self.state.stores}
        if not turns or any(turn == 0 for turn, _ in turns.values()):
            for copy in self._copies.values():
                copy.close()
            self._copies.clear()
            for file in (self.dest / COPY, self.dest / "others"):
                shutil.rmtree(file, ignore_errors=True)
            (self.dest / STATE).unlink(missing_ok=True)
            self.state = Following([])
            return
        for id, (_, number) in turns.items():
            with self._copy_of(id).moment() as moment:
                self._cuts[id] = changes.cut_of(moment, bytes.fromhex(id), number)

    def forget(self) -> None:
        """Remove the note of this follower from ``cues status``."""
        for file in Path(self._store.directory).glob(PATTERN):
            with contextlib.suppress(OSError, ValueError):
                if json.loads(door.read_text(file))["dest"] == os.path.realpath(self.dest):
                    file.unlink()

    @override
    def close(self) -> None:
        for copy in self._copies.values():
            copy.close()
        self._copies.clear()
        self._opened.close()


def redo(dest: Path, copy_of: Callable[[Followed], Replica]) -> None:
    """Apply the changes in ``redo`` to the copies that do not have them, and delete it."""
    place = dest / _REDO
    if not (place / _INFO).exists():  # every copy has the changes: a death interrupted the deletion
        shutil.rmtree(place)
        return
    info = json.loads((place / _INFO).read_text())
    state = Following.load(dest) or Following([])
    state.stores = [Followed(**store) for store in info["stores"]]
    state.copied = info["copied"]
    state.save(dest / STATE)
    for followed in state.stores:
        copy = copy_of(followed)
        if followed.id in info["numbers"] and _turn_of(copy)[0] < info["turn"]:
            number = info["numbers"][followed.id]
            _apply(copy, backup.read_frames(place / f"{followed.id}.part"), info["turn"], lambda number=number: number)  # type: ignore[misc]
    shutil.rmtree(place)


def _apply(copy: Replica, parts: Iterator[changes.Change], turn: int, number: Callable[[], int]) -> None:
    """Apply the changes of a turn to a copy, in one transaction. ``number`` is called after the last one."""

    def work(writer: ReplicaWriter) -> None:
        for change in parts:
            changes.apply(writer, change)
        writer.txn.put(_COPIED, _row(turn, number()))
        faults.point("follow.inside")

    copy.commit(work)
    faults.point("follow.applied")


def _folder_of(dest: Path, followed: Followed) -> Path:
    return dest / followed.copy / COPY


def _replica(dest: Path, followed: Followed) -> Replica:
    directory = dest
    for name in _folder_of(dest, followed).relative_to(dest).parts:
        directory /= name
        door.folder(directory)
    copy = Replica(directory / "data.mdb")
    sync_names(directory)  # the file may be new, or that of a process that died before this
    return copy


def _row(turn: int, number: int) -> bytes:
    return sealed.seal(_COPIED, codec.pack([turn, number]))


def _turn_of(copy: Replica) -> tuple[int, int]:
    """Return the last turn that a copy has, and the number of the last commit of its store; zeros without one."""
    with copy.moment() as moment:
        raw = moment.txn.get(_COPIED)
    turn, number = sealed.unseal_value(_COPIED, raw, "row of the last turn of a copy", [int, int]) if raw else (0, 0)
    return turn, number


# --- status -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FollowerSeen:
    """A follower, as ``cues status`` shows it."""

    dest: str
    pid: int
    alive: bool
    max_lag_s: float
    copied: datetime
    """The moment that the copy has."""
    lag_s: float


def seen(directory: str | os.PathLike[str]) -> list[FollowerSeen]:
    """Return the followers of a store, by the notes in its directory."""
    found = []
    now = clock.to_datetime(clock.now_ns())
    for file in sorted(Path(directory).glob(PATTERN)):
        try:
            data = json.loads(door.read_text(file))
            copied = datetime.fromisoformat(data["copied"])
            alive = locks.process_state(data["pid"]) != "gone"
            lag_s = max(0.0, (now - copied).total_seconds())
            found.append(FollowerSeen(data["dest"], data["pid"], alive, data["max_lag_s"], copied, lag_s))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


# --- promotion --------------------------------------------------------------------------------------


@dataclass
class Promoted:
    """The result of a promotion."""

    store: Path
    """The directory of the first store."""
    copied: datetime
    """The moment that the copy has."""
    retired: list[str] = field(default_factory=list)
    """The paths of the originals that were retired. If it is empty, commits after ``copied`` are lost."""
    lost_rate: float | None = None
    """Messages that were appended in a second, in the minute before ``copied``, if it is known."""
    places: list[Path] = field(default_factory=list)
    """The directories of all stores."""


def promote(dest: str | os.PathLike[str], abandon: bool = False) -> Promoted:
    """Make stores of the copies in ``dest``, and retire the originals if they are there (see above).

    ``abandon``: do not touch the originals, for example because their disk fails. Commits after the moment of the copy
    are lost then. Call it again after an error or a death; it continues. Raises :class:`StoreNotFound` if there is
    no copy, or none that is whole, :class:`AlreadyRunning` while the follower runs, :class:`WriterStuck` if a writer
    does not give way, :class:`StoreDamaged`.
    """
    place = Path(dest)
    state = _state(place)
    begun = _is_begun(place, state)
    retired: list[str] = []
    if begun:
        retired = [store.path for store in state.stores if retirement.is_retired(Path(store.path))]
    elif not abandon:
        retired = _retire(place, state)
    with _held(place):
        if not begun:
            _complete(place)
        state = _state(place)
        if state.when is None:
            raise StoreNotFound(f"The first copy in {dest} was not completed.", "restore a backup.", path=str(dest))
        state.promoting = True
        state.save(place / STATE)
        sync_directory(place)
        faults.point("promote.begun")
        places = _finish(place, state)
    return Promoted(places[0], state.when, retired, None if retired else state.rate, places)


def _is_begun(place: Path, state: Following) -> bool:
    """Return whether a promotion has begun. Raises :class:`StoreForeign` if a store is where a copy is to be one.

    An earlier version did not note it: then a store with the id of the copy is one that it has named.
    """
    named = False
    for followed in state.stores:
        directory = place / followed.copy
        data, copy = directory / "data.mdb", directory / COPY / "data.mdb"
        if not data.exists():
            continue
        record = read_format(directory, lock=False)
        if record is None or record["id"].hex() != followed.id or (copy.exists() and not data.samefile(copy)):
            raise StoreForeign(
                f"There is a store in {directory}, and not of this promotion: the copy has no place to become a store.",
                f"move its files ({data} and lock.mdb) to another directory, and promote again.",
                path=str(directory),
            )
        named = True
    return state.promoting or named


def _state(place: Path) -> Following:
    state = Following.load(place)
    if state is None or not state.stores:
        raise StoreNotFound(
            f"There is no copy of a follower in {place}.", "give the directory of cues follow.", path=str(place)
        )
    return state


def _retire(dest: Path, state: Following) -> list[str]:
    """Copy the last changes and retire the originals; return their paths. Without the first one, do nothing."""
    paths = [Path(store.path) for store in state.stores]
    for path in paths:
        retirement.put_back(path)  # a promotion was killed; nobody could write to it since
    there = [path for path in paths if (path / "data.mdb").exists()]
    if not there:
        return []
    if len(there) < len(paths):
        lost = min(str(path) for path in set(paths) - set(there))
        raise StoreError(
            f"{there[0]} is there, but {lost} is not, so the last changes cannot be copied at one moment.",
            "stop every process that writes to the originals, and promote with --abandon.",
            path=str(dest),
        )
    with contextlib.ExitStack() as opened:
        stores = [opened.enter_context(Store(path)) for path in paths]
        for store, followed in zip(stores, state.stores):
            if store.id.hex() != followed.id:
                raise StoreError(
                    f"The store {store.path} is another one than the one that was followed.",
                    "promote with --abandon.",
                    path=store.path,
                )
        follower = opened.enter_context(Follower(stores[0], dest))

        def last_turn() -> bool:
            if not follower.is_prepared:
                return False
            follower.step()
            for store in stores:
                retirement.retire(Path(store.directory), str(dest.resolve()))
                faults.point("promote.retired")
            time.sleep(1.5 * LOOK_S)  # handles of "process" stores look for their file only so often
            return True

        while True:
            follower.step()
            for store in stores:
                open_databases(store)
            if _with_locks(sorted(stores, key=lambda store: store.id), last_turn):
                return [store.path for store in stores]


def _with_locks(stores: Sequence[Store], work: Callable[[], bool]) -> bool:
    """Run ``work`` while no process writes to the stores."""
    if not stores:
        return work()
    return bool(stores[0].core.visit(lambda txn: _with_locks(stores[1:], work)))


def _complete(dest: Path) -> None:
    """Complete a turn that was interrupted."""
    state = _state(dest)
    if (dest / _REDO / _INFO).exists():
        with contextlib.ExitStack() as opened:
            redo(dest, lambda store: opened.enter_context(_replica(dest, store)))
        state = _state(dest)
    for store in state.stores:
        with _replica(dest, store) as copy:
            if _turn_of(copy)[0] == 0:
                raise StoreNotFound(f"The first copy in {dest} was not completed.", "restore a backup.", path=str(dest))


def _finish(dest: Path, state: Following) -> list[Path]:
    """Make stores of the copies, the first one last; return their directories."""
    places = {bytes.fromhex(store.id): Path(os.path.normpath(dest / store.copy)) for store in state.stores}
    unnamed = [place for place in places.values() if not (place / "data.mdb").exists()]
    for place in unnamed:
        with Replica(place / COPY / "data.mdb") as copy:
            copy.commit(lambda writer: writer.txn.delete(_COPIED))
            copy.commit(lambda writer, place=place: other_stores.move(writer.txn, place, places))  # type: ignore[misc]
            copy.begin_timeline()
        problems = [problem for problem in check.walk(str(place / COPY)) if not check.is_gap(problem)]
        if problems:
            raise StoreDamaged(
                f"The copy in {place} is damaged: {problems[0]}", "restore a backup (cues restore).", path=str(place)
            )
    for place in reversed(places.values()):
        put_in_place(place / COPY / "data.mdb", place)
        faults.point("promote.named")
    for place in places.values():
        shutil.rmtree(place / COPY, ignore_errors=True)
    (dest / STATE).unlink()
    return list(places.values())
