"""Keyed state as files: each step adds a file with its changes, and many files are folded into one.

    key BINARY, row BINARY, value BINARY, step BIGINT

The value NULL means that the row was deleted. Of several values of a row the one of the newest step counts.
The record of a step names the files of the state after it (ledger.py), so state and positions
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
"""This number of files is folded into one."""


class StateFiles:
    """The state of one processor."""

    def __init__(self, driver: Driver, ledger: Ledger) -> None:
        self._driver = driver
        self._ledger = ledger

    def rows(self) -> Any:
        """The state now, as a DataFrame of key, row and value; None if there is no state."""
        from pyspark.sql import functions as F

        state = self._ledger.now.state
        if not state:
            return None
        rows = self._driver.session.read.schema(SCHEMA).parquet(*map(self._driver.files.url_of, state))
        newest = rows.groupBy("row").agg(F.first("key").alias("key"), F.max_by("value", "step").alias("value"))
        return newest.where("value IS NOT NULL")

    def folded(self, folder: str) -> Any:
        """The same as :meth:`rows`, without a shuffle: it is written into ``folder`` first."""
        state = self.rows()
        if state is not None:
            place = self._driver.files.url_of(folder)
            state.coalesce(1).write.parquet(place)
            state = self._driver.session.read.schema(state.schema).parquet(place)
        return state

    def changed(self, folder: str) -> tuple[str, ...]:
        """The files of the state with the changes in ``folder``, for the next record."""
        last = self._ledger.now
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
        folder, owner = folder_of(self._ledger.processor), folder_of(self._driver.owner)
        name = f"_cues/state/{folder}/{self._ledger.now.number + 1:012d}-{kind}-{owner}.parquet"
        self._driver.write_file(rows.coalesce(1), name)
        return name

    def drop(self, before: tuple[str, ...]) -> None:
        """Delete the files that were the state's before a commit, and are not after it."""
        for name in set(before) - set(self._ledger.now.state):
            self._driver.files.delete(name)
