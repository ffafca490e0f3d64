"""The common parts of all commands: options, arguments, questions, and the output of errors.

Every option can also be given as an environment variable, which the help names: ``CUES_STORE`` and
``CUES_OUTPUT`` for all commands, ``CUES_RUN_IDLE_EXIT`` for ``cues run --idle-exit``.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import Any, Final, TypeVar

import click

from cues.errors import CuesError

F = TypeVar("F", bound=Callable[..., Any])

FAILED: Final = 1
WRONG_USAGE: Final = 2
LOW_DISK: Final = 3
"""A run was stopped because its disk has too little free space."""
QUEUE_FULL: Final = 4
"""A bounded queue had no room in time; the same command may succeed later."""
INTERRUPTED: Final = 130

CONTEXT: Final[dict[str, Any]] = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


CANDIDATES: Final = {
    "--processor": "processor_names",
    "--queue": "queue_names",
    "--remove": "queue_names",
    "--tailer": "queue_names",
    "DIR": "directories",
    "STORE": "directories",
}
"""The values that a shell offers for an option, by its name or by the word in the help: functions of candidates.py."""


class WrongUsage(click.UsageError):
    """A wrong command line, with what to try; exit code 2."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class CommandFailed(CuesError):
    """A command that cannot continue, for a reason without an error of the library; exit code 1."""


def command(**settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """A command of the group; its docstring is its help, with examples after a line of ``\\b``."""
    return click.command(context_settings=CONTEXT, **settings)


def option(*declarations: str, **settings: Any) -> Callable[[F], F]:
    """An option whose help shows its default and its variable."""
    settings.setdefault("show_envvar", True)
    for word in (*declarations, settings.get("metavar")):
        if word in CANDIDATES:
            settings.setdefault("shell_complete", functools.partial(_candidates, CANDIDATES[word]))
    return click.option(*declarations, **settings)


def _candidates(kind: str, ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Any:
    from cues.cli import candidates  # only for a Tab: it reads stores

    return getattr(candidates, kind)(ctx, parameter, incomplete)


def store_option(fn: F) -> F:
    """``--store DIR``: a store other than the graph's own. Passes ``store``."""
    return option(
        "--store", metavar="DIR", envvar="CUES_STORE", help="The store, if not data/<graph id> beside the graph file."
    )(fn)


def yes_option(fn: F) -> F:
    """``--yes``: do not ask. Passes ``yes``."""
    return option("--yes", is_flag=True, envvar="CUES_YES", help="Do not ask.")(fn)


def given(name: str) -> bool:
    """Return whether an option is on the command line itself."""
    return click.get_current_context().get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE


def confirm(what: str, question: str, yes: bool) -> None:
    """Print what will happen, and ask; without a terminal, require ``--yes``."""
    note(what)
    if yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise WrongUsage("There is no terminal to ask on.", "add --yes to confirm.")
    if not click.confirm(question, default=False, err=True):
        raise CommandFailed("Nothing was changed.")


def colour(file: Any = None) -> bool:
    """Return whether ``file`` (default: stdout) is a terminal that may be coloured."""
    return bool((file or sys.stdout).isatty()) and not os.environ.get("NO_COLOR")


def note(text: str) -> None:
    """Print a line on stderr."""
    click.echo(text, err=True)


def report(message: str, hint: str, before: str = "") -> None:
    """Print an error on stderr, with what to try."""
    red, bold = ("\033[1;31m", "\033[1m") if colour(sys.stderr) else ("", "")
    end = "\033[0m" if red else ""
    if before:
        note(before.rstrip("\n"))
    note(f"{red}Error:{end} {message}")
    if hint:
        note(f"{bold}Try:{end} {hint}")


def report_usage(error: click.UsageError) -> None:
    """Print a usage error: the usage of the command, the error, and what to try."""
    ctx = error.ctx
    path = ctx.command_path if ctx is not None else "cues"
    hint = getattr(error, "hint", "") or f"{path} --help"
    near = getattr(error, "possibilities", None)
    message = error.format_message()
    if ctx is not None and isinstance(error, click.BadParameter) and isinstance(error.param, click.Option):
        source = ctx.get_parameter_source(str(error.param.name))
        if source is click.core.ParameterSource.ENVIRONMENT:
            name = error.param.envvar or f"{ctx.auto_envvar_prefix}_{str(error.param.name).upper()}"
            message += f" That is the value of the variable {name}."
    if near:
        message = message.partition(" Did you mean")[0].partition(" (Possible")[0]
        hint = f"{path} {min(near)}"
    if ctx is not None and not isinstance(error, WrongUsage):
        note(ctx.get_usage())
    report(message, hint)
