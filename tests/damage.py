"""Stores with something of everything on them, and ways to damage one. For test_check.py and its children."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import cues
from cues import codec
from cues.base import names
from cues.graphs import processor_rows
from cues.queues.log import KEY, Log
from cues.records import sealed
from cues.records.positions import NO_SEAL, POSITION, unpack_reader
from cues.storage import transaction

MAP_BYTES = 4 << 20
MARK = b"the message whose bytes a test looks for in the data file"


def graph() -> cues.Graph:
    def numbers():  # type: ignore[no-untyped-def]
        for n in range(300):
            yield {"n": n, "pad": "x" * (n % 90)}

    def count(number, process):  # type: ignore[no-untyped-def]
        if number["n"] % 50 == 13:
            raise ValueError("thirteen")
        process.state["seen"] = [*process.state.get("seen", []), number["n"]]
        process.state["long"] = "y" * 100 * (number["n"] % 120)
        return number if number["n"] % 2 else None

    def save(number):  # type: ignore[no-untyped-def]
        return None

    return cues.Graph(
        "g",
        [
            cues.Source("numbers", numbers, resume="skip"),
            cues.Stream(count, "numbers", "counted", key=lambda m: m["n"] % 7, batch_size=40),
            cues.Sink(save, "counted", batch_size=20),
        ],
        errors="errors",
    )


def make(path: Path, durability: str = "disk") -> None:
    """A store that a graph has run on, with long messages, named tailers and a purged queue beside it."""
    with cues.open(path, durability=durability, map_size=MAP_BYTES) as store:
        graph().run(store=store)
        plain = store.queue("plain", metadata={"t", "time"}, retention=40)
        appender = plain.appender()
        for n in range(30):
            appender.write_many([{"n": n, "long": "z" * (n % 3) * 5000}, {"n": n}])
            if n == 20:
                appender.write({"text": MARK.decode()})
        reader = plain.tailer("reader")
        reader.read_many(5)
        purged = store.queue("purged")
        purged.appender().write_many([{"n": n} for n in range(2000)])
        purged.purge(before=1500)


def flip(source: str, copy: str, offset: int, bit: int) -> tuple[list[str], str]:
    """Copy a store, flip one bit of its data file; what the check says, and a digest of what can be read."""
    directory = Path(copy)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    data = bytearray(Path(source, "data.mdb").read_bytes())
    data[offset] ^= 1 << bit
    (directory / "data.mdb").write_bytes(data)
    try:
        with cues.open(directory, readonly=True) as store:
            problems = store.check()
            return problems, "" if problems else digest(store)
    except cues.CuesError as error:
        return [str(error)], ""


def digest(store: cues.Store) -> str:
    """Of all that has a checksum: every message with its index and hash, positions, the values of state."""
    found = hashlib.sha256()
    for name in store.queues(all=True):
        tailer = store.queue(name).tailer()
        for message in tailer:
            envelope = tailer.envelope
            assert envelope is not None
            found.update(repr((name, envelope.index, envelope.hash, message)).encode())
    with store.core.view() as txn:
        for key, value in transaction.rows(txn, b"\0proc\0"):
            found.update(repr((key, value)).encode())
    for name, _ in list(store.core.entries()):
        if name.startswith(b"state:"):
            handle = store.core.database(name)
            with store.core.view() as txn:
                for value in sorted(value for _, value in txn.cursor(handle)):  # keys of state have no checksum
                    found.update(repr(value).encode())
    return found.hexdigest()


def digest_of(path: str) -> str:
    with cues.open(path, readonly=True) as store:
        return digest(store)


# --- damage that only somebody who knows the format can do -----------------------------------------


def delete_record(store: cues.Store, txn: Any) -> None:
    cursor = txn.cursor(Log(store, "numbers").database)
    cursor.first()
    cursor.next()
    cursor.delete()


def delete_last_record(store: cues.Store, txn: Any) -> None:
    cursor = txn.cursor(Log(store, "counted").database)
    cursor.last()
    cursor.delete()


def delete_all_records(store: cues.Store, txn: Any) -> None:
    txn.drop(Log(store, "errors").database, delete=False)


def delete_piece(store: cues.Store, txn: Any) -> None:
    cursor = txn.cursor(Log(store, "plain").database)
    for key, _ in cursor:
        if len(key) == 12:
            cursor.delete()
            return
    raise AssertionError


def swap_records(store: cues.Store, txn: Any) -> None:
    database = Log(store, "numbers").database
    cursor = txn.cursor(database)
    cursor.first()
    one = cursor.item()
    cursor.next()
    other = cursor.item()
    txn.put(one[0], other[1], db=database)
    txn.put(other[0], one[1], db=database)


def next_too_far(store: cues.Store, txn: Any) -> None:
    from cues.records.log_row import put_row

    log = Log(store, "numbers")
    row = log.row(txn)
    put_row(txn, log.key, row._replace(next=row.next + 5))


def row_flipped(store: cues.Store, txn: Any) -> None:
    key = names.row_key("counted", 0)
    raw = bytearray(txn.get(key))
    raw[10] ^= 1
    txn.put(key, bytes(raw))


def row_gone(store: cues.Store, txn: Any) -> None:
    txn.delete(names.row_key("counted", 0))


def other_identity(store: cues.Store, txn: Any) -> None:
    from cues.records.log_row import put_row

    log = Log(store, "purged")
    put_row(txn, log.key, log.row(txn)._replace(identity=b"12345678"))


def _change_position(txn: Any, **changes: Any) -> None:
    row = processor_rows.read_row(txn, "g.count")
    assert row is not None
    positions = (row.positions[0]._replace(**changes),)
    sealed.put(txn, names.processor_key("g.count"), row._replace(positions=positions).pack())


def position_beyond(store: cues.Store, txn: Any) -> None:
    _change_position(txn, next=400, seal=NO_SEAL)


def position_on_another_queue(store: cues.Store, txn: Any) -> None:
    _change_position(txn, identity=b"12345678")


def position_behind_another_batch(store: cues.Store, txn: Any) -> None:
    _change_position(txn, seal=b"12345678")


def processor_flipped(store: cues.Store, txn: Any) -> None:
    key = names.processor_key("g.save")
    raw = bytearray(txn.get(key))
    raw[3] ^= 4
    txn.put(key, bytes(raw))


def topology_gone(store: cues.Store, txn: Any) -> None:
    txn.delete(names.topology_key("g.save"))


def topology_alone(store: cues.Store, txn: Any) -> None:
    sealed.put(txn, names.topology_key("g.nobody"), txn.get(names.topology_key("g.save"))[:-8])


def reader_unknown(store: cues.Store, txn: Any) -> None:
    txn.delete(names.subscription_key("counted", "g.save"))


def named_tailer_beyond(store: cues.Store, txn: Any) -> None:
    key = names.reader_key("plain", 0, "reader")
    identity, _, seal = unpack_reader(key, txn.get(key), "plain", "reader")
    sealed.put(txn, key, POSITION.pack(identity, 10**6, seal))


def named_tailer_of_an_old_version_beyond(store: cues.Store, txn: Any) -> None:
    key = names.reader_key("plain", 0, "reader")
    identity, _, seal = unpack_reader(key, txn.get(key), "plain", "reader")
    txn.put(key, POSITION.pack(identity, 10**6, seal))


def named_tailer_flipped(store: cues.Store, txn: Any) -> None:
    _flip(txn, names.reader_key("plain", 0, "reader"), 15)


def queue_record_flipped(store: cues.Store, txn: Any) -> None:
    _flip(txn, names.queue_key("plain"), 30)


def topology_flipped(store: cues.Store, txn: Any) -> None:
    _flip(txn, names.topology_key("g.save"), 20)


def _flip(txn: Any, key: bytes, at: int) -> None:
    raw = bytearray(txn.get(key))
    raw[at] ^= 4
    txn.put(key, bytes(raw))


def state_key_flipped(store: cues.Store, txn: Any) -> None:
    """The value of one key is that of another."""
    database = store.core.database(names.state_database("g.count"))
    key, value = next(iter(txn.cursor(database)))
    txn.delete(key, db=database)
    txn.put(key[:1] + bytes((key[1] ^ 8,)) + key[2:], value, db=database)


def named_tailer_cut(store: cues.Store, txn: Any) -> None:
    txn.put(names.reader_key("plain", 0, "reader"), b"short")


def wrong_hash(store: cues.Store, txn: Any) -> None:
    from cues.records import batch

    log = Log(store, "g.count")
    cursor = txn.cursor(log.database)
    for key, value in cursor:
        found = batch.Batch(KEY.unpack(key)[0], value)
        for message in found.messages():
            if names.MESSAGE_INDEX in message:
                message[names.HASH] = "0" * 32
                pages = batch.build([message], 1 << 20, found.head.hash, reserved=True)
                log.append(txn, pages)
                return
    raise AssertionError


def state_piece_flipped(store: cues.Store, txn: Any) -> None:
    database = store.core.database(names.state_database("g.count"))
    cursor = txn.cursor(database)
    cursor.first()
    key, value = cursor.item()
    txn.put(key, value[:-1] + bytes((value[-1] ^ 1,)), db=database)


def state_piece_gone(store: cues.Store, txn: Any) -> None:
    cursor = txn.cursor(store.core.database(names.state_database("g.count")))
    for key, _ in cursor:
        if key[-2:] == b"\0\1":
            cursor.delete()
            return
    raise AssertionError


def unknown_row(store: cues.Store, txn: Any) -> None:
    txn.put(b"\0rox\0counted", b"")


def queue_record_cut(store: cues.Store, txn: Any) -> None:
    txn.put(names.queue_key("counted"), codec.pack({"identity": b"12345678"}))


def format_record_cut(store: cues.Store, txn: Any) -> None:
    txn.put(names.FORMAT_KEY, txn.get(names.FORMAT_KEY)[:-3])


def record_of_no_messages(store: cues.Store, txn: Any) -> None:
    from cues.records import batch

    log = Log(store, "numbers")
    log.append(txn, [batch.Page(0, 3, codec.pack([{"n": 1}]))])


DAMAGES = {
    delete_record: "of queue numbers are missing",
    delete_last_record: "of queue counted are missing",
    delete_all_records: "Queue errors has no records",
    delete_piece: "its message",
    swap_records: "of queue numbers is damaged: its checksum fails",
    next_too_far: "The messages 301 to 305 of queue numbers are missing.",
    row_flipped: "The row of queue counted is damaged",
    row_gone: "Queue counted has no row",
    other_identity: "Queue purged has identity",
    position_beyond: "is at 400, but queue numbers ends before 301",
    position_on_another_queue: "has identity 3132333435363738 of queue numbers",
    position_behind_another_batch: "after a batch with checksum 3132333435363738",
    processor_flipped: "The row of processor g.save is damaged",
    topology_gone: "Processor g.save has no topology record",
    topology_alone: "The topology of g.nobody belongs to no processor",
    reader_unknown: "Processor g.save reads queue counted, which has no row about it",
    named_tailer_beyond: "The named tailer 'reader' of queue plain is at 1000000",
    named_tailer_of_an_old_version_beyond: "The named tailer 'reader' of queue plain is at 1000000",
    named_tailer_flipped: "The position of the named tailer 'reader' of queue plain cannot be used",
    named_tailer_cut: "The position of the named tailer 'reader' of queue plain cannot be used",
    queue_record_flipped: "The record of the queue plain cannot be used: its checksum fails",
    topology_flipped: "The topology of the processor g.save cannot be used: its checksum fails",
    state_key_flipped: "whose piece 0 is damaged",
    wrong_hash: "but the message there has",
    state_piece_flipped: "whose piece 0 is damaged",
    state_piece_gone: "with a piece missing",
    unknown_row: "is of no known kind",
    queue_record_cut: "The record of the queue counted cannot be used",
    format_record_cut: "The format record of",
    record_of_no_messages: "it has 1 messages, and its header says 3",
}
