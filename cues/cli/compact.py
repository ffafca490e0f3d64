"""``cues compact``: give free pages back to the file system, and remove queues that nobody names."""

from __future__ import annotations

import click

from cues import compaction
from cues.cli import target as targets
from cues.cli.live import slowly
from cues.cli.options import WrongUsage, command, confirm, option, output_options, store_option, yes_option
from cues.cli.output import Output, count, size


@command()
@click.argument("target", metavar="[GRAPH | STORE]", required=False)
@store_option
@option("--remove", metavar="QUEUE", multiple=True, help="Remove this queue, which must be empty; can be repeated.")
@option("--dry-run", is_flag=True, help="Only say what would go.")
@yes_option
@output_options
def compact(
    target: str | None, store: str | None, remove: tuple[str, ...], dry_run: bool, yes: bool, output: str | None
) -> None:
    """Rewrite a store without its free pages, while nobody has it open.

    What was purged leaves free pages, which the store uses again; this gives them back to the file
    system. Queues, indices, positions, state and try logs stay as they are. It needs free disk for a copy of
    what is in use; kill -9 at any instant leaves the store as it was, or compacted.

    With --remove an empty queue goes for good, with its named readers. One that a processor reads, or that
    a try log still names, is refused.

    \b
      cues compact graph.py
      cues compact data/flights --dry-run
      cues compact data/flights --remove old --remove older --yes
    """
    found = targets.resolve(target, store)
    name = targets.shown(found.path)
    if found.name:
        raise WrongUsage("A store is compacted as a whole.", f"cues compact {found.text} --remove {found.name}")
    with found.open() as opened:
        done = compaction.look(opened, remove)
    if not dry_run:
        if done.removed:
            what = ", ".join(done.removed)
            confirm(f"{count(len(done.removed), 'queue')} of {name} will be removed for good: {what}.", "Remove?", yes)
        with slowly() as say:
            done = compaction.compact(
                found.path,
                remove,
                lambda copied, total: say(f"copied {size(copied)} of {size(total)}", copied=copied, total=total),
            )
    removed = f"{'would remove' if dry_run else 'removed'} {', '.join(done.removed)}; " if done.removed else ""
    sizes = f"{size(done.before)}, {'about ' if dry_run else ''}{size(done.after)} {'then' if dry_run else 'now'}"
    Output(output).say(
        f"{name}: {removed}{sizes}",
        store=name,
        before=done.before,
        after=done.after,
        removed=list(done.removed),
        dry_run=dry_run,
    )
