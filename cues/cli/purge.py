"""``cues purge``: delete the messages of a queue before an index or a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from cues.cli import place as places
from cues.cli import shared
from cues.cli import target as targets
from cues.cli.options import WrongUsage, command, confirm, note, option, yes_option
from cues.cli.output import CommandOutput, count, output_options, size
from cues.errors import QueueInUse
from cues.graphs.graph import Graph
from cues.queues.retention import PlannedPurge, PositionHolder, refuse_unread


@command()
@targets.takes_store("GRAPH#QUEUE | STORE#QUEUE", shared=True)
@option("--before", required=True, metavar="PLACE", help=f"The first message that stays: {places.HELP}.")
@option("--force", is_flag=True, help="Also delete messages that readers have not read. They never see them.")
@option("--dry-run", is_flag=True, help="Only print what would be deleted.")
@yes_option
@output_options
def purge(
    target: targets.StoreTarget, before: str, force: bool, dry_run: bool, yes: bool, output: CommandOutput
) -> None:
    """Delete the messages of a queue before an index or a time.

    It prints the number of messages and their bytes, and asks. If a reader has not read some of the messages, it
    names the reader and its position, and deletes nothing: processors, named tailers and consumer groups, in this
    store and in others that read the queue. With --force the messages are deleted; these readers continue at the
    first message that is left. Readers that keep their positions elsewhere are not known: Spark checkpoints, and the
    checkpoints of cues.txn.

    \b
      cues purge data/shop#orders --before 700
      cues purge graph.py#orders --before 30d --yes
      cues purge data/shop#orders/3 --before 700         one partition, which has indices of its own
      cues purge s3://bucket/shop#orders --before 2026-01-31T12:00Z     a directory of cues run --queues

    A store may be in use by its graph meanwhile. In a directory no driver may run the graph that writes the queue,
    the last message always stays, and the files stay on the disk for a day, for readers that have begun.
    """
    where = places.parse(before, "--before")
    with (_in_directory if target.is_shared else _in_store)(target, where) as (plans, purge_now):
        lost = [(plan, reader) for plan in plans for reader in plan.behind]
        if not (force or dry_run):
            for plan in plans:
                _refuse(plan)
        messages, bytes = sum(plan.count for plan in plans), sum(plan.bytes for plan in plans)
        name = plans[0].log if len(plans) == 1 else plans[0].log.partition("/")[0]
        facts: dict[str, Any] = {
            "queue": name,
            "messages": messages,
            "bytes": bytes,
            "first_index": plans[0].index if len(plans) == 1 else {plan.log: plan.index for plan in plans},
            "unread": {reader.name: plan.lost_to(reader) for plan, reader in lost},
            "dry_run": dry_run,
        }
        if not messages:
            return output.say(f"{name} has no messages before {_shown(plans)}: nothing to delete", **facts)
        for plan, reader in lost:
            step = ", in part by a step that is under way" if reader.pending else ""
            note(
                f"{reader.name} is at {max(reader.next, plan.first):,}: it has not read"
                f" {count(plan.lost_to(reader), 'message')} of {plan.log} that would be deleted{step}."
            )
        what = f"{count(messages, 'message')} of {name}, about {size(bytes)}, before {_shown(plans)}"
        if dry_run:
            return output.say(f"would delete {what}", **facts)
        never = "; the readers above never see those that they have not read" if lost else ""
        confirm(f"{what}, will be deleted for good{never}.", "Delete them?", yes)
        purge_now(force)
        output.say(f"deleted {what}", **facts)


def _refuse(plan: PlannedPurge) -> None:
    try:
        refuse_unread(plan)
    except QueueInUse as error:
        error.hint = f"{error.hint.rstrip('.')}; or add --force, and these readers never see the messages."
        raise


def _shown(plans: Sequence[PlannedPurge]) -> str:
    return ", ".join(f"{plan.index:,}" + (f" of {plan.log}" if len(plans) > 1 else "") for plan in plans)


@contextlib.contextmanager
def _in_store(target: targets.StoreTarget, where: places.Place) -> Iterator[Any]:
    target.require()
    with target.open(readonly=False) as opened:
        queue = targets.open_queue(target, opened)
        if queue.is_partitioned and not isinstance(where, datetime):
            raise WrongUsage(
                f"{queue.id} has {queue.partitions} partitions, and each has indices of its own.",
                f"give a time; or {target.again(f'{queue.id}/0')} --before {where}",
            )
        plans = queue.plan_purge(where if isinstance(where, datetime) else places.now_on(queue._log, where, "--before"))
        if target.file is not None:
            plans = [_with_new_processors(plan, target.file.graph) for plan in plans]
        indices = {plan.log: plan.index for plan in plans}
        yield plans, lambda force: queue._purge(lambda txn, log, row: indices.get(log.id, row.first), not force)


def _with_new_processors(plan: PlannedPurge, graph: Graph) -> PlannedPurge:
    """The plan, with processors of the graph that have not run yet: they begin at the start of the queue."""
    queue, slash, partition = plan.log.partition("/")
    readers = [node for node in graph.plan().running if queue in (port.queue for port in node.reads)]
    ids = {f"{node.id}{slash}{partition}" for node in readers} - plan.readers
    new = [PositionHolder(id, plan.first, False) for id in sorted(ids) if plan.count]
    return replace(plan, behind=[*plan.behind, *new])


@contextlib.contextmanager
def _in_directory(target: targets.StoreTarget, where: places.Place) -> Iterator[Any]:
    from cues.spark.cluster import inspection, operations
    from cues.spark.cluster.files import open_files

    queue, files = shared.queue_of(target), open_files(target.place)
    writer = inspection.writer_of(target.place, queue.partition("/")[0]) or ""
    with operations.running_none(files, writer) as driver:
        reader = inspection.QueueReader(target.place, queue)
        indices = {log.id: index for log, index in zip(reader.logs, reader.place_of(where, "--before"))}

        def purge_now(force: bool) -> None:
            for log, index in indices.items():
                operations.purge(driver, log, index, "drop" if force else "refuse")

        yield [operations.plan_purge(files, log, index).plan for log, index in indices.items()], purge_now
