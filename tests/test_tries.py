"""The records of try logs: what the form fills in is what packing the maps would give."""

from __future__ import annotations

import pytest

from cues import codec
from cues.records import batch
from cues.records.batch import Batch
from cues.steps import tries

HASH = bytes(range(16))


def read(pages: list[batch.Page]) -> list[dict[str, object]]:
    (page,) = pages
    return Batch(7, batch.seal(page, 7, 1)).messages()


@pytest.mark.parametrize("indices", [{}, {"out": 5}, {"out": 2**40, "other": 1}], ids=["nil", "one", "two"])
@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("chosen", [None, "g.p.a"])
def test_a_step_is_written_as_its_maps(indices: dict[str, int], failed: bool, chosen: str | None) -> None:
    """Every number at its place, twice from one form, and the hash in the record's header."""
    writer = tries.TryRecords("g.p")
    for low in (1, 300, 2**33):
        tailers = ("g.p.a",) if chosen else ("g.p.a", "g.p.b")
        starts, ends = (low, low + 1)[: len(tailers)], (low + 10, low + 11)[: len(tailers)]
        moved = {queue: index + low for queue, index in indices.items()}
        pages = writer.step(tries.Taking(tailers, starts, ends, chosen), HASH, moved, failed)
        snapshot, attempt = read(pages)
        assert snapshot["q/type"] == "q.type.try/snapshot" and snapshot["q/processor-id"] == "g.p"
        assert snapshot["q.try/tailer-indices"] == dict(zip(tailers, starts))
        assert snapshot["q.try/to-indices"] == dict(zip(tailers, ends))
        assert snapshot.get("q.try/tailer-id") == chosen
        kind = "error-attempt" if failed else "attempt" if indices else "nil-attempt"
        assert attempt["q/type"] == f"q.type.try/{kind}"
        assert attempt["q/hash"] == HASH.hex()
        assert attempt.get("q.try/message-index", {}) == moved
        found = tries.last([Batch(7, batch.seal(pages[0], 7, 1))])
        assert found[0] is not None and found[0].hash == HASH and found[1] is not None


def test_a_source_step_holds_both_positions_whatever_they_are() -> None:
    before, after = None, {"file": "x" * 5000, "at": (1, 2)}
    pages = tries.TryRecords("g.s").step(tries.Taking((), (), (), source=(before, after)), HASH, {"s": 1}, False)
    body = b"".join([pages[0].tail[16 + 4 :], *pages[0].pieces]) if pages[0].pieces else pages[0].tail[16:]
    assert pages[0].count == 1 or len(codec.unpack(body)) == 2
    assert sum(page.count for page in pages) == 2


def test_names_of_any_length_fit() -> None:
    """Ids so long that the form fits no page take the general way."""
    tailers = tuple(f"g.p.{n}{'q' * 120}" for n in range(40))
    numbers = tuple(range(1, 41))
    pages = tries.TryRecords("g.p").step(tries.Taking(tailers, numbers, numbers), HASH, {"out": 1}, False)
    assert sum(page.count for page in pages) == 2
