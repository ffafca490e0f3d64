"""From the results of a step to messages on queues: write, commit, forward (4 to 6 of step.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from cues import faults
from cues.base import clock
from cues.spark.cluster import tasks
from cues.spark.cluster.directory import DataFile, QueueDirectory, file_name

if TYPE_CHECKING:
    from cues.spark.cluster.driver import Driver
    from cues.spark.cluster.ledger import Ledger

Written = list[tuple[QueueDirectory, DataFile]]
"""Data files in the folders of their queues, and in no log yet."""


def publish(
    ledger: Ledger, directories: Collection[QueueDirectory], write: Callable[[], Written], **record: Any
) -> None:
    """Append to queues. The next record of the processor, with the fields ``record``, is the commit.

    ``write`` writes the messages for the ``directories``, whose locks are held. Raises :class:`Fenced`; then no queue
    has changed.
    """
    with contextlib.ExitStack() as locked:
        for directory in sorted(directories, key=lambda directory: directory.queue):
            locked.enter_context(directory.lock)
            directory.settle()
        # 4. Write.
        files = write() if directories else []
        faults.point("spark.written")
        # 5. Commit.
        ledger.commit("step", files={directory.queue: file.name for directory, file in files}, **record)
        for directory, file in files:
            directory.owed.append(file)
        faults.point("spark.recorded")
        # 6. Forward.
        for directory in directories:
            directory.settle()
            faults.point("spark.forwarded")


def publish_results(
    driver: Driver,
    ledger: Ledger,
    folder: str,
    targets: Mapping[int, tuple[QueueDirectory, int]],
    below: int,
    **record: Any,
) -> None:
    """Append the messages of the results in ``folder``, as :func:`publish` does.

    ``targets`` are the queues that get messages, by number, each with the number of its messages. Results from the
    offset ``below`` on do not count.
    """

    def write() -> Written:
        """Number the messages, and put a file of them into the folder of each queue."""
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        files = driver.files
        rows = driver.session.read.schema(tasks.OUT).parquet(files.url_of(folder))
        rows = rows.where(f"kind = {tasks.MESSAGE} AND offset < {below}")
        base: Any = F.lit(0).cast("bigint")
        for number, (directory, _) in targets.items():
            base = F.when(F.col("target") == number, F.lit(directory.next - 1).cast("bigint")).otherwise(base)
        order = Window.partitionBy("target").orderBy("offset", "ordinal")
        numbered = rows.select(
            (F.row_number().over(order) + base).alias("index"),
            F.timestamp_micros(F.lit(clock.now_ns() // 1000)).alias("time"),
            "hash",
            "value",
            "meta",
            "target",
        )
        place = driver.scratch()
        numbered.write.partitionBy("target").option("maxRecordsPerFile", 0).parquet(files.url_of(place))
        written = []
        for number, (directory, count) in targets.items():
            (part,) = files.parts(f"{place}/target={number}")
            name = file_name(directory.next, count, ledger.processor, ledger.now.number + 1)
            written.append((directory, directory.adopt(f"{place}/target={number}/{part}", name)))
        files.delete(place)
        return written

    publish(ledger, [directory for directory, _ in targets.values()], write, **record)
