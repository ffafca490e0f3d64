"""Positions of writers from outside: what is decided about a part of a source, the row's bytes, and the check."""

from __future__ import annotations

from pathlib import Path

import pytest
import xxhash
from conftest import problems_of

import cues
from cues.base import names
from cues.forwarding import external_writers
from cues.forwarding.external_writers import SourceRow
from cues.records import sealed

pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")

from cues.spark.position import CheckpointRange, Queues, QueueSpan, Range, SourceRange, read_place

A, B = b"identity", b"another!"
R1, R2 = b"record-1", b"record-2"


Place = int | tuple[int, ...]
"""An index, or one on each of several partitions."""


def queues(*spans: tuple[bytes, Place, Place], record: bytes = R1, first: bool = False) -> Queues:
    return Queues(tuple(QueueSpan(of, read_place(a), read_place(b)) for of, a, b in spans), record, first)


def checkpoint(batch: int, start: str | None, end: str, id: str = "q", record: bytes = R1) -> CheckpointRange:
    return CheckpointRange(id, batch, record, None if start is None else (start,), (end,))


@pytest.mark.parametrize(
    ("before", "part", "verdict"),
    [
        # a batch write counts for itself
        (None, Range(100, 200), "append"),
        (Range(0, 100), Range(100, 200), "append"),
        (Range(0, 100), Range(0, 100), "replayed"),
        (Range(0, 100), Range(50, 100), "replayed"),
        (Range(0, 100), Range(50, 150), "refuse"),
        (Range(0, 100), Range(101, 200), "refuse"),
        (Range(0, 100), Range(100, 100), "replayed"),
        # queues of Cues: whatever the checkpoint
        (None, queues((A, 1, 5), first=True), "append"),
        (None, queues((A, 5, 9)), "refuse"),
        (queues((A, 1, 5)), queues((A, 5, 9)), "append"),
        (queues((A, 1, 5)), queues((A, 5, 9), first=True), "append"),
        (queues((A, 1, 5)), queues((A, 1, 5), record=R2), "replayed"),
        (queues((A, 1, 5)), queues((A, 1, 3), first=True), "replayed"),
        (queues((A, 1, 5)), queues((A, 3, 7)), "refuse"),
        (queues((A, 1, 5)), queues((A, 6, 7)), "refuse"),
        (queues((A, 1, 5)), queues((B, 5, 9)), "refuse"),
        (queues((A, 1, 5)), queues((A, 5, 9), (B, 1, 2)), "refuse"),
        # no new messages, but perhaps rows (a watermark closed windows): only the same record is the same batch
        (queues((A, 1, 5), record=R1), queues((A, 5, 5), record=R1), "replayed"),
        (queues((A, 1, 5), record=R1), queues((A, 5, 5), record=R2), "append"),
        (queues((A, 1, 5)), queues((A, 3, 3), record=R2), "replayed"),
        # two queues move together, or one of them stays
        (queues((A, 1, 5), (B, 1, 2)), queues((A, 5, 9), (B, 2, 2)), "append"),
        (queues((A, 1, 5), (B, 1, 2)), queues((A, 1, 5), (B, 2, 3)), "refuse"),
        (queues((A, 1, 5), (B, 1, 2)), queues((A, 1, 5), (B, 1, 2)), "replayed"),
        # partitions of one queue: all of them together, as queues
        (queues((A, (1, 1), (5, 2))), queues((A, (5, 2), (9, 2))), "append"),
        (queues((A, (1, 1), (5, 2))), queues((A, (1, 1), (5, 2))), "replayed"),
        (queues((A, (1, 1), (5, 2))), queues((A, (1, 1), (3, 2)), first=True), "replayed"),
        (queues((A, (1, 1), (5, 2))), queues((A, (1, 2), (5, 3))), "refuse"),
        (queues((A, (1, 1), (5, 2))), queues((A, (5, 1), (9, 2))), "refuse"),
        (queues((A, (1, 1), (5, 2))), queues((A, (3, 2), (5, 3))), "refuse"),  # a batch that straddles the position
        (queues((A, (1, 1), (5, 2)), record=R1), queues((A, (5, 2), (5, 2)), record=R1), "replayed"),
        (queues((A, (1, 1), (5, 2)), record=R1), queues((A, (5, 2), (5, 2)), record=R2), "append"),
        # a queue that grew, from one partition or several: the new ones begin at 1, also for what was frozen before
        (queues((A, 1, 5)), queues((A, (5, 1), (5, 4))), "append"),
        (queues((A, 1, 5)), queues((A, (5, 2), (5, 4))), "refuse"),
        (queues((A, (1, 1), (5, 2))), queues((A, (5, 2, 1), (9, 2, 3))), "append"),
        (queues((A, (1, 1, 1), (5, 2, 3))), queues((A, (1, 1), (5, 2))), "replayed"),
        (queues((A, (1, 1, 1), (5, 2, 3))), queues((A, (5, 2), (7, 2))), "refuse"),
        (queues((A, (1, 1, 1), (5, 2, 3))), queues((A, 5, 7)), "refuse"),  # a partition read alone
        (queues((A, (1, 1), (5, 2)), (B, 1, 2)), queues((A, (5, 2, 1), (5, 2, 2)), (B, 2, 9)), "append"),
        # other sources: only beside their checkpoint
        (None, checkpoint(0, None, "3"), "append"),
        (None, checkpoint(4, "3", "4"), "refuse"),
        (checkpoint(0, None, "3"), checkpoint(1, "3", "4"), "append"),
        (checkpoint(1, "3", "4"), checkpoint(1, "3", "4"), "replayed"),
        (checkpoint(1, "3", "4", record=R1), checkpoint(1, "3", "4", record=R2), "refuse"),  # planned anew
        (checkpoint(1, "3", "4"), checkpoint(0, None, "3"), "refuse"),  # a stale checkpoint
        (checkpoint(1, "3", "4"), checkpoint(0, None, "3", id="new"), "refuse"),  # a deleted one
        (checkpoint(1, "3", "4"), checkpoint(3, "5", "6"), "refuse"),
        # one id for two kinds of source
        (Range(0, 5), queues((A, 5, 9)), "refuse"),
        (queues((A, 1, 5)), Range(5, 9), "refuse"),
        (queues((A, 1, 5)), checkpoint(1, "3", "4"), "refuse"),
        (checkpoint(1, "3", "4"), queues((A, 1, 5)), "refuse"),
    ],
)
def test_what_is_done_with_a_part_of_a_source(before: SourceRange | None, part: SourceRange, verdict: str) -> None:
    kept = None if before is None else before.position()
    if kept is not None:  # as it comes back from the store
        kept = SourceRow.unpack(b"k", sealed.seal(b"k", SourceRow("q", 1, kept).pack())).position
    assert part.decide(kept) == verdict


def test_the_row_is_there_if_and_only_if_the_messages_are(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process") as store:
        queue = store.queue("orders")
        row = SourceRow("orders", 2, ["range", 100])

        def write(txn: object, fails: bool) -> None:
            from cues.records import batch

            queue.core.append_pages(txn, batch.build([{"x": 1}], 1000))
            external_writers.put(txn, "loader", row)
            if fails:
                raise RuntimeError("before the commit")

        with pytest.raises(RuntimeError):
            store.core.commit(write, True)
        assert (len(queue), external_writers.rows(store)) == (0, {})
        store.core.commit(write, False)
        assert (len(queue), external_writers.rows(store)) == (1, {"loader": row})


@pytest.mark.damages_stores
def test_the_check_knows_where_on_each_partition_a_writer_is(tmp_path: Path) -> None:
    row = SourceRow("orders", [2, 1, 3], ["range", 100])
    with cues.open(tmp_path / "s", durability="process") as store:
        queue = store.queue("orders", partitions=3, key="user")
        for partition in (0, 2, 2):
            queue.partition(partition).appender().write({"user": "ann"})
        store.core.commit(lambda txn: external_writers.put(txn, "loader", row))
    assert problems_of(tmp_path / "s") == []
    with cues.open(tmp_path / "s") as store:
        store.core.commit(lambda txn: external_writers.put(txn, "loader", row._replace(next=[2, 2, 3])))
        store.core.commit(lambda txn: external_writers.put(txn, "other", SourceRow("orders/2", 4, ["range", 100])))
    assert problems_of(tmp_path / "s") == [
        "The position of writer 'loader' says that it wrote up to 1 of queue orders/1, which ends before 1.",
        "The position of writer 'other' says that it wrote up to 3 of queue orders/2, which ends before 3.",
    ]


@pytest.mark.damages_stores
def test_the_check_knows_the_row_and_sees_its_damage(tmp_path: Path) -> None:
    row = SourceRow("orders", 3, ["range", 100])
    with cues.open(tmp_path / "s", durability="process") as store:
        store.queue("orders").appender().write_many([{"x": 1}, {"x": 2}])
        store.core.commit(lambda txn: external_writers.put(txn, "loader", row))
    assert problems_of(tmp_path / "s") == []
    with cues.open(tmp_path / "s") as store:
        store.core.commit(lambda txn: external_writers.put(txn, "loader", row._replace(next=4)))
    assert problems_of(tmp_path / "s") == [
        "The position of writer 'loader' says that it wrote up to 3 of queue orders, which ends before 3."
    ]
    with cues.open(tmp_path / "s") as store:
        raw = sealed.seal(names.source_key("loader"), row.pack())
        store.core.commit(lambda txn: txn.put(names.source_key("loader"), raw[:-1] + bytes([raw[-1] ^ 1])))
    assert problems_of(tmp_path / "s") == ["The position of writer 'loader' is damaged (its checksum fails)."]


def test_the_bytes_of_the_row_are_those_of_the_format_page() -> None:
    """Three keys in this order, and a checksum; written once by hand."""
    body = "83 a5 7175657565 a6 6f7264657273 a4 6e657874 03 a8 706f736974696f6e 92 a5 72616e6765 64"
    raw = sealed.seal(names.source_key("loader"), SourceRow("orders", 3, ["range", 100]).pack())
    assert raw[:-8] == bytes.fromhex(body.replace(" ", ""))
    assert raw[-8:] == xxhash.xxh3_64_digest(raw[:-8], xxhash.xxh3_64_intdigest(b"\0source\0loader"))
