"""``--watch``: a command that prints its result again and again, in place on a terminal, until Ctrl-C."""

from __future__ import annotations

import queue
import shutil
import signal
import time
from collections.abc import Callable
from datetime import datetime
from typing import Final

import click

from cues.base.texts import count
from cues.cli.live import Live
from cues.cli.options import F, WithHelp, option
from cues.cli.output import CommandOutput
from cues.cli.printing import escaped, flush, is_terminal, out, printed
from cues.errors import CuesError
from cues.overrides import override

_SECONDS: Final = 2.0
"""Time between two looks, if none is given."""


class Watched(WithHelp):
    """A command whose ``--watch`` may be without a number, also before the target (``--watch graph.py``)."""

    @override
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        following = [*args[1:], ""]
        alone = [a == "--watch" and not after.replace(".", "", 1).isdigit() for a, after in zip(args, following)]
        return super().parse_args(ctx, [f"--watch={_SECONDS}" if is_alone else a for a, is_alone in zip(args, alone)])


def watch_option(fn: F) -> F:
    """``--watch [SECONDS]``: go on. Passes ``watch``, None without the option."""
    return option(
        "--watch",
        type=click.FloatRange(min=0.1),
        metavar="[SECONDS]",
        help=f"Go on until Ctrl-C: look again every so many seconds (default {_SECONDS:g}).",
    )(fn)


def repeat(show: Callable[[], None], every_s: float | None, output: CommandOutput) -> None:
    """Call ``show``, which prints: once, or every ``every_s`` seconds.

    On a terminal each result replaces the one before. The last one stays there when Ctrl-C raises
    :class:`KeyboardInterrupt`. An error of the first look is raised; later ones are shown, and may pass.
    """
    if every_s is None:
        return show()
    if output.json or not is_terminal("stdout"):
        while True:
            if not output.json:
                out(f"{datetime.now().astimezone():%Y-%m-%d %H:%M:%S}")
            show()
            out("" if output.json else "\n", end="")
            if not flush():
                return None
            time.sleep(every_s)
    lines = printed(show)
    with CtrlC() as ctrl_c, Live("stdout") as live:
        while True:
            head = f"{datetime.now():%H:%M:%S}  every {every_s:g} s, Ctrl-C ends"
            shown = shutil.get_terminal_size().lines - 4
            more = [f"… {count(len(lines) - shown, 'more line')}"] if len(lines) > shown else []
            live.draw([head, "", *lines[:shown], *more])
            if ctrl_c.within(every_s):
                break
            try:
                lines = printed(show)
            except (CuesError, OSError) as error:  # the store is being replaced, for example by --fresh
                lines = [escaped(getattr(error, "message", str(error)))]
    for line in lines:
        out(line)
    raise KeyboardInterrupt


class CtrlC:
    """Waits for Ctrl-C inside the block. It interrupts nothing else, so that no drawing is left half done.

    A second Ctrl-C raises :class:`KeyboardInterrupt` at once, in case the work between the waits hangs.
    """

    def __init__(self) -> None:
        self._pressed: queue.SimpleQueue[int] = queue.SimpleQueue()

    def within(self, seconds: float) -> bool:
        """Wait. Return True as soon as Ctrl-C was pressed."""
        try:
            self._pressed.get(timeout=seconds)
        except queue.Empty:
            return False
        return True

    def _press(self, number: int, frame: object) -> None:
        if not self._pressed.empty():
            raise KeyboardInterrupt
        self._pressed.put(number)

    def __enter__(self) -> CtrlC:
        self._kept = signal.signal(signal.SIGINT, self._press)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._kept)
