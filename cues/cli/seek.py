"""``cues seek``: move a position of a processor or a consumer group, whether it runs or not."""

from __future__ import annotations

from collections.abc import Sequence

from cues.base.seek_plan import SeekPlan
from cues.base.texts import count, size
from cues.cli.options import command, confirm, option, yes_option
from cues.cli.output import CommandOutput, output_options
from cues.cli.printing import out
from cues.cli.target import takes_place
from cues.graphs.graphfile import shown
from cues.operate import positions
from cues.operate.place import Place
from cues.operate.seeking import SeekRequest


@command()
@takes_place("GRAPH#PROCESSOR | STORE#GRAPH.PROCESSOR | STORE#group:NAME")
@option("--to", "to", required=True, metavar="PLACE", help=f"The new position: {positions.HELP}.")
@option("--tailer", metavar="QUEUE", help="Only this input: a queue, a partition of a group, or a tailer id.")
@option("--reset-state", is_flag=True, help="Delete the processor's state in the same commit.")
@option("--plan", "plan_only", is_flag=True, help="Only print what would happen.")
@option("--again", is_flag=True, help="Deliver the messages again to transactional sinks.")
@yes_option
@output_options
def seek(
    place: Place,
    to: str,
    tailer: str | None,
    reset_state: bool,
    plan_only: bool,
    again: bool,
    yes: bool,
    output: CommandOutput,
) -> None:
    """Move the position of a processor or a consumer group: back, to process messages again, or forward, to skip some.

    It first prints a plan: the messages that are delivered again or left out, the outputs that are written again, and
    the state. Outputs stay as they are, so a move back writes them again. A sink that keeps process.delivery in its
    target skips messages that it has, unless --again raises the generation. State stays too, so messages that are
    delivered again count twice in it, unless --reset-state deletes it.

    \b
      cues seek graph.py#report --to start
      cues seek graph.py#count --to start --reset-state
      cues seek graph.py#count --to 1d --plan        what would happen
      cues seek data/shop#shop.price --to 2026-01-31T12:00Z --yes
      cues seek data/shop#shop.merge --tailer orders --to end
      cues seek data/shop#shop.price/3 --to 700
      cues seek s3://bucket/shop#shop.price --to start      a directory of cues run --queues
      cues seek data/shop#group:billing --to start          a consumer group
      cues seek data/shop#group:billing --tailer orders/3 --to 700

    A consumer group is moved in one commit on all partitions of its queues, also on those that members are
    reading: their steps under way are refused, and they continue at the new place.

    A processor over partitions is moved on all of them to the start, the end or a time, one after another. An
    index belongs to one partition, so add the partition to the processor's name.

    In a directory of cues run --queues no driver may run the graph, and a step that was under way is not repeated.
    """
    request = SeekRequest(positions.parse(to, "--to"), tailer, again, reset_state, plan_only)
    with place.seeking(request) as planned:
        if plan_only:
            return _show_plans(planned.plans, reset_state, output)
        lines = "".join(f"\n  {line}" for line in _effects(planned.plans, reset_state))
        confirm(f"{planned.subject} will continue at another place: {planned.words}.{lines}", "Move it?", yes)
        for text, facts in planned.apply():
            output.say(text, **facts)


def _effects(plans: Sequence[SeekPlan], reset_state: bool) -> list[str]:
    """The effects of a seek, a line each; those of several units together."""
    inputs = [input for plan in plans for input in plan.inputs]
    lines = []
    for queue in dict.fromkeys(input.queue.partition("/")[0] for input in inputs):
        mine = [input for input in inputs if input.queue.partition("/")[0] == queue]
        again, skipped = sum(input.again for input in mine), sum(input.skipped for input in mine)
        lines += [f"{count(again, 'message')} of {queue} will be delivered again"] if again else []
        lines += [f"{count(skipped, 'message')} of {queue} will be left out"] if skipped else []
    for output in dict.fromkeys(output for plan in plans for output in plan.outputs):
        where = f" of the store {shown(output.store)}" if output.store else ""
        lines.append(f"outputs to {output.name}{where}: {output.effect}")
    values, size_bytes = sum(plan.state_values for plan in plans), sum(plan.state_bytes for plan in plans)
    if values:
        state = f"state: {count(values, 'value')}, {size(size_bytes)}"
        if reset_state:
            lines.append(f"{state}, will be deleted")
        elif any(plan.counts_twice for plan in plans):
            lines.append(f"{state}, stays: messages that are delivered again COUNT TWICE in it, unless --reset-state")
        else:
            lines.append(f"{state}, stays")
    return lines


def _show_plans(plans: Sequence[SeekPlan], reset_state: bool, output: CommandOutput) -> None:
    for line in [] if output.json else _effects(plans, reset_state) or ["nothing would change"]:
        out(line)
    for plan in plans if output.json else ():
        output.say(
            "",
            processor=plan.processor,
            inputs={i.tailer: vars(i) | {"again": i.again, "skipped": i.skipped} for i in plan.inputs},
            outputs=[vars(each) for each in plan.outputs],
            state={"values": plan.state_values, "bytes": plan.state_bytes, "counts_twice": plan.counts_twice},
            reset_state=reset_state,
        )
