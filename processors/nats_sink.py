"""A subject of a NATS stream as the target of sinks; ``nats_streams.py`` has the protocol."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final

import cues
from cues import faults, jsontext
from cues.checkpoints import Row, Transaction, write_once
from cues.errors import CheckpointError, Diverged, InvalidArgument
from cues.overrides import override
from cues.processors import SINK, checks, takes
from cues.processors.nats_client import AT_ONCE, Connection, Servers, is_away, library, named

_WRONG_LAST: Final = (10070, 10071, 10164)
"""Codes of JetStream: the last message of the stream, or of the subject, is another one."""
_NO_MESSAGE: Final = 10037
_POSITION: Final = "Cues-Position"


def write(messages: Any, process: cues.Process) -> None:
    """Write the messages of a step to the subject of ``checkpoint=``: the function of :meth:`NatsSubject.sink`."""
    process.connection.write(messages)


@takes(SINK)
class NatsSubject(checks.Unshared):
    """A subject of a stream as the target of sinks (``checkpoint=``); see ``nats_streams.py``. It is the sink's alone.

    ``servers``    ``"nats://host:4222"``, or a list of them
    ``stream``     the name of the stream, which must exist, with the retention ``limits``
    ``subject``    the subject; partition n of a partitioned queue has ``<subject>.<n>``
    ``shape``      ``"value"``: the message is the data, as JSON; ``"record"``: messages have ``data``, and perhaps
                   ``headers`` (pairs, or a dict); the other fields of a source's record are allowed and ignored
    ``timeout_s``  seconds for which a request may take
    ``config``     more options of ``nats.connect``, such as ``user_credentials``

    Kind: sink
    Needs: extra `nats`
    Guarantee: exactly once: each message is in the stream once, also after kill -9, while it keeps the last one
    Mechanism: row of delivery in a header of each message, published on the condition of the last sequence
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        stream: str,
        subject: str,
        *,
        shape: str = "value",
        timeout_s: float = 30.0,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.servers, self.stream = Servers(servers, timeout_s, config), named("stream", stream)
        self.subject, self.shape = named("subject", subject), shape
        if any(token in ("", "*", ">") for token in subject.split(".")) or " " in subject:
            raise InvalidArgument(f"subject={subject!r} is not one subject.", "give it without wildcards and spaces.")
        checks.one_of("shape", shape, ("record", "value"))
        self.where = f"{self.subject} in {self.stream} at {self.servers.where}"
        """The subject and its servers, for errors."""
        self._reset()

    @override
    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self.last: dict[str, tuple[Row | None, int]] = {}
        """Row and sequence of the last message of each processor, of this connection."""

    def sink(self, inputs: Any, **options: Any) -> cues.Sink:
        """Return a sink that writes the messages of ``inputs`` as they are; ``options`` are those of ``cues.Sink``."""
        return cues.Sink(write, inputs, **{"batch": True, "checkpoint": self, "id": "save", **options})

    def transaction(self, process: cues.Process) -> AbstractContextManager[Transaction[Writer]]:
        """Run the block, and publish at its end what it wrote: exactly the messages that are new to the subject.

        Raises :class:`cues.Fenced` or :class:`cues.errors.Diverged` before the block runs, and
        :class:`cues.errors.CheckpointError` when NATS fails.
        """
        return write_once(_Positions(self, process), process, _opened)

    def holds(self, processors: Iterable[str]) -> list[str]:
        """Return those of the processors of which the subject has a message: it refuses them from another store."""
        with self.failures():
            connection = self.connect()
            found = [self.read(connection, None, subject)[0] for subject in (self.subject, f"{self.subject}.*")]
        ids = {last[0].partition("/")[0] for last in found if last is not None}
        return [processor for processor in processors if processor in ids]

    def subject_of(self, processor: str) -> str:
        """Return the subject of a processor, or of its partition."""
        partition = processor.partition("/")[2]
        return f"{self.subject}.{partition}" if partition else self.subject

    def identity(self, processor: str, delivery: cues.Delivery, index: int) -> str:
        """Return the ``Nats-Msg-Id`` of the message with an index: the same whenever it is delivered."""
        return f"{delivery.store}.{processor}.{delivery.generation}.{index}"

    def connect(self) -> Connection:
        """Return the connection, opened again after it was lost."""
        with self._lock:
            if self._connection is None or self._connection.is_closed:
                self._drop()
                self._connection = Connection(self.servers)
            return self._connection

    def read(self, connection: Connection, processor: str | None, subject: str) -> tuple[tuple[str, Row] | None, int]:
        """Return processor, row and sequence of the last message of a subject.

        Raises :class:`Diverged` if it is of another program, or of another processor than the one that is given.
        """
        headers, sequence = connection.call(self.read_last(connection, subject))
        if sequence == 0:
            return None, 0
        what = f"The last message of {subject} in {self.stream} at {self.servers.where}, {sequence},"
        otherwise = "use another subject; or end the other writer and purge the subject."
        try:
            version, of, *values = json.loads(headers[_POSITION])
        except (KeyError, TypeError, ValueError):
            version, of, values = None, None, []
        row = Row.kept([version, *values], what, otherwise) if of is not None else None
        if row is None or (processor is not None and of != processor):
            raise Diverged(f"{what} is not one of {processor}: the subject of a sink belongs to it alone.", otherwise)
        return (of, row), sequence

    async def read_last(self, connection: Connection, subject: str) -> tuple[dict[str, str], int]:
        """Return headers and sequence of the last message of a subject; the sequence 0 if there is none."""
        try:
            last = await connection.js.get_last_msg(self.stream, subject)
        except library().js.errors.NotFoundError as error:
            if error.err_code != _NO_MESSAGE:
                raise
            return {}, 0
        return last.headers or {}, last.seq

    def __cues_prepare__(self) -> None:
        """Connect, and check the stream, so that no message meets a mistake of the declaration."""
        with self.failures():
            connection = self.connect()
            info = connection.call(connection.stream_info(self.stream))["config"]
            problem = ""
            if info["retention"] != "limits":
                problem = f"has the retention {info['retention']!r}, which removes messages that were read"
            else:
                try:
                    owner = connection.call(connection.js.find_stream_name_by_subject(self.subject))
                except library().js.errors.NotFoundError:
                    owner = None
                if owner != self.stream:
                    problem = f"does not have the subject {self.subject!r} among {info.get('subjects', [])}"
            if problem:
                raise CheckpointError(
                    f"The stream {self.stream} at {self.servers.where} {problem}.",
                    "use another stream, with the retention 'limits' and this subject.",
                    where=self.where,
                    away=False,
                )

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Raise failures of NATS as CheckpointError; the next transaction connects again, and reads the row."""
        try:
            yield
        except (OSError, library().errors.Error) as error:
            self.close()
            wrong = getattr(error, "err_code", None) in _WRONG_LAST
            raise CheckpointError(
                f"NATS failed for {self.where}: {type(error).__name__}: {error}"
                + (" (another process published to the subject)" if wrong else ""),
                "start the graph again when the servers answer and take the message; the sink continues at this one.",
                where=self.where,
                again=wrong,
                away=is_away(error),
            ) from error

    def close(self) -> None:
        """Close the connection. The next transaction opens a new one."""
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        connection, self._connection, self.last = self._connection, None, {}
        if connection is not None:
            connection.close()


takes({**SINK, "checkpoint": NatsSubject})(write)


class Writer:
    """The messages of one step for a :class:`NatsSubject`, published at the end of its block."""

    def __init__(self, target: NatsSubject, process: cues.Process) -> None:
        self._target, self._process = target, process
        self._written: list[tuple[bytes, dict[str, str]]] = []
        self.before: Row | None = None
        self.row: Row | None = None
        self.sequence = 0
        self.fresh: Mapping[str, int] = {}
        """For each tailer, the index from which its messages are new."""

    def write(self, messages: Any) -> None:
        """Write one message or a list of messages.

        Raises :class:`cues.errors.InvalidArgument` for a message that is not a message of NATS.
        """
        bound = self._target.connect().payload_bytes_max
        for message in [messages] if isinstance(messages, dict) else messages:
            data, headers = self._encoded(message)
            if len(data) + sum(len(name) + len(value) for name, value in headers.items()) + 2_000 > bound:
                raise InvalidArgument(
                    f"The message has {len(data):,} bytes, and the servers take {bound:,} with its headers.",
                    "write smaller messages, or raise max_payload of the servers.",
                )
            self._written.append((data, headers))

    def _encoded(self, message: Any) -> tuple[bytes, dict[str, str]]:
        try:
            if self._target.shape == "value":
                return jsontext.encode(message).encode(), {}
            unknown = message.keys() - {"data", "headers", "subject", "sequence", "time"}
            if "data" not in message or unknown:
                raise ValueError(f"it has the fields {', '.join(map(repr, message))}")
            data, headers = message["data"], message.get("headers") or {}
            pairs = headers.items() if isinstance(headers, dict) else headers
            # What is of the server or of this sink is not copied from another stream.
            kept = {str(n): str(v) for n, v in pairs if not str(n).startswith("Nats-") and n != _POSITION}
            if any(set("\r\n:") & set(name) or set("\r\n") & set(value) for name, value in kept.items()):
                raise ValueError(f"its headers are {headers!r:.80}")
            if isinstance(data, bytes):
                return data, kept
            return (data if isinstance(data, str) else jsontext.encode(data)).encode(), kept
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"The message is not one for {self._target.where}, shape={self._target.shape!r}: {error}.",
                "add a stream before the sink that returns JSON values, or data and headers.",
            ) from error

    def publish(self) -> None:
        """Publish what was written. Raises :class:`InvalidArgument` if it is not each new message of the delivery."""
        rows = self._rows()
        if len(rows) != len(self._written):
            raise InvalidArgument(
                f"The function wrote {len(self._written)} messages of the {len(rows)} that it was given.",
                "write each message once, in order; change their number in a stream before the sink.",
            )
        if rows:
            target, connection = self._target, self._target.connect()
            with target.failures():
                connection.call(self._publish(connection, rows))
            target.last[self._process.id] = self.row, self.sequence

    def _rows(self) -> list[tuple[str, Row]]:
        """Return, for each new message, its identity and the row up to it. The last one has the row of the delivery."""
        process, delivery, row, before = self._process, self._process.delivery, self.row, self.before
        assert row is not None
        if len(delivery.start) != 1:
            raise InvalidArgument(
                f"{process.id} joins {len(delivery.start)} queues, and a message of NATS has one place.",
                "join them in a stream before the sink.",
            )
        ((tailer, end),) = delivery.end.items()
        same = before is not None and before.generation == delivery.generation
        ends, seals = (before.ends, dict(before.seals)) if before is not None and same else ({}, {})
        seals.pop(tailer, None)  # of an end that a partial row does not have
        given = process.indices if isinstance(process.indices, list) else next(iter(process.indices.values()))
        new = [index for index in given if self.fresh[tailer] <= index < end]
        rows = [row._replace(ends={**ends, tailer: index + 1}, seals=seals) for index in new[:-1]] + [row] * bool(new)
        return [(self._target.identity(process.id, delivery, index), each) for index, each in zip(new, rows)]

    async def _publish(self, connection: Connection, rows: list[tuple[str, Row]]) -> None:
        """Publish in order; each message is refused unless it follows the one before it.

        Many are on the way at once. The sequence of a message is not known before its answer, so only the first one
        names the last sequence of the subject. Each other names the id of the one before it, as the last message of the
        stream: a guessed sequence could be that of an earlier one. If messages of other subjects come between, the rest
        is refused, and is sent again.
        """
        target, done, size = self._target, 0, 1
        subject = target.subject_of(self._process.id)
        while done < len(rows):
            sent = range(done, min(done + size, len(rows)))
            answers = await asyncio.gather(
                *(
                    connection.js.publish(
                        subject,
                        self._written[n][0],
                        stream=target.stream,
                        headers={
                            **self._written[n][1],
                            "Nats-Msg-Id": rows[n][0],
                            **(
                                {"Nats-Expected-Last-Msg-Id": rows[n - 1][0]}
                                if n > done
                                else {"Nats-Expected-Last-Subject-Sequence": str(self.sequence)}
                            ),
                            _POSITION: _position(self._process.id, rows[n][1]),
                        },
                    )
                    for n in sent
                ),
                return_exceptions=True,
            )
            failed = next((n for n, answer in enumerate(answers) if isinstance(answer, BaseException)), len(answers))
            for answer in answers[failed:]:
                if not isinstance(answer, BaseException):
                    raise Diverged(
                        f"Another writer published to {subject} in {target.stream} at {target.servers.where}.",
                        "use another subject: that of a sink belongs to it alone.",
                    )
                if getattr(answer, "err_code", None) not in _WRONG_LAST or failed == 0:
                    raise answer
            written: list[Any] = answers[:failed]
            self.sequence = written[-1].seq
            if any(answer.duplicate for answer in written):  # known by its id, and perhaps not in the stream any more
                _, self.sequence = await target.read_last(connection, subject)
            done += failed
            size = min(size * 2, AT_ONCE) if failed == len(sent) else 1
            faults.point("nats.published")


def _opened(connection: Writer, process: cues.Process, fresh: Mapping[str, int]) -> Transaction[Writer]:
    connection.fresh = fresh
    return Transaction(connection, process, fresh)


class _Positions:
    """The last message of a subject as a table of positions (:class:`cues.checkpoints.PositionTable`)."""

    def __init__(self, target: NatsSubject, process: cues.Process) -> None:
        self._target, self._process = target, process
        self.where = target.where

    @contextmanager
    def begin(self) -> Iterator[Writer]:
        writer = Writer(self._target, self._process)
        try:
            yield writer
            writer.publish()
        except BaseException:
            self._target.last.pop(self._process.id, None)  # what was published is read again
            raise

    def read(self, connection: Writer, processor: str, *, lock: bool) -> Row | None:
        if lock:
            target = self._target
            with target.failures():
                server = target.connect()
                if processor not in target.last:
                    found, sequence = target.read(server, processor, target.subject_of(processor))
                    target.last[processor] = None if found is None else found[1], sequence
                connection.before, connection.sequence = target.last[processor]
            return connection.before
        return connection.row

    def write(self, connection: Writer, processor: str, row: Row, *, insert: bool) -> bool:
        connection.row = row
        return True

    def is_open(self, connection: Writer) -> bool:
        return True

    def processors(self, connection: Writer) -> Iterable[str]:
        return [self._process.id]


def _position(processor: str, row: Row) -> str:
    version, *fields = row.listed()
    return json.dumps([version, processor, *fields])
