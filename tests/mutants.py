"""Mutants: small faults, put into a copy of the real code one at a time; for each, a test that must find it.

    python tests/mutants.py [NAME…]        runs all mutants, or those with these names

The files of the project are never changed: the mutants are made in a copy, and the processes of the tests import that
copy. First the tests run on the copy as it is, and must pass. Then each mutant gets its test. The last line has the
counts:

    caught       the test fails, or does not end within LIMIT_S
    survived     the test passes: nothing of the project finds this fault. Exit status 1
    broken       the mutant cannot be judged: its text is not there exactly once, or its test cannot run. Exit status 1

A test that finds a mutant shows two things: the test can fail, and the line of code is needed.
"""

from __future__ import annotations

import ast
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal, NamedTuple

ROOT: Final = Path(__file__).resolve().parent.parent
TEST_S: Final = 30
"""The longest time of one test. Some mutants make a test wait or run for ever, which is found too."""
LIMIT_S: Final = 90.0
"""The longest time of a process of pytest with one test, if that time does not end it."""
_LEFT_OUT: Final = shutil.ignore_patterns(".*", "__pycache__", "*.so", "*.egg-info", "site", "build")
"""Not copied. A compiled module would hide the mutant in its source."""

Verdict = Literal["caught", "survived", "broken"]


class Mutant(NamedTuple):
    """One fault: in ``file``, ``text`` becomes ``replacement``, and ``test`` must fail."""

    name: str
    file: str
    text: str
    """It occurs exactly once in the file."""
    replacement: str
    test: str
    """The fastest test that is known to find it: file and function, with the parameters in brackets if it has any."""

    def mutated(self) -> str:
        """Return the source with the fault. Raises ValueError if the entry does not fit the file any more."""
        source = (ROOT / self.file).read_text()
        if (found := source.count(self.text)) != 1:
            raise ValueError(f"the text of {self.name} is {found} times in {self.file}, and must be there once")
        return source.replace(self.text, self.replacement)


MUTANTS: Final = (
    Mutant(
        "snapshot-not-committed",
        "cues/steps/stepper.py",
        ("if self.node.side_effects or self.node.at_most_once:\n                committer"),
        ("if self.node.at_most_once:\n                committer"),
        "test_delivery.py::test_a_step_without_outputs_is_a_nil_attempt",
    ),
    Mutant(
        "positions-not-moved",
        "cues/steps/commit.py",
        ("        self.write_tries(txn, records)\n        txn.put(self.fence.key, row)"),
        "        self.write_tries(txn, records)",
        "test_ownership.py::test_a_seek_in_the_same_transaction_as_a_step_fences_it",
    ),
    Mutant(
        "attempt-not-written",
        "cues/steps/commit.py",
        "        self.write_tries(txn, records)\n",
        "",
        "test_delivery.py::test_a_fork_is_one_commit_and_its_outputs_are_conditional",
    ),
    Mutant(
        "state-not-written",
        "cues/steps/commit.py",
        "            state.write(txn)\n",
        "            pass\n",
        "test_ownership.py::test_a_seek_in_the_middle_of_a_step_drops_the_step",
    ),
    Mutant(
        "only-the-first-output-written",
        "cues/steps/commit.py",
        "            for queue, pages in part.appends:\n",
        "            for queue, pages in part.appends[:1]:\n",
        "test_delivery.py::test_a_fork_is_one_commit_and_its_outputs_are_conditional",
    ),
    Mutant(
        "step-not-closed-at-its-end",
        "cues/steps/commit.py",
        "                if piece.input.index != piece.stop:",
        "                if False and piece.input.index != piece.stop:",
        "test_pace.py::test_a_step_of_a_stream_is_closed_when_its_time_is_over",
    ),
    Mutant(
        "dropped-step-keeps-its-place",
        "cues/steps/commit.py",
        ("        for reader in self._ports.readers:\n            reader.stand("),
        ("        for reader in ():\n            reader.stand("),
        "test_halving.py::test_halves_are_run_from_left_to_right_until_single_messages_fail",
    ),
    Mutant(
        "at-most-once-moves-late",
        "cues/steps/commit.py",
        "row = self.fence.moved(taken.slices) if self.node.at_most_once else",
        "row = self.fence.moved(taken.slices) if False else",
        "test_delivery.py::test_at_most_once_moves_before_it_runs",
    ),
    Mutant(
        "try-log-trimmed-too-far",
        "cues/steps/commit.py",
        "row.next - tries.KEEP_MESSAGES)",
        "row.next)",
        "test_start_table.py::test_a_trim_of_the_try_log_keeps_the_snapshot_of_the_step_under_way",
    ),
    Mutant(
        "fence-of-commit",
        "cues/steps/commit.py",
        ("        self.fence.check_step(txn)\n        records"),
        "        records",
        ("test_ownership.py::test_a_stopped_owner_that_continues_after_a_takeover_commits_nothing[take.after-3-{}]"),
    ),
    Mutant(
        "fence-of-snapshot",
        "cues/steps/commit.py",
        ("        self.fence.check_step(txn)\n        self.write_tries(txn, pages)"),
        "        self.write_tries(txn, pages)",
        (
            "test_ownership.py::"
            "test_a_stopped_owner_that_continues_after_a_takeover_commits_nothing[take.after-3-{'side_effects': True}]"
        ),
    ),
    Mutant(
        "fence-compares-nothing",
        "cues/steps/fence.py",
        "if stored != self.expected:",
        "if stored is None:",
        ("test_ownership.py::test_a_stopped_owner_that_continues_after_a_takeover_commits_nothing[take.after-3-{}]"),
    ),
    Mutant(
        "fence-shortcut-too-wide",
        "cues/steps/fence.py",
        "if number != last + 1:",
        "if last and number == last:",
        ("test_ownership.py::test_a_stopped_owner_that_continues_after_a_takeover_commits_nothing[take.after-3-{}]"),
    ),
    Mutant(
        "fence-of-a-shared-transaction",
        "cues/steps/fence.py",
        '.durability != "disk"',
        '.durability != ""',
        "test_ownership.py::test_a_seek_in_the_same_transaction_as_a_step_fences_it",
    ),
    Mutant(
        "fence-of-due-moves",
        "cues/steps/due_lane.py",
        "        stepper.fence.check(txn)\n",
        "",
        "test_timers.py::test_a_former_owner_moves_no_timers",
    ),
    Mutant(
        "epoch-not-raised",
        "cues/steps/ownership.py",
        "max(old.epoch if old else 0, above) + 1",
        "max(old.epoch if old else 0, above, 1)",
        "test_ownership.py::test_every_start_raises_the_epoch_and_functions_see_it",
    ),
    Mutant(
        "adopts-after-a-takeover",
        "cues/steps/stepper.py",
        ("        if not self.owns(row):\n            raise"),
        ("        if False:\n            raise"),
        "test_ownership.py::test_a_look_for_a_seek_does_not_adopt_a_takeover",
    ),
    Mutant(
        "identity-not-compared",
        "cues/steps/recovery.py",
        "if log_row.identity != position.identity:",
        "if False:",
        "test_start_table.py::test_another_queue_under_the_same_name_is_refused",
    ),
    Mutant(
        "end-not-compared",
        "cues/steps/recovery.py",
        "if position.next > log_row.next:",
        "if False:",
        "test_start_table.py::test_a_queue_that_ends_before_the_position_is_refused",
    ),
    Mutant(
        "seal-not-compared",
        "cues/steps/recovery.py",
        "if seal not in (NO_SEAL, position.seal):",
        "if False:",
        "test_controls.py::test_the_last_commits_were_taken_back_and_written_differently[as it is]",
    ),
    Mutant(
        "outputs-not-compared",
        "cues/steps/recovery.py",
        "if carried != attempt.hash:",
        "if False:",
        "test_start_table.py::test_an_output_with_another_hash_is_refused",
    ),
    Mutant(
        "no-rewind",
        "cues/steps/stepper.py",
        "if decision.again is not None:",
        "if False:",
        "test_start_table.py::test_a_pending_snapshot_is_rewound_to_and_taken_again_exactly",
    ),
    Mutant(
        "rewind-after-a-seek",
        "cues/steps/recovery.py",
        "return self._fence.row.under_way or self.node.at_most_once",
        "return True",
        "test_start_table.py::test_a_seek_to_the_very_start_of_a_pending_snapshot_voids_it_too",
    ),
    Mutant(
        "rewind-of-a-whole-step",
        "cues/steps/recovery.py",
        "if attempt is not None and attempt.hash == snapshot.hash.hex():",
        "if False:",
        "test_start_table.py::test_a_whole_step_resumes_from_the_positions[False]",
    ),
    Mutant(
        "seek-keeps-the-state",
        "cues/steps/ownership.py",
        "            txn.drop(table, delete=False)\n",
        "            pass\n",
        "test_operate.py::test_a_seek_with_reset_state_gives_the_results_of_a_fresh_run",
    ),
    Mutant(
        "seek-keeps-the-generation",
        "cues/steps/ownership.py",
        "row.generation + (1 if again else 0)",
        "row.generation",
        "test_start_table.py::test_a_seek_that_asks_for_delivery_again_gives_other_hashes",
    ),
    Mutant(
        "seek-keeps-the-epoch",
        "cues/steps/ownership.py",
        "            epoch=row.epoch + 1,",
        "            epoch=row.epoch,",
        "test_ownership.py::test_a_seek_to_the_same_place_in_the_middle_of_a_step_drops_the_step_too",
    ),
    Mutant(
        "lease-never-asked",
        "cues/steps/ownership.py",
        ("    if left > 0:\n        return"),
        ("    if False:\n        return"),
        "test_ownership.py::test_a_second_start_in_another_process_names_the_pid_and_its_state",
    ),
    Mutant(
        "lease-of-a-stopped-owner-ends-at-once",
        "cues/storage/leases.py",
        "return lease_s - (clock.monotonic_ns() - beaten) / 1e9",
        "return -1.0",
        "test_ownership.py::test_a_second_start_in_another_process_names_the_pid_and_its_state",
    ),
    Mutant(
        "lease-without-end",
        "cues/storage/leases.py",
        "return lease_s - (clock.monotonic_ns() - beaten) / 1e9",
        "return lease_s",
        "test_ownership.py::test_a_second_start_in_another_process_names_the_pid_and_its_state",
    ),
    Mutant(
        "hash-without-generation",
        "cues/steps/hashes.py",
        "codec.pack(processor) + codec.pack(generation)",
        "codec.pack(processor) + codec.pack(0)",
        "test_start_table.py::test_a_seek_that_asks_for_delivery_again_gives_other_hashes",
    ),
    Mutant(
        "hash-without-identity",
        "cues/steps/hashes.py",
        "codec.pack(tailer) + codec.pack(identity)",
        "codec.pack(tailer) + codec.pack(b'')",
        "test_delivery.py::test_the_hash_is_the_one_that_the_format_says",
    ),
    Mutant(
        "hash-in-order-of-inputs",
        "cues/steps/hashes.py",
        "[list(r) for r in sorted(ranges)]",
        "[list(r) for r in ranges]",
        "test_delivery.py::test_the_hash_is_the_one_that_the_format_says",
    ),
    Mutant(
        "source-position-of-the-last-step",
        "cues/steps/feed.py",
        "        return parts, self._at(position, count), None",
        "        return parts, self._at(*self.position), None",
        "test_delivery.py::test_a_source_continues_at_its_position",
    ),
    Mutant(
        "source-tells-before-its-commit",
        "cues/steps/feed.py",
        ("            self.committer.commit_parts(parts, row)\n            self.feed.committed_changes"),
        (
            "            getattr(self.node.fn, 'committed', lambda position: None)(int(afters[-1]))\n"
            "            self.committer.commit_parts(parts, row)\n"
            "            self.feed.committed_changes"
        ),
        "test_source_state.py::test_a_source_is_told_of_a_commit_after_it",
    ),
    Mutant(
        "failed-call-keeps-its-state",
        "cues/steps/runner.py",
        (
            "        self._layer.discard()\n"
            "        if self._imperative is not None:\n"
            "            self._imperative.discard()"
        ),
        ("        if self._imperative is not None:\n            self._imperative.discard()"),
        "test_delivery.py::test_a_failed_call_leaves_no_state_and_a_retry_begins_afresh",
    ),
    Mutant(
        "cut-step-keeps-all-state",
        "cues/steps/state.py",
        ("        self._drop_step()\n        self.known.clear()\n        for some in changes:"),
        ("        self.known.clear()\n        for some in changes:"),
        ("test_concurrency.py::test_the_state_of_calls_after_a_failure_that_stops_the_processor_is_dropped"),
    ),
    Mutant(
        "void-step-keeps-its-state",
        "cues/steps/state.py",
        ("        self.call.discard()\n        self._drop_step()\n"),
        "        self.call.discard()\n",
        "test_ownership.py::test_a_seek_in_the_middle_of_a_step_drops_the_step",
    ),
    Mutant(
        "ttl-of-expired-values",
        "cues/steps/state.py",
        "written + self.ttl_ns <= self.now()",
        "written + 2 * self.ttl_ns <= self.now()",
        "test_ttl.py::test_a_value_expires_that_was_not_written_for_its_time",
    ),
    Mutant(
        "expired-values-never-deleted",
        "cues/steps/state.py",
        "            for gone in (row, value, WRITTEN + value):",
        "            for gone in (row,):",
        "test_ttl.py::test_a_value_expires_that_was_not_written_for_its_time",
    ),
    Mutant(
        "timer-fires-early",
        "cues/steps/state.py",
        "_AT.unpack_from(row, 1)[0] > now_ns or",
        "_AT.unpack_from(row, 1)[0] > now_ns + 10**10 or",
        "test_timers.py::test_timers_at_random_fire_as_the_model_says[0]",
    ),
    Mutant(
        "moved-timer-stays",
        "cues/steps/timers.py",
        "        self.table.settle({row: None for row, *_ in timers})\n",
        "",
        "test_timers.py::test_control_a_timer_that_is_not_compared_when_it_fires",
    ),
    Mutant(
        "delayed-message-stays",
        "cues/steps/due_lane.py",
        "        self.due.table.write(txn)\n",
        ("        if self.due.kind == 'timer':\n            self.due.table.write(txn)\n"),
        "test_delays.py::test_messages_wait_for_their_time_and_not_for_each_other",
    ),
    Mutant(
        "append-times-go-back",
        "cues/queues/log.py",
        ("        if now < time_ns:\n            now = time_ns\n        index = start"),
        "        index = start",
        "test_queue.py::test_append_times_never_go_back_when_the_clock_does[process]",
    ),
    Mutant(
        "next-index-not-noted",
        "cues/queues/log.py",
        ("            raise self._occupied(start)\n        if flags"),
        ("            raise self._occupied(start)\n        index -= len(pages) > 1\n        if flags"),
        "test_queue.py::test_large_messages_come_back_among_small_ones[process-4000]",
    ),
    Mutant(
        "append-over-records",
        "cues/queues/log.py",
        ("        if not written:\n            raise self._occupied(start)"),
        ("        if False:\n            raise self._occupied(start)"),
        "test_damaged_rows.py::test_an_append_never_replaces_records_that_the_row_does_not_count",
    ),
    Mutant(
        "checksum-of-records",
        "cues/queues/log.py",
        ("        if ends:\n            return None\n        raise self.damaged(first)"),
        ("        if ends:\n            return None\n        return Batch(first, value, pieces)"),
        "test_tailer.py::test_a_damaged_batch_raises_and_its_neighbours_are_read",
    ),
    Mutant(
        "retention-of-a-step-under-way",
        "cues/queues/retention.py",
        ("            goal = min(goal, reader.next)\n    for"),
        ("            pass\n    for"),
        "test_retention.py::test_the_messages_of_a_pending_step_stay_and_this_is_reported[3]",
    ),
    Mutant(
        "retention-of-unread",
        "cues/queues/retention.py",
        "            goal = min(goal, read)\n",
        "            pass\n",
        "test_retention.py::test_what_is_unread_stays_although_it_is_old",
    ),
    Mutant(
        "retention-of-the-slowest-reader",
        "cues/queues/retention.py",
        "read = min((reader.next for reader in readers(txn, log)), default=None)",
        "read = max((reader.next for reader in readers(txn, log)), default=None)",
        "test_retention.py::test_what_a_group_has_not_read_stays_although_the_writer_opens_no_group",
    ),
    Mutant(
        "purge-of-unread",
        "cues/queues/retention.py",
        ("    if plan.behind:\n        readers"),
        ("    if False:\n        readers"),
        "test_purge.py::test_a_purge_names_each_reader_that_has_not_read",
    ),
    Mutant(
        "purge-of-half-a-record",
        "cues/queues/log.py",
        ("                if entries and key > stop:\n                    break"),
        (
            "                if entries and key > stop:\n"
            "                    front, going = key, entries\n"
            "                    break"
        ),
        "test_purge.py::test_a_purge_names_each_reader_that_has_not_read",
    ),
    Mutant(
        "sync-that-does-nothing",
        "cues/storage/environment.py",
        "            env.sync(True)\n",
        "            pass\n",
        "test_store.py::test_a_disk_store_syncs_each_commit_and_a_process_store_when_it_is_asked",
    ),
    Mutant(
        "disk-without-sync",
        "cues/storage/lmdb_map.py",
        ('sync=durability == "disk",\n                metasync'),
        ("sync=False,\n                metasync"),
        "test_store.py::test_a_disk_store_syncs_each_commit_and_a_process_store_when_it_is_asked",
    ),
    Mutant(
        "names-not-synced",
        "cues/storage/environment.py",
        "            self._sync_names()  # before",
        "            pass  # before",
        "test_opening.py::test_the_names_of_a_new_store_are_durable_before_its_first_commit",
    ),
    Mutant(
        "directories-not-synced",
        "cues/storage/environment.py",
        "        datafile.sync_names(shared.path)\n",
        "",
        "test_opening.py::test_the_directories_of_a_store_whose_files_are_others_are_durable_before_its_mark[copied]",
    ),
    Mutant(
        "no-ring-after-a-step",
        "cues/steps/commit.py",
        "        core.ring(self._written)\n",
        "",
        "test_wakeup.py::test_a_step_rings_the_doorbells_of_the_queues_that_it_wrote",
    ),
    Mutant(
        "flag-of-a-sleeper",
        "cues/storage/wakeup.py",
        "            bells.mapping[FLAGS_AT + self.slot] = 1\n",
        "            bells.mapping[FLAGS_AT + self.slot] = 0\n",
        "test_wakeup.py::test_a_write_wakes_a_thread_at_once",
    ),
    Mutant(
        "ring-of-another-log",
        "cues/storage/wakeup.py",
        "if self.words[_MASKS_WORD + slot] & mask:",
        "if self.words[_MASKS_WORD + slot] == mask:",
        "test_wakeup.py::test_alts_over_two_stores_is_woken_by_either",
    ),
    Mutant(
        "two-writers-without-a-lock",
        "cues/storage/writer_lock.py",
        "        self.words[SHARED_WRITERS] = 1\n",
        "",
        "test_writers.py::test_a_lone_writer_takes_no_lock_and_two_take_turns",
    ),
    Mutant(
        "refused-member-commits",
        "cues/storage/group_commit.py",
        ("                child.abort()\n                member.error = error"),
        ("                child.commit()\n                member.error = error"),
        "test_store.py::test_what_a_refused_member_of_a_shared_transaction_wrote_is_not_kept",
    ),
    Mutant(
        "forward-before-sync",
        "cues/forwarding/forwarder.py",
        ('        self.settle()\n        faults.point("forward.synced")'),
        '        faults.point("forward.synced")',
        "test_two_stores.py::test_a_store_is_synced_before_the_other_store_relies_on_it",
    ),
    Mutant(
        "trim-before-sync",
        "cues/forwarding/forwarder.py",
        ('        self.other.sync()\n        faults.point("trim.synced")'),
        '        faults.point("trim.synced")',
        "test_two_stores.py::test_a_store_is_synced_before_the_other_store_relies_on_it",
    ),
    Mutant(
        "forwards-twice",
        "cues/forwarding/forwarder.py",
        ("        if txn.get(fork_queue.key) != expected:\n            return None\n"),
        "",
        ("test_two_stores.py::test_a_forwarder_that_is_overtaken_between_its_look_and_its_commit[as it is]"),
    ),
    Mutant(
        "producer-row-not-written",
        "cues/forwarding/forwarder.py",
        "return sealed.put(txn, fork_queue.key,",
        "return sealed.seal(fork_queue.key,",
        "test_two_stores.py::test_a_running_graph_writes_to_and_reads_from_another_store",
    ),
    Mutant(
        "fork-queue-trimmed-too-far",
        "cues/forwarding/forwarder.py",
        "delete_before(txn, row, index)",
        "delete_before(txn, row, row.next)",
        "test_two_stores.py::test_another_store_from_an_older_backup_is_refused",
    ),
    Mutant(
        "histories-not-compared",
        "cues/forwarding/forwarder.py",
        "if (head.first, head.head.hash, head.seal) == (row.at, row.hash, row.seal):",
        "if True:",
        "test_two_stores.py::test_a_home_store_that_went_another_way_is_refused",
    ),
    Mutant(
        "low-water-mark-of-an-old-owner",
        "cues/forwarding/marks.py",
        "if raw is None or Mark.unpack(key, raw).epoch <= mark.epoch:",
        "if True:",
        "test_two_stores.py::test_a_reader_that_was_taken_over_does_not_move_its_followers_mark",
    ),
    Mutant(
        "low-water-mark-before-sync",
        "cues/forwarding/forwarder.py",
        ("        if late:\n            self.settle()"),
        "        if late:",
        "test_two_stores.py::test_a_store_is_synced_before_the_other_store_relies_on_it",
    ),
    Mutant(
        "low-water-mark-not-held",
        "cues/forwarding/low_water.py",
        "if self.queue.options.retention is not None and not held:",
        "if False:",
        "test_two_stores.py::test_holding_further_back_lowers_a_mark_that_is_held_already",
    ),
    Mutant(
        "low-water-mark-not-lowered",
        "cues/forwarding/low_water.py",
        "min(index, before.next), before.under_way",
        "before.next, before.under_way",
        "test_two_stores.py::test_a_seek_back_keeps_what_was_sought_in_the_other_store",
    ),
    Mutant(
        "pending-never-acknowledged",
        "cues/steps/pending.py",
        "        self._patience.call(self._settling.acknowledge, written)\n",
        "",
        ("test_pending.py::test_a_stopped_owner_that_continues_has_nothing_acknowledged[pending.written-4]"),
    ),
    Mutant(
        "pending-not-rolled-back",
        "cues/steps/pending.py",
        "                self.roll_back(log, row.producer)\n",
        "                pass\n",
        ("test_pending.py::test_a_stream_that_forwards_from_now_on_finishes_what_is_pending[pending.written]"),
    ),
    Mutant(
        "acknowledged-before-the-checkpoint",
        "cues/txn/consumer.py",
        (
            "            (self._opened or self._checkpoint).commit(checkpoint, work)\n"
            '            faults.point("consumer.committed")\n'
            "            # 9. Acknowledge.\n"
            "            publisher.append_ack_intents(intents)"
        ),
        (
            "            publisher.append_ack_intents(intents)\n"
            "            (self._opened or self._checkpoint).commit(checkpoint, work)\n"
            '            faults.point("consumer.committed")\n'
            "            # 9. Acknowledge."
        ),
        ("test_txn_consumer.py::test_what_the_application_publishes_waits_for_a_slow_commit_and_not_the_application"),
    ),
    Mutant(
        "acknowledgements-not-in-the-checkpoint",
        "cues/txn/consumer.py",
        "checkpoint = dataclasses.replace(checkpoint, ack_intents=tuple(intents))",
        "checkpoint = dataclasses.replace(checkpoint, ack_intents=())",
        (
            "test_txn_consumer.py::"
            "test_a_transaction_is_not_lost_where_the_store_of_its_output_is_away_at_the_next_start"
        ),
    ),
    Mutant(
        "checkpoint-before-the-barrier",
        "cues/txn/consumer.py",
        ("                store.sync()\n            faults"),
        ("                pass\n            faults"),
        "test_txn_consumer.py::test_a_checkpoint_in_a_store_is_on_the_disk_before_others_hear_of_it",
    ),
    Mutant(
        "consumer-repeats-no-acknowledgement",
        "cues/txn/consumer.py",
        "in self._publisher.append_ack_intents(restored.ack_intents, self._settings.missing):",
        "in ():",
        (
            "test_txn_consumer.py::"
            "test_a_transaction_is_not_lost_where_the_store_of_its_output_is_away_at_the_next_start"
        ),
    ),
    Mutant(
        "checkpoint-of-an-old-owner",
        "cues/checkpoints/jsonfile.py",
        'if record is None or record["fence"] != fence:',
        "if record is None:",
        "test_checkpoints.py::test_an_earlier_owner_is_refused_and_writes_nothing[file]",
    ),
    Mutant(
        "group-moves-an-old-claim",
        "cues/groups/table.py",
        "(was.owner, was.epoch, was.next):",
        "(before.owner, before.epoch, before.next):",
        "test_groups.py::test_a_part_is_fenced_as_the_whole_is",
    ),
    Mutant(
        "group-without-epoch",
        "cues/groups/table.py",
        "(before.owner, before.epoch, before.next) != (was.owner, was.epoch, was.next)",
        "(before.owner, before.next) != (was.owner, was.next)",
        "test_groups.py::test_a_part_is_fenced_as_the_whole_is",
    ),
    Mutant(
        "claims-what-others-hold",
        "cues/groups/table.py",
        "if any(claim is not None and claim.owner in others for claim in (before, *unit)):",
        "if False:",
        "test_groups.py::test_a_claim_of_what_another_member_holds_is_refused_in_its_transaction",
    ),
    Mutant(
        "plan-out-of-date",
        "cues/groups/table.py",
        "if row.generation != seen.row.generation or row.planned != seen.row.planned:",
        "if False:",
        "test_groups.py::test_a_plan_is_not_written_when_a_member_has_joined_since",
    ),
    Mutant(
        "releases-under-a-step",
        "cues/groups/holdings.py",
        "return not held.dirty and held not in self.stepping",
        "return True",
        "test_groups.py::test_no_member_reads_a_partition_before_it_is_released",
    ),
    Mutant(
        "session-writes-what-is-refused",
        "cues/groups/session.py",
        "                raise _Refused(self._why(txn, held))",
        "                continue",
        "test_sessions.py::test_a_seek_aborts_the_step",
    ),
    Mutant(
        "transaction-of-a-moved-tailer",
        "cues/steps/transaction.py",
        "                if stored != cursor.stored:",
        "                if False:",
        "test_transaction.py::test_a_tailer_that_another_reader_moved_is_named_and_nothing_is_written[1]",
    ),
    Mutant(
        "transaction-keeps-its-positions",
        "cues/steps/transaction.py",
        "            write_positions(txn, tailer.cursors, [cursor.index for cursor in tailer.cursors])",
        "            pass",
        "test_transaction.py::test_messages_and_positions_are_one_commit",
    ),
    Mutant(
        "transaction-of-a-failed-block",
        "cues/steps/transaction.py",
        ('        if kind is not None:\n            self._end("rolled back")\n            return'),
        ("        if False:\n            return"),
        "test_transaction.py::test_an_exception_rolls_everything_back",
    ),
    Mutant(
        "target-takes-an-old-owner",
        "cues/checkpoints/deliveries.py",
        "if delivery.generation < row.generation or delivery.epoch < row.epoch:",
        "if delivery.generation < row.generation:",
        "test_processors_sql.py::test_an_earlier_owner_is_refused[0-4]",
    ),
    Mutant(
        "target-takes-a-repetition",
        "cues/checkpoints/deliveries.py",
        "min(max(start, row.ends.get(tailer, 0)), delivery.end[tailer])",
        "min(start, delivery.end[tailer])",
        "test_controls.py::test_a_retry_presents_older_deliveries[as it is]",
    ),
    Mutant(
        "target-position-goes-back",
        "cues/checkpoints/deliveries.py",
        "tailer: max(end, before.get(tailer, 0))",
        "tailer: end",
        "test_sink_checkpoint.py::test_a_crash_anywhere_leaves_each_message_once[False-sqlite]",
    ),
    Mutant(
        "target-of-another-history",
        "cues/checkpoints/deliveries.py",
        'if in_queue is None or in_queue not in ("", seal):',
        "if False:",
        "test_processors_sql.py::test_a_store_that_was_put_back_and_went_another_way_is_refused",
    ),
    Mutant(
        "file-row-before-its-rows",
        "processors/file_sink.py",
        ('                self._append(open_file, data)\n                open_file["layout"] = layout\n'),
        (
            "                self._append(open_file, data)\n"
            "                self._replace(state)\n"
            '                open_file["layout"] = layout\n'
        ),
        "test_contracts_sinks.py::test_a_crash_anywhere_leaves_each_message_once[jsonl-some]",
    ),
    Mutant(
        "data-file-not-synced",
        "cues/storage/format_record.py",
        ("        os.fsync(file.fileno())\n"),
        ("        pass\n"),
        "test_disk_states.py::test_all_states_around_one_moment[a store gets its data file]",
    ),
    Mutant(
        "file-names-in-any-order",
        "processors/file_sink.py",
        ("        self._sync(self._folder)\n        if source.exists():\n"),
        ("        if source.exists():\n"),
        "test_disk_states.py::test_all_states_around_one_moment[a compressed file is finished]",
    ),
    Mutant(
        "file-not-cut",
        "processors/file_sink.py",
        ("        if size > length:\n            os.truncate(path, length)"),
        ("        if False:\n            os.truncate(path, length)"),
        "test_contracts_sinks.py::test_rows_of_a_commit_that_did_not_happen_are_in_no_finished_file",
    ),
    Mutant(
        "file-renamed-before-its-row",
        "processors/file_sink.py",
        ('        state["row"] = columns\n        self._replace(state)\n'),
        ('        state["row"] = columns\n        self._settle(state)\n        self._replace(state)\n'),
        "test_contracts_sinks.py::test_a_crash_anywhere_leaves_each_message_once[jsonl-some]",
    ),
    Mutant(
        "file-finished-twice",
        "processors/file_sink.py",
        ("        if not done.exists():\n            if not source.exists():\n                return"),
        ("        if not done.exists():\n            if False:\n                return"),
        "test_contracts_sinks.py::test_a_crash_anywhere_leaves_each_message_once[jsonl-some]",
    ),
    Mutant(
        "put-although-present",
        "cues/spark/cluster/files.py",
        "            os.link(draft, path)\n",
        ("            os.replace(draft, path)\n            self.store(draft, data)\n"),
        "test_directory_steps.py::test_a_link_whose_answer_is_lost_counts",
    ),
    Mutant(
        "gap-hinders-restore",
        "cues/tools/backup.py",
        "    problems = [problem for problem in found if not check.is_gap(problem)]\n",
        "    problems = found\n",
        "test_backup.py::test_a_salvaged_store_is_backed_up_and_restored_with_its_gap",
    ),
    Mutant(
        "increment-of-a-salvaged-store",
        "cues/tools/changes.py",
        "    if any(id not in before.lines for _, id in lines):\n",
        "    if any(first < before.next and id not in before.lines for first, id in lines):\n",
        "test_backup.py::test_a_salvaged_store_is_backed_up_and_restored_with_its_gap",
    ),
    Mutant(
        "damaged-row-is-backed-up",
        "cues/tools/changes.py",
        "                if not check.is_sound(name, key, value):\n",
        "                if False:\n",
        "test_backup.py::test_a_backup_of_a_damaged_store_is_refused_or_can_be_restored[processor_flipped]",
    ),
    Mutant(
        "row-sealed-without-its-key",
        "cues/records/sealed.py",
        "    return body + batch.checksum(body, seed_of(key))\n",
        "    return body + batch.checksum(body)\n",
        "test_sealed.py::test_a_checksum_covers_the_key_and_the_body",
    ),
    Mutant(
        "rows-of-before-not-renewed",
        "cues/storage/format_record.py",
        "            _renew(txn)\n",
        "",
        "test_sealed.py::test_the_rows_of_a_store_of_before_are_renewed_when_it_is_opened[home]",
    ),
    Mutant(
        "lost-row-not-looked-for",
        "cues/storage/transaction.py",
        "            if (own := sealed.key_of(key, row)) is not None:\n",
        "            if (own := sealed.key_of(key, row)) is not None:\n                continue\n",
        "test_sealed.py::test_a_start_that_does_not_find_its_row_looks_for_it_under_other_keys",
    ),
    Mutant(
        "row-of-any-form",
        "cues/records/sealed.py",
        "    if not fits(value, form):\n",
        "    if False:\n",
        "test_row_forms.py::test_the_note_of_a_replay_ignores_new_keys_and_refuses_other_forms",
    ),
    Mutant(
        "row-of-a-later-version",
        "cues/checkpoints/deliveries.py",
        "            if (version := _decoded(version)) == VERSION:\n",
        "            if (version := _decoded(version)) is not None:\n",
        "test_later_versions.py::test_a_sink_reads_no_row_of_another_version",
    ),
    Mutant(
        "link-of-another-user",
        "cues/base/trust.py",
        "        path = directory / os.readlink(path)\n",
        "        path = path.resolve()\n",
        "test_permissions.py::test_files_and_links_of_others_at_random_are_trusted_as_a_model_says",
    ),
)
"""All mutants, by area: the commit of a step, the fence, the start, seeks, leases, hashes, sources, state, logs and
retention, the disk and other processes, forwarding, publishers, groups and transactions, targets."""


def chosen(names: Sequence[str]) -> list[Mutant]:
    """Return the mutants with these names, or all. Raises KeyError for an unknown name."""
    known = {mutant.name: mutant for mutant in MUTANTS}
    return [known[name] for name in names] if names else list(MUTANTS)


def copied(where: Path) -> Path:
    """Return a copy of the tree. Every process that is started with :func:`environment` imports from it."""
    tree = where / "tree"
    shutil.copytree(ROOT, tree, ignore=_LEFT_OUT, symlinks=True)
    # After the files of an environment that put the original tree first, such as those of an editable install.
    (tree / "sitecustomize.py").write_text(f"import sys\nsys.path.insert(0, {str(tree)!r})\n")
    command = [sys.executable, "-c", "import cues; print(cues.__file__)"]
    imported = subprocess.run(command, cwd=where, env=environment(tree), capture_output=True, text=True, check=True)
    if not Path(imported.stdout.strip()).is_relative_to(tree):
        raise SystemExit(f"processes import {imported.stdout.strip()}, and not the copy {tree}")
    return tree


def environment(tree: Path) -> dict[str, str]:
    """Return the environment of a process that imports from the copy."""
    return {**os.environ, "PYTHONPATH": str(tree)}


def tested(tree: Path, tests: Iterable[str], limit_s: float) -> tuple[int | None, str]:
    """Run tests in the copy; return pytest's exit status, None after the limit of time, and what it printed."""
    options = [
        "-o",
        "addopts=",
        "-m",
        "",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "--tb=short",
        f"--timeout={TEST_S}",
    ]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/{test}" for test in tests)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    running = subprocess.Popen(command, cwd=tree, env=environment(tree), start_new_session=True, **streams)  # type: ignore[call-overload]
    try:
        output, _ = running.communicate(timeout=limit_s)
        return running.returncode, output
    except subprocess.TimeoutExpired:
        return None, ""
    finally:  # also the processes that the test has started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()


@contextlib.contextmanager
def applied(tree: Path, mutant: Mutant, number: int) -> Iterator[None]:
    """Put a mutant into the copy for the time of the block; each with a ``number`` of its own."""
    mutated = mutant.mutated()
    ast.parse(mutated)
    file = tree / mutant.file
    before = file.read_text()
    try:
        file.write_text(mutated)
        os.utime(file, (number, number))  # Python knows a file that has changed by the seconds of its time
        yield
    finally:
        file.write_text(before)


def judged(tree: Path, mutant: Mutant, number: int) -> tuple[Verdict, str]:
    """Run the test of a mutant."""
    try:
        with applied(tree, mutant, number):
            status, output = tested(tree, [mutant.test], LIMIT_S)
    except (ValueError, SyntaxError) as error:
        return "broken", str(error)
    if status is None:
        return "caught", f"{mutant.test} does not end"
    if status == 1:
        return "caught", mutant.test
    return ("survived", mutant.test) if status == 0 else ("broken", output[-2000:])


def main(names: Sequence[str]) -> int:
    try:
        mutants = chosen(names)
    except KeyError as unknown:
        print(f"There is no mutant {unknown}. Try: one of {', '.join(m.name for m in MUTANTS)}.", file=sys.stderr)
        return 2
    counts = {"caught": 0, "survived": 0, "broken": 0}
    with tempfile.TemporaryDirectory(prefix="cues-mutants-") as where:
        tree = copied(Path(where).resolve())
        status, output = tested(tree, dict.fromkeys(mutant.test for mutant in mutants), 20 * LIMIT_S)
        if status != 0:
            print(f"the tests do not pass without a mutant:\n{output}")
            return 1
        for number, mutant in enumerate(mutants, 1):
            began = time.monotonic()
            verdict, why = judged(tree, mutant, number)
            counts[verdict] += 1
            print(f"{verdict:8}  {mutant.name}  ({time.monotonic() - began:.1f} s)  {why}", flush=True)
    print(f"{len(mutants)} mutants: " + ", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    return 0 if counts["caught"] == len(mutants) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
