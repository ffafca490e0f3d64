"""``cues resume``: let paused processors go on."""

from __future__ import annotations

from cues.cli.options import command, option
from cues.cli.output import CommandOutput, output_options
from cues.cli.target import takes_store
from cues.engine import pausing
from cues.operate.stores import StorePlace
from cues.operate.target import Target


@command()
@takes_store("GRAPH | STORE")
@option("--processor", metavar="NAME", help="This processor; without it, all that are paused.")
@output_options
def resume(target: Target, processor: str | None, output: CommandOutput) -> None:
    """Let paused processors go on.

    A processor with on_error="pause" paused before a message that failed: it calls its function for this message again,
    as often as retries= says. A processor that reached its max_errors= goes on after the last error, and counts from
    0. If the graph runs, its process goes on at once; else the next start does. cues status shows what is paused, and
    why.

    \b
      cues resume graph.py
      cues resume graph.py --processor price
      cues resume data/shop
    """
    graph = target.file.graph.id if target.file is not None else None
    with StorePlace(target).home(readonly=False) as home:
        gone = pausing.resume_units(home, graph, processor)
    lines = [f"{pause.processor} goes on; it was paused {pause.text}" for pause in gone]
    nothing = f"{target.text}: {'it' if processor else 'no processor'} is {'not ' if processor else ''}paused"
    output.say("\n".join(lines) or nothing, resumed=[pause.facts() for pause in gone])
