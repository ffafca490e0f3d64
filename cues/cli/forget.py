"""``cues forget``: delete a consumer group, a consumer, or a processor that its graph has no more."""

from __future__ import annotations

from dataclasses import replace

import click

from cues.base.texts import count
from cues.cli.options import WrongUsage, candidates_of, command, confirm, yes_option
from cues.cli.output import CommandOutput, output_options
from cues.cli.target import takes_store
from cues.engine import standing
from cues.groups import operate
from cues.operate import processors
from cues.operate import target as targets
from cues.queues.store import Store
from cues.txn.operate import forget as forget_consumer

CONSUMER = "consumer:"
"""The beginning of a name that is a consumer's."""


@command()
@takes_store("STORE#group:NAME | STORE#consumer:NAME | GRAPH | STORE")
@click.argument("processor", metavar="[PROCESSOR]", required=False, shell_complete=candidates_of("processor_names"))
@yes_option
@output_options
def forget(target: targets.Target, processor: str | None, yes: bool, output: CommandOutput) -> None:
    """Delete a consumer group, a consumer, or a processor that its graph has no more.

    Retention "read" no longer waits for it.

    Of a group, positions and checkpoints are deleted; of a processor, positions, state and tries. A processor of that
    name begins anew later. The command is refused for a processor that the graph has, that a process runs, or whose
    messages wait to be forwarded. cues status marks the processors that their graph has no more.

    A member that joins under that name later begins a new group. The command is refused while a member of the
    group lives. cues status lists the groups of a store, and names those that have no members.

    With consumer:NAME it deletes the position of a consumer (cues.txn) that does not come back, and drops the messages
    that it left pending in this store, also those that its checkpoint has decided to commit.

    \b
      cues forget data/shop#group:biling
      cues forget data/shop#group:biling --yes
      cues forget graph.py price                a processor that was renamed or removed
      cues forget data/shop shop.price
      cues forget data/shop#consumer:totals
    """
    target.require()
    if processor is not None or (target.name and not target.name.startswith((targets.GROUP, CONSUMER))):
        return _forget_processor(replace(target, name=processor or target.name), processor is not None, yes, output)
    with target.open(readonly=False) as opened:
        if target.name.startswith(CONSUMER):
            return _forget_consumer(opened, target.name.removeprefix(CONSUMER), yes, output)
        known = operate.list_groups(opened)
        name = targets.group_of(target, [group.group for group in known])
        if name is None:
            raise WrongUsage(
                "cues forget deletes a group, a consumer or a processor, and none is named.",
                target.again(f"{targets.GROUP}{target.name or 'NAME'}"),
            )
        lag = sum(group.lag for group in known if group.group == name)
        confirm(f"The positions of {name} will be deleted ({count(lag, 'message')} not read).", "Delete them?", yes)
        operate.forget(opened, name)
    output.say(f"{name} is deleted", group=name)


def _forget_processor(target: targets.Target, named: bool, yes: bool, output: CommandOutput) -> None:
    graph = target.file.graph if target.file is not None else None
    with target.open(readonly=False) as opened:
        known = list(dict.fromkeys(unit.partition("/")[0] for unit in standing.processors(opened)))
        if not named and target.name not in {name for id in known for name in (id, id.partition(".")[2])}:
            raise WrongUsage(
                f"cues forget deletes consumer groups, consumers and processors; {target.name!r} is none of them.",
                target.again(f"{targets.GROUP}{target.name}"),
            )
        plan = processors.plan_forget(opened, targets.processor_named(target, known), graph)
        lost = [count(len(plan.units), "position")]
        lost += [f"{count(plan.state_values, 'value')} of state"] if plan.state_values else []
        lost += [count(plan.held, "delayed or redriven message")] if plan.held else []
        unread = f"; it has not taken {count(plan.unread, 'message')}" if plan.unread else ""
        confirm(f"{' and '.join(lost)} of {plan.processor} will be deleted{unread}.", "Delete them?", yes)
        processors.forget(opened, plan.processor, graph)
    output.say(f"{plan.processor} is deleted", processor=plan.processor)


def _forget_consumer(opened: Store, name: str, yes: bool, output: CommandOutput) -> None:
    what = f"The position of the consumer {name} will be deleted, and the messages that it left pending here dropped."
    confirm(what, "Delete it?", yes)
    dropped = forget_consumer(opened, name)
    text = f"the consumer {name} is deleted; {count(dropped, 'transaction')} dropped"
    output.say(text, consumer=name, dropped=dropped)
