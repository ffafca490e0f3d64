"""``cues errors``: the messages that failed, with their causes and what was done about them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

from cues.base import names
from cues.base.texts import ago, count, quoted
from cues.cli.options import Count, WrongUsage, command, limit_of, option
from cues.cli.output import CommandOutput, TableColumn, output_options, to_json
from cues.cli.printing import out
from cues.cli.target import takes_place
from cues.engine import redriving
from cues.engine.causes import cause_of
from cues.jsontext import iso
from cues.operate.failed import COUNTED_MAX, ErrorTotals, by_cause, facts, totals
from cues.operate.place import Place
from cues.operate.target import Target
from cues.operate.where import Where
from cues.steps.error_records import ErrorRecord

SHOWN: Final = 20
"""Error messages that are listed, if nothing else is asked for."""

_COLUMNS = (
    TableColumn("queue", "queue", optional=True),
    TableColumn("index", "index", right=True),
    TableColumn("when", "when"),
    TableColumn("processor", "processor"),
    TableColumn("calls", "attempts", right=True),
    TableColumn("messages", "messages", right=True, optional=True),
    TableColumn("state", "shown_state", optional=True),
    TableColumn("cause", "cause"),
)
_GROUPS = (
    TableColumn("count", "count", right=True),
    TableColumn("processor", "processor"),
    TableColumn("last", "last", right=True),
    TableColumn("when", "when"),
    TableColumn("cause", "cause"),
)


@command()
@takes_place("GRAPH[#QUEUE] | STORE[#QUEUE]")
@option("--processor", metavar="NAME", help="Only those of this processor.")
@option("--index", type=int, metavar="INDEX", help="One error message, whole: input, causes, traceback, times.")
@option("--group", is_flag=True, help="Count them by cause. Numbers that are no codes, and quoted text, do not matter.")
@option("--where", metavar="EXPR", help="Only those for which this is true: 'type == \"KeyError\" and input.n > 3'.")
@option("--all", "settled", is_flag=True, help="Also those that were redriven or discarded.")
@option("--last", "-n", "most", type=Count(), default=SHOWN, show_default=True, help="The number of the last ones.")
@output_options
def errors(
    place: Place,
    processor: str | None,
    index: int | None,
    group: bool,
    where: str | None,
    settled: bool,
    most: int | str,
    output: CommandOutput,
) -> None:
    """List the messages that failed, the last one of each error queue first.

    A message that failed for good is on the error queue of its processor, with its cause. It is unresolved until it
    is redriven (cues redrive) or discarded (cues discard), or until the retention of the queue removes it.

    \b
      cues errors graph.py
      cues errors graph.py --group                     by cause
      cues errors graph.py --index 12                  one, whole
      cues errors graph.py --processor price -n all
      cues errors data/shop --where 'type == "KeyError" and input.country == "DE"'
      cues errors graph.py#errors/3                    one partition of an error queue
      cues errors s3://bucket/shop                     a directory of cues run --queues

    An expression may use queue, index, time, processor, type and text (of the exception), cause (as --group shows
    it), attempts, count (of messages that failed together), state, redriven (0 for a first failure), input (the
    message that failed, such as input.price), inputs (by binding) and context. The store is opened
    read-only, whether its graph runs or not.
    """
    limit = limit_of(most)
    condition = Where(where) if where is not None else None
    target = place.target
    with place.errors() as failed:
        if index is not None:
            here = [record for record in failed.at(index) if redriving.matches(record, processor)]
            return _show(target, _one(target, here, index), failed.can_settle, output)
        chosen = (r for r in failed.records(settled) if redriving.matches(r, processor, condition))
        if group:
            return _by_cause(chosen, output, target)
        listed = list(islice(chosen, limit))
        if output.json:
            output.rows([facts(record) for record in listed], ())
            return
        if not listed:
            what = "error message" if settled else "unresolved error message"
            out(f"{target.text}: no {what}" + (f" of {processor}" if processor else ""))
            if condition is not None and (hint := condition.explain()):
                out(hint)
            return
        output.rows([_row(record, listed) for record in listed], _COLUMNS)
        out()
        for line in _totals(totals(failed)):
            out(line)
        out(f"  {_command('errors', target)} --index {listed[0].index}   shows one whole")
        if failed.can_settle and any(not record.settled for record in listed):
            out(f"  {_command('redrive', target)} --all   gives them to their processors once more")


def _one(target: Target, here: list[ErrorRecord], index: int) -> ErrorRecord:
    if len(here) > 1:
        queues = ", ".join(record.queue for record in here)
        again = f"cues errors {quoted(target.text)}#{quoted(here[0].queue)} --index {quoted(index)}"
        raise WrongUsage(f"The index {index} is on {queues}.", again)
    if not here:
        raise WrongUsage(f"{target.text} has no error message {index}.", f"cues errors {quoted(target.text)} --all")
    return here[0]


def _row(record: ErrorRecord, listed: list[ErrorRecord]) -> dict[str, Any]:
    several = len({other.queue for other in listed}) > 1
    return {
        "queue": record.queue if several else None,
        "index": record.index,
        "when": ago(record.time),
        "processor": record.processor.partition(".")[2] or record.processor,
        "attempts": record.attempts,
        "messages": record.count if record.count > 1 else None,
        "shown_state": record.state if record.state != "unresolved" else None,
        "cause": cause_of(record),
    }


def _totals(counts: ErrorTotals) -> list[str]:
    words = ", ".join(f"{processor} {number:,}" for processor, number in counts.by_processor.most_common())
    some = f" (of the last {counts.counted:,}: {words})" if counts.total > counts.counted else f" ({words})"
    lines = [f"{counts.total:,} unresolved{some if counts.by_processor or counts.total else ''}"]
    if counts.waiting:
        lines.append(f"{counts.waiting:,} of them wait for their redrive: the owner of the processor makes it")
    return lines


def _by_cause(records: Iterator[ErrorRecord], output: CommandOutput, target: Target) -> None:
    groups = by_cause(islice(records, COUNTED_MAX))
    rows = [
        {
            "count": group.count,
            "messages": group.messages,
            "processor": group.processor if output.json else group.processor.partition(".")[2],
            "cause": group.cause,
            "last": group.last.index,
            "queue": group.last.queue,
            "when": group.last.time if output.json else ago(group.last.time),
        }
        for group in groups
    ]
    if not rows and not output.json:
        out(f"{target.text}: no unresolved error message")
        return
    output.rows(rows, _GROUPS)
    if not output.json and sum(group.count for group in groups) == COUNTED_MAX:
        out(f"\nOf the last {COUNTED_MAX:,} error messages.")


def _show(target: Target, record: ErrorRecord, can_settle: bool, output: CommandOutput) -> None:
    """Print one error message, whole."""
    if output.json:
        output.rows([facts(record)], ())
        return
    out(f"{record.queue} {record.index}: {record.processor}, {ago(record.time)} ({iso(record.time)}), {record.state}")
    calls = count(record.attempts, "call")
    out(f"{calls}; hash {record.hash or 'unknown'}; function {record.config.get('function')}")
    for origin in record.redriven:
        out(f"It failed before, as {origin.get('queue')} {origin.get('index')}")
    done = record.resolution
    if done is not None:
        words = {"requested": "redrive asked for", "refused": "redrive refused"}.get(done.state, done.state)
        again = f", as {', '.join(f'{index:,}' for index in done.again)}" if done.again else ""
        reason = f": {done.reason}" if done.reason else ""
        out(f"{words[:1].upper()}{words[1:]}{again}, {ago(done.time)}, by {done.by}{reason}")
    for binding, messages in record.inputs.items():
        out(f"\nInput {binding}{f' ({len(messages):,} messages)' if len(messages) > 1 else ''}:")
        for message in messages:
            out(f"  {to_json(message)}")
    context = record.message.get(names.ERR_CONTEXT)
    if context:
        out(f"\nContext: {to_json(context)}")
    for number, cause in enumerate(record.causes):
        out("\nCause:" if not number else "\nCaused by:")
        trace = str(cause.get("trace") or f"{cause.get('type')}: {cause.get('message')}")
        out("\n".join(f"  {line}" for line in trace.rstrip("\n").splitlines()))
    if can_settle and not record.settled:
        out(f"\n  {_command('redrive', target)} --index {record.index}")
        out(f"  {_command('discard', target)} --index {record.index} --reason TEXT")


def _command(verb: str, target: Target) -> str:
    """A command for the same error messages."""
    name = f"#{target.name}" if target.name else ""
    store = f" --store {quoted(target.store)}" if target.store else ""
    return f"cues {verb} {quoted(target.text + name)}{store}"
