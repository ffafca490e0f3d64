"""The picture of a graph: processors and queues as nodes in ranks, and the edges between them.

    source ──▶ (orders) ──▶ price ──▶ (priced) ──▶ save

Processors and queues are nodes in ranks from left to right; an edge over several ranks has a bend in each of them.
Ranks and orders are numbers, not pixels: the page draws them from left to right or from top to bottom, as fits.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

from cues.operate.shape import Shape

_SWEEPS: Final = 12
"""Rounds in which nodes are moved next to their neighbours. More change no picture of 50 processors."""


# --- places ---------------------------------------------------------------------------------------


def layout(shape: Shape) -> dict[str, Any]:
    """The places of processors and of the queues between them, as plain data.

    ``nodes``: id, kind, rank and place across the ranks; two neighbours of a rank are at least 1 apart. ``edges``:
    from, to, and the places ``[rank, place]`` of its bends.
    """
    edges = [(f"q:{queue}", f"p:{each.id}") for each in shape.processors for queue in each.inputs]
    edges += [(f"p:{each.id}", f"q:{queue}") for each in shape.processors for queue in each.outputs]
    nodes = list(
        dict.fromkeys([f"p:{each.id}" for each in shape.processors] + [node for edge in edges for node in edge])
    )
    forward = _without_cycles(nodes, edges)
    ranks = _ranks(nodes, forward)
    chains: dict[tuple[str, str], list[str]] = {}
    links: list[tuple[str, str]] = []
    columns: list[list[str]] = [[] for _ in range(max(ranks.values(), default=-1) + 1)]
    for node in nodes:
        columns[ranks[node]].append(node)
    for begin, end in dict.fromkeys(forward):
        bends = [f"{begin}>{end}>{rank}" for rank in range(ranks[begin] + 1, ranks[end])]
        for rank, bend in enumerate(bends, ranks[begin] + 1):
            columns[rank].append(bend)
        chain = [begin, *bends, end]
        chains[begin, end] = bends
        links += itertools.pairwise(chain)
    places = _places(columns, links)
    ranked = {node: rank for rank, column in enumerate(columns) for node in column}
    drawn = []
    for begin, end in edges:
        back = (begin, end) not in chains
        path = chains.get((end, begin), [])[::-1] if back else chains[begin, end]
        drawn.append({"from": begin, "to": end, "back": back, "bends": [[ranked[bend], places[bend]] for bend in path]})
    return {
        "nodes": [{"id": node, "rank": ranks[node], "place": places[node]} for node in nodes],
        "edges": drawn,
        "ranks": len(columns),
        "places": max(places.values(), default=0) + 1,
    }


def _without_cycles(nodes: list[str], edges: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The edges, those that close a cycle turned around."""
    after: dict[str, list[str]] = {node: [] for node in nodes}
    for begin, end in edges:
        after[begin].append(end)
    done: dict[str, bool] = {}
    """By node: False while it is on the way that is being followed."""
    back: set[tuple[str, str]] = set()
    for root in nodes:
        if root in done:
            continue
        done[root] = False
        way = [(root, iter(after[root]))]
        while way:
            node, rest = way[-1]
            for end in rest:
                if end not in done:
                    done[end] = False
                    way.append((end, iter(after[end])))
                    break
                if not done[end]:
                    back.add((node, end))
            else:
                done[node] = True
                way.pop()
    return [(end, begin) if (begin, end) in back else (begin, end) for begin, end in edges]


def _ranks(nodes: list[str], edges: list[tuple[str, str]]) -> dict[str, int]:
    """The rank of each node: after all nodes that it gets messages from, and as near to its readers as they allow."""
    before: dict[str, list[str]] = {node: [] for node in nodes}
    after: dict[str, list[str]] = {node: [] for node in nodes}
    for begin, end in edges:
        before[end].append(begin)
        after[begin].append(end)
    ranks: dict[str, int] = {}
    left = {node: len(set(before[node])) for node in nodes}
    ready = [node for node in nodes if not left[node]]
    order: list[str] = []
    while ready:
        node = ready.pop(0)
        order.append(node)
        ranks[node] = max((ranks[other] + 1 for other in before[node]), default=0)
        for end in dict.fromkeys(after[node]):
            left[end] -= 1
            if not left[end]:
                ready.append(end)
    for node in reversed(order):  # a queue that is fed from outside is drawn next to its reader
        if after[node] and not before[node]:
            ranks[node] = min(ranks[end] for end in after[node]) - 1
    return ranks


def _places(columns: list[list[str]], links: list[tuple[str, str]]) -> dict[str, float]:
    """Order each rank so that few edges cross, and place its nodes near their neighbours."""
    near: dict[str, list[str]] = {node: [] for column in columns for node in column}
    for begin, end in links:
        near[begin].append(end)
        near[end].append(begin)
    places = {node: float(number) for column in columns for number, node in enumerate(column)}
    ranked = {node: rank for rank, column in enumerate(columns) for node in column}
    for sweep in range(_SWEEPS):
        forth = sweep % 2 == 0
        for rank, column in enumerate(columns) if forth else reversed(list(enumerate(columns))):
            wanted = {}
            for node in column:
                side = [other for other in near[node] if (ranked[other] < rank) == forth]
                wanted[node] = sum(places[other] for other in side) / len(side) if side else places[node]
            column.sort(key=lambda node: wanted[node])
            _spread(column, wanted, places)
    for _ in range(4):  # the orders are final: straighten towards the neighbours of both sides
        for column in columns:
            wanted = {n: sum(places[o] for o in near[n]) / len(near[n]) if near[n] else places[n] for n in column}
            _spread(column, wanted, places)
    least = min(places.values(), default=0.0)
    return {node: round(place - least, 3) for node, place in places.items()}


def _spread(column: list[str], wanted: dict[str, float], places: dict[str, float]) -> None:
    """Place the nodes of a rank in their order, at least 1 apart and as near as possible to the wanted places.

    Runs of nodes that touch each other are moved together, to the mean of what their nodes want.
    """
    runs: list[list[Any]] = []  # sum of the wanted places of the first node, number of nodes
    for node in column:
        runs.append([wanted[node], 1])
        while len(runs) > 1 and runs[-2][0] / runs[-2][1] + runs[-2][1] > runs[-1][0] / runs[-1][1]:
            total, count = runs.pop()
            runs[-1][0] += total - count * runs[-1][1]
            runs[-1][1] += count
    number = 0
    for total, count in runs:
        for offset in range(count):
            places[column[number]] = total / count + offset
            number += 1
