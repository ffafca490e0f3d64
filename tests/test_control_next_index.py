"""A negative control: were the next index derived from the last key, an emptied queue would lose messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cues
from cues import testing
from cues.log import KEY, Log, pack_row


@pytest.mark.damages_stores
@pytest.mark.parametrize("derived", [False, True], ids=["from the row", "control: from the last key"])
def test_an_emptied_queue_goes_on_and_its_reader_misses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, derived: bool
) -> None:
    """A named reader has read everything, the queue is emptied, more comes: the reader must see all of that."""
    append = Log.append_plain

    def append_behind_the_last_key(log: Log, txn: Any, body: bytes, *rest: Any) -> Any:
        row = log.row(txn)
        cursor = txn.cursor(log.database)
        last = KEY.unpack(cursor.key())[0] if cursor.last() else 0
        txn.put(log.key, pack_row(row._replace(first=min(row.first, last + 1), next=last + 1)))
        return append(log, txn, body, *rest)

    if derived:
        monkeypatch.setattr(Log, "append_plain", append_behind_the_last_key)
    with cues.open(tmp_path / "store") as store:
        queue = store.queue("q")
        read: list[int] = []
        for batch in (range(5), range(5, 8)):
            for n in batch:
                queue.appender().write({"n": n})
            read += [m["n"] for m in queue.tailer("reader")]
            queue.delete()
    history = testing.check_history(list(range(8)), read)
    assert bool(history) is not derived, history
