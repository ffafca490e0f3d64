"""``cues redrive``: give failed messages to their processors once more."""

from __future__ import annotations

from collections import Counter

import click

from cues.base.events import Event, Recovered
from cues.base.texts import count, quoted
from cues.cli.options import FAILED, WrongUsage, command, confirm, note, option, yes_option
from cues.cli.output import CommandOutput, output_options
from cues.cli.target import takes_place
from cues.engine import redriving
from cues.engine.redriving import RedrivePlan
from cues.graphs.running import RedriveResult
from cues.operate.place import Place
from cues.operate.stores import StorePlace
from cues.operate.target import Target
from cues.operate.where import Where

TIMEOUT_S = 60.0
REFUSALS_SHOWN = 5


@command()
@takes_place("GRAPH[#QUEUE] | STORE[#QUEUE]")
@option("--processor", metavar="NAME", help="Those of this processor.")
@option("--index", "indices", type=int, multiple=True, metavar="INDEX", help="This one; may be given several times.")
@option("--where", metavar="EXPR", help="Those for which this is true; see cues errors.")
@option("--all", "all_", is_flag=True, help="All that are unresolved.")
@option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=TIMEOUT_S,
    show_default=True,
    metavar="SECONDS",
    help="The longest wait for the process that runs the graph.",
)
@yes_option
@output_options
def redrive(
    place: Place,
    processor: str | None,
    indices: tuple[int, ...],
    where: str | None,
    all_: bool,
    timeout: float,
    yes: bool,
    output: CommandOutput,
) -> int:
    """Give the input of failed messages to the processor that failed once more, and to no other processor.

    The outputs, the state and the note that the error is resolved are one commit, so each failed message is redriven
    once. If it fails again, it is a new error message, which names the old one. If the graph runs, its process does
    this; else this command does, without running the rest of the graph. With a store instead of a graph the messages
    wait until the graph runs.

    \b
      cues redrive graph.py --index 12
      cues redrive graph.py --processor price
      cues redrive graph.py --where 'type == "TimeoutError"' --yes
      cues redrive graph.py --all

    It shows what will happen, and asks. The exit code is 1 if messages failed again, were refused, or wait.
    """
    store = only_stores(place)
    target = store.target
    require_choice(target, processor, indices, where, all_)
    graph = target.file.graph if target.file is not None else None
    with store.home(readonly=False) as home:
        with store.error_logs(home) as logs:
            logs.tidy()
            chosen = redriving.select(logs, processor, indices, Where(where) if where is not None else None)
            planned = redriving.plan(home, chosen, redriving.nodes_of(graph))
        for record, why in planned.refused[:REFUSALS_SHOWN]:
            note(f"{record.queue} {record.index} cannot be redriven: {why}.")
        if len(planned.refused) > REFUSALS_SHOWN:
            note(f"{count(len(planned.refused) - REFUSALS_SHOWN, 'more')} cannot be redriven.")
        if not planned.by_processor:
            output.say(f"{target.text}: nothing to redrive", **_facts(RedriveResult()))
            return FAILED if planned.refused else 0
        confirm(_words(planned), "Redrive them?", yes)
        result = redriving.run(home, planned, graph, timeout, _tell)
    output.say(_result(target, result, graph is None), **_facts(result))
    return 0 if result else FAILED


def _tell(event: Event) -> None:
    if not isinstance(event, Recovered):
        note(f"{event.processor}: {event.text}")


def only_stores(place: Place) -> StorePlace:
    """Refuse a directory of ``cues run --queues``."""
    hint = f"see them with cues errors {quoted(place.target.location)}, and send the messages again."
    return place.only_stores(f"{place.target.command} is", hint)


def require_choice(
    target: Target, processor: str | None, indices: tuple[int, ...], where: str | None, all_: bool
) -> None:
    """Refuse a command line that does not say which messages are meant."""
    if not (processor or indices or where or all_):
        raise WrongUsage("No error messages are chosen.", f"{target.again('').rstrip('#')} --all, or --index INDEX")


def _words(planned: RedrivePlan) -> str:
    messages: Counter[str] = Counter()
    for record in (*planned.records, *planned.requested):
        messages[record.processor] += record.count
    parts = [f"{count(number, 'message')} through {processor}" for processor, number in sorted(messages.items())]
    return f"{', '.join(parts)} once more; no other processor gets them."


def _facts(result: RedriveResult) -> dict[str, object]:
    def listed(places: tuple[tuple[str, int], ...]) -> list[dict[str, object]]:
        return [{"queue": queue, "index": index} for queue, index in places]

    return {
        "resolved": listed(result.resolved),
        "failed_again": listed(result.failed_again),
        "refused": [{"queue": queue, "index": index, "reason": why} for queue, index, why in result.refused],
        "waiting": listed(result.waiting),
    }


def _result(target: Target, result: RedriveResult, without_graph: bool) -> str:
    lines = []
    if result.resolved or not (result.failed_again or result.waiting):
        lines.append(f"{len(result.resolved):,} redriven")
    if result.failed_again:
        lines.append(f"{len(result.failed_again):,} failed again: cues errors {quoted(target.text)}")
    if result.waiting:
        until = "until the graph runs: cues run" if without_graph else "for the process that runs the graph"
        lines.append(f"{len(result.waiting):,} asked for, and wait {until}")
    return "\n".join(lines)
