"""A source of the records of a Kinesis stream, exactly once; ``kinesis.py`` has the protocol."""

from __future__ import annotations

import contextlib
import heapq
import importlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final

from cues import MessagesPurged, arguments
from cues.arguments import check_number
from cues.errors import Away, Diverged, InvalidArgument
from cues.processors import SOURCE, aws, checks, foreign, kafka, kpl, takes, waits

PAUSE_S: Final = 0.2
"""Seconds between two reads of a shard: Kinesis allows 5 in a second, for all its readers."""
SHARD_BYTES_S: Final = 2_000_000
"""Bytes that Kinesis gives of a shard in a second; one answer may have those of five seconds."""

_VERSION: Final = 1
_THREADS: Final = 10
"""Shards that are read at the same time: the connections of a client of boto3, and the answers that are in memory, of
up to 10 MB each."""
_THROTTLED: Final = ("ProvisionedThroughputExceededException", "KMSThrottlingException", "LimitExceededException")
_FIRST_PAUSE_S: Final = 0.5
_PAUSE_MAX_S: Final = 10.0
_PATIENCE_S: Final = 60.0
"""Seconds for which a shard may be throttled before the source says that Kinesis is away."""
_NOTED_MS: Final = 3_600_000
"""Milliseconds without a record after which the position of a shard notes that there was none: an hour, because the
shortest retention is a day."""
_SLACK_MS: Final = 60_000
"""Milliseconds by which the clock of Kinesis, and the times of its records, may differ."""
_FOUND_MS: Final = 2_000
"""Milliseconds for which a record that was found and has none after it need not be looked for again."""
_LIST_S: Final = 5.0
"""Seconds between two looks for the children of a shard that has ended."""

Position = list[Any]
_log = logging.getLogger("cues.processors")


@takes(SOURCE)
class KinesisStream:
    """A source of the records of a stream; see ``kinesis.py``. Give it to ``cues.Source(id, KinesisStream(...))``.

    ``stream``        its name, or its ARN
    ``data``          decoding of data: ``"bytes"``, ``"text"`` (UTF-8) or ``"json"``
    ``shape``         ``"record"``: messages with the record's fields; ``"value"``: the JSON object of the data
    ``follow``        True: wait for new records; otherwise the source ends when it has read each shard to its end
    ``start``         of a first start: ``"earliest"``, ``"latest"``, or an aware datetime: records that arrived then or
                      later
    ``on_gap``        records that were removed unread: ``"raise"`` stops the source; ``"fail"`` is a failed message
    ``poll_s``        seconds between two reads of a shard whose records were all read, at least 0.2
    ``timeout_s``     seconds for which a request may take
    ``endpoint_url``  the URL of another server, for example ``"http://localhost:5000"``
    ``region``        such as ``"eu-west-1"``; None: that of the ARN, or of boto3
    ``client``        a function that returns a boto3 client, for credentials, proxies and the like
    ``reserved``      ``"q/type"`` or ``"q/topics"``, which data may set then (:mod:`cues.processors.foreign`)

    Kind: source
    Needs: extra `kinesis`
    Guarantee: exactly once: each record is on the queue once, also after kill -9, splits and merges; in order for each partition key
    Mechanism: position of the sequence number of each shard, committed with the messages; children of a shard after its end
    """  # noqa: E501

    def __init__(
        self,
        stream: str,
        *,
        data: str = "bytes",
        shape: str = "record",
        follow: bool = False,
        start: str | datetime = "earliest",
        on_gap: str = "raise",
        poll_s: float = 1.0,
        timeout_s: float = 30.0,
        endpoint_url: str | None = None,
        region: str | None = None,
        client: Callable[[], Any] | None = None,
        reserved: Sequence[str] = (),
    ) -> None:
        self.may = foreign.allowed(reserved)
        self.data, self.shape, self.follow, self.start, self.on_gap = data, shape, follow, start, on_gap
        self.poll_s = poll_s
        self.kinesis = Kinesis(stream, timeout_s, endpoint_url, region, client)
        self.stream = stream
        self.__name__ = "kinesis"
        check_number("poll_s", poll_s, PAUSE_S)
        for name, given, known in (
            ("data", data, tuple(kafka.DECODERS)),
            ("shape", shape, kafka.SHAPES),
            ("follow", follow, (True, False)),
            ("on_gap", on_gap, ("raise", "fail")),
        ):
            checks.one_of(name, given, known)
        if isinstance(start, datetime):
            if start.tzinfo is None or start > datetime.now(UTC):
                raise InvalidArgument(
                    f"start={start!r} has no zone, or is in the future.", "give an aware datetime of the past."
                )
        elif start not in ("earliest", "latest"):
            raise InvalidArgument(f"start={start!r:.60} is unknown.", "use 'earliest', 'latest' or an aware datetime.")
        checks.decoded(shape, "data", data)

    def __call__(self, position: Position | None, process: Any = None) -> Iterator[tuple[Position, Any]]:
        """Yield ``(position, message)`` after ``position``."""
        with aws.said(self.kinesis.what):
            reading = Reading(self, position)
            try:
                yield from reading.records(process)
            finally:
                reading.close()


class Kinesis:
    """A stream and how to reach it: what the source and the sink have in common."""

    def __init__(self, stream: str, timeout_s: float, endpoint_url: Any, region: Any, client: Any) -> None:
        if not arguments.text_of("stream", stream) or (stream.startswith("arn:") and stream.count(":") != 5):
            raise InvalidArgument(f"stream={stream!r:.100} is not a stream.", "give its name, or its ARN.")
        self.named = {"StreamARN": stream} if stream.startswith("arn:") else {"StreamName": stream}
        self.what = f"The stream {stream}"
        check_number("timeout_s", timeout_s, 0.001)
        for name, given in (("endpoint_url", endpoint_url), ("region", region)):
            if given is not None and not arguments.text_of(name, given):
                raise InvalidArgument(f"{name}= is empty.", "leave it out.")
        if endpoint_url is not None and not endpoint_url.startswith(("http://", "https://")):
            raise InvalidArgument("endpoint_url= is not a URL of http or https.", "give 'http://localhost:5000'.")
        if endpoint_url is not None and any(sign in endpoint_url for sign in "@?#"):  # errors of boto3 show the URL
            raise InvalidArgument(
                "endpoint_url= has a user, a password or a query.", "leave them out: boto3 finds the credentials."
            )
        aws.check_library("kinesis", client)
        if region is None and stream.startswith("arn:"):
            region = stream.split(":")[3]
        self._timeout_s, self._endpoint_url, self._region, self._make = timeout_s, endpoint_url, region, client

    def client(self) -> Any:
        """Return a new client. It tries a request twice: pauses are those of the processor, which says so."""
        config = importlib.import_module("botocore.config").Config(
            connect_timeout=self._timeout_s,
            read_timeout=self._timeout_s,
            retries={"mode": "standard", "total_max_attempts": 2},
        )
        options = {"endpoint_url": self._endpoint_url, "region_name": self._region, "config": config}
        return aws.client_of("kinesis", self._make, **options)


class Shard:
    """A shard that is not read to its end: its place in the position, and its next read."""

    def __init__(self, id: str, sequence: str = "", part: int = 0, until_ms: int = 0) -> None:
        self.id = id
        self.sequence = sequence
        """The sequence number of the last record; empty: there was none."""
        self.part = part
        """Records that were taken of an aggregated record; 0: all."""
        self.until_ms = until_ms
        """The time up to which nothing followed the last record, or from which the shard is read; 0: not known."""
        self.iterator: str | None = None
        self.compared = False
        """True if the record of the position was found, or is known to be gone."""
        self.asked = self.caught_up = False
        self.due = self.pause_s = self.refused_at = 0.0
        self.seen_ms = 0.0
        """Arrival of the last record that this call has read."""
        self.read_ms = 0.0
        """The time up to which this call has read the shard, also where it had no records; 0: not known."""

    def place(self) -> list[Any]:
        return [self.id, self.sequence, self.part, self.until_ms]

    def opening(self) -> dict[str, Any]:
        """Return the arguments of the iterator that begins with the record of the position."""
        if self.sequence:
            return {"ShardIteratorType": "AT_SEQUENCE_NUMBER", "StartingSequenceNumber": self.sequence}
        if self.until_ms:
            at = datetime.fromtimestamp(self.until_ms / 1000, UTC)
            return {"ShardIteratorType": "AT_TIMESTAMP", "Timestamp": at}
        return {"ShardIteratorType": "TRIM_HORIZON"}


class Reading:
    """One call of a source: its shards, and the threads that read them."""

    def __init__(self, source: KinesisStream, position: Position | None) -> None:
        self._source, self._named = source, source.kinesis.named
        self._created, self._shards, self._ended = _fields(position)
        self._first = position is None
        self._parents: dict[str, set[str]] = {}
        self._closed: set[str] = set()
        self._childless: set[str] = set()
        """Ended shards whose children are not listed yet."""
        self._listed_at = 0.0
        self._client = source.kinesis.client()
        self._retention_ms = self._ahead_ms = 0.0
        self._asked: queue.SimpleQueue[Shard | None] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[tuple[Shard, Any, float]] = queue.SimpleQueue()
        """Answers and errors, and the time of Kinesis at which they came."""
        self._places: dict[str, list[Any]] = {}
        self._ends: list[str] = []
        """The parts of the last position: other shards keep theirs for the next one."""
        self._threads: list[threading.Thread] = []

    def _pack(self) -> Position:
        """Return the position, with all shards as they are now."""
        self._places = {id: shard.place() for id, shard in self._shards.items()}
        self._ends = sorted(self._ended)
        return [_VERSION, self._created, [*self._places.values()], self._ends]

    def _after(self, shard: Shard) -> Position:
        """Return the position after a record: only the place of its shard is made anew."""
        self._places[shard.id] = shard.place()
        return [_VERSION, self._created, [*self._places.values()], self._ends]

    def records(self, process: Any) -> Iterator[tuple[Position, Any]]:
        """Yield records until the end (``follow``: until the graph drains)."""
        source = self._source
        self._compare()
        yield from self._list()
        if self._first:
            self._start()
            yield self._pack(), None  # "latest" is now, also for a restart before the first record
        while not waits.stops(process):
            wait_s = self._ask()
            try:
                shard, answer, at_ms = self._answers.get(timeout=wait_s)
            except queue.Empty:
                pass
            else:
                shard.asked = False
                if self._shards.get(shard.id) is shard:  # else it is gone since it was asked
                    yield from self._answered(shard, answer, at_ms)
            if self._childless and source.follow and time.monotonic() - self._listed_at >= _LIST_S:
                yield from self._list()
            if all(shard.caught_up for shard in self._shards.values()):
                if not source.follow:
                    return
                waits.answered(process)

    def close(self) -> None:
        """End the threads, each after its request."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._asked.get_nowait()
        for _ in self._threads:
            self._asked.put(None)

    # --- the stream and its shards ---

    def _compare(self) -> None:
        """Compare the stream with that of the position. Raises :class:`Diverged`."""
        answer = self._client.describe_stream_summary(**self._named)
        summary = answer["StreamDescriptionSummary"]
        what = self._source.kinesis.what
        if summary["StreamStatus"] == "CREATING":
            raise Away(f"{what} is being created.", "start the graph again when it is there.", what=what)
        created = round(summary["StreamCreationTimestamp"].timestamp() * 1000)
        if self._created not in (0, created):
            raise Diverged(
                f"{what} was created at {_text(created)}, and the position is of one created at"
                f" {_text(self._created)}: it was deleted and created again.",
                "give the source another id, which begins at the start.",
            )
        self._created = created
        self._retention_ms = summary["RetentionPeriodHours"] * 3_600_000
        date = answer["ResponseMetadata"]["HTTPHeaders"].get("date")
        if date:
            self._ahead_ms = time.time() * 1000 - parsedate_to_datetime(date).timestamp() * 1000

    def _now_ms(self) -> int:
        """Return the time of Kinesis."""
        return round(time.time() * 1000 - self._ahead_ms)

    def _start(self) -> None:
        """Set the places of a first start."""
        start, open_ones = self._source.start, self._shards.keys() - self._closed
        if isinstance(start, datetime):
            at_ms = round(start.timestamp() * 1000)
            if at_ms > self._now_ms() - self._retention_ms:
                for shard in self._shards.values():
                    shard.until_ms = at_ms
        elif start == "latest":
            now_ms = self._now_ms()
            self._ended |= self._shards.keys() - open_ones
            self._shards = {id: self._shards[id] for id in sorted(open_ones)}
            for shard in self._shards.values():
                shard.until_ms = now_ms
                kind = {"ShardId": shard.id, "ShardIteratorType": "LATEST"}
                shard.iterator = self._client.get_shard_iterator(**self._named, **kind)["ShardIterator"]

    def _list(self) -> Iterator[tuple[Position, Any]]:
        """List the shards, and take those that are new. Yield the error of each that is gone before its end."""
        self._listed_at = time.monotonic()
        answer = self._client.list_shards(**self._named)
        listed = {one["ShardId"]: one for one in answer["Shards"]}
        while answer.get("NextToken"):
            answer = self._client.list_shards(NextToken=answer["NextToken"])
            listed.update((one["ShardId"], one) for one in answer["Shards"])
        names = ("ParentShardId", "AdjacentParentShardId")
        self._parents = {id: {one[name] for name in names if one.get(name)} for id, one in listed.items()}
        self._closed = {id for id, one in listed.items() if one["SequenceNumberRange"].get("EndingSequenceNumber")}
        self._ended &= listed.keys()
        self._childless = self._ended - set[str]().union(*self._parents.values())
        gone = [self._shards.pop(id) for id in list(self._shards) if id not in listed]
        for id in sorted(listed):
            if id not in self._shards and id not in self._ended:
                self._shards[id] = Shard(id)
        self._pack()
        for shard in gone:
            yield self._pack(), self._gap(shard, "the shard is no longer there", 0)

    def _gap(self, shard: Shard, reason: str, next: int) -> MessagesPurged:
        """Return the error of a gap, or raise it."""
        source = self._source
        error = MessagesPurged(
            f"Records of the stream {source.stream!r}, {shard.id}, after {shard.sequence or 'its start'}, may have been"
            f" removed before they were read ({reason}): the retention of the stream, {self._retention_ms / 3.6e6:g}"
            " hours, is shorter than the source was behind.",
            "give the stream a longer retention. To continue without these records: on_gap='fail', which writes this"
            " error to the error queue.",
            queue=f"{source.stream}/{shard.id}",
            first=int(shard.sequence or 0) + 1,
            last=max(next - 1, int(shard.sequence or 0) + 1),
        )
        if source.on_gap == "raise":
            raise error
        return error

    # --- reads ---

    def _ask(self) -> float:
        """Give free threads the shards that are due for longest; return the seconds for which to wait for an answer."""
        now, shards = time.monotonic(), self._shards
        free = _THREADS - sum(shard.asked for shard in shards.values())
        able = (shard for id, shard in shards.items() if not (shard.asked or self._parents[id] & shards.keys()))
        for shard in heapq.nsmallest(free, able, key=lambda shard: shard.due):
            if shard.due > now:
                return min(waits.LOOK_S, shard.due - now)
            shard.asked, shard.due = True, now + PAUSE_S
            self._asked.put(shard)
            if len(self._threads) < min(_THREADS, len(self._shards)):
                thread = threading.Thread(target=self._read, name="cues kinesis", daemon=True)
                self._threads.append(thread)
                thread.start()
        return waits.LOOK_S

    def _read(self) -> None:
        """Read shards, in a thread."""
        for shard in iter(self._asked.get, None):
            try:
                if shard.iterator is None:
                    asked = {**self._named, "ShardId": shard.id, **shard.opening()}
                    shard.iterator = self._client.get_shard_iterator(**asked)["ShardIterator"]
                arn = {name: value for name, value in self._named.items() if name == "StreamARN"}
                answer = self._client.get_records(ShardIterator=shard.iterator, **arn)
            except BaseException as error:
                answer = error
            self._answers.put((shard, answer, self._now_ms()))

    def _answered(self, shard: Shard, answer: Any, at_ms: float) -> Iterator[tuple[Position, Any]]:
        if isinstance(answer, BaseException):
            yield from self._refused(shard, answer)
            return
        shard.pause_s = shard.refused_at = 0.0
        records, behind_ms = answer["Records"], answer.get("MillisBehindLatest") or 0
        if shard.compared and 0 < shard.read_ms < at_ms - self._retention_ms and (shard.sequence or shard.until_ms):
            # Records between the last one and the first of this answer may have been removed, and only the last one
            # tells: as long as it is there, so are those after it. The answer is dropped.
            self._reopen(shard)
            return
        shard.iterator = answer.get("NextShardIterator")
        shard.read_ms = at_ms - behind_ms
        shard.caught_up = not behind_ms and shard.iterator is not None
        if not shard.compared:
            first = records[0]["SequenceNumber"] if records else ""
            # An iterator at a record that is gone may give nothing for ever, and say that it is a whole retention late.
            late = behind_ms >= self._retention_ms - _SLACK_MS
            shard.compared = bool(first) or shard.caught_up or shard.iterator is None or late
            found = bool(shard.sequence) and first == shard.sequence
            if shard.compared and not found and self._may_have_lost(shard):
                error = self._gap(shard, "its record is no longer there", int(first or 0))
                shard.iterator, shard.caught_up = None, False
                shard.sequence, shard.part, shard.until_ms, shard.read_ms = "", 0, 0, 0.0
                yield self._pack(), error
                return
            if found and len(records) == 1:
                shard.read_ms = max(shard.read_ms, at_ms - self._retention_ms + _FOUND_MS)
            elif late and not records and shard.sequence and shard.iterator is not None:
                # Nothing was lost, so the shard goes on at the time up to which nothing followed the record.
                shard.iterator, shard.sequence, shard.part, shard.read_ms = None, "", 0, 0.0
                return
        size = 0
        for record in records:
            size += len(record["Data"])
            yield from self._taken(shard, record)
        shard.due += size / SHARD_BYTES_S
        if shard.iterator is None:
            del self._shards[shard.id]
            self._ended.add(shard.id)
            yield self._pack(), None  # else the retention of what is read would look like a gap
            yield from self._list()
        elif shard.caught_up:
            shard.due += self._source.poll_s - PAUSE_S
            if self._now_ms() - max(shard.seen_ms, self._places[shard.id][3]) > _NOTED_MS:
                shard.until_ms = self._now_ms() - _SLACK_MS
                yield self._pack(), None

    def _reopen(self, shard: Shard) -> None:
        """Have the next read begin at the record of the position, and look whether it is still there."""
        shard.until_ms = max(shard.until_ms, round(shard.read_ms) - _SLACK_MS)
        shard.iterator, shard.compared, shard.caught_up, shard.read_ms = None, False, False, 0.0

    def _may_have_lost(self, shard: Shard) -> bool:
        """Return whether the retention may have removed a record after the last one, which is gone."""
        if not shard.sequence and not shard.until_ms:
            return False  # it is read from the oldest record on
        return shard.until_ms < self._now_ms() - self._retention_ms

    def _taken(self, shard: Shard, record: dict[str, Any]) -> Iterator[tuple[Position, Any]]:
        sequence, begin = record["SequenceNumber"], 0
        if sequence == shard.sequence:
            if not shard.part:
                return
            begin = shard.part
        shard.seen_ms = record["ApproximateArrivalTimestamp"].timestamp() * 1000
        parts = kpl.parts_of(record["Data"])
        if parts is None:
            shard.sequence, shard.part, shard.until_ms = sequence, 0, 0
            yield self._after(shard), self._message(shard.id, record, None, record["PartitionKey"], record["Data"])
            return
        for part, (key, data) in enumerate(parts[begin:], begin):
            shard.sequence, shard.part, shard.until_ms = sequence, (part + 1) % len(parts), 0
            yield self._after(shard), self._message(shard.id, record, part, key, data)

    def _refused(self, shard: Shard, error: BaseException) -> Iterator[tuple[Position, Any]]:
        """Take an error of a read: a new iterator, a pause, a gap, or what the source ends with."""
        code, opened, now = aws.code_of(error), shard.iterator is not None, time.monotonic()
        if code == "ExpiredIteratorException":
            self._reopen(shard)
        elif code in _THROTTLED:
            if not shard.refused_at:
                shard.refused_at = now
                _log.warning("%s, %s: %s", self._source.kinesis.what, shard.id, error)
            if now - shard.refused_at > _PATIENCE_S:
                raise error
            shard.pause_s = min(max(_FIRST_PAUSE_S, shard.pause_s * 2), _PAUSE_MAX_S)
            shard.due = now + shard.pause_s
        elif code == "InvalidArgumentException" and shard.sequence and not opened and not shard.compared:
            if not self._may_have_lost(shard):
                shard.sequence, shard.part = "", 0
                return
            gap = self._gap(shard, f"its record is refused: {error}", 0)
            shard.sequence, shard.part, shard.until_ms = "", 0, 0
            yield self._pack(), gap
        else:
            raise error

    def _message(self, id: str, record: dict[str, Any], part: int | None, key: str, data: bytes) -> Any:
        source, sequence = self._source, record["SequenceNumber"]
        fields = {
            "stream": source.stream,
            "shard": id,
            "sequence": sequence,
            "part": part,
            "time": record["ApproximateArrivalTimestamp"].astimezone(UTC),
            "key": key,
        }
        try:
            return foreign.shaped(source, "kinesis", fields, "data", kafka.DECODERS[source.data](data))
        except (ValueError, RecursionError) as error:
            return InvalidArgument(
                f"The record {sequence} of the stream {source.stream!r}, {id}, part {part}, cannot be read as"
                f" data={source.data!r}, shape={source.shape!r}: {error}.",
                "correct the writer of the stream; or read it with data='bytes', and decode it in a stream.",
            )


def _fields(position: Position | None) -> tuple[int, dict[str, Shard], set[str]]:
    if position is None:
        return 0, {}, set()
    checks.position_of(position, "cues.processors.kinesis", 4)
    return position[1], {place[0]: Shard(*place) for place in position[2]}, set(position[3])


def _text(ms: int) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds")
