"""Cues on Spark: queues as a data source, for SQL, for streams and for more than one machine.

    import cues.spark

    with cues.spark.session("local[*]") as spark:           # or cues.spark.register(your_session)
        flights = spark.read.format("cues").load("data/flights#enriched")

    java.py        a Java that Spark can run on
    session.py     the user's session, or a quiet one
    source.py      a Spark stream as a graph's source
    datasource.py  the format "cues", with options.py, reading.py, writing.py and the modules that they use

``import cues`` loads nothing of this package, and each of these names loads pyspark only when it is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cues.spark.session import require_workers, session
from cues.spark.source import Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Source", "register", "session"]


def register(spark: SparkSession) -> None:
    """Register the format ``cues`` with a session, for read, readStream, write and writeStream.

    A second call changes nothing. Raises :class:`~cues.errors.Unsupported` if the Python of the session's workers is
    another one than this, or has no Cues: executors need Cues installed too.
    """
    from cues.spark.datasource import source_for

    require_workers(spark)
    spark.dataSource.register(source_for(spark))
