"""``cues close``: close the windows, joins and files that a graph keeps open."""

from __future__ import annotations

import logging

import click

from cues.base import events
from cues.base.texts import count, quoted
from cues.cli import options
from cues.cli.again import run_again
from cues.cli.options import command, store_option
from cues.cli.output import CommandOutput, TableColumn, output_options
from cues.cli.printing import out
from cues.engine import record
from cues.errors import StoreNotFound
from cues.graphs import graphfile
from cues.graphs.graphfile import shown
from cues.operate.refused import Refused
from cues.operate.target import store_of

_COLUMNS = (TableColumn("processor", "processor"), TableColumn("wrote", "written", right=True))


@command()
@click.argument("graph", metavar="GRAPH", shell_complete=options.candidates_of("names"))
@store_option
@output_options
def close(graph: str, store: str | None, output: CommandOutput) -> int:
    """Close the windows, joins and files that a graph keeps open, as a run does when all its sources have ended.

    It runs the graph without its sources until its queues are empty. Then each processor closes its windows, after
    those that it depends on, also with at_end="keep"; what they write goes through the graph, and files are finished.
    The watermark of a processor moves to the end of its last open window: later messages of these windows are late.

    \b
      cues close graph.py
      cues close graph.py --store data/shop

    The graph must not run meanwhile. A kill loses nothing: the next run or close does what is left.
    """
    file = graphfile.load(graph)
    chosen = store if options.given("store") else None
    path = store_of(file, chosen)
    if not (path / "data.mdb").exists():
        raise StoreNotFound(f"There is no store at {shown(path)}.", f"run the graph first: cues run {quoted(graph)}.")
    if (noted := record.queues_of(path, file.graph.id)) is not None:
        raise Refused(
            f"cues close is for stores, and the last run of {file.graph.id} had its queues in {noted.directory}: in the"
            " store its streams and sinks would begin anew.",
            f"start it there, and it closes what at_end= says: {run_again(graph, noted.directory, chosen)}.",
        )
    finished: list[str] = []

    def note(event: events.Event) -> None:
        if isinstance(event, events.Placed):
            finished.append(event.text)
        elif event.level >= logging.WARNING:
            options.note(f"{event.processor} {event.text}")

    declared = file.graph.store is not None and chosen is None
    with file.graph.start(store=None if declared else path, sources=False, listeners=(note,)) as running:
        done = running.close_open()
        wrote = {running.plan.node(id).name: counter.written for id, counter in running.counters().items()}
    wrote = {name: written for name, written in wrote.items() if written}
    nothing = done and not (wrote or finished)
    if wrote and not output.json:
        output.rows([{"processor": name, "written": written} for name, written in wrote.items()], _COLUMNS)
    if not output.json:
        for line in finished:
            out(line)
    closed = "closed" if done else "not all is closed"
    text = "nothing was open" if nothing else f"{closed}; {count(sum(wrote.values()), 'message')} written"
    output.say(f"{file.graph.id}: {text}", graph=file.graph.id, written=wrote, finished=finished)
    return 0 if done else options.FAILED
