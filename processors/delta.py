"""Delta tables as targets of sinks, exactly once: append, upsert or delete, on a disk or in an object store.

    flights = DeltaTarget("lake/flights", schema=pa.schema({"id": pa.int64(), "city": pa.string()}))
    graph.add(flights.sink("checked", linger_s=10))

The client is delta-rs, the extra ``delta``. It is imported on first use. Spark, DuckDB, polars and all other readers
of Delta read the table, also while it is written.

A step is one commit of the table: its rows, and the position of the sink. Delta keeps a number for each *application*,
in the commit that sets it, and refuses the later one of two commits that set the number of the same one. The row of
delivery (:mod:`cues.checkpoints.deliveries`) is a few such numbers, whose names begin with ``cues:<processor>``:

    1. open      the table, at its newest version
    2. read      the numbers of the processor
    3. admit     accept the delivery or refuse it; find the messages that are new
    4. gather    the rows of the function, in memory
    5. commit    rows and numbers as the next version; refused if another commit has set the numbers since 1

An answer to 5 that is lost leaves no doubt: the numbers are read again, and 3 finds no new messages, or all of them.

    append    add each message
    upsert    add, or replace the rows with this key; the last message of a step wins
    delete    delete the rows with the keys of the messages

The columns are those of the table, which ``schema=`` makes if it is not there. A field that the message does not have
is null. A field that the table does not have fails the message; with ``evolve=True`` the table gets a column for it, as
soon as it has a value. A value that the column does not hold exactly fails the message.

Each commit makes at least one file. So let the sink wait for more messages (``linger_s=``), and compact the table from
time to time (``deltalake.DeltaTable("lake/flights").optimize.compact()``); both are safe while the sink runs.

delta-rs syncs nothing. So after each commit the files of a local table are synced, before the step is acknowledged.

Not guaranteed: more than the place keeps. A power cut in the middle of a commit may leave its version damaged: delete
its entry in ``_delta_log``, and the sink writes these messages again. What other writers add is not synced. The table
must not be restored to an earlier version, and must not forget the numbers of applications: the property
``delta.setTransactionRetentionDuration`` is refused.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from decimal import Decimal
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, unquote

import cues
from cues.arguments import options_of, path_of
from cues.checkpoints import Row, sync_file
from cues.errors import InvalidArgument
from cues.imported import package
from cues.overrides import override
from cues.processors import SINK, places, takes
from cues.processors.lake import LakeConnection, LakePositions, LakeTarget, says_away

_NEVER: Final = re.compile("unsupported table feature|append-only", re.IGNORECASE)
"""Texts of commits that fail at each attempt, and not because of another commit."""
_ANSI: Final = re.compile(r"\x1b\[[0-9;]*m|↳")
_FORGETS: Final = "delta.setTransactionRetentionDuration"
_VERSION: Final = 1
"""Of the numbers of a processor. A later version of Cues that changes them writes one more."""


def library() -> Any:
    """Return the package deltalake."""
    return package("Delta tables need delta-rs", "delta", "deltalake")


def said(error: Exception) -> str:
    """Return the text of an error of delta-rs, on one line."""
    return " ".join(_ANSI.sub("", str(error)).split())


def write(messages: Any, process: cues.Process) -> None:
    """Write the messages of a step to the table of ``checkpoint=``: the function of :meth:`DeltaTarget.sink`."""
    process.connection.write(messages)


@takes(SINK)
class DeltaTarget(LakeTarget):
    """A Delta table as the target of sinks (``checkpoint=``); see the module.

    ``where``            a directory, or a URL that delta-rs knows: ``"s3://bucket/table"``, ``az://``, ``gs://``
    ``schema``           a ``pyarrow.Schema``: the table is made with it, or has these columns; None: the table is there
    ``mode``             ``"append"``, ``"upsert"`` or ``"delete"``
    ``key``              the columns of the key of upserts and deletes
    ``partition_by``     the columns by which a new table is divided into directories
    ``evolve``           True: the table gets new columns for new fields, and is made of the first messages
    ``storage_options``  of delta-rs, such as ``{"AWS_REGION": "eu-central-1"}``

    Kind: sink
    Needs: extra `delta`
    Guarantee: exactly once: each message is in the table once, also after kill -9
    Mechanism: row of delivery in the application transactions of Delta, in the commit of the rows
    """

    SYSTEM = "Delta"

    def __init__(
        self,
        where: Any,
        *,
        schema: Any = None,
        mode: str = "append",
        key: str | Sequence[str] = (),
        partition_by: str | Sequence[str] = (),
        evolve: bool = False,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        self.where: str = where if isinstance(where, str) and "://" in where else path_of("where", where)
        self.storage_options = options_of("storage_options", storage_options or {})
        super().__init__(schema, mode, key, partition_by, evolve)
        self._settled = -1
        """The last version that this process has seen on the disk."""
        if any("`" in name for name in self.key):
            raise InvalidArgument(f"key={self.key}: delta-rs takes no ` in the name of a key.", "rename the column.")

    def sink(self, inputs: Any, **options: Any) -> cues.Sink:
        """Return a sink that writes the messages of ``inputs`` as they are; ``options`` are those of ``cues.Sink``."""
        return cues.Sink(write, inputs, **{"batch": True, "checkpoint": self, "id": "save", **options})

    @override
    def open(self) -> Any:
        """Return the ``deltalake.DeltaTable`` at its newest version; None if there is no table."""
        delta = library()
        with self.failures():
            try:
                return delta.DeltaTable(self.where, storage_options=self.storage_options)
            except delta.exceptions.TableNotFoundError:
                return None

    @override
    def make(self, schema: Any) -> None:
        with self.failures():
            library().DeltaTable.create(
                self.where, schema, mode="ignore", partition_by=self.partition_by, storage_options=self.storage_options
            )

    @override
    def settle(self, connection: Any) -> None:
        log = Path(self.where, "_delta_log")
        # The table of the connection has the version of its commit. To open it again takes 10 ms.
        if "://" in self.where or (table := connection.raw or self.open()) is None:
            return
        with self.failures():
            checkpoint = log / "_last_checkpoint"
            first = max(self._settled + 1, json.loads(checkpoint.read_bytes())["version"] if checkpoint.exists() else 0)
            found = [checkpoint]
            for version in range(first, table.version() + 1):
                entry = log / f"{version:020d}.json"
                found += [entry, *log.glob(f"{version:020d}.checkpoint*")]
                found += [Path(self.where, name) for name in _files_of(entry)]
            for file in found:
                with suppress(FileNotFoundError):  # another process has removed it from the table
                    sync_file(file)
            self._settled = table.version()

    @override
    def connect(self) -> Connection:
        return Connection(self)

    @override
    def positions(self, tailers: Iterable[str], asked: Sequence[str]) -> LakePositions:
        return _Positions(self, tailers, asked)

    @override
    def type_of(self, kind: Any) -> Any:
        pa, types = places.arrow(), places.arrow().types
        if types.is_timestamp(kind):
            return pa.timestamp("us", kind.tz and "UTC")
        if types.is_unsigned_integer(kind):
            return {8: pa.int16(), 16: pa.int32(), 32: pa.int64(), 64: pa.decimal128(20, 0)}[kind.bit_width]
        known = "signed_integer float32 float64 boolean string binary date32 decimal128"
        return kind if any(getattr(types, f"is_{each}")(kind) for each in known.split()) else None

    @override
    def schema_of(self, table: Any) -> Any:
        return places.arrow().schema(table.schema().to_arrow())

    @override
    def misfits(self, table: Any, schema: Any) -> list[str]:
        metadata = table.metadata()
        wrong = [
            f"{name} is binary, and divides the table into directories, which lose its bytes"
            for name in metadata.partition_columns
            if schema.field(name).type == places.arrow().binary()
        ]
        if set(schema.names) == set(metadata.partition_columns):
            wrong.append("all its columns divide it into directories, so its files would have none")
        if self.key and metadata.configuration.get("delta.appendOnly") == "true":
            wrong.append("it has delta.appendOnly, so no row changes")
        if self.partition_by and self.partition_by != metadata.partition_columns:
            wrong.append(f"it is divided by {metadata.partition_columns}, not by {self.partition_by}")
        if _FORGETS in metadata.configuration:
            wrong.append(f"it forgets up to where it has messages, by the property {_FORGETS}")
        return wrong

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Raise failures of delta-rs as CheckpointError, which says whether the place is away."""
        delta = library().exceptions
        try:
            yield
        except delta.TableNotFoundError:
            raise
        except (OSError, delta.DeltaError) as error:
            text = said(error)
            if "failed validation check" in text:  # a constraint: the message is the cause
                raise ValueError(f"The Delta table {self.where} refuses the message: {text}") from None
            again = "already exists" in text
            again |= isinstance(error, delta.CommitFailedError) and _NEVER.search(text) is None
            raise self.unfinished(text, again=again, away=says_away(text, self.where)) from error


takes({**SINK, "checkpoint": DeltaTarget})(write)
write.takes_columns = True  # type: ignore[attr-defined]  # its messages are given as they lie on the queue


class Connection(LakeConnection):
    """The open transaction of a :class:`DeltaTarget`: its rows are written at the end of the block."""

    target: DeltaTarget

    def __init__(self, target: DeltaTarget) -> None:
        super().__init__(target)
        self.numbers: dict[str, int] = {}
        """The numbers of applications that the commit sets."""

    @override
    def check(self, part: Any) -> None:
        """Refuse values that cannot name a directory: Delta has null for two of them, and a disk takes 255 bytes."""
        target = self.target
        by = target.partition_by if self.raw is None else self.raw.metadata().partition_columns
        most = 255 if "://" not in target.where else 1_000
        for name in by:
            values = part.column(name).unique().to_pylist() if name in part.column_names else []
            for value in values:
                text = _directory(value)
                if value in ("", "__HIVE_DEFAULT_PARTITION__"):
                    shown = f"the text {value!r}" if value else "an empty text"
                elif isinstance(value, Decimal) and value < 0 and value % 1:
                    shown = f"the number {value}, which delta-rs writes wrongly there"
                elif len(quote(f"{name}={text}", safe="")) > most:
                    shown = f"a text of {len(text)} characters"
                else:
                    continue
                raise ValueError(
                    f"The message has {shown} in {name!r}, which cannot name a directory of the table. Try: divide the"
                    " table by another column, or change the value in a stream before the sink."
                )

    @override
    def commit(self) -> None:
        """Write the rows and the numbers. Raises :class:`CheckpointError` if another owner has set them."""
        delta, target, rows = library(), self.target, self.rows
        numbers = [delta.Transaction(name, number) for name, number in self.numbers.items()]
        properties = delta.CommitProperties(app_transactions=numbers)
        if self.raw is None and not rows.num_columns:
            return  # nothing was written, and there is no table that can keep the position
        with target.failures():
            if self.raw is None:
                delta.write_deltalake(
                    target.where, rows, mode="error", partition_by=target.partition_by or None,
                    storage_options=target.storage_options, commit_properties=properties,
                )  # fmt: skip
            elif target.mode == "append" or not len(rows):
                merge: Any = "merge" if target.evolve else None
                rows = rows if target.mode != "delete" else target.schema_of(self.raw).empty_table()
                delta.write_deltalake(self.raw, rows, mode="append", schema_mode=merge, commit_properties=properties)
            else:
                same = " and ".join(f"target.{name} = source.{name}" for name in map(_quoted, target.key))
                merger = self.raw.merge(
                    rows, same, "source", "target", merge_schema=target.evolve, commit_properties=properties
                )
                before = self.raw.version()
                if target.mode == "delete":
                    merger.when_matched_delete().execute()
                else:
                    merger.when_matched_update_all().when_not_matched_insert_all().execute()
                if self.raw.version() == before:  # no row was found, so delta-rs committed nothing
                    empty = target.schema_of(self.raw).empty_table()
                    delta.write_deltalake(self.raw, empty, mode="append", commit_properties=properties)


class _Positions(LakePositions):
    """A row is read for the tailers of one delivery: the numbers of others stay as they are."""

    def __init__(self, target: DeltaTarget, tailers: Iterable[str], asked: Sequence[str]) -> None:
        super().__init__(target)
        self._tailers, self._asked = sorted(tailers), asked

    @override
    def stored(self, connection: Connection, processor: str) -> Row | None:
        version = connection.raw.transaction_version
        if (generation := version(f"cues:{processor}:generation")) is None:
            return None
        if (of := version(f"cues:{processor}:version") or _VERSION) != _VERSION:
            return Row.kept({"cues": of}, f"The numbers of {processor} in the table {self.where}", "use another table.")
        store, epoch, *hashes = (version(f"cues:{processor}:{name}") for name in ("store", "epoch", "hash", "hash-low"))
        ends, seals = {}, {}
        for tailer in self._tailers:
            end, seal = (version(f"cues:{processor}:{generation}:{tailer}:{name}") for name in ("end", "seal"))
            if end is not None:
                ends[tailer], seals[tailer] = end, _text(seal) if seal else ""
        return Row(_text(store), generation, epoch, ends, "".join(map(_text, hashes)), seals)

    @override
    def write(self, connection: Connection, processor: str, row: Row, *, insert: bool) -> bool:
        connection.row = row
        numbers = {
            "generation": row.generation,
            "store": _number(row.store),
            "epoch": row.epoch,
            "hash": _number(row.hash[:16]),
            "hash-low": _number(row.hash[16:]),
        }
        for tailer, end in row.ends.items():
            numbers[f"{row.generation}:{tailer}:end"] = end
            numbers[f"{row.generation}:{tailer}:seal"] = _number(row.seals.get(tailer, ""))
        connection.numbers = {f"cues:{processor}:{name}": number for name, number in numbers.items()}
        if insert and "/" in processor:  # for holds, which does not know the partitions
            base = f"cues:{processor.partition('/')[0]}:partitions"
            if connection.raw is None or connection.raw.transaction_version(base) is None:
                connection.numbers[base] = 1
        return True

    @override
    def processors(self, connection: Connection) -> Iterable[str]:
        if connection.raw is None:
            return []
        version = connection.raw.transaction_version
        names = "generation", "partitions"
        return [id for id in self._asked if any(version(f"cues:{id}:{name}") is not None for name in names)]


def _files_of(entry: Path) -> Iterator[str]:
    """Yield the names of the files that an entry of the log adds, in the directory of the table."""
    with suppress(FileNotFoundError):
        for line in entry.read_bytes().splitlines():
            action = json.loads(line)
            for kind in ("add", "cdc"):
                if kind in action:
                    yield unquote(action[kind]["path"])


def _number(digits: str) -> int:
    """Return 16 hex digits as a number of 64 bits with a sign; 0 for none."""
    return int.from_bytes(bytes.fromhex(digits), "big", signed=True)


def _text(number: int) -> str:
    return number.to_bytes(8, "big", signed=True).hex()


def _directory(value: Any) -> str:
    """Return the text of a value in the name of a directory: delta-rs writes numbers without exponents."""
    if isinstance(value, float):
        value = Decimal(repr(value))
    return format(value, "f") if isinstance(value, Decimal) else str(value)


def _quoted(name: str) -> str:
    return f"`{name}`"
