"""A sink that publishes messages with MQTT; ``mqtt.py`` has the protocol."""

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
from cues.processors.mqtt_client import PACKET_IDS, broker_of, close, properties_of

Message = dict[str, Any]


class _Packet(NamedTuple):
    topic: str
    payload: bytes
    retain: bool
    properties: list[tuple[str, str]]


@takes(PUBLISHER)
class Publisher(checks.Unshared):
    """A sink that publishes messages; see ``mqtt.py``. :meth:`sink` declares it.

    ``url``          the broker, as :class:`Mqtt` has it
    ``topic``        a topic, or a function of the message; None: the message's field ``topic``
    ``shape``        ``"record"``: messages have ``payload`` (bytes and text as they are, None: empty, all else as
                     JSON), and perhaps ``topic`` and ``properties``; ``"value"``: the message is the payload, as JSON
    ``retain``       whether the broker keeps the message for later subscribers, or a function of the message
    ``in_flight``    messages on the way without an acknowledgement, if the broker allows as many
    ``user``, ``password``, ``tls``, ``version``, ``client``, ``keepalive_s``, ``timeout_s``   as :class:`Mqtt` has them

    Kind: sink
    Needs: extra `mqtt`
    Guarantee: at least once: the broker has acknowledged each message before the step commits
    Mechanism: QoS 1; after a kill or a lost connection the messages of the step are published again
    """

    def __init__(
        self,
        url: str,
        topic: str | Callable[[Message], str] | None = None,
        *,
        shape: str = "record",
        retain: bool | Callable[[Message], bool] = False,
        in_flight: int = 500,
        user: str | None = None,
        password: str | Callable[[], str] | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        version: str = "5",
        client: str | None = None,
        keepalive_s: float = 60.0,
        timeout_s: float = 10.0,
    ) -> None:
        self.topic, self.shape, self.retain, self.in_flight = topic, shape, retain, in_flight
        self.broker = broker_of(url, user, password, tls, version, client, keepalive_s, timeout_s)
        checks.one_of("shape", shape, kafka.SHAPES)
        if shape == "value" and topic is None:
            raise InvalidArgument("shape='value' without topic=.", "give a topic, or a function of the message.")
        if isinstance(topic, str):
            _check_topic(topic)
        elif topic is not None and not callable(topic):
            raise InvalidArgument(f"topic={topic!r:.60}.", "give a text, a function of the message, or None.")
        if not isinstance(retain, bool) and not callable(retain):
            raise InvalidArgument(f"retain={retain!r:.60}.", "give True, False, or a function of the message.")
        check_number("in_flight", in_flight, 1, PACKET_IDS, whole=True)
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
        """Publish a message or a list of messages, and wait for the acknowledgements: the function of :meth:`sink`.

        Raises :class:`cues.errors.InvalidArgument` for a message that cannot be published, before any is;
        :class:`cues.errors.Away` if the broker is away; :class:`cues.errors.CheckpointError` if it refuses the
        connection.
        """
        packets = [self._packet(message) for message in ([messages] if isinstance(messages, dict) else messages)]
        with self._guard:
            if self._pid != os.getpid():  # a connection cannot be used after a fork
                self._links, self._pid = {}, os.getpid()
            link = self._links.get(process.id)
            if link is None or link.lost:
                link = self._links[process.id] = _Sending(self, process.id)
        try:
            link.send(packets)
        except BaseException:
            link.close()
            raise

    def _packet(self, message: Message) -> _Packet:
        topic = self.topic(message) if callable(self.topic) else self.topic
        fields: Mapping[str, Any] = {}
        if self.shape == "value":
            try:
                payload = jsontext.encode(message).encode()
            except (TypeError, ValueError) as error:
                raise _misfit(f"JSON cannot hold it ({error})", "return JSON values from a stream") from error
        else:
            fields = message
            if "payload" not in message:
                raise _misfit("it has no 'payload'", "use shape='value', or add the field in a stream")
            payload = kafka.encoded(message["payload"]) or b""
        topic = fields.get("topic") if topic is None else topic
        if not isinstance(topic, str):
            raise _misfit(f"its topic is {topic!r:.60}", "give topic=, or add the field in a stream")
        _check_topic(topic)
        retain = self.retain(message) if callable(self.retain) else self.retain
        properties = [(str(name), str(value)) for name, value in fields.get("properties") or ()]
        return _Packet(topic, payload, bool(retain), properties)

    def close(self) -> None:
        """Close the connections. The next step opens new ones."""
        with self._guard:
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close()


class _Sending:
    """The connection of a sink. Its thread counts acknowledgements."""

    def __init__(self, publisher: Publisher, id: str) -> None:
        self._publisher, broker = publisher, publisher.broker
        self.lost = False
        """True if a new connection is needed."""
        self._acknowledged = 0
        self._refused: list[tuple[int, Any]] = []
        """The packet ids of messages that the broker refused, each with the reason."""
        self._reason: Any = None
        """The answer of the broker, or the reason for which it ended the connection."""
        self._window = publisher.in_flight
        self._changed = threading.Condition()
        self._client = client = broker.made(f"cues-{id}", clean=True)
        client.max_inflight_messages = PACKET_IDS
        client.on_connect, client.on_disconnect, client.on_publish = (
            self._connected,
            self._disconnected,
            self._published,
        )
        broker.connect(client, clean=True)
        with self._changed:
            if not self._changed.wait_for(lambda: self._reason is not None, broker.timeout_s):
                self._reason = broker.unanswered()
            problem = self._problem("the connection")
        if problem is not None:
            self.close()
            raise problem

    def _connected(self, client: Any, _: Any, flags: Any, reason: Any, properties: Any) -> None:
        with self._changed:
            self._reason = reason
            self._window = min(self._window, getattr(properties, "ReceiveMaximum", PACKET_IDS))
            self._changed.notify_all()

    def _disconnected(self, client: Any, _: Any, flags: Any, reason: Any, properties: Any) -> None:
        with self._changed:
            if self._reason is None or not self._reason.is_failure:
                self._reason = reason
            self.lost = True
            self._changed.notify_all()

    def _published(self, client: Any, _: Any, mid: int, reason: Any, properties: Any) -> None:
        with self._changed:
            self._acknowledged += 1
            if reason.is_failure:
                self._refused.append((mid, reason))
            self._changed.notify_all()

    def _problem(self, doing: str) -> CuesError | None:
        """Return the error for which nothing can be sent, or None."""
        broker, reason = self._publisher.broker, self._reason
        if isinstance(reason, CuesError):
            return reason
        if not (self.lost or reason.is_failure):
            return None
        error = broker.failed(doing, reason)
        if isinstance(error, Away):
            return error
        return CheckpointError(error.message, error.hint, where=broker.shown, away=False)

    def send(self, packets: list[_Packet]) -> None:
        """Publish, and wait until all are acknowledged."""
        broker, sent = self._publisher.broker, dict[int, _Packet]()
        self._acknowledged, self._refused = 0, []
        for packet in packets:
            self._wait(len(sent) - self._window + 1)
            options: dict[str, Any] = {}
            if broker.version == "5" and packet.properties:
                options["properties"] = properties_of("PUBLISH", UserProperty=packet.properties)
            # not under the lock, which the thread of the client takes while it has one that publish() needs
            info = self._client.publish(packet.topic, packet.payload, 1, packet.retain, **options)
            sent[info.mid] = packet
        self._wait(len(sent))
        for mid, reason in self._refused:
            raise InvalidArgument(
                f"The broker {broker.shown} refuses a message for the topic {sent[mid].topic!r:.200}, with"
                f" {len(sent[mid].payload):,} bytes: {reason}.",
                "correct the message, or the access rules of the broker.",
            )

    def _wait(self, count: int) -> None:
        """Wait until so many messages are acknowledged."""
        broker = self._publisher.broker
        with self._changed:
            while self._acknowledged < count:
                before = self._acknowledged
                problem = self._problem("the connection was ended")
                if problem is None and not self._changed.wait(broker.timeout_s) and self._acknowledged == before:
                    problem = broker.away(f"no acknowledgement within {broker.timeout_s:g} s")
                if problem is not None:
                    raise problem

    def close(self) -> None:
        """Close the connection."""
        self.lost = True
        close(self._client)


def _check_topic(topic: str) -> None:
    """Raise :class:`InvalidArgument` for a topic to which nothing can be published."""
    try:
        size = len(topic.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= PACKET_IDS or set("+#\0") & set(topic):
        raise _misfit(f"its topic is {topic[:60]!r}", "give a topic without '+' and '#', such as 'a/b'")


def _misfit(problem: str, instead: str) -> InvalidArgument:
    return InvalidArgument(f"The message cannot be published with MQTT: {problem}.", f"{instead}.")
