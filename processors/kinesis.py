"""Amazon Kinesis: a source of the records of a stream, exactly once, and a sink that puts records.

    graph.add(cues.Source("clicks", KinesisStream("clicks", data="json", follow=True)))
    graph.add(KinesisSender("totals", key="customer").sink("totals"))

The client is boto3, the extra ``kinesis``, with its credentials (environment, profile, role), or that of ``client=``.

**The source** reads all shards of a stream. The sequence number that it has reached in each is its position, which the
engine commits with the messages. There is no table of leases and no other service, so one source reads the stream.

    1. compare    the stream is the one of the position, by the time at which it was created
    2. open       each shard at the record of its position, which must be the first one that is returned
    3. read       at most 5 times and 2 MB a second, which Kinesis allows for each shard
    4. reshard    when a closed shard is read to its end, list the shards; read a child when all its parents have ended

So messages of one partition key come in their order, also over splits and merges. There is no order between shards.

The position is ``[version, created, [[shard, sequence, part, until], …], [ended shard, …]]``: ``part`` counts the
records that were taken of an aggregated one, 0 if all; ``until`` is the time up to which nothing followed, in
milliseconds, or 0. An ended shard stays until Kinesis no longer lists it.

**Messages.** ``shape="record"`` gives a message for each record::

    {"stream", "shard", "sequence", "part": int | None, "time": datetime, "key", "data"}

``key`` is the partition key, ``time`` the arrival at Kinesis. ``shape="value"``, with ``data="json"``, gives the object
in the data; the other fields are in the metadata, as ``process.metadata["kinesis"]``. A record that cannot be decoded
is a failed message that names its place. A record that the Kinesis Producer Library has aggregated gives a message for
each record in it, with ``part`` 0, 1, and so on. After a reshard this library may put a record twice, as after other
failures of it; both are messages.

**Lost records.** If the record of the position is no longer there, and the retention may have removed records after
it, or a shard is gone before its end, the source stops with :class:`cues.MessagesPurged`. With ``on_gap="fail"``
this error is a failed message, and the source continues with the oldest record. Kinesis does not tell how many records
were lost, nor whether there were any: its sequence numbers have gaps. A shard that had no records for longer than the
retention is not a gap, if a run has looked at it within the retention. A stream that was created again is
:class:`cues.errors.Diverged`.

**The sink** puts records in requests of up to 500, and the step commits when Kinesis has all of them: at least once. A
record that Kinesis does not take (a busy shard) is put again. With ``order="key"`` a request has at most one record of
a partition key, so a record that is put again is never overtaken by a later one of its key. After a kill the records of
a step are put again, in the same order. Each message has an identity that is the same at each repetition, a hash of the
store, the processor and the place of the message: it is the partition key if there is no ``key=``, and the field
``id=`` of a JSON object. A consumer that keeps identities drops repetitions.

**Not guaranteed.** The sink is not exactly once: Kinesis has no transaction and no deduplication. Consumers with
enhanced fan-out have a pipe of 2 MB/s of their own; this source shares the 2 MB/s of the shard with others.

**Failures.** Kinesis that cannot be reached, throttles or has an internal error is away: the processor waits. A shard
that is throttled (``ProvisionedThroughputExceededException``) is asked again with growing pauses, while others are
read. A missing stream, wrong credentials and missing permissions stop the processor. The source needs the permissions
``DescribeStreamSummary``, ``ListShards``, ``GetShardIterator`` and ``GetRecords``, the sink ``PutRecords``.
"""

from cues.processors.kinesis_sink import KinesisSender
from cues.processors.kinesis_source import KinesisStream

__all__ = ["KinesisSender", "KinesisStream"]
