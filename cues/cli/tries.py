"""``cues tries``: the steps of a processor, from its try log, or from its records in a shared directory."""

from __future__ import annotations

from cues.cli.options import Count, command, limit_of, option
from cues.cli.output import CommandOutput, TableColumn, output_options
from cues.cli.printing import out
from cues.cli.tail import LAST
from cues.cli.target import takes_place
from cues.operate.place import Place
from cues.operate.target import processor_named

_COLUMNS = (
    TableColumn("time", "time"),
    TableColumn("hash", "hash"),
    TableColumn("took", "took"),
    TableColumn("outcome", "outcome"),
    TableColumn("wrote", "wrote"),
)


@command()
@takes_place("GRAPH#PROCESSOR | STORE#GRAPH.PROCESSOR")
@option("--count", "-n", "count", type=Count(), default=LAST, help="The number of last steps.  [default: 10]")
@output_options
def tries(place: Place, count: int | str, output: CommandOutput) -> None:
    """List the last steps of a processor: the messages that each took, its hash, and its outputs.

    A step is a snapshot and an attempt with the same hash. A snapshot without its attempt did not commit: the
    next start takes exactly the same messages again.

    \b
      cues tries graph.py#enrich
      cues tries data/flights#flights.enrich -n all
      cues tries s3://bucket/flights#flights.enrich      a directory of cues run --queues

    In JSON each map is a line, as the processor wrote it; `cues tail STORE#GRAPH.PROCESSOR` follows those of a store.
    A try log keeps at least its last 256 steps.

    In a directory of cues run --queues the list has the processor's records: its steps, each start of a driver
    ("claimed"), and each cues seek ("moved"). The last 256 records are kept.
    """
    processor = processor_named(place.target, place.processors())
    steps = place.steps(processor, limit_of(count))
    if output.json:
        output.rows([record for step in steps for record in step["maps"]], ())
    elif not steps:
        out(f"{processor} has made no step yet.")
    else:
        rows = [step | {"hash": step["hash"] and step["hash"][:12] + "…", "time": step["time"][:23]} for step in steps]
        output.rows(rows, _COLUMNS)
