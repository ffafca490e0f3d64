"""``cues doctor``: check the machine and the place of a store, and say what to do."""

from __future__ import annotations

import os

import click

from cues.base.texts import count, quoted
from cues.cli import options
from cues.cli.options import command, store_option
from cues.cli.output import CommandOutput, output_options
from cues.cli.printing import colour, coloured, out
from cues.cli.target import named
from cues.tools import doctor as checks

_COLOURS = {"ok": "32", "warning": "33", "problem": "1;31"}


@command()
@click.argument("target", metavar="[GRAPH | STORE]", required=False, shell_complete=options.candidates_of("names"))
@store_option
@output_options
def doctor(target: str | None, store: str | None, output: CommandOutput) -> int:
    """Check whether Cues can work on this machine and at this place, and say what to do.

    It looks at platform, Python and packages, limits, the file system, writes and syncs, locks and memory that
    processes share, clocks, space, and the store, if there is one. Without a target the place is the store that
    CUES_STORE names, or the current directory. The store is only read; the probes use a temporary folder beside it.
    The exit code is 1 if there is a problem; warnings do not change it.

    \b
      cues doctor
      cues doctor graph.py
      cues doctor data/flights --json
    """
    path: str | os.PathLike[str] = os.curdir
    if target or store:
        with named(target, store) as found:
            hint = f"name the store; cues check {quoted(found.target.location)} checks the directory."
            path = found.only_stores("cues doctor is", hint).target.path
    with checks.place(path) as place:
        findings = checks.examine(place)
    width = max(len(finding.check) for finding in findings)
    if output.json:
        output.rows([{**vars(finding), "hint": finding.hint or None} for finding in findings], ())
    for finding in () if output.json else findings:
        state = coloured(_COLOURS[finding.state] if colour() else "", f"{finding.state:7}")
        out(state, f"  {finding.check:{width}}  {finding.text}")
        if finding.hint:
            out(f"{'':7}  {'':{width}}  Try: {finding.hint}")
    problems = [finding.check for finding in findings if finding.state == "problem"]
    if problems:
        options.report(
            f"{count(len(problems), 'problem')}: {', '.join(problems)}.", "follow the lines above that begin with Try."
        )
        return options.FAILED
    return 0
