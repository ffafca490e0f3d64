"""A Kinesis server of the tests' own: moto, on loopback, with shards as Kinesis has them.

moto moves the records of a shard that is split into its children, and numbers them anew. Here, as at Kinesis, they stay
where they were put: the parent is closed, its end is told, and children have what is put later. Sequence numbers grow
over the whole stream. It also fails on request, by tags of a stream:

    throttle    so many reads are refused with ProvisionedThroughputExceededException
    refuse      of so many requests to put, every third record is not taken
    expire      so many iterators have expired
    trim        so many of the oldest records are removed by the retention, also whole shards that are closed
    late        records are this many hours older

``python kinesis_server.py PORT`` runs it; :class:`KinesisServer` starts that as a process, and ends it by its pid.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mqtt_broker import answers
from ports import free_port

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "geheim", "AWS_DEFAULT_REGION": "us-east-1"}
WHOLE = 2**128


class KinesisServer:
    """The server, its client, and what tests ask of it."""

    def __init__(self) -> None:
        import boto3

        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()
        names = {"AWS_DEFAULT_REGION": "region_name"}
        options = {names.get(name, name.lower()): value for name, value in CREDENTIALS.items()}
        self.client: Any = boto3.client("kinesis", endpoint_url=self.url, **options)
        self._count = 0

    def start(self) -> None:
        """Start it, without any stream."""
        command = [sys.executable, __file__, str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        answers(self.port, self.process)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    @contextmanager
    def halted(self) -> Iterator[None]:
        """It answers nobody during the block."""
        os.kill(self.process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(self.process.pid, signal.SIGCONT)

    def stream(self, shards: int = 2) -> str:
        """The name of a new stream."""
        self._count += 1
        name = f"s{self._count}"
        self.client.create_stream(StreamName=name, ShardCount=shards)
        return name

    def put(self, stream: str, *items: tuple[str, bytes]) -> None:
        """Put records, pairs of partition key and data, in order."""
        for at in range(0, len(items), 500):
            records = [{"PartitionKey": key, "Data": data} for key, data in items[at : at + 500]]
            assert not self.client.put_records(StreamName=stream, Records=records)["FailedRecordCount"]

    def tell(self, stream: str, **tags: object) -> None:
        """Have it fail."""
        self.client.add_tags_to_stream(StreamName=stream, Tags={name: str(value) for name, value in tags.items()})

    def open_shards(self, stream: str) -> list[dict[str, Any]]:
        """The open shards, by their hash keys."""
        shards = self.client.list_shards(StreamName=stream)["Shards"]
        found = [one for one in shards if "EndingSequenceNumber" not in one["SequenceNumberRange"]]
        return sorted(found, key=lambda one: int(one["HashKeyRange"]["StartingHashKey"]))

    def split(self, stream: str, number: int = 0) -> None:
        """Split the open shard of a number in two."""
        shard = self.open_shards(stream)[number]
        begin, end = (int(shard["HashKeyRange"][name]) for name in ("StartingHashKey", "EndingHashKey"))
        middle = str((begin + end) // 2)
        self.client.split_shard(StreamName=stream, ShardToSplit=shard["ShardId"], NewStartingHashKey=middle)

    def merge(self, stream: str, number: int = 0) -> None:
        """Merge the open shards of a number and the next one."""
        one, other = (shard["ShardId"] for shard in self.open_shards(stream)[number : number + 2])
        self.client.merge_shards(StreamName=stream, ShardToMerge=one, AdjacentShardToMerge=other)

    def records(self, stream: str) -> list[tuple[str, bytes]]:
        """Partition key and data of all records; those of a key are in order."""
        found = []
        for shard in self.client.list_shards(StreamName=stream)["Shards"]:
            asked = {"StreamName": stream, "ShardId": shard["ShardId"], "ShardIteratorType": "TRIM_HORIZON"}
            iterator = self.client.get_shard_iterator(**asked)["ShardIterator"]
            while iterator:
                answer = self.client.get_records(ShardIterator=iterator)
                found += [(one["PartitionKey"], one["Data"]) for one in answer["Records"]]
                iterator = answer["Records"] and answer.get("NextShardIterator")
        return found


@contextmanager
def running() -> Iterator[KinesisServer]:
    server = KinesisServer()
    try:
        yield server
    finally:
        server.kill()


# --- in the process of the server -----------------------------------------------------------------


def serve(port: str) -> None:
    from bisect import bisect_left, bisect_right
    from datetime import timedelta
    from threading import RLock

    from moto.core.exceptions import JsonRESTError
    from moto.kinesis import models, utils
    from moto.server import main

    numbers, guard = itertools.count(49_590_338_271_490_256_608_559_692_538_361_571_095, 7), RLock()

    def due(stream: Any, tag: str) -> bool:
        """Whether a stream shall fail this time."""
        left = int(stream.tags.get(tag, 0))
        stream.tags[tag] = str(max(left - 1, 0))
        return left > 0

    class Shard(models.Shard):
        __module__ = models.__name__  # moto looks for its service there

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.order: list[int] = []
            self.began = next(numbers)
            self.ended = 0

        def put_record(self, partition_key: str, data: str, explicit_hash_key: str) -> str:
            number = next(numbers)
            self.records[number] = models.Record(partition_key, data, number, explicit_hash_key)
            self.order.append(number)
            return str(number)

        def get_records(self, last: str, limit: int | None) -> tuple[list[Any], int, int]:
            at = bisect_right(self.order, int(last))
            found = [self.records[number] for number in self.order[at : at + min(limit or 10_000, 1_000)]]
            newest = self.records[self.order[-1]].created_at if found else 0
            more = bool(found) and found[-1].sequence_number != self.order[-1]
            behind_ms = max(1, round((newest - found[-1].created_at) * 1000)) if more else 0
            return found, found[-1].sequence_number if found else int(last), behind_ms

        def get_min_sequence_number(self) -> int:
            return self.began

        def get_max_sequence_number(self) -> int:
            return self.ended or (self.order[-1] if self.order else self.began)

        def get_sequence_number_at(self, at: float) -> int:
            place = bisect_left(self.order, at, key=lambda number: self.records[number].created_at)
            return self.order[place - 1] if place else 0

        def end(self) -> None:
            self.is_open, self.ended = False, next(numbers)

    class Stream(models.Stream):
        __module__ = models.__name__  # moto looks for its service there

        def trim(self) -> None:
            with guard:
                hours, count = float(self.tags.pop("late", 0)), int(self.tags.pop("trim", 0))
                for shard in list(self.shards.values()) if hours or count else []:
                    for record in shard.records.values():
                        record.created_at -= hours * 3600
                        record.created_at_datetime -= timedelta(hours=hours)
                    gone, shard.order = shard.order[:count], shard.order[count:]
                    for number in gone:
                        del shard.records[number]
                    if gone and not shard.order and not shard.is_open:
                        del self.shards[shard.shard_id]

        def get_shard_for_key(self, partition_key: str, explicit_hash_key: str) -> Any:
            key = int(
                explicit_hash_key or models.md5_hash(partition_key.encode()).hexdigest(),
                10 if explicit_hash_key else 16,
            )
            return next(
                one for one in self.shards.values() if one.is_open and one.starting_hash <= key <= one.ending_hash
            )

        def _next(self) -> int:
            return max(one._shard_id for one in self.shards.values()) + 1

        def split_shard(self, shard_to_split: str, new_starting_hash_key: str) -> None:
            with guard:
                shard, middle, id = self.shards[shard_to_split], int(new_starting_hash_key), self._next()
                shard.end()
                for n, begin, end in ((id, shard.starting_hash, middle - 1), (id + 1, middle, shard.ending_hash)):
                    child = Shard(n, begin, end, parent=shard.shard_id)
                    self.shards[child.shard_id] = child

        def merge_shards(self, shard_to_merge: str, adjacent_shard_to_merge: str) -> None:
            with guard:
                one, other = self.shards[shard_to_merge], self.shards[adjacent_shard_to_merge]
                one.end(), other.end()
                begin, end = min(one.starting_hash, other.starting_hash), max(one.ending_hash, other.ending_hash)
                child = Shard(self._next(), begin, end, parent=one.shard_id, adjacent_parent=other.shard_id)
                self.shards[child.shard_id] = child

    class Backend(models.KinesisBackend):
        __module__ = models.__name__

        def list_shards(self, **options: Any) -> Any:
            self.describe_stream(options["stream_arn"], options["stream_name"]).trim()
            with guard:
                return super().list_shards(**options)

        def get_shard_iterator(self, stream_arn: Any, stream_name: Any, *rest: Any) -> Any:
            return super().get_shard_iterator(
                stream_arn, self.describe_stream(stream_arn, stream_name).stream_name, *rest
            )

        def get_records(self, stream_arn: Any, shard_iterator: str, limit: int | None) -> Any:
            name, id, last = utils.decompose_shard_iterator(shard_iterator)
            stream = self.describe_stream(None, name)
            stream.trim()
            if due(stream, "throttle"):
                raise JsonRESTError("ProvisionedThroughputExceededException", "Rate exceeded for shard")
            if due(stream, "expire"):
                raise JsonRESTError("ExpiredIteratorException", "Iterator expired")
            with guard:
                shard = stream.get_shard(id)
                found, last_number, behind_ms = shard.get_records(last, limit)
                ended = not shard.is_open and not behind_ms
            after = None if ended else utils.compose_shard_iterator(name, shard, last_number)
            return after, found, behind_ms

        def put_records(self, stream_arn: Any, stream_name: Any, records: list[dict[str, Any]]) -> dict[str, Any]:
            stream = self.describe_stream(stream_arn, stream_name)
            if not due(stream, "refuse"):
                with guard:
                    return super().put_records(stream_arn, stream_name, records)
            answers = []
            for n, record in enumerate(records):
                if n % 3 == 0:
                    answers.append({"ErrorCode": "ProvisionedThroughputExceededException", "ErrorMessage": "Rate"})
                else:
                    answers += super().put_records(stream_arn, stream_name, [record])["Records"]
            return {"FailedRecordCount": len([one for one in answers if "ErrorCode" in one]), "Records": answers}

        def _send_stream_metrics(self, *_: Any, **options: Any) -> None:
            """No metrics."""

    models.Shard, models.Stream = Shard, Stream  # type: ignore[misc]
    models.kinesis_backends = models.BackendDict(Backend, "kinesis")
    import moto.kinesis.responses as responses

    responses.kinesis_backends = models.kinesis_backends  # type: ignore[attr-defined]
    main(["-H", "127.0.0.1", "-p", port])


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    serve(sys.argv[1])
