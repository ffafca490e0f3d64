"""``cues purge``: delete the messages of a queue before an index or a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cues.base.texts import count, size
from cues.cli.options import command, confirm, note, option, yes_option
from cues.cli.output import CommandOutput, output_options
from cues.cli.target import takes_place
from cues.errors import QueueInUse
from cues.operate import positions
from cues.operate.place import Place
from cues.queues.retention import PlannedPurge, refuse_unread


@command()
@takes_place("GRAPH#QUEUE | STORE#QUEUE")
@option("--before", required=True, metavar="PLACE", help=f"The first message that stays: {positions.HELP}.")
@option("--force", is_flag=True, help="Also delete messages that readers have not read. They never see them.")
@option("--dry-run", is_flag=True, help="Only print what would be deleted.")
@yes_option
@output_options
def purge(place: Place, before: str, force: bool, dry_run: bool, yes: bool, output: CommandOutput) -> None:
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
    with place.purging(positions.parse(before, "--before")) as planned:
        plans = planned.plans
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
            step = ", in part by a step that is under way" if reader.under_way else ""
            note(
                f"{reader.name} is at {max(reader.next, plan.first):,}: it has not read"
                f" {count(plan.lost_to(reader), 'message')} of {plan.log} that would be deleted{step}."
            )
        what = f"{count(messages, 'message')} of {name}, about {size(bytes)}, before {_shown(plans)}"
        if dry_run:
            return output.say(f"would delete {what}", **facts)
        never = "; the readers above never see those that they have not read" if lost else ""
        confirm(f"{what}, will be deleted for good{never}.", "Delete them?", yes)
        planned.apply(force)
        output.say(f"deleted {what}", **facts)


def _refuse(plan: PlannedPurge) -> None:
    try:
        refuse_unread(plan)
    except QueueInUse as error:
        error.hint = f"{error.hint.rstrip('.')}; or add --force, and these readers never see the messages."
        raise


def _shown(plans: Sequence[PlannedPurge]) -> str:
    return ", ".join(f"{plan.index:,}" + (f" of {plan.log}" if len(plans) > 1 else "") for plan in plans)
