"""Commits taken apart on purpose, for negative controls: the positions of a step in a transaction of their own.

``before`` its outputs loses messages when the process is killed in between, ``after`` them doubles some.
A graph file calls :func:`break_commits` with what CUES_TEST_BREAK says.
"""

from __future__ import annotations

import os
import time

from cues.steps.commit import Committer
from cues.steps.part import Part

GAP_S = 0.002
"""Between the two transactions: long enough for a random kill to hit it now and then."""

_commit_parts, _write_step = Committer.commit_parts, Committer.write_step


def _positions_before(self: Committer, parts: list[Part], row: bytes) -> None:
    self.store.core.commit(lambda txn: txn.put(self.fence.key, row))
    self.fence.expected = row
    time.sleep(GAP_S)
    _commit_parts(self, parts, row)


def _positions_after(self: Committer, parts: list[Part], packed: bytes) -> None:
    old = self.fence.expected
    self.write_step = lambda txn, parts, row, *tables: _write_step(self, txn, parts, old, *tables)  # type: ignore[method-assign]
    _commit_parts(self, parts, packed)
    time.sleep(GAP_S)
    self.store.core.commit(lambda txn: txn.put(self.fence.key, packed))


BROKEN = {"before": _positions_before, "after": _positions_after}


def break_commits(order: str = os.environ.get("CUES_TEST_BREAK", "")) -> None:
    """Take the commits of this process apart; the empty string leaves them whole."""
    if order:
        Committer.commit_parts = BROKEN[order]  # type: ignore[method-assign]
