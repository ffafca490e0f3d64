"""``cues tail``: the messages of a queue, one JSON object a line."""

from __future__ import annotations

from typing import Any

import click

from cues.base import names
from cues.base.texts import quoted
from cues.cli import options
from cues.cli.options import Count, command, limit_of, option
from cues.cli.output import to_json
from cues.cli.printing import flush, out
from cues.cli.target import takes_place
from cues.errors import BatchDamaged
from cues.operate import positions
from cues.operate.place import Place, Reader
from cues.operate.where import Where
from cues.queues.committed import Isolation

LAST = 10
"""Number of messages that are printed by default."""


@command()
@takes_place("GRAPH#QUEUE | STORE#QUEUE")
@option("--follow", "-f", is_flag=True, help="Continue with new messages, until Ctrl-C.")
@option(
    "--count",
    "-n",
    "count",
    type=Count(),
    help="Print this number of last messages; with --from, of first messages.  [default: 10]",
)
@option("--from", "start", metavar="PLACE", help=f"Begin at {positions.HELP}.")
@option("--where", metavar="EXPRESSION", help="Print only messages for which this is true: 'x > 3 and name == \"a\"'.")
@option(
    "--isolation",
    type=click.Choice(["uncommitted", "committed"]),
    default="uncommitted",
    show_default=True,
    help="committed: print messages of transactions only after their commit, in the order of the commits.",
)
@option("--json", "as_json", is_flag=True, help="Changes nothing: messages are always one JSON object a line.")
@option(
    "--meta",
    is_flag=True,
    help="Add q/meta: index, time and hash of the message, and its metadata from earlier queues.",
)
def tail(
    place: Place,
    follow: bool,
    count: int | str | None,
    start: str | None,
    where: str | None,
    isolation: Isolation,
    as_json: bool,
    meta: bool,
) -> int:
    """Print messages of a queue, one JSON object a line; by default the last ten.

    \b
      cues tail graph.py#priced                      the last 10
      cues tail data/shop#priced -n all              all messages
      cues tail data/shop#priced -f                  the last 10, and each new message
      cues tail data/shop#priced -f --from end -n 1  wait for one message
      cues tail data/shop#priced --from 1h --where 'total > 100 and country in ("DE", "FR")'
      cues tail data/shop#errors --meta | jq .
      cues tail data/shop#orders/3                   one partition of a queue that has several
      cues tail /mnt/flights#enriched                a queue in a directory of cues run --queues
      cues tail s3://bucket/flights#enriched -f      the same, in an object store

    Several partitions are printed as one queue, in the order of append times. If --from is an index, name one
    partition.

    In --where a name is a field of the message (a missing one is None), a.b a field of a field. It may use
    comparisons, in, and, or, not, arithmetic, get("q/type"), has("x"), len, match(text, pattern) and similar
    functions. Dates are printed as ISO 8601 text, bytes as {"$bytes": base64}.

    The command names a damaged record batch, and a message that JSON cannot hold, and continues after it; the exit
    code is then 1.
    """
    condition = Where(where) if where else None
    begin = positions.parse(start, "--from") if start else None
    most = LAST if count is None else limit_of(count)
    reader = place.reader(isolation)
    if begin is None:
        reader.back(most, condition)
    else:
        reader.go(begin, "--from")
    limit = None if begin is None or count is None else most
    printed, failed = _print(reader, condition, limit, follow, meta)
    if condition is not None and not printed and (explained := condition.explain()):
        options.note(explained)
    return options.FAILED if failed else 0


def _print(reader: Reader, condition: Where | None, limit: int | None, follow: bool, meta: bool) -> tuple[int, bool]:
    """Print messages from the place of the reader on; return their number, and whether one could not be printed."""
    printed, failed = 0, False
    for found in reader.forward(follow) if limit != 0 else ():
        if found is None:
            if not flush():
                break
        elif isinstance(found, BatchDamaged):
            options.report(found.message, f"run cues check {quoted(found.path)}.")
            failed = True
        elif condition is None or condition(found.message):
            message = {**found.message, names.META: found.meta(reader.name)} if meta else found.message
            text = _text(message, names.log_id(reader.name, found.partition), found.index)
            failed = failed or text is None
            printed += text is not None
            if text is not None and (not out(text) or printed == limit):
                break
    return printed, failed


def _text(message: Any, log: str, index: int) -> str | None:
    """Return a message as JSON; None, after an error on stderr, if JSON cannot hold it."""
    try:
        return to_json(message)
    except (ValueError, RecursionError) as error:
        options.report(f"Message {index} of {log} cannot be printed: {error}.", "read it in Python, with a tailer.")
        return None
