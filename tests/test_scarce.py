"""Little room, few descriptors, little memory: a run stops with a reason, and goes on when there is enough again.

:mod:`scarce` has the graph and the loop over growing amounts; nothing may be lost or doubled, whatever the amount.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

import children
import pytest
from sets import bounded
from test_store import small_disk

import cues
from cues import testing
from cues.errors import StoreError

FULL = "StoreFull"
CASES = {
    ("map", "process"): (0, 400, 25, FULL),
    ("map", "disk"): (0, 400, 25, FULL),
    ("file", "disk"): (1, 640, 40, FULL),
    ("disk", "process"): (1, 640, 40, FULL),
    ("disk", "disk"): (1, 640, 40, FULL),
    ("descriptors", "process"): (3, 34, 3, "may open no more files"),
    ("memory", "process"): (0, 4, 1, "address space of this process"),
}
"""What is scarce, and the durability: the smallest and the largest amount (pages, descriptors, MiB), the step of the
slow set, and a part of each error."""


@bounded("every", 0, 1)
@pytest.mark.parametrize(("what", "durability"), CASES)
def test_a_run_with_too_little_loses_and_doubles_nothing(
    what: str, durability: str, every: int, tmp_path: Path
) -> None:
    first, end, step, words = CASES[what, durability]
    with small_disk(tmp_path / "disk", "16m") if what == "disk" else contextlib.nullcontext(tmp_path) as place:
        command = (
            f"import scarce\nscarce.main(*{[what, durability, str(place), str(first), str(end)]}, {every or step})"
        )
        with children.Child(command) as child:
            rows = [json.loads(line) for line in child.end(280).splitlines()]
    enough, *ended = [how for _, how in rows]
    assert enough == "done" and len(ended) == len(range(first, end, every or step))
    refused = [how for how in ended if how != "done"]
    assert ended[0] != "done" and ended[-1] == "done", "the amounts do not reach from too little to enough"
    assert all(words in how and "Try:" in how for how in refused), refused
    if words == FULL:
        assert any("stopped:" in how for how in refused), "no run was stopped in its middle"


def test_without_a_free_slot_for_readers_the_error_says_so(tmp_path: Path) -> None:
    """LMDB has 1,024 of them. Writers need none, and a slot that is given back is used."""
    with cues.open(tmp_path / "s") as store:
        queue = store.queue("q")
        queue.appender().write({"n": 1})
        with contextlib.ExitStack() as held:
            with pytest.raises(StoreError, match="Too many processes and threads read") as caught:
                for _ in range(2000):
                    held.enter_context(store.core.view())
            assert "Try: close some of them" in str(caught.value)
            with pytest.raises(StoreError, match="Too many processes and threads read"):
                queue.tailer().read()
        assert queue.tailer().read() == {"n": 1}
        queue.appender().write({"n": 2})
        assert len(queue) == 2


LARGEST = 64 << 20


@bounded("refused_bytes", LARGEST, 1 << 30)
def test_the_largest_message_passes_through_a_source_a_queue_and_a_sink(tmp_path: Path, refused_bytes: int) -> None:
    """A larger one is refused with both lengths, and the queue is as it was."""
    graph = cues.Graph("g", store=tmp_path / "s", durability="process")
    content = os.urandom(1 << 20) * 63
    found = []

    @graph.source("large")
    def read(position: int | None) -> Iterator[tuple[int, dict[str, bytes]]]:
        if position is None:
            yield 1, {"content": content}

    @graph.sink("large")
    def write(message: dict[str, bytes]) -> None:
        found.append(message["content"] == content)

    with cues.open(tmp_path / "s", durability="process") as store:
        testing.run_until_idle(graph, store)
        assert found == [True]
        with pytest.raises(cues.errors.MessageTooLarge, match="the queue's limit is 67,108,864"):
            store.queue("large").appender().write({"content": bytes(refused_bytes)})
        assert len(store.queue("large")) == 1 and not store.check()
