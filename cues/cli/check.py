"""``cues check``: check a store in a process of its own, and name all damage."""

from __future__ import annotations

from cues.cli import options, shared
from cues.cli import target as targets
from cues.cli.live import slowly
from cues.cli.options import command, option
from cues.cli.output import CommandOutput, count, output_options
from cues.storage import environment, exclusive
from cues.tools import check as checks


@command()
@targets.takes_store("[GRAPH | STORE]", shared=True)
@option("--adopt", is_flag=True, help="Make a store of a copy of a running store, if it is whole.")
@output_options
def check(target: targets.StoreTarget, adopt: bool, output: CommandOutput) -> int:
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
    if target.is_shared:
        return shared.check(target, output)
    target.require()
    with slowly() as say:
        problems = checks.walk(
            str(target.path),
            lambda what, done, total: say(
                f"checking {what}: {done:,} of {total:,} records", at=what, done=done, total=total
            ),
        )
    if not problems:
        with target.open() as opened:
            problems = checks.check_others(opened)
    name = targets.shown(target.path)
    for problem in problems:
        output.say(problem, problem=problem)
    if problems:
        options.report(
            f"{count(len(problems), 'problem')} in {name}.",
            "restore a backup; or cues run --fresh, if the sources can yield all messages again.",
        )
        return options.FAILED
    adopted = adopt and environment.is_refused(target.path)
    if adopted:
        exclusive.adopt(target.path)
    done = "; it is a store now, and its last commits may be missing" if adopted else ""
    output.say(f"{name}: no problem found{done}", store=name, problems=0, **({"adopted": True} if adopted else {}))
    return 0
