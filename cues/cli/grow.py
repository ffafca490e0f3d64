"""``cues grow``: more partitions for a queue."""

from __future__ import annotations

import click

from cues.cli.options import command, confirm, note, yes_option
from cues.cli.output import CommandOutput, output_options
from cues.cli.target import takes_place
from cues.graphs.graphfile import shown
from cues.operate.place import Place


@command()
@takes_place("GRAPH#QUEUE | STORE#QUEUE")
@click.argument("partitions", type=int)
@yes_option
@output_options
def grow(place: Place, partitions: int, yes: bool, output: CommandOutput) -> None:
    """Raise the number of partitions of a queue to PARTITIONS, at most 256. The number never decreases.

    Stored messages stay on their partition. Later messages of many keys go to another partition, so a processor may
    take them before earlier ones, and its state of such a key begins anew. If that matters, stop the writers, wait
    until the graph is idle, grow, and start again. A graph that runs reads the new partitions within seconds.

    If the graph file has partitions= for the queue, change it there too: a start with the lower number is refused.

    \b
      cues grow graph.py#orders 8
      cues grow data/shop#orders 8 --yes
      cues grow s3://bucket/flights#enriched 64     a directory of cues run --queues
    """
    with place.growing() as growth:
        queue, before = growth.queue, growth.partitions
        if partitions > before and growth.key is not None:
            effect = "later messages of many keys go to another partition than earlier ones"
            confirm(f"{queue} will have {partitions} partitions instead of {before}: {effect}.", "Add them?", yes)
        growth.apply(partitions)
    output.say(
        f"{queue} has {partitions} partition{'s' if partitions > 1 else ''} now, {before} before",
        queue=queue,
        partitions=partitions,
        before=before,
    )
    if partitions > before:
        file = place.target.file
        where = shown(file.path) if file is not None else "the graph file"
        note(f"If {where} has partitions= for {queue}, write partitions={partitions} there before the next start.")
