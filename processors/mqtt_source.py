"""A source of the messages of MQTT topics; ``mqtt.py`` has the protocol."""

from __future__ import annotations

import hashlib
import importlib
import logging
import queue
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from cues.arguments import check_number, texts_of
from cues.errors import CuesError, InvalidArgument
from cues.overrides import override
from cues.processors import SOURCE, checks, foreign, kafka, takes
from cues.processors.acknowledged import VERSION, Acknowledging, Connected, Position
from cues.processors.mqtt_client import PACKET_IDS, broker_of, close

_TOPICS: Final = "topics"
"""The row of state with the topics that the session has. All other rows have a packet id as their key."""
_FOREVER_S: Final = 0xFFFFFFFF

_LOOSE_BYTES: Final = 64 << 20
"""Bytes of the messages of QoS 0 in memory: the broker sends these as fast as it can, also when the queue is full."""
_EACH_BYTES: Final = 1_000
"""Bytes of a message in memory beside its payload, about."""
_TELL_S: Final = 60.0
"""Seconds between two warnings about messages of QoS 0 that were dropped."""

_log = logging.getLogger("cues.processors")


@takes(SOURCE)
class Mqtt(Acknowledging):
    """A source of the messages of topics; see ``mqtt.py``. Give it to ``cues.Source(id, Mqtt(...))``.

    ``url``          the broker: ``"mqtt://host:1883"``, or ``"mqtts://host:8883"`` with TLS
    ``topics``       a topic filter, or several
    ``payload``      decoding of payloads: ``"bytes"``, ``"text"`` (UTF-8) or ``"json"``. A payload that cannot be decoded
                     is a failed message
    ``shape``        ``"record"``: messages ``{"topic", "payload", "retained", "properties"}``; ``"value"``: the JSON
                     object of the payload, and the rest is ``process.metadata["mqtt"]``. ``properties`` are the user
                     properties of version 5: pairs of name and value
    ``retained``     False: the messages that the broker kept before the subscription are not sent (version 5)
    ``in_flight``    messages that the broker sends without an acknowledgement (version 5; with 3.1.1 the broker decides)
    ``session_s``    seconds for which the broker keeps the session of a source that is away (version 5); None: for ever
    ``idle_exit_s``  end the source after so many seconds without a message; None: never
    ``user``, ``password``   of the broker; ``password`` may be a function, which is called for each connection
    ``tls``          a function that returns an ``ssl.SSLContext``; None: the certificates of the system
    ``version``      ``"5"`` or ``"3.1.1"``
    ``client``       the client id; None: ``cues-<graph>.<processor>``. Two stores that run one graph need two
    ``keepalive_s``  seconds after which a silent connection is probed
    ``timeout_s``    seconds for which a connection, and each answer, is awaited
    ``reserved``     ``"q/type"`` or ``"q/topics"``, which payloads may set then (:mod:`cues.processors.foreign`)

    Kind: source
    Needs: extra `mqtt`
    Guarantee: at least once for messages of QoS 1; exactly once while the broker keeps the session and sends again in order
    Mechanism: acknowledgement after the commit, of all but the last message; packet ids and checksums in rows of state, committed with the messages
    """  # noqa: E501

    def __init__(
        self,
        url: str,
        topics: str | Sequence[str],
        *,
        payload: str = "bytes",
        shape: str = "record",
        retained: bool = True,
        in_flight: int = 500,
        session_s: float | None = None,
        idle_exit_s: float | None = None,
        user: str | None = None,
        password: str | Callable[[], str] | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        version: str = "5",
        client: str | None = None,
        keepalive_s: float = 60.0,
        timeout_s: float = 10.0,
        reserved: Sequence[str] = (),
    ) -> None:
        self.may = foreign.allowed(reserved)
        self.topics = sorted(set([topics] if isinstance(topics, str) else texts_of("topics", topics)))
        self.payload, self.shape, self.retained = payload, shape, retained
        self.in_flight, self.session_s, self.idle_exit_s = in_flight, session_s, idle_exit_s
        self.broker = broker_of(url, user, password, tls, version, client, keepalive_s, timeout_s)
        self.__name__ = "mqtt"
        if not self.topics:
            raise InvalidArgument("topics= is empty.", "give a topic filter, such as 'plant/#'.")
        for topic in self.topics:
            _check_filter(topic)
        check_number("in_flight", in_flight, 2, PACKET_IDS, whole=True)
        if session_s is not None:
            check_number("session_s", session_s, 1, _FOREVER_S - 1)
        if idle_exit_s is not None:
            check_number("idle_exit_s", idle_exit_s, 0)
        for name, given, known in (("payload", payload, tuple(kafka.DECODERS)), ("shape", shape, kafka.SHAPES)):
            checks.one_of(name, given, known)
        checks.decoded(shape, "payload", payload)
        if version != "5" and (not retained or session_s is not None):
            raise InvalidArgument("retained=False and session_s= need version 5.", "leave them out.")

    _module, _length = "cues.processors.mqtt", 3

    @override
    def _needs_process(self, position: Position | None) -> bool:
        return position is not None or self.broker.client is None

    @override
    def _new_reading(self, position: Position | None, process: Any) -> Reading:
        return Reading(self, position, process)


class Reading(Connected):
    """One connection of a source. The thread of the client only puts what happens into a queue."""

    def __init__(self, source: Mqtt, position: Position | None, process: Any) -> None:
        _, number, self._others = position or (VERSION, 0, 0)
        """The number of the last message of QoS 1, and the count of all else that moved the position."""
        super().__init__(number)
        self._source, self._process = source, process
        self._state: Any = {} if process is None else process.state
        self._last = self._number
        """The last message that was committed before this connection. It was not acknowledged."""
        self._repeats = False
        """True if the broker may still send messages that were committed before this connection."""
        self._unacknowledged: dict[int, int] = {}
        """The numbers of the messages of this connection by packet id, in the order of their receipt."""
        self._loose_bytes = self._dropped = self._told = 0
        """Bytes of the messages of QoS 0 that wait; those that were dropped; those of which a warning has told."""
        self._tell_at = 0.0
        id = "" if process is None else f"cues-{process.id}"
        self._client = client = source.broker.made(id, clean=False)
        put = self._events.put
        client.on_connect = lambda c, u, flags, reason, p: put(("connected", (flags.session_present, reason)))
        client.on_disconnect = lambda c, u, flags, reason, p: put(("lost", reason))
        client.on_subscribe = lambda c, u, mid, reasons, p: put(("answered", reasons))
        client.on_unsubscribe = lambda c, u, mid, reasons, p: put(("answered", []))
        client.on_message = lambda c, u, message: self._received(message)

    def messages(self) -> Iterator[tuple[Position, Any]]:
        """Connect, subscribe, and yield messages until the graph drains."""
        source = self._source
        kept_s = _FOREVER_S if source.session_s is None else round(source.session_s)
        source.broker.connect(self._client, clean=False, SessionExpiryInterval=kept_s, ReceiveMaximum=source.in_flight)
        early: list[Any] = []
        present, reason = self._await("connected", early)
        if reason.is_failure:
            raise source.broker.failed("the connection", reason)
        if self._number and not present:
            _log.warning(
                "%s has no session of %s any more: messages of the time in which the source was away may be lost.",
                source.broker.shown, getattr(self._process, "id", source.broker.client),
            )  # fmt: skip
        self._repeats = present and self._number > 0
        if self._subscribe(present, early):
            self._state[_TOPICS] = source.topics
            self._others += 1
            yield self._position, None
        events = (("message", message) for message in early)
        for kind, fact in self._heard(self._process, source.idle_exit_s, events):
            if kind == "lost":
                raise source.broker.failed("the connection was ended", fact)
            if kind == "message":
                if not fact.qos:
                    with self._guard:
                        self._loose_bytes -= len(fact.payload) + _EACH_BYTES
                    self._others += 1
                    yield self._position, self._message(fact)
                elif self._is_new(fact):
                    yield self._position, self._message(fact)

    @property
    def _position(self) -> Position:
        return [VERSION, self._number, self._others]

    def _await(self, awaited: str, early: list[Any]) -> Any:
        """Return the fact of an event. Messages that come before it are kept in ``early``."""
        broker = self._source.broker
        deadline = time.monotonic() + broker.timeout_s
        while True:
            try:
                kind, fact = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise broker.unanswered() from None
            if kind == awaited:
                return fact
            if kind == "lost":
                raise broker.failed("the connection was ended", fact)
            if kind == "message":
                early.append(fact)

    def _subscribe(self, present: bool, early: list[Any]) -> bool:
        """Make the session have the topics of the source, and no others; return whether it had not."""
        source = self._source
        known = set(self._state.get(_TOPICS, ())) if present else set()
        new, gone = [topic for topic in source.topics if topic not in known], sorted(known - set(source.topics))
        if new and source.broker.version == "5":
            of = importlib.import_module("paho.mqtt.subscribeoptions").SubscribeOptions
            # 1: no retained messages again if the session has the subscription; 2: none
            self._client.subscribe([(topic, of(qos=1, retainHandling=1 if source.retained else 2)) for topic in new])
        elif new:
            self._client.subscribe([(topic, 1) for topic in new])
        if new:
            for topic, reason in zip(new, self._await("answered", early), strict=False):
                if reason.is_failure:
                    raise CuesError(
                        f"The broker {source.broker.shown} refused the subscription to {topic!r}: {reason}.",
                        "correct topics=, or the access rules of the broker.",
                    )
        if gone:
            self._client.unsubscribe(gone)
            self._await("answered", early)
        return bool(new or gone)

    def _is_new(self, message: Any) -> bool:
        """Number a message of QoS 1, and keep what a repetition is recognised by; False if it is one."""
        mid = message.mid
        with self._guard:
            if mid in self._unacknowledged:
                return False  # sent again within this connection
        text = _topic_of(message).encode("utf-8", "surrogatepass") + b"\0" + message.payload
        checksum = hashlib.blake2b(text, digest_size=8).digest()
        number, kept = self._state.get(mid) or (0, b"")
        if self._repeats and message.dup and kept == checksum and number <= self._last:
            self._repeats = number < self._last
            self._acknowledge(mid, number)
            return False
        self._repeats = False  # the broker sends the others after those that it sends again
        self._number += 1
        self._state[mid] = [self._number, checksum]
        with self._guard:
            self._unacknowledged[mid] = self._number
        return True

    def _acknowledge(self, mid: int, number: int) -> None:
        with self._guard:
            self._unacknowledged[mid] = number
        self.committed(self._committed)

    def _message(self, message: Any) -> Any:
        source, topic = self._source, _topic_of(message)
        try:
            fields = {
                "topic": topic,
                "retained": bool(message.retain),
                "properties": [list(pair) for pair in getattr(message.properties, "UserProperty", ())],
            }
            value = kafka.DECODERS[source.payload](bytes(message.payload))
            return foreign.shaped(source, "mqtt", fields, "payload", value)
        except (ValueError, RecursionError) as error:
            return InvalidArgument(
                f"A message of the topic {topic!r:.200}, with {len(message.payload):,} bytes, cannot be read as"
                f" payload={source.payload!r}, shape={source.shape!r}: {error}.",
                "correct the publisher; or read it with payload='bytes', and decode it in a stream.",
            )

    # --- other threads ---

    def _received(self, message: Any) -> None:
        """Keep a message until the queue takes it. One of QoS 0 is dropped if too many of these wait."""
        if not message.qos:
            size = len(message.payload) + _EACH_BYTES
            with self._guard:
                if self._loose_bytes and self._loose_bytes + size > _LOOSE_BYTES:
                    self._dropped += 1
                    if time.monotonic() >= self._tell_at:
                        self._tell()
                    return
                self._loose_bytes += size
        self._events.put(("message", message))

    def _tell(self) -> None:
        """Warn about messages that were dropped."""
        self._tell_at, self._told = time.monotonic() + _TELL_S, self._dropped
        _log.warning(
            "%s sends messages of QoS 0 faster than %s takes them: %s dropped since the start of the connection.",
            self._source.broker.shown, getattr(self._process, "id", self._source.broker.client),
            f"{self._dropped:,} {'is' if self._dropped == 1 else 'are'}",
        )  # fmt: skip

    def committed(self, number: int) -> None:
        """Acknowledge the messages before ``number``, which is committed and is not acknowledged yet."""
        with self._guard:
            self._committed = number
            for mid, of in list(self._unacknowledged.items()):
                if of >= number:
                    break
                if not self._closed:
                    self._client.ack(mid, 1)
                del self._unacknowledged[mid]
            done = self._ending and number == self._number
        if done:
            self.close()

    @override
    def _disconnect(self) -> None:
        close(self._client)
        if self._dropped > self._told:
            self._tell()


def _topic_of(message: Any) -> str:
    try:
        return str(message.topic)
    except UnicodeDecodeError:  # against the protocol
        return "?"


def _check_filter(topic: str) -> None:
    """Raise :class:`InvalidArgument` for a text that is not a topic filter, and for a shared subscription."""
    levels = topic.split("/")
    wild = any(("#" in level and (level != "#" or at < len(levels) - 1)) or ("+" in level and level != "+")
               for at, level in enumerate(levels))  # fmt: skip
    if not topic or wild or "\0" in topic or len(topic.encode("utf-8", "surrogatepass")) > PACKET_IDS:
        raise InvalidArgument(
            f"topics= has {topic[:60]!r}, which is not a topic filter.", "give 'a/b', 'a/+/c' or 'a/#'."
        )
    if levels[0] == "$share":
        raise InvalidArgument(
            f"topics= has {topic[:60]!r}: a shared subscription is not kept in one session, so repetitions cannot be"
            " recognised.",
            "subscribe to the topic itself, with one source.",
        )
