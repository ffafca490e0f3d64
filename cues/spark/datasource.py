"""The format ``cues``: the objects that Spark calls.

    spark.read.format("cues").load("data/flights#enriched")                              a store's queue
    spark.read.format("cues").load("s3://bucket/queues#enriched")                        a shared directory's
    spark.readStream.format("cues").option("maxMessagesPerTrigger", 10_000).load("data/flights#enriched")
    df.write.format("cues").mode("append").save("data/out#priced")
    df.writeStream.format("cues").option("id", "priced").option("checkpointLocation", …).start("data/out#priced")

Spark makes these objects in its own Python processes on the driver's machine, and sends the readers and
writers that they return to its executors.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pyspark.sql import types as T
from pyspark.sql.datasource import DataSource, DataSourceStreamReader, InputPartition

from cues.errors import Unsupported
from cues.overrides import override
from cues.spark.installed import require_streams
from cues.spark.options import READ, READ_STREAM, ReadOptions, WriteOptions, place
from cues.spark.place import message_first
from cues.spark.reading import QueueReader, find, row_of
from cues.spark.writing import BatchWriter

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cues.spark.streams import QueueStream, StreamWriter


class CuesSource(DataSource):
    """Queues as a data source; see the module and docs/spark-reference.md for the options."""

    parallelism: int = os.cpu_count() or 2
    """Number of tasks that run at once. :func:`source_for` asks the session."""

    @override
    @classmethod
    def name(cls) -> str:
        return "cues"

    @override
    @message_first()
    def schema(self) -> str:
        """The columns of the row, followed by the columns of the option ``fields``."""
        address = place(self.options)
        columns = row_of(find(address)[0].spread)
        # In a session with spark.sql.timestampType=TIMESTAMP_NTZ, "timestamp" means a time without a zone.
        types = (field.dataType.simpleString().replace("timestamp", "timestamp_ltz") for field in columns.fields)
        own = ", ".join(f"`{name}` {type}" for name, type in zip(columns.names, types))
        fields = self.options.get("fields")
        return f"{own}, {fields}" if fields else own

    @override
    @message_first()
    def reader(self, schema: T.StructType) -> QueueReader:
        return QueueReader(schema, ReadOptions.of(self.options, READ), self.parallelism)

    @override
    @message_first()
    def streamReader(self, schema: T.StructType) -> QueueStream | RefusedStream:
        options = ReadOptions.of(self.options, READ_STREAM)
        try:
            require_streams("A stream of the format cues")
        except Unsupported as error:
            return RefusedStream(error)
        from cues.spark.streams import QueueStream

        if options.frame is not None:
            from cues.spark.cluster.batch_stream import BatchStream

            return BatchStream(schema, options, self.parallelism)
        return QueueStream(schema, options, self.parallelism)

    @override
    @message_first()
    def writer(self, schema: T.StructType, overwrite: bool) -> BatchWriter:
        return BatchWriter(schema, WriteOptions.of_batch(self.options), overwrite)

    @override
    @message_first()
    def streamWriter(self, schema: T.StructType, overwrite: bool) -> StreamWriter:
        require_streams("A stream of the format cues")
        from cues.spark.streams import StreamWriter

        return StreamWriter(schema, WriteOptions.of_stream(self.options), overwrite)


class RefusedStream(DataSourceStreamReader):
    """A stream that this Spark is too old for. Spark 4.0 loses what :meth:`CuesSource.streamReader` raises itself."""

    def __init__(self, error: Unsupported) -> None:
        self._error = error

    @override
    @message_first()
    def initialOffset(self) -> dict[str, Any]:
        raise self._error

    @override
    @message_first()
    def latestOffset(self, *given: Any, **named: Any) -> dict[str, Any]:
        raise self._error

    @override
    def read(self, partition: InputPartition) -> Iterator[Any]:
        raise self._error


def source_for(spark: SparkSession) -> type[CuesSource]:
    """The data source for one session, with the number of tasks that run there at once.

    A session of Spark Connect does not tell that number; the processors of the server's machine are counted instead.
    """
    context = getattr(spark, "sparkContext", None)
    if context is None:
        return CuesSource
    cores = int(context.defaultParallelism)

    class Registered(CuesSource):  # a class in a function is pickled by value
        parallelism = cores

    return Registered
