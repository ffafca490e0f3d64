"""``cues tail``: the messages of a queue, one JSON object a line."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from datetime import datetime
from typing import Any, Final

import click

from cues.base import names
from cues.base.texts import quoted
from cues.cli import options, place, shared
from cues.cli import target as targets
from cues.cli.options import WrongUsage, command, option
from cues.cli.output import to_json
from cues.cli.printing import flush, out
from cues.cli.where import Where
from cues.errors import BatchDamaged
from cues.jsontext import iso
from cues.overrides import override
from cues.queues.committed import Isolation
from cues.queues.merged import MergedTailer
from cues.queues.queue import Queue
from cues.queues.tailer import Tailer

LAST = 10
"""Number of messages that are printed by default."""


class Count(click.ParamType):  # type: ignore[type-arg]
    """A count of messages, or ``all``."""

    name = "N|all"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "all":
            return "all"
        try:
            number = int(str(value).replace(",", "").replace("_", ""))
        except ValueError:
            number = -1
        if number < 0:
            self.fail(f"{value!r} is neither a count of messages nor 'all'.", param, ctx)
        return number


FILE_CHECK_S: Final = 1.0
"""Seconds without a message after which ``--follow`` looks whether the store is still there."""
_LOOK_S: Final = 0.5
"""Seconds between two looks of ``--follow`` for new messages in a shared directory."""


@command()
@targets.takes_store("GRAPH#QUEUE | STORE#QUEUE", shared=True)
@option("--follow", "-f", is_flag=True, help="Continue with new messages, until Ctrl-C.")
@option(
    "--count",
    "-n",
    "count",
    type=Count(),
    help="Print this number of last messages; with --from, of first messages.  [default: 10]",
)
@option("--from", "start", metavar="PLACE", help=f"Begin at {place.HELP}.")
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
    target: targets.StoreTarget,
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
    begin = place.parse(start, "--from") if start else None
    if target.is_shared and isolation == "committed":
        raise WrongUsage(
            "--isolation committed reads the queues of a store, and this is a directory of queues.",
            "leave the option out: messages come to such a directory when they are committed.",
        )
    if target.is_shared:
        printed, failed = _print_shared(target, condition, begin, count, follow, meta)
    else:
        with target.open() as opened:
            reader = _Reader(targets.open_queue(target, opened), condition, meta, isolation)
            reader.print(begin, count, follow)
        printed, failed = reader.printed, reader.failed
    if condition is not None and not printed and (explained := condition.explain()):
        options.note(explained)
    return options.FAILED if failed else 0


def _print_shared(
    target: targets.StoreTarget,
    condition: Where | None,
    begin: place.Place | None,
    count: int | str | None,
    follow: bool,
    meta: bool,
) -> tuple[int, bool]:
    """Print messages of a queue in a shared directory; return their number, and whether one could not be printed."""
    from cues.spark.cluster.inspection import QueueReader

    queue = shared.queue_of(target)
    reader = QueueReader(target.place, queue)
    most = LAST if count is None else None if count == "all" else int(count)
    if begin is None:
        at, limit = reader.last(most, condition), None
    else:
        at, limit = reader.place_of(begin, "--from"), None if count is None else most
    numbers = {log.partition: number for number, log in enumerate(reader.logs)}
    printed, failed = 0, False
    while limit is None or printed < limit:
        for read in reader.read(at):
            at[numbers[read.partition]] = read.index + 1
            if condition is not None and not condition(read.message):
                continue
            log = names.log_id(reader.directory.queue, read.partition)
            about = {names.HASH: read.hash, names.QUEUE: {log: {names.T: read.index, names.TIME: iso(read.time)}}}
            text = _text({**read.message, names.META: about} if meta else read.message, log, read.index)
            if text is None:
                failed = True
                continue
            printed += 1
            if not out(text) or printed == limit:
                break
        if not flush() or not follow:
            break
        while printed != limit and not reader.has_more(at):
            time.sleep(_LOOK_S)
    return printed, failed


def _text(message: Any, log: str, index: int) -> str | None:
    """Return a message as JSON; None, after an error on stderr, if JSON cannot hold it."""
    try:
        return to_json(message)
    except (ValueError, RecursionError) as error:
        options.report(f"Message {index} of {log} cannot be printed: {error}.", "read it in Python, with a tailer.")
        return None


class _Reader:
    """Prints messages of one queue, and continues after damage."""

    def __init__(self, queue: Queue, condition: Where | None, meta: bool, isolation: Isolation) -> None:
        self.queue = queue
        self.isolation: Isolation = isolation
        self.condition = condition
        self.meta = meta
        self.printed = 0
        self.failed = False

    def print(self, begin: place.Place | None, count: int | str | None, follow: bool) -> None:
        tailer = self.queue.tailer(meta=False, isolation=self.isolation)
        go = self._begin if isinstance(tailer, MergedTailer) else self._begin_alone
        limit = go(tailer, begin, count)  # type: ignore[arg-type]
        if limit == 0:
            return
        for line in self._lines(tailer, follow):
            self.printed += 1
            if not out(line) or self.printed == limit:
                break

    def _begin(self, tailer: MergedTailer, begin: place.Place | None, count: int | str | None) -> int | None:
        """Move to the first message to print, on several partitions; return the largest number to print."""
        if isinstance(begin, int):
            raise WrongUsage(
                f"{self.queue.id} has {self.queue.partitions} partitions, and an index belongs to one.",
                f"give --from a time, or name a partition: #{self.queue.id}/0 --from {begin}",
            )
        if begin is None:
            if count != "all":
                self._back(tailer, LAST if count is None else int(count))
            return None
        if isinstance(begin, datetime):
            tailer.to_time(begin)
        else:
            tailer.to_start() if begin == "start" else tailer.to_end()
        return count if isinstance(count, int) else None

    def _back(self, tailer: MergedTailer | Tailer, count: int) -> None:
        """Move to the first of the last ``count`` matching messages."""
        tailer.to_end()
        tailer.direction = "backward"
        matching = 0
        while matching < count:
            try:
                message = tailer.read()
            except BatchDamaged as error:  # it is reported when it is read forward
                self._move(tailer, error, error.first)
                continue
            if message is None:
                break
            matching += self.condition is None or bool(self.condition(message))
        tailer.direction = "forward"

    @staticmethod
    def _move(tailer: MergedTailer | Tailer, error: BatchDamaged, index: int) -> None:
        """Move to an index of the log with the damage."""
        if isinstance(tailer, MergedTailer):
            tailer.to_index({names.log_parts(error.queue)[1]: index})
        else:
            tailer.to_index(index)

    def _begin_alone(self, tailer: Tailer, begin: place.Place | None, count: int | str | None) -> int | None:
        """The same as :meth:`_begin`, for one log."""
        if begin is not None:
            tailer.to_index(place.now_on(self.queue._log, begin, "--from"))
            return count if isinstance(count, int) else None
        if count != "all" and self.isolation == "committed":  # the last messages are not those of the last indices
            self._back(tailer, LAST if count is None else int(count))
        elif count != "all":
            tailer.to_index(self._last(LAST if count is None else int(count)))
        return None

    def _last(self, count: int) -> int:
        """The index of the first of the last ``count`` matching messages."""
        row = self.queue._row()
        if self.condition is None or not count:
            return max(row.first, row.next - count)
        matching: deque[int] = deque(maxlen=count)
        end = row.next
        while end > row.first and len(matching) < count:
            # Batch by batch from the end; reading each forward is much faster than message by message.
            with self.queue.store.core.view() as txn:
                raws = self.queue._log.read_before(txn, self.queue._log.row(txn), end)
            if not raws:
                break
            try:
                batch = self.queue._log.batches(raws)[0]
            except BatchDamaged as error:
                end = error.first
                continue
            messages = batch.messages()
            for offset in range(min(len(messages), end - batch.first) - 1, -1, -1):
                if batch.head.acknowledges or batch.first + offset < row.first:
                    continue
                if self.condition(messages[offset]):
                    matching.appendleft(batch.first + offset)
                    if len(matching) == count:
                        break
            end = batch.first
        return matching[0] if matching else row.next

    def _lines(self, tailer: Tailer, follow: bool) -> Iterator[str]:
        while True:
            try:
                message = tailer.read()
                if message is None:
                    if not flush() or not follow:
                        return
                    while (message := tailer.read(block=True, timeout=FILE_CHECK_S)) is None:
                        self.queue.store.core.check_file()  # cues run --fresh deletes a store that others read
            except BatchDamaged as error:
                options.report(error.message, f"run cues check {quoted(self.queue.store.path)}.")
                self.failed = True
                self._move(tailer, error, error.last + 1)
                continue
            if message is None or (self.condition is not None and not self.condition(message)):
                continue
            envelope = tailer.envelope
            assert envelope is not None
            log = names.log_id(self.queue.name, envelope.partition)
            text = _text({**message, names.META: self._meta(tailer)} if self.meta else message, log, envelope.index)
            if text is None:
                self.failed = True
            else:
                yield text

    def _meta(self, tailer: Tailer) -> dict[str, Any]:
        """The metadata that the queue keeps, and always the index and time on this queue."""
        envelope = tailer.envelope
        assert envelope is not None
        kept = dict(envelope.metadata)
        queues = {
            name: {
                key: iso(value) if key == names.TIME and not isinstance(value, str) else value
                for key, value in at.items()
            }
            for name, at in kept.get(names.QUEUE, {}).items()
        }
        queues[names.log_id(self.queue.name, envelope.partition)] = {
            names.T: envelope.index,
            names.TIME: iso(envelope.time),
        }
        identity = {} if envelope.uuid is None else {names.UUID: str(envelope.uuid)}
        return {names.HASH: envelope.hash, **identity, **kept, names.QUEUE: queues}
