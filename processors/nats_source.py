"""A source of the messages of a NATS stream; ``nats_streams.py`` has the protocol."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from cues import MessagesPurged, jsontext
from cues.errors import Away, CuesError, Diverged, InvalidArgument
from cues.processors import SOURCE, checks, foreign, takes, waits
from cues.processors.nats_client import AT_ONCE, Connection, Servers, is_away, library, named

_VERSION: Final = 1
_FORGET_S: Final = 60.0
"""Seconds after which the server forgets a consumer that asks for nothing."""

Position = list[Any]


@takes(SOURCE)
class NatsStream:
    """A source of the messages of a stream; see ``nats_streams.py``. Give it to ``cues.Source(id, NatsStream(...))``.

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
        self.servers, self.stream = Servers(servers, timeout_s, config), named("stream", stream)
        self.data, self.shape, self.follow, self.start, self.on_gap = data, shape, follow, start, on_gap
        self.__name__ = "nats_stream"
        checks.one_of("data", data, tuple(DECODERS))
        checks.one_of("shape", shape, ("record", "value"))
        checks.one_of("follow", follow, (True, False))
        checks.one_of("start", start, ("oldest", "newest"))
        checks.one_of("on_gap", on_gap, ("raise", "fail"))
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
        while not waits.stops(process):
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
            fetched = await self._consumer.fetch(AT_ONCE, timeout=waits.LOOK_S)
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
    raise checks.foreign_position(position, "cues.processors.nats_streams", _VERSION)
