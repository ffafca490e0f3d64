"""Names, reserved keys, and the keys under which a store keeps its rows.

    graph "flights", processor "enrich", queue "priced"

    flights.enrich                      processor id, and the queue id of its try log
    flights.enrich.priced               tailer id (the processor's position on the queue)
    flights.enrich.priced/3             the same on partition 3 (partition 0 has no suffix)
    flights.enrich.fork.9f6c…           fork queue: messages of the processor for another store

Names do not contain ``.`` or ``/``, so that these ids can be split again. They do not contain ``#``,
which separates a store from a queue on the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final, NewType

from cues.errors import InvalidName

ProcessorId = NewType("ProcessorId", str)
"""The id of a processor, or of its unit on one partition: the name in its graph now."""
ProcessorKey = NewType("ProcessorKey", str)
"""The id that a unit had at its first start, which a rename does not change (cues/engine/identities.py).

Both are text and are often equal. Two types, so that the type checker refuses one in place of the other.
"""

NAME_BYTES_MAX: Final = 128
"""Longest name, in UTF-8 bytes: a tailer id of three names stays below LMDB's key limit of 511."""

QUEUE: Final = "q/queue"
T: Final = "q/t"
TIME: Final = "q/time"
HASH: Final = "q/hash"
META: Final = "q/meta"
TYPE: Final = "q/type"
WATERMARK: Final = "q.type.time/watermark"
"""The type of a message that says how far the event time of its input is: it belongs to the input, and not to a key."""
TOPICS: Final = "q/topics"
UUID: Final = "q/uuid"
DELIVER_AT: Final = "q/deliver-at"
"""The key in ``q/meta`` of the time before which no processor gets the message."""
TX: Final = "tx/t"
TRACE_CONTEXT: Final = ("traceparent", "tracestate")
"""The keys of a trace context in the metadata of a message (W3C Trace Context)."""

PROCESSOR_ID: Final = "q/processor-id"
TAILER_INDICES: Final = "q.try/tailer-indices"
TO_INDICES: Final = "q.try/to-indices"
TAILER_ID: Final = "q.try/tailer-id"
SOURCE_POSITION: Final = "q.try/source-position"
MESSAGE_INDEX: Final = "q.try/message-index"
PENDING_INDEX: Final = "q.try/pending-index"

SNAPSHOT: Final = "q.type.try/snapshot"
ATTEMPT: Final = "q.type.try/attempt"
NIL_ATTEMPT: Final = "q.type.try/nil-attempt"
ERROR_ATTEMPT: Final = "q.type.try/error-attempt"
PROCESSOR_ERROR: Final = "q.type.err/processor"

FORK_STEP: Final = "q.type.fork/step"
FORK_COUNTS: Final = "q.fork/counts"

ERR_CONFIG: Final = "err.proc/config"
ERR_MESSAGES: Final = "err.proc/messages"
ERR_CAUSE: Final = "err/cause"
ERR_CONTEXT: Final = "err/context"
ERR_REDRIVEN: Final = "err/redriven"
ERR_ABRIDGED: Final = "err/abridged"

USER_KEYS: Final = frozenset({TYPE, TOPICS})
"""The reserved keys that stay in a message when a user writes them."""

_FORBIDDEN: Final = {".": "a dot", "/": "a slash", "#": "a '#'"}


def check(kind: str, name: object) -> str:
    """Return ``name`` if it may name a ``kind`` ("queue", "graph", …), else raise :class:`InvalidName`."""
    if not isinstance(name, str):
        raise InvalidName(
            f"A {kind} name must be a string, not {type(name).__name__} ({name!r}).",
            f"pass the {kind}'s name, such as 'orders'.",
            name=str(name),
        )
    for refused, why in (
        (not name, "it is empty"),
        (
            len(name.encode("utf-8", "surrogatepass")) > NAME_BYTES_MAX,
            f"it has {len(name)} characters, and at most {NAME_BYTES_MAX} bytes are allowed",
        ),
        (name != name.strip(), "it begins or ends with white space"),
        (not name.isprintable(), "it contains a character that cannot be printed"),
        *((character in name, f"it holds {words}") for character, words in _FORBIDDEN.items()),
    ):
        if refused:
            shown = name if len(name) <= 40 else name[:40] + "…"
            raise InvalidName(f"{shown!r} cannot name a {kind}: {why}.", "use letters, digits, '-' and '_'.", name=name)
    return name


def processor_id(graph: str, processor: str) -> ProcessorId:
    return ProcessorId(f"{graph}.{processor}")


def tailer_id(processor: ProcessorKey, queue: str, partition: int = 0) -> str:
    """Return the id of a processor's position on a queue; ``processor`` is a whole processor key."""
    return f"{processor}.{queue}/{partition}" if partition else f"{processor}.{queue}"


def log_id(queue: str, partition: int) -> str:
    """Return the id of a log: the id of its queue, followed by ``/<partition>`` if that is above 0."""
    return f"{queue}/{partition}" if partition else queue


def split_log(log: str) -> tuple[str, int]:
    """Return the queue and the partition of a log id (see :func:`log_id`).

    A try log is a queue with the partition of its processor in its id: ``flights.enrich/3`` is one log.
    """
    queue, slash, partition = log.rpartition("/")
    return (queue, int(partition)) if slash and "." not in log else (log, 0)


def fork_id(processor: ProcessorKey, store: bytes) -> str:
    """Return the id of the fork queue: a processor's messages for another store, which is given by its id."""
    return f"{processor}.fork.{store.hex()}"


def split_fork(queue: str) -> tuple[ProcessorKey, bytes] | None:
    """Return the processor and the store of a fork queue's id; None for another queue."""
    graph, processor, kind, store = (*queue.split("."), "", "", "")[:4]
    return (ProcessorKey(f"{graph}.{processor}"), bytes.fromhex(store)) if kind == "fork" else None


def redriver_id(unit: ProcessorKey) -> ProcessorKey:
    """Return the id under which a unit takes redriven messages, and the id of the try log of these steps."""
    return ProcessorKey(f"{unit}.redrive")


def redrive_queue(unit: ProcessorKey, queue: str) -> str:
    """Return the id of the queue of a unit's redriven messages, which came from the queue ``queue``."""
    return f"{redriver_id(unit)}.{queue}"


def timer_id(unit: ProcessorKey) -> ProcessorKey:
    """Return the id under which a unit takes its due timers, and the id of the try log of these steps."""
    return ProcessorKey(f"{unit}.timer")


def timer_queue(unit: ProcessorKey) -> str:
    """Return the id of the queue of a unit's timers that are due."""
    return f"{timer_id(unit)}.due"


def is_timer_queue(id: str) -> bool:
    """Return whether an id of an input is that of the due timers of a unit."""
    return id.endswith(".timer.due")


def closer_id(unit: ProcessorKey) -> ProcessorKey:
    """Return the id under which a unit closes what it keeps open, and the id of the try log of these steps."""
    return ProcessorKey(f"{unit}.closing")


def closing_queue(unit: ProcessorKey) -> str:
    """Return the id of the queue of a unit's requests to close what it keeps open."""
    return f"{closer_id(unit)}.asked"


def delayer_id(unit: ProcessorKey) -> ProcessorKey:
    """Return the id under which a unit holds messages until their time, and takes those that are due."""
    return ProcessorKey(f"{unit}.delayed")


PARTS: Final = (redriver_id, timer_id, closer_id, delayer_id)
"""The parts of a unit that take messages beside its inputs. Each has rows, queues and perhaps state under its id."""
_PART_NAMES: Final = frozenset(part(ProcessorKey("")).removeprefix(".") for part in PARTS)


def is_of_unit(owner: str, units: Collection[str]) -> bool:
    """Return whether a name of state is that of one of these units (by key), or of a part of one."""
    while owner not in units:
        owner, _, part = owner.rpartition(".")
        if part not in _PART_NAMES:
            return False
    return True


# --- keys in the store's unnamed database -------------------------------------------------------
#
# A commit rewrites the leaf of the unnamed database anyway, because it has the roots of the named
# ones. So the small rows that every commit changes are kept there too, and cost no page of their own.
# They begin with a NUL, which is not in the names of databases.

FORMAT_KEY: Final = b"\0cues"
REPLAY_KEY: Final = b"\0replay\0"
"""Key of the note in a store that a replay fills."""
QUEUES: Final = b"\0queue\0"
"""Prefix of the keys of all records of queues."""
STORES: Final = b"\0store\0"
"""Prefix of the keys of all rows with the path of another store."""
SUBSCRIPTIONS: Final = b"\0sub\0"
"""Prefix of the keys of all notes that a processor reads a log; these rows are empty."""
PROCESSORS: Final = b"\0proc\0"
"""Prefix of the keys of all rows of processors."""
READERS: Final = b"\0reader\0"
"""Prefix of the keys of all positions of named tailers."""
TOPOLOGIES: Final = b"\0topo\0"
"""Prefix of the keys of all topology records."""
REDRIVERS: Final = b"\0redrive\0"
"""Prefix of the keys of all rows of redrivers."""
REDRIVES: Final = b"\0redrives\0"
"""Prefix of the keys of all counts of redrives."""
FAILURES: Final = b"\0failures\0"
"""Prefix of the keys of all counts of error messages in windows."""
PAUSES: Final = b"\0pause\0"
"""Prefix of the keys of all pauses."""
LOW_WATERS: Final = b"\0low\0"
"""Prefix of the keys of all low-water marks."""
PRODUCERS: Final = b"\0producer\0"
"""Prefix of the keys of all rows about forwarded messages."""
PENDINGS: Final = b"\0pending\0"
"""Prefix of the keys of all rows about messages that are pending in other stores."""
CLOCKS: Final = b"\0clock\0"
"""Prefix of the keys of all rows about the producers of logs."""
SPANS: Final = b"\0span\0"
"""Prefix of the keys of all rows about acknowledged transactions of logs."""
OPENS: Final = b"\0open\0"
"""Prefix of the keys of all rows about pending transactions of logs."""
SOURCES: Final = b"\0source\0"
"""Prefix of the keys of all source positions of external writers."""
SCHEMAS: Final = b"\0schema\0"
"""Prefix of the keys of all schemas of records of columns."""
CLAIMS: Final = b"\0claim\0"
"""Prefix of the keys of all claims of consumer groups."""

ERRORS_DATABASE: Final = b"errors"
"""Name of the LMDB database of the rows about error records: what was done with each."""

DATABASES: Final = (b"log:", b"state:", ERRORS_DATABASE)
"""The prefixes of the names of all named databases."""

CHECKPOINTS: Final = b"\0checkpoint\0"
"""Prefix of the keys of all fences of checkpoints."""


def _keys(prefix: bytes) -> Callable[[str], bytes]:
    return lambda name: prefix + name.encode()


def _keys_of_ids(prefix: bytes) -> Callable[[ProcessorId], bytes]:
    return _keys(prefix)


def _keys_of_keys(prefix: bytes) -> Callable[[ProcessorKey], bytes]:
    return _keys(prefix)


def _pair_keys(prefix: bytes) -> Callable[[str, str], bytes]:
    return lambda first, second: prefix + first.encode() + b"\0" + second.encode()


queue_key = _keys(QUEUES)
"""Key of a queue's record: identity, options, partitions, schema."""
processor_key = _keys_of_ids(PROCESSORS)
"""Key of a processor's row: owner, epoch, generation, positions."""
topology_key = _keys_of_ids(TOPOLOGIES)
"""Key of a processor's topology record: its kind and tailers, in the order of the row."""
graph_key = _keys(b"\0graph\0")
"""Key of the note of a graph's processors at its last start."""
pending_key = _keys_of_keys(PENDINGS)
"""Key of the row about a processor's pending messages in other stores, after its last commit."""
source_key = _keys(SOURCES)
"""Key of the source position of an external writer (a Spark query, for example)."""
group_key = _keys(b"\0group\0")
"""Key of a group's row: generation, the generation that its plan is of, count of changes."""
checkpoint_key = _keys(CHECKPOINTS)
"""Key of the fence of a checkpoint that a consumer keeps in the store."""
consumer_key = _keys(b"\0consumer\0")
"""Key of the row of a consumer, by its id in hex, in a store that it reads."""
publisher_key = _keys(b"\0publisher\0")
"""Key of the row of a publisher, by its producer id in hex, in a store where it has pending messages."""
age_key = _keys(b"\0age\0")
"""Key of the notes of a log's next index and their times, while its append times are ahead of the clock."""
timeline_key = _keys(b"\0line\0")
"""Key of the timelines of a log, which begin when the store was copied or put back."""
redriver_key = _keys_of_keys(REDRIVERS)
"""Key of the row of a unit's redriver: owner, epoch, positions on the queues of redriven messages."""
redriver_inputs_key = _keys_of_keys(b"\0redriven\0")
"""Key of the topology record of a unit's redriver."""
redrives_key = _keys_of_keys(REDRIVES)
"""Key of the counts of a unit's redrives: asked for, and done."""
pause_key = _keys_of_keys(PAUSES)
"""Key of the pause of a unit, by its key: the unit takes nothing until the row is deleted."""
failures_key = _keys_of_keys(FAILURES)
"""Key of the count of a unit's error messages in the present window of ``max_errors=``."""
state_database = _keys_of_keys(b"state:")
"""Name of the LMDB database that holds a processor's keyed state."""
member_key = _pair_keys(b"\0member\0")
"""Key of a member's row; ``member`` empty gives the prefix for all of the group."""
claim_key = _pair_keys(CLAIMS)
"""Key of a group's claim on a log: owner, epoch, position; ``group`` empty gives the prefix for all groups."""


def row_key(queue: str, partition: int) -> bytes:
    """Key of a log's row: identity, first index, next index, last append time."""
    return b"\0row\0" + _log(queue, partition)


def reader_key(queue: str, partition: int, name: str) -> bytes:
    """Key of a named tailer's position."""
    return READERS + _log(queue, partition) + b"\0" + name.encode()


def subscription_key(log: str, processor: ProcessorId) -> bytes:
    """Key of the note that a processor reads a log."""
    return subscriptions_prefix(log) + processor.encode()


def subscriptions_prefix(log: str) -> bytes:
    """Prefix of the keys of all such notes of a log."""
    return SUBSCRIPTIONS + log.encode() + b"\0"


def schemas_prefix(log: str) -> bytes:
    """Prefix of the keys of all schemas of a log's records of columns; their hashes follow, in eight bytes."""
    return SCHEMAS + log.encode() + b"\0"


def store_key(store: bytes) -> bytes:
    """Key of the row with the path of another store, which graphs of this store use."""
    return STORES + store.hex().encode()


def producer_key(store: bytes, processor: ProcessorKey) -> bytes:
    """Key of the row with the last step that was forwarded from another store's processor to this one."""
    return PRODUCERS + f"{store.hex()}/{processor}".encode()


def low_water_key(log: str, store: bytes, processor: ProcessorKey) -> bytes:
    """Key of the low-water mark of a reader whose position is in another store."""
    return low_water_prefix(log) + f"{store.hex()}/{processor}".encode()


def low_water_prefix(log: str) -> bytes:
    """Prefix of the keys of all such readers of a log."""
    return LOW_WATERS + log.encode() + b"\0"


def clocks_prefix(log: str) -> bytes:
    """Prefix of the keys of all rows about the producers of a log; the producers' ids follow."""
    return CLOCKS + log.encode() + b"\0"


def spans_prefix(log: str) -> bytes:
    """Prefix of the keys of all acknowledged transactions of a log; their places follow, in eight bytes."""
    return SPANS + log.encode() + b"\0"


def opens_prefix(log: str) -> bytes:
    """Prefix of the keys of all pending transactions of a log; the producers' ids follow."""
    return OPENS + log.encode() + b"\0"


def log_database(queue: str, partition: int) -> bytes:
    """Name of the LMDB database that holds a log's record batches."""
    return b"log:" + _log(queue, partition)


def _log(queue: str, partition: int) -> bytes:
    return log_id(queue, partition).encode()
