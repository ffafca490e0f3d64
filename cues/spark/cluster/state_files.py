"""Keyed state as files: what each step changed, in one more; many of them folded into one.

    key BINARY, row BINARY, value BINARY, step BIGINT       NULL: the row went; of a row the newest step counts

The record of a step names the files that make up the state behind it (ledger.py), so state and positions
are one commit. Files that no record names are swept at the next start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cues.spark.cluster import tasks
from cues.spark.cluster.files import folder_of

if TYPE_CHECKING:
    from cues.spark.cluster.driver import Driver
    from cues.spark.cluster.ledger import Ledger

SCHEMA: Final = "key BINARY, row BINARY, value BINARY, step BIGINT"
FILES_MAX: Final = 16
"""Files of a state; so many are folded into one."""


class StateFiles:
    """The state of one processor."""

    def __init__(self, driver: Driver, ledger: Ledger) -> None:
        self._driver = driver
        self._ledger = ledger

    def rows(self) -> Any:
        """The state as it is, as a DataFrame of key, row and value; None where there is none."""
        from pyspark.sql import functions as F

        last = self._ledger.last
        assert last is not None
        if not last.state:
            return None
        found = self._driver.session.read.schema(SCHEMA).parquet(*map(self._driver.files.url_of, last.state))
        newest = found.groupBy("row").agg(F.first("key").alias("key"), F.max_by("value", "step").alias("value"))
        return newest.where("value IS NOT NULL")

    def changed(self, folder: str) -> tuple[str, ...]:
        """The files of the state with the changes in ``folder``, for the next record."""
        last = self._ledger.last
        assert last is not None
        before = last.state
        if len(before) >= FILES_MAX:
            folded = self.rows().selectExpr("key", "row", "value", f"bigint({last.number}) AS step")
            before = (self._file(folded, "base"),)
        rows = self._driver.session.read.schema(tasks.OUT).parquet(self._driver.files.url_of(folder))
        changes = rows.where(f"kind = {tasks.STATE}").selectExpr(
            "substring(meta, 1, int(ordinal)) AS key", "meta AS row", "value", f"bigint({last.number + 1}) AS step"
        )
        return (*before, self._file(changes, "delta"))

    def _file(self, rows: Any, kind: str) -> str:
        files, folder, last = self._driver.files, self._driver.scratch(), self._ledger.last
        assert last is not None
        rows.coalesce(1).write.parquet(files.url_of(folder))
        (part,) = files.parts(folder)
        owner = folder_of(self._driver.owner)
        name = f"_cues/state/{folder_of(self._ledger.processor)}/{last.number + 1:012d}-{kind}-{owner}.parquet"
        files.move(f"{folder}/{part}", name)
        files.delete(folder)
        return name

    def drop(self, before: tuple[str, ...]) -> None:
        """Delete what was the state's and is no more, behind the commit."""
        last = self._ledger.last
        assert last is not None
        for name in set(before) - set(last.state):
            self._driver.files.delete(name)
