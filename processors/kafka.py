"""The client of Kafka as ``kafka_source.py`` and ``kafka_sink.py`` use it: configuration, errors, values of records.

The client is confluent-kafka (librdkafka), the extra ``kafka``. It is imported on first use.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from cues import arguments, jsontext
from cues.errors import InvalidArgument, Unsupported

LOG: Final = logging.getLogger("cues.processors.kafka")
"""Log records of librdkafka, such as a broker that cannot be reached."""

TOLD_S: Final = 60.0
"""Seconds for which a line of librdkafka is not repeated: without a broker it says the same forty times a second."""

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
    """Import confluent_kafka. Raises :class:`cues.errors.Unsupported` if it is not installed."""
    try:
        import confluent_kafka
        import confluent_kafka.admin
    except ImportError as error:
        raise Unsupported("confluent-kafka is not installed.", "pip install 'cues-streams[kafka]'.") from error
    return confluent_kafka


def checked(servers: str, topic: str, config: Mapping[str, Any] | None, reserved: Mapping[str, str]) -> dict[str, Any]:
    """Return the user's options of librdkafka. Raises :class:`InvalidArgument` for one that is not the user's.

    ``reserved`` has the options that the processor sets, and what to use for each.
    """
    if not arguments.text_of("servers", servers) or not arguments.text_of("topic", topic):
        raise InvalidArgument(f"servers={servers!r}, topic={topic!r}: one is empty.", "give both, as 'host:9092'.")
    return arguments.options_of("config", config, {"bootstrap.servers": "use the first argument.", **reserved})


def client(kind: Callable[..., Any], servers: str, config: Mapping[str, Any], own: Mapping[str, Any]) -> Any:
    """Return a Consumer, Producer or AdminClient. Raises :class:`InvalidArgument` for an option that is unknown."""
    options = {
        "client.id": f"cues-{os.getpid()}",
        **config,
        **own,
        "bootstrap.servers": servers,
        "error_cb": lambda error: LOG.warning("%s", error),
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
