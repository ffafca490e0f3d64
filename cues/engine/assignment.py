"""The assignment of units to workers: a pure function of the shape of a graph.

    unit      a processor, or a processor over one partition that it reads; it has one owner
    instance  units of a processor that are stepped in turn: all of them, unless it has ``instances=``
    chain     processors along a path of the graph: each reads the output of the one before it

1. The processors are put in a row in the order of the graph, each chain without a gap.
2. The row is cut into as many pieces as there are workers. No piece is longer than a fair share by more than a
   quarter. Of all such cuts, the one that separates the fewest writers from their readers is taken, then the most
   even one. So short chains stay whole, and a long chain is cut only if the balance needs it.
3. Several instances of one processor are not in the row. Each is given to the worker with the fewest units, and two
   instances of one processor to two workers if there are enough.

The work of a function is not known before a run, so every instance counts as one. A user who knows more sets the
number of workers, or ``instances=``.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Final, Literal

from cues.errors import InvalidArgument
from cues.graphs.processor import Node
from cues.graphs.topology import Topology

SLACK: Final = 1.25
"""Most units of a worker, as a multiple of a fair share, so that a chain can stay whole."""

Assignment = dict[str, tuple[str, ...]]
"""Unit ids by worker name."""


def check_number(workers: int | Literal["auto"]) -> None:
    """Raise :class:`InvalidArgument` if ``workers`` is not a number of workers."""
    if workers != "auto" and (not isinstance(workers, int) or isinstance(workers, bool) or workers < 1):
        raise InvalidArgument(
            f"workers={workers!r} is not a number of worker processes.", "set it to 1 or more, or to 'auto'."
        )


def assign(topology: Topology, units: Sequence[Node], workers: int | Literal["auto"]) -> Assignment:
    """Divide a graph's units among ``workers``, or among fewer if there are fewer instances.

    ``"auto"`` is one worker for each CPU that this process may use, but not more than the graph
    has chains and instances. More workers would only pass messages to each other.
    """
    alone, instances = _instances(units)
    chains = _chains(list(alone), topology)
    asked = min(_cpus(), len(chains) + len(instances)) if workers == "auto" else int(workers)
    row = [name for chain in chains for name in chain]
    count = max(1, min(asked, len(row) + len(instances)))
    loads = [[unit for name in piece for unit in alone[name]] for piece in _cut(row, topology, count)]
    loads += [[] for _ in range(count - len(loads))]
    _deal(instances, loads)
    found = {f"worker-{number}": tuple(load) for number, load in enumerate((x for x in loads if x), 1)}
    _check_places(found, {unit.id: unit for unit in units})
    return found


def _check_places(assignment: Assignment, units: Mapping[str, Node]) -> None:
    """Refuse two workers that need a place which one process at a time can have open, at least one to write there."""
    writers: dict[str, dict[str, Node]] = {}
    users: dict[str, dict[str, Node]] = {}
    for worker, ids in assignment.items():
        for unit in map(units.__getitem__, ids):
            if place := getattr(unit.options.checkpoint, "one_process", None):
                writers.setdefault(place, {})[worker] = unit
            if place := place or getattr(unit.fn, "one_process", None):
                users.setdefault(place, {})[worker] = unit
    for place in writers:
        if len(users[place]) > 1:
            names = ", ".join(f"{unit.id} in {worker}" for worker, unit in sorted(users[place].items()))
            raise InvalidArgument(
                f"One process at a time can have {place} open, and several workers need it: {names}.",
                "start the graph without workers, or with one; or give each of these processors a database of its own.",
            )


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _chains(names: Sequence[str], topology: Topology) -> list[list[str]]:
    """All ``names`` in the order of the graph, as chains. Each reads only from names that come before it."""
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
    """The row in ``pieces`` pieces, or in fewer if it is shorter."""
    pieces = min(pieces, len(row))
    if not pieces:
        return []
    longest = math.ceil(len(row) / pieces * SLACK)
    place = {name: at for at, name in enumerate(row)}
    across = [0] * (len(row) + 1)
    """By place: the number of edges that a cut before it would separate."""
    for a, _, b in topology.edges:
        if a in place and b in place:
            low, high = sorted((place[a], place[b]))
            for at in range(low + 1, high + 1):
                across[at] += 1
    # best[k][end]: for row[:end] in k pieces, the edges across cuts, the sum of squared lengths, and the last cut
    best: list[dict[int, tuple[int, int, int]]] = [{0: (0, 0, 0)}]
    for _ in range(pieces):
        longer: dict[int, tuple[int, int, int]] = {}
        for start, (parted, squares, _) in best[-1].items():
            for end in range(start + 1, min(start + longest, len(row)) + 1):
                candidate = (parted + across[start], squares + (end - start) ** 2, start)
                longer[end] = min(longer.get(end, candidate), candidate)
        best.append(longer)
    end, cut = len(row), []
    for k in range(pieces, 0, -1):
        start = best[k][end][2]
        cut.append(row[start:end])
        end = start
    return cut[::-1]


def _instances(units: Sequence[Node]) -> tuple[dict[str, list[str]], dict[tuple[str, int], list[str]]]:
    """The units of processors with one instance, by name; and the units of each other instance, by name and number."""
    by_name: dict[str, list[Node]] = {}
    for unit in units:
        by_name.setdefault(unit.processor.rpartition(".")[2], []).append(unit)
    alone: dict[str, list[str]] = {}
    several: dict[tuple[str, int], list[str]] = {}
    for name, nodes in by_name.items():
        ids: list[str] = [node.id for node in nodes]
        count = min(nodes[0].options.instances, len(ids))
        if count == 1:
            alone[name] = ids
        else:
            several |= {(name, number): ids[number::count] for number in range(count)}
    return alone, several


def _deal(instances: dict[tuple[str, int], list[str]], loads: list[list[str]]) -> None:
    """Give each instance to the worker with the fewest instances of its processor, and then the fewest units."""
    has: list[list[str]] = [[] for _ in loads]
    for (processor, _), ids in instances.items():
        at = min(range(len(loads)), key=lambda n: (has[n].count(processor), len(loads[n])))
        has[at].append(processor)
        loads[at] += ids
