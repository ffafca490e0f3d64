"""The base of tables in files (Delta, Iceberg) as targets of sinks: their options, and the rows of a step.

    LakeTarget        the options, the checks at the start, the transaction of a step
    LakeConnection    the rows of a step, in memory, as one table of Arrow with the columns of the table

A target says which types the format has, opens and makes the table, and keeps the row of delivery
(:mod:`cues.checkpoints.deliveries`). Its connection commits the rows together with that row.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Final

import cues
from cues.arguments import texts_of
from cues.checkpoints import Row, Transaction, held, write_once
from cues.errors import CheckpointError, InvalidArgument
from cues.processors import columns, formats, places

MODES: Final = ("append", "upsert", "delete")

_AWAY: Final = re.compile(
    r"error sending request|tcp connect|could ?n[o']t connect|network_connection|dns error|timed? ?out"
    r"|connect(?:ion)?(?: was| is| has been)? ?(?:error|refus|reset|clos|abort|broke|fail|pool|lost|terminat)"
    r"|(?:status|code|http)(?: code)?:? ?(?:429|50[0234])\b"
    r"|\b(?:429 too many|500 internal|502 bad|503 (?:service|slow)|504 gateway|50[0234] server)"
    r"|slow[ _]?down|service[ _]?unavailable|no space left|stale file handle",
    re.IGNORECASE,
)
"""Texts of an object store or a disk that cannot be reached now. A number is a status only beside such a word:
versions, rows and columns have the same numbers."""
_PATH: Final = re.compile(r"\S*[/\\]\S*")


def says_away(text: str, where: str) -> bool:
    """Return whether the text of an error says that the place of the table ``where`` cannot be reached now.

    Names of tables and paths in the text do not count: a table may have the name ``connection refused``.
    """
    text = re.sub(rf"(?<!\w){re.escape(where)}(?!\w)", " ", text)
    return _AWAY.search(_PATH.sub(" ", text)) is not None


class LakeTarget(ABC):
    """A table as the target of sinks (``checkpoint=``). ``where`` names it in errors."""

    SYSTEM: ClassVar[str]
    """The format, as errors name it."""
    where: str

    def __init__(self, schema: Any, mode: str, key: Any, partition_by: Any, evolve: bool) -> None:
        self.schema, self.mode, self.evolve = schema, mode, evolve
        self.key, self.partition_by = texts_of("key", key), texts_of("partition_by", partition_by)
        if mode not in MODES:
            raise InvalidArgument(f"mode={mode!r} is unknown.", f"use one of {', '.join(MODES)}.")
        if (mode != "append") != bool(self.key):
            raise InvalidArgument(
                f"mode={mode!r} with key={self.key} do not fit.",
                "give key= the columns of the key for 'upsert' and 'delete', and leave it out for 'append'.",
            )
        if type(evolve) is not bool:
            raise InvalidArgument(f"evolve={evolve!r:.60}.", "give True or False.")
        if schema is not None:
            self._check_schema([*self.key, *map(self.column_of, self.partition_by)])
            if wrong := self.unfit_keys(schema):
                raise InvalidArgument(f"{wrong[0]}.", "use a column of integers, texts or times.")

    # --- what a format says ---

    @abstractmethod
    def open(self) -> Any:
        """Return the table as it is now; None if there is none."""

    @abstractmethod
    def make(self, schema: Any) -> None:
        """Make the table with these columns, unless it is there."""

    @abstractmethod
    def connect(self) -> LakeConnection:
        """Begin a step."""

    @abstractmethod
    def positions(self, tailers: Iterable[str], asked: Sequence[str]) -> LakePositions:
        """Return the rows of delivery, for a delivery of these tailers, or to look for the processors ``asked``."""

    @abstractmethod
    def type_of(self, kind: Any) -> Any:
        """Return the type, not nested, with which the table keeps a type of Arrow; None if it has none."""

    @abstractmethod
    def schema_of(self, table: Any) -> Any:
        """Return the columns of a table as a schema of pyarrow, with the types of :meth:`type_of`."""

    @abstractmethod
    def misfits(self, table: Any, schema: Any) -> list[str]:
        """Return the reasons for which a table with these columns cannot be written with our options."""

    def settle(self, connection: Any) -> None:
        """Bring what was committed to the disk before the step is acknowledged, if the library does not do it."""
        return

    def column_of(self, part: str) -> str:
        """Return the column that an item of ``partition_by=`` names."""
        return part

    def unfit_keys(self, schema: Any) -> list[str]:
        """Return what is wrong with the columns of the key: rows are not found by lists, dicts and maps."""
        named = [schema.field(name) for name in self.key if name in schema.names]
        is_nested = places.arrow().types.is_nested
        return [
            f"{field.name} of key= is {field.type}, and has no single value" for field in named if is_nested(field.type)
        ]

    # --- sinks ---

    def transaction(self, process: cues.Process) -> AbstractContextManager[Transaction[Any]]:
        """Run the block, whose rows are one commit of the table, with exactly the messages that are new to it.

        ``connection.write(rows)`` takes a message, a list of messages, or a table of Arrow. Raises
        :class:`cues.Fenced` or :class:`cues.errors.Diverged` before the block runs, and
        :class:`cues.errors.CheckpointError` when the table cannot be read or written.
        """
        return write_once(self.positions(process.delivery.end, ()), process, Transaction)

    def holds(self, processors: Iterable[str]) -> list[str]:
        """Return those of the processors that have a position in the table: it refuses them from another store."""
        asked = list(processors)
        return held(self.positions((), asked), asked)

    def __cues_prepare__(self) -> None:
        """Make or check the table, so that no message meets a mistake of the declaration."""
        table = self.open()
        if table is None and self.schema is not None:
            self.make(self.kept(self.schema))
            table = self.open()
        if table is None and self.evolve and self.mode != "delete":
            return
        if table is None:
            raise self.misfit("is not there", "give schema=, with which the sink makes it; or evolve=True.")
        there, wrong = self.schema_of(table), []
        for field in [] if self.schema is None else self.kept(self.schema):
            if field.name not in there.names:
                wrong += [] if self.evolve else [f"{field.name} is missing"]
            elif there.field(field.name).type != field.type:
                wrong.append(f"{field.name} is {there.field(field.name).type}, not {field.type}")
        wrong += [f"{name} of key= is missing" for name in self.key if name not in there.names]
        wrong += self.unfit_keys(there) + self.misfits(table, there)
        if wrong:
            raise self.misfit(f"does not fit: {'; '.join(wrong)}", "change the options of the sink or the table.")

    def misfit(self, problem: str, hint: str) -> CheckpointError:
        """Return the error for a table that the sink cannot use."""
        text = f"The {self.SYSTEM} table {self.where} {problem}."
        return CheckpointError(text, hint, where=self.where, away=False)

    def unfinished(self, text: str, *, again: bool, away: bool) -> CheckpointError:
        """Return the error of a library; ``again``: the commit may be done, and another attempt finds out."""
        hint = "start the graph again when the table can be read and written; the sink continues there."
        return CheckpointError(
            f"The {self.SYSTEM} table {self.where} was not {'changed' if again else 'read or written'}: {text}",
            "do nothing: it is tried again, and the table says whether it was done." if again else hint,
            where=self.where, again=again, away=again or away or None,
        )  # fmt: skip

    def kept(self, fields: Iterable[Any]) -> Any:
        """Return a schema with the types that the table gives back. Raises ValueError for a type that it lacks."""
        pa = places.arrow()
        return pa.schema([field.with_type(self._kept(field.type, field.name)) for field in fields])

    def _kept(self, kind: Any, name: str) -> Any:
        pa, types = places.arrow(), places.arrow().types
        if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
            return pa.list_(self._kept(kind.value_type, name))
        if types.is_struct(kind):
            return pa.struct([field.with_type(self._kept(field.type, f"{name}.{field.name}")) for field in kind])
        if types.is_map(kind):
            return pa.map_(self._kept(kind.key_type, name), self._kept(kind.item_type, name))
        kind = columns.stored(kind)
        if (found := self.type_of(kind)) is None:
            raise ValueError(
                f"the column {name!r} is {kind}, and {self.SYSTEM} has no such type. Try: convert it in a stream before"
                " the sink."
            )
        return found

    def _check_schema(self, names: Iterable[str]) -> None:
        schema = self.schema
        if not isinstance(schema, places.arrow().Schema):
            raise InvalidArgument(f"schema={schema!r:.60}.", "give a pyarrow.Schema.")
        try:
            self.kept(schema)
        except ValueError as error:
            raise InvalidArgument(f"schema=: {error}", "use another type.") from None
        small = [name.lower() for name in schema.names]
        if twice := [name for at, name in enumerate(small) if name in small[:at]]:
            raise InvalidArgument(
                f"schema= has the column {twice[0]!r} twice, as readers that ignore case see it.", "rename one of them."
            )
        if missing := [name for name in names if name not in schema.names]:
            text = f"{missing[0]!r} is not a column of schema=: {schema.names}."
            raise InvalidArgument(text, "name columns of the schema.")


class LakeConnection(ABC):
    """The open transaction of a :class:`LakeTarget`: its rows are written at the end of the block."""

    def __init__(self, target: LakeTarget) -> None:
        self.target = target
        self.raw = target.open()
        """The table as its library has it, to read from; None if there is no table yet."""
        self.row: Row | None = None
        """The row after this delivery."""
        there = [] if self.raw is None else target.schema_of(self.raw)
        given = (
            [] if target.schema is None or (self.raw is not None and not target.evolve) else target.kept(target.schema)
        )
        if self.raw is None and (target.mode == "delete" or not (given or target.evolve)):
            raise target.misfit("is not there any more", "restore it.")
        names = [field.name for field in there]
        self.schema = places.arrow().schema([*there, *(field for field in given if field.name not in names)])
        """The columns of the table after this step."""
        self._parts: list[Any] = []

    @abstractmethod
    def commit(self) -> None:
        """Write the rows and :attr:`row`. Raises :class:`CheckpointError` if another commit came in between."""

    @abstractmethod
    def check(self, part: Any) -> None:
        """Raise ValueError for rows that the table would not give back."""

    def write(self, messages: Any) -> None:
        """Write a message, a list of messages or a table. Raises ValueError for a misfit."""
        target, pa = self.target, places.arrow()
        for run in columns.runs_of(messages, joined=False):
            try:
                part = self._part(run if isinstance(run, list) else columns.in_files(run))
            except pa.ArrowException:  # a value that does not fit: the rows say which
                part = self._part(columns.dicts(run, "a message"))
            lacking = [name for name in target.key if name not in part.column_names or part.column(name).null_count]
            if lacking:
                raise ValueError(
                    f"The message has no value for {lacking[0]!r}, a column of the key of {target.where!r}."
                )
            self.check(part)
            if not part.num_columns:
                raise ValueError(
                    f"The message has no value, and there is no {target.SYSTEM} table {target.where!r} yet."
                )
            self._parts.append(part)

    def _part(self, rows: Any) -> Any:
        """Return rows as a table with our columns, or for a delete with those of the key."""
        target, pa = self.target, places.arrow()
        if target.mode == "delete":
            wanted = pa.schema([self.schema.field(name) for name in target.key])
            if isinstance(rows, list):
                rows = [{name: row.get(name) for name in target.key} for row in rows]
            else:
                rows = rows.select([name for name in target.key if name in rows.column_names])
            return pa.table(formats.arrays_of(wanted, rows), schema=wanted)
        names = _names(rows)
        unknown = [name for name in names if name not in self.schema.names]
        if unknown and not target.evolve:
            raise ValueError(
                f"The message has {unknown[0]!r}, which is not a column of the {target.SYSTEM} table {target.where!r}:"
                f" {', '.join(self.schema.names)}. Try: add a stream before the sink that returns these fields, or"
                " evolve=True."
            )
        if unknown:
            rows = self._evolve(rows, unknown)
        return pa.table(formats.arrays_of(self.schema, rows), schema=self.schema)

    def _evolve(self, rows: Any, unknown: list[str]) -> Any:
        """Add columns for new fields that have a value; return the rows without the others, which are null."""
        pa = places.arrow()
        found = formats.widened(None, set(), rows) if isinstance(rows, list) else rows.schema
        new = [found.field(name) for name in unknown]
        known = {name.lower(): name for name in self.schema.names}
        for name in unknown:
            if (other := known.setdefault(name.lower(), name)) != name:
                raise ValueError(
                    f"The message has {name!r}, which differs from the column {other!r} in case only: they are one for"
                    " readers that ignore case. Try: rename the field in a stream before the sink."
                )
        added = self.target.kept([each for each in new if not pa.types.is_null(each.type)])
        self.schema = pa.schema([*self.schema, *added])
        empty = {each.name for each in new if pa.types.is_null(each.type)}
        if isinstance(rows, list):
            return [{name: value for name, value in row.items() if name not in empty} for row in rows]
        return rows.drop_columns(sorted(empty)) if empty else rows

    @property
    def rows(self) -> Any:
        """The rows that are to be written, as one table of Arrow: the last one of each key."""
        target, pa = self.target, places.arrow()
        schema = self.schema
        if target.mode == "delete":
            schema = pa.schema([schema.field(name) for name in target.key])
        parts = [_with(part, schema) for part in self._parts]
        table = pa.concat_tables(parts) if parts else schema.empty_table()
        if target.key and len(table):
            number = pa.array(range(len(table)), pa.int64())
            keys = [_without_sign(table.column(name)) for name in target.key]
            last = pa.table([*keys, number], [*target.key, "q/number"]).group_by(target.key)
            table = table.take(last.aggregate([("q/number", "max")]).column("q/number_max").sort())
        return table


class LakePositions(ABC):
    """The rows of delivery of a target as a table of positions (:class:`cues.checkpoints.PositionTable`)."""

    def __init__(self, target: LakeTarget) -> None:
        self._target = target
        self.where = target.where

    @contextmanager
    def begin(self) -> Iterator[Any]:
        connection = self._target.connect()
        yield connection
        if connection.row is not None:
            connection.commit()
        self._target.settle(connection)

    @abstractmethod
    def stored(self, connection: Any, processor: str) -> Row | None:
        """Return the row of a processor that the table has."""

    def read(self, connection: Any, processor: str, *, lock: bool) -> Row | None:
        row: Row | None = connection.row
        return self.stored(connection, processor) if lock and connection.raw is not None else row

    @abstractmethod
    def write(self, connection: Any, processor: str, row: Row, *, insert: bool) -> bool: ...

    def is_open(self, connection: Any) -> bool:
        return True

    @abstractmethod
    def processors(self, connection: Any) -> Iterable[str]: ...


def _without_sign(column: Any) -> Any:
    """Return a column of a key with 0.0 for -0.0: tables find the rows of both, and a group has only one."""
    pa = places.arrow()
    if not pa.types.is_floating(column.type):
        return column
    from pyarrow import compute

    return compute.add(column, pa.scalar(0.0, column.type))


def _names(rows: Any) -> list[str]:
    """Return the names of the fields of rows, or of the columns of a table."""
    return list(dict.fromkeys(key for row in rows for key in row)) if isinstance(rows, list) else rows.column_names


def _with(table: Any, schema: Any) -> Any:
    """Return a table with the columns of a schema; those that it does not have are null."""
    pa = places.arrow()
    names = set(table.column_names)
    columns = [table.column(f.name) if f.name in names else pa.nulls(len(table), f.type) for f in schema]
    return pa.table(columns, schema=schema)
