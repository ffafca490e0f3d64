"""The shape of a graph: dependencies, order and cycles of its processors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from cues.base.data import dataclass
from cues.errors import InvalidArgument, Unsupported
from cues.graphs.processor import Node

REFINEMENTS_MAX: Final = 10_000
"""The number of colourings after which :meth:`Topology.isomorphic` stops. Usual graphs need one for each node
that is like another. Only a graph that is as regular as a torus needs thousands."""


@dataclass(frozen=True)
class Topology:
    """Processors are nodes. Each queue that one of them writes and another reads is an edge.

    Two topologies are equal if they have the same nodes and edges, in any order. :meth:`isomorphic`
    compares them without the names.
    """

    nodes: frozenset[str]
    edges: frozenset[tuple[str, str, str]]
    """(writer, queue, reader)."""

    @staticmethod
    def of(nodes: Sequence[Node]) -> Topology:
        edges = {
            (writer.name, port.queue, reader.name)
            for writer in nodes
            for port in writer.writes
            for reader in nodes
            if port.queue in {p.queue for p in reader.reads}
        }
        return Topology(frozenset(node.name for node in nodes), frozenset(edges))

    def dependencies(self, node: str) -> frozenset[str]:
        """Return all nodes that ``node`` gets messages from, directly or not."""
        return self._reach(node, {(b, a) for a, _, b in self.edges})

    def dependents(self, node: str) -> frozenset[str]:
        """Return all nodes that get messages from ``node``, directly or not."""
        return self._reach(node, {(a, b) for a, _, b in self.edges})

    def order(self) -> tuple[str, ...]:
        """Return all nodes, each after the nodes that it depends on; nodes of a cycle are together, by name."""
        return tuple(node for group in self._groups() for node in group)

    def cycles(self) -> tuple[tuple[str, ...], ...]:
        """Return the cycles: groups of nodes that depend on each other, each sorted by name."""
        loops = {a for a, _, b in self.edges if a == b}
        return tuple(tuple(g) for g in self._groups() if len(g) > 1 or g[0] in loops)

    def components(self) -> tuple[frozenset[str], ...]:
        """Return the connected components, largest first."""
        both = {(a, b) for a, _, b in self.edges} | {(b, a) for a, _, b in self.edges}
        left = set(self.nodes)
        parts: list[frozenset[str]] = []
        while left:
            node = min(left)
            part = self._reach(node, both) | {node}
            parts.append(frozenset(part))
            left -= part
        return tuple(sorted(parts, key=lambda part: (-len(part), sorted(part))))

    def isomorphic(self, other: Topology) -> bool:
        """Return whether the two have the same shape: a renaming of nodes and queues makes them equal.

        Names and the kinds of processors do not count. Queues count: one queue with two readers is another
        shape than two queues with one reader each.

        Colour refinement distinguishes most graphs and finds the renaming of most others. If several nodes
        have the same colour, one of them is paired with each candidate of the other graph in turn. Raises
        :class:`Unsupported` after :data:`REFINEMENTS_MAX` rounds, which only large, very regular graphs need.
        """
        if (len(self.nodes), len(self.edges)) != (len(other.nodes), len(other.edges)):
            return False
        ours, theirs = _links(self, "ours"), _links(other, "theirs")
        links = {**ours, **theirs}
        begin: _Colours = {vertex: vertex[1] == "node" for vertex in links}
        tries: list[tuple[_Colours, tuple[_Vertex, ...]]] = [(begin, ())]
        for _ in range(REFINEMENTS_MAX):
            if not tries:
                return False
            before, pair = tries.pop()
            colours = _refined({**before, **dict.fromkeys(pair, _PAIR)}, links)
            counts = Counter(colours[v] for v in ours)
            if counts != Counter(colours[v] for v in theirs):
                continue
            several = [(count, colour) for colour, count in counts.items() if count > 1]
            if not several:
                return True  # each node has one mate, and the mates have the same links
            _, alike = min(several)
            picked = min(v for v in ours if colours[v] == alike)
            tries += [(colours, (picked, mate)) for mate in sorted(theirs) if colours[mate] == alike]
        raise Unsupported(
            f"Two graphs of {len(self.nodes)} nodes and {len(self.edges)} edges are so regular that comparing their"
            " shapes takes too long.",
            "compare parts of them, or give the nodes the same names and use ==.",
        )

    def _reach(self, node: str, arrows: Iterable[tuple[str, str]]) -> frozenset[str]:
        if node not in self.nodes:
            nodes = ", ".join(sorted(self.nodes))
            raise InvalidArgument(f"There is no node {node!r}; the nodes are {nodes}.", "use one of those.")
        forward: dict[str, set[str]] = {}
        for a, b in arrows:
            forward.setdefault(a, set()).add(b)
        seen: set[str] = set()
        todo = {node}
        while todo:
            new = forward.get(todo.pop(), set()) - seen
            seen |= new
            todo |= new
        return frozenset(seen)

    def _groups(self) -> list[list[str]]:
        """Return the strongly connected groups, each after the groups that it depends on."""
        before = {n: self.dependencies(n) for n in self.nodes}
        left: dict[str, list[str]] = {}
        for node in sorted(self.nodes):
            mates = sorted({node} | {m for m in before[node] if node in before[m]})
            left.setdefault(mates[0], mates)
        done: set[str] = set()
        order: list[list[str]] = []
        while left:
            name = next(name for name, mates in left.items() if all(before[m] <= done | set(mates) for m in mates))
            order.append(left.pop(name))
            done.update(order[-1])
        return order


_Vertex = tuple[str, str, str]
"""Side, "node" or "queue", and name."""
_Colours = dict[_Vertex, int]
_PAIR: Final = -1
"""The colour of two vertices that are paired; a refinement gives colours from 0."""
_Links = dict[_Vertex, list[tuple[str, _Vertex, _Vertex]]]
"""For each vertex its edges: its own part in the edge, and the two other vertices."""


def _links(topology: Topology, side: str) -> _Links:
    links: _Links = {(side, "node", name): [] for name in topology.nodes}
    for a, q, b in topology.edges:
        writer, queue, reader = (side, "node", a), (side, "queue", q), (side, "node", b)
        links[writer].append(("writes", queue, reader))
        links[reader].append(("reads", queue, writer))
        links.setdefault(queue, []).append(("carries", writer, reader))
    return links


def _refined(colours: _Colours, links: _Links) -> _Colours:
    """Split colours until all vertices of one colour have links of the same colours.

    Both graphs are coloured together, so that a colour means the same in both.
    """
    while True:
        signs = {
            vertex: (colours[vertex], tuple(sorted((part, colours[a], colours[b]) for part, a, b in around)))
            for vertex, around in links.items()
        }
        numbers = {sign: number for number, sign in enumerate(sorted(set(signs.values())))}
        refined = {vertex: numbers[sign] for vertex, sign in signs.items()}
        if len(numbers) == len(set(colours.values())):
            return refined
        colours = refined
