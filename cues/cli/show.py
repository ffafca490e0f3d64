"""``cues show``: the graph as text and as Mermaid."""

from __future__ import annotations

import click

from cues import draw
from cues.cli import graphfile
from cues.cli.options import WrongUsage, command, option, output_options
from cues.cli.output import Output


@command()
@click.argument("graph", metavar="GRAPH")
@option("--format", type=click.Choice(("text", "mermaid")), default="text", show_default=True, help="How to draw it.")
@output_options
def show(graph: str, format: str, output: str | None) -> None:
    """Draw a graph: what each processor reads and writes, and what is guaranteed of it.

    Nothing is opened or run; the graph is checked as a run would check it.

    \b
      cues show graph.py
      cues show graph.py --format mermaid > graph.mmd
      cues show graph.py --json | jq .guarantee
    """
    if not graphfile.is_file(graph):
        raise WrongUsage(f"{graph} is not a graph file; a store does not hold the graph.", "cues show graph.py")
    plan = graphfile.load(graph).graph.plan()
    if output == "json":
        Output(output).rows(draw.describe(plan), ())
    else:
        # A picture is a picture, in a pipe too.
        print(draw.mermaid(plan) if format == "mermaid" else draw.text(plan))
