"""``cues check``: check a store in a process of its own, and name all damage."""

from __future__ import annotations

from cues.base.texts import count
from cues.cli import options
from cues.cli.live import slowly
from cues.cli.options import command, option
from cues.cli.output import CommandOutput, output_options
from cues.cli.target import takes_place
from cues.operate.place import Place


@command()
@takes_place("[GRAPH | STORE]")
@option("--adopt", is_flag=True, help="Make a store of a copy of a running store, if it is whole.")
@output_options
def check(place: Place, adopt: bool, output: CommandOutput) -> int:
    """Check a store and name all damage; the exit code is 1 if there is any.

    It checks structure, checksums and order; whether positions, try logs and state agree with the queues; and
    whether the store agrees with the other stores that its processors use. The store is only read; its graph
    may run meanwhile. Undamaged messages stay readable: `cues tail` continues after a damaged batch.

    \b
      cues check graph.py
      cues check data/flights
      cues check backup/flights --adopt    a copy (cp) of a store that was open: check it, and make a store of it
      cues check shared/flights            a directory of cues run --queues
      cues check s3://bucket/flights       the same, in an object store
    """
    with slowly() as say:
        problems = place.check(
            lambda what, done, total: say(f"checking {what}: {done:,} of {total:,}", at=what, done=done, total=total)
        )
    for problem in problems:
        output.say(problem, problem=problem)
    if problems:
        options.report(f"{count(len(problems), 'problem')} in {place.name}.", place.repair)
        return options.FAILED
    adopted = adopt and place.adopt()
    done = "; it is a store now, and its last commits may be missing" if adopted else ""
    facts = {"adopted": True} if adopted else {}
    output.say(f"{place.name}: no problem found{done}", store=place.name, problems=0, **facts)
    return 0
