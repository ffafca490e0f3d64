"""``cues vacuum``: delete the files of a shared directory that are in no log any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cues.base.texts import ago, count, quoted, size
from cues.cli.live import by_queue
from cues.cli.options import command, confirm, note, option, yes_option
from cues.cli.output import CommandOutput, TableColumn, output_options
from cues.cli.target import takes_place
from cues.operate.place import Place

if TYPE_CHECKING:
    from cues.operate.directories import PlannedVacuum

_COLUMNS: Final = (
    TableColumn("queue", "queue"),
    TableColumn("files", "files", right=True),
    TableColumn("size", "size", right=True),
    TableColumn("oldest", "written", optional=True),
    TableColumn("later", "later_files", right=True),
    TableColumn("size later", "later_size", right=True, optional=True),
)


@command()
@takes_place("DIR[#QUEUE]")
@option("--dry-run", is_flag=True, help="Only print what would be deleted.")
@yes_option
@output_options
def vacuum(place: Place, dry_run: bool, yes: bool, output: CommandOutput) -> None:
    """Delete the files of a directory of `cues run --queues` that are in no log any more.

    These are files that left the log of their queue a day ago or earlier, by retention, a merge or a purge, and files
    of steps that were not committed. A graph deletes them itself, about once an hour while it runs. This command needs
    no Spark, and the graph may run meanwhile. No message is deleted, and readers that began within the last day find
    their files.

    It prints the number of files and their bytes by queue, and asks. Files under LATER are not in the log either. They
    stay for now, because a reader or a step that runs may need them.

    \b
      cues vacuum s3://bucket/flights --dry-run
      cues vacuum s3://bucket/flights --yes
      cues vacuum /mnt/shared/flights#enriched     one queue
    """
    hint = f"use cues compact {quoted(place.target.location)}, which gives free pages of a store back."
    directory = place.only_directories("cues vacuum is", hint)
    plans = directory.vacuums()
    for plan in plans:
        if plan.reader:
            note(
                f"{plan.queue}: {plan.reader} has read this queue for more than a day, so none of its files is deleted."
            )
    files, bytes = sum(len(plan.files) for plan in plans), sum(plan.bytes for plan in plans)
    if files and not dry_run:
        busy = [plan for plan in plans if plan.files]
        for plan in busy:
            note(f"{plan.queue}: {count(len(plan.files), 'file')}, {size(plan.bytes)}, the oldest of {_ago(plan)}")
        what = f"{count(files, 'file')} of {count(len(busy), 'queue')}, {size(bytes)}, will be deleted"
        confirm(f"{what}. They are in no log, so no message is deleted.", "Delete them?", yes)
        plans = by_queue(plans, directory.vacuum, "deleted")
    output.rows([_row(plan, dry_run) | ({} if output.json else _texts(plan)) for plan in plans], _COLUMNS)


def _ago(plan: PlannedVacuum) -> str:
    return ago(plan.oldest) or ""


def _row(plan: PlannedVacuum, dry_run: bool) -> dict[str, Any]:
    return {
        "queue": plan.queue,
        "files": len(plan.files),
        "bytes": plan.bytes,
        "oldest": plan.oldest,
        "later_files": len(plan.later),
        "later_bytes": sum(plan.later.values()),
        "reader": plan.reader,
        "dry_run": dry_run,
    }


def _texts(plan: PlannedVacuum) -> dict[str, str]:
    later = sum(plan.later.values())
    return {"size": size(plan.bytes), "written": _ago(plan), "later_size": size(later) if later else ""}
