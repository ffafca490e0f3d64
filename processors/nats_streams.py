"""NATS JetStream, exactly once: a source of the messages of a stream, and a subject as the target of sinks.

    graph.add(cues.Source("orders", NatsStream("nats://localhost:4222", "ORDERS", follow=True)))
    graph.add(NatsSubject("nats://localhost:4222", "PRICED", "priced").sink("prices"))

The client is nats-py, the extra ``nats``. It is imported on first use, and runs in a thread of its own.

**The source** keeps its position in Cues, in the commit of the messages: ``[version, time of creation, sequence]`` of
the stream. Each start reads after it through a consumer of its own, which acknowledges nothing and which the server
forgets. The consumer numbers what it delivers, so a message that the client dropped is noticed and read again.

**Lost messages.** If messages after the position left the front of the stream before they were read (limits, a purge),
the source stops with :class:`cues.MessagesPurged`, which names them. With ``on_gap="fail"`` this error is a failed
message, and the source continues after the gap. A stream that was created again, or that ends before the position, is
:class:`cues.errors.Diverged`. A message that was deleted between others (``max_msgs_per_subject``, a purge of a
subject) is not told.

**The sink** follows :mod:`cues.checkpoints.deliveries`, but without a transaction: each published message carries the
row of the processor *up to this message* in its header ``Cues-Position``. So the last message of the subject has the
row, and message and row are one write.

    1. read      the last message of the subject: its row, its sequence
    2. admit     accept the delivery or refuse it; find the messages that are new
    3. publish   the new messages in order, the first on the condition that the sequence of 1 is still the last one of
                 the subject, each other that the message before it is the last one of the stream
                 (``Nats-Expected-Last-Subject-Sequence``, ``Nats-Expected-Last-Msg-Id``)
    4. repeat    from the first message that was refused, if one of another subject came between

A crash in 3 leaves the first messages of a step, and 2 finds where they end. So the subject belongs to one processor,
and is its log; partition n of a partitioned queue has the subject ``<subject>.<n>``. The function of the sink writes
each message that it is given, once, in order: a stream before it changes messages. ``Nats-Msg-Id`` is the identity of
the message in Cues, by which the server drops repetitions within the duplicate window of the stream, too.

Not guaranteed: more than the stream keeps. If limits or a purge remove the *last* message of the subject while the sink
is stopped, the row is gone: what a crash left uncommitted is then published again, unless the duplicate window (two
minutes by default) has its id. A server acknowledges before it syncs its files (``sync_interval``): a power loss can
take messages that Cues has committed.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import ssl
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Final, NamedTuple, TypeVar

import cues
from cues import MessagesPurged, faults, jsontext
from cues.arguments import check_number, options_of, text_of, texts_of
from cues.checkpoints import Row, Transaction, write_once
from cues.errors import Away, CheckpointError, CuesError, Diverged, InvalidArgument, NotInstalled
from cues.overrides import override
from cues.processors import SINK, SOURCE, foreign, takes, waits

LOG: Final = logging.getLogger("cues.processors.nats")

_VERSION: Final = 1
_AT_ONCE: Final = 500
"""Messages of one request of the source, and most messages of the sink that wait for their answers."""
_FORGET_S: Final = 60.0
"""Seconds after which the server forgets a consumer that asks for nothing."""
_WRONG_LAST: Final = (10070, 10071, 10164)
"""Codes of JetStream: the last message of the stream, or of the subject, is another one."""
_RETRY_S: Final = 0.05
"""Seconds between two attempts to connect to a server: two are made, and then the engine waits."""
_NO_MESSAGE: Final = 10037
_POSITION: Final = "Cues-Position"
_RESERVED: Final = {
    "servers": "use the first argument.",
    "allow_reconnect": "leave it out: an outage is waited for by outage= of the processor.",
    "max_reconnect_attempts": "leave it out: an outage is waited for by outage= of the processor.",
    "reconnect_time_wait": "leave it out: an outage is waited for by outage= of the processor.",
    "connect_timeout": "use timeout_s=.",
    "error_cb": "leave it out: errors are in the log.",
    "closed_cb": "leave it out: errors are in the log.",
}

Position = list[Any]
T = TypeVar("T")


def library() -> Any:
    """Import nats. Raises :class:`cues.errors.NotInstalled`."""
    try:
        import nats
        import nats.errors
        import nats.js.api
        import nats.js.errors
    except ImportError:
        raise NotInstalled("nats-py is not installed.", "pip install 'cues-streams[nats]'.") from None
    return nats


class Servers:
    """The servers as their users here address them: URLs, options of nats-py, the time for which a request may take.

    Raises :class:`InvalidArgument` for what cannot be right.
    """

    def __init__(self, servers: str | Sequence[str], timeout_s: float, config: Mapping[str, Any] | None) -> None:
        self.urls = texts_of("servers", servers)
        self.timeout_s, self.config = timeout_s, options_of("config", config, _RESERVED)
        check_number("timeout_s", timeout_s, 0.001, 1e6)
        if not self.urls or not all(url.startswith(("nats://", "tls://", "ws://", "wss://")) for url in self.urls):
            hosts = ", ".join(url.rpartition("@")[2] for url in self.urls)
            raise InvalidArgument(f"servers={hosts!r:.80} is not a list of URLs.", "use 'nats://host:4222'.")
        self.where = ",".join(url.rpartition("@")[2].removeprefix("nats://") for url in self.urls)
        """The servers without passwords, for errors."""


class Connection:
    """A connection to one of the servers, in a thread with an event loop. ``call`` waits for a coroutine there."""

    def __init__(self, servers: Servers) -> None:
        self._nats, self._servers = library(), servers
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cues-nats", daemon=True)
        self._thread.start()
        self._client: Any = None
        self._calls: set[asyncio.Task[Any]] = set()
        try:
            self._client = self.call(self._connect())
        except BaseException:
            self.close()
            raise
        self.js = self._client.jetstream(timeout=servers.timeout_s)

    async def _connect(self) -> Any:
        failures: list[Exception] = []

        async def failed(error: Exception) -> None:
            LOG.debug("%s: %s", type(error).__name__, error)
            failures.append(error)

        own = {
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": _RETRY_S,
            "connect_timeout": self._servers.timeout_s,
            "error_cb": failed,
            "closed_cb": self._closed,
        }
        try:
            return await self._nats.connect(self._servers.urls, **{"name": "cues", **self._servers.config, **own})
        except self._nats.errors.NoServersError:
            # It does not say why. A certificate that is refused is a fault, whatever the other servers are.
            raise next((error for error in failures if isinstance(error, ssl.SSLError)), failures[-1]) from None
        except TypeError as error:
            raise InvalidArgument(f"nats-py refuses the options: {error}.", "correct config=.") from error

    @property
    def is_closed(self) -> bool:
        return bool(self._client.is_closed)

    @property
    def payload_bytes_max(self) -> int:
        return int(self._client.max_payload)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread; return its result. A connection that is closed meanwhile raises its error."""
        try:
            return asyncio.run_coroutine_threadsafe(self._tracked(coroutine), self._loop).result()
        except concurrent.futures.CancelledError:
            raise self._nats.errors.ConnectionClosedError from None
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            coroutine.close()
            raise self._nats.errors.ConnectionClosedError from None

    def close(self) -> None:
        """Close the connection and end the thread; calls of other threads are cancelled."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def stream_info(self, stream: str) -> dict[str, Any]:
        """Return the facts of a stream; nats-py leaves the time of its creation out before 2.16."""
        answer = await self._client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=self._servers.timeout_s)
        info: dict[str, Any] = json.loads(answer.data)
        if "error" in info:
            self._nats.js.errors.APIError.from_error(info["error"])
        return info

    async def _tracked(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            return await coroutine
        finally:
            self._calls.discard(task)

    async def _closed(self) -> None:
        """End the calls that wait for answers: nats-py lets them wait for their timeout."""
        for task in self._calls:
            task.cancel()

    async def _end(self) -> None:
        if self._client is not None:
            with suppress(self._nats.errors.Error, OSError):
                await self._client.close()
        own = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not own]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def is_away(error: BaseException) -> bool:
    """Return whether an exception of nats-py says that the servers cannot be reached, or JetStream does not answer."""
    nats = library()
    errors, js = nats.errors, nats.js.errors
    return not isinstance(error, ssl.SSLError) and isinstance(
        error,
        (
            OSError, TimeoutError, errors.NoServersError, errors.ConnectionClosedError, errors.StaleConnectionError,
            errors.ConnectionReconnectingError, errors.ConnectionDrainingError, errors.OutboundBufferLimitError,
            errors.NoRespondersError, js.ServiceUnavailableError, js.ServerError, js.NoStreamResponseError,
        ),
    )  # fmt: skip


# --- the source ---------------------------------------------------------------------------------


@takes(SOURCE)
class NatsStream:
    """A source of the messages of a stream; see the module. Give it to ``cues.Source(id, NatsStream(...))``.

    With ``shape="record"`` a message is ``{"subject", "sequence", "time", "headers", "data"}``; with ``shape="value"``
    it is the JSON object in the data, and the others are ``process.metadata["nats"]``.

    ``servers``    ``"nats://host:4222"``, or a list of them
    ``stream``     its name
    ``data``       decoding: ``"bytes"``, ``"text"`` (UTF-8) or ``"json"``
    ``shape``      ``"record"`` or ``"value"``
    ``follow``     True: wait for new messages; otherwise the source ends at the end of the stream
    ``start``      of a first start: ``"oldest"`` or ``"newest"`` (until the first message was committed)
    ``on_gap``     messages that left the stream unread: ``"raise"`` stops the source; ``"fail"`` is a failed message
    ``timeout_s``  seconds for which a request may take
    ``config``     more options of ``nats.connect``, such as ``user_credentials``
    ``reserved``   reserved keys that a message may set: ``"q/type"``, ``"q/topics"``

    Kind: source
    Needs: extra `nats`
    Guarantee: exactly once: each message that the stream keeps is on the queue once, also after kill -9
    Mechanism: position of the stream sequence, committed with the messages
    """

    def __init__(
        self,
        servers: str | Sequence[str],
        stream: str,
        *,
        data: str = "bytes",
        shape: str = "record",
        follow: bool = False,
        start: str = "oldest",
        on_gap: str = "raise",
        timeout_s: float = 30.0,
        config: Mapping[str, Any] | None = None,
        reserved: Sequence[str] = (),
    ) -> None:
        self.may = foreign.allowed(reserved)
        self.servers, self.stream = Servers(servers, timeout_s, config), _named("stream", stream)
        self.data, self.shape, self.follow, self.start, self.on_gap = data, shape, follow, start, on_gap
        self.__name__ = "nats_stream"
        _one_of("data", data, tuple(DECODERS))
        _one_of("shape", shape, ("record", "value"))
        _one_of("follow", follow, (True, False))
        _one_of("start", start, ("oldest", "newest"))
        _one_of("on_gap", on_gap, ("raise", "fail"))
        if shape == "value" and data != "json":
            raise InvalidArgument(f"shape='value' with data={data!r}: a message is an object.", "use data='json'.")

    @property
    def where(self) -> str:
        return f"{self.stream} at {self.servers.where}"

    def __call__(self, position: Position | None, process: Any = None) -> Iterator[tuple[Position, Any]]:
        """Yield ``(position, message)`` after ``position``."""
        known = _fields(position)
        connection = None
        try:
            connection = Connection(self.servers)
            reading = Reading(self, connection, *known)
            try:
                yield from reading.messages(process)
            finally:
                reading.end()
        except (OSError, library().errors.Error) as error:
            text = f"The stream {self.where} cannot be read: {type(error).__name__}: {error}."
            if is_away(error):
                hint = "start the graph again when the servers answer; the source continues at its position."
                raise Away(text, hint, what=self.where) from error
            raise CuesError(text, "correct the URL, the log-in or the name of the stream.") from error
        finally:
            if connection is not None:
                connection.close()


class Reading:
    """One call of a source: its consumer, and the sequence of the last message."""

    def __init__(self, source: NatsStream, connection: Connection, created: str, sequence: int | None) -> None:
        self._source, self._connection, self._js = source, connection, connection.js
        self._created, self._sequence = created, sequence
        self._consumer: Any = None
        self._name = ""
        self._received = 0
        """Messages that the consumer has delivered: it numbers them from 1."""
        self._pending: int | None = None
        """Messages that were in the stream after the last one that was delivered."""

    @property
    def position(self) -> Position:
        return [_VERSION, self._created, self._sequence]

    def messages(self, process: Any) -> Iterator[tuple[Position, Any]]:
        """Yield messages until the end (``follow``: until the graph drains)."""
        call, source = self._connection.call, self._source
        state = call(self._state())
        if self._sequence is None:
            self._sequence = state["last_seq"] if source.start == "newest" else max(state["first_seq"] - 1, 0)
        yield from self._gap(state["first_seq"])
        while process is None or not process.stopping:
            found = call(self._fetch())
            jumps = [m for m, before in zip(found, [None, *found]) if m.sequence != self._before(before) + 1]
            first = call(self._state())["first_seq"] if jumps else 0
            for message in found:
                if message.sequence != self._sequence + 1:
                    yield from self._gap(min(first, message.sequence))
                self._sequence = message.sequence
                yield self.position, self._message(message)
            if found:
                at_end = self._pending == 0 and not source.follow
            else:
                at_end = call(self._is_at_end())
            if at_end and not source.follow:
                return
            if at_end:
                waits.answered(process)

    def _before(self, message: Record | None) -> int:
        assert self._sequence is not None
        return self._sequence if message is None else message.sequence

    async def _state(self) -> dict[str, Any]:
        """Return the state of the stream. Raises :class:`Diverged` if it is not that of the position."""
        info = await self._connection.stream_info(self._source.stream)
        created: str = info["created"]
        state: dict[str, Any] = info["state"]
        if self._created and created != self._created:
            raise self._diverged(f"was created at {created}, and the position is of one of {self._created}")
        if self._sequence is not None and state["last_seq"] < self._sequence:
            raise self._diverged(f"ends at {state['last_seq']}, before the position {self._sequence}")
        self._created = created
        return state

    async def _fetch(self) -> list[Record]:
        """Return the next messages; none if there are none at the moment."""
        api, errors = library().js.api, library().js.errors
        if self._consumer is None:
            config = api.ConsumerConfig(
                deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
                opt_start_seq=self._before(None) + 1,
                ack_policy=api.AckPolicy.NONE,
                inactive_threshold=_FORGET_S,
                num_replicas=1,
                mem_storage=True,
            )
            made = await self._js.add_consumer(self._source.stream, config)
            self._name = made.name
            self._consumer = await self._js.pull_subscribe_bind(consumer=made.name, stream=self._source.stream)
            self._received = 0
        try:
            fetched = await self._consumer.fetch(_AT_ONCE, timeout=waits.LOOK_S)
        except TimeoutError:
            return []
        except errors.APIError:  # the consumer was forgotten: a queue that was full for long, or a restart
            await self._forget()
            return []
        records = []
        for message in fetched:
            facts = message.metadata
            if facts.sequence.consumer != self._received + 1:  # the client dropped one
                await self._forget()
                break
            self._received, self._pending = self._received + 1, facts.num_pending
            headers = [[name, value] for name, value in (message.headers or {}).items()]
            records.append(Record(message.subject, facts.sequence.stream, facts.timestamp, headers, message.data))
        return records

    async def _is_at_end(self) -> bool:
        """Return whether the consumer has delivered all, and all that it delivered was received."""
        if self._consumer is None:
            return False
        try:
            info = await self._consumer.consumer_info()
        except library().js.errors.NotFoundError:
            await self._forget()
            return False
        if info.delivered.consumer_seq != self._received:
            await self._forget()
            return False
        return bool(info.num_pending == 0)

    def end(self) -> None:
        """Remove the consumer, if the server can be reached. Otherwise the server forgets it."""
        with suppress(library().errors.Error, OSError):
            self._connection.call(self._forget())

    async def _forget(self) -> None:
        consumer, name, self._consumer = self._consumer, self._name, None
        if consumer is None:
            return
        with suppress(library().errors.Error, OSError):
            await consumer.unsubscribe()
            await self._js.delete_consumer(self._source.stream, name)

    def _gap(self, first: int) -> Iterator[tuple[Position, Any]]:
        source, sequence = self._source, self._before(None)
        if first <= sequence + 1:
            return
        error = MessagesPurged(
            f"The messages {sequence + 1} to {first - 1} of the stream {source.where} left it before they were read.",
            "let the stream keep more. To continue without these messages: on_gap='fail', which writes this error to"
            " the error queue.",
            queue=source.stream,
            first=sequence + 1,
            last=first - 1,
        )
        if source.on_gap == "raise":
            raise error
        self._sequence = first - 1
        yield self.position, error

    def _diverged(self, problem: str) -> Diverged:
        return Diverged(
            f"The stream {self._source.where} {problem}: it was created again, or the servers lost messages.",
            "give the source another id, which begins at the start; or restore the stream.",
        )

    def _message(self, message: Record) -> Any:
        source = self._source
        try:
            data = DECODERS[source.data](message.data)
            facts = message._asdict()
            del facts["data"]
            return foreign.shaped(source, "nats", facts, "data", data)
        except ValueError as error:
            return InvalidArgument(
                f"The message {message.sequence} of the stream {source.where} cannot be read as data={source.data!r},"
                f" shape={source.shape!r}: {error}.",
                "correct the writer of the stream; or read it with data='bytes', and decode it in a stream.",
            )


class Record(NamedTuple):
    """A message of a stream."""

    subject: str
    sequence: int
    time: Any
    headers: list[list[str]]
    data: bytes


DECODERS: Final[dict[str, Callable[[bytes], Any]]] = {
    "bytes": lambda data: data,
    "text": lambda data: data.decode(),
    "json": jsontext.decode,
}
"""The choices of ``data=`` of a source."""


def _fields(position: Any) -> tuple[str, int | None]:
    if position is None:
        return "", None
    match position:
        case [version, str(created), int(sequence)] if version == _VERSION:
            return created, sequence
    raise Diverged(
        f"The position {str(position)[:80]} is not one of cues.processors.nats_streams, version {_VERSION}.",
        "give the source another id, which begins at the start.",
    )


# --- the target of sinks ------------------------------------------------------------------------


def write(messages: Any, process: cues.Process) -> None:
    """Write the messages of a step to the subject of ``checkpoint=``: the function of :meth:`NatsSubject.sink`."""
    process.connection.write(messages)


@takes(SINK)
class NatsSubject:
    """A subject of a stream as the target of sinks (``checkpoint=``); see the module. The subject is the sink's alone.

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
        self.servers, self.stream = Servers(servers, timeout_s, config), _named("stream", stream)
        self.subject, self.shape = _named("subject", subject), shape
        if any(token in ("", "*", ">") for token in subject.split(".")) or " " in subject:
            raise InvalidArgument(f"subject={subject!r} is not one subject.", "give it without wildcards and spaces.")
        _one_of("shape", shape, ("record", "value"))
        self.where = f"{self.subject} in {self.stream} at {self.servers.where}"
        """The subject and its servers, for errors."""
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._connection: Connection | None = None
        self.last: dict[str, tuple[Row | None, int]] = {}
        """Row and sequence of the last message of each processor, of this connection."""

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_lock", "_connection", "last")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset()

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
        try:
            version, of, *values = json.loads(headers[_POSITION])
            if version != _VERSION or (processor is not None and of != processor):
                raise ValueError(of)
            return (of, Row(*values)), sequence
        except (KeyError, TypeError, ValueError) as error:
            raise Diverged(
                f"The last message of {subject} in {self.stream} at {self.servers.where}, {sequence}, is not one of"
                f" {processor}: the subject of a sink belongs to it alone.",
                "use another subject; or end the other writer and purge the subject.",
            ) from error

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

        Raises :class:`cues.errors.InvalidArgument` for a message that is no message of NATS.
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
                "a stream before the sink that returns JSON values, or data and headers.",
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
                            _POSITION: json.dumps(
                                [_VERSION, self._process.id, *rows[n][1]._replace(seals=dict(rows[n][1].seals))]
                            ),
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
            size = min(size * 2, _AT_ONCE) if failed == len(sent) else 1
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


def _named(name: str, value: Any) -> str:
    if not text_of(name, value):
        raise InvalidArgument(f"{name}={value!r}: it is empty.", f"give the {name}.")
    return text_of(name, value)


def _one_of(name: str, given: Any, known: tuple[Any, ...]) -> None:
    if not any(type(given) is type(each) and given == each for each in known):
        raise InvalidArgument(f"{name}={given!r:.60} is unknown.", f"use one of {', '.join(map(repr, known))}.")
