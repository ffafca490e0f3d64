"""The options of the format ``cues``, checked. A misspelt option is an error, because Spark would ignore it.

read, readStream       path or store and queue; fields, mode, rowColumns, partitions, failOnDataLoss,
                       startingPosition, isolation; read: endingPosition;
                       readStream: maxMessagesPerTrigger, resumeFrom, and frame, which only the engine sets
write, writeStream     path or store and queue; id, encode; write: start, end;
                       writeStream: delivery, adopt, checkpointLocation
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Final, Literal

from cues.base import clock, names
from cues.base.data import dataclass
from cues.errors import InvalidArgument
from cues.queues.committed import ISOLATIONS, Isolation
from cues.spark.cluster.files import ID, is_object_store

_PLACE: Final = ("path", "store", "queue")
_NO_OPTIONS: Final = " Spark does not pass the options of a table (CREATE TABLE … USING cues) to its format."
_READ: Final = (
    *_PLACE, "fields", "mode", "rowColumns", "partitions", "failOnDataLoss", "startingPosition", "isolation",
)  # fmt: skip
READ: Final = (*_READ, "endingPosition")
READ_STREAM: Final = (*_READ, "maxMessagesPerTrigger", "resumeFrom", "frame")
WRITE: Final = (*_PLACE, "id", "encode", "start", "end")
WRITE_STREAM: Final = (*_PLACE, "id", "encode", "delivery", "adopt", "checkpointLocation")


Position = int | Literal["earliest", "latest"] | datetime
"""A start or an end: an index, an end of the queue, or the first message at or after an aware time."""
Mode = Literal["permissive", "strict"]
Encode = Literal["auto", "value", "columns"]


@dataclass(frozen=True)
class QueueAddress:
    """A queue and its store, or its shared directory."""

    store: str
    """Absolute, or the URL of an object store."""
    queue: str
    shared: bool = False
    """True for a directory of ``cues run --queues``."""


@dataclass(frozen=True)
class FrameSource:
    """The frame whose query reads the stream."""

    processor: str
    queues: list[str]
    size: int
    """Most messages of a batch, of each queue."""
    closes: bool
    """True if a batch without messages follows the last one with messages."""
    committed: int
    """The number of the last batch that is committed; -1 before the first."""
    folder: str
    """A folder of the driver's machine, for the sources of one query."""


@dataclass(frozen=True)
class ReadOptions:
    place: QueueAddress
    mode: Mode
    row_columns: bool
    """True if index, time, hash and value are names of columns of the row, and not of fields of the message."""
    partitions: int | None
    fail_on_data_loss: bool
    start: Position
    end: Position
    messages_per_trigger: int | None
    resume_from: tuple[str, str] | None
    """The store and the id of the writer at whose position this stream starts."""
    frame: FrameSource | None = None
    isolation: Isolation = "uncommitted"

    @staticmethod
    def of(options: Mapping[str, str], known: tuple[str, ...]) -> ReadOptions:
        check(options, known)
        committed = options.get("resumeFrom")
        source = place(options)
        isolation: Isolation = _choice(options, "isolation", *ISOLATIONS)  # type: ignore[assignment]
        start = _position(options, "startingPosition", "earliest")
        end = _position(options, "endingPosition", "latest")
        if isolation == "committed":
            refused = "a shared directory, which holds no transactions" if source.shared else ""
            refused = refused or ("resumeFrom" if committed else "")
            refused = refused or ("an index as a position" if isinstance(start, int) or isinstance(end, int) else "")
            if refused:
                raise InvalidArgument(
                    f"isolation='committed' does not work with {refused}.",
                    "use earliest, latest or a time as the positions, on the queue of a store.",
                )
        if source.shared and committed:
            raise InvalidArgument(
                f"resumeFrom={committed!r} is for queues of a store, and {source.store} is a shared directory.",
                "leave the option out; the stream continues by its checkpoint.",
            )
        return ReadOptions(
            place=source,
            mode=_choice(options, "mode", "permissive", "strict"),  # type: ignore[arg-type]
            row_columns=_flag(options, "rowColumns", True),
            partitions=_count(options, "partitions"),
            fail_on_data_loss=_flag(options, "failOnDataLoss", True),
            start=start,
            end=end,
            messages_per_trigger=_count(options, "maxMessagesPerTrigger"),
            resume_from=_writer(committed) if committed else None,
            frame=FrameSource(**json.loads(options["frame"])) if "frame" in options else None,
            isolation=isolation,
        )


@dataclass(frozen=True)
class WriteOptions:
    place: QueueAddress
    id: str | None
    encode: Encode
    range: tuple[int, int] | None
    """The range of its source that a batch write covers: start and end (exclusive)."""
    checkpoint: str | None
    adopt: bool
    """True if the writer begins in the middle of a query that ran without it before."""

    @staticmethod
    def of_batch(options: Mapping[str, str]) -> WriteOptions:
        check(options, WRITE)
        id = _id(options)
        start, end = _count(options, "start", least=0), _count(options, "end", least=0)
        if (id is None) != (start is None) or (start is None) != (end is None):
            raise InvalidArgument(
                "A batch write is exactly-once only with id, start and end, which name the range of its source;"
                f" found {', '.join(k for k in ('id', 'start', 'end') if options.get(k) is not None)}.",
                "set all three, or none of them for a plain append.",
            )
        if start is not None and end is not None and end < start:
            raise InvalidArgument(f"The range from {start} to {end} ends before it starts.", "set start ≤ end.")
        covered = None if start is None or end is None else (start, end)
        return WriteOptions(_target(options), id, _encode(options), covered, None, False)

    @staticmethod
    def of_stream(options: Mapping[str, str]) -> WriteOptions:
        check(options, WRITE_STREAM)
        id = _id(options)
        delivery = _choice(options, "delivery", "exactly-once", "at-least-once")
        if delivery == "at-least-once":
            id = None
        elif id is None:
            raise InvalidArgument(
                "A stream into a queue needs a name, under which the store keeps its position.",
                "set option('id', 'my-source'), or option('delivery', 'at-least-once').",
            )
        checkpoint = options.get("checkpointLocation")
        if id is not None and not checkpoint:
            raise InvalidArgument(
                "The writer needs the place of the checkpoint, where it reads the position of its source.",
                "set option('checkpointLocation', ...) on this writeStream.",
            )
        return WriteOptions(_target(options), id, _encode(options), None, checkpoint, _flag(options, "adopt", False))


def check(options: Mapping[str, str], known: tuple[str, ...]) -> None:
    """Refuse options that are not ``known``. Upper and lower case are the same."""
    lower = {name.lower(): name for name in known}
    for name in options:
        if name.lower() not in lower:
            near = difflib.get_close_matches(name.lower(), lower, 1)
            raise InvalidArgument(
                f"The format cues has no option {name!r} here.",
                f"use {lower[near[0]]}." if near else f"use one of {', '.join(known)}.",
            )


def place(options: Mapping[str, str]) -> QueueAddress:
    """The queue that the options name: a path ``store#queue``, or store and queue on their own."""
    path, store, queue = options.get("path"), options.get("store"), options.get("queue")
    if path is not None and store is None:
        store, queue = (path, queue) if queue is not None else _split(path, "the path", "data/flights#enriched")
        path = None
    if path is not None or store is None or queue is None:
        raise InvalidArgument(
            "The options name no queue: expected a path such as 'data/flights#enriched', or the options store and"
            " queue." + _NO_OPTIONS * (not options),
            "call load('data/flights#enriched'); or in SQL CREATE TEMPORARY VIEW … USING cues OPTIONS (path"
            " 'data/flights#enriched').",
        )
    if is_object_store(store):
        return QueueAddress(store.rstrip("/"), queue, shared=True)
    directory = Path(os.path.abspath(_local(store)))
    shared = (directory / ID).exists() and not (directory / "data.mdb").exists()
    return QueueAddress(str(directory), queue, shared)


def _target(options: Mapping[str, str]) -> QueueAddress:
    """The queue to write. Raises :class:`InvalidArgument` for a queue of a shared directory."""
    target = place(options)
    if target.shared:
        raise InvalidArgument(
            f"The queue {target.queue!r} is in the shared directory {target.store}, whose queues only graphs write.",
            "write to the queue of a store; or let a graph read the rows: cues.spark.Source makes a Spark stream its"
            " source.",
        )
    return target


def _writer(text: str) -> tuple[str, str]:
    """The store and the id of a writer."""
    store, id = _split(text, "resumeFrom", "data/out#my-source")
    return os.path.abspath(_local(store)), id


def _split(text: str, what: str, example: str) -> tuple[str, str]:
    store, mark, name = text.rpartition("#")
    if not mark or not store or not name:
        raise InvalidArgument(
            f"{what} is {text!r}, without a store before '#' and a name after it.", f"use a name such as {example!r}."
        )
    return store, name


def _local(store: str) -> str:
    """A path of this machine. Users of Spark may write ``file:`` before it."""
    if store.startswith("file:"):
        return str(Path("/" + store.removeprefix("file:").lstrip("/")))
    if "://" in store:
        raise InvalidArgument(
            f"A store is on a local disk, not at {store!r}.",
            "name a path of the driver's machine; or the shared directory of a graph, a path or a URL of an object"
            " store.",
        )
    return store


def _id(options: Mapping[str, str]) -> str | None:
    id = options.get("id")
    return None if id is None else names.check("source", id)


def _encode(options: Mapping[str, str]) -> Encode:
    return _choice(options, "encode", "auto", "value", "columns")  # type: ignore[return-value]


def _choice(options: Mapping[str, str], name: str, *choices: str) -> str:
    """One of ``choices``; the first one if the option is missing."""
    text = options.get(name)
    if text is None:
        return choices[0]
    if text.lower() not in choices:
        raise InvalidArgument(f"{name}={text!r}.", f"set it to {' or '.join(choices)}.")
    return text.lower()


def _flag(options: Mapping[str, str], name: str, default: bool) -> bool:
    return _choice(options, name, str(default).lower(), str(not default).lower()) == "true"


def _count(options: Mapping[str, str], name: str, least: int = 1) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    try:
        count = int(text)
    except ValueError:
        count = least - 1
    if count < least:
        raise InvalidArgument(f"{name}={text!r}.", f"set it to an integer from {least} on.")
    return count


def _position(options: Mapping[str, str], name: str, default: Literal["earliest", "latest"]) -> Position:
    text = options.get(name, default)
    if text == "earliest" or text == "latest":
        return text  # type: ignore[return-value]
    if text.isdigit() and int(text) >= 1:
        return int(text)
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidArgument(
            f"{name}={text!r}.",
            "use earliest, latest, an index from 1 on, or a time such as 2026-01-31T12:00:00+00:00.",
        ) from None
    clock.to_ns(when)  # a naive time names no instant
    return when
