"""``cues forget``: delete a consumer group."""

from __future__ import annotations

from cues.cli import target as targets
from cues.cli.options import WrongUsage, command, confirm, yes_option
from cues.cli.output import CommandOutput, count, output_options
from cues.groups import operate


@command()
@targets.takes_store("STORE#group:NAME")
@yes_option
@output_options
def forget(target: targets.StoreTarget, yes: bool, output: CommandOutput) -> None:
    """Delete a consumer group: its positions and checkpoints. Retention "read" no longer waits for it.

    A member that joins under that name later begins a new group. The command is refused while a member of the
    group lives. cues status lists the groups of a store, and names those that have no members.

    \b
      cues forget data/shop#group:biling
      cues forget data/shop#group:biling --yes
    """
    target.require()
    with target.open(readonly=False) as opened:
        known = operate.list_groups(opened)
        name = targets.group_of(target, [group.group for group in known])
        if name is None:
            raise WrongUsage(
                "cues forget deletes consumer groups.", target.again(f"{targets.GROUP}{target.name or 'NAME'}")
            )
        lag = sum(group.lag for group in known if group.group == name)
        confirm(f"The positions of {name} will be deleted ({count(lag, 'message')} not read).", "Delete them?", yes)
        operate.forget(opened, name)
    output.say(f"{name} is deleted", group=name)
