"""``cues backup``: copy the stores of a graph into a directory of backups, while it runs."""

from __future__ import annotations

import click

from cues.base.texts import count, quoted, size
from cues.cli import options
from cues.cli.live import slowly
from cues.cli.options import WrongUsage, command, local, option
from cues.cli.output import CommandOutput, output_options
from cues.cli.target import takes_store
from cues.engine import record
from cues.operate import target as targets
from cues.tools import backup as backups


@command()
@takes_store("GRAPH | STORE")
@click.argument("dest", metavar="DEST")
@option(
    "--since",
    metavar="NUMBER|auto",
    help="Copy only what changed since this backup in DEST; auto: since the last one, if there is one.",
)
@output_options
def backup(target: targets.Target, dest: str, since: str | None, output: CommandOutput) -> None:
    """Copy a store, and all stores that it uses, into the directory DEST.

    The graph may run meanwhile. All stores are copied as they are at one moment, and a restore continues from
    there exactly. A backup has no free pages, and a checksum of everything. After kill -9, or on a full disk, there is
    no new backup, and earlier ones are as they were.

    With --since a backup has only new messages and changed rows. It needs the backup that it was made since.

    \b
      cues backup graph.py /backup/flights
      cues backup graph.py /backup/flights --since auto
      cues backup data/flights /backup/flights --since 12
      cues restore /backup/flights data/flights
    """
    place = local(dest)
    if since is not None and since != "auto" and not since.isdecimal():
        raise WrongUsage(f"--since {since} is not the number of a backup.", "give a number, or auto.")
    if target.name:
        raise WrongUsage("A store is copied as a whole.", f"cues backup {quoted(target.text)} {quoted(dest)}")
    with target.open() as store, slowly() as say:
        if target.file is not None:
            noted = record.queues_of(target.path, target.file.graph.id)
            if noted is not None:
                options.note(f"The queues in {noted.directory} are not copied: cues backup copies stores.")
        made = backups.backup(
            store,
            place,
            since,
            lambda name, done: say(f"{name}: copied {size(done)}", store=name, copied=done),
            options.note,
        )
    kind = "everything" if made.since is None else f"changes since backup {made.since}"
    output.say(
        f"{dest}: backup {made.number} of {count(len(made.stores), 'store')}, {kind}, {size(made.bytes)}",
        backup=made.number,
        since=made.since,
        time=made.time.isoformat(),
        bytes=made.bytes,
        directory=str(place / f"{made.number:06d}"),
        stores={stored.name: stored.path for stored in made.stores},
    )
