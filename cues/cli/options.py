"""The common parts of all commands: options, arguments, questions, and the output of errors.

Every option can also be given as an environment variable, which the help names: ``CUES_STORE`` and
``CUES_OUTPUT`` for all commands, ``CUES_RUN_IDLE_EXIT`` for ``cues run --idle-exit``.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, Final, TypeVar

import click

from cues.cli.printing import ask, err, flush, is_terminal, lost, out
from cues.cli.printing import report as report
from cues.errors import CuesError
from cues.overrides import override

F = TypeVar("F", bound=Callable[..., Any])

FAILED: Final = 1
WRONG_USAGE: Final = 2
LOW_DISK: Final = 3
"""A run did not start because its disk has too little free space."""
QUEUE_FULL: Final = 4
"""A bounded queue had no room in time; the same command may succeed later."""
OUTPUT_LOST: Final = 5
"""The command succeeded, but its output could not be written."""
STOPPED: Final = 6
"""An error stopped a processor of a run, or the run could not go on; a later start continues there."""
RUNNING: Final = 7
"""Another process runs the graph, or has the store or the group that the command needs alone."""
INTERRUPTED: Final = 130

WATCHER: Final = "_CUES_RELOAD"
"""Tells a run that a watcher started it: the descriptor of their socket, and whether an earlier run has started."""

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


class WithHelp(click.Command):
    """A command whose ``--help`` is printed as all output is."""

    _help: click.Option | None = None

    @override
    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        if self._help is None and self.add_help_option and (names := self.get_help_option_names(ctx)):
            # The help of click's own option is translated, and gettext looks for languages in the file system.
            flag = {"is_flag": True, "is_eager": True, "expose_value": False}
            self._help = click.Option(names, callback=_help, help="Show this message and exit.", **flag)
        return self._help


def _help(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        out(ctx.get_help())
        ctx.exit()


def command(**settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """A command of the group; its docstring is its help, with examples after a line of ``\\b``."""
    return click.command(context_settings=CONTEXT, **{"cls": WithHelp, **settings})


def option(*declarations: str, **settings: Any) -> Callable[[F], F]:
    """An option whose help shows its default and its variable."""
    settings.setdefault("show_envvar", True)
    for word in (*declarations, settings.get("metavar")):
        if word in CANDIDATES:
            settings.setdefault("shell_complete", candidates_of(CANDIDATES[word]))
    return click.option(*declarations, **settings)


def candidates_of(kind: str) -> Callable[[click.Context, click.Parameter, str], Any]:
    """The completion by a function of candidates.py, which is loaded for a Tab."""
    return functools.partial(_candidates, kind)


def _candidates(kind: str, ctx: click.Context, parameter: click.Parameter, incomplete: str) -> Any:
    from cues.cli import candidates  # only for a Tab: it reads stores

    return getattr(candidates, kind)(ctx, parameter, incomplete)


class Count(click.ParamType):  # type: ignore[type-arg]
    """A count, or ``all``."""

    name = "N|all"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        if value == "all":
            return "all"
        try:
            number = int(str(value).replace(",", "").replace("_", ""))
        except ValueError:
            number = -1
        if number < 0:
            self.fail(f"{value!r} is neither a count nor 'all'.", param, ctx)
        return number


def limit_of(count: int | str) -> int | None:
    """Return a :class:`Count` as a limit: None for ``all``."""
    return None if count == "all" else int(count)


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
    if not (is_terminal("stdin") and is_terminal("stderr")):
        raise WrongUsage("There is no terminal to ask on.", "add --yes to confirm.")
    if not ask(question):
        raise CommandFailed("Nothing was changed.")


def stdin() -> BinaryIO:
    """Standard input as bytes; :class:`WrongUsage` if it is closed."""
    if sys.stdin is None:
        raise WrongUsage("Standard input is closed, and the messages come from it.", "give it a file: < FILE.")
    return sys.stdin.buffer


def note(text: str) -> None:
    """Print a line on stderr."""
    err(text)


def finish(code: int) -> int:
    """Write what is left of the output, and return the exit code: another one if the output could not be written."""
    complete, error = flush(), lost()
    if not complete and not isinstance(error, BrokenPipeError):  # the reader of a pipe may take as much as it likes
        report(
            f"The output could not be written: {getattr(error, 'strerror', None) or error}. All else was done.",
            "print it to another place (> FILE); what the command changed is changed.",
        )
        code = code or OUTPUT_LOST
    return code


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
        import difflib

        message = re.split(r" \(?(?:Did you mean|Possible)", message)[0]
        given = getattr(error, "option_name", "")
        hint = f"{path} {difflib.get_close_matches(given, near, 1, cutoff=0)[0]}"
    if ctx is not None and not isinstance(error, WrongUsage):
        note(ctx.get_usage())
    report(message, hint)


def local(place: str) -> Path:
    """The directory that an argument names. Object stores are refused."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", place):
        raise WrongUsage(
            f"{place} is not a directory; stores and backups are written to a path.",
            "give a directory, on another disk or a mount; copy it to the object store with its own tools.",
        )
    return Path(place)
