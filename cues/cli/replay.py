"""``cues replay``: run a graph's processors again over the messages of its store, into a fresh one, and compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from typing import Any

import click

from cues.base.texts import quoted
from cues.cli import options
from cues.cli.options import WrongUsage, command, option, store_option
from cues.cli.output import CommandOutput, TableColumn, output_options, to_json
from cues.cli.printing import out
from cues.engine import record
from cues.errors import StoreNotFound
from cues.graphs import graphfile
from cues.graphs.graphfile import shown
from cues.operate import positions as places
from cues.operate.target import store_of
from cues.tools import replay as replays
from cues.tools.replay_diff import Difference, ReplayReport

_COLUMNS = (
    TableColumn("queue", "queue"),
    TableColumn("compared by", "basis"),
    TableColumn("equal", "equal", right=True),
    TableColumn("different", "different", right=True),
    TableColumn("only old", "only_old", right=True),
    TableColumn("only new", "only_new", right=True),
    TableColumn("not yet in old", "beyond", right=True, optional=True),
    TableColumn("since in old", "since", right=True, optional=True),
    TableColumn("lost in old", "lost", right=True, optional=True),
)


@command()
@click.argument("graph", metavar="GRAPH", shell_complete=options.candidates_of("names"))
@store_option
@option("--into", required=True, metavar="STORE", help="The directory of the fresh store.")
@option("--until", metavar="INDEX|TIME", help="Copy the messages before it only. The store is for comparison.")
@option("--processor", "processors", multiple=True, metavar="P", help="Only this stream, for comparison; repeatable.")
@option("--with-sinks", is_flag=True, help="Run the sinks too. They deliver everything again.")
@option("--from-first", is_flag=True, help="Begin at the first message that is left, if some are lost.")
@option(
    "--diff-limit",
    type=click.IntRange(min=0),
    default=10,
    show_default=True,
    metavar="N",
    help="The number of differences of each queue that are shown.",
)
@output_options
def replay(
    graph: str,
    store: str | None,
    into: str,
    until: str | None,
    processors: tuple[str, ...],
    with_sinks: bool,
    from_first: bool,
    diff_limit: int,
    output: CommandOutput,
) -> int:
    """Run a graph's streams again, as they are now, over the messages of its store; compare the outputs.

    The messages of sources, and those of send, are copied into a fresh store, with their indices, times and
    identities. No source is called, and no sink without --with-sinks. The old store is only read; the graph may run on
    it. Then each queue that the streams write is compared: equal, different, only in one of the stores.
    Messages that the old store has not processed are not differences.

    \b
      cues replay graph.py --into data/again
      cues replay graph.py --into data/check --until 2026-01-31T12:00Z
      cues replay graph.py --into data/check --processor price --diff-limit 50
      cues run graph.py --store data/again             continue on the new store

    After a kill, the same command continues. The exit code is 0 if all queues are equal, 1 if not.
    """
    if not graphfile.is_file(graph):
        raise WrongUsage(f"{graph} is not a graph file.", "cues replay graph.py --into STORE")
    file = graphfile.load(graph)
    path = store_of(file, store if options.given("store") else None)
    if not (path / "data.mdb").exists():
        raise StoreNotFound(
            f"The graph {file.graph.id!r} has no store at {shown(path)}.",
            "give the store that it ran on, with --store.",
            path=str(path),
        )
    noted = record.queues_of(path, file.graph.id)
    if noted is not None:
        options.note(f"The outputs in {noted.directory} are not compared: cues replay compares those in stores.")
    report = replays.replay(
        file.graph,
        into=into,
        store=path,
        until=None if until is None else _until(until),
        processors=processors,
        with_sinks=with_sinks,
        from_first=from_first,
        diff_limit=diff_limit,
        progress=_noted(),
    )
    _show(report, graph, into, output)
    return 0 if report.equal else options.FAILED


def _until(text: str) -> int | datetime:
    place = places.parse(text, "--until")
    if isinstance(place, str):
        raise WrongUsage(f"--until {text} is not an index or a time.", "give an index, a time, or leave it out.")
    return place


def _noted() -> Callable[[str], None]:
    def note(text: str) -> None:
        options.note(f"replay: {text}")

    return note


def _show(report: ReplayReport, graph: str, into: str, output: CommandOutput) -> None:
    rows: list[dict[str, Any]] = []
    for diff in report.queues:
        row = {**asdict(diff), "examples": [asdict(example) for example in diff.examples]}
        if not output.json:
            row |= {name: row[name] or None for name in ("beyond", "since", "lost")}
        rows.append(row)
    output.rows(rows, _COLUMNS)
    if output.json:
        return
    for diff in report.queues:
        for example in diff.examples:
            out("\n".join(_lines(diff.queue, example)))
    if any(diff.basis == "multiset" and not diff.same for diff in report.queues):
        options.note("The order of a queue compared by multiset may differ, so its messages are not paired.")
    if report.whole:
        options.note(f"To continue on the new store: cues run {quoted(graph)} --store {quoted(into)}")
    else:
        options.note("This store is for comparison only: it has a part of the messages or of the processors.")


def _lines(queue: str, example: Difference) -> list[str]:
    log = f"{queue}/{example.partition}" if example.partition else queue
    places = [f"{side} {index:,}" for side, index in (("old", example.old_index), ("new", example.new_index)) if index]
    lines = [f"{log} {example.kind}: {', '.join(places)}"]
    for path, (old, new) in example.fields.items():
        shown = [to_json(value[0]) if value else "missing" for value in (old, new)]
        lines.append(f"  {path}: {shown[0]} -> {shown[1]}")
    return lines
