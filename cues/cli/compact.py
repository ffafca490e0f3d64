"""``cues compact``: give free pages back to the file system, and remove queues without readers."""

from __future__ import annotations

from cues.base.texts import count, quoted, size
from cues.cli.live import slowly
from cues.cli.options import WrongUsage, command, confirm, option, yes_option
from cues.cli.output import CommandOutput, output_options
from cues.cli.target import takes_store
from cues.forwarding import other_stores
from cues.graphs.graphfile import shown
from cues.operate import target as targets
from cues.queues.store import Store
from cues.tools import compaction


@command()
@takes_store("[GRAPH | STORE]")
@option("--remove", metavar="QUEUE", multiple=True, help="Remove this queue, which must be empty; can be repeated.")
@option(
    "--forget",
    metavar="[STORE_ID/]GRAPH.PROCESSOR",
    multiple=True,
    help="Forget this processor of a store that is lost for good; can be repeated.",
)
@option("--dry-run", is_flag=True, help="Only print what would be removed.")
@yes_option
@output_options
def compact(
    target: targets.Target,
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
    name = shown(target.path)
    if target.name:
        again = f"cues compact {quoted(target.text)} --remove {quoted(target.name)}"
        raise WrongUsage("A store is compacted as a whole.", again)
    with target.open() as opened:
        done = compaction.look(opened, remove)
        forget = tuple(_known(opened, processor) for processor in forget)
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


def _known(store: Store, processor: str) -> str:
    """Return the name of a processor of another store, with the id of the store, which may be left out."""
    with store.core.view() as txn:
        known = sorted(set(other_stores.strangers(txn).values()))
    found = [name for name in known if processor in (name, name.partition("/")[2])]
    if len(found) == 1:
        return found[0]
    if found:
        raise WrongUsage(
            f"{len(found)} stores have a processor {processor!r} with rows in {shown(store.path)}:"
            f" {', '.join(found)}. One of them may live.",
            "give the name with the id of the store that is lost; cues.open(PATH).id.hex() is that of one that lives.",
        )
    raise WrongUsage(
        f"{shown(store.path)} has no rows of a processor {processor!r} of another store; it has rows of"
        f" {', '.join(known) or 'none'}.",
        f"see them with cues status {quoted(store.path)}, and give the one whose store is lost for good.",
    )
