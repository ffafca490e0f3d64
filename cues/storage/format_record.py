"""The format record: the row that says in which format a store is, and with which options it was made.

    {"format": 1, "requires": ["keys", "seals"], "id": 8 bytes, "durability": "disk", "map_size": bytes,
     "created_ns": nanoseconds, "max_map_size": bytes (optional: the map does not grow beyond it),
     "seal": checksum of the record without this field (8 bytes)}

It is read before the environment is opened, because the environment is opened as the record says. The process that
writes it first decides; the others follow or raise :class:`DurabilityMismatch`. :func:`datafile.check_format` says
which records this version can read.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import lmdb

from cues import codec
from cues.base import clock, names
from cues.errors import DurabilityMismatch
from cues.records import sealed
from cues.storage import datafile, door
from cues.storage.lmdb_errors import translate
from cues.storage.lmdb_map import MAP_BYTES_MIN, SPARE_BYTES, open_lmdb
from cues.storage.transaction import StoreTransaction, rows
from cues.storage.writer_lock import WriterLock


def make_data_file(path: Path) -> None:
    """Make an empty data file if there is none. It gets its name only when it is complete, and on the disk.

    So an empty file of that name was truncated, and must not be used as a new store.
    """
    new = path / f"data.{os.getpid()}.new"
    new.unlink(missing_ok=True)
    open_lmdb(new, subdir=False, lock=False, map_size=MAP_BYTES_MIN).close()
    with door.reading(new) as file:  # LMDB writes the first pages without a sync
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):  # another process was faster
        os.link(new, path / "data.mdb")
    new.unlink()


def read_format(path: Path, lock: bool) -> dict[str, Any] | None:
    """Read the format record, without options that the record itself decides; None if the store has none yet."""
    while True:
        try:
            # With room for the writes of others between the check of the file's size and the transaction.
            size = datafile.used(path) + SPARE_BYTES
            env = open_lmdb(path, map_size=size, readonly=True, max_dbs=0, create=False, lock=lock)
        except (lmdb.Error, OSError) as error:
            raise translate(error, str(path)) from error
        try:
            return format_of(env, path)
        except lmdb.MapResizedError:
            continue  # others wrote more than that
        except lmdb.Error as error:
            raise translate(error, str(path)) from error
        finally:
            env.close()


def format_of(env: Any, path: Path) -> dict[str, Any] | None:
    with env.begin() as txn:
        raw = txn.get(names.FORMAT_KEY)
        empty = raw is None and not txn.cursor().first()
    if empty:
        return None  # the process that made it was killed before its first commit
    if raw is None:
        raise datafile.unknown(
            path,
            f"The format record of {path} cannot be found.",
            f"{path} holds an LMDB environment that is not a Cues store.",
        )
    return datafile.check_format(path, raw)


def record_of(txn: StoreTransaction) -> dict[str, Any]:
    """Return the format record that a transaction of an open store sees."""
    return datafile.unsealed(codec.unpack(txn.get(names.FORMAT_KEY)))


def write_format(
    writer_lock: WriterLock, path: Path, durability: str, size: int, size_max: int | None
) -> dict[str, Any]:
    """Return the format record, and write it if the store is new. The first process decides."""

    def read_or_write(txn: StoreTransaction) -> bytes:
        raw = txn.get(names.FORMAT_KEY)
        if raw is None:
            record = {
                "format": datafile.FORMAT,
                "requires": sorted(datafile.ALWAYS),
                "id": os.urandom(8),
                "durability": durability,
                "map_size": size,
                "created_ns": clock.now_ns(),
            }
            raw = pack_record(record if size_max is None else record | {"max_map_size": size_max})
            txn.put(names.FORMAT_KEY, raw)
        return bytes(raw)

    record = datafile.unsealed(codec.unpack(writer_lock.transact(datafile.COMMIT_PAGES, read_or_write)))
    if record["durability"] != durability:
        raise mismatch(str(path), record["durability"], durability)
    return record


def write_size(writer_lock: WriterLock, size: int, size_max: int | None = None, pages: int = 0) -> dict[str, Any]:
    """Store a larger map size, for a later opening without ``map_size=``; return the format record.

    An earlier version does not open the store from then on, because this one writes rows that it cannot read. So the
    rows of an earlier version get their seals of today in the same commit; ``pages`` is the number of their pages.
    ``size_max`` replaces the limit of the store's growth, if it is given.
    """

    def write(txn: StoreTransaction) -> dict[str, Any]:
        record = record_of(txn)
        record["map_size"] = max(record["map_size"], size)
        if size_max is not None:
            record["max_map_size"] = size_max
        if not datafile.ALWAYS.issubset(record["requires"]):
            _renew(txn)
            record["requires"] = sorted(datafile.ALWAYS | set(record["requires"]))
        txn.put(names.FORMAT_KEY, pack_record(record))
        return record

    written: dict[str, Any] = writer_lock.transact(datafile.COMMIT_PAGES + pages, write)
    return written


def _renew(txn: StoreTransaction) -> None:
    """Seal the rows of an earlier version with their keys."""
    for key, raw in list(rows(txn, b"\0")):
        row = sealed.renewed(key, raw)
        if row is None and len(raw) == sealed.BARE.get(b"\0%b\0" % key.split(b"\0")[1]):
            row = sealed.seal(key, raw)
        if row is not None:
            txn.put(key, row)


def require(txn: StoreTransaction, feature: str) -> None:
    """Note in a write transaction that the store has what a version without this feature must not read."""
    record = record_of(txn)
    if feature not in record["requires"]:
        record["requires"] = sorted({*record["requires"], feature})
        txn.put(names.FORMAT_KEY, pack_record(record))


def pack_record(record: dict[str, Any]) -> bytes:
    return codec.pack(record | {"seal": datafile.seal_of(record)})


def mismatch(path: str, found: str, asked: str) -> DurabilityMismatch:
    return DurabilityMismatch(
        f"The store {path} was made with durability {found!r}, not {asked!r}.",
        f"pass durability={found!r}, or leave it out, or make a new store.",
        path=path,
        found=found,
        asked=asked,
    )
