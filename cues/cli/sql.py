"""``cues sql``: a query over the queues and states of a graph, also while it runs."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from cues.base.texts import count
from cues.cli.options import WrongUsage, command, given, option
from cues.cli.output import CommandOutput, TableColumn, output_options
from cues.cli.printing import data, lost
from cues.cli.target import takes_place
from cues.jsontext import plain, show
from cues.operate.place import Place
from cues.operate.sql import result_of, rows_of
from cues.txn.journals import written_whole


@command()
@takes_place("GRAPH | STORE | DIR")
@click.argument("query")
@option("--meta", is_flag=True, help="Also the columns q/partition, q/index and q/time of each message.")
@option("--csv", "as_csv", is_flag=True, help="The result as CSV, with a header.")
@option("--parquet", metavar="FILE", type=click.Path(path_type=Path), help="Write the result to a new Parquet file.")
@output_options
def sql(place: Place, query: str, meta: bool, as_csv: bool, parquet: Path | None, output: CommandOutput) -> None:
    """Run a SQL query over the queues of a graph. DuckDB computes it, and changes nothing.

    A queue is a table by its name, with a column for each field. The state of a processor is the table
    state_PROCESSOR with the columns key, field and value. Names with other signs than letters, digits and _ are
    written in double quotes. With - the query is read from standard input. The graph may run meanwhile.

    \b
      cues sql graph.py "select city, count(*) from orders group by 1 order by 2 desc"
      cues sql graph.py "select * from orders where \\"q/time\\" > now() - interval 1 hour" --meta
      cues sql data/shop "select key, value from state_totals" --csv > totals.csv
      cues sql data/shop "from orders" --parquet orders.parquet
    """
    if as_csv and (parquet is not None or given("output")):
        other = "--parquet" if parquet is not None else f"--{output.form}"
        raise WrongUsage(f"--csv and {other} are two forms of the result.", "give one of them.")
    if parquet is not None and parquet.exists():
        raise WrongUsage(f"The file {parquet} exists already.", "give another name, or remove the file.")
    with result_of(sys.stdin.read() if query == "-" else query, place.tables(meta)) as result:
        if parquet is not None:
            written = _to_parquet(result, parquet)
            output.say(f"{count(written, 'row')} written to {parquet}", file=str(parquet), rows=written)
        elif as_csv:
            for line in _csv(result):
                if not data(line.encode()):
                    break
        elif output.json:
            for batch in result:
                if lost():
                    break
                output.rows(rows_of(batch), ())
        else:
            rows = [row for batch in result for row in rows_of(batch)]
            numbers = {field.name for field in result.schema if _is_number(field.type)}
            output.rows(rows, [TableColumn(name, name, right=name in numbers) for name in result.schema.names])


def _is_number(kind: Any) -> bool:
    return str(kind).startswith(("int", "uint", "float", "double", "decimal"))


def _csv(result: Any) -> Iterator[str]:
    """The lines of a result as CSV; values in the forms of JSON, nested ones as JSON."""
    yield _line(result.schema.names)
    for batch in result:
        for row in rows_of(batch):
            yield _line(row.values())


def _line(values: Any) -> str:
    text = io.StringIO()
    cells = [show(value) if isinstance(simple := plain(value), (dict, list)) else simple for value in values]
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def _to_parquet(result: Any, file: Path) -> int:
    import pyarrow.parquet

    rows = 0
    with written_whole(file) as target, pyarrow.parquet.ParquetWriter(target, result.schema) as writer:
        for batch in result:
            writer.write_batch(batch)
            rows += batch.num_rows
    return rows
