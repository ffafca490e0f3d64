"""Protections of the real code, each with a way to remove it. A search or a replay must then find the failure.

    with removed("NO_FENCE"):
        ...

The names are those of the models in tests/models, where the same protection is removed by ``-DNO_FENCE``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

from cues.forwarding.forwarder import Forwarder
from cues.graphs.processor_rows import ProcessorRow
from cues.groups import claims
from cues.groups.table import GroupTable
from cues.records import sealed
from cues.steps import ownership
from cues.steps.commit import Committer
from cues.steps.fence import Fence
from cues.steps.recovery import Decision, Recovery
from tests.broken_commits import BROKEN

from .world import replaced

Place = tuple[Any, str, Any]
"""An object, the name of one of its attributes, and the value in its place."""


# --- steps ----------------------------------------------------------------------------------------


def _decide_again(self: Recovery, *given: Any) -> Decision:
    """The decision of a start, without the rewind to a pending snapshot."""
    decision = _decide(self, *given)
    return Decision("void", decision.why) if decision.what == "rewind" else decision


_decide = Recovery.decide
_commit_at_home, _compare = Committer._commit_at_home, Fence.compare


def _check_before(self: Committer, *given: Any) -> None:
    """The commit of a step, whose fence is compared in a transaction before it."""
    with self.store.core.view() as txn:
        self.fence.compare(txn)
    with replaced([(self.fence, Fence.check_step.__name__, lambda txn: None)]):  # of this process alone
        _commit_at_home(self, *given)


def _compare_owners(self: Fence, txn: Any) -> None:
    """The comparison of a fence, of the owner alone."""
    if ProcessorRow.unpack(self.key, txn.get(self.key), self.processor).owner != self.row.owner:
        _compare(self, txn)


def _seek_quietly(store: Any, processor: str, *given: Any, **options: Any) -> Any:
    """A seek that raises no epoch."""
    row = _seek(store, processor, *given, **options)
    quiet = row._replace(epoch=row.epoch - 1)
    store.core.commit(lambda txn: sealed.put(txn, ownership.names.processor_key(processor), quiet.pack()))
    return quiet


_seek = ownership.seek


# --- groups ---------------------------------------------------------------------------------------

_moved = GroupTable.moved


def _moved_if(equal: Callable[[Any, Any], bool]) -> Callable[..., Any]:
    """The fence of a group, which compares only what ``equal`` compares."""

    def moved(self: GroupTable, txn: Any, partition: Any, move: Any) -> Any:
        now = claims.read(txn, claims.names.log_id(*partition), self.group)
        return _moved(self, txn, partition, move._replace(was=now) if equal(now, move.was) else move)

    return moved


# --- other stores and directories -----------------------------------------------------------------

_append_steps = Forwarder.append_steps


def _append_anyhow(self: Forwarder, txn: Any, fork_queue: Any, expected: Any, *given: Any) -> Any:
    """The commit of a forwarder, which compares no row."""
    now = txn.get(fork_queue.key)
    if now == expected:
        return _append_steps(self, txn, fork_queue, expected, *given)
    return _append_steps(self, txn, fork_queue, now, *given)


def _directory(name: str) -> Callable[[], list[Place]]:
    """Protections of a shared directory, which need pyarrow."""

    def places() -> list[Place]:
        from cues.spark.cluster.driver import Driver
        from cues.spark.cluster.files import LocalFiles
        from cues.spark.cluster.ledger import Ledger

        # A name that is not there any more fails here, for all protections of the table.
        put, put_record, newest = LocalFiles.put, vars(Ledger)["_put"], Ledger.newest.__name__

        def put_over(self: LocalFiles, name: str, data: bytes) -> bool:
            if name.startswith("_cues/steps/"):
                self.delete(name)
            return put(self, name, data)

        def put_blindly(self: Ledger, record: Any) -> bool:
            with replaced([(self, newest, lambda: record.number)]):
                return put_record(self, record)

        return {
            "PUT_OVERWRITES": [(LocalFiles, "put", put_over)],
            "CLAIM_FORWARDS_NOTHING": [(Driver, "_forward", lambda self, processor, last: None)],
            "NO_LATER_LOOK": [(Ledger, "_put", put_blindly)],
        }[name]

    return places


REMOVALS: Final[dict[str, Callable[[], list[Place]]]] = {
    "NO_SNAPSHOT": lambda: [(Committer, "commit_snapshot", lambda self, taken: None)],
    "NO_REWIND": lambda: [(Recovery, "decide", _decide_again)],
    "TWO_COMMITS": lambda: [(Committer, "commit_parts", BROKEN["after"])],
    "POSITION_FIRST": lambda: [(Fence, "standing", lambda self, taken: self.moved(taken.slices))],
    "NO_FENCE": lambda: [(Fence, "check_step", lambda self, txn: None)],
    "CHECK_BEFORE": lambda: [(Committer, "_commit_at_home", _check_before)],
    "ONLY_OWNER": lambda: [(Fence, "compare", _compare_owners)],
    "SEEK_KEEPS_EPOCH": lambda: [(ownership, "seek", _seek_quietly)],
    "NO_FENCE of a group": lambda: [(GroupTable, "moved", _moved_if(lambda now, was: True))],
    "ONLY_OWNER of a group": lambda: [(GroupTable, "moved", _moved_if(lambda now, was: now.owner == was.owner))],
    "NO_ROW": lambda: [(Forwarder, "append_steps", _append_anyhow)],
    **{name: _directory(name) for name in ("PUT_OVERWRITES", "CLAIM_FORWARDS_NOTHING", "NO_LATER_LOOK")},
}


@contextlib.contextmanager
def removed(name: str | None) -> Iterator[None]:
    """Remove one protection during the block; None: none."""
    with replaced(REMOVALS[name]() if name is not None else []):
        yield
