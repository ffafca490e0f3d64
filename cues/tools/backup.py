"""Backups of a store, or of all stores of a graph, in a directory; and their restore.

    DEST/lock                     held while a backup is made
    DEST/000007/manifest.json     one JSON object: time, stores, sizes, checksums; written last
                shop.part         the changes since an earlier backup, or everything (changes.py)
                shop.cut          what this backup has: for the next one
    DEST/000008.unfinished/       a backup that is being made, or that was killed

A backup:

1. The stores: the one that is given, and all others that it uses (forks, inputs), and those that they use.
2. A transaction of each, all of one moment (:func:`cues.storage.replica.same_moment`, which may hold up writers for
   some 10 µs).
3. The changes of each store into a file, with a checksum for each frame. Records are checked as they are read.
4. Files and directory are synced, read again, and compared. Then the manifest is written.
5. The directory gets its name. From here on it is a backup; a death before leaves ``.unfinished``, which the next
   backup deletes.

A restore, into places without a store:

1. The chain: the backup, the one that it was made since, and so on to a whole one. Each manifest names the checksum of
   the manifest before it.
2. In ``.restoring`` in each place, a data file is filled with the changes of the chain, in order.
3. A timeline begins on every log (storage/timeline.py). The store is checked as ``cues check`` does. A gap that the
   store had, such as one that was salvaged, is restored too.
4. The place of the home store gets the file ``.restored``, with the checksum of the manifest.
5. The data files get their names, the home store last. Then every ``.restoring`` is deleted, and at last ``.restored``.

A restore that was killed before 4 begins anew; after it, the next restore of the same backup continues at 5.

**Identity.** Ids of stores, identities of queues, positions, epochs and state stay. So targets outside that have not
gone beyond the backup fit, and messages of the backup keep their delivery hashes, by which idempotent
targets ignore repetitions. Messages that are appended later have other hashes, because of the timeline. A target, or
another store, that has more than the backup is refused at the start (:class:`cues.errors.Diverged`).
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, BinaryIO, Final

import xxhash

from cues import codec, faults
from cues.base import clock
from cues.base.data import dataclass
from cues.errors import AlreadyRunning, CuesError, StoreDamaged, StoreError, StoreFull, StoreNotFound
from cues.forwarding import other_stores
from cues.queues.store import Store
from cues.storage import door, locks
from cues.storage.backup_manifest import Backup, StoredStore, manifest_checksum
from cues.storage.datafile import sync_directory, sync_names
from cues.storage.lmdb_errors import translate
from cues.storage.replica import Replica, ReplicaWriter, put_in_place, same_moment
from cues.storage.retirement import MANIFEST
from cues.tools import changes, check
from cues.tools.changes import Change, Changes, Cut

UNFINISHED: Final = ".unfinished"
RESTORING: Final = ".restoring"
RESTORED: Final = ".restored"
_FRAME: Final = struct.Struct(">IQ")
"""Length, and xxh3-64 of the content with the number of the frame as its seed."""

Progress = Callable[[str, int], None]
"""Called with the name of a store, and the bytes of it that are done."""


# --- frames ---------------------------------------------------------------------------------------


def write_frames(file: BinaryIO, parts: Iterator[Change], told: Callable[[int], None]) -> int:
    """Write changes into a file, and an end; return its size in bytes."""
    size = 0
    for number, change in enumerate(_with_end(parts)):
        raw = codec.pack(change)
        size += file.write(_FRAME.pack(len(raw), xxhash.xxh3_64_intdigest(raw, number)) + raw)
        faults.point("backup.writing")
        told(size)
    return size


def _with_end(parts: Iterator[Change]) -> Iterator[Change]:
    yield from parts
    yield [b"whole"]


def read_frames(path: Path) -> Iterator[Change]:
    """Iterate over the changes in a file. Raises :class:`StoreDamaged` if it is not whole."""
    with path.open("rb") as file:
        number = 0
        while True:
            head = file.read(_FRAME.size)
            if len(head) < _FRAME.size:
                raise _damaged(path, "it has no end")
            length, checksum = _FRAME.unpack(head)
            raw = file.read(length)
            if xxhash.xxh3_64_intdigest(raw, number) != checksum:
                raise _damaged(path, f"the checksum of its frame {number} fails")
            change: Change = codec.unpack(raw)
            if change == [b"whole"]:
                return
            yield change
            number += 1


def _damaged(path: Path, why: str) -> StoreDamaged:
    return StoreDamaged(f"The file {path} of a backup is damaged: {why}.", "restore another backup.", path=str(path))


# --- the stores -------------------------------------------------------------------------------------


@contextlib.contextmanager
def together(first: Store) -> Iterator[tuple[list[Store], list[str]]]:
    """Open all stores that belong to a store: those that it uses, and those that they use.

    Also gives a sentence for each that is missing.
    """
    with contextlib.ExitStack() as opened:
        stores, missing = [first], []
        for store in stores:  # grows meanwhile
            for id, paths in other_stores.places(store).items():
                if any(known.id == id for known in stores):
                    continue
                try:
                    other = opened.enter_context(other_stores.opened(store, id))
                except StoreNotFound:
                    missing.append(f"The store {paths[0]}, which {store.path} used, is not there; it is left out.")
                else:
                    assert isinstance(other, Store)
                    stores.append(other)
        yield stores, missing


def names_of(stores: Sequence[Store]) -> list[str]:
    """Return a name for each store: that of its directory, with a number if it is not the only one."""
    found: list[str] = []
    for store in stores:
        base = Path(store.directory).name or "store"
        name, number = base, 1
        while name in found:
            number += 1
            name = f"{base}-{number}"
        found.append(name)
    return found


# --- backups ------------------------------------------------------------------------------------------


def numbers_of(dest: Path) -> list[int]:
    """Return the numbers of the backups in a directory, oldest first."""
    return sorted(int(path.name) for path in dest.glob("[0-9]*") if path.name.isdecimal() and path.is_dir())


def listed(dest: Path) -> Iterator[tuple[int, Backup | CuesError]]:
    """Yield each number with its backup, or with the reason why that one cannot be used."""
    for number in numbers_of(dest):
        try:
            yield number, Backup.load(dest / f"{number:06d}")
        except CuesError as error:
            yield number, error


def backups(dest: Path) -> list[Backup]:
    """Return the backups in a directory whose manifests can be used, oldest first."""
    return [found for _, found in listed(dest) if isinstance(found, Backup)]


def backup(
    store: Store,
    dest: str | os.PathLike[str],
    since: int | str | None = None,
    progress: Progress | None = None,
    note: Callable[[str], None] | None = None,
) -> Backup:
    """Copy the store, and all others that it uses, into a new directory in ``dest``; return its manifest.

    All are copied as they are at one moment; writers go on meanwhile. ``since`` is the number of a backup in ``dest``:
    only what changed since that is copied, and a restore needs both. ``"auto"`` takes the last backup, if there is one.

    After an error, or a death, there is no new backup, and earlier ones are as they were. Raises
    :class:`StoreFull`, :class:`AlreadyRunning` if another process makes a backup in ``dest``, :class:`StoreNotFound`
    for an unknown ``since``, :class:`StoreDamaged` if a record or a row of the store is damaged.
    """
    place = Path(dest)
    told = progress or (lambda name, done: None)
    with _held(place), together(store) as (stores, missing):
        for text in missing:
            (note or (lambda text: None))(text)
        for killed in place.glob(f"*{UNFINISHED}"):
            shutil.rmtree(killed)
        last = _since(place, since, store)
        number = max(numbers_of(place), default=0) + 1
        unfinished = place / f"{number:06d}{UNFINISHED}"
        try:
            door.folder(unfinished)
            made = _write(unfinished, number, place, last, stores, told)
            faults.point("backup.written")
            unfinished.rename(place / f"{number:06d}")
            sync_names(place)
        except BaseException as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            if isinstance(error, OSError):
                raise _unwritten(place, error) from error
            raise
    return made


def _unwritten(place: Path, error: OSError) -> CuesError:
    failed = translate(error, str(place))
    if isinstance(failed, StoreFull):
        return StoreFull(
            f"The disk of {place} is full ({shutil.disk_usage(place).free:,} bytes free); no backup was made, and"
            " earlier ones are as they were.",
            "free space there, for example by deleting backups that no later one was made since; or use another disk.",
            path=str(place),
        )
    return StoreError(f"The backup in {place} cannot be written ({error}).", "check the directory.", path=str(place))


@contextlib.contextmanager
def _held(place: Path) -> Iterator[None]:
    """Hold the lock of a directory of backups; make the directory."""
    if place.exists() and not place.is_dir():
        raise StoreError(f"{place} is a file; backups are in a directory.", "give a directory.", path=str(place))
    if (place / "data.mdb").exists():
        raise StoreError(
            f"{place} is a store; backups need a directory of their own.", "give another directory.", path=str(place)
        )
    try:
        door.folder(place)
        lock = locks.open_locks(place / "lock")
    except OSError as error:
        raise _unwritten(place if place.exists() else Path.cwd(), error) from error
    try:
        if not lock.try_lock(0):
            pid = lock.holder(0) or os.getpid()
            raise AlreadyRunning(
                f"Process {pid} ({locks.process_state(pid)}) makes a backup in {place}.",
                "wait until it has ended.",
                pid=pid,
            )
        yield
    finally:
        lock.unlock(0)
        lock.close()


def _since(place: Path, since: int | str | None, store: Store) -> Backup | None:
    known = backups(place)
    others = {backup.stores[0].id for backup in known} - {store.id.hex()}
    if others:
        raise StoreError(
            f"{place} has backups of another store ({known[-1].stores[0].path}).",
            "give each store, or each graph, a directory of its own.",
            path=str(place),
        )
    wanted = _last_usable(place) if since == "auto" else since
    return None if wanted is None else _chain(place, wanted)[-1]


def _last_usable(place: Path) -> int | None:
    """Return the number of the last backup that can be restored, by the manifests; None if there is none."""
    for number in reversed(numbers_of(place)):
        with contextlib.suppress(StoreDamaged, StoreNotFound):
            _chain(place, number)
            return number
    return None


def _numbered(place: Path, number: int | str) -> Backup:
    known = numbers_of(place)
    if str(number).isdecimal() and int(number) in known:
        return Backup.load(place / f"{int(number):06d}")
    raise StoreNotFound(
        f"{place} has no backup {number}; it has {', '.join(map(str, known[-20:])) or 'none'}.",
        "give one of those numbers." if known else "make one with cues backup.",
        path=str(place),
    )


def _write(
    unfinished: Path, number: int, place: Path, last: Backup | None, stores: Sequence[Store], told: Progress
) -> Backup:
    cuts = {} if last is None else _cuts(place / f"{last.number:06d}", last)
    found: list[StoredStore] = []
    home = Path(stores[0].directory)
    with same_moment(stores) as moments:
        when = clock.to_datetime(clock.now_ns())
        for name, store, moment in zip(names_of(stores), stores, moments):
            parts = Changes(moment, store.id, cuts.get(store.id), store.path)
            with open(unfinished / f"{name}.part", "xb", opener=door.private) as file:
                write_frames(file, iter(parts), lambda size, name=name: told(name, size))  # type: ignore[misc]
                settle(file)
            with open(unfinished / f"{name}.cut", "xb", opener=door.private) as file:
                file.write(parts.cut.pack())
                settle(file)
            part, cut = (_checksum_of(unfinished / f"{name}.{suffix}") for suffix in ("part", "cut"))
            relative = os.path.relpath(store.directory, home)
            found.append(
                StoredStore(
                    store.id.hex(), name, store.directory, relative, *part, *cut, parts.before is None, parts.records
                )
            )
    faults.point("backup.copied")
    for stored in found:  # what was written is read once more
        for _ in read_frames(unfinished / f"{stored.name}.part"):
            pass
    made = Backup(number, last.number if last else None, last.checksum if last else "", when, tuple(found))
    data = made.to_dict()
    checksum = manifest_checksum(data)
    with open(unfinished / MANIFEST, "x", opener=door.private) as text:
        json.dump(data | {"checksum": checksum}, text, indent=1)
        settle(text)
    sync_directory(unfinished)
    return Backup(made.number, made.since, made.since_checksum, when, made.stores, checksum)


def settle(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())


def _cuts(directory: Path, backup: Backup) -> dict[bytes, Cut]:
    found = {}
    for store in backup.stores:
        file = directory / f"{store.name}.cut"
        _compare(file, store.cut_bytes, store.cut_checksum)
        found[bytes.fromhex(store.id)] = Cut.unpack(file.read_bytes())
    return found


def _compare(file: Path, size: int, checksum: str) -> None:
    """Raise :class:`StoreDamaged` unless a file has its size and checksum of the manifest."""
    try:
        found = _checksum_of(file)
    except OSError as error:
        raise _damaged(file, str(error.strerror)) from error
    if found != (size, checksum):
        raise _damaged(file, f"it has {found[0]:,} bytes and the checksum {found[1]}, not {size:,} and {checksum}")


def _checksum_of(file: Path) -> tuple[int, str]:
    hasher, size = xxhash.xxh3_128(), 0
    with file.open("rb") as opened:
        while piece := opened.read(1 << 20):
            hasher.update(piece)
            size += len(piece)
    return size, hasher.hexdigest()


# --- restore ------------------------------------------------------------------------------------------


@dataclass
class Restored:
    """The result of a restore."""

    backup: Backup
    chain: list[int]
    """The numbers of the backups that were applied, in order."""
    places: dict[str, Path] = field(default_factory=dict)
    """The directory of each store, by its name in the backup."""
    problems: list[str] = field(default_factory=list)
    """The findings of ``cues check``: gaps that were there when the backup was made, and others if ``damaged``."""


def chain_of(dest: Path, at: int | None = None) -> list[Backup]:
    """Return the backups that a restore of backup ``at`` (default: the last one) applies, in order.

    Raises :class:`StoreNotFound` and :class:`StoreDamaged`.
    """
    known = numbers_of(dest)
    if not known:
        unfinished = " (one was begun, and is not complete)" if any(dest.glob(f"*{UNFINISHED}")) else ""
        raise StoreNotFound(
            f"There is no backup in {dest}{unfinished}.", "give the directory of cues backup.", path=str(dest)
        )
    try:
        return _chain(dest, known[-1] if at is None else at)
    except StoreDamaged as error:
        usable = _last_usable(dest)
        advice = "use another directory of backups: no backup here can be restored."
        error.hint = advice if usable is None else f"restore backup {usable} (--at {usable})."
        raise


def _chain(dest: Path, number: int | str) -> list[Backup]:
    """Return the backups of a chain. Only their manifests are read: others may be damaged."""
    chain = [_numbered(dest, number)]
    while chain[0].since is not None:
        before = _numbered(dest, chain[0].since)
        if before.checksum != chain[0].since_checksum:
            raise StoreDamaged(
                f"The backup {before.number} in {dest} is not the one that backup {chain[0].number} was made since.",
                "restore an earlier backup (--at).",
                path=str(dest),
            )
        chain.insert(0, before)
    return chain


def restore(
    dest: str | os.PathLike[str],
    store: str | os.PathLike[str],
    at: int | None = None,
    others: Mapping[str, str | os.PathLike[str]] | None = None,
    progress: Progress | None = None,
    damaged: bool = False,
) -> Restored:
    """Restore a backup from the directory ``dest``: the first store to ``store``, where there must be none.

    Other stores of the backup are restored to the same place relative to the first one that they had, or to
    ``others`` by their names. ``at`` is the number of a backup; the last one is the default. Every store is checked
    before it gets its name. Gaps in queues do not hinder it; with ``damaged`` no other problem of the check does.

    After an error, or a death, there is no store at any of the places, or, after a death at the very end, at some of
    them or at all; call it again to continue. Raises :class:`StoreError` if there is a store, :class:`StoreNotFound`,
    :class:`StoreDamaged`, :class:`StoreFull`.
    """
    source, told = Path(dest), progress or (lambda name, done: None)
    chain = chain_of(source, at)
    last = chain[-1]
    done = Restored(last, [backup.number for backup in chain])
    unknown = set(others or {}) - {stored.name for stored in last.stores[1:]}
    if unknown:
        known = ", ".join(stored.name for stored in last.stores[1:]) or "none"
        raise StoreError(f"The backup has no other store {min(unknown)!r}; it has {known}.", "give one of those names.")
    for stored in last.stores:
        given = (others or {}).get(stored.name)
        done.places[stored.name] = Path(given) if given else Path(os.path.normpath(Path(store) / stored.relative))
    note = done.places[last.stores[0].name] / RESTORED
    if not _is_complete(note, done.places.values(), last):
        _refuse_stores(done.places.values())
        _remove_note(note)
        for backup in chain:
            for stored in backup.stores:
                directory = source / f"{backup.number:06d}"
                _compare(directory / f"{stored.name}.part", stored.bytes, stored.checksum)
        try:
            for stored in last.stores:
                _fill(source, chain, stored, done.places[stored.name], told)
            _find_each_other(done, last)
            for stored in last.stores:
                done.problems += _check(done.places[stored.name], stored, damaged)
            for place in done.places.values():
                sync_names(place / RESTORING)
                faults.point("restore.filled")
            _write_synced(note, last.checksum)
            faults.point("restore.complete")
        except BaseException as error:
            _remove_note(note)
            for place in done.places.values():
                _remove(place)
            if isinstance(error, OSError):
                raise _translated(error, store) from error
            raise
    for stored in reversed(last.stores):
        place = done.places[stored.name]
        file = place / RESTORING / "data.mdb"
        if file.exists():
            try:
                put_in_place(file, place)
            except FileExistsError:
                raise _is_there(place) from None
        faults.point("restore.named")
    for place in done.places.values():
        shutil.rmtree(place / RESTORING, ignore_errors=True)
        faults.point("restore.deleted")
    _remove_note(note)
    return done


def _translated(error: OSError, store: str | os.PathLike[str]) -> BaseException:
    failed = translate(error, str(store))
    if isinstance(failed, StoreFull):
        return StoreFull(
            f"The disk of {store} is full; nothing was restored.",
            "free space there, and restore again.",
            path=str(store),
        )
    return failed


def _is_complete(note: Path, places: Iterable[Path], backup: Backup) -> bool:
    """Return True if a restore of this backup died after step 4: every place has its data file, under either name."""
    with contextlib.suppress(OSError, ValueError):
        filled = ((place / RESTORING / "data.mdb").exists() or (place / "data.mdb").exists() for place in places)
        return note.read_text() == backup.checksum and all(filled)
    return False


def _remove_note(note: Path) -> None:
    """Remove the note of step 4 durably: without it, what is filled next is not taken for what was complete."""
    if note.exists():
        note.unlink()
        sync_directory(note.parent)


def _refuse_stores(places: Any) -> None:
    for place in places:
        if (place / "data.mdb").exists():
            raise _is_there(place)
        if place.exists() and not place.is_dir():
            raise StoreError(f"{place} is a file; a store is a directory.", "give another path.", path=str(place))


def _is_there(place: Path) -> StoreError:
    return StoreError(
        f"There is a store at {place}; a restore replaces none.",
        f"move it away first (mv {place} {place}.old), or restore to another place.",
        path=str(place),
    )


def _remove(place: Path) -> None:
    """Remove the traces of a restore that failed."""
    shutil.rmtree(place / RESTORING, ignore_errors=True)
    with contextlib.suppress(OSError):
        place.rmdir()


def _fill(source: Path, chain: Sequence[Backup], stored: StoredStore, place: Path, told: Progress) -> None:
    """Fill a data file with the changes of a chain, and begin a timeline."""
    work = place / RESTORING
    shutil.rmtree(work, ignore_errors=True)
    door.folder(place)
    door.folder(work)
    parts = [
        source / f"{backup.number:06d}" / f"{part.name}.part"
        for backup in chain
        for part in backup.stores
        if part.id == stored.id
    ]
    done = 0

    def apply(writer: ReplicaWriter, change: Change) -> int:
        nonlocal done
        size = changes.apply(writer, change)
        done += size
        told(stored.name, done)
        faults.point("restore.filling")
        return size

    with Replica(work / "data.mdb") as replica:
        replica.fill(functools.partial(apply, change=change) for part in parts for change in read_frames(part))
        replica.begin_timeline()
    sync_directory(work)


def _find_each_other(done: Restored, backup: Backup) -> None:
    """Write the new paths of the other stores into each store."""
    at = {bytes.fromhex(stored.id): done.places[stored.name] for stored in backup.stores}
    for place in at.values():
        with Replica(place / RESTORING / "data.mdb") as replica:
            replica.commit(lambda writer, place=place: other_stores.move(writer.txn, place, at))  # type: ignore[misc]


def _check(place: Path, stored: StoredStore, damaged: bool) -> list[str]:
    """Check a restored store; return its problems. Raises :class:`StoreDamaged` for any that is more than a gap.

    A gap is the store's own, not a fault of the backup: each frame has its checksum, and each database as many rows as
    it had then. A user who has only this backup needs the rest of the messages.
    """
    found = check.walk(str(place / RESTORING))
    problems = [problem for problem in found if not check.is_gap(problem)]
    if problems and not damaged:
        raise StoreDamaged(
            f"The backup of {stored.name} is not whole: {problems[0]}"
            + (f" ({len(problems) - 1} more)" if len(problems) > 1 else "")
            + " Nothing was restored.",
            "restore an earlier backup (--at); or restore it as it is (--damaged), and cues salvage what is whole.",
            path=str(place),
        )
    return found


def _write_synced(file: Path, text: str) -> None:
    with open(file, "w", opener=door.private) as opened:
        opened.write(text)
        settle(opened)
    sync_directory(file.parent)
