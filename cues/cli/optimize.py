"""``cues optimize``: merge the small files of a shared directory."""

from __future__ import annotations

from typing import Final

from cues.base.texts import count, quoted, size
from cues.cli.live import by_queue
from cues.cli.options import command, confirm, note, option, yes_option
from cues.cli.output import CommandOutput, TableColumn, output_options
from cues.cli.target import takes_place
from cues.operate.place import Place

_COLUMNS: Final = (
    TableColumn("queue", "queue"),
    TableColumn("files", "before", right=True),
    TableColumn("merged", "files", right=True),
    TableColumn("into", "into", right=True),
    TableColumn("size", "size", right=True),
    TableColumn("files then", "after", right=True),
)


@command()
@takes_place("DIR[#QUEUE]")
@option("--dry-run", is_flag=True, help="Only print what would be merged.")
@yes_option
@output_options
def optimize(place: Place, dry_run: bool, yes: bool, output: CommandOutput) -> None:
    """Merge the small files of a directory of `cues run --queues`, so that readers open fewer.

    Small files that follow one another become one file of at most 128 MB, and of at most an eighth of its queue, so
    that retention, which removes whole files, keeps little more than it should. Messages, indices and times stay. A
    graph merges 64 small files in a row itself while it runs. This command needs no Spark, and the graph may run
    meanwhile. The small files stay on the disk for a day, for readers that have begun; then `cues vacuum` or the
    graph deletes them.

    It prints the number of files and their bytes by queue, and asks. After kill -9 at any instant run it again.

    \b
      cues optimize s3://bucket/flights --dry-run
      cues optimize s3://bucket/flights --yes
      cues optimize /mnt/shared/flights#enriched     one queue
    """
    hint = f"use cues compact {quoted(place.target.location)}, which gives free pages of a store back."
    directory = place.only_directories("cues optimize is", hint)
    plans = directory.merges()
    busy = [plan for plan in plans if plan.runs]
    if busy and not dry_run:
        for plan in busy:
            into = count(len(plan.runs), "file")
            note(f"{plan.queue}: {count(plan.files, 'small file')}, {size(plan.bytes)}, become {into}")
        files, bytes = sum(plan.files for plan in busy), sum(plan.bytes for plan in busy)
        what = f"{count(files, 'file')} of {count(len(busy), 'queue')}, {size(bytes)}, will be written again"
        confirm(f"{what}, as {sum(len(plan.runs) for plan in busy):,}.", "Merge them?", yes)
        plans = by_queue(plans, directory.merge, "merged")
    rows = [
        {
            "queue": plan.queue,
            "before": plan.before,
            "files": plan.files,
            "into": len(plan.runs),
            "bytes": plan.bytes,
            "after": plan.after,
            "dry_run": dry_run,
        }
        for plan in plans
    ]
    output.rows(rows if output.json else [row | {"size": size(int(str(row["bytes"])))} for row in rows], _COLUMNS)
