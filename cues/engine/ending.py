"""The end of a run: when all sources have ended, what processors keep open is closed, then targets are finished.

A processor is asked when nothing is left on the queues, after all those that it depends on: what they have closed is in
its last windows. It stays open while one of them does, or is paused. In a cycle each is asked once.

A target has a method ``__cues_finish__(units, kept)``, which gets the ids of the units that write to it, and whether to
finish what ``at_end="keep"`` keeps open too. It returns a text for each thing that it has finished.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from cues.base import events
from cues.steps import closing

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cues.graphs.plan import Plan
    from cues.graphs.processor import Node
    from cues.queues.store import Store


class Ending:
    """The end of one run. Used by one thread."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        units: Callable[[], Sequence[Node]],
        emit: Callable[[events.Event], None],
        *,
        kept: bool = False,
        only_targets: bool = False,
    ) -> None:
        """``units``: returns those that run. ``kept``: also what is kept open for the next run (``at_end="keep"``).
        ``only_targets``: their state is not in a store, so processors are not asked."""
        self._store, self._units, self._emit, self._kept = store, units, emit, kept
        able = {node.name: node for node in plan.running if closing.can_close(node)}
        if able and only_targets:
            text = "its windows stay open: in a directory of --queues a source ends them by watermark(None)"
            emit(events.Event(next(iter(able.values())).id, text, logging.WARNING))
            able = {}
        self._names = {node.id: node.name for node in plan.running}
        topology = plan.topology()
        self._left = [able[name] for name in topology.order() if name in able] if able else []
        """The processors that were not asked yet, each after those that it depends on."""
        self._before = {name: topology.dependencies(name) for name in able}
        self._asked: list[Node] = []
        """The units that were asked last."""
        self._kept_open: set[str] = set()
        """The processors that ``at_end="keep"`` keeps open."""
        self.open: dict[str, str] = {}
        """The processors that stay open although they were to be closed, with the reason."""

    def go_on(self) -> bool:
        """Make the next part of the end. Return True if it is under way; call again when the queues are empty then."""
        store, paused = self._store, self._paused()
        if self._asked:
            with store.core.view() as txn:
                waits = any(
                    closing.waits(txn, unit) and self._names[unit.processor] not in paused for unit in self._asked
                )
            if not waits:
                self._asked = []  # the queues were empty before it was done: what it has written goes through first
            return True
        while self._left:
            node = self._left.pop(0)
            units = [unit for unit in self._units() if unit.processor == node.id and closing.is_open(store, unit)]
            if not units:
                continue
            if not (self._kept or closing.at_end(node) == "close"):
                self._kept_open.add(node.name)
            elif reason := self._reason(node, paused):
                self.open[node.name] = reason
                level = logging.WARNING if paused else logging.INFO
                self._emit(events.Event(node.id, f"stays open at the end of the run: {reason}", level))
            else:
                self._emit(events.Event(node.id, "all sources have ended, so what is open is closed"))
                self._asked = units
                closing.ask(store, units)
                return True
        self._finish_targets()
        return False

    def _paused(self) -> set[str]:
        """The names of the processors that are paused: messages may wait for them, and they close nothing."""
        with self._store.core.view() as txn:
            return {self._names[unit.processor] for unit in self._units() if closing.is_paused(txn, unit)}

    def _reason(self, node: Node, paused: set[str]) -> str:
        """Return why a processor with something open is not closed; "" if it is.

        Not while one of those before it has results to come: they would be late in its windows.
        """
        if node.name in paused:
            return "it is paused"
        for name in sorted(self._before[node.name]):
            if name in paused:
                return f"{name} is paused"
            if name in self._kept_open or name in self.open:
                return f"{name} stays open"
        return ""

    def _finish_targets(self) -> None:
        targets: dict[int, tuple[Any, list[Node]]] = {}
        for unit in self._units():
            target = unit.options.checkpoint
            if hasattr(target, "__cues_finish__"):
                targets.setdefault(id(target), (target, []))[1].append(unit)
        for target, units in targets.values():
            for text in target.__cues_finish__([unit.key for unit in units], self._kept):
                self._emit(events.Placed(units[0].processor, text))
