"""Crash points: places in the code where a test can make the process die.

A point is one line, ``faults.point("commit.inside")``, which does nothing unless it is armed. So the
tested code is the code that runs in production. Tests enumerate :data:`POINTS` × hits: die there,
restart, finish, compare whole queues. A point is armed by :func:`arm`, or by an environment
variable: ``CUES_FAULT=commit.inside:3`` kills the process at the third hit,
``CUES_FAULT=commit.inside:3:stop`` stops it (SIGSTOP) there.
"""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable

STORE_POINTS: dict[str, str] = {
    "open.marked": "the first write of a process: its boot is noted in the store, nothing else",
    "copy.begun": "the timelines of a clean copy begun, its files not noted",
    "append.before": "encoded, no transaction yet",
    "append.inside": "written, not committed",
    "append.after": "committed, no reader woken",
    "grow.inside": "partitions made, not committed",
    "purge.inside": "batches deleted, not committed",
    "compact.removed": "queues removed, nothing copied yet",
    "compact.copying": "a part of the copy written",
    "compact.copied": "the copy whole and on the disk, under its own name",
    "compact.renamed": "the copy in the place of the data file, the directory not synced",
}
"""Points of a store and its queues."""

DATA_FILE_POINTS: dict[str, str] = {
    "map.grown": "a full map is larger in this process, its size not in the format record",
    "map.noted": "the size of a larger map committed, the commit that found it full not run again",
    "adopt.copied": "a copy of a running store rewritten beside its data file",
    "adopt.renamed": "the rewritten copy in the place of the data file, still refused",
}
"""Points of a map that grows, and of the adoption of a copy."""

BACKUP_POINTS: dict[str, str] = {
    "backup.writing": "a part of the changes of one store in a file",
    "backup.copied": "all files of a backup written and synced, no manifest",
    "backup.written": "the manifest written, the directory without its name",
    "restore.filling": "a part of the changes in the data file of a restore",
    "restore.filled": "one of the restored data files filled, checked and durable under its first name",
    "restore.complete": "all restored data files marked as complete",
    "restore.named": "one of the restored data files in its place",
    "restore.deleted": "the working directory of one of the restored stores deleted",
    "follow.kept": "the changes of several stores in a file at the follower, none applied",
    "follow.inside": "changes of one store written at the follower, not committed",
    "follow.applied": "changes of one store committed at the follower",
    "promote.retired": "one of the original stores retired, its copy not yet a store",
    "promote.begun": "the promotion noted as begun: the originals retired or abandoned, no copy a store",
    "promote.named": "one of the copies of a follower is a store",
}
"""Points of backups, restores and followers."""

STEP_POINTS: dict[str, str] = {
    "claim.inside": "ownership written, not committed",
    "claim.after": "ownership committed, not recovered yet",
    "take.after": "messages copied out, nothing run",
    "snapshot.inside": "snapshot written, not committed",
    "snapshot.after": "snapshot committed, function not called",
    "function.before": "before a call of the user's function",
    "function.after": "after a call of the user's function",
    "commit.before": "step run, no transaction yet",
    "commit.outputs": "outputs written; state, attempt and positions not",
    "commit.inside": "everything written, not committed",
    "commit.after": "committed, doorbells not rung",
    "ring.after": "doorbells rung",
    "close.before": "all steps done, store not closed",
}
"""Points of a graph in one store, in the order of a message's journey."""

OPERATOR_POINTS: dict[str, str] = {
    "seek.inside": "positions of a processor moved, and its state deleted, not committed",
    "rename.inside": "rows of renamed processors under their new ids, not committed",
    "rename.after": "processors renamed, nothing claimed",
}
"""Points of a seek, and of a start that renames processors."""

ABROAD_POINTS: dict[str, str] = {
    "mark.inside": "a low-water mark written in the other store, not committed",
    "forward.read": "steps copied out of a fork queue, the home store not synced",
    "forward.synced": "the home store synced, nothing written to the other one",
    "forward.inside": "messages written to the other store, its producer row not",
    "forward.after": "messages and producer row committed in the other store",
    "trim.synced": "the other store synced, the fork queue not trimmed",
    "trim.inside": "the fork queue trimmed, not committed",
}
"""Further points of a graph whose queues are in several stores."""

PENDING_POINTS: dict[str, str] = {
    "pending.settled": "due acknowledgements appended in other stores, other pending messages dropped; no producer",
    "pending.named": "the producer of an owner committed in the home store, nothing written under it",
    "pending.inside": "pending messages written to another store, not committed",
    "pending.written": "pending messages of a step committed in one other store, and synced",
    "pending.committed": "the step committed in the home store, and synced; nothing acknowledged",
}
"""Points of a stream that writes to other stores by pending messages."""

PUBLISHER_POINTS: dict[str, str] = {
    "stamped.before": "stamped messages encoded, no transaction yet",
    "stamped.inside": "stamped messages written, not committed",
    "publish.before": "published messages taken from the queue of appends, no transaction yet",
    "publish.inside": "published messages written, not committed",
    "publish.after": "published messages committed, no waiting call told",
    "intents.prepared": "pending messages of one store marked as decided by the checkpoint, no intent built",
    "intents.built": "acknowledgements built, the stores of their messages synced",
}
"""Points of publishers, and of messages that were stamped elsewhere."""

ROLLBACK_POINTS: dict[str, str] = {
    "expire.inside": "an expired transaction rolled back, not committed",
}
"""Points of those who roll back the transactions of publishers that are gone."""

CHECKPOINT_POINTS: dict[str, str] = {
    "checkpoint.restored": "the fence of a checkpoint raised, its owner not told",
    "checkpoint.inside": "a target's rows and the checkpoint written, not committed",
    "checkpoint.after": "a target's rows and the checkpoint committed, the caller not told",
}
"""Points of checkpoints in another system."""

FILE_POINTS: dict[str, str] = {
    "files.appended": "rows appended to the open file, the row not replaced; in an object store: the intent written",
    "files.committed": "the row replaced, finished files not renamed; in an object store: the object put, the row not",
    "files.converted": "the finished form of a file written beside the open one",
    "files.finishing": "a file has its finished form, and not its name",
    "files.finished": "a file has its name",
}
"""Points of sinks that write files (``cues.processors.file_sink``)."""

KAFKA_POINTS: dict[str, str] = {
    "kafka.fenced": "earlier processes fenced, nothing read",
    "kafka.positioned": "records and position in an open transaction",
}
"""Points of sinks that write to Kafka (``cues.processors.kafka_sink``)."""

NATS_POINTS: dict[str, str] = {
    "nats.published": "some messages of a step published, others not; each has the position up to it",
}
"""Points of sinks that write to NATS (``cues.processors.nats_streams``)."""

CONSUMER_POINTS: dict[str, str] = {
    "consumer.restored": "a consumer's checkpoint restored, nothing else done",
    "consumer.repeated": "the acknowledgements of the checkpoint repeated; other messages pending, nothing read",
    "consumer.dropped": "messages that earlier instances left pending dropped, nothing read",
    "consumer.noted": "the position of a consumer written in a store that it reads, not committed",
    "consumer.consumed": "a message consumed; the messages that it published are pending, or wait in memory",
    "consumer.finalized": "a consumer's transaction at its end, nothing of it durable",
    "consumer.before": "published and read messages durable, the checkpoint not committed",
    "consumer.committed": "the checkpoint committed, nothing acknowledged",
    "consumer.acknowledged": "the acknowledgements appended, the application not told",
}
"""Points of consumers."""

ABORT_POINTS: dict[str, str] = {
    "consumer.aborted": "a transaction dropped by its application, its messages not read again",
}
"""Points of consumers whose application aborts a transaction."""

GROUP_POINTS: dict[str, str] = {
    "group.inside": "rows of a consumer group written, not committed",
    "group.after": "rows of a consumer group committed",
    "session.before": "a session's step run, no transaction yet",
    "session.inside": "a session's outputs and position written, not committed",
    "session.after": "a session committed, doorbells not rung",
}
"""Points of consumer groups and their sessions."""

SHARED_POINTS: dict[str, str] = {
    "shared.started": "a partition claimed and the thread of its consumer started, nothing restored by it perhaps",
    "shared.stopped": "the consumers of partitions ended, the positions of the group not moved",
    "shared.noted": "the positions of the group moved, the partitions not released",
}
"""Points of the hand-over of a partition between consumers of a group."""

TRANSACTION_POINTS: dict[str, str] = {
    "transaction.before": "the block of a transaction left, nothing written",
    "transaction.inside": "the messages and positions of a transaction written, not committed",
    "transaction.after": "a transaction committed, doorbells not rung",
}
"""Points of transactions of a store."""

REDRIVE_POINTS: dict[str, str] = {
    "redrive.asking": "redrives requested, not committed",
    "redrive.asked": "redrives requested and committed, their owner not woken",
    "redrive.claimed": "the redriver of a unit claimed, not recovered yet",
    "redrive.inside": "a redriven step and the resolution of its error messages written, not committed",
}
"""Points of redrives, whose steps also reach the points of steps."""

PAUSE_POINTS: dict[str, str] = {
    "pause.inside": "the pause of a unit, or the count of its error messages, written, not committed",
    "pause.after": "a step with a failure and the pause after it committed, the pause not noticed",
    "pause.asking": "pauses that somebody asked for written, not committed",
    "pause.resuming": "pauses deleted, not committed",
    "pause.changed": "pauses written or deleted and committed, their owner not woken",
}
"""Points of pauses, which the points of steps surround."""

TIMER_POINTS: dict[str, str] = {
    "timer.claimed": "the firer of a unit claimed, not recovered yet",
    "timer.moving": "due timers moved to their queue, not committed",
    "timer.moved": "due timers moved to their queue and committed, none fired",
    "timer.inside": "a step of timers written and their messages removed, not committed",
}
"""Points of timers, whose steps also reach the points of steps."""

CLOSING_POINTS: dict[str, str] = {
    "closing.asking": "a unit asked to close what it keeps open, not committed",
    "closing.asked": "a unit asked to close what it keeps open, its owner not woken",
    "closing.claimed": "the closer of a unit claimed, not recovered yet",
    "closing.inside": "a step that closes written and its request removed, not committed",
}
"""Points of closing, whose steps also reach the points of steps."""

EXPIRY_POINTS: dict[str, str] = {
    "state.expiring": "expired values of an idle processor deleted, not committed",
    "state.expired": "expired values of an idle processor deleted and committed",
}
"""Points of a state with ``ttl=``, whose steps also reach the points of steps."""

DELAY_POINTS: dict[str, str] = {
    "delay.holding": "delayed messages held, with the step that took them, not committed",
    "delay.claimed": "the deliverer of a unit claimed, not recovered yet",
    "delay.moving": "messages that are due moved to their queue, not committed",
    "delay.moved": "messages that are due moved to their queue and committed, none delivered",
    "delay.inside": "a step of messages that were due written, and they are removed, not committed",
}
"""Points of delayed messages, whose steps also reach the points of steps."""

SPARK_POINTS: dict[str, str] = {
    "spark.take": "a step's range is chosen, nothing written",
    "spark.taking": "the range of a step with side effects is recorded, its function not called",
    "spark.ran": "the results of the step are in the work folder, in no queue",
    "spark.written": "the step's files are with their queues, in no log; no record",
    "spark.recorded": "the step is committed, its files in no log",
    "spark.forwarded": "a file of the step in the log of its queue, others perhaps not",
    "spark.claimed": "the processors are claimed, no old file deleted",
}
"""Points of graphs whose queues are on a shared filesystem (cues/spark/cluster)."""

MOVING_POINTS: dict[str, str] = {
    "spark.holding": "the files of messages and timers that are not due are written, their step is not committed",
    "spark.moving": "a file of messages or timers that are due is written, no record names it",
    "spark.moved": "messages or timers that are due are in a file of their own by a record, none delivered",
}
"""Further points of delayed messages and timers in a shared directory (cues/spark/cluster/delays.py)."""

CLEANING_POINTS: dict[str, str] = {
    "spark.merged": "a large file is written by cues optimize, in no log",
    "spark.vacuumed": "cues vacuum has deleted one of the files that are in no log",
    "spark.replaced": "small files replaced by a large one in the log, and still on the disk",
}
"""Points of cues optimize and cues vacuum on a shared directory."""

FRAME_POINTS: dict[str, str] = {
    "frame.batch": "Spark has written the offsets of a batch of a query, and the batch has not run",
    "frame.committed": "the batch is committed, and in the log of its queue; Spark has not written that it is done",
}
"""Further points of frames that run as a query, which also reach spark.written, spark.recorded and spark.forwarded."""

REPLAY_POINTS: dict[str, str] = {
    "replay.begun": "the note of a replay and its empty queues committed, no message copied",
    "replay.copied": "some messages copied",
    "replay.ran": "the processors idle, the replay not marked as done",
    "replay.done": "the replay marked as done, nothing compared",
}
"""Points of a replay."""

POINTS: dict[str, str] = {
    **STORE_POINTS,
    **DATA_FILE_POINTS,
    **BACKUP_POINTS,
    **STEP_POINTS,
    **OPERATOR_POINTS,
    **ABROAD_POINTS,
    **PENDING_POINTS,
    **PUBLISHER_POINTS,
    **ROLLBACK_POINTS,
    **CHECKPOINT_POINTS,
    **FILE_POINTS,
    **KAFKA_POINTS,
    **NATS_POINTS,
    **CONSUMER_POINTS,
    **ABORT_POINTS,
    **GROUP_POINTS,
    **SHARED_POINTS,
    **TRANSACTION_POINTS,
    **REDRIVE_POINTS,
    **PAUSE_POINTS,
    **TIMER_POINTS,
    **DELAY_POINTS,
    **CLOSING_POINTS,
    **EXPIRY_POINTS,
    **SPARK_POINTS,
    **MOVING_POINTS,
    **CLEANING_POINTS,
    **FRAME_POINTS,
    **REPLAY_POINTS,
}
"""Every crash point, and the state at it. A test that draws one draws from those that it can reach."""

Action = Callable[[str], None]

_armed: dict[str, tuple[int, Action]] = {}
_hits: Counter[str] = Counter()
_lock = threading.Lock()
_watcher: Action | None = None
active = False
"""True if any point is armed; hot loops check it before they call :func:`point`."""


def point(name: str) -> None:
    """Mark a crash point. It costs almost nothing while no point is armed."""
    if active:
        _hit(name)


def _hit(name: str) -> None:
    if name not in POINTS:
        raise AssertionError(f"unknown crash point {name!r}: add it to cues/faults.py")
    with _lock:  # concurrent calls pass the same points
        _hits[name] += 1
        hit = _hits[name]
    if _watcher is not None:
        _watcher(name)
    armed = _armed.get(name)
    if armed is not None and hit == armed[0]:
        armed[1](name)


def kill(name: str) -> None:
    """End this process as ``kill -9`` would."""
    os.kill(os.getpid(), signal.SIGKILL)


def stop(name: str) -> None:
    """Stop this process as ``kill -STOP`` would, until SIGCONT; this thread stops at this place."""
    # The signal is sent to the thread, and stops all threads. After one to the process it might run on for a moment.
    signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)


def arm(name: str, hit: int = 1, action: Action = kill) -> None:
    """Let ``action`` happen at the ``hit``-th time that the point ``name`` is reached (the first is 1)."""
    global active
    if name not in POINTS:
        raise ValueError(f"{name!r} is not a crash point; the points are: {', '.join(POINTS)}")
    _armed[name] = (hit, action)
    active = True


def count() -> None:
    """Count hits, without any action; :func:`hits` returns the result."""
    global active
    _hits.clear()
    active = True


def watch(watcher: Action) -> None:
    """Call ``watcher`` with the name of each point that is reached, until :func:`disarm`. It may raise."""
    global active, _watcher
    _watcher = watcher
    active = True


def hits() -> dict[str, int]:
    """The number of hits of each point since :func:`count`, :func:`arm` or :func:`disarm`."""
    return dict(_hits)


def disarm() -> None:
    """Make every point do nothing again."""
    global active, _watcher
    _armed.clear()
    _hits.clear()
    _watcher = None
    active = False


def arm_from_environment() -> None:
    value = os.environ.get("CUES_FAULT")
    if not value:
        return
    name, _, rest = value.partition(":")
    hit, _, action = rest.partition(":")
    arm(name, int(hit or 1), stop if action == "stop" else kill)


arm_from_environment()
