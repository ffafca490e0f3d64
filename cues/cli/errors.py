"""``cues errors``: the messages that failed, with their causes and what was done about them."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

from cues.base import clock, names
from cues.base.names import ProcessorId, ProcessorKey
from cues.base.texts import quoted
from cues.cli import target as targets
from cues.cli.options import WrongUsage, command, option
from cues.cli.output import CommandOutput, TableColumn, ago, count, output_options, to_json
from cues.cli.printing import out
from cues.cli.where import Where
from cues.engine import redriving
from cues.jsontext import iso
from cues.queues.store import Store
from cues.steps.error_records import ErrorLogs, ErrorRecord

SHOWN: Final = 20
"""Error messages that are listed, if nothing else is asked for."""
COUNTED_MAX: Final = 10_000
"""Error messages that are read to count them by processor and by cause; of more, the counts are of the last ones."""

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
_QUOTED: Final = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
_NUMBER: Final = re.compile(r"0x[0-9a-fA-F]+|\d+(?:\.\d+)?")


@command()
@targets.takes_store("GRAPH[#QUEUE] | STORE[#QUEUE]", shared=True)
@option("--processor", metavar="NAME", help="Only those of this processor.")
@option("--index", type=int, metavar="INDEX", help="One error message, whole: input, causes, traceback, times.")
@option("--group", is_flag=True, help="Count them by cause. Numbers and quoted text in the cause do not matter.")
@option("--where", metavar="EXPR", help="Only those for which this is true: 'type == \"KeyError\" and input.n > 3'.")
@option("--all", "settled", is_flag=True, help="Also those that were redriven or discarded.")
@option(
    "--last", "-n", "most", metavar="N|all", default=str(SHOWN), show_default=True, help="The number of the last ones."
)
@output_options
def errors(
    target: targets.StoreTarget,
    processor: str | None,
    index: int | None,
    group: bool,
    where: str | None,
    settled: bool,
    most: str,
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

    An expression may use queue, index, time, processor, type and text (of the exception), attempts, count (of
    messages that failed together), state, redriven (0 for a first failure), input (the message that failed, such as
    input.price), inputs (by binding) and context. The store is opened read-only, whether its graph runs or not.
    """
    limit = None if most == "all" else _number(most)
    condition = Where(where) if where is not None else None
    with opened(target) as (records, unresolved, at):
        if index is not None:
            here = [record for record in at(index) if redriving.matches(record, processor)]
            return _show(target, _one(target, here, index), output)
        chosen = (r for r in records(settled) if redriving.matches(r, processor, condition))
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
        for line in _totals(records(False), unresolved()):
            out(line)
        out(f"  {_command('errors', target)} --index {listed[0].index}   shows one whole")
        if not target.is_shared and any(not record.settled for record in listed):
            out(f"  {_command('redrive', target)} --all   gives them to their processors once more")


@contextlib.contextmanager
def opened(
    target: targets.StoreTarget,
) -> Iterator[
    tuple[Callable[[bool], Iterator[ErrorRecord]], Callable[[], int | None], Callable[[int], list[ErrorRecord]]]
]:
    """Three functions: the records, last first (with True also the settled ones); the number of unresolved ones, if
    it is known without reading them; and the records at an index."""
    if target.is_shared:
        yield (
            lambda settled: _in_directory(target),
            lambda: None,
            lambda index: [record for record in _in_directory(target) if record.index == index],
        )
        return
    with home_of(target) as home, logs_of(target, home) as logs:
        yield logs.records, logs.unresolved, lambda index: [r for log in logs.logs if (r := log.record(index))]


@contextlib.contextmanager
def home_of(target: targets.StoreTarget, readonly: bool = True) -> Iterator[Store]:
    """The store that has the processors, also if the error queue is in another one."""
    if target.file is None:
        target.require()
    path = target.path if target.file is None else targets.store_of(target.file, target.store)
    if target.file is not None and not (path / "data.mdb").exists():
        targets.StoreTarget(path, target.file, "", target.text, target.store).require()
    with Store(path, readonly=readonly) as home:
        yield home


def logs_of(target: targets.StoreTarget, home: Store) -> ErrorLogs:
    """The error queues of a target."""
    declared = redriving.error_queues(target.file.graph if target.file is not None else None)
    if target.name:
        with ErrorLogs(home, declared) as logs:
            known = {log.id for log in logs.logs}
        known |= {name.partition("/")[0] for name in known}
        if target.name not in known:
            targets.queue_of(target, sorted(known))  # raises, with the nearest name
    return ErrorLogs(home, declared, target.name)


def _in_directory(target: targets.StoreTarget) -> Iterator[ErrorRecord]:
    from cues.spark.cluster import inspection

    for queue in inspection.queues_of(target.place):
        if target.name and queue != target.name.partition("/")[0]:
            continue
        for log in inspection.logs_of(target.place, queue):
            if "/" in target.name and log.id != target.name:
                continue
            for index, time_ns, message in inspection.backwards(target.place, [log], log.next):
                if message.get(names.TYPE) != names.PROCESSOR_ERROR:
                    break
                unit = ProcessorId(str((message.get(names.ERR_CONFIG) or {}).get("id")))
                yield ErrorRecord(
                    log.id, index, clock.to_datetime(time_ns), unit, message, None, b"", None, ProcessorKey(unit)
                )


def _one(target: targets.StoreTarget, here: list[ErrorRecord], index: int) -> ErrorRecord:
    if len(here) > 1:
        queues = ", ".join(record.queue for record in here)
        again = f"cues errors {quoted(target.text)}#{quoted(here[0].queue)} --index {quoted(index)}"
        raise WrongUsage(f"The index {index} is on {queues}.", again)
    if not here:
        raise WrongUsage(f"{target.text} has no error message {index}.", f"cues errors {quoted(target.text)} --all")
    return here[0]


def _number(text: str) -> int:
    if not text.isdecimal():
        raise WrongUsage(f"-n {text} is not a number.", f"-n {SHOWN}, or -n all")
    return int(text)


def cause_of(record: ErrorRecord) -> str:
    """Type and first line of the outermost exception."""
    first, *more = record.text.strip().splitlines() or [""]
    return f"{record.type}: {first}{' …' if more else ''}"


def normalised(cause: str) -> str:
    """A cause without the parts that differ from message to message: quoted text and numbers."""
    return _NUMBER.sub("N", _QUOTED.sub("'…'", cause))[:300]


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


def facts(record: ErrorRecord) -> dict[str, Any]:
    """An error message as JSON."""
    done = record.resolution
    return {
        "queue": record.queue,
        "index": record.index,
        "time": record.time,
        "processor": record.processor,
        "state": record.state,
        "type": record.type,
        "text": record.text,
        "attempts": record.attempts,
        "count": record.count,
        "inputs": record.inputs,
        "causes": record.causes,
        "context": record.message.get(names.ERR_CONTEXT) or {},
        "config": record.config,
        "hash": record.hash or None,
        "redriven": record.redriven,
        "resolution": None if done is None else {name: v for name, v in vars(done).items() if v or name == "state"},
    }


def _totals(records: Iterator[ErrorRecord], unresolved: int | None) -> list[str]:
    """The number of unresolved error messages, and by processor."""
    by_processor: Counter[str] = Counter()
    waiting = 0
    for record in islice(records, COUNTED_MAX):
        by_processor[record.processor.partition(".")[2] or record.processor] += 1
        waiting += record.state == "requested"
    counted = sum(by_processor.values())
    total = counted if unresolved is None else unresolved
    words = ", ".join(f"{processor} {number:,}" for processor, number in by_processor.most_common())
    of = f" (of the last {counted:,}: {words})" if total > counted else f" ({words})" if len(by_processor) else ""
    lines = [f"{total:,} unresolved{of}"]
    if waiting:
        lines.append(f"{waiting:,} of them wait for their redrive: the owner of the processor makes it")
    return lines


@dataclass
class _Group:
    count: int = 0
    messages: int = 0
    last: ErrorRecord | None = None
    indices: list[int] = field(default_factory=list)


def _by_cause(records: Iterator[ErrorRecord], output: CommandOutput, target: targets.StoreTarget) -> None:
    groups: dict[tuple[str, str], _Group] = {}
    read = 0
    for record in islice(records, COUNTED_MAX):
        read += 1
        group = groups.setdefault((record.processor.partition("/")[0], normalised(cause_of(record))), _Group())
        group.count += 1
        group.messages += record.count
        if group.last is None or record.time > group.last.time:
            group.last = record
    rows = []
    for (processor, cause), group in sorted(groups.items(), key=lambda item: -item[1].count):
        assert group.last is not None
        rows.append(
            {
                "count": group.count,
                "messages": group.messages,
                "processor": processor if output.json else processor.partition(".")[2],
                "cause": cause,
                "last": group.last.index,
                "queue": group.last.queue,
                "when": group.last.time if output.json else ago(group.last.time),
            }
        )
    if not rows and not output.json:
        out(f"{target.text}: no unresolved error message")
        return
    output.rows(rows, _GROUPS)
    if not output.json and read == COUNTED_MAX:
        out(f"\nOf the last {COUNTED_MAX:,} error messages.")


def _show(target: targets.StoreTarget, record: ErrorRecord, output: CommandOutput) -> None:
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
    if not record.settled and not target.is_shared:
        out(f"\n  {_command('redrive', target)} --index {record.index}")
        out(f"  {_command('discard', target)} --index {record.index} --reason TEXT")


def _command(verb: str, target: targets.StoreTarget) -> str:
    """A command for the same error messages."""
    name = f"#{target.name}" if target.name else ""
    store = f" --store {quoted(target.store)}" if target.store else ""
    return f"cues {verb} {quoted(target.text + name)}{store}"
