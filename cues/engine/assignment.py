"""Which worker carries what: a pure function over a graph's shape.

    unit      what one owner runs: a processor, or its part for one partition of what it reads
    instance  units of a processor that are stepped in turn; all of them, unless it has ``instances=``
    chain     processors along a path of the graph: what one writes the next reads

1. Processors are put in a row in the order of the graph, each chain without a gap.
2. The row is cut into as many pieces as there are workers, none longer by more than a quarter than a fair
   share; of all ways to do so that with the fewest queues across the cuts, then the most even one. So
   short chains stay whole, and a long one is cut only where the balance asks for it.
3. Several instances of a processor do not stand in the row: they are dealt out, each to the worker with
   the least, and two of one processor to two workers where there are enough.

Nobody knows before a run how much work a function is, so every instance counts as one. Who knows better
says it by the number of workers, or by instances.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Final, Literal

from cues.errors import InvalidArgument
from cues.graphs.processor import Node
from cues.graphs.topology import Topology

SLACK: Final = 1.25
"""How much more than a fair share a worker may get for the sake of a chain that stays whole."""

Assignment = dict[str, tuple[str, ...]]
"""Unit ids by worker name."""


def check_number(workers: int | Literal["auto"]) -> None:
    """Raise :class:`InvalidArgument` for what is no number of workers."""
    if workers != "auto" and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
        raise InvalidArgument(f"workers={workers!r} is no number of worker processes.", "1 or more, or 'auto'.")


def assign(topology: Topology, units: Sequence[Node], workers: int | Literal["auto"]) -> Assignment:
    """Share a graph's units out among ``workers``; fewer where there are not so many instances.

    ``"auto"`` is a worker for each processor of the machine that this process may use, but not more than the graph
    has chains and instances: more would only hand messages to one another.
    """
    alone, instances = _instances(units)
    chains = _chains(list(alone), topology)
    asked = min(_cpus(), len(chains) + len(instances)) if workers == "auto" else int(workers)
    row = [name for chain in chains for name in chain]
    count = max(1, min(asked, len(row) + len(instances)))
    loads = [[unit for name in piece for unit in alone[name]] for piece in _cut(row, topology, count)]
    loads += [[] for _ in range(count - len(loads))]
    _deal(instances, loads)
    return {f"worker-{number}": tuple(load) for number, load in enumerate((x for x in loads if x), 1)}


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _chains(names: Sequence[str], topology: Topology) -> list[list[str]]:
    """All ``names`` in the order of the graph, as paths; one goes on while the next reads only what stands before."""
    wanted = set(names)
    edges = [(a, b) for a, _, b in sorted(topology.edges) if a in wanted and b in wanted and a != b]
    before = {name: {a for a, b in edges if b == name} for name in names}
    after = {name: [b for a, b in edges if a == name] for name in names}
    placed: set[str] = set()
    chains: list[list[str]] = []
    for start in topology.order():
        at: str | None = start
        chain: list[str] = []
        while at in wanted and at not in placed:
            chain.append(at)
            placed.add(at)
            at = next((b for b in after[at] if b not in placed and before[b] <= placed), None)
        if chain:
            chains.append(chain)
    return chains


def _cut(row: Sequence[str], topology: Topology, pieces: int) -> list[Sequence[str]]:
    """The row in so many pieces, or fewer where it is shorter."""
    pieces = min(pieces, len(row))
    if not pieces:
        return []
    longest = math.ceil(len(row) / pieces * SLACK)
    place = {name: at for at, name in enumerate(row)}
    across = [0] * (len(row) + 1)
    """Edges that a cut before the unit at this place would part."""
    for a, _, b in topology.edges:
        if a in place and b in place:
            low, high = sorted((place[a], place[b]))
            for at in range(low + 1, high + 1):
                across[at] += 1
    # best[k][end]: of row[:end] in k pieces the edges across cuts, the sum of squared lengths, and the last cut
    best: list[dict[int, tuple[int, int, int]]] = [{0: (0, 0, 0)}]
    for _ in range(pieces):
        found: dict[int, tuple[int, int, int]] = {}
        for start, (parted, squares, _) in best[-1].items():
            for end in range(start + 1, min(start + longest, len(row)) + 1):
                one = (parted + across[start], squares + (end - start) ** 2, start)
                found[end] = min(found.get(end, one), one)
        best.append(found)
    end, cut = len(row), []
    for k in range(pieces, 0, -1):
        start = best[k][end][2]
        cut.append(row[start:end])
        end = start
    return cut[::-1]


def _instances(units: Sequence[Node]) -> tuple[dict[str, list[str]], dict[tuple[str, int], list[str]]]:
    """The units of processors with one instance, by name; and of each of several, by name and number."""
    by_name: dict[str, list[Node]] = {}
    for unit in units:
        by_name.setdefault(unit.processor.rpartition(".")[2], []).append(unit)
    alone: dict[str, list[str]] = {}
    several: dict[tuple[str, int], list[str]] = {}
    for name, nodes in by_name.items():
        ids = [node.id for node in nodes]
        count = min(nodes[0].options.instances, len(ids))
        if count == 1:
            alone[name] = ids
        else:
            several |= {(name, number): ids[number::count] for number in range(count)}
    return alone, several


def _deal(instances: dict[tuple[str, int], list[str]], loads: list[list[str]]) -> None:
    """Give each instance to the worker with the least that has none of its processor yet, or the fewest."""
    has: list[list[str]] = [[] for _ in loads]
    for (processor, _), ids in instances.items():
        at = min(range(len(loads)), key=lambda n: (has[n].count(processor), len(loads[n])))
        has[at].append(processor)
        loads[at] += ids
