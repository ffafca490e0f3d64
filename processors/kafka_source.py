"""A source of the records of a Kafka topic, exactly once.

    graph.add(cues.Source("orders", Records("localhost:9092", "orders", follow=True)))

The position of each partition is kept by Cues, in the commit of the messages, and Kafka keeps none. The source is
assigned all partitions by that position; it joins no consumer group, so no rebalance can move it.

    1. compare     the topic is the one of the position, by its id
    2. assign      each partition from its offset and leader epoch, which the broker compares with its log; a partition
                   that is new, from its beginning
    3. read        committed records only (``read_committed``)
    4. discover    look for new partitions, every ``discover_s`` seconds

The position is ``[version, topic id, [[partition, next offset, leader epoch], …]]``.

**Messages.** ``shape="record"`` gives a message for each record::

    {"topic", "partition", "offset", "time": datetime | None, "key", "value", "headers": [[name, bytes | None], …]}

``shape="value"``, with ``value="json"``, gives the object in the value; the other fields are in the metadata, as
``process.metadata["kafka"]``. A record that cannot be decoded is a failed message that names its place.

**Lost records.** If records were deleted before they were read (retention), the source stops with
:class:`cues.MessagesPurged`, which names them. With ``on_gap="fail"`` this error is a failed message: it is written to
the error queue, and the source continues after the gap. A topic that was created again, or whose log was cut
(an unclean election), is :class:`cues.errors.Diverged`.

Not guaranteed: an order between partitions. A compacted topic gives what the compaction left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from cues import CuesError, MessagesPurged
from cues.arguments import check_number
from cues.errors import Away, Diverged, InvalidArgument
from cues.processors import SOURCE, checks, foreign, kafka, takes, waits

_VERSION: Final = 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_AT_ONCE: Final = 1_000
_LOOK_S: Final = 0.1
"""Seconds for which a read waits before the source looks whether the graph drains."""

_RESERVED: Final = {
    "enable.auto.commit": "leave it out: Cues keeps the position.",
    "enable.auto.offset.store": "leave it out: Cues keeps the position.",
    "isolation.level": "leave it out: the source reads committed records.",
    "auto.offset.reset": "use on_gap=, and start= for the first start.",
    "enable.partition.eof": "use follow=False to end at the end.",
}

Position = list[Any]


@takes(SOURCE)
class Records:
    """A source of the records of a topic; see the module. Give it to ``cues.Source(id, Records(...))``.

    ``servers``     addresses of brokers, ``"host:port,host:port"``
    ``topic``       its name
    ``value``       decoding of values: ``"bytes"``, ``"text"`` (UTF-8) or ``"json"``
    ``key``         decoding of keys, in the same way
    ``shape``       ``"record"``: messages with the record's fields; ``"value"``: the JSON object of the value
    ``follow``      True: wait for new records; otherwise the source ends at the end of each partition
    ``start``       of a first start: ``"earliest"`` or ``"latest"`` (until the first message was committed)
    ``on_gap``      records that were deleted unread: ``"raise"`` stops the source; ``"fail"`` is a failed message
    ``discover_s``  seconds between two looks for new partitions
    ``timeout_s``   seconds for which a request may take
    ``config``      more options of librdkafka, such as ``security.protocol``

    Kind: source
    Needs: extra `kafka`
    Guarantee: exactly once: each committed record is on the queue once, also after kill -9
    Mechanism: position of offset and leader epoch of each partition, committed with the messages
    """

    def __init__(
        self,
        servers: str,
        topic: str,
        *,
        value: str = "bytes",
        key: str = "bytes",
        shape: str = "record",
        follow: bool = False,
        start: str = "earliest",
        on_gap: str = "raise",
        discover_s: float = 30.0,
        timeout_s: float = 30.0,
        config: Mapping[str, Any] | None = None,
        reserved: Sequence[str] = (),
    ) -> None:
        self.may = foreign.allowed(reserved)
        self.servers, self.topic = servers, topic
        self.value, self.key, self.shape = value, key, shape
        self.follow, self.start, self.on_gap = follow, start, on_gap
        self.discover_s, self.timeout_s = discover_s, timeout_s
        self.config = kafka.checked(servers, topic, config, _RESERVED)
        self.__name__ = "records"
        check_number("discover_s", discover_s, 0)
        check_number("timeout_s", timeout_s, 0)
        for name, given, known in (
            ("value", value, tuple(kafka.DECODERS)),
            ("key", key, tuple(kafka.DECODERS)),
            ("shape", shape, kafka.SHAPES),
            ("start", start, ("earliest", "latest")),
            ("on_gap", on_gap, ("raise", "fail")),
        ):
            checks.one_of(name, given, known)
        checks.decoded(shape, "value", value)

    def __call__(self, position: Position | None, process: Any = None) -> Iterator[tuple[Position, Any]]:
        """Yield ``(position, message)`` after ``position``."""
        reading = Reading(self, position)
        try:
            if reading.begin(process):
                yield from reading.records(process)
        except kafka.library().KafkaException as error:
            raise _failed(self, error.args[0]) from error
        finally:
            reading.close()


class Reading:
    """One call of a source: its consumer, and the next offset of each partition."""

    def __init__(self, source: Records, position: Position | None) -> None:
        self._source = source
        self._lib = kafka.library()
        self._id, self._marks = _fields(position)
        self._first = position is None
        self._asked_again: set[tuple[int, int]] = set()
        self._unvalidated: dict[int, float] = {}
        """Partitions that were assigned by a position whose leader epoch is not yet compared, each with a deadline."""
        options = {
            "group.id": f"cues-{source.topic}",  # librdkafka asks for one; nothing is committed to it
            "fetch.wait.max.ms": 500 if source.follow else 10,  # a broker says so late that there is no more
            **source.config,
        }
        own = {
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
        }
        self._brokers = kafka.Brokers()
        self.consumer = kafka.client(self._lib.Consumer, source.servers, options, own, self._brokers)
        self._admin = kafka.Admin(source.servers, source.config)
        self._is_asked, self._asked_at = False, 0.0

    @property
    def position(self) -> Position:
        """The position after the last record."""
        return [_VERSION, self._id, [[partition, *mark] for partition, mark in sorted(self._marks.items())]]

    def begin(self, process: Any) -> bool:
        """Compare the topic with that of the position, and assign all partitions; False if the graph drains first."""
        self._ask()
        while not self._admin.is_answered(_LOOK_S):
            if waits.stops(process):
                return False
        count = self._layout()
        for partition in range(count):
            if partition not in self._marks:
                low, high = self._bounds(partition)
                self._marks[partition] = [high if self._first and self._source.start == "latest" else low, -1]
        self.consumer.assign([self._to_validate(partition) for partition in range(count)])
        return True

    def records(self, process: Any) -> Iterator[tuple[Position, Any]]:
        """Yield records until the end (``follow``: until the graph drains)."""
        ended: set[int] = set()
        while not waits.stops(process):
            self.validate()
            self._look()
            for message in self._next():
                error, partition = message.error(), message.partition()
                if partition in self._unvalidated and (
                    error is None or error.code() == self._lib.KafkaError._PARTITION_EOF
                ):
                    continue  # the seek has it read again
                if error is None:
                    if self._brokers.away_since is not None:
                        self._brokers.answered()
                    ended.discard(partition)
                    self._marks[partition] = [message.offset() + 1, _epoch_of(message)]
                    yield self.position, self._message(message)
                elif error.code() == self._lib.KafkaError._PARTITION_EOF:
                    ended.add(partition)
                elif error.code() == self._lib.KafkaError._AUTO_OFFSET_RESET:
                    yield from self._refused(partition, error)
                elif error.fatal() or not _passes(error, self._lib.KafkaError):
                    raise self._lib.KafkaException(error)
            if len(ended) == len(self._marks):
                if not self._source.follow:
                    return
                waits.answered(process)

    def close(self) -> None:
        """Close both clients."""
        self._admin.close()
        self.consumer.close()

    def _next(self) -> list[Any]:
        """Wait for a record, and return it with all that are there already; consume() alone waits for more of them."""
        message = self.consumer.poll(_LOOK_S)
        return [] if message is None else [message, *self.consumer.consume(_AT_ONCE, 0)]

    def _ask(self) -> None:
        asked, source = self._lib.TopicCollection([self._source.topic]), self._source
        self._is_asked, self._asked_at = True, time.monotonic()
        self._admin.ask(lambda client: client.describe_topics(asked, request_timeout=source.timeout_s)[source.topic])

    def _look(self) -> None:
        """Ask about the topic when ``discover_s`` is over or no broker is there; use the answer.

        librdkafka tells once that no broker is there, and then waits without a word; an answer tells that one is again.
        Raises ``KafkaException`` if there is no answer.
        """
        is_due = time.monotonic() - self._asked_at >= self._source.discover_s
        if not self._is_asked and (is_due or self._brokers.are_away):
            self._ask()
        if self._is_asked and self._admin.is_answered():
            count = self._layout()
            if self._source.follow:
                self._add(count)

    def _layout(self) -> int:
        """Return the number of partitions, as answered. Raises :class:`Diverged` if the topic is another one."""
        described = self._admin.answer()
        self._is_asked = False
        self._brokers.answered()
        count, id = len(described.partitions), str(described.topic_id or "")
        id = "" if set(id) <= set("A=") else id  # a broker without ids answers zeros
        if self._id and id and id != self._id:
            raise self._diverged(f"The topic has the id {id}, and the position is of the id {self._id}")
        if self._marks and count <= max(self._marks):
            raise self._diverged(f"The topic has {count} partitions, and the position has one {max(self._marks)}")
        self._id = self._id or id
        return count

    def _add(self, count: int) -> None:
        """Read the partitions that are new among so many, from their beginning."""
        new = [partition for partition in range(count) if partition not in self._marks]
        if not new:
            return
        try:
            self.consumer.list_topics(self._source.topic, self._source.timeout_s)  # so that the consumer knows them
            begin = {partition: [self._bounds(partition)[0], -1] for partition in new}
        except self._lib.KafkaException as error:
            if _passes(error.args[0], self._lib.KafkaError):
                return kafka.LOG.warning("no new partitions of %s yet: %s", self._source.topic, error)
            raise
        self._marks.update(begin)
        self.consumer.incremental_assign([self._place(partition) for partition in new])

    def _bounds(self, partition: int) -> tuple[int, int]:
        place = self._lib.TopicPartition(self._source.topic, partition)
        deadline = time.monotonic() + self._source.timeout_s
        low, high = kafka.patiently(
            lambda: self.consumer.get_watermark_offsets(place, timeout=self._source.timeout_s), deadline
        )
        return low, high

    def _place(self, partition: int) -> Any:
        offset, epoch = self._marks[partition]
        known = {"leader_epoch": epoch} if epoch >= 0 else {}
        return self._lib.TopicPartition(self._source.topic, partition, offset, **known)

    def _to_validate(self, partition: int) -> Any:
        """Return the place of a partition that is about to be assigned."""
        if self._marks[partition][1] >= 0:
            self._unvalidated[partition] = time.monotonic() + self._source.timeout_s
        return self._place(partition)

    def validate(self) -> None:
        """Have the broker compare leader epochs of positions with its logs: a seek does it, an assignment not.

        A seek is refused while the partition is not being read: not yet, or no longer, when the first fetch was
        faster than the seek and found that the log does not have the offset. That error comes as a message.
        """
        for partition, deadline in list(self._unvalidated.items()):
            try:
                self.consumer.seek(self._place(partition))
                del self._unvalidated[partition]
            except self._lib.KafkaException as error:
                if error.args[0].code() != self._lib.KafkaError._STATE or time.monotonic() > deadline:
                    raise

    def _refused(self, partition: int, error: Any) -> Iterator[tuple[Position, Any]]:
        """Decide about a position that the broker does not have: a gap, or another log."""
        low, high = self._bounds(partition)
        offset = self._marks[partition][0]
        if "truncation" in error.str() or offset > high or (partition, offset) in self._asked_again:
            raise self._diverged(
                f"The partition {partition} has the offsets {low} to {high}, and the position {offset}, of the leader"
                f" epoch {self._marks[partition][1]}, is of another log ({error.str()})"
            )
        if offset < low:
            yield self._gap(partition, low)
        else:  # a replica that was behind; once
            self._asked_again.add((partition, offset))
        self.consumer.incremental_unassign([self._lib.TopicPartition(self._source.topic, partition)])
        self._unvalidated.pop(partition, None)
        self.consumer.incremental_assign([self._to_validate(partition)])

    def _gap(self, partition: int, low: int) -> tuple[Position, Any]:
        source, offset = self._source, self._marks[partition][0]
        error = MessagesPurged(
            f"The records {offset} to {low - 1} of the topic {source.topic!r}, partition {partition}, were deleted"
            " before they were read: the retention of the topic is shorter than the source was behind.",
            "give the topic a longer retention. To continue without these records: on_gap='fail', which writes this"
            " error to the error queue.",
            queue=f"{source.topic}/{partition}",
            first=offset,
            last=low - 1,
        )
        if source.on_gap == "raise":
            raise error
        self._marks[partition] = [low, -1]
        return self.position, error

    def _diverged(self, text: str) -> Diverged:
        return Diverged(
            f"{text}: the topic {self._source.topic!r} was deleted and created again, or its log was cut.",
            "give the source another id, which begins at the start; or restore the topic.",
        )

    def _message(self, message: Any) -> Any:
        source = self._source
        place = {"topic": message.topic(), "partition": message.partition(), "offset": message.offset()}
        try:
            kind, ms = message.timestamp()
            fields = {
                **place,
                "time": None if kind == self._lib.TIMESTAMP_NOT_AVAILABLE else _EPOCH + timedelta(milliseconds=ms),
                "key": kafka.DECODERS[source.key](message.key()),
                "headers": [list(header) for header in message.headers() or []],
            }
            value = kafka.DECODERS[source.value](message.value())
            return foreign.shaped(source, "kafka", fields, "value", value)
        except (ValueError, OverflowError) as error:
            return InvalidArgument(
                f"The record {place['offset']} of the topic {source.topic!r}, partition {place['partition']}, cannot be"
                f" read as value={source.value!r}, key={source.key!r}, shape={source.shape!r}: {error}.",
                "correct the writer of the topic; or read it with value='bytes', and decode it in a stream.",
            )


def _fields(position: Position | None) -> tuple[str, dict[int, list[int]]]:
    if position is None:
        return "", {}
    checks.position_of(position, "cues.processors.kafka_source", 3)
    return position[1], {partition: [offset, epoch] for partition, offset, epoch in position[2]}


def _epoch_of(message: Any) -> int:
    epoch = message.leader_epoch()
    return -1 if epoch is None else epoch


def _passes(error: Any, codes: Any) -> bool:
    """Return whether librdkafka tries again by itself, or the next look may find what is missing."""
    return kafka.is_away(error) or error.code() == codes._UNKNOWN_PARTITION


def _failed(source: Records, error: Any) -> CuesError:
    text = f"The topic {source.topic!r} at {source.servers} cannot be read: {error.str()} ({error.name()})."
    hint = "start the graph again when the broker answers and the topic is there; the source continues at its position."
    if kafka.is_away(error):
        return Away(text, hint, what=f"{source.topic} at {source.servers}")
    return CuesError(text, hint)
