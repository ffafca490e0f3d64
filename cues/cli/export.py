"""``cues export``: the messages of a queue as a file, which can be imported repeatedly."""

from __future__ import annotations

from pathlib import Path

import click

from cues.base.names import UUID
from cues.base.texts import count
from cues.cli.import_ import COLUMNS_HELP, CONTENT_TYPE_HELP, form_of, refuse_partitioned
from cues.cli.live import slowly
from cues.cli.options import WrongUsage, command, note, option
from cues.cli.output import CommandOutput, output_options
from cues.cli.printing import data
from cues.cli.target import takes_store
from cues.operate import positions as place
from cues.operate import target as targets
from cues.txn import journals


@command()
@takes_store("GRAPH#QUEUE | STORE#QUEUE")
@click.argument("file", metavar="[FILE]", default="-", type=click.Path(path_type=Path, allow_dash=True))
@option("--content-type", metavar="TYPE", help=CONTENT_TYPE_HELP)
@option("--uuid-key", metavar="FIELD", default=UUID, show_default=True, help="The field that holds a message's UUID.")
@option("--columns", metavar="NAMES", help=COLUMNS_HELP)
@option("--from", "start", metavar="PLACE", help=f"Begin at {place.HELP}.")
@option("--committed", is_flag=True, help="Only committed messages, each outside of transactions.")
@output_options
def export(
    target: targets.Target,
    file: Path,
    content_type: str | None,
    uuid_key: str,
    columns: str | None,
    start: str | None,
    committed: bool,
    output: CommandOutput,
) -> None:
    """Write the messages of a queue to a file, or to stdout, each with its UUID.

    A message without UUID gets one that is made of its queue and its index, the same in every export. So an
    export can be imported repeatedly. Pending messages and acknowledgements are written as they are; with
    --committed only committed messages are written. The export ends at the present end of the queue. A file is
    written whole or not at all, and an existing file is not replaced.

    \b
      cues export data/shop#orders orders.jsonl
      cues export data/shop#orders orders.msgpack           keeps every type
      cues export data/shop#orders --committed > orders.jsonl
      cues export data/shop#orders new.csv --columns item,count --from 1h
    """
    to_stdout = str(file) == "-"
    form = form_of(file, content_type or ("application/x-ndjson" if to_stdout else None), uuid_key, columns)
    begin = place.parse(start, "--from") if start else None
    if not to_stdout and file.exists():
        raise WrongUsage(f"The file {file} exists already.", "give another name, or remove the file.")
    with target.open() as opened, slowly() as say:
        queue = targets.open_queue(target, opened)
        refuse_partitioned(queue, target)
        index = None if begin is None else place.now_on(queue.core.log, begin, "--from")

        def progress(done: int, size: int) -> None:
            say(f"{queue.id}: {done:,} messages", queue=queue.id, messages=done, bytes=size)

        if to_stdout:
            number = journals.take_out(queue, _to_stdout, form, index, committed, progress)
        else:
            with journals.written_whole(file) as target_file:
                number = journals.take_out(queue, target_file.write, form, index, committed, progress)
    text = f"{count(number, 'message')} of {queue.id} exported"
    if to_stdout:
        note(text)
    else:
        output.say(f"{text} to {file}", queue=queue.id, file=str(file), exported=number)


def _to_stdout(frame: bytes) -> None:
    if not data(frame):
        raise click.exceptions.Exit(0)  # what became of the output is said by the code of the command
