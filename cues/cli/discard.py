"""``cues discard``: mark failed messages as done with, for a reason."""

from __future__ import annotations

from cues.base.texts import count
from cues.cli.options import FAILED, WrongUsage, command, confirm, note, option, yes_option
from cues.cli.output import CommandOutput, output_options
from cues.cli.redrive import REFUSALS_SHOWN, only_stores, require_choice
from cues.cli.target import takes_place
from cues.engine import redriving
from cues.operate.place import Place
from cues.operate.where import Where
from cues.steps import redrive as redrives


@command()
@takes_place("GRAPH[#QUEUE] | STORE[#QUEUE]")
@option("--processor", metavar="NAME", help="Those of this processor.")
@option("--index", "indices", type=int, multiple=True, metavar="INDEX", help="This one; may be given several times.")
@option("--where", metavar="EXPR", help="Those for which this is true; see cues errors.")
@option("--all", "all_", is_flag=True, help="All that are unresolved.")
@option("--reason", required=True, metavar="TEXT", help="Why nothing is to be done about them. It is kept.")
@yes_option
@output_options
def discard(
    place: Place,
    processor: str | None,
    indices: tuple[int, ...],
    where: str | None,
    all_: bool,
    reason: str,
    yes: bool,
    output: CommandOutput,
) -> int:
    """Mark failed messages as done with: they leave cues status and the end of every run.

    Nothing is deleted. The reason, the user and the time are kept, and cues errors --all shows them. Messages whose
    redrive was asked for stay as they are. The exit code is 1 if one that --index names is settled already.

    \b
      cues discard graph.py --index 12 --reason 'test order of the shop'
      cues discard data/shop --where 'input.country == "XX"' --reason 'unknown country, see ticket 81' --yes
    """
    store = only_stores(place)
    target = store.target
    require_choice(target, processor, indices, where, all_)
    if not reason.strip():
        raise WrongUsage("--reason '' says nothing.", "say why nothing is to be done about these messages.")
    with store.home(readonly=False) as home, store.error_logs(home) as logs:
        logs.tidy()
        condition = Where(where) if where is not None else None
        selected = redriving.select(logs, processor, indices, condition)
        settled = [record for record in selected if record.settled] if indices else []
        for record in settled[:REFUSALS_SHOWN]:
            note(f"{record.queue} {record.index} cannot be discarded: it is {record.state} already.")
        if len(settled) > REFUSALS_SHOWN:
            note(f"{count(len(settled) - REFUSALS_SHOWN, 'more')} cannot be discarded.")
        chosen = [record for record in selected if not record.settled]
        if not chosen:
            output.say(f"{target.text}: nothing to discard", discarded=[], requested=[])
            return FAILED if settled else 0
        confirm(f"{count(len(chosen), 'error message')} will be marked as done with.", "Discard them?", yes)
        done = redrives.discard(home, chosen, reason)
        kept = f"; {count(len(done.already), 'redrive')} asked for, left as they are" if done.already else ""
        output.say(
            f"{len(done.records):,} discarded{kept}",
            discarded=[{"queue": record.queue, "index": record.index} for record in done.records],
            requested=[{"queue": record.queue, "index": record.index} for record in done.already],
            reason=reason,
        )
        return FAILED if settled else 0
