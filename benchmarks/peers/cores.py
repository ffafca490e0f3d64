"""Two chains in one worker process and in two, with a function that computes for a millisecond and with a light one.

The wall time is that from the first commit to the last, by the messages' own times; the CPU time includes the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness import Contender, Room, Work
from work import batches, must_be

import cues
from cues.graphs.graphfile import load

FUNCTIONS = {
    "cores": "return {'n': message['n'], 'total': sum(n * n for n in range(20_000))}",
    "cores-light": "return {'n': message['n'], 'total': message['n'] * 2}",
}
GRAPH = """
import cues

def compute(message):
    {body}

keeps = cues.QueueOptions(metadata={{"t", "time"}})
graph = cues.Graph("bench", store={store!r}, durability="process", queues={{"*": keeps}})
for chain in {chains!r}:
    graph.source(f"{{chain}}-in")
    graph.add(cues.Stream(compute, f"{{chain}}-in", f"{{chain}}-out", id=f"{{chain}}-compute"{options}))
"""
CHAINS = ("a", "b")


def chains(row: str, workers: int) -> Contender:
    @contextmanager
    def contender(room: Room) -> Iterator[Work]:
        each = [{"n": n} for n in range(room.count // len(CHAINS))]
        with cues.open(room.path / "store", durability=room.durability) as store:
            for chain in CHAINS:
                queue = store.queue(f"{chain}-in", metadata={"t", "time"})
                for batch in batches(each):
                    queue.appender().write_many(batch)
        path = room.path / f"bench_{workers}.py"
        options = ", batch_size=20" if row == "cores" else ""
        text = GRAPH.format(body=FUNCTIONS[row], store=str(room.path / "store"), chains=CHAINS, options=options)
        path.write_text(text)
        graph = load(str(path)).graph

        def work() -> None:
            with graph.start(workers=workers) as running:
                assert running.wait_idle(timeout=600), "not idle in ten minutes"

        yield work
        with cues.open(room.path / "store", readonly=True) as store:
            took = [moment for chain in CHAINS for moment in ends(store.queue(f"{chain}-out"))]
            room.keep["figures"]["wall_us"] = (max(took) - min(took)) * 1e6 / room.count
            expected = {"n": 0, "total": 0}
            scope: dict[str, Any] = {}
            exec(f"def compute(message):\n    {FUNCTIONS[row]}", scope)
            heavy = scope["compute"](expected)["total"] if row == "cores" else None
            for chain in CHAINS:
                wanted = ({"n": m["n"], "total": m["n"] * 2 if heavy is None else heavy} for m in each)
                must_be(store.queue(f"{chain}-out").tailer(), wanted)

    return contender


def ends(queue: Any) -> Iterator[float]:
    """The times of the first and of the last message, in seconds since the epoch."""
    tailer = queue.tailer()
    for index in (queue.first_index, queue.last_index):
        tailer.to_index(index)
        tailer.read()
        yield tailer.envelope.time.timestamp()


CONTENDERS = {row: {"Cues, one worker": chains(row, 1), "Cues, two workers": chains(row, 2)} for row in FUNCTIONS}
