"""Every error that Cues raises, in one tree.

    CuesError
    ├── InvalidArgument            an argument of a call is wrong (also a ValueError)
    │   ├── InvalidName            a graph, processor, binding or queue name that is not allowed
    │   └── ReservedKey            a message key that begins with ``q/`` and that users may not write
    ├── Closed                     the store, queue, tailer or graph was closed
    ├── Forked                     the object belongs to the process that this one was forked from
    ├── ConcurrentUse              one tailer was used from two threads at once
    ├── CodecError                 a value cannot be encoded or decoded; names its path and type
    ├── SchemaError                a message that does not fit a schema; names the path of the offence
    ├── MessageTooLarge            a message above the queue's ``max_message_bytes``
    ├── StoreError                 something about a store as a whole
    │   ├── StoreNotFound          there is no store at the path, and none may be created
    │   ├── StoreForeign           the file or directory at the path is not a Cues store
    │   ├── StoreVersion           a newer or unknown format, or a required feature that this version lacks
    │   ├── StoreReadOnly          a write to a store that was opened read-only, or whose files are read-only
    │   ├── StoreFull              the map or the disk is full; nothing of the commit was written
    │   │   └── DiskLow            the disk has less free space than ``min_free``
    │   ├── StoreShared            a process of another container, with the same number, has the store open
    │   ├── StoreCopied            a copy that was made while its original was written
    │   ├── StoreDamaged           a truncated data file, or a broken structure
    │   │   └── BatchDamaged       one record batch fails its checksum; its neighbours are readable
    │   ├── DurabilityMismatch     opened with another durability than it was created with
    │   └── WriterStuck            another process holds the writer lock and makes no progress
    ├── QueueNotFound              no queue of that name in the store
    ├── QueueOptionsError          an option of an existing queue that cannot change
    ├── QueueFull                  no room on a queue with ``max_lag`` or ``max_bytes`` in time; nothing was written
    ├── QueueInUse                 a queue that cannot be removed: it has messages, or a processor uses it
    ├── GraphError                 a graph that cannot be built (also a ValueError)
    │   └── TopologyChanged        the graph's inputs are not those that its store has positions for
    ├── ReturnError                a function returned a value that its processor cannot use
    ├── PositionRequired           a source yields bare messages, and its ``resume`` option is missing
    ├── AlreadyRunning             another process, or this one, runs the graph
    ├── Fenced                     a commit under an old epoch; nothing was written
    ├── TailerMoved                another reader moved a named tailer of a transaction; nothing was written
    ├── Diverged                   the store contradicts its own delivery log; the start is refused
    ├── PositionMismatch           an external write that does not continue the position kept for its source
    ├── MessagesPurged             messages were purged before they were read
    │   └── Gap                    the same, for a reader of transactions
    ├── NoPartitions               a mapping has no partition to choose at present; try again later
    ├── WaitTimeout                an awaited event did not happen in time (also a TimeoutError)
    ├── SequenceError              a call of a sequencer at the wrong time, or a wrong replay
    ├── FramingError               a frame that cannot be read or written
    │   ├── UnexpectedEOF          the stream ended inside a frame
    │   └── Desynchronised         other bytes at a place where a frame should begin
    ├── CheckpointError            a checkpoint in another system was not read, or perhaps not written
    ├── Away                       something outside cannot be reached now: a processor waits for it
    ├── ProcessorStopped           a processor stopped at an error; its cause is the user's exception
    ├── CallTimedOut               a call of a user's function took longer than its processor's ``timeout_s``
    ├── WorkerDied                 a worker process died before it had started its part of a graph
    └── Unsupported                this platform, or this engine, cannot do that
        └── NotInstalled           a requested feature needs a package that is missing or too old
            └── JavaNotFound       Spark needs Java, and none that is new enough was found

Every error has its facts as attributes and can be pickled. Its text ends with what to try (the part after
"Try:"; :attr:`CuesError.hint` has it alone).
"""

from __future__ import annotations

from typing import Any

from cues.overrides import override


class CuesError(Exception):
    """Base of all errors raised by Cues.

    ``message`` says what happened, with the values, and ``hint`` says what to try; every further
    keyword becomes an attribute.
    """

    message: str
    hint: str

    def __init__(self, message: str, hint: str = "", **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.__dict__.update(facts)

    @override
    def __str__(self) -> str:
        return f"{self.message} Try: {self.hint}" if self.hint else self.message

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        facts = {k: v for k, v in self.__dict__.items() if k not in ("message", "hint")}
        return _rebuild, (type(self), self.message, self.hint, facts)


def _rebuild(cls: type[CuesError], message: str, hint: str, facts: dict[str, Any]) -> CuesError:
    return cls(message, hint, **facts)


class InvalidArgument(CuesError, ValueError):
    """Raised when an argument is wrong: a naive datetime, an index below 1, an unknown option."""


class InvalidName(InvalidArgument):
    """Raised when a name is empty, too long, or contains a character that is not allowed in names."""

    name: str


class ReservedKey(InvalidArgument):
    """Raised when a message has a ``q/`` key that users may not write."""

    key: str


class Closed(CuesError):
    """Raised by every use of a closed object, and by blocked reads that the close has ended."""


class Forked(CuesError):
    """Raised when a store is used in a child of the process that opened it.

    LMDB would let the child write and damage the file. The parent is not affected.
    """

    pid: int


class ConcurrentUse(CuesError):
    """Raised when two threads use one tailer at the same time; the second gets the error.

    Also when a signal handler, or a ``__del__``, uses a store that its own thread is using at that moment.
    """


class CodecError(CuesError):
    """Raised when a value cannot be encoded (before anything is written) or decoded.

    ``path`` is the place inside the message (``items[2].price``), ``type_name`` the value's type.
    """

    path: str
    type_name: str


class SchemaError(CuesError):
    """Raised for a message that does not fit a ``schema=`` (:mod:`cues.schemas`); nothing was written.

    ``path`` is the place of the offence (``$.items[3].price``), ``expected`` what the schema has there.
    """

    path: str
    expected: str


class MessageTooLarge(CuesError):
    """Raised when an encoded message is larger than its queue's ``max_message_bytes``; nothing is written."""

    size_bytes: int
    limit_bytes: int


class StoreError(CuesError):
    """Base of errors that concern a whole store; ``path`` is the store's directory."""

    path: str


class StoreNotFound(StoreError):
    """Raised when a store that does not exist is opened read-only, or by a command."""


class StoreForeign(StoreError):
    """Raised when the path is a file, a directory whose data file is not a Cues store, or if a file of it is a link."""


class StoreVersion(StoreError):
    """Raised when a store has a newer or unknown format or requires an unknown feature."""

    found: Any
    supported: Any


class StoreReadOnly(StoreError):
    """Raised by a write to a store that was opened read-only or whose files may not be written."""


class StoreFull(StoreError):
    """Raised when the map or the disk is full. The whole commit was dropped: nothing is half-written."""


class DiskLow(StoreFull):
    """Raised when the file system of a store has less than ``min_free`` bytes free: by an append, or by a run.

    Everything that was acknowledged is committed. ``free`` is what was found, ``limit`` what was expected, in bytes.
    """

    free: int
    limit: int


class StoreShared(StoreError):
    """Raised by opening a store that a process of another pid namespace has open under the number ``pid`` of this one.

    LMDB knows its readers by their numbers, so only one of the two can be let in.
    """

    pid: int


class StoreCopied(StoreError):
    """Raised by opening a copy of a store for writing, if a process had the original open when it was copied.

    ``cues check STORE --adopt`` makes a store of the copy if it is whole. Opened with ``readonly=True`` it only warns.
    """


class StoreDamaged(StoreError):
    """Raised when a data file is shorter than its meta pages say, or LMDB finds its structure broken."""


class BatchDamaged(StoreDamaged):
    """Raised by reading a record batch whose checksum fails.

    The messages ``first`` to ``last`` of ``queue`` are in it; reading can continue at ``last + 1``.
    """

    queue: str
    first: int
    last: int


class DurabilityMismatch(StoreError):
    """Raised when a store is opened with another durability than the one it was created with."""

    found: str
    asked: str


class WriterStuck(StoreError):
    """Raised when a writer waited for the store's writer lock until its deadline.

    ``pid`` is the process that holds it, ``state`` the state of that process in the system ("stopped",
    "sleeping", …).
    """

    pid: int
    state: str
    waited_s: float


class QueueNotFound(CuesError):
    """Raised when a queue is opened that the store does not have and that may not be created."""

    queue: str


class QueueFull(CuesError):
    """Raised by a writer of a queue with ``max_lag`` or ``max_bytes``, when its readers did not make room in time.

    Nothing was written.
    """

    queue: str
    readers: list[str]
    """The readers that are too far behind."""


class QueueInUse(CuesError):
    """Raised by the removal of a queue that has messages, or that a processor or its try log still names, and by a
    purge of messages that a reader has not read, if the purge is to be refused then."""

    queue: str


class QueueOptionsError(CuesError):
    """Raised when a queue is opened with another value of an option that cannot change."""

    queue: str
    option: str


class GraphError(CuesError, ValueError):
    """Raised when a graph cannot run; the text names the processor, and the found and the expected value."""

    processor: str = ""
    """Empty where no processor is at fault."""


class TopologyChanged(GraphError):
    """Raised at a start when the store has positions for other inputs of a processor, or when it was renamed."""


class ReturnError(CuesError):
    """Raised when a function returns a value that its processor cannot use. It counts as a failure of the message."""


class PositionRequired(CuesError):
    """Raised when a source yields a bare message and its ``resume`` option was not given."""


class AlreadyRunning(CuesError):
    """Raised by a second start of a graph; ``pid`` is the process that runs it."""

    pid: int


class Fenced(CuesError):
    """Raised by a commit whose owner lost the processor; the commit wrote nothing.

    ``reason`` is ``"takeover"`` (another owner: drop everything and stop) or ``"seek"`` (same
    owner, the positions were moved: read them again). For a member of a consumer group ``processor`` is
    the group, and ``partitions`` are those that were not committed. For a :class:`cues.txn.Publisher` it is the id, and
    ``reason`` is ``"timeout"``: its pending messages were rolled back.
    """

    processor: str
    reason: str


class TailerMoved(CuesError):
    """Raised by the commit of a transaction whose named tailer was moved by another reader; nothing was written.

    ``queue`` is the id of the queue or partition, ``tailer`` the name, ``expected`` the index at which the
    transaction began to read and ``found`` the index in the store; each is None without a position in the store.
    """

    queue: str
    tailer: str
    expected: int | None
    found: int | None


class Diverged(CuesError):
    """Raised at the start when the store contradicts its own delivery log (another queue, another message)."""

    processor: str = ""
    """Empty where no processor is at fault."""


class PositionMismatch(CuesError):
    """Raised by a write whose source position does not follow the one that the store keeps; nothing was written.

    ``source`` is the writer's id, ``kept`` the position in the store (None when there is none) and
    ``found`` the position of the write.
    """

    source: str
    kept: Any
    found: Any


class MessagesPurged(CuesError):
    """Raised by reading a range whose front was purged: the messages ``first`` to ``last`` of ``queue``."""

    queue: str
    first: int
    last: int


class Gap(MessagesPurged):
    """Raised by a reader of transactions when messages were purged before it read them.

    ``reader`` names a consumer; it is empty for other readers.
    """

    reader: str = ""


class NoPartitions(CuesError):
    """Raised by a mapping whose list of partitions is empty at present. It may be called again later."""


class WaitTimeout(CuesError, TimeoutError):
    """Raised when an awaited event did not happen within the ``timeout=`` of the call. It may still happen."""


class SequenceError(CuesError):
    """Raised by a sequencer when a call is made at the wrong time, or a replay has messages that it did not ask for.

    The refused call changed nothing, neither offsets nor the state of producers.
    """


class FramingError(CuesError):
    """Raised when a frame cannot be read or written. A bad line was consumed; the next call reads the next line."""


class UnexpectedEOF(FramingError):
    """Raised when a stream ends inside a frame; ``data`` is the part that was read.

    It is not an ``EOFError``, which means a clean end between two frames.
    """

    data: bytes


class Desynchronised(FramingError):
    """Raised when the bytes where a frame should begin are not a frame.

    ``junk`` are the bytes that were skipped. The next call reads the frame after them, or skips more bytes in this way.
    """

    junk: bytes


class CheckpointError(CuesError):
    """Raised when a checkpoint in another system (a database, a file) could not be read or written in time.

    It is unknown whether the commit took place: call ``restore()``, which returns the last checkpoint. The
    message is not the cause, so a sink stops and writes nothing to the error queue. ``where`` is the
    database or file. ``again``: the database undid the transaction because of another one, and asks to repeat it; a
    sink repeats the step, and then waits as for a target that is away. ``away``: the target cannot be reached now;
    None: its ``__cause__`` decides (``cues/base/away.py``).
    """

    where: str
    again: bool = False
    away: bool | None = None


class Away(CuesError):
    """Raised by a function for something outside that cannot be reached now: an API, a device, a file share.

    The message is not the cause: the processor waits, and calls the function for the message again (``outage=``).
    ``what`` names the thing that is away, and ``retry_after_s`` is the least wait.

        raise cues.errors.Away("the scale does not answer", what="scale 3", retry_after_s=5)
    """

    what: str = ""
    retry_after_s: float = 0.0


class ProcessorStopped(CuesError):
    """Raised by waiting for a graph in which a processor stopped; ``__cause__`` is the user's exception.

    The position was not moved past the failed message (batch function: the failed range). ``away``: the cause is
    something outside that could not be reached.
    """

    processor: str
    away: bool = False


class CallTimedOut(CuesError):
    """The failure of a message whose call took longer than ``timeout_s``; an attempt like any other.

    The call of an ``async def`` was cancelled. The call of a plain function continues in its thread, and its result is
    dropped; a worker process ends itself, and so the call, after the step.
    """

    processor: str
    timeout_s: float


class WorkerDied(CuesError):
    """Raised by a start with ``workers=`` when one of the processes died before it was ready; nothing ran.

    A worker that dies later is started again. This error is also the cause in the error record of a message in whose
    call the worker died several times in a row.
    """

    worker: str
    pid: int
    returncode: int
    """The exit code of the process; negative: the signal that killed it."""


class Unsupported(CuesError):
    """Raised when this platform or engine cannot do what was asked."""


class NotInstalled(Unsupported):
    """Raised before anything is changed, when a package must be installed first; the hint names it.

    On the command line it is wrong usage: exit code 2.
    """


class JavaNotFound(NotInstalled):
    """Raised before Spark is started, when no Java is found that Spark can run on.

    ``looked`` has the finding in each place that was searched.
    """

    looked: list[str]


def cause_of(error: BaseException) -> BaseException | None:
    """Return the exception that an exception was raised from, or None.

    The compiled core leaves out the cause of ``raise … from``; the context is the same exception there.
    """
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)
