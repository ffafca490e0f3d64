"""``cues pause``: let processors take nothing until they are resumed."""

from __future__ import annotations

from cues.base.texts import quoted
from cues.cli.options import command, option
from cues.cli.output import CommandOutput, output_options
from cues.cli.target import takes_store
from cues.engine import pausing
from cues.operate.stores import StorePlace
from cues.operate.target import Target


@command()
@takes_store("GRAPH | STORE")
@option("--processor", metavar="NAME", help="This processor; without it, all streams and sinks.")
@option("--reason", default="", metavar="TEXT", help="Why. It is kept, and cues status shows it.")
@output_options
def pause(target: Target, processor: str | None, reason: str, output: CommandOutput) -> None:
    """Let processors take nothing until cues resume, in this run and in later ones.

    At most one more step is made. The other processors go on, and the messages wait on their queues. Failed
    messages that are redriven are still given to the processor. A source cannot be paused.

    \b
      cues pause graph.py --processor price --reason 'the price list is wrong'
      cues status graph.py
      cues resume graph.py --processor price
    """
    graph = target.file.graph.id if target.file is not None else None
    with StorePlace(target).home(readonly=False) as home:
        new = pausing.pause_units(home, graph, processor, reason)
    lines = [f"{pause.processor} is paused. To continue: cues resume {quoted(target.text)}" for pause in new]
    nothing = f"{target.text}: nothing to pause; cues status shows what is paused already"
    output.say("\n".join(lines) or nothing, paused=[pause.facts() for pause in new])
