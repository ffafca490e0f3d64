"""The client of Kafka as ``kafka_source.py`` and ``kafka_sink.py`` use it: configuration, errors, values of records.

The client is confluent-kafka (librdkafka), the extra ``kafka``. It is imported on first use.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from typing import Any, Final

from cues import arguments, jsontext
from cues.errors import InvalidArgument
from cues.imported import package

LOG: Final = logging.getLogger("cues.processors.kafka")
"""Log records of librdkafka, such as a broker that cannot be reached."""

TOLD_S: Final = 60.0
"""Seconds for which a line of librdkafka is not repeated: without a broker it says the same forty times a second."""

AWAY_S: Final = 2.0
"""Seconds without any broker after which an unanswered request counts as failed: librdkafka itself waits for more."""

POLL_S: Final = 0.05
"""Seconds between two looks at the errors of a client that waits for an answer."""

SHAPES: Final = ("record", "value")

_told: Final[dict[str, float]] = {}


def _is_news(record: logging.LogRecord) -> bool:
    """True if the text was not logged of late. The names of clients and the times in it do not count."""
    text = re.sub(r"#\w+-\d+|\(after .*", "", record.getMessage())
    now = time.monotonic()
    if now - _told.get(text, -TOLD_S) < TOLD_S:
        return False
    if len(_told) >= 1000:
        _told.clear()
    _told[text] = now
    return True


LOG.addFilter(_is_news)


def library() -> Any:
    """Import confluent_kafka. Raises :class:`cues.errors.NotInstalled`."""
    return package("Kafka needs confluent-kafka", "kafka", "confluent_kafka", "confluent_kafka.admin")


def checked(servers: str, topic: str, config: Mapping[str, Any] | None, reserved: Mapping[str, str]) -> dict[str, Any]:
    """Return the user's options of librdkafka. Raises :class:`InvalidArgument` for one that is not the user's.

    ``reserved`` has the options that the processor sets, and what to use for each.
    """
    if not arguments.text_of("servers", servers) or not arguments.text_of("topic", topic):
        raise InvalidArgument(f"servers={servers!r}, topic={topic!r}: one is empty.", "give both, as 'host:9092'.")
    return arguments.options_of("config", config, {"bootstrap.servers": "use the first argument.", **reserved})


class Brokers:
    """The time since which a client has no broker, from the errors that the client tells when it is polled."""

    def __init__(self) -> None:
        self.away_since: float | None = None
        self._reason = ""

    def told(self, error: Any) -> None:
        """Note an error of the client."""
        LOG.warning("%s", error)
        if error.code() == library().KafkaError._ALL_BROKERS_DOWN:
            self.away_since = self.away_since or time.monotonic()
        else:
            self._reason = error.str()

    @property
    def are_away(self) -> bool:
        """True if no broker was there for :data:`AWAY_S`. A request that is answered later says otherwise."""
        return self.away_since is not None and time.monotonic() - self.away_since > AWAY_S

    def raise_if_away(self) -> None:
        """Raise ``KafkaException`` with the last reason that the client told."""
        if self.are_away:
            errors = library().KafkaError
            raise library().KafkaException(errors(errors._ALL_BROKERS_DOWN, self._reason or "no broker is there"))

    def explained(self, error: Any) -> Any:
        """Return a ``KafkaException``. If it says only that nothing answers, it has the reason that was told last."""
        reason = error.args[0]
        if not is_away(reason) or not self._reason:
            return error
        return library().KafkaException(library().KafkaError(reason.code(), f"{reason.str()}: {self._reason}"))

    def answered(self) -> None:
        """A broker has answered: what was told before is over."""
        self.away_since, self._reason = None, ""


class Admin:
    """An AdminClient whose answer is looked for now and then; one request at a time. Close it in the thread that asks.

    Two faults of the library end the process (SIGABRT), and this class avoids both (confluent-kafka 2.16):

    - An AdminClient that the garbage collector destroys may be destroyed in its own thread, where an answer runs Python
      code; librdkafka forbids that. So each is closed.
    - A request for the coordinator of a group (``list_consumer_group_offsets``) uses freed memory if the connection
      ends (librdkafka, issue 4605). So none is made here: :func:`committed` asks with a consumer.
    """

    def __init__(self, servers: str, config: Mapping[str, Any]) -> None:
        self._brokers = Brokers()
        self._client = client(library().admin.AdminClient, servers, connections(config), {}, self._brokers)
        self._future: Any = None

    def close(self) -> None:
        """Destroy the client; an open request is dropped."""
        self._client.__exit__(None, None, None)

    def ask(self, request: Callable[[Any], Any]) -> None:
        """Make a request: a function of the client that returns a future."""
        if self._brokers.away_since is not None:  # told once, and perhaps no longer true
            self._brokers.away_since = time.monotonic()
        self._future = request(self._client)

    def is_answered(self, wait_s: float = 0) -> bool:
        """Wait for so long at most. Raises ``KafkaException`` when no broker was there for :data:`AWAY_S`."""
        end = time.monotonic() + wait_s
        while not self._future.done():
            self._client.poll(0)
            self._brokers.raise_if_away()
            if time.monotonic() >= end:
                return False
            futures.wait([self._future], POLL_S)
        return True

    def answer(self) -> Any:
        """Return the answer. Raises its ``KafkaException``."""
        while not self.is_answered(1):
            pass
        try:
            answer = self._future.result()
        except library().KafkaException as error:
            raise self._brokers.explained(error) from error
        self._brokers.answered()
        return answer


def committed(servers: str, config: Mapping[str, Any], group: str, topic: str, timeout_s: float) -> Any:
    """Return the offset that a group committed for the partition 0 of a topic, with its metadata.

    Open transactions are not waited for. Raises ``KafkaException``, soon when no broker is there.
    """
    lib, brokers = library(), Brokers()
    own = {"group.id": group, "enable.auto.commit": False, "isolation.level": "read_uncommitted"}
    consumer = client(lib.Consumer, servers, connections(config), own, brokers)
    end, wait_s = time.monotonic() + timeout_s, AWAY_S / 2
    with contextlib.closing(consumer):
        while True:
            try:
                (place,) = consumer.committed([lib.TopicPartition(topic, 0)], wait_s)
                break
            except lib.KafkaException as error:
                consumer.poll(0)  # it tells the reason
                if not is_away(error.args[0]) or time.monotonic() >= end:
                    raise brokers.explained(error) from error
            brokers.raise_if_away()
            wait_s = max(POLL_S, min(2 * wait_s, end - time.monotonic()))  # a slow broker has time for its answer
    if place.error is not None:
        raise lib.KafkaException(place.error)
    return place


def client(
    kind: Callable[..., Any],
    servers: str,
    config: Mapping[str, Any],
    own: Mapping[str, Any],
    brokers: Brokers | None = None,
) -> Any:
    """Return a Consumer, Producer or AdminClient. Raises :class:`InvalidArgument` for an option that is unknown."""
    options = {
        "client.id": f"cues-{os.getpid()}",
        **config,
        **own,
        "bootstrap.servers": servers,
        "error_cb": (brokers or Brokers()).told,
    }
    try:
        return kind(options, logger=LOG)
    except library().KafkaException as error:
        raise InvalidArgument(
            f"librdkafka refuses the configuration: {error.args[0].str()}.", "correct config=, or the servers."
        ) from error


def connections(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of every kind of client: connections and security."""
    names = (
        "security",
        "sasl",
        "ssl",
        "socket",
        "broker",
        "client",
        "reconnect",
        "metadata",
        "enable.ssl",
        "debug",
        "log",
    )
    return {name: value for name, value in config.items() if name.startswith(names)}


def patiently(call: Callable[[], Any], deadline: float) -> Any:
    """Return the result of a call, repeated while its error says that the same call may succeed."""
    while True:
        try:
            return call()
        except library().KafkaException as error:
            if not error.args[0].retriable() or time.monotonic() > deadline:
                raise


def is_away(error: Any) -> bool:
    """Return whether an error says that brokers are away, and librdkafka or a later try finds them again."""
    codes = library().KafkaError
    if error.code() in (codes.UNKNOWN_TOPIC_OR_PART, codes._UNKNOWN_TOPIC, codes._AUTHENTICATION):
        return False
    return bool(error.retriable()) or error.code() in (
        codes._TRANSPORT,
        codes._ALL_BROKERS_DOWN,
        codes._TIMED_OUT,
        codes._MSG_TIMED_OUT,
        codes._TIMED_OUT_QUEUE,
        codes._RESOLVE,
        codes.REQUEST_TIMED_OUT,
        codes.BROKER_NOT_AVAILABLE,
        codes.LEADER_NOT_AVAILABLE,
        codes.NOT_LEADER_FOR_PARTITION,
        codes.NETWORK_EXCEPTION,
        codes.COORDINATOR_LOAD_IN_PROGRESS,
        codes.COORDINATOR_NOT_AVAILABLE,
        codes.NOT_COORDINATOR,
        codes.NOT_ENOUGH_REPLICAS,
        codes.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
    )


def text_of(value: bytes | None) -> str | None:
    """Decode UTF-8; None stays None."""
    return None if value is None else value.decode()


def json_of(value: bytes | None) -> Any:
    """Decode JSON; None stays None."""
    return None if value is None else jsontext.decode(value)


DECODERS: Final[dict[str, Callable[[Any], Any]]] = {"bytes": lambda value: value, "text": text_of, "json": json_of}
"""The choices of ``value=`` and ``key=`` of a source."""


def encoded(value: Any) -> bytes | None:
    """Return the bytes of a value or key: bytes and None as they are, text as UTF-8, all else as JSON."""
    if value is None or isinstance(value, bytes):
        return value
    return (value if isinstance(value, str) else jsontext.encode(value)).encode()
