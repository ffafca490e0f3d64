"""A sink that writes messages into a Kafka topic exactly once: one Kafka transaction holds records and position.

    mirror = Topic("localhost:9092", "orders-copy")
    graph.add(mirror.sink("orders"))

    @graph.sink("priced", batch=True, checkpoint=Topic("localhost:9092", "priced", shape="value", key="id"))
    def save(priced, process):
        process.connection.write(priced)

The protocol is that of :mod:`cues.checkpoints.deliveries`. The row of the processor is the *metadata of a committed
offset*: of the consumer group ``cues.<processor>``, partition 0 of the topic. The group has no members.

    1. fence      at a start: init_transactions under ``cues.<store>.<processor>``. Kafka aborts the open transaction
                  of an earlier process, and refuses all that it does from now on
    2. read       the committed offset of the group, with stable offsets required
    3. admit      accept the delivery or refuse it; find the messages that are new
    4. produce    their records, in a transaction; wait until the brokers have them
    5. position   send_offsets_to_transaction: the row after this delivery
    6. commit     records and row, or neither

After a crash between 6 and the commit of the store the messages are delivered again, and 3 finds none of them new.

**Messages.** ``shape="record"``: a message has ``value``, and perhaps ``key``, ``headers`` (pairs, or a dict) and
``time`` (datetime); ``topic``, ``partition`` and ``offset`` of a source's record are allowed and ignored.
``shape="value"``: the message is the value, as JSON; ``key=`` names the field of its key. Keys choose partitions as in
Kafka's own clients (murmur2).

**Errors.** An error that ends the transaction aborts it. If the position says that it was not committed, the same
records are sent in a new one, for ``timeout_s``.
A record that the client or the broker refuses (too large) is a failure of its messages: they are written to the error
queue, or stop the sink. All else is :class:`cues.errors.CheckpointError`, which stops the sink at this message; a
later start continues there. :class:`cues.Fenced` says that another process took over the processor.

Not guaranteed: readers that do not read committed records (``isolation.level=read_committed``) see records of aborted
transactions. Kafka deletes committed offsets of a group without members after ``offsets.retention.minutes`` (7 days by
default): restart a sink that crashed before that. A topic that is deleted loses the position with the records.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import datetime
from typing import Any, Final

import cues
from cues import faults, jsontext
from cues.arguments import check_number, text_of
from cues.checkpoints import Row, Transaction, admit, write_once
from cues.errors import CheckpointError, InvalidArgument
from cues.overrides import override
from cues.processors import SINK, checks, kafka, takes

_RETRY_S: Final = 0.05
"""Seconds before an aborted transaction is tried again."""

_FIELDS: Final = {"value", "key", "headers", "time", "topic", "partition", "offset"}
_RESERVED: Final = {
    "transactional.id": "use prefix=: the rest names the store and the processor.",
    "transaction.timeout.ms": "use transaction_timeout_s=.",
    "enable.idempotence": "leave it out: transactions need it.",
    "partitioner": "leave it out: keys are placed as by Kafka's own clients; or use partition='same'.",
    "group.id": "use prefix=: the rest names the processor.",
    "isolation.level": "leave it out.",
}


def write(messages: Any, process: cues.Process) -> None:
    """Write the messages of a step to the topic of ``checkpoint=``: the function of :meth:`Topic.sink`."""
    process.connection.write(messages)


@takes(SINK)
class Topic(checks.Unshared):
    """A Kafka topic as the target of sinks (``checkpoint=``); see the module. The topic must exist.

    ``servers``                addresses of brokers, ``"host:port,host:port"``
    ``topic``                  its name
    ``shape``                  ``"record"``: messages have ``value``, ``key``, ``headers``, ``time``; ``"value"``: the
                               message is the value, as JSON
    ``key``                    with ``shape="value"``: the field of the key, or None
    ``partition``              ``"key"``: by the key, as Kafka's own clients; ``"same"``: the message's ``partition``
    ``timeout_s``              seconds for which a transaction, or a start, is tried
    ``transaction_timeout_s``  seconds after which Kafka aborts an open transaction; the broker's bound is
                               ``transaction.max.timeout.ms``
    ``prefix``                 of the transactional id and of the consumer group, for access rules
    ``config``                 more options of librdkafka, such as ``security.protocol`` or ``compression.type``

    Kind: sink
    Needs: extra `kafka`
    Guarantee: exactly once: each message is a committed record once, also after kill -9
    Mechanism: row of delivery in the metadata of a committed offset, in the Kafka transaction of the records
    """

    def __init__(
        self,
        servers: str,
        topic: str,
        *,
        shape: str = "record",
        key: str | None = None,
        partition: str = "key",
        timeout_s: float = 30.0,
        transaction_timeout_s: float = 60.0,
        prefix: str = "cues",
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.servers, self.topic, self.shape, self.key, self.partition = servers, topic, shape, key, partition
        self.timeout_s, self.transaction_timeout_s, self.prefix = timeout_s, transaction_timeout_s, prefix
        self.config = kafka.checked(servers, topic, config, _RESERVED)
        check_number("timeout_s", timeout_s, 0)
        check_number("transaction_timeout_s", transaction_timeout_s, 0)
        text_of("prefix", prefix)
        text_of("key", key or "")
        for name, given, known in (
            ("shape", shape, kafka.SHAPES),
            ("partition", partition, ("key", "same")),
        ):
            checks.one_of(name, given, known)
        if (shape == "record" and key is not None) or (shape == "value" and partition == "same"):
            raise InvalidArgument(
                f"shape={shape!r} with key={key!r}, partition={partition!r} do not fit.",
                "use key= with shape='value', whose messages have no field for it, and 'same' with shape='record'.",
            )
        self._reset()

    @override
    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._units: dict[str, Unit] = {}
        self._pid = 0

    def sink(self, inputs: Any, **options: Any) -> cues.Sink:
        """Return a sink that writes the messages of ``inputs`` as they are; ``options`` are those of ``cues.Sink``."""
        return cues.Sink(write, inputs, **{"batch": True, "checkpoint": self, "id": "save", **options})

    def transaction(self, process: cues.Process) -> AbstractContextManager[Transaction[Writer]]:
        """Run the block in a Kafka transaction with exactly the messages that are new to the topic.

        ``connection.write(messages)`` takes one message or a list. The end of the block commits; an exception aborts.
        Raises :class:`cues.Fenced` or :class:`cues.errors.Diverged` before the block runs, and
        :class:`cues.errors.CheckpointError` when Kafka fails.
        """
        with self._lock:
            if self._pid != os.getpid():  # a client cannot be used after a fork
                self._units, self._pid = {}, os.getpid()
            unit = self._units.setdefault(process.id, Unit(self, process.id, process.delivery.store))
            if unit.store != process.delivery.store:
                unit = self._units[process.id] = Unit(self, process.id, process.delivery.store)
        return write_once(_Positions(unit, process.delivery), process, Transaction)

    def holds(self, processors: Iterable[str]) -> list[str]:
        """Return those of the processors that have a position in Kafka: the topic refuses them from another store."""
        with contextlib.closing(kafka.Admin(self.servers, self.config)) as admin:
            admin.ask(lambda client: client.list_consumer_groups(request_timeout=self.timeout_s))
            listed = admin.answer().valid
        groups = {group.group_id.removeprefix(f"{self.prefix}.") for group in listed}
        known: dict[str, list[str]] = {}
        for id in groups:
            known.setdefault(id.partition("/")[0], []).append(id)
        return [
            processor
            for processor in processors
            if any(_glance(self, f"{self.prefix}.{id}") for id in known.get(processor, ()))
        ]

    @property
    def where(self) -> str:
        """The topic and its servers, for error messages."""
        return f"{self.topic} at {self.servers}"

    def close(self) -> None:
        """Close the connections. The next transaction opens new ones."""
        with self._lock:
            units, self._units = list(self._units.values()), {}
        for unit in units:
            with unit.lock:
                unit.drop()


takes({**SINK, "checkpoint": Topic})(write)


class Writer:
    """The open transaction of a :class:`Topic`. Use it inside its block, in one thread."""

    def __init__(self, unit: Unit, delivery: cues.Delivery) -> None:
        self._unit, self._delivery = unit, delivery
        self._topic = unit.topic
        self._lib = kafka.library()
        self._records: list[dict[str, Any]] = []
        self._failed: list[Any] = []
        self.before: Row | None = None
        self.row: Row | None = None

    def write(self, messages: Any) -> None:
        """Write one message or a list of messages, and wait until the brokers have their records.

        Raises :class:`cues.errors.InvalidArgument` for a message that is not a record, or that Kafka refuses.
        """
        messages = [messages] if isinstance(messages, dict) else list(messages)
        records = [self._record(message) for message in messages]
        self._records += records
        self._send(records)

    def _record(self, message: dict[str, Any]) -> dict[str, Any]:
        topic = self._topic
        if topic.shape == "value":
            key = None if topic.key is None else message.get(topic.key)
            if topic.key is not None and key is None:
                raise _misfit(f"it has no {topic.key!r}, the key=", "add the field, or use key=None")
            return {"value": _json(message), "key": kafka.encoded(key)}
        if "value" not in message or not message.keys() <= _FIELDS:
            raise _misfit(
                f"it has the fields {', '.join(map(repr, message))}, and a record has {', '.join(sorted(_FIELDS))}",
                "shape='value', or a stream before the sink that returns these fields",
            )
        record: dict[str, Any] = {"value": kafka.encoded(message["value"]), "key": kafka.encoded(message.get("key"))}
        headers, at = message.get("headers") or [], message.get("time")
        pairs = headers.items() if isinstance(headers, dict) else headers
        record["headers"] = [(str(name), kafka.encoded(value)) for name, value in pairs]
        if at is not None:
            if not isinstance(at, datetime) or at.tzinfo is None:
                raise _misfit(f"its time is {at!r}", "an aware datetime")
            record["timestamp"] = round(at.timestamp() * 1000)
        if topic.partition == "same":
            if not isinstance(message.get("partition"), int):
                raise _misfit("it has no 'partition', which partition='same' needs", "partition='key'")
            record["partition"] = message["partition"]
        return record

    def _send(self, records: list[dict[str, Any]]) -> None:
        producer, deadline = self._unit.producer, time.monotonic() + self._topic.timeout_s
        failures: list[tuple[Any, int]] = []
        for number, record in enumerate(records):

            def delivered(error: Any, _: Any, number: int = number) -> None:
                if error is not None:
                    failures.append((error, number))

            while True:
                try:
                    producer.produce(self._topic.topic, on_delivery=delivered, **record)
                    break
                except BufferError:
                    if time.monotonic() > deadline:
                        raise
                    producer.poll(_RETRY_S)
                except self._lib.KafkaException as refused:
                    if refused.args[0].code() not in self._refusals:
                        raise
                    failures.append((refused.args[0], number))
                    break
        while producer.flush(kafka.POLL_S) and time.monotonic() < deadline:
            self._unit.brokers.raise_if_away()
        if len(producer):
            failures.append((self._lib.KafkaError(self._lib.KafkaError._TIMED_OUT), 0))
        for error, number in failures:
            if error.code() in self._refusals:
                value, key = records[number]["value"], records[number]["key"]
                raise InvalidArgument(
                    f"Kafka refuses the record {number + 1} of {len(records)} for {self._topic.topic!r}, with the key"
                    f" {key!r:.80} and a value of {len(value or b''):,} bytes: {error.str()}.",
                    "write smaller messages; or raise max.message.bytes of the topic, message.max.bytes in config=.",
                )
        self._failed += [error for error, _ in failures]

    @property
    def _refusals(self) -> tuple[int, ...]:
        """The errors that are of a record, and not of the broker."""
        codes = self._lib.KafkaError
        return (
            codes.MSG_SIZE_TOO_LARGE, codes.RECORD_LIST_TOO_LARGE, codes.INVALID_MSG, codes.INVALID_MSG_SIZE,
            codes.INVALID_TIMESTAMP, codes.INVALID_RECORD, codes.POLICY_VIOLATION, codes._UNKNOWN_PARTITION,
        )  # fmt: skip

    def commit(self) -> None:
        """Send the position and commit. A transaction that must be aborted is aborted, and sent again."""
        unit, deadline = self._unit, time.monotonic() + self._topic.timeout_s
        again = bool(self._failed)
        while True:
            try:
                if again and self._is_committed_or_sent_again():
                    return
                if self.row is not None and self.row != self.before:
                    kafka.patiently(lambda: unit.send_position(self.row), deadline)
                faults.point("kafka.positioned")
                kafka.patiently(lambda: unit.producer.commit_transaction(self._topic.timeout_s), deadline)
                return
            except self._lib.KafkaException as error:
                reason = error.args[0]
                fenced = reason.code() == self._lib.KafkaError._FENCED
                ended = reason.fatal() or reason.txn_requires_abort()
                if fenced or not ended or time.monotonic() > deadline:
                    raise
                kafka.LOG.warning("the transaction of %s is aborted and tried again: %s", unit.id, reason)
                time.sleep(_RETRY_S)
                again = True

    def _is_committed_or_sent_again(self) -> bool:
        """Abort. If the position says that the transaction was committed, return True; else send all records again.

        An abort can succeed after a commit whose answer was lost, and a client can be beyond an abort.
        """
        unit = self._unit
        try:
            unit.abort()
        except self._lib.KafkaException as error:
            if error.args[0].code() == self._lib.KafkaError._FENCED:
                raise
            unit.drop()  # the fence of the next clients aborts
            unit.open(self._delivery)
        row = unit.read()
        if row == self.row != self.before:
            return True
        if row != self.before:
            raise CheckpointError(
                f"The position of {unit.id} at {self._topic.where} was changed by another process.",
                "end the other process, such as one over a copy of the store, and start this one again.",
                where=self._topic.where,
            )
        unit.producer.begin_transaction()
        self._failed = []
        self._send(self._records)
        if self._failed:
            raise self._lib.KafkaException(self._failed[0])
        return False


class Unit:
    """The clients of one processor (of one partition of it). ``lock`` is held during a transaction."""

    def __init__(self, topic: Topic, id: str, store: str) -> None:
        self.topic, self.id, self.store = topic, id, store
        self.group = f"{topic.prefix}.{id}"
        self.lock = threading.Lock()
        self.producer: Any = None
        self.brokers = kafka.Brokers()
        self._consumer: Any = None

    def open(self, delivery: cues.Delivery) -> None:
        """Connect, and fence earlier processes, unless that is done."""
        if self.producer is not None:
            self.producer.poll(0)
            if self.brokers.away_since is not None:  # perhaps no longer: a look tells soon; a producer's calls wait
                _glance(self.topic, self.group)
                self.brokers.answered()
            return
        # A process that was replaced must not fence its successor, so it looks first. The look is only a courtesy:
        # the position that counts is read after the fence.
        admit(self.id, _glance(self.topic, self.group), delivery)
        lib, topic, brokers = kafka.library(), self.topic, kafka.Brokers()
        producer = kafka.client(
            lib.Producer,
            topic.servers,
            # With "rebootstrap", the default, send_offsets_to_transaction never returns after all brokers were away for
            # a moment (librdkafka 2.16).
            {"linger.ms": 5, "metadata.recovery.strategy": "none", **topic.config},
            {
                "transactional.id": f"{topic.prefix}.{self.store}.{self.id}",
                "transaction.timeout.ms": int(topic.transaction_timeout_s * 1000),
                "partitioner": "murmur2_random",
            },
            brokers,
        )
        own = {"group.id": self.group, "enable.auto.commit": False, "isolation.level": "read_committed"}
        self._consumer = kafka.client(lib.Consumer, topic.servers, kafka.connections(topic.config), own)
        deadline = time.monotonic() + topic.timeout_s
        kafka.patiently(lambda: producer.init_transactions(topic.timeout_s), deadline)
        self.producer, self.brokers = producer, brokers
        faults.point("kafka.fenced")

    def read(self) -> Row | None:
        """Return the committed row. Waits while a transaction that holds another one is open."""
        lib, timeout_s = kafka.library(), self.topic.timeout_s
        asked = [lib.TopicPartition(self.topic.topic, 0)]
        (place,) = self._consumer.committed(asked, timeout_s)
        if place.error is not None:
            raise lib.KafkaException(place.error)
        return _row_of(self.topic, self.group, place)

    def send_position(self, row: Row | None) -> None:
        """Add the row to the transaction."""
        assert row is not None
        metadata = json.dumps(row.listed(), separators=(",", ":"))
        place = kafka.library().TopicPartition(self.topic.topic, 0, sum(row.ends.values()), metadata)
        self.producer.send_offsets_to_transaction(
            [place], self._consumer.consumer_group_metadata(), self.topic.timeout_s
        )

    def abort(self) -> None:
        """Abort the transaction."""
        deadline = time.monotonic() + self.topic.timeout_s
        kafka.patiently(lambda: self.producer.abort_transaction(self.topic.timeout_s), deadline)

    def drop(self) -> None:
        """Forget the clients. What they left open is aborted by the fence of the next ones."""
        if self.producer is not None:
            self.producer.purge()
        if self._consumer is not None:
            self._consumer.close()
        self.producer = self._consumer = None


class _Positions:
    """The committed offset of a group as a table of positions (:class:`cues.checkpoints.PositionTable`)."""

    def __init__(self, unit: Unit, delivery: cues.Delivery) -> None:
        self._unit, self._delivery = unit, delivery
        self.where = unit.topic.where

    @contextmanager
    def begin(self) -> Iterator[Writer]:
        unit, lib = self._unit, kafka.library()
        with unit.lock:
            try:
                unit.open(self._delivery)
                unit.producer.begin_transaction()
                writer = Writer(unit, self._delivery)
                try:
                    yield writer
                    writer.commit()
                except lib.KafkaException:
                    raise
                except BaseException:
                    try:
                        unit.abort()
                    except lib.KafkaException:
                        unit.drop()
                    raise
            except lib.KafkaException as error:
                unit.drop()
                raise self._failure(error.args[0]) from error

    def read(self, connection: Writer, processor: str, *, lock: bool) -> Row | None:
        if lock:
            connection.before = self._unit.read()
            return connection.before
        return connection.row

    def write(self, connection: Writer, processor: str, row: Row, *, insert: bool) -> bool:
        connection.row = row
        return True

    def is_open(self, connection: Writer) -> bool:
        return self._unit.producer is not None

    def processors(self, connection: Writer) -> Iterable[str]:
        return [self._unit.id]

    def _failure(self, error: Any) -> cues.CuesError:
        unit, codes = self._unit, kafka.library().KafkaError
        hint = "start the graph again when the brokers answer; the sink continues at this message."
        if error.code() == codes._FENCED:
            with contextlib.suppress(kafka.library().KafkaException):
                admit(unit.id, _glance(unit.topic, unit.group), self._delivery)  # raises Fenced after a takeover
            hint = (
                "end the other process, such as one over a copy of the store, and start this one again; if the"
                " transaction was open for longer, raise transaction_timeout_s= or lower batch_size=."
            )
            return CheckpointError(
                f"Kafka fenced the sink {unit.id}: another process has the transactional id"
                f" {unit.topic.prefix}.{unit.store}.{unit.id}, or the transaction was open for more than"
                f" {unit.topic.transaction_timeout_s:g} s. Nothing of this transaction was committed.",
                hint,
                where=self.where,
            )
        if error.code() in (codes.UNKNOWN_TOPIC_OR_PART, codes._UNKNOWN_TOPIC, codes._UNKNOWN_PARTITION):
            hint = "create the topic; the sink does not, because its number of partitions decides where keys are."
        elif error.code() == codes.OFFSET_METADATA_TOO_LARGE:
            hint = "raise offset.metadata.max.bytes of the broker, or give the sink fewer inputs."
        return CheckpointError(
            f"Kafka failed for {self.where}: {error.str()} ({error.name()}).",
            hint,
            where=self.where,
            away=kafka.is_away(error),
        )


def _glance(topic: Topic, group: str) -> Row | None:
    """Return the last committed row of a group, at once, whatever transactions are open."""
    return _row_of(topic, group, kafka.committed(topic.servers, topic.config, group, topic.topic, topic.timeout_s))


def _row_of(topic: Topic, group: str, place: Any) -> Row | None:
    if place.offset < 0:
        return None
    try:
        kept: Any = json.loads(place.metadata or "")
    except ValueError:
        kept = place.metadata
    return Row.kept(
        kept,
        f"The group {group!r} with the offset {place.offset} of {topic.topic!r}",
        "use another prefix=, or delete the group if it is of another program. A broker that does not keep the"
        " metadata of offsets in transactions cannot be a target.",
    )


def _json(message: Any) -> bytes:
    try:
        return jsontext.encode(message).encode()
    except (TypeError, ValueError) as error:
        raise _misfit(f"JSON cannot hold it ({error})", "a stream before the sink that returns JSON values") from error


def _misfit(problem: str, instead: str) -> InvalidArgument:
    return InvalidArgument(f"The message is not a record for Kafka: {problem}.", f"{instead}.")
