"""From what came of a step to messages on queues: write, commit, forward (4 to 6 of step.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cues import faults
from cues.base import clock
from cues.spark.cluster import tasks
from cues.spark.cluster.directory import DataFile, QueueDirectory, file_name

if TYPE_CHECKING:
    from cues.spark.cluster.driver import Driver
    from cues.spark.cluster.ledger import Ledger


def land(
    driver: Driver,
    ledger: Ledger,
    folder: str,
    targets: Mapping[int, QueueDirectory],
    written: Mapping[int, int],
    below: int,
    **record: Any,
) -> None:
    """Put the messages in ``folder`` onto their queues, with the processor's next record as the commit.

    ``targets`` are the queues by number, ``written`` how many messages each gets, ``below`` the offset of the
    first message of the step that does not count. Raises :class:`Fenced`, and no queue has changed then.
    """
    with contextlib.ExitStack() as locked:
        for directory in sorted(targets.values(), key=lambda one: one.queue):
            locked.enter_context(directory.lock)
            directory.settle()
        # 4. Write.
        files = _write(driver, ledger, folder, targets, written, below) if targets else {}
        faults.point("spark.written")
        # 5. Commit.
        ledger.commit("step", files={targets[number].queue: file.name for number, file in files.items()}, **record)
        for number, file in files.items():
            targets[number].owed.append(file)
        faults.point("spark.recorded")
        # 6. Forward.
        for directory in targets.values():
            directory.settle()
            faults.point("spark.forwarded")


def _write(
    driver: Driver,
    ledger: Ledger,
    folder: str,
    targets: Mapping[int, QueueDirectory],
    written: Mapping[int, int],
    below: int,
) -> dict[int, DataFile]:
    """Number the messages, and put a file of them beside each queue."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F

    assert ledger.last is not None
    files = driver.files
    rows = driver.session.read.schema(tasks.OUT).parquet(files.url_of(folder))
    rows = rows.where(f"kind = {tasks.MESSAGE} AND offset < {below}")
    base: Any = F.lit(0).cast("bigint")
    for number, directory in targets.items():
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
    found = {}
    for number, directory in targets.items():
        (part,) = files.parts(f"{place}/target={number}")
        name = file_name(directory.next, written[number], ledger.processor, ledger.last.number + 1)
        found[number] = directory.adopt(f"{place}/target={number}/{part}", name)
    files.delete(place)
    return found
