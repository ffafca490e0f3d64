"""Values in sinks: every type into every format is the same value, a documented plainer form, or refused by its column.

The table in docs/processors.md is what this test finds: ``python tests/test_values.py`` writes it.
"""

from __future__ import annotations

import csv
import io
import json
import sys
import tempfile
import uuid
from collections.abc import Callable
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from sets import slow_except

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
    "float": (1.5, "float"),
    "NaN": (float("nan"), "float"),
    "infinity": (float("inf"), "float"),
    "Decimal": (Decimal("1.50"), "decimal"),
    "Decimal NaN": (Decimal("NaN"), "decimal"),
    "text": ('a,"\r\n', "text"),
    "text in json": ("5", "json"),
    "bytes": (b"\xff", "bytes"),
    "datetime with a zone": (datetime(2026, 1, 2, 3, 4, 5, 6, EAST), "timestamp"),
    "datetime without": (datetime(2026, 1, 2, 3, 4, 5, 6), "timestamp"),
    "datetime without, `fold=1`": (datetime(2026, 1, 2, 3, fold=1), "timestamp"),
    "date": (date(2026, 1, 2), "date"),
    "time": (time(1, 2, 3, 4), "time"),
    "time with an offset": (time(1, 2, tzinfo=EAST), "time"),
    "timedelta": (timedelta(days=40, microseconds=1), "text"),
    "UUID": (uuid.UUID(int=7), "uuid"),
    "list": ([1, None], "json"),
    "list of mixed types": ([1, "a"], "json"),
    "dict": ({"a": 1}, "json"),
    "empty dict": ({}, "json"),
    "dict with NaN": ({"a": float("nan")}, "json"),
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


FORMATS = ["jsonl", "csv", "parquet", "arrow", "sqlite", "duckdb", "postgres"]


def format_of(name: str, folder: Path, postgres: Callable[[], Any]) -> Callable[..., Any]:
    if name in ("jsonl", "csv"):
        return in_file(name)
    if name in ("parquet", "arrow"):
        pytest.importorskip("pyarrow")
        return in_file(name)
    pytest.importorskip("sqlalchemy")
    if name == "postgres":
        return in_table(postgres().database())
    if name == "duckdb":
        pytest.importorskip("duckdb")
        pytest.importorskip("pytz")
    return in_table(str(folder / f"a.{'db' if name == 'sqlite' else name}"))


@pytest.fixture(params=slow_except(FORMATS[:-1], FORMATS))
def there_and_back(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return format_of(request.param, tmp_path, lambda: request.getfixturevalue("postgres"))


def result(there_and_back: Callable[..., Any], value: Any, family: str, *ddl: str) -> Any:
    """The value that is read for a value; REFUSED if its message fails with the name of its column."""
    try:
        return there_and_back(value, family, *ddl)
    except (ValueError, TypeError) as error:
        return REFUSED if "column 'v" in str(error) else f"{error}, which does not name the column"


def is_same(found: Any, value: Any) -> bool:
    return (found == value or (found != found and value != value)) and isinstance(found, type(value))


# --- the table --------------------------------------------------------------------------------------


def cell(found: Any, value: Any) -> str:
    if is_same(found, value):
        return "same"
    return found if found == REFUSED else f"`{found!r}`" if found != "" else "empty"


def column(there_and_back: Callable[..., Any]) -> list[str]:
    return [cell(result(there_and_back, value, family), value) for value, family in SAMPLES.values()]


def printed(format: str) -> list[str]:
    """The cells of a format in the page."""
    lines = [line.split(" | ") for line in PAGE.read_text().partition(MARK)[2].strip().split("\n\n")[0].splitlines()]
    at = lines[0].index(format) if format in lines[0] else len(lines[0]) - 1
    return [line[at].removesuffix(" |") for line in lines[2:]]


def test_the_table_of_the_page_is_what_the_sinks_do(there_and_back: Any, request: pytest.FixtureRequest) -> None:
    format = request.node.callspec.params["there_and_back"]
    assert column(there_and_back) == printed(format), "run: python tests/test_values.py"


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
    return isinstance(found, str) and isinstance(value, (list, dict)) and json.loads(found) == value


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("there_and_back", slow_except(FORMATS[4:6], FORMATS[4:]), indirect=True)
def test_no_column_of_a_database_changes_a_value_silently(there_and_back: Any, family: str) -> None:
    for value, _ in SAMPLES.values():
        found = result(there_and_back, value, family)
        same = found is REFUSED or is_same(found, value) or is_plainer(found, value)
        assert same or (family == "json" and json.loads(found) == value), (value, found)


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


@pytest.mark.parametrize("there_and_back", slow_except(FORMATS[4:6], FORMATS[4:]), indirect=True)
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
    import postgres

    with tempfile.TemporaryDirectory() as folder, postgres.running() as server:
        found = {name: column(format_of(name, Path(folder), lambda: server)) for name in FORMATS}
    before, _, after = PAGE.read_text().partition(MARK)
    PAGE.write_text(f"{before}{MARK}\n{table(found)}\n{after.lstrip().partition(chr(10) * 2)[2]}")
    sys.stdout.write(f"{PAGE} written\n")
