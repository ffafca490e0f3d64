"""``cues compact``: give free pages back to the file system, and remove queues without readers."""

from __future__ import annotations

from cues.cli import target as targets
from cues.cli.live import slowly
from cues.cli.options import WrongUsage, command, confirm, option, yes_option
from cues.cli.output import CommandOutput, count, output_options, size
from cues.cli.target import nearest, shown
from cues.forwarding import other_stores
from cues.queues.store import Store
from cues.tools import compaction, metrics


@command()
@targets.takes_store("[GRAPH | STORE]")
@option("--remove", metavar="QUEUE", multiple=True, help="Remove this queue, which must be empty; can be repeated.")
@option(
    "--forget",
    metavar="GRAPH.PROCESSOR",
    multiple=True,
    help="Forget this processor of a store that is lost for good; can be repeated.",
)
@option("--dry-run", is_flag=True, help="Only print what would be removed.")
@yes_option
@output_options
def compact(
    target: targets.StoreTarget,
    remove: tuple[str, ...],
    forget: tuple[str, ...],
    dry_run: bool,
    yes: bool,
    output: CommandOutput,
) -> None:
    """Rewrite a store without its free pages, while no other process has it open.

    Purged messages leave free pages, which the store uses again; this command gives them back to the file
    system. Queues, indices, positions, state and try logs stay as they are. It needs free disk space for a copy
    of the used pages. After kill -9 at any instant the store is as before, or compacted.

    --remove removes an empty queue for good, with its named readers. It refuses a queue that a processor reads,
    or that a try log still names. --forget removes the rows of a processor of another store: its low-water
    mark, for which retention waits, and its position of forwarding. `cues status` lists them.

    \b
      cues compact graph.py
      cues compact data/flights --dry-run
      cues compact data/flights --remove old --remove older --yes
    """
    name = targets.shown(target.path)
    if target.name:
        raise WrongUsage("A store is compacted as a whole.", f"cues compact {target.text} --remove {target.name}")
    with target.open() as opened:
        done = compaction.look(opened, remove)
        _check_known(opened, forget)
    if not dry_run:
        if done.removed:
            what = ", ".join(done.removed)
            confirm(f"{count(len(done.removed), 'queue')} of {name} will be removed for good: {what}.", "Remove?", yes)
        if forget:
            confirm(f"The rows of {', '.join(forget)} in {name} will be removed.", "Forget?", yes)
            with target.open(readonly=False) as opened:
                for processor in forget:
                    other_stores.forget(opened, processor)
        with slowly() as say:
            done = compaction.compact(
                target.path,
                remove,
                lambda copied, total: say(f"copied {size(copied)} of {size(total)}", copied=copied, total=total),
            )
    removed = f"{'would remove' if dry_run else 'removed'} {', '.join(done.removed)}; " if done.removed else ""
    if forget:
        removed += f"{'would forget' if dry_run else 'forgot'} {', '.join(forget)}; "
    sizes = f"{size(done.before)}, {'about ' if dry_run else ''}{size(done.after)} {'then' if dry_run else 'now'}"
    output.say(
        f"{name}: {removed}{sizes}",
        store=name,
        before=done.before,
        after=done.after,
        removed=list(done.removed),
        forgotten=list(forget),
        dry_run=dry_run,
    )


def _check_known(store: Store, forget: tuple[str, ...]) -> None:
    known = sorted({reader.processor for reader in metrics.of_readers(store)} | set(metrics.producers(store)))
    for processor in forget:
        if processor not in known:
            raise WrongUsage(
                f"{shown(store.path)} has no rows of a processor {processor!r} of another store; it has rows of"
                f" {', '.join(known) or 'none'}.",
                f"give --forget {nearest(processor, known)}" if known else "see the readers with: cues status.",
            )
