"""MQTT: a source of the messages of topics, acknowledged after their commit, and a sink that publishes.

    graph.add(cues.Source("readings", Mqtt("mqtts://broker:8883", "plant/+/temperature", user="a", password="b")))
    graph.add(Publisher("mqtt://broker", "alerts", shape="value").sink("alerts"))

The client is paho-mqtt, the extra ``mqtt``.

**The source** has a session that the broker keeps while the source is away, under a client id that stays the same over
restarts. It subscribes with QoS 1:

    1. receive       the broker has at most ``in_flight`` messages on the way, and keeps the others
    2. commit        by the engine: the message, a row of state (packet id, checksum) and the position at once
    3. acknowledge   in the order of receipt, all but the last committed message

So nothing is lost, wherever this process is killed: a message that was not committed was not acknowledged, and the
broker sends it again. The same holds a queue with ``max_lag=``: what is not acknowledged stays at the broker.

**Once.** A message that was committed and perhaps not acknowledged is sent again after a reconnect, with the flag DUP
and its packet id. A packet id alone proves nothing: when the broker has the acknowledgement, it may use the id for
another message, perhaps with the same text. The last committed message is therefore never acknowledged before the next
one is committed. The broker sends unacknowledged messages again in their first order (MQTT-4.6.0-1), so all messages
up to that one are repetitions for certain, and all after it are new. A message is dropped if it has the flag DUP,
comes in a resumed session before that one or is that one, and a row has its packet id and checksum. In all other cases
it is a message. A repetition within a connection, of a message that was not acknowledged, is dropped too.

QoS 2 is not used: paho acknowledges such a message before anybody can store it, and a kill then loses it.

**Not guaranteed.** A message that its publisher sent with QoS 0 has no acknowledgement: it may be lost with the
connection. The broker drops messages by its own limits (mosquitto: ``max_queued_messages``, 1,000 by default), and with
its session (``session_s``; a crash of a broker that does not store sessions). A session that is gone is a warning in
the log. The broker must let two messages be in flight. A client id belongs to one source: a second source with the same
id gets messages of the first one.

**The sink** publishes with QoS 1, and the step commits after the broker has acknowledged all messages of it: at least
once. After a kill, or a lost connection, the messages of that step are published again.

**Failures.** A broker that cannot be reached, or that ends a connection, is away: the processor waits for it. A wrong
password, a refused client id or subscription, and a wrong certificate stop the processor.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import logging
import os
import queue
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import cues
from cues import jsontext
from cues.arguments import check_number, text_of, texts_of
from cues.errors import Away, CheckpointError, CuesError, Diverged, InvalidArgument, NotInstalled
from cues.overrides import override
from cues.processors import SINK, SOURCE, foreign, kafka, takes, waits

VERSIONS: Final = ("5", "3.1.1")
"""The versions of the protocol."""

_VERSION: Final = 1
_TOPICS: Final = "topics"
"""The row of state with the topics that the session has. All other rows have a packet id as their key."""
_FOREVER_S: Final = 0xFFFFFFFF
_PACKET_IDS: Final = 65_535
_CLOSE_S: Final = 5.0
"""Seconds for which an ended source keeps its connection, to acknowledge what is committed meanwhile."""
_PORTS: Final = {"mqtt": 1883, "mqtts": 8883}
_FAULTS: Final = frozenset(
    (129, 130, 132, 133, 134, 135, 138, 140, 142, 143, 144, 149, 153, 154, 155, 156, 157, 158, 161, 162)
)
"""Reason codes that no wait mends, such as 134 (bad user name or password) and 142 (session taken over)."""

_log = logging.getLogger("cues.processors")

Message = dict[str, Any]
Position = list[int]


def _library() -> Any:
    try:
        return importlib.import_module("paho.mqtt.client")
    except ImportError as error:
        raise NotInstalled(f"MQTT needs paho-mqtt ({error}).", "pip install 'cues-streams[mqtt]'.") from None


class _Broker(NamedTuple):
    """A broker and how to reach it. Its text shows no secret."""

    shown: str
    host: str
    port: int
    user: str | None
    password: str | Callable[[], str] | None
    tls: Callable[[], ssl.SSLContext] | None
    version: str
    client: str | None
    keepalive_s: float
    timeout_s: float

    @override
    def __repr__(self) -> str:
        return f"<broker {self.shown}>"

    def made(self, id: str, clean: bool) -> Any:
        """Return a client that is not connected yet, and that gives up at the first failure."""
        lib = _library()
        kept = {} if self.version == "5" else {"clean_session": clean}
        client = lib.Client(
            lib.CallbackAPIVersion.VERSION2,
            self.client or id,
            protocol=lib.MQTTv5 if self.version == "5" else lib.MQTTv311,
            manual_ack=True,
            reconnect_on_failure=False,
            **kept,
        )
        client.connect_timeout = self.timeout_s
        if self.user is not None:
            client.username_pw_set(self.user, self.password() if callable(self.password) else self.password)
        if self.tls is not None:
            client.tls_set_context(self.tls())
        return client

    def connect(self, client: Any, clean: bool, **properties: int) -> None:
        """Open the connection; the thread of the client awaits the answer. Raises :class:`Away`, and for a fault of TLS
        :class:`CuesError`."""
        options: dict[str, Any] = {}
        if self.version == "5":
            options = {"clean_start": clean, "properties": _properties("CONNECT", **properties)}
        try:
            client.connect(self.host, self.port, round(self.keepalive_s), **options)
        except ssl.SSLError as error:
            raise CuesError(
                f"The broker {self.shown} is refused: {error}.", "correct the certificates, or tls=."
            ) from None
        except OSError as error:
            raise self.away(str(error)) from error
        client.loop_start()

    def away(self, text: str) -> Away:
        return Away(
            f"The broker {self.shown} is away: {text}.", "start the graph again when it answers.", what=self.shown
        )

    def unanswered(self) -> Away:
        older = " (a broker that does not know version 5 may be silent: version='3.1.1')" if self.version == "5" else ""
        return self.away(f"no answer within {self.timeout_s:g} s{older}")

    def failed(self, doing: str, reason: Any) -> CuesError:
        """Return the error for a reason code: the broker is away, or a fault."""
        if reason.value not in _FAULTS:
            return self.away(f"{doing}: {reason}")
        hints = {
            132: "give version='3.1.1', which older brokers speak.",
            134: "correct user= and password=.",
            135: "correct user= and password=, or the access rules of the broker.",
            142: "another client has the same id: give each source its own client=.",
        }
        hint = hints.get(reason.value, "correct the options, or the rules of the broker.")
        return CuesError(f"The broker {self.shown} refused: {doing}: {reason}.", hint)


def _broker(
    url: str,
    user: str | None,
    password: str | Callable[[], str] | None,
    tls: Callable[[], ssl.SSLContext] | None,
    version: str,
    client: str | None,
    keepalive_s: float,
    timeout_s: float,
) -> _Broker:
    """Check the options that both processors have. No error shows ``url``, which may have a password."""
    try:
        parts = urlsplit(text_of("url", url))
        host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:
        raise InvalidArgument("url= is not the address of a broker.", "give 'mqtt://host:1883'.") from None
    if parts.username is not None or parts.password is not None:
        raise InvalidArgument("url= has a user or a password.", "give user= and password=.")
    if parts.scheme not in _PORTS or not host or parts.path.strip("/") or parts.query or parts.fragment:
        raise InvalidArgument("url= is not the address of a broker.", "give 'mqtt://host:1883' or 'mqtts://host:8883'.")
    if version not in VERSIONS:
        raise InvalidArgument(f"version={version!r} is unknown.", "use '5' or '3.1.1'.")
    if tls is not None and (parts.scheme != "mqtts" or not callable(tls)):
        raise InvalidArgument(
            "tls= is a function for a URL of mqtts://.", "give tls=lambda: ssl.create_default_context(…)."
        )
    if password is not None and (user is None or not (isinstance(password, str) or callable(password))):
        raise InvalidArgument("password= is a text or a function, and needs user=.", "give both.")
    for name, value in (("user", user), ("client", client)):
        if value is not None and not text_of(name, value):
            raise InvalidArgument(f"{name}= is empty.", "leave it out.")
    check_number("keepalive_s", keepalive_s, 1, 65_535)
    check_number("timeout_s", timeout_s, 0.001)
    if parts.scheme == "mqtts" and tls is None:
        tls = ssl.create_default_context
    _library()
    shown = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    return _Broker(shown, host, port, user, password, tls, version, client, keepalive_s, timeout_s)


def _properties(packet: str, **values: Any) -> Any:
    kinds = importlib.import_module("paho.mqtt.packettypes").PacketTypes
    found = importlib.import_module("paho.mqtt.properties").Properties(getattr(kinds, packet))
    for name, value in values.items():
        setattr(found, name, value)
    return found


def _check_filter(topic: str) -> None:
    """Raise :class:`InvalidArgument` for a text that is no topic filter, and for a shared subscription."""
    levels = topic.split("/")
    wild = any(("#" in level and (level != "#" or at < len(levels) - 1)) or ("+" in level and level != "+")
               for at, level in enumerate(levels))  # fmt: skip
    if not topic or wild or "\0" in topic or len(topic.encode("utf-8", "surrogatepass")) > _PACKET_IDS:
        raise InvalidArgument(f"topics= has {topic[:60]!r}, which is no topic filter.", "give 'a/b', 'a/+/c' or 'a/#'.")
    if levels[0] == "$share":
        raise InvalidArgument(
            f"topics= has {topic[:60]!r}: a shared subscription is not kept in one session, so repetitions cannot be"
            " recognised.",
            "subscribe to the topic itself, with one source.",
        )


# --- the source -----------------------------------------------------------------------------------


@takes(SOURCE)
class Mqtt:
    """A source of the messages of topics; see the module. Give it to ``cues.Source(id, Mqtt(...))``.

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
        self.broker = _broker(url, user, password, tls, version, client, keepalive_s, timeout_s)
        self.__name__ = "mqtt"
        self._reading: Reading | None = None
        if not self.topics:
            raise InvalidArgument("topics= is empty.", "give a topic filter, such as 'plant/#'.")
        for topic in self.topics:
            _check_filter(topic)
        check_number("in_flight", in_flight, 2, _PACKET_IDS, whole=True)
        if session_s is not None:
            check_number("session_s", session_s, 1, _FOREVER_S - 1)
        if idle_exit_s is not None:
            check_number("idle_exit_s", idle_exit_s, 0)
        for name, given, known in (("payload", payload, tuple(kafka.DECODERS)), ("shape", shape, kafka.SHAPES)):
            if given not in known:
                raise InvalidArgument(f"{name}={given!r} is unknown.", f"use one of {', '.join(map(repr, known))}.")
        if shape == "value" and payload != "json":
            raise InvalidArgument(f"shape='value' with payload={payload!r}.", "use payload='json'.")
        if version != "5" and (not retained or session_s is not None):
            raise InvalidArgument("retained=False and session_s= need version 5.", "leave them out.")

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_reading": None}

    def __call__(self, position: Position | None, process: Any = None) -> Iterator[tuple[Position, Any]]:
        """Yield ``(position, message)`` for each message, until the graph drains."""
        if position is not None and (not isinstance(position, list) or len(position) != 3 or position[0] != _VERSION):
            raise Diverged(
                f"The position {str(position)[:80]} is not one of cues.processors.mqtt, version {_VERSION}.",
                "give the source another id, which begins a session of its own.",
            )
        if process is None and (position is not None or self.broker.client is None):
            raise InvalidArgument(
                "Mqtt was called without process=, whose state and id it needs.",
                "give it to cues.Source(id, Mqtt(…)); or pass on the process of your own source.",
            )
        if self._reading is not None:  # the engine calls a source anew, for example after an outage
            self._reading.close()
        self._reading = reading = Reading(self, position, process)
        try:
            yield from reading.messages()
        except BaseException:
            reading.close()
            raise
        reading.end()

    def committed(self, position: Position) -> None:
        """Acknowledge the messages that are committed; the engine calls it after each commit."""
        if self._reading is not None:
            self._reading.committed(position[1])


class Reading:
    """One connection of a source. The thread of the client only puts what happens into a queue."""

    def __init__(self, source: Mqtt, position: Position | None, process: Any) -> None:
        self._source, self._process = source, process
        self._state: Any = {} if process is None else process.state
        _, self._number, self._others = position or (_VERSION, 0, 0)
        """The number of the last message of QoS 1, and the count of all else that moved the position."""
        self._last = self._number
        """The last message that was committed before this connection. It was not acknowledged."""
        self._repeats = False
        """Whether the broker may still send messages that were committed before this connection."""
        self._committed = self._number
        self._unacknowledged: dict[int, int] = {}
        """The numbers of the messages of this connection by packet id, in the order of their receipt."""
        self._guard = threading.Lock()
        self._ending = self._closed = False
        self._events: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        id = "" if process is None else f"cues-{process.id}"
        self._client = client = source.broker.made(id, clean=False)
        put = self._events.put
        client.on_connect = lambda c, u, flags, reason, p: put(("connected", (flags.session_present, reason)))
        client.on_disconnect = lambda c, u, flags, reason, p: put(("lost", reason))
        client.on_subscribe = lambda c, u, mid, reasons, p: put(("answered", reasons))
        client.on_unsubscribe = lambda c, u, mid, reasons, p: put(("answered", []))
        client.on_message = lambda c, u, message: put(("message", message))

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
        heard = time.monotonic()
        while not self._stopping:
            event: tuple[str, Any] | None = None
            if early:
                event = ("message", early.pop(0))
            else:
                with contextlib.suppress(queue.Empty):
                    event = self._events.get(timeout=waits.LOOK_S)
            if event is None:
                waits.answered(self._process)
                if source.idle_exit_s is not None and time.monotonic() - heard >= source.idle_exit_s:
                    return
                continue
            kind, fact = event
            if kind == "lost":
                raise source.broker.failed("the connection was ended", fact)
            if kind == "message":
                heard = time.monotonic()
                if not fact.qos:
                    self._others += 1
                    yield self._position, self._message(fact)
                elif self._is_new(fact):
                    yield self._position, self._message(fact)

    @property
    def _position(self) -> Position:
        return [_VERSION, self._number, self._others]

    @property
    def _stopping(self) -> bool:
        return self._process is not None and bool(self._process.stopping)

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

    def end(self) -> None:
        """Close the connection when all messages are committed and acknowledged, or after some seconds."""
        with self._guard:
            self._ending = True
            done = self._committed == self._number
        if done:
            return self.close()
        timer = threading.Timer(_CLOSE_S, self.close)
        timer.daemon = True
        timer.start()

    def close(self) -> None:
        """Close the connection. The broker keeps the session."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
        _close(self._client)


def _close(client: Any) -> None:
    client.disconnect()
    client.loop_stop()


def _topic_of(message: Any) -> str:
    try:
        return str(message.topic)
    except UnicodeDecodeError:  # against the protocol
        return "?"


# --- the sink -------------------------------------------------------------------------------------


class _Packet(NamedTuple):
    topic: str
    payload: bytes
    retain: bool
    properties: list[tuple[str, str]]


@takes({name: value for name, value in SINK.items() if name != "checkpoint"})
class Publisher:
    """A sink that publishes messages; see the module. :meth:`sink` declares it.

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
        self.broker = _broker(url, user, password, tls, version, client, keepalive_s, timeout_s)
        if shape not in kafka.SHAPES:
            raise InvalidArgument(f"shape={shape!r} is unknown.", "use 'record' or 'value'.")
        if shape == "value" and topic is None:
            raise InvalidArgument("shape='value' without topic=.", "give a topic, or a function of the message.")
        if isinstance(topic, str):
            _check_topic(topic)
        elif topic is not None and not callable(topic):
            raise InvalidArgument(f"topic={topic!r:.60}.", "give a text, a function of the message, or None.")
        if not isinstance(retain, bool) and not callable(retain):
            raise InvalidArgument(f"retain={retain!r:.60}.", "give True, False, or a function of the message.")
        check_number("in_flight", in_flight, 1, _PACKET_IDS, whole=True)
        self.__setstate__({})

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("_guard", "_links", "_pid")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._guard = threading.Lock()
        self._links: dict[str, _Sending] = {}
        self._pid = os.getpid()

    def sink(self, inputs: Any, **options: Any) -> cues.Sink:
        """Return a sink that publishes the messages of ``inputs``; ``options`` are those of ``cues.Sink``."""
        return cues.Sink(self.publish, inputs, **{"batch": True, "id": "publish", **options})

    @takes({name: value for name, value in SINK.items() if name != "checkpoint"})
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
        """Whether a new connection is needed."""
        self._acknowledged = 0
        self._refused: list[tuple[int, Any]] = []
        """The packet ids of messages that the broker refused, each with the reason."""
        self._reason: Any = None
        """The answer of the broker, or the reason for which it ended the connection."""
        self._window = publisher.in_flight
        self._changed = threading.Condition()
        self._client = client = broker.made(f"cues-{id}", clean=True)
        client.max_inflight_messages = _PACKET_IDS
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
            self._window = min(self._window, getattr(properties, "ReceiveMaximum", _PACKET_IDS))
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
                options["properties"] = _properties("PUBLISH", UserProperty=packet.properties)
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
        _close(self._client)


def _check_topic(topic: str) -> None:
    """Raise :class:`InvalidArgument` for a topic to which nothing can be published."""
    try:
        size = len(topic.encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= _PACKET_IDS or set("+#\0") & set(topic):
        raise _misfit(f"its topic is {topic[:60]!r}", "give a topic without '+' and '#', such as 'a/b'")


def _misfit(problem: str, instead: str) -> InvalidArgument:
    return InvalidArgument(f"The message cannot be published with MQTT: {problem}.", f"{instead}.")
