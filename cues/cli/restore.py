"""``cues restore``: make stores of a backup."""

from __future__ import annotations

from pathlib import Path

import click

from cues.base.texts import quoted, size
from cues.cli.live import slowly
from cues.cli.options import WrongUsage, command, local, note, option, store_option
from cues.cli.output import CommandOutput, output_options
from cues.errors import CuesError
from cues.jsontext import iso
from cues.tools import backup as backups


@command()
@click.argument("dest", metavar="DEST")
@click.argument("place", metavar="[STORE]", required=False)
@option("--at", type=click.IntRange(min=1), metavar="NUMBER", help="The number of the backup.  [default: the last one]")
@option(
    "--other",
    metavar="NAME=DIR",
    multiple=True,
    help="The directory of another store of the backup, if not where it was relative to the first; can be repeated.",
)
@option("--damaged", is_flag=True, help="Restore a store in which the check finds more than gaps, too.")
@option("--list", "listed", is_flag=True, help="Only print the backups in DEST.")
@store_option
@output_options
def restore(
    dest: str,
    place: str | None,
    at: int | None,
    other: tuple[str, ...],
    damaged: bool,
    listed: bool,
    store: str | None,
    output: CommandOutput,
) -> None:
    """Restore a backup from the directory DEST to STORE, where there is no store.

    All stores of the backup are restored together, the others to the same places relative to STORE that they had.
    Everything is checked before a store gets its name. A gap in a queue, which the store had when the backup was made,
    is restored and named. After kill -9 call it again.

    Positions and state are those of the moment of the backup, and the graph continues from there. A target outside
    that has later messages is refused when the graph starts (Diverged), and the error says how to continue.

    \b
      cues restore /backup/flights data/flights
      cues restore /backup/flights data/flights --at 12
      cues restore /backup/flights --list
    """
    source = local(dest)
    if listed:
        for number, made in backups.listed(source):
            if isinstance(made, CuesError):
                output.say(f"{number}  cannot be used: {made.message}", backup=number, problem=made.message)
                continue
            stores = ", ".join(stored.path for stored in made.stores)
            since = "everything" if made.since is None else f"changes since {made.since}"
            output.say(
                f"{made.number}  {iso(made.time)[:19]}Z  {since}, {size(made.bytes)}  {stores}",
                backup=made.number,
                since=made.since,
                time=made.time.isoformat(),
                bytes=made.bytes,
                stores={stored.name: stored.path for stored in made.stores},
            )
        return
    chosen = place or store
    if not chosen:
        raise WrongUsage("No place for the store is named.", f"cues restore {quoted(dest)} data/restored")
    others: dict[str, str] = {}
    for pair in other:
        name, equals, directory = pair.partition("=")
        if not equals or not directory:
            raise WrongUsage(f"--other {pair} is not a name and a directory.", "give it as --other NAME=DIR.")
        others[name] = directory
    with slowly() as say:
        done = backups.restore(
            source,
            Path(chosen),
            at,
            others,
            lambda name, done: say(f"{name}: restored {size(done)}", store=name, restored=done),
            damaged,
        )
    for problem in done.problems:
        note(f"{problem} It was so when the backup was made.")
    when = iso(done.backup.time)
    output.say(
        f"{', '.join(str(path) for path in done.places.values())}: restored from backup {done.backup.number};"
        f" commits after {when[:19]}Z are not in it",
        backup=done.backup.number,
        time=done.backup.time.isoformat(),
        chain=done.chain,
        stores={name: str(path) for name, path in done.places.items()},
        problems=done.problems,
    )
