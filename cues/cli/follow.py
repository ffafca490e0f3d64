"""``cues follow``: keep a second copy of a graph's stores up to date, and promote it."""

from __future__ import annotations

import signal
import sys
import threading
import time
from typing import Any, Final

import click

from cues.base.texts import quoted
from cues.cli import options
from cues.cli.live import slowly
from cues.cli.options import WrongUsage, command, local, option, yes_option
from cues.cli.output import CommandOutput, output_options
from cues.cli.printing import flush, out
from cues.cli.replicate import READY
from cues.cli.target import takes_store
from cues.jsontext import iso
from cues.operate import target as targets
from cues.tools import follower as followers
from cues.tools.follower import Follower

_REPORT_S: Final = 10.0
"""The interval between two reports of the lag on stderr."""


@command()
@takes_store("GRAPH | STORE")
@click.argument("dest", metavar="DEST", required=False)
@option(
    "--max-lag",
    type=click.FloatRange(min=0.1),
    default=10.0,
    show_default=True,
    metavar="SECONDS",
    help="Warn when the copy is further behind than this. It is brought up to date four times in this time.",
)
@option("--once", is_flag=True, help="Bring the copy up to date once, and end.")
@option("--promote", is_flag=True, help="Make stores of the copy in this directory, and retire the originals.")
@option("--abandon", is_flag=True, help="With --promote: do not touch the originals. Their last commits are lost.")
@click.option("--with-parent", is_flag=True, hidden=True)
@yes_option
@output_options
def follow(
    target: targets.Target,
    dest: str | None,
    max_lag: float,
    once: bool,
    promote: bool,
    abandon: bool,
    with_parent: bool,
    yes: bool,
    output: CommandOutput,
) -> None:
    """Keep a copy of a store, and of all stores that it uses, in the directory DEST.

    Run it on the machine of the store; DEST is on another disk, or on the mount of another machine. The graph may
    run meanwhile. The copy always has one moment of all stores, also after kill -9. `cues status` shows how many
    seconds it is behind.

    --promote makes stores of the copy. If the originals are there, their last commits are copied first, and they are
    retired: no process can write to them any more. If they are not there, commits after the moment of the copy are
    lost, and you must make sure that no process writes to the originals again.

    \b
      cues follow graph.py /mnt/other/flights
      cues follow data/flights /mnt/other/flights --max-lag 2
      cues follow --promote /mnt/other/flights
    """
    if promote:
        _promote(target.text, abandon, yes, output)
        return
    if abandon:
        raise WrongUsage("--abandon is an option of --promote.", "cues follow --promote DEST --abandon")
    if dest is None:
        raise WrongUsage("No directory for the copy is named.", "cues follow graph.py /mnt/other/copy")
    if target.name:
        raise WrongUsage("A store is followed as a whole.", f"cues follow {quoted(target.text)} {quoted(dest)}")
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopped.append(number))
    with target.open() as store, Follower(store, local(dest), max_lag, options.note) as follower:
        reported = -_REPORT_S
        if with_parent:  # of --replicate: when the run has ended, the last commits are copied
            out(READY)
            flush()
            threading.Thread(target=lambda: stopped.append(len(sys.stdin.read())), daemon=True).start()
        while True:
            last = once or bool(stopped)
            follower.step()
            lag_s = follower.lag_s or 0.0
            if last or time.monotonic() - reported > _REPORT_S:
                reported = time.monotonic()
                if not (once or with_parent):
                    options.note(f"{dest}: {lag_s:.1f} s behind")
            if lag_s > max_lag:
                options.note(f"{dest} is {lag_s:.1f} s behind, more than --max-lag {max_lag:g}.")
            if last:
                break
            time.sleep(min(1.0, max_lag / 4))  # a signal ends no sleep, so it is short
        copied, size = iso(follower.state.when) if follower.state.when else "", follower.bytes
    if with_parent:
        return
    output.say(
        f"{dest} has every commit before {copied[:19]}Z",
        dest=dest,
        copied=copied,
        bytes=size,
    )


def _promote(dest: str, abandon: bool, yes: bool, output: CommandOutput) -> None:
    place = local(dest)
    state = followers.Following.load(place)
    if state is not None and state.stores:
        originals = ", ".join(store.path for store in state.stores)
        what = f"The copy in {dest} of {originals} becomes a store. "
        if abandon:
            what += "The originals are not touched: make sure that no process writes to them again."
        else:
            what += "The originals are retired, if they are there."
        options.confirm(what, "Promote it?", yes)
    with slowly() as say:
        say(f"promoting {dest}", dest=dest)
        done = followers.promote(place, abandon)
    facts: dict[str, Any] = {
        "store": str(done.store),
        "stores": [str(path) for path in done.places],
        "copied": done.copied.isoformat(),
        "retired": done.retired,
        "lost_rate": done.lost_rate,
    }
    when = iso(done.copied)
    if done.retired:
        lost = f"nothing is lost; {', '.join(done.retired)} cannot be written to any more"
    else:
        rate = f" (about {done.lost_rate:,.1f} messages a second in the last minute)" if done.lost_rate else ""
        lost = f"commits after {when[:23]}Z are lost{rate}; no process may write to the originals again"
    output.say(f"{done.store} is a store now: {lost}", **facts)
