"""``cues forget``: delete a consumer group or a consumer."""

from __future__ import annotations

from cues.cli import target as targets
from cues.cli.options import WrongUsage, command, confirm, yes_option
from cues.cli.output import CommandOutput, count, output_options
from cues.groups import operate
from cues.queues.store import Store
from cues.txn.operate import forget as forget_consumer

CONSUMER = "consumer:"
"""The beginning of a name that is a consumer's."""


@command()
@targets.takes_store("STORE#group:NAME | STORE#consumer:NAME")
@yes_option
@output_options
def forget(target: targets.StoreTarget, yes: bool, output: CommandOutput) -> None:
    """Delete a consumer group: its positions and checkpoints. Retention "read" no longer waits for it.

    A member that joins under that name later begins a new group. The command is refused while a member of the
    group lives. cues status lists the groups of a store, and names those that have no members.

    With consumer:NAME it deletes the position of a consumer (cues.txn) that does not come back, and drops the messages
    that it left pending in this store, also those that its checkpoint has decided to commit.

    \b
      cues forget data/shop#group:biling
      cues forget data/shop#group:biling --yes
      cues forget data/shop#consumer:totals
    """
    target.require()
    with target.open(readonly=False) as opened:
        if target.name.startswith(CONSUMER):
            return _forget_consumer(opened, target.name.removeprefix(CONSUMER), yes, output)
        known = operate.list_groups(opened)
        name = targets.group_of(target, [group.group for group in known])
        if name is None:
            raise WrongUsage(
                "cues forget deletes consumer groups and consumers.",
                target.again(f"{targets.GROUP}{target.name or 'NAME'}"),
            )
        lag = sum(group.lag for group in known if group.group == name)
        confirm(f"The positions of {name} will be deleted ({count(lag, 'message')} not read).", "Delete them?", yes)
        operate.forget(opened, name)
    output.say(f"{name} is deleted", group=name)


def _forget_consumer(opened: Store, name: str, yes: bool, output: CommandOutput) -> None:
    what = f"The position of the consumer {name} will be deleted, and the messages that it left pending here dropped."
    confirm(what, "Delete it?", yes)
    dropped = forget_consumer(opened, name)
    text = f"the consumer {name} is deleted; {count(dropped, 'transaction')} dropped"
    output.say(text, consumer=name, dropped=dropped)
