"""The end of a run: when all sources have ended, what processors keep open is closed, then targets are finished.

A processor is asked when nothing is left on the queues, after all those that it depends on: what they have closed is in
its last windows. A target has a method ``__cues_finish__(units, kept)``, which gets the ids of the units that write to
it, and whether to finish what ``at_end="keep"`` keeps open too. It returns a text for each thing that it has finished.
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
        able = {node.name: node.id for node in plan.running if closing.can_close(node, kept)}
        if able and only_targets:
            text = "its windows stay open: in a directory of --queues a source ends them by watermark(None)"
            emit(events.Event(next(iter(able.values())), text, logging.WARNING))
            able = {}
        self._left = [able[name] for name in plan.topology().order() if name in able] if able else []
        """The processors that were not asked yet, each after those that it depends on."""
        self._asked: list[Node] = []
        """The units that were asked last."""

    def go_on(self) -> bool:
        """Make the next part of the end. Return True if it is under way; call again when the queues are empty then."""
        store = self._store
        with store.core.view() as txn:
            if any(closing.waits(txn, unit) for unit in self._asked):
                return True
        while self._left:
            processor = self._left.pop(0)
            with store.core.view() as txn:
                mine = [unit for unit in self._units() if unit.processor == processor]
                mine = [unit for unit in mine if not closing.is_paused(txn, unit)]
            self._asked = [unit for unit in mine if closing.is_open(store, unit)]
            if self._asked:
                self._emit(events.Event(processor, "all sources have ended, so what is open is closed"))
                closing.ask(store, self._asked)
                return True
        self._finish_targets()
        return False

    def _finish_targets(self) -> None:
        targets: dict[int, tuple[Any, list[Node]]] = {}
        for unit in self._units():
            target = unit.options.checkpoint
            if hasattr(target, "__cues_finish__"):
                targets.setdefault(id(target), (target, []))[1].append(unit)
        for target, units in targets.values():
            for text in target.__cues_finish__([unit.key for unit in units], self._kept):
                self._emit(events.Placed(units[0].processor, text))
