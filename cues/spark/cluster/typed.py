"""Typed columns of a queue: fields of its messages beside the packed message.

With them a reader of the table can leave out columns, files and row groups.

The table has its typed columns in its log (directory.py); ``schema=`` of the queue adds to them. A new data file has
all of them. A file from before a column was added does not have it; a merge gives it the column.

The packed message is the truth. A value that does not fit its column is NULL there, as by the option ``fields`` of the
format ``cues`` (:mod:`cues.spark.columns`), and the message is not changed, delayed or refused.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa

from cues import codec
from cues.base.data import dataclass
from cues.errors import QueueOptionsError
from cues.overrides import override
from cues.records.schema import parse, shown

OWN: Final = frozenset(
    {"partition", "first", "index", "offset", "time", "hash", "value", "provenance", "meta"},
)
"""Columns of every queue. The column of a field of such a name has an underscore after it."""
FIELD: Final = "cues.field"
"""Metadata of a typed column in the log: the name of its field."""


@dataclass(frozen=True)
class TypedColumns:
    """The typed columns of one queue. It travels to executors."""

    fields: tuple[tuple[str, str], ...] = ()
    """Names and types of the fields (:mod:`cues.records.schema`), in the order of the columns."""

    def __bool__(self) -> bool:
        return bool(self.fields)

    @staticmethod
    def of_log(fields: Sequence[Mapping[str, Any]]) -> TypedColumns:
        """The typed columns among the fields of a table's schema."""
        named = [(field.get("metadata", {}).get(FIELD), field["type"]) for field in fields]
        return TypedColumns(tuple((name, shown(kind)) for name, kind in named if name is not None))

    def to_log(self) -> list[dict[str, Any]]:
        """The columns as fields of a table's schema."""
        return [
            {"name": column_of(name), "type": parse(kind), "nullable": True, "metadata": {FIELD: name}}
            for name, kind in self.fields
        ]

    def plus(self, schema: Sequence[tuple[str, str]], queue: str, url: str) -> TypedColumns:
        """These columns, and those of a schema. Raises :class:`QueueOptionsError` if a field has another type now."""
        known = {column_of(name).lower(): (name, kind) for name, kind in self.fields}
        for name, kind in schema:
            other, before = known.setdefault(column_of(name).lower(), (name, kind))
            what, hint = "", ""
            if other != name:
                what = f"of the field {other!r}; schema= has a field {name!r}"
                hint = "leave the field out of schema=; it stays in the message."
            elif before != kind:
                what = f"{before}, and schema= says {kind}"
                hint = f"give the field the type {before} in schema=, or leave it out; or start over with --fresh."
            if what:
                message = (
                    f"The table of the queue {queue!r} in {url} has a column {column_of(other)!r}, which is {what}."
                )
                raise QueueOptionsError(message, hint, queue=queue, option="schema")
        return TypedColumns(tuple(known.values()))

    def column(self, field: str) -> str | None:
        """The column of a field; None if it has none."""
        return next((column_of(name) for name, _ in self.fields if name == field), None)

    @property
    def scalars(self) -> list[str]:
        """The columns with statistics in the files."""
        return [column_of(name) for name, kind in self.fields if "<" not in kind]

    @functools.cached_property
    def schema(self) -> pa.Schema:
        return pa.schema([(column_of(column.name), column.type) for column in self.columns])

    @functools.cached_property
    def columns(self) -> list[Any]:
        from pyspark.sql import types as T

        from cues.spark.columns import Column

        types = [{"name": n, "type": parse(kind), "nullable": True, "metadata": {}} for n, kind in self.fields]
        return [Column(T.StructField.fromJson(field), strict=False) for field in types]

    def arrays(self, values: Sequence[bytes]) -> list[pa.Array]:
        """The columns of packed messages."""
        if not self.fields:
            return []
        messages = [codec.unpack_known(value) for value in values]
        return [column.array(messages, lambda offset: offset) for column in self.columns]

    @override
    def __getstate__(self) -> Any:
        return {"fields": self.fields}


NONE: Final = TypedColumns()


def column_of(field: str) -> str:
    """The name of a field's column."""
    return f"{field}_" if field.lower() in OWN else field
