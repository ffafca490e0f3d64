"""``cues send``: append messages, given as arguments or as JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any, Final

import click

from cues import jsontext
from cues.base import names
from cues.base.texts import count
from cues.cli import options
from cues.cli.options import CommandFailed, WrongUsage, command, note, option
from cues.cli.output import CommandOutput, output_options
from cues.cli.printing import is_terminal
from cues.cli.target import takes_store
from cues.errors import CuesError, QueueFull, QueueNotFound, StoreNotFound
from cues.forwarding import other_stores
from cues.graphs.graphfile import shown
from cues.operate import target as targets
from cues.queues.appender import Appender
from cues.queues.base import PartitionIndex
from cues.queues.options import delayed, kept_in_store, to_open
from cues.queues.queue import Queue
from cues.queues.store import Store, open_or_make

_READ_BYTES: Final = 1 << 20
"""Most bytes of stdin in one commit. Only available bytes are read, so the line of a slow writer does not wait."""


@command()
@takes_store("GRAPH[#QUEUE] | STORE#QUEUE")
@click.argument("messages", metavar="[MESSAGE | KEY=VALUE]...", nargs=-1)
@option("--create", is_flag=True, help="Make the queue, and the store, if they are missing.")
@option("--delay", metavar="TIME", help="Processors get the messages after this time: 90s, 10m, 2h, 1d.")
@option("--deliver-at", metavar="TIME", help="Processors get the messages at this time: 2026-01-31T12:00Z.")
@option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Wait at most this long for room on a bounded queue; 0: not at all.  [default: until there is room]",
)
@output_options
def send(
    target: targets.Target,
    messages: tuple[str, ...],
    create: bool,
    delay: str | None,
    deliver_at: str | None,
    timeout: float | None,
    output: CommandOutput,
) -> None:
    """Append messages to a queue, and wake up its readers.

    A message is a JSON object, or key=value pairs, whose values are JSON if they can be read as JSON, and
    text otherwise. Without arguments the messages are JSON lines on stdin: all lines that are ready are
    one commit.

    \b
      cues send graph.py#orders count=3 item=apple paid=true
      cues send graph.py#orders '{"count": 3}' '{"count": 4}'
      cues send data/shop#orders < orders.jsonl
      cues send graph.py#reminders text=tea --delay 10m
      cues tail old#orders -n all | cues send new#orders --create

    A graph file without #queue means its source. A line that is not a JSON object ends the command with
    exit code 1 and the number of the line: the lines before it are sent, this and the following ones are not.

    A queue with max_lag or max_bytes makes writers wait for its readers. With --timeout a wait that is longer ends the
    command with exit code 4. The error names the readers and, for stdin, the first line that is not sent.

    With a graph file, messages for a source that has schema= must fit it. A store alone does not know the schema.
    """
    given = arguments_of(messages)
    at = _time_of_delivery(delay, deliver_at)
    with opened_queue(target, create) as queue:
        schema = target.file.graph.plan().schema_of(queue.name) if target.file is not None else None
        sender = _Sender(queue.appender(timeout=timeout, schema=schema), at)
        try:
            if given:
                sender.send(given, "message")
            else:
                _send_stdin(sender)
        finally:
            sender.tell(output)


@contextmanager
def opened_queue(target: targets.Target, create: bool) -> Iterator[Queue]:
    """The queue for the messages, in its store; for a graph file without a queue, the graph's source."""
    if target.file is not None and not target.name:
        source = target.file.graph.plan().source or ""
        target = replace(target, path=targets.store_of_queue(target.file, source, target.store))
    with _open(target, create) as opened:
        yield _queue(target, opened, create)


def arguments_of(messages: tuple[str, ...]) -> list[dict[str, Any]]:
    if not messages:
        return []
    if all(text.lstrip().startswith("{") for text in messages):
        decoded = []
        for number, text in enumerate(messages, 1):
            try:
                decoded.append(message_of(text))
            except ValueError as error:
                raise WrongUsage(
                    f"Message {number} is not a JSON object: {error}.", """write a JSON object, such as '{"key": 1}'"""
                ) from None
        return decoded
    pairs: dict[str, Any] = {}
    for text in messages:
        key, equals, value = text.partition("=")
        if not equals or not key or text.lstrip().startswith("{"):
            raise WrongUsage(
                f"{text!r} is neither key=value nor, with all other arguments, a JSON object.",
                """write count=3 item=apple, or '{"count": 3, "item": "apple"}'""",
            )
        if key in pairs:
            raise WrongUsage(f"The key {key!r} is given twice.", "give one value, or a JSON list: tags='[1, 2]'")
        try:
            pairs[key] = jsontext.decode(value, shown=True)
        except json.JSONDecodeError:
            pairs[key] = value
        except ValueError as error:
            raise WrongUsage(
                f"The value of {key!r} cannot be read: {error}.",
                f"""write {key}='"…"' for a text, or {key}='{{"$float": "nan"}}' for a number without JSON.""",
            ) from None
    return [pairs]


def _time_of_delivery(delay: str | None, deliver_at: str | None) -> datetime | None:
    """Return the time of --delay or --deliver-at; None without both."""
    if delay is None and deliver_at is None:
        return None
    try:
        at = None if deliver_at is None else datetime.fromisoformat(deliver_at)
        time: datetime = delayed({}, deliver_at=at, delay=delay)[names.META][names.DELIVER_AT]
    except (ValueError, CuesError) as error:
        text = getattr(error, "message", str(error))
        raise WrongUsage(text, "write --delay 10m, or --deliver-at 2026-01-31T12:00:00+00:00.") from None
    return time


def message_of(text: str | bytes) -> dict[str, Any]:
    """Decode one JSON object; raises ValueError with the reason."""
    try:
        value = jsontext.decode(text, shown=True)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at column {error.colno}") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is {type(value).__name__}")
    return value


def _open(target: targets.Target, create: bool) -> Store:
    if target.file is None:
        if not create:
            target.require()
        return target.open(readonly=False)
    _refuse_lost(target, create)
    if not target.exists:
        if target.store is not None and not create:
            raise StoreNotFound(
                f"There is no store at {shown(target.path)}.",
                "correct --store; or make the store with --create.",
                path=str(target.path),
            )
        note(f"made the store {shown(target.path)}")
    return open_or_make(target.path, target.file.graph.durability)


def _refuse_lost(target: targets.Target, create: bool) -> None:
    """Refuse to make a new store at the path of a missing one that the graph has used."""
    assert target.file is not None
    home = targets.store_of(target.file, None)
    if create or target.exists or home == target.path or not (home / "data.mdb").exists():
        return
    with Store(home, readonly=True) as store:
        known = {place.resolve() for places in other_stores.places(store).values() for place in places}
    if target.path.resolve() in known:
        raise StoreNotFound(
            f"The store {shown(target.path)}, which the graph has used, is missing.",
            "put the store back, or make another with --create.",
            path=str(target.path),
        )


def _queue(target: targets.Target, store: Store, create: bool) -> Queue:
    if "." in target.name:
        raise WrongUsage(f"{target.name} is a try log, which only its processor writes.", target.again("queue"))
    known = store.queues()
    if target.file is not None:
        graph = target.file.graph
        plan = graph.plan()
        name = target.name or plan.source or ""
        if name in plan.queues:
            asked = graph.queues.get(name) or graph.queues.get("*")
            return store.queue(name, **(to_open(kept_in_store(asked)) if asked else {}))
        if not name or not create:
            named = [*plan.fed, *(queue for queue in plan.queues if queue not in plan.fed)]
            targets.queue_of(target, named)
    if target.name in known or (create and target.name):
        return store.queue(target.name)
    if create:
        raise WrongUsage("Which queue?", target.again("queue"))
    try:
        return store.queue(targets.queue_of(target, known))
    except QueueNotFound as error:
        if target.name.partition("/")[0] in known:
            raise  # a missing partition: one partition cannot be made alone
        raise QueueNotFound(error.message, f"{error.hint.rstrip('.')}, or add --create.", queue=target.name) from None


class _Sender:
    """Appends messages, and counts them."""

    def __init__(self, appender: Appender, deliver_at: datetime | None = None) -> None:
        self._appender = appender
        self._deliver_at = deliver_at
        self.sent = 0
        self.first: int | None = None
        self.last: int | None = None
        self._partitions: set[int] = set()
        """For a queue with several partitions, those that were written to."""

    def send(self, messages: list[dict[str, Any]], noun: str, lines: list[int] | None = None) -> None:
        """Send messages in one commit. If one cannot be written, send only those before it."""
        if not messages:
            return
        try:
            self._append(messages, noun, lines)
        except CuesError as error:
            offset = getattr(error, "offset", None)
            if offset is None:
                raise
            self._append(messages[:offset], noun, lines)
            number = lines[offset] if lines else offset + 1
            raise CommandFailed(
                f"{noun.capitalize()} {number} and the following ones cannot be sent: {error.message}", error.hint
            ) from None

    def _append(self, messages: list[dict[str, Any]], noun: str, lines: list[int] | None) -> None:
        try:
            self._wrote(self._appender.write_many(messages, deliver_at=self._deliver_at))
        except QueueFull as error:
            if lines is None:
                raise  # all messages are one commit, and the error says that nothing was written
            why = error.message.removesuffix(" Nothing was written.")
            sent = f"{count(self.sent, 'message')} before {'is' if self.sent == 1 else 'are'}"
            raise QueueFull(
                f"{why} {noun.capitalize()} {lines[0]} and the following ones are not sent; {sent}.",
                f"{error.hint.rstrip('.')}. Then send the rest: tail -n +{lines[0]} FILE | cues send …",
                queue=error.queue,
                readers=error.readers,
            ) from None

    def _wrote(self, written: Sequence[int]) -> None:
        if not written:
            return
        self.sent += len(written)
        self._partitions |= {place.partition for place in written if isinstance(place, PartitionIndex)}
        self.first = written[0] if self.first is None else self.first
        self.last = written[-1]

    def tell(self, output: CommandOutput) -> None:
        name, first, last = self._appender.queue.id, self.first, self.last
        where = ""
        partitions = sorted(self._partitions)
        if len(partitions) > 1:
            first, last = None, None
            where = f" (partitions {', '.join(map(str, partitions))})"
        elif self.sent:
            name = names.log_id(name, partitions[0]) if partitions else name
            where = f" (index {self.first:,})" if self.sent == 1 else f" (index {self.first:,} to {self.last:,})"
        facts: dict[str, Any] = {"queue": name, "sent": self.sent, "first_index": first, "last_index": last}
        if partitions:
            facts["partitions"] = partitions
        output.say(f"{count(self.sent, 'message')} sent to {name}{where}", **facts)


def _send_stdin(sender: _Sender) -> None:
    if is_terminal("stdin"):
        options.note("Type JSON objects, one a line; Ctrl-D ends.")
    number = 0
    for lines in _lines():
        messages: list[dict[str, Any]] = []
        numbers: list[int] = []
        for line in lines:
            number += 1
            if not line.strip():
                continue
            try:
                messages.append(message_of(line))
            except ValueError as error:
                sender.send(messages, "line", lines=numbers)
                raise CommandFailed(
                    f"Line {number} is not a JSON object ({error}); {count(sender.sent, 'message')} before it"
                    f" {'is' if sender.sent == 1 else 'are'} sent; this line and the following lines are not.",
                    f"correct the line and send the rest: tail -n +{number} FILE | cues send …",
                ) from None
            numbers.append(number)
        sender.send(messages, "line", lines=numbers)


def _lines() -> Iterator[list[bytes]]:
    """Yield the available whole lines until the end; the last one may lack its line feed."""
    rest = b""
    while chunk := os.read(options.stdin().fileno(), _READ_BYTES):
        whole, feed, after = chunk.rpartition(b"\n")
        if not feed:
            rest += after
            continue
        lines = (rest + whole).split(b"\n")
        rest = after
        yield lines
    if rest:
        yield [rest]
