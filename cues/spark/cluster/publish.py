"""From the results of a step to messages on queues: write, commit, forward (4 to 6 of step.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cues import faults
from cues.base import clock
from cues.spark.cluster import tasks
from cues.spark.cluster.directory import DataFile, QueueDirectory, file_name

if TYPE_CHECKING:
    from cues.spark.cluster.driver import Driver
    from cues.spark.cluster.ledger import Ledger


@dataclass(frozen=True)
class Landing:
    """The results of a step of one processor."""

    driver: Driver
    ledger: Ledger
    folder: str
    """The folder of the results."""
    targets: Mapping[int, QueueDirectory]
    """The queues that get messages, by number."""
    written: Mapping[int, int]
    """The number of messages of each queue."""
    below: int
    """The offset of the first message of the step that does not count."""

    def land(self, **record: Any) -> None:
        """Put the messages onto their queues. The processor's next record, with the fields ``record``, is the commit.

        Raises :class:`Fenced`; then no queue has changed.
        """
        targets = self.targets
        with contextlib.ExitStack() as locked:
            for directory in sorted(targets.values(), key=lambda directory: directory.queue):
                locked.enter_context(directory.lock)
                directory.settle()
            # 4. Write.
            files = self._write() if targets else {}
            faults.point("spark.written")
            # 5. Commit.
            by_queue = {targets[number].queue: file.name for number, file in files.items()}
            self.ledger.commit("step", files=by_queue, **record)
            for number, file in files.items():
                targets[number].owed.append(file)
            faults.point("spark.recorded")
            # 6. Forward.
            for directory in targets.values():
                directory.settle()
                faults.point("spark.forwarded")

    def _write(self) -> dict[int, DataFile]:
        """Number the messages, and put a file of them into the folder of each queue."""
        from pyspark.sql import Window
        from pyspark.sql import functions as F

        driver, ledger, files = self.driver, self.ledger, self.driver.files
        rows = driver.session.read.schema(tasks.OUT).parquet(files.url_of(self.folder))
        rows = rows.where(f"kind = {tasks.MESSAGE} AND offset < {self.below}")
        base: Any = F.lit(0).cast("bigint")
        for number, directory in self.targets.items():
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
        made = {}
        for number, directory in self.targets.items():
            (part,) = files.parts(f"{place}/target={number}")
            name = file_name(directory.next, self.written[number], ledger.processor, ledger.now.number + 1)
            made[number] = directory.adopt(f"{place}/target={number}/{part}", name)
        files.delete(place)
        return made
