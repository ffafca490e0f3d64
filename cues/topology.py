"""Questions about a graph's shape: who depends on whom, in which order, where it goes round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cues.errors import InvalidArgument
from cues.processor import Node


@dataclass(frozen=True)
class Topology:
    """Processors as nodes; an edge for each queue that one writes and another reads.

    Two topologies are equal when they have the same nodes and edges, in whatever order declared.
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
        """Everything that ``node`` gets messages from, directly or not."""
        return self._reach(node, {(b, a) for a, _, b in self.edges})

    def dependents(self, node: str) -> frozenset[str]:
        """Everything that gets messages from ``node``, directly or not."""
        return self._reach(node, {(a, b) for a, _, b in self.edges})

    def order(self) -> tuple[str, ...]:
        """All nodes, each behind what it depends on; nodes of a cycle stand together, by name."""
        done: list[str] = []
        for group in self._groups():
            done += group
        return tuple(done)

    def cycles(self) -> tuple[tuple[str, ...], ...]:
        """The groups of nodes that go round, each in its order of names."""
        loops = {a for a, _, b in self.edges if a == b}
        return tuple(tuple(g) for g in self._groups() if len(g) > 1 or g[0] in loops)

    def components(self) -> tuple[frozenset[str], ...]:
        """The parts that no edge connects, largest first."""
        both = {(a, b) for a, _, b in self.edges} | {(b, a) for a, _, b in self.edges}
        left = set(self.nodes)
        found: list[frozenset[str]] = []
        while left:
            node = min(left)
            part = self._reach(node, both) | {node}
            found.append(frozenset(part))
            left -= part
        return tuple(sorted(found, key=lambda part: (-len(part), sorted(part))))

    def _reach(self, node: str, arrows: Iterable[tuple[str, str]]) -> frozenset[str]:
        if node not in self.nodes:
            raise InvalidArgument(f"No node {node!r}; there are {', '.join(sorted(self.nodes))}.", "one of those.")
        forward: dict[str, set[str]] = {}
        for a, b in arrows:
            forward.setdefault(a, set()).add(b)
        seen: set[str] = set()
        todo = [node]
        while todo:
            for other in forward.get(todo.pop(), ()):
                if other not in seen:
                    seen.add(other)
                    todo.append(other)
        return frozenset(seen)

    def _groups(self) -> list[list[str]]:
        """Strongly connected groups, each behind those that it depends on."""
        before = {n: self.dependencies(n) for n in self.nodes}
        groups: dict[str, list[str]] = {}
        for node in sorted(self.nodes):
            mates = sorted({node} | {m for m in before[node] if node in before[m]})
            groups.setdefault(mates[0], mates)
        left = dict(sorted(groups.items()))
        done: set[str] = set()
        order: list[list[str]] = []
        while left:
            for name, mates in left.items():
                if all(before[m] <= done | set(mates) for m in mates):
                    order.append(mates)
                    done |= set(mates)
                    del left[name]
                    break
        return order
