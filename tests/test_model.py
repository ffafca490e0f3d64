"""Any sequence of what can be done to a store, beside a plain model of it; see store_machine.py.

Beside it the negative controls: a store broken on purpose, in one place, must be found different
from its model, or the machine shows nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from sets import slow_except
from store_machine import StoreMachine

from cues.errors import CuesError
from cues.graphs.processor_rows import ProcessorRow
from cues.queues import log, retention
from cues.queues.cursor import Cursor
from cues.queues.log import KEY, Log
from cues.queues.store import Store
from cues.records.log_row import put_row
from cues.steps.commit import Committer
from cues.steps.hashes import Hasher
from cues.steps.part import Part
from cues.steps.state import StateTable
from cues.steps.stepper import Stepper
from cues.storage.store_core import StoreCore

EXAMPLES_FAST = 10
EXAMPLES = 100
EXAMPLES_LONG = 4000
EXAMPLES_CONTROL = 400
"""Most of what a control may take; it ends when the machine has found it."""
RULES = 50

SETTINGS = settings(
    deadline=None,
    stateful_step_count=RULES,
    print_blob=True,  # the line that repeats a failure
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of failed messages are no news here."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("examples", slow_except([EXAMPLES_FAST], [EXAMPLES_FAST, EXAMPLES]))
def test_a_store_and_its_model_stay_equal(examples: int) -> None:
    run_state_machine_as_test(StoreMachine, settings=settings(SETTINGS, max_examples=examples))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_store_and_its_model_stay_equal_for_long() -> None:
    run_state_machine_as_test(
        StoreMachine, settings=settings(SETTINGS, max_examples=EXAMPLES_LONG, stateful_step_count=2 * RULES)
    )


# --- negative controls --------------------------------------------------------------------------

Patch = pytest.MonkeyPatch


def lost_append(patch: Patch) -> None:
    """A small append is acknowledged and not written where it would be the third of its queue."""
    real = Log.append_plain

    def append(self: Log, txn: Any, body: bytes) -> Any:
        row = self.row(txn)
        return (row.next, row.version) if row.next == 3 else real(self, txn, body)

    patch.setattr(Log, "append_plain", append)


def next_index_from_the_last_key(patch: Patch) -> None:
    """An emptied queue begins again at 1."""

    def behind_the_last_key(real: Callable[..., Any]) -> Callable[..., Any]:
        def append(self: Log, txn: Any, what: Any) -> Any:
            row, cursor = self.row(txn), txn.cursor(self.database)
            if not cursor.last():
                put_row(txn, self.key, row._replace(first=1, next=1))
            return real(self, txn, what)

        return append

    patch.setattr(Log, "append", behind_the_last_key(Log.append))
    patch.setattr(Log, "append_plain", behind_the_last_key(Log.append_plain))


def purge_off_by_one(patch: Patch) -> None:
    real = Log.move_front
    patch.setattr(Log, "move_front", lambda self, txn, row, index: real(self, txn, row, min(index + 1, row.next)))


def purge_that_tells_no_reader(patch: Patch) -> None:
    """Tailers continue to hand out what they read ahead."""
    patch.setattr(StoreCore, "note_purge", lambda self: None)


def retention_off_by_one(patch: Patch) -> None:
    real = retention.wanted
    patch.setattr(retention, "wanted", lambda txn, log, row, policy: min(real(txn, log, row, policy) + 1, row.next))


def retention_that_waits_for_no_step(patch: Patch) -> None:
    """Retention removes the messages of a pending step before it commits."""
    real = retention.readers
    patch.setattr(retention, "readers", lambda *a: [one._replace(under_way=False) for one in real(*a)])


def times_that_fall(patch: Patch) -> None:
    """The append time is the wall clock's, wherever that was set."""
    real = log._unpack_row

    def unpack(raw: bytes, *rest: Any) -> Any:
        identity, first, next, _, version = real(raw, *rest)
        return identity, first, next, 0, version

    patch.setattr(log, "_unpack_row", unpack)


def seek_by_time_off_by_one(patch: Patch) -> None:
    real = Log.index_at
    patch.setattr(Log, "index_at", lambda self, txn, row, ns: min(real(self, txn, row, ns) + 1, row.next))


def named_tailer_that_overwrites(patch: Patch) -> None:
    """Two readers of one name: each writes its position whatever the other did."""
    patch.setattr(Cursor, "compare_and_set", Cursor.write_position)


def large_messages_deleted_in_part(patch: Patch) -> None:
    """Continuation records stay when their message is deleted."""
    real = Log.delete_before

    def delete(self: Log, txn: Any, row: Any, index: int, *rest: Any) -> Any:
        kept = [(k, v) for k, v in txn.cursor(self.database) if len(k) == 12 and KEY.unpack(k[:8])[0] < index]
        found = real(self, txn, row, index, *rest)
        for key, value in kept:
            txn.put(key, value, db=self.database)
        return found

    patch.setattr(Log, "delete_before", delete)


def commit_in_two(patch: Patch) -> None:
    """The positions of a step are written after its outputs, in a transaction of their own."""
    write_step, commit_parts = Committer.write_step, Committer.commit_parts

    def commit(self: Committer, parts: list[Part], packed: bytes) -> None:
        old = self.fence.expected
        self.write_step = lambda txn, parts, row: write_step(self, txn, parts, old)  # type: ignore[method-assign]
        commit_parts(self, parts, packed)
        self.store.core.commit(lambda txn: txn.put(self.fence.key, packed))

    patch.setattr(Committer, "commit_parts", commit)


def state_in_memory_only(patch: Patch) -> None:
    patch.setattr(StateTable, "write", lambda self, txn: None)


def hash_of_the_epoch(patch: Patch) -> None:
    """A message comes under another hash after every restart."""
    real = Stepper.__init__

    def init(self: Stepper, store: Store, node: Any, row: ProcessorRow, *setting: Any, **options: Any) -> None:
        real(self, store, node, row, *setting, **options)
        self.builder.hasher = Hasher(node.id, row.epoch)
        self.process.core.renew(self.builder.hasher, row.epoch)

    patch.setattr(Stepper, "__init__", init)


BROKEN = [
    lost_append,
    next_index_from_the_last_key,
    purge_off_by_one,
    purge_that_tells_no_reader,
    retention_off_by_one,
    retention_that_waits_for_no_step,
    times_that_fall,
    seek_by_time_off_by_one,
    named_tailer_that_overwrites,
    large_messages_deleted_in_part,
    commit_in_two,
    state_in_memory_only,
    hash_of_the_epoch,
]


@pytest.mark.parametrize(
    "broken",
    [pytest.param(each, marks=pytest.mark.long if n % 3 else pytest.mark.slow) for n, each in enumerate(BROKEN)],
    ids=lambda broken: broken.__name__,
)
def test_negative_control_what_is_broken_is_found(monkeypatch: Patch, broken: Callable[[Patch], None]) -> None:
    """The same sequences every time, so that this test says the same every time."""
    broken(monkeypatch)
    search = settings(
        SETTINGS,
        max_examples=EXAMPLES_CONTROL,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    # Where the store itself notices, it is a CuesError instead.
    with pytest.raises((AssertionError, CuesError)):
        run_state_machine_as_test(StoreMachine, settings=search)
