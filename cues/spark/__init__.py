"""Cues on Spark: queues as a data source, for SQL, for streams and for more than one machine.

    import cues.spark

    with cues.spark.session("local[*]") as spark:           # or cues.spark.register(your_session)
        flights = spark.read.format("cues").load("data/flights#enriched")

    java.py        a Java that Spark can run on
    session.py     the user's session, or a quiet one
    source.py      a Spark stream as a graph's source
    datasource.py  the format "cues"; options.py, reading.py, writing.py and what they stand on

Nothing here is loaded by ``import cues``, and pyspark is loaded by none of these names before it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cues.spark.session import session
from cues.spark.source import Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Source", "register", "session"]


def register(spark: SparkSession) -> None:
    """Make ``spark.read.format("cues")`` (and readStream, write, writeStream) known to a session.

    Calling it again does nothing new. Executors need cues installed too.
    """
    from cues.spark.datasource import source_for

    spark.dataSource.register(source_for(spark))
