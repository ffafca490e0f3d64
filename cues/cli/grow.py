"""``cues grow``: more partitions for a queue."""

from __future__ import annotations

import click

from cues.cli import shared
from cues.cli import target as targets
from cues.cli.options import WrongUsage, command, confirm, note, yes_option
from cues.cli.output import CommandOutput, output_options


@command()
@targets.takes_store("GRAPH#QUEUE | STORE#QUEUE", shared=True)
@click.argument("partitions", type=int)
@yes_option
@output_options
def grow(target: targets.StoreTarget, partitions: int, yes: bool, output: CommandOutput) -> None:
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
    if target.is_shared:
        from cues.spark.cluster import operations
        from cues.spark.cluster.files import open_files

        queue = shared.queue_of(target)
        _refuse_partition(target, queue)
        directory = operations.growing(open_files(target.place), queue)
        before, key = directory.options.partitions, directory.options.key
        _ask(queue, before, partitions, key, yes)
        directory.grow(partitions)
    else:
        with target.open(readonly=False) as opened:
            handle = targets.open_queue(target, opened)
            queue = handle.id
            _refuse_partition(target, queue)
            before, key = handle.partitions, handle.options.key
            _ask(queue, before, partitions, key, yes)
            handle.grow(partitions)
    output.say(
        f"{queue} has {partitions} partition{'s' if partitions > 1 else ''} now, {before} before",
        queue=queue,
        partitions=partitions,
        before=before,
    )
    if partitions > before:
        where = targets.shown(target.file.path) if target.file is not None else "the graph file"
        note(f"If {where} has partitions= for {queue}, write partitions={partitions} there before the next start.")


def _refuse_partition(target: targets.StoreTarget, queue: str) -> None:
    name, slash, _ = queue.partition("/")
    if slash:
        raise WrongUsage(f"{queue} is a partition.", f"{target.again(name)} PARTITIONS")


def _ask(queue: str, before: int, after: int, key: object, yes: bool) -> None:
    if after > before and key is not None:
        effect = "later messages of many keys go to another partition than earlier ones"
        confirm(f"{queue} will have {after} partitions instead of {before}: {effect}.", "Add them?", yes)
