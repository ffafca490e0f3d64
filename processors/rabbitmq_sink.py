"""A sink that publishes messages to RabbitMQ; ``rabbitmq.py`` has the protocol."""

from __future__ import annotations

import os
import ssl
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import cues
from cues import jsontext
from cues.arguments import check_number
from cues.errors import Away, CheckpointError, CuesError, InvalidArgument
from cues.overrides import override
from cues.processors import PUBLISHER, checks, kafka, takes
from cues.processors.rabbitmq_client import IN_FLIGHT_MAX, Events, Link, Refused, broker_of, library, short_of
from cues.processors.rabbitmq_source import PROPERTIES
from cues.processors.sqs import identities

Message = dict[str, Any]
_PERSISTENT = 2
_UNSENT = frozenset(("user_id", "cluster_id"))
"""Properties of a message that was read which the broker refuses from another user, or that are its own."""


class _Publication(NamedTuple):
    exchange: str
    routing_key: str
    body: bytes
    properties: Any


@takes(PUBLISHER)
class RabbitPublisher(checks.Unshared):
    """A sink that publishes messages; see ``rabbitmq.py``. :meth:`sink` declares it.

    ``url``          the broker, as :class:`RabbitQueue` has it
    ``exchange``     the exchange; ``""``: the one that knows each queue by its name; None: the message's field
                     ``exchange``
    ``routing_key``  a routing key (a queue's name for the exchange ``""``), or a function of the message; None: the
                     message's field ``routing_key``
    ``shape``        ``"record"``: messages have ``body`` (bytes and text as they are, None: empty, all else as JSON),
                     and perhaps ``routing_key``, ``exchange``, ``headers`` and ``properties``; ``"value"``: the message
                     is the body, as JSON
    ``mandatory``    whether a message that comes to no queue is an error
    ``in_flight``    messages on the way without a confirmation
    ``user``, ``password``, ``tls``, ``heartbeat_s``, ``timeout_s``   as :class:`RabbitQueue` has them

    Values of ``headers`` are text, bytes, integers, booleans, None, aware datetimes (whole seconds), Decimals, and
    lists and dicts of these. pika writes no floats. A message is persistent (``delivery_mode`` 2), and its ``message_id`` is the same at each repetition, unless its
    ``properties`` have others.

    Kind: sink
    Needs: extra `rabbitmq`
    Guarantee: at least once: the broker has confirmed each message before the step commits
    Mechanism: publisher confirms; after a kill or a lost connection the messages of the step are published again, with the same `message_id`
    """  # noqa: E501

    def __init__(
        self,
        url: str,
        exchange: str | None = "",
        routing_key: str | Callable[[Message], str] | None = None,
        *,
        shape: str = "record",
        mandatory: bool = True,
        in_flight: int = 500,
        user: str | None = None,
        password: str | Callable[[], str] | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        heartbeat_s: float = 60.0,
        timeout_s: float = 10.0,
    ) -> None:
        self.exchange = None if exchange is None else short_of("exchange", exchange)
        self.routing_key, self.shape, self.mandatory, self.in_flight = routing_key, shape, mandatory, in_flight
        self.broker = broker_of(url, user, password, tls, heartbeat_s, timeout_s)
        checks.one_of("shape", shape, kafka.SHAPES)
        if shape == "value" and (routing_key is None or exchange is None):
            raise InvalidArgument("shape='value' without exchange= and routing_key=.", "give both.")
        if routing_key is not None and not callable(routing_key):
            short_of("routing_key", routing_key)
        if not isinstance(mandatory, bool):
            raise InvalidArgument(f"mandatory={mandatory!r:.60}.", "give True or False.")
        check_number("in_flight", in_flight, 1, IN_FLIGHT_MAX, whole=True)
        self._reset()

    @override
    def _reset(self) -> None:
        self._guard = threading.Lock()
        self._links: dict[str, _Sending] = {}
        self._pid = os.getpid()

    def sink(self, inputs: Any, **options: Any) -> cues.Sink:
        """Return a sink that publishes the messages of ``inputs``; ``options`` are those of ``cues.Sink``."""
        return cues.Sink(self.publish, inputs, **{"batch": True, "id": "publish", **options})

    @takes(PUBLISHER)
    def publish(self, messages: Any, process: cues.Process) -> None:
        """Publish a message or a list of messages, and wait for the confirmations: the function of :meth:`sink`.

        Raises :class:`cues.errors.InvalidArgument` for a message that cannot be published, before any is, and for one
        that comes to no queue; :class:`cues.errors.Away` if the broker is away, or a queue is full;
        :class:`cues.errors.CheckpointError` if it refuses the connection or the exchange.
        """
        messages = [messages] if isinstance(messages, dict) else list(messages)
        named = zip(messages, identities(process, len(messages)), strict=True)
        publications = [self._publication(message, identity) for message, identity in named]
        with self._guard:
            if self._pid != os.getpid():  # a connection cannot be used after a fork
                self._links, self._pid = {}, os.getpid()
            sending = self._links.get(process.id)
        if sending is None or sending.link.lost:
            sending = self._opened(process.id)
        try:
            sending.send(publications)
        except BaseException:
            sending.link.lost = True
            sending.link.close()
            raise

    def _opened(self, id: str) -> _Sending:
        try:
            sending = _Sending(self, id)
        except CuesError as error:
            raise self.fault(error) from None
        with self._guard:
            self._links[id] = sending
        return sending

    def _publication(self, message: Message, identity: str) -> _Publication:
        fields: Mapping[str, Any] = {} if self.shape == "value" else message
        key = self.routing_key(message) if callable(self.routing_key) else self.routing_key
        key = fields.get("routing_key") if key is None else key
        exchange = fields.get("exchange") if self.exchange is None else self.exchange
        for name, text in (("routing_key", key), ("exchange", exchange)):
            if not isinstance(text, str):
                raise _misfit(f"its {name} is {text!r:.60}", f"give {name}=, or add the field in a stream")
            short_of(name, text)
        try:
            if self.shape == "value":
                body = jsontext.encode(message).encode()
            elif "body" in message:
                body = kafka.encoded(message["body"]) or b""
            else:
                raise _misfit("it has no 'body'", "use shape='value', or add the field in a stream")
            given = {name: value for name, value in (fields.get("properties") or {}).items() if name not in _UNSENT}
            if unknown := sorted(set(given) - set(PROPERTIES)):
                raise _misfit(f"AMQP has no property {unknown[0]!r:.60}", "use headers for others")
            properties = library().BasicProperties(
                **{"delivery_mode": _PERSISTENT, "message_id": identity, **given},
                headers=dict(fields.get("headers") or {}),
            )
            properties.encode()
        except InvalidArgument:
            raise
        except Exception as error:  # pika raises many kinds for values that AMQP does not have
            raise _misfit(f"{type(error).__name__}: {error}"[:200], "return values of AMQP from a stream") from error
        return _Publication(str(exchange), str(key), body, properties)

    def fault(self, error: CuesError) -> CuesError:
        """Return the error of a step for that of a connection."""
        if isinstance(error, Refused) and (error.code == 406 or (error.code == 404 and self.exchange is None)):
            return InvalidArgument(error.message, "correct the message.")  # the size, or the exchange, of a message
        if isinstance(error, (Away, InvalidArgument)):
            return error
        return CheckpointError(error.message, error.hint, where=self.broker.shown, away=False)

    def close(self) -> None:
        """Close the connections. The next step opens new ones."""
        with self._guard:
            links, self._links = list(self._links.values()), {}
        for sending in links:
            sending.link.close()


class _Sending:
    """The connection of a sink."""

    def __init__(self, publisher: RabbitPublisher, id: str) -> None:
        self._publisher, self._events, self._tag = publisher, Events(), 0
        self.link = Link(publisher.broker, f"cues-{id}", [self._begin], self._events)

    def _begin(self, channel: Any, done: Callable[..., None]) -> None:
        def confirmed(frame: Any) -> None:
            self._events.put(("confirmed", frame.method))

        channel.add_on_return_callback(lambda _, reply, properties, body: self._events.put(("returned", reply)))
        channel.confirm_delivery(confirmed, callback=done)

    def send(self, publications: list[_Publication]) -> None:
        """Publish, and wait until all are confirmed."""
        count = self._publisher.in_flight
        for at in range(0, len(publications), count):
            self._send(publications[at : at + count])

    def _send(self, publications: list[_Publication]) -> None:
        publisher = self._publisher
        broker, mandatory = publisher.broker, publisher.mandatory

        def publish(channel: Any) -> None:
            for one in publications:
                channel.basic_publish(one.exchange, one.routing_key, one.body, one.properties, mandatory)

        waiting = set(range(self._tag + 1, self._tag + len(publications) + 1))
        self._tag += len(publications)
        refused, returned = False, list[Any]()
        self.link.post(publish)
        while waiting:
            kind, fact = self.link.next()
            if kind == "lost":
                raise publisher.fault(fact)
            if kind == "returned":
                returned.append(fact)
                continue
            tag = fact.delivery_tag
            waiting = {one for one in waiting if one > tag} if fact.multiple else waiting - {tag}
            refused = refused or fact.NAME != "Basic.Ack"
        if refused:
            raise broker.away("it did not take a message (a queue is full, or failed)")
        if returned:
            first = returned[0]
            raise InvalidArgument(
                f"{len(returned):,} messages came to no queue; the first one: exchange {first.exchange!r}, routing key"
                f" {first.routing_key!r} ({first.reply_text}).",
                "bind a queue, or give mandatory=False.",
            )


def _misfit(problem: str, instead: str) -> InvalidArgument:
    return InvalidArgument(f"The message cannot be published with AMQP: {problem}.", f"{instead}.")
