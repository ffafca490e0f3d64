"""Values in sinks: every type into every format is the same value, a documented plainer form, or refused by its column.

The table in docs/processors.md is what this test finds: ``python tests/test_values.py`` writes it.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import tempfile
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import contracts_sinks
import pytest
from sets import slow_except
from small import ENCODERS
from test_processors_docs import declared, loaded

import cues
from cues import codec, jsontext, processors, testing
from cues.errors import SchemaError
from cues.processors import formats
from cues.processors.sql_sink import Table, Writer

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "processors.md"
MARK = "<!-- table: python tests/test_values.py -->\n"
EAST = timezone(timedelta(hours=2))
REFUSED = "refused"

SAMPLES: dict[str, tuple[Any, str]] = {
    "None": (None, "text"),
    "bool": (True, "boolean"),
    "int": (7, "integer"),
    "int of more than 63 bits": (1 << 63, "integer"),
    "int of more than 64 bits": (-(1 << 70), "integer"),
    "float": (1.5, "float"),
    "-0.0": (-0.0, "float"),
    "NaN": (float("nan"), "float"),
    "infinity": (float("inf"), "float"),
    "Decimal": (Decimal("1.50"), "decimal"),
    "Decimal with an exponent": (Decimal("1E+3"), "decimal"),
    "Decimal of 60 digits": (Decimal("1." + "1" * 59), "decimal"),
    "Decimal NaN": (Decimal("NaN"), "decimal"),
    "Decimal infinity": (Decimal("Infinity"), "decimal"),
    "text": ('a,"\r\n', "text"),
    "empty text": ("", "text"),
    "text like a number, with blanks": (" 007 ", "text"),
    "text with NUL": ("a\0b", "text"),
    "text with other line ends": ("\ufeffa\u2028\x85", "text"),
    "text in json": ("5", "json"),
    "bytes": (b"\xff", "bytes"),
    "empty bytes": (b"", "bytes"),
    "datetime with a zone": (datetime(2026, 1, 2, 3, 4, 5, 6, EAST), "timestamp"),
    "datetime without": (datetime(2026, 1, 2, 3, 4, 5, 6), "timestamp"),
    "datetime without, `fold=1`": (datetime(2026, 1, 2, 3, fold=1), "timestamp"),
    "the first datetime": (datetime(1, 1, 1, tzinfo=UTC), "timestamp"),
    "the last datetime": (datetime(9999, 12, 31, 23, 59, 59, 999_999, UTC), "timestamp"),
    "date": (date(2026, 1, 2), "date"),
    "the first date": (date(1, 1, 1), "date"),
    "time": (time(1, 2, 3, 4), "time"),
    "time, `fold=1`": (time(1, fold=1), "time"),
    "time with an offset": (time(1, 2, tzinfo=EAST), "time"),
    "timedelta": (timedelta(days=40, microseconds=1), "text"),
    "the longest timedelta": (timedelta.max, "text"),
    "UUID": (uuid.UUID(int=7), "uuid"),
    "list": ([1, None], "json"),
    "list of mixed types": ([1, "a"], "json"),
    "list of bool and int": ([True, 1], "json"),
    "empty list": ([], "json"),
    "list of lists": ([[1], []], "json"),
    "list of dicts with other keys": ([{"a": 1}, {"b": "x"}], "json"),
    "list of dates": ([date(2026, 1, 2)], "json"),
    "tuple": ((1, 2), "json"),
    "set": ({1}, "json"),
    "frozenset": (frozenset([1]), "json"),
    "dict": ({"a": 1}, "json"),
    "empty dict": ({}, "json"),
    "dict with NaN": ({"a": float("nan")}, "json"),
    "dict with NUL": ({"a": "x\0"}, "json"),
    "dict of dicts": ({"a": {"b": {"c": [1.5]}}}, "json"),
    "dict with an empty key": ({"": 1}, "json"),
    "dict whose keys are int": ({1: "a"}, "json"),
}
"""A value of each type, and the column of databases for it."""


# --- into a format and back -----------------------------------------------------------------------


def in_file(format: str) -> Callable[[Any, str], Any]:
    """Write the value as the sink does, finish the file, and read it as others do."""

    def there_and_back(value: Any, family: str) -> Any:
        encoding = formats.make(format, None, None, None, ",")
        added = encoding.add(False, None, [{"v": value}])
        out = io.BytesIO()
        encoding.finish(io.BytesIO(added.data), out, added.layout)
        if format == "jsonl":
            return json.loads(out.getvalue())["v"]
        if format == "csv":
            return list(csv.reader(io.StringIO(out.getvalue().decode(), newline="")))[1][0]
        if format == "parquet":
            return __import__("pyarrow.parquet").parquet.read_table(io.BytesIO(out.getvalue())).column("v")[0].as_py()
        return __import__("pyarrow").ipc.open_file(out.getvalue()).read_all().column("v")[0].as_py()

    return there_and_back


def in_table(url: str) -> Callable[[Any, str], Any]:
    """Write the value into a table of its own, which the sink makes, and read it with the driver."""
    made = iter(range(10_000))

    def there_and_back(value: Any, family: str, ddl: str | None = None) -> Any:
        table, found = Table(url, f"t{next(made)}", {"v": family} if family else ["v"]), []

        def write(raw: Any) -> None:
            writer = Writer(table, raw)
            if ddl is not None:
                writer.run(f"create table {table.table} (v {ddl})")
            writer.make_or_check()
            writer.write({"v": value})
            found.extend(writer.rows(f"select v from {table.table}"))

        try:
            table.target.set_up(write)
        finally:
            table.close()
        ((kept,),) = found
        return kept

    return there_and_back


def in_lake(kind: str) -> Callable[[Path], list[Any]]:
    """Write all samples, each into a column of its own, in one step; and read the table with its library."""

    def kept(folder: Path) -> list[Any]:
        target: Any = contracts_sinks.SINKS[kind].make(folder / kind)
        samples, problems = [value for value, _ in SAMPLES.values()], {}

        def write(messages: list[Any], process: cues.Process) -> None:
            for message in messages:
                try:
                    process.connection.write({"n": message["n"], f"v{message['n']}": samples[message["n"]]})
                except ValueError as error:
                    problems[message["n"]] = error

        sink = cues.Sink(write, "q", id="save", batch=True, checkpoint=target)
        with testing.temporary_store() as store:
            store.queue("q").appender().write_many([{"n": n} for n in range(len(samples))])
            testing.run_until_idle(cues.Graph("g", [cues.Source("q"), sink]), store)
        rows = (contracts_sinks.delta_rows if kind == "delta" else contracts_sinks.iceberg_rows)(target)
        found = {row["n"]: row.get(f"v{row['n']}") for row in rows}
        return [refusal(problems[n]) if n in problems else found[n] for n in range(len(samples))]

    return kept


FORMATS = ["jsonl", "csv", "parquet", "arrow", "sqlite", "duckdb", "postgres", "mysql", "delta", "iceberg"]
LAKES = FORMATS[-2:]
DATABASES = FORMATS[4:-2]
OWN_TYPES = DATABASES[:-1]
"""Those whose columns of other types are tested here; test_processors_mysql_tables.py has those of MySQL."""
IN_JSON = (
    "kafka-topic", "mqtt-publisher", "rabbitmq-publisher", "sqs-sender", "kinesis-sender", "redis-target",
    "nats-subject", "http-requests",
)  # fmt: skip
COLUMNS_OF = {
    "file-sink": ["jsonl", "csv", "parquet", "arrow"],
    "sql-table": DATABASES,
    "delta-target": ["delta"],
    "iceberg-target": ["iceberg"],
    **{name: ["jsonl"] for name in IN_JSON},
    "link-sender": [],  # messages, as the queue has them
    "sqlite": [],  # the driver, in a function of the user
    "duckdb": [],
}
"""Of each ready-made sink: the columns of the table that say what it writes."""


def test_every_sink_has_a_column_in_the_table() -> None:
    """A new sink, format of files or type of values is to be declared here."""
    points = declared()
    sinks = {name for name in points if processors.facts_of(loaded(points[name]))["Kind"].startswith("sink")}
    assert sinks == set(COLUMNS_OF)
    assert set(formats.FORMATS) - {"text"} == set(COLUMNS_OF["file-sink"])
    types = {type(value) for value, _ in SAMPLES.values()}
    own = {kind for kind, (code, _) in ENCODERS.items() if code > codec.USER_CODE_MAX}
    assert own | {type(None), bool, int, float, str, bytes, list, dict} <= types


def format_of(name: str, folder: Path, server: Callable[[str], Any]) -> Callable[..., Any]:
    if name in ("jsonl", "csv"):
        return in_file(name)
    if name in ("parquet", "arrow"):
        pytest.importorskip("pyarrow")
        return in_file(name)
    pytest.importorskip("sqlalchemy")
    if name in ("postgres", "mysql"):
        return in_table(server(name).database())
    if name == "duckdb":
        pytest.importorskip("duckdb")
        pytest.importorskip("pytz")
    return in_table(str(folder / f"a.{'db' if name == 'sqlite' else name}"))


SERVERS = {"postgres": "postgres", "mysql": "mariadb"}
"""The fixture of the server of a database."""


@pytest.fixture(params=[*slow_except(FORMATS[:5], FORMATS[:-3]), pytest.param("mysql", marks=pytest.mark.long)])
def there_and_back(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return format_of(request.param, tmp_path, lambda name: request.getfixturevalue(SERVERS[name]))


def result(there_and_back: Callable[..., Any], value: Any, family: str, *ddl: str) -> Any:
    """The value that is read for a value; REFUSED if its message fails with the name of its column."""
    try:
        return there_and_back(value, family, *ddl)
    except Exception as error:  # also of a driver, whose database names the column
        return refusal(error)


def refusal(error: Exception) -> str:
    return REFUSED if re.search(r"column ('v|\S+`v`)", str(error)) else f"{error}, which does not name the column"


def is_same(found: Any, value: Any) -> bool:
    """Return whether a value is equal to another one: NaN to NaN, -0.0 not to 0.0, and no int to a bool or a float."""
    if isinstance(value, (float, list, dict)):
        return repr(found) == repr(value)
    same = found == value or (value != value and found != found)
    return same and isinstance(found, type(value)) and getattr(found, "fold", 0) == getattr(value, "fold", 0)


# --- the table --------------------------------------------------------------------------------------


def cell(found: Any, value: Any) -> str:
    if is_same(found, value):
        return "same"
    return found if found == REFUSED else f"`{found!r}`" if found != "" else "empty"


def column(there_and_back: Callable[..., Any]) -> list[str]:
    return cells([result(there_and_back, value, family) for value, family in SAMPLES.values()])


def cells(found: list[Any]) -> list[str]:
    return [cell(each, value) for each, (value, _) in zip(found, SAMPLES.values(), strict=True)]


def printed(format: str) -> list[str]:
    """The cells of a format in the page."""
    lines = [line.split(" | ") for line in PAGE.read_text().partition(MARK)[2].strip().split("\n\n")[0].splitlines()]
    at = lines[0].index(format) if format in lines[0] else len(lines[0]) - 1
    return [line[at].removesuffix(" |") for line in lines[2:]]


def test_the_table_of_the_page_is_what_the_sinks_do(there_and_back: Any, request: pytest.FixtureRequest) -> None:
    format = request.node.callspec.params["there_and_back"]
    assert column(there_and_back) == printed(format), "run: python tests/test_values.py"


@pytest.mark.slow
@pytest.mark.parametrize("kind", LAKES)
def test_the_table_of_the_page_is_what_tables_in_files_get(kind: str, tmp_path: Path) -> None:
    pytest.importorskip(*contracts_sinks.SINKS[kind].needs)
    assert cells(in_lake(kind)(tmp_path)) == printed(kind), "run: python tests/test_values.py"


def in_columns(queue: cues.Queue, at: int) -> Any:
    """The value of a message in the table of it; REFUSED with the place of the value."""
    try:
        return queue.to_arrow(at, at + 1)["v"][0].as_py()
    except SchemaError as error:
        return REFUSED if "$[0].v" in str(error) else error


def test_a_queue_has_every_value_as_it_was_written_and_a_table_of_it_has_it_or_refuses_it() -> None:
    """As rows; and as columns, which no value enters in another form but a tuple, as a list, and a dict of a struct."""
    pytest.importorskip("pyarrow")
    with testing.temporary_store() as store:
        queue = store.queue("q")
        queue.appender().write_many([{"v": value} for value, _ in SAMPLES.values()])
        kept = list(queue.tailer())
        for at, (name, (value, _)) in enumerate(SAMPLES.items(), 1):
            assert is_same(kept[at - 1]["v"], value), name
            found = in_columns(queue, at)
            if found is REFUSED:
                continue
            if isinstance(value, tuple):
                value = list(value)
            if name == "list of dicts with other keys":
                value = [{"a": 1, "b": None}, {"a": None, "b": "x"}]
            assert is_same(found, value), name


MIXED: list[list[Any]] = [
    [date(2026, 1, 2), datetime(2026, 1, 2, 3)],
    [datetime(2026, 1, 2), datetime(2026, 1, 2, tzinfo=UTC)],
    [b"a", "a"], [time(1), time(1, tzinfo=UTC)], [time(1), time(1, fold=1)], [[1], {1}],
    [True, 1], [1, "1"], [(1 << 53) + 1, 0.5], [{"a": date(2026, 1, 2)}, {"a": datetime(2026, 1, 2, 3)}],
    [[time(1)], [time(1, tzinfo=UTC)]], [Decimal(1), 0.5], [{"a": 1}, [1]],
]  # fmt: skip


@pytest.mark.parametrize("values", MIXED, ids=str)
def test_no_column_of_a_queue_mixes_types_that_it_would_change(values: list[Any]) -> None:
    pytest.importorskip("pyarrow")
    for mixed in (values, values[::-1]):
        with testing.temporary_store() as store:
            store.queue("q").appender().write_many([{"v": value} for value in mixed])
            with pytest.raises(SchemaError, match=r"\$\[\d\].v"):
                store.queue("q").to_arrow()


def table(columns: dict[str, list[str]]) -> str:
    lines = ["| value | column | " + " | ".join(columns) + " |", "|---" * (2 + len(columns)) + "|"]
    for at, (name, (_, family)) in enumerate(SAMPLES.items()):
        lines.append(f"| {name} | {family} | " + " | ".join(cells[at] for cells in columns.values()) + " |")
    return "\n".join(lines) + "\n"


# --- columns of databases that are not the value's own ----------------------------------------------

FAMILIES = ["integer", "float", "decimal", "boolean", "text", "bytes", "timestamp", "date", "time", "uuid", "json"]


def is_plainer(found: Any, value: Any) -> bool:
    """Return whether a result is a documented form of a value (cues/processors/sql_values.py)."""
    if isinstance(found, str) and found[:1] == '"' != value:  # JSON of what is text there
        found = json.loads(found)
    if isinstance(value, (int, float, Decimal)):
        exact = Decimal(repr(value)) if isinstance(value, float) else value
        return bool(found in (value, exact) or str(found) in (str(value), str(exact)))
    if isinstance(value, (date, time)):
        return str(found).replace(" ", "T") == value.isoformat()
    if isinstance(value, (Decimal, uuid.UUID)):
        return bool(found == str(value))
    return isinstance(found, str) and isinstance(value, (list, tuple, dict)) and json.loads(found) == in_json(value)


def in_json(value: Any) -> Any:
    """The value that readers of JSON have."""
    return json.loads(jsontext.encode(value))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("there_and_back", slow_except(["sqlite"], OWN_TYPES), indirect=True)
def test_no_column_of_a_database_changes_a_value_silently(there_and_back: Any, family: str, stride: int) -> None:
    """Of each family some of the samples, which begin at another one; in the long set all of them."""
    for value, _ in [*SAMPLES.values()][FAMILIES.index(family) % stride :: stride]:
        found = result(there_and_back, value, family)
        same = found is REFUSED or is_same(found, value) or is_plainer(found, value)
        if not same and family == "json":
            same = (json.loads(found) if isinstance(found, str) else found) == in_json(value)
        assert same, (value, found)


DAY = datetime(2026, 1, 2)
TYPES: dict[str, list[tuple[str, Any, Any]]] = {
    "sqlite": [
        ("numeric", Decimal("1.50"), 1.5), ("numeric", Decimal("1.234567890123456789"), REFUSED), ("text", 7, REFUSED),
        ("integer", "007", REFUSED), ("integer", "x7", "x7"), ("", "007", "007"), ("", 1 << 60, 1 << 60),
        ("real", (1 << 60) + 1, REFUSED), ("real", 7, 7.0), ("varchar(1)", "abc", "abc"), ("blob", "7", "7"),
        ("datetime", DAY, "2026-01-02 00:00:00"), ("text", {"a": [1]}, '{"a": [1]}'),
    ],
    "duckdb": [
        ("timestamp", DAY, DAY), ("timestamp", DAY.replace(tzinfo=UTC), REFUSED),
        ("timestamptz", datetime(1, 1, 1, tzinfo=EAST), REFUSED),
        ("timestamp_s", datetime(2026, 1, 2, 0, 0, 0, 1), REFUSED),
        ("decimal(5, 2)", Decimal("1.555"), REFUSED), ("decimal(5, 2)", 0.1, Decimal("0.10")), ("tinyint", 300, None),
        ("hugeint", 1 << 100, 1 << 100), ("hugeint", 1 << 128, REFUSED), ("ubigint", (1 << 64) - 1, (1 << 64) - 1),
        ("ubigint", -1, REFUSED), ("integer[]", [1, None, 2.0], [1, None, 2]), ("integer[]", [1.5], REFUSED),
        ("date[]", [date(2026, 1, 2)], [date(2026, 1, 2)]), ("date[]", [datetime(2026, 1, 2, 3)], REFUSED),
        ("struct(a integer, b date[])", {"A": 1, "b": [None]}, {"a": 1, "b": [None]}),
        ("struct(a integer)", {"b": 1}, REFUSED),
        ("struct(a integer)", {"a": 1.5}, REFUSED), ("map(varchar, integer)", {"x": 1}, {"x": 1}),
        ("integer[]", 1, REFUSED), ("map(varchar, integer)", {"x": 1.5}, REFUSED),
        ("struct(a integer)", "{'a': 1.5}", REFUSED),
        ("interval", timedelta(days=1, microseconds=1), timedelta(days=1, microseconds=1)), ("interval", 5, REFUSED),
        ("real", 1e300, REFUSED), ("timetz", time(1, tzinfo=EAST), time(1, tzinfo=EAST)),
        ("time", time(1, fold=1), REFUSED),
    ],
    "postgres": [
        ("timestamp", DAY, DAY), ("timestamp", DAY.replace(tzinfo=UTC), REFUSED),
        ("timestamptz", DAY, REFUSED), ("timestamp(0)", datetime(2026, 1, 2, 0, 0, 0, 1), REFUSED),
        ("time(3)", time(1, 2, 3, 4), REFUSED), ("timetz", time(1, tzinfo=EAST), time(1, tzinfo=EAST)),
        ("numeric(5, -2)", 150, REFUSED), ("numeric(5, -2)", 1500, Decimal(1500)), ("bytea", "\\x41", REFUSED),
        ("varchar(2)", "a   ", REFUSED), ("varchar(2)", "ab", "ab"), ("integer[]", [1, None], [1, None]),
        ("integer[]", [1.5], REFUSED), ("timestamptz[]", [DAY], REFUSED), ("inet", "1.2.3.4", ...),
        ("interval", timedelta(days=1), timedelta(days=1)), ("jsonb", "a", "a"), ("text", 7, REFUSED),
        ("text", DAY.replace(tzinfo=UTC), "2026-01-02T00:00:00+00:00"), ("money", 5, REFUSED),
        ("double precision", Decimal("0.1"), REFUSED),
    ],
}  # fmt: skip
"""Types of tables that others made: a value, and its result. None: the database refuses it. ``...``: any."""


@pytest.mark.parametrize("there_and_back", slow_except(["sqlite"], OWN_TYPES), indirect=True)
def test_a_table_that_others_made_gets_the_value_or_the_message_fails(
    there_and_back: Any, request: pytest.FixtureRequest
) -> None:
    for ddl, value, kept in TYPES[request.node.callspec.params["there_and_back"]]:
        if kept is None:
            with pytest.raises(Exception, match=r"(?i)range|conver"):
                there_and_back(value, "", ddl)
            continue
        found = result(there_and_back, value, "", ddl)
        assert kept is ... or is_same(found, kept), (ddl, value, found)


@pytest.mark.slow
def test_a_domain_is_its_base(postgres: Any) -> None:
    there_and_back = in_table(postgres.database())
    there_and_back(1, "", "integer); create domain day as timestamp; create table other (d day")
    assert result(there_and_back, DAY.replace(tzinfo=UTC), "", "day") is REFUSED
    assert result(there_and_back, DAY, "", "day") == DAY


if __name__ == "__main__":
    import mariadb_server
    import postgres

    with tempfile.TemporaryDirectory() as folder, postgres.running() as one, mariadb_server.running() as other:
        servers, path = {"postgres": one, "mysql": other}, Path(folder)
        found = {name: column(format_of(name, path, servers.__getitem__)) for name in FORMATS if name not in LAKES}
        found |= {name: cells(in_lake(name)(path)) for name in LAKES}
    before, _, after = PAGE.read_text().partition(MARK)
    PAGE.write_text(f"{before}{MARK}\n{table(found)}\n{after.lstrip().partition(chr(10) * 2)[2]}")
    sys.stdout.write(f"{PAGE} written\n")
