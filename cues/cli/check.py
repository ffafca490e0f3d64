"""``cues check``: walk a store in a process of its own, and name what does not hold."""

from __future__ import annotations

import json
import sys
import time

import click

from cues import check as checks
from cues.cli import options
from cues.cli import target as targets
from cues.cli.live import Live
from cues.cli.options import command, output_options, store_option
from cues.cli.output import Output, count

_SAY_AFTER_S = 1.0
"""A check that is over by then needs no progress."""


@command()
@click.argument("target", metavar="[GRAPH | STORE]", required=False)
@store_option
@output_options
def check(target: str | None, store: str | None, output: str | None) -> int:
    """Walk a store and name everything that is damaged; exit code 1 when something is.

    Structure, checksums, order, and whether positions, try logs and state agree with the queues. The store is
    only read; its graph may run meanwhile. What is whole stays readable: `cues tail` goes on behind a
    damaged batch.

    \b
      cues check graph.py
      cues check data/flights
    """
    found = targets.resolve(target, store)
    if not (found.path / "data.mdb").exists():
        found.open()  # raises, with what is there instead
    began = time.monotonic()
    if sys.stderr.isatty():
        with Live() as live:
            problems = checks.walk(
                str(found.path),
                lambda what, done, total: (
                    live.draw([f"checking {what}: {done:,} of {total:,} records"])
                    if time.monotonic() - began > _SAY_AFTER_S
                    else None
                ),
            )
    else:
        said = began

        def say(what: str, done: int, total: int) -> None:
            nonlocal said
            if time.monotonic() - said > _SAY_AFTER_S:
                said = time.monotonic()
                print(json.dumps({"type": "progress", "at": what, "done": done, "total": total}), file=sys.stderr)

        problems = checks.walk(str(found.path), say)
    out = Output(output)
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
