"""``cues salvage``: everything that can be read of a damaged store, in a new store."""

from __future__ import annotations

from pathlib import Path

import click

from cues.base.texts import quoted
from cues.cli import options
from cues.cli.live import slowly
from cues.cli.options import command, local
from cues.cli.output import CommandOutput, output_options
from cues.cli.target import takes_store
from cues.graphs.graphfile import shown
from cues.operate import target as targets
from cues.tools import salvage as tools


@command()
@takes_store("GRAPH | STORE")
@click.argument("new", metavar="NEW")
@output_options
def salvage(target: targets.Target, new: str, output: CommandOutput) -> int:
    """Copy everything that can be read of a damaged store into a new store, and list what is missing.

    The damaged store is only read, and it need not open: its pages are read without LMDB. Every message whose record
    batch is whole keeps its index and its bytes, so positions and delivery hashes stay right. Keyed state, positions
    and options are kept too, where their checksums hold. No process may have the store open for writing.

    Each loss is one line: messages by queue, partition and indices, rows, values of state, and why. Missing messages
    leave a gap: a processor that comes to it stops with an error that names it, and `cues seek` continues after it.
    The exit code is 0 if nothing is missing, and 1 if something is; the new store is there in both cases.

    First restore a backup, if you have one: a salvage cannot bring back what the disk has lost.

    \b
      cues salvage data/flights data/salvaged
      cues salvage data/flights data/salvaged --json > losses.jsonl
      mv data/flights data/damaged && mv data/salvaged data/flights
    """
    place = local(new)
    with slowly() as say:
        done = tools.salvage(
            Path(target.path),
            Path(place),
            lambda what, done, total: say(f"salvaging {what}: {done:,} of {total:,}", at=what, done=done, total=total),
        )
    for loss in done.losses:
        output.say(loss.text, **loss.to_dict())
    output.say(
        tools.summary(done),
        salvaged=done.new,
        store=done.path,
        commit=done.commit,
        queues=done.queues,
        messages=done.messages,
        values=done.values,
        missing_messages=done.missing_messages,
        losses=len(done.losses),
    )
    if done.is_whole:
        return 0
    hint = f"put {shown(place)} in the place of the damaged store (mv), after a look with cues status {quoted(place)}."
    gap = next((loss for loss in done.losses if loss.unread_by and "." in loss.unread_by[0]), None)
    if gap is not None and gap.last is not None:
        tailer = f"{place}#{gap.unread_by[0]}"
        hint += (
            f" At a gap a processor stops; cues seek {quoted(tailer)} --to {quoted(gap.last + 1)} continues"
            " after this one."
        )
    options.report(f"Not everything of {shown(target.path)} could be salvaged.", hint)
    return options.FAILED
