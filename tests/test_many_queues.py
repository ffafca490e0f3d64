"""A store with thousands of queues: it opens, runs and is looked at in bounded time and memory."""

from __future__ import annotations

from pathlib import Path

import children
from sets import bounded

import cues
from cues.errors import StoreError

LOOK = """
import resource, sys, cues
from cues.cli.app import run
graph = cues.Graph("g", store=sys.argv[1])
graph.source("q0")

@graph.stream("q0", "out")
def same(message):
    return message

with graph.start() as running:
    assert running.wait_idle(200)
for command in ("status", "check"):
    assert run([command, sys.argv[1], "--json"]) == 0
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@bounded("count", 1_000, 10_000)
def test_a_store_with_many_queues(tmp_path: Path, count: int) -> None:
    """One process may have 512 more than the store had at its opening, and says so at the next one."""
    made = openings = 0
    said: list[str] = []
    while made < count:
        openings += 1
        with cues.open(tmp_path / "s", durability="process") as store:
            try:
                while made < count:
                    store.queue(f"q{made}").appender().write({"n": made})
                    made += 1
            except StoreError as error:
                said.append(str(error))
    assert len(said) == openings - 1 and all("room for 512 more" in text for text in said)
    assert 1 < openings <= count // 200
    with cues.open(tmp_path / "s") as store:
        assert [store.queue(f"q{n}").tailer().read() for n in range(count)] == [{"n": n} for n in range(count)]
    with children.Child(LOOK, tmp_path / "s") as child:
        *_, memory = child.end(300).splitlines()
    assert int(memory) < 400_000  # KiB
