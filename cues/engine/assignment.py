"""Which worker carries what: a pure function over a graph's shape.

    unit    what one owner runs: a processor, or its part on one partition; its id is that of row, try log and state
    chain   units along a path of the graph: what one writes the next reads

1. Units are put in a row in the order of the graph, each chain without a gap.
2. The row is cut into as many pieces as there are workers, none longer by more than a quarter than a fair
   share; of all ways to do so that with the fewest queues across the cuts, then the most even one. So
   short chains stay whole, and a long one is cut only where the balance asks for it.
3. The instances of a processor over partitions do not stand in the row: they are dealt out, each to the worker
   with the least, and two of one processor to two workers where there are enough. Without ``instances=`` all its
   units are one element of the row.

Nobody knows before a run how much work a function is, so every unit counts as one. Who knows better
says it by the number of workers, or by instances.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from cues.errors import InvalidArgument
from cues.plan import Plan
from cues.processor import Node
from cues.topology import Topology

SLACK: Final = 1.25
"""How much more than a fair share a worker may get for the sake of a chain that stays whole."""

Assignment = dict[str, tuple[str, ...]]
"""Unit ids by worker name."""


@dataclass(frozen=True)
class Unit:
    """What has one owner."""

    id: str
    processor: str
    """Its processor's name, a node of the topology."""
    instance: int | None = None
    """Which of the processor's instances it belongs to; None where there is only one."""


def units_of(plan: Plan, nodes: Sequence[Node]) -> list[Unit]:
    """``nodes`` are what the graph's processors were divided into (:func:`cues.engine.assembly.divide`)."""
    found = []
    for node in nodes:
        instances = node.options.instances
        found.append(
            Unit(node.id, plan.node(node.processor).name, node.partition % instances if instances > 1 else None)
        )
    return found


def assign(plan: Plan, nodes: Sequence[Node], workers: int | Literal["auto"]) -> Assignment:
    """Share a graph's units out among ``workers``; fewer where there are not so many units.

    ``"auto"`` is a worker for each processor of the machine that this process may use, but not more than the graph
    has chains and instances: more would only hand messages to one another.

    Raises :class:`InvalidArgument` for a number below 1.
    """
    if workers != "auto" and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
        raise InvalidArgument(f"workers={workers!r} is no number of worker processes.", "1 or more, or 'auto'.")
    units = units_of(plan, nodes)
    topology = plan.topology()
    together: dict[str, list[str]] = {}
    for unit in units:
        if unit.instance is None:
            together.setdefault(unit.processor, []).append(unit.id)
    chains = _chains(list(together), topology)
    instances = _instances(units)
    asked = min(_cpus(), len(chains) + len(instances)) if workers == "auto" else int(workers)
    row = [name for chain in chains for name in chain]
    count = max(1, min(asked, len(row) + len(instances)))
    loads = [[id for name in piece for id in together[name]] for piece in _cut(row, topology, count)]
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


def _instances(units: Sequence[Unit]) -> dict[tuple[str, int], list[str]]:
    """The units of each instance, by processor and number."""
    found: dict[tuple[str, int], list[str]] = {}
    for unit in units:
        if unit.instance is not None:
            found.setdefault((unit.processor, unit.instance), []).append(unit.id)
    return found


def _deal(instances: dict[tuple[str, int], list[str]], loads: list[list[str]]) -> None:
    """Give each instance to the worker with the least that has none of its processor yet, or the fewest."""
    has: list[list[str]] = [[] for _ in loads]
    for (processor, _), ids in instances.items():
        at = min(range(len(loads)), key=lambda n: (has[n].count(processor), len(loads[n])))
        has[at].append(processor)
        loads[at] += ids
