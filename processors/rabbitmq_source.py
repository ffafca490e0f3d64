"""A source of the messages of a queue of RabbitMQ; ``rabbitmq.py`` has the protocol."""

from __future__ import annotations

import hashlib
import ssl
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from cues.arguments import check_number
from cues.errors import CuesError, InvalidArgument
from cues.overrides import override
from cues.processors import SOURCE, checks, foreign, kafka, takes
from cues.processors.acknowledged import VERSION, Acknowledging, Connected, Position
from cues.processors.rabbitmq_client import IN_FLIGHT_MAX, Link, Step, broker_of, short_of

PROPERTIES: Final = (
    "content_type", "content_encoding", "delivery_mode", "priority", "correlation_id", "reply_to", "expiration",
    "message_id", "timestamp", "type", "user_id", "app_id", "cluster_id",
)  # fmt: skip
"""The properties of a message, beside its headers."""
IDENTITIES: Final = ("message_id", "content")
_COUNTS: Final = "x-delivery-count"
"""A header of quorum queues that counts the deliveries. It is left out, so that a repetition is equal."""

Message = dict[str, Any]


@takes(SOURCE)
class RabbitQueue(Acknowledging):
    """A source of the messages of a queue; see ``rabbitmq.py``. Give it to ``cues.Source(id, RabbitQueue(...))``.

    ``url``          the broker: ``"amqp://host:5672/vhost"``, or ``"amqps://host:5671"`` with TLS
    ``queue``        a classic or a quorum queue
    ``declare``      None: the queue is there. A dict makes it: ``{}``, or with ``"durable"`` (True) and ``"arguments"``
    ``bindings``     pairs of exchange and routing key, by which messages come to the queue
    ``body``         decoding of bodies: ``"bytes"``, ``"text"`` (UTF-8) or ``"json"``. A body that cannot be decoded is
                     a failed message
    ``shape``        ``"record"``: messages ``{"exchange", "routing_key", "headers", "properties", "body"}``;
                     ``"value"``: the JSON object of the body, and the rest is ``process.metadata["rabbitmq"]``.
                     ``properties`` are those that the message has, such as ``"message_id"``
    ``identity``     by which a repetition is known: ``"message_id"``; ``"content"``: messages that are equal in all are
                     the same; or a function of the record. A message without one (None) may be repeated
    ``exclusive``    True: the queue has no other consumer. A second source waits
    ``in_flight``    messages that the broker sends without an acknowledgement
    ``idle_exit_s``  end the source after so many seconds without a message; None: never
    ``user``, ``password``   of the broker (``guest``); ``password`` may be a function, called for each connection
    ``tls``          a function that returns an ``ssl.SSLContext``; None: the certificates of the system
    ``heartbeat_s``  seconds after which a silent connection is ended
    ``timeout_s``    seconds for which a connection, and each answer, is awaited
    ``reserved``     ``"q/type"`` or ``"q/topics"``, which bodies may set then (:mod:`cues.processors.foreign`)

    Kind: source
    Needs: extra `rabbitmq`
    Guarantee: exactly once for messages with an id of their own (`message_id`) that have one consumer; at least once for others
    Mechanism: acknowledgement after the commit; the ids of the last `in_flight` messages in rows of state, committed with the messages
    """  # noqa: E501

    def __init__(
        self,
        url: str,
        queue: str,
        *,
        declare: Mapping[str, Any] | None = None,
        bindings: Sequence[tuple[str, str]] = (),
        body: str = "bytes",
        shape: str = "record",
        identity: str | Callable[[Message], Any] = "message_id",
        exclusive: bool = True,
        in_flight: int = 500,
        idle_exit_s: float | None = None,
        user: str | None = None,
        password: str | Callable[[], str] | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        heartbeat_s: float = 60.0,
        timeout_s: float = 10.0,
        reserved: Sequence[str] = (),
    ) -> None:
        self.may = foreign.allowed(reserved)
        self.broker = broker_of(url, user, password, tls, heartbeat_s, timeout_s)
        self.queue, self.declare, self.bindings = short_of("queue", queue), declare, bindings
        self.body, self.shape, self.identity, self.exclusive = body, shape, identity, exclusive
        self.in_flight, self.idle_exit_s = in_flight, idle_exit_s
        self.__name__ = "rabbitmq"
        if not queue:
            raise InvalidArgument("queue= is empty.", "name a queue.")
        if declare is not None and (not isinstance(declare, Mapping) or set(declare) - {"durable", "arguments"}):
            raise InvalidArgument(
                f"declare={declare!r:.100}: a queue that ends with a connection would lose messages.",
                "give None, or a dict with 'durable' and 'arguments'.",
            )
        if not isinstance(bindings, (tuple, list)) or not all(
            isinstance(one, (tuple, list)) and len(one) == 2 for one in bindings
        ):
            raise InvalidArgument(f"bindings={bindings!r:.100}.", "give pairs: [('orders', 'paid.#')].")
        for exchange, key in bindings:
            short_of("exchange", exchange), short_of("routing key", key)
        if not isinstance(exclusive, bool):
            raise InvalidArgument(f"exclusive={exclusive!r:.60}.", "give True or False.")
        check_number("in_flight", in_flight, 1, IN_FLIGHT_MAX, whole=True)
        if idle_exit_s is not None:
            check_number("idle_exit_s", idle_exit_s, 0)
        checks.one_of("body", body, tuple(kafka.DECODERS))
        checks.one_of("shape", shape, kafka.SHAPES)
        if not callable(identity):
            checks.one_of("identity", identity, IDENTITIES)
        checks.decoded(shape, "body", body)

    _module = "cues.processors.rabbitmq"

    @override
    def _new_reading(self, position: Position | None, process: Any) -> Reading:
        return Reading(self, (position or [VERSION, 0])[1], process)


class Reading(Connected):
    """One connection of a source."""

    def __init__(self, source: RabbitQueue, number: int, process: Any) -> None:
        super().__init__(number)
        self._source, self._process, self._state = source, process, process.state
        rows = sorted((*self._state[slot], slot) for slot in list(self._state))
        self._known = {identity for _, identity, _ in rows}
        """The ids of the messages that were committed before this connection, and perhaps not acknowledged."""
        self._slots = deque(slot for *_, slot in rows)
        """The keys of the rows, that of the oldest message first."""
        self._free = max(self._slots, default=-1) + 1
        self._unacknowledged: deque[tuple[int, int]] = deque()
        """(number, delivery tag) of each delivery. A repetition has the number of the message before it."""
        self._link = Link(source.broker, f"cues-{process.id}", self._steps(), self._events)

    def _steps(self) -> Iterator[Step]:
        source = self._source

        def consume(channel: Any, done: Callable[..., None]) -> None:
            def heard(_: Any, delivery: Any, properties: Any, body: bytes) -> None:
                self._events.put(("message", (delivery, properties, body)))

            channel.basic_consume(source.queue, heard, exclusive=source.exclusive, callback=done)

        yield lambda channel, done: channel.basic_qos(prefetch_count=source.in_flight, callback=done)
        options = {"passive": True} if source.declare is None else {"durable": True, **source.declare}
        yield lambda channel, done: channel.queue_declare(source.queue, callback=done, **options)
        for exchange, key in source.bindings:
            yield lambda channel, done, at=(exchange, key): channel.queue_bind(source.queue, *at, callback=done)  # type: ignore[misc]
        yield consume

    def messages(self) -> Iterator[tuple[Position, Any]]:
        """Yield messages until the graph drains."""
        for kind, fact in self._heard(self._process, self._source.idle_exit_s):
            if kind == "lost":
                raise fact
            message, identity = self._read(*fact)
            if self._is_new(fact[0], identity):
                yield [VERSION, self._number], message

    def _read(self, delivery: Any, properties: Any, body: bytes) -> tuple[Any, bytes | None]:
        """Return the message, or the error for which it is none, and its id."""
        source, headers = self._source, dict(properties.headers or {})
        if "x-stream-offset" in headers:
            raise CuesError(
                f"{source.queue!r} is a stream, whose messages an acknowledgement does not remove.",
                "read a classic or a quorum queue, to which the exchange of the stream sends, too.",
            )
        headers.pop(_COUNTS, None)
        given = {name: getattr(properties, name) for name in PROPERTIES}
        fields = {
            "exchange": delivery.exchange,
            "routing_key": delivery.routing_key,
            "headers": headers,
            "properties": {name: value for name, value in given.items() if value is not None},
        }
        identity: Any = given["message_id"]
        if source.identity == "content":
            identity = fields, body
        try:
            value = kafka.DECODERS[source.body](body)
            if callable(source.identity):
                identity = None
                identity = source.identity({**fields, "body": value})
            message: Any = foreign.shaped(source, "rabbitmq", fields, "body", value)
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError, CuesError) as error:
            message = InvalidArgument(
                f"A message of {source.queue!r}, routing key {delivery.routing_key!r:.200}, with {len(body):,} bytes,"
                f" cannot be read as body={source.body!r}, shape={source.shape!r}: {error}.",
                "correct the publisher; or read it with body='bytes', and decode it in a stream.",
            )
        if identity is None:
            return message, None
        text = repr(identity).encode("utf-8", "surrogatepass")
        return message, hashlib.blake2b(text, digest_size=16).digest()

    def _is_new(self, delivery: Any, identity: bytes | None) -> bool:
        """Number a message, and keep its id; False if it is a repetition of a committed message."""
        again = delivery.redelivered and identity in self._known
        if not again:
            self._number += 1
            if identity is not None:
                self._state[self._slot()] = [self._number, identity]
        with self._guard:
            self._unacknowledged.append((self._number, delivery.delivery_tag))
        if again:
            self.committed(0)
        return not again

    def _slot(self) -> int:
        """Return the key of a row: a new one, or that of the oldest message."""
        slot = None
        while len(self._slots) >= self._source.in_flight:
            if slot is not None:  # in_flight= was larger
                del self._state[slot]
            slot = self._slots.popleft()
        if slot is None:
            slot, self._free = self._free, self._free + 1
        self._slots.append(slot)
        return slot

    # --- other threads ---

    def committed(self, number: int) -> None:
        """Acknowledge the messages up to ``number``, which are committed."""
        tag = 0
        with self._guard:
            self._committed = max(self._committed, number)
            while self._unacknowledged and self._unacknowledged[0][0] <= self._committed:
                tag = self._unacknowledged.popleft()[1]
            if tag:  # under the lock: a tag before one that is acknowledged would be refused
                self._link.post(lambda channel: channel.basic_ack(tag, multiple=True))
            done = self._ending and self._committed == self._number
        if done:
            self.close()

    @override
    def _disconnect(self) -> None:
        self._link.close()
