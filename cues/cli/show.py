"""``cues show``: the graph as text, as Mermaid and as a picture."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import click

from cues.base import shown
from cues.cli.options import WrongUsage, candidates_of, command, option
from cues.cli.output import CommandOutput, output_options
from cues.cli.printing import out
from cues.graphs import draw, graphfile
from cues.graphs.graph import ENGINES
from cues.graphs.plan import Plan
from cues.operate.runs import RunRequest

FORMATS: Final = ("text", "mermaid", "svg")
_STYLE: Final = "<style>svg{color:#24292f}@media(prefers-color-scheme:dark){svg{color:#e6edf3}}</style>"
"""In a file of its own the picture has no text around it, whose colour it takes."""


@command()
@click.argument("graph", metavar="GRAPH", shell_complete=candidates_of("names"))
@option("--format", type=click.Choice(FORMATS), default="text", show_default=True, help="How to draw it.")
@option(
    "--engine",
    type=click.Choice(tuple(ENGINES)),
    default="embedded",
    help="Also print where this engine calls the functions.",
)
@option("--queues", metavar="DIR", help="With --engine spark: the directory of the queues.")
@output_options
def show(graph: str, format: str, engine: str, queues: str | None, output: CommandOutput) -> None:
    """Draw a graph: the inputs, the outputs and the guarantee of each processor.

    No store is opened and no function is run; the graph is checked as by a run.

    \b
      cues show graph.py
      cues show graph.py --format mermaid > graph.mmd
      cues show graph.py --format svg > graph.svg
      cues show graph.py --json | jq .guarantee
      cues show graph.py --engine spark
      cues show graph.py --engine spark --queues s3://bucket/flights
    """
    if not graphfile.is_file(graph):
        raise WrongUsage(
            f"{graph} is not a graph file, and a store does not contain the graph.",
            "cues show graph.py",
        )
    declared = graphfile.load(graph).graph
    plan = declared.plan()
    if format == "svg" and output.form != "json":
        out(shown.html(declared).replace("</title>", f"</title>{_STYLE}", 1))
        return
    draw_plan(plan, RunRequest(engine, queues=queues).places(plan), format, output)


def draw_plan(
    plan: Plan, places: Mapping[str, str], format: str, output: CommandOutput, conf: Mapping[str, str] | None = None
) -> None:
    """Print a plan, the ``places`` where processors are called, and the settings of Spark that were given."""
    if output.form == "json":
        rows = draw.describe(plan)
        for row in rows:
            row |= {"place": places[row["processor"]]} if row["processor"] in places else {}
            row |= {"conf": conf} if conf else {}
        output.rows(rows, ())
    else:
        # A picture is printed as text, also in a pipe.
        out(draw.mermaid(plan) if format == "mermaid" else draw.text(plan))
        if places:
            out("\nOn Spark:")
            for processor, where in places.items():
                out(f"  {processor.partition('.')[2]}: {where}")
        if conf:
            out("\nSettings of Spark:")
            for name, value in conf.items():
                out(f"  {name} = {value}")
