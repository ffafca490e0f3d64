"""``cues import``: append files of messages with identities to a queue; it can be repeated."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

import click

from cues.base.names import UUID
from cues.base.texts import count
from cues.cli import options
from cues.cli.live import slowly
from cues.cli.options import CommandFailed, WrongUsage, command, option
from cues.cli.output import CommandOutput, output_options
from cues.cli.send import opened_queue
from cues.cli.target import takes_store
from cues.errors import CuesError
from cues.operate import target as targets
from cues.queues.queue import Queue
from cues.txn import journals

CONTENT_TYPE_HELP = (
    "application/x-ndjson, text/csv, application/x-msgpack-fixed or application/x-protobuf-fixed; without it, by the"
    " suffix (.jsonl, .csv, .msgpack, .fixed)."
)
COLUMNS_HELP = "Names of the CSV columns after the UUID, separated by commas."


@command(name="import")
@takes_store("GRAPH[#QUEUE] | STORE#QUEUE")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path, allow_dash=True))
@option("--content-type", metavar="TYPE", help=CONTENT_TYPE_HELP)
@option("--uuid-key", metavar="FIELD", default=UUID, show_default=True, help="The field that holds a message's UUID.")
@option("--columns", metavar="NAMES", help=COLUMNS_HELP)
@option("--stamp", is_flag=True, help="The messages have no UUID: give them one in FILE.stamped, and import that.")
@option("--unstamped", is_flag=True, help="The messages have no UUID; each import appends them again.")
@option("--create", is_flag=True, help="Make the queue, and the store, if they are missing.")
@output_options
def import_(
    target: targets.Target,
    files: tuple[Path, ...],
    content_type: str | None,
    uuid_key: str,
    columns: str | None,
    stamp: bool,
    unstamped: bool,
    create: bool,
    output: CommandOutput,
) -> None:
    """Append the messages of files to a queue, except those that it has already.

    Each message is identified by its UUID: producer, clock, flags. So an import that was interrupted or
    failed can be repeated. Files without UUIDs are stamped first: --stamp writes FILE.stamped beside the
    file, whole or not at all, and uses it again the next time.

    \b
      cues import data/shop#orders orders.jsonl
      cues import data/shop#orders part-1.csv part-2.csv --columns item,count --create
      cues import data/shop#orders raw.jsonl --stamp
      cues export old#orders | cues import new#orders - --content-type application/x-ndjson --create

    Pending messages stay pending until the acknowledgement that follows them in a file is imported. Several
    files are the parts of one journal, in their order.
    """
    if stamp and unstamped:
        raise WrongUsage("--stamp and --unstamped exclude each other.", "give only --stamp.")
    if Path("-") in files:
        options.stdin()  # before the store is opened
    plans = [(path, form_of(path, content_type, uuid_key, columns)) for path in files]
    with opened_queue(target, create) as queue:
        refuse_partitioned(queue, target)
        seen: dict[int, int] = {}
        for path, form in plans:
            if stamp:
                if str(path) == "-":
                    raise WrongUsage(
                        "Messages of stdin cannot be stamped: the stamped copy is kept beside a file.", "give a file."
                    )
                path, _ = journals.stamp(path, form)
            appended, had = _import(queue, path, form, unstamped, seen)
            kept = f", {count(had, 'message')} {'was' if had == 1 else 'were'} there already" if had else ""
            output.say(
                f"{path}: {count(appended, 'message')} imported to {queue.id}{kept}",
                file=str(path),
                queue=queue.id,
                imported=appended,
                there_already=had,
            )


def refuse_partitioned(queue: Queue, target: targets.Target) -> None:
    """Refuse a queue with several partitions: a journal is one log."""
    if queue.is_partitioned:
        raise WrongUsage(
            f"{queue.id} has {queue.partitions} partitions, and a journal belongs to one.",
            target.again(f"{queue.id}/0"),
        )


def form_of(path: Path, content_type: str | None, uuid_key: str, columns: str | None) -> journals.Form:
    """The form of the messages in a file."""
    chosen = content_type or journals.content_type_of(path)
    if chosen is None:
        raise WrongUsage(
            f"The suffix of {path} does not tell its content type.", "add --content-type application/x-ndjson."
        )
    return journals.Form(chosen, uuid_key, tuple(map(str.strip, columns.split(","))) if columns else ())


def _import(queue: Queue, path: Path, form: journals.Form, unstamped: bool, seen: dict[int, int]) -> tuple[int, int]:
    before = len(queue)
    stream: BinaryIO = options.stdin() if str(path) == "-" else path.open("rb")
    with stream, slowly() as say:
        try:
            return journals.bring(
                queue,
                stream,
                form,
                unstamped,
                lambda done, size: say(f"{path}: {done:,} messages", file=str(path), messages=done, bytes=size),
                seen,
            )
        except CuesError as error:
            raise CommandFailed(
                f"{path}: {error.message} Earlier messages are imported ({count(len(queue) - before, 'new message')}).",
                error.hint,
            ) from None
