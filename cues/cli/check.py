"""``cues check``: walk a store in a process of its own, and name what does not hold."""

from __future__ import annotations

import click

from cues.cli import completion, options
from cues.cli import target as targets
from cues.cli.live import slowly
from cues.cli.options import command, output_options, store_option
from cues.cli.output import CommandOutput, count
from cues.tools import check as checks


@command()
@click.argument("target", metavar="[GRAPH | STORE]", required=False, shell_complete=completion.names)
@store_option
@output_options
def check(target: str | None, store: str | None, output: str | None) -> int:
    """Walk a store and name everything that is damaged; exit code 1 when something is.

    Structure, checksums, order, and whether positions, try logs and state agree with the queues; and whether
    the other stores that its processors use fit. The store is only read; its graph may run meanwhile. What
    is whole stays readable: `cues tail` goes on behind a damaged batch.

    \b
      cues check graph.py
      cues check data/flights
    """
    found = targets.resolve(target, store)
    found.require()
    with slowly() as say:
        problems = checks.walk(
            str(found.path),
            lambda what, done, total: say(
                f"checking {what}: {done:,} of {total:,} records", at=what, done=done, total=total
            ),
        )
    if not problems:
        with found.open() as opened:
            problems = checks.check_others(opened)
    out = CommandOutput(output)
    name = targets.shown(found.path)
    for problem in problems:
        out.say(problem, problem=problem)
    if problems:
        options.report(
            f"{count(len(problems), 'problem')} in {name}.",
            "a backup; or cues run --fresh, if the sources can give everything again.",
        )
        return options.FAILED
    out.say(f"{name}: everything holds", store=name, problems=0)
    return 0
