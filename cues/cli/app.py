"""The group of commands, and the output of errors.

A command's module is imported when the command is called, so that ``cues --help`` loads neither the
store nor the engine. So the one-line helps are in this module.
"""

from __future__ import annotations

import contextlib
import importlib
import keyword
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import click

from cues.base import collector
from cues.cli import options, printing
from cues.cli.printing import out
from cues.errors import AlreadyRunning, CuesError, NotInstalled, QueueFull, StoreShared
from cues.overrides import override

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMMANDS: Final = {
    "run": "Run a graph until its sources have ended and its queues are drained.",
    "show": "Draw a graph, with each processor's guarantee.",
    "status": "Positions, lag, rates, errors and owner of each processor.",
    "metrics": "Measurements of a store for Prometheus.",
    "top": "Rates, lag, latency and workers of a graph, live.",
    "history": "Rates, lag, latency and failures of the last hour, day or weeks.",
    "queues": "The queues of a store.",
    "tail": "Print messages of a queue, and follow it.",
    "sql": "A SQL query over the queues and states of a graph.",
    "send": "Append messages to a queue.",
    "import": "Append the messages of files to a queue, each once.",
    "export": "Write the messages of a queue to a file.",
    "ui": "A page in the browser: the graph, queues, messages, errors.",
    "tries": "The steps of a processor: snapshots and attempts.",
    "errors": "The messages that failed, and why.",
    "close": "Close the windows and files that a graph keeps open.",
    "redrive": "Give failed messages to their processors once more.",
    "discard": "Mark failed messages as done with, for a reason.",
    "pause": "Let a processor take nothing until it is resumed.",
    "resume": "Let paused processors go on.",
    "check": "Check a store and name all damage.",
    "salvage": "Copy everything readable of a damaged store into a new one.",
    "doctor": "Check the machine and the place of a store, and say what to do.",
    "seek": "Move the position of a processor or a consumer group.",
    "replay": "Run a graph over its old messages, into a fresh store, and compare.",
    "forget": "Delete a consumer group, a consumer, or a removed processor.",
    "grow": "Add partitions to a queue.",
    "purge": "Delete the messages of a queue before an index or a time.",
    "compact": "Give free pages back to the file system, and remove queues.",
    "optimize": "Merge the small files of a directory of cues run --queues.",
    "vacuum": "Delete the files of such a directory that are in no log any more.",
    "backup": "Copy the stores of a graph into a directory of backups, while it runs.",
    "restore": "Make stores of a backup.",
    "follow": "Keep a second copy of a graph's stores, and promote it.",
    "init": "Make a project to start from, with tests.",
    "deploy": "Print a unit, a Dockerfile or another text that deploys a graph.",
    "config": "The settings of the commands, and where each comes from.",
    "completion": "Print the script with which a shell completes command lines.",
}

COMPLETE: Final = "_CUES_COMPLETE"
"""The variable with which a shell's completion script asks for the possible next words."""

EPILOG: Final = """\
\b
  cues run graph.py                      until everything is processed
  cues status graph.py                   meanwhile, from another terminal
  cues send graph.py#orders x=1          a message from outside
  cues tail -f data/example#priced       the results

The target of a command is a graph file (graph.py, graph.py:name, graph.py:factory()), a store (a
directory), or either of them with #queue or #processor.
Without a target the command takes the store that CUES_STORE names.
Options have variables (CUES_RUN_IDLE_EXIT) and settings in cues.toml; cues config shows them.

Results are printed on stdout (a table on a terminal, one JSON object a line in a pipe), everything
else on stderr. Exit codes: 0 success, 1 failure, 2 wrong usage (or a missing package), 3 the disk is
low, 4 a bounded queue is full, 5 the output could not be written (all else was done), 6 an error
stopped a processor, 7 the graph runs already, 130 interrupted.
"""


def load(name: str) -> click.Command:
    inside = f"{name}_" if keyword.iskeyword(name) else name
    found: click.Command = getattr(importlib.import_module(f"cues.cli.{inside}"), inside)
    collector.imported()
    return found


class Commands(options.WithHelp, click.Group):
    """Loads a command when it is called."""

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    @override
    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        return load(name) if name in COMMANDS else None

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS:
            if name.startswith("-"):
                raise click.NoSuchOption(name, ctx=ctx)
            import difflib

            near = difflib.get_close_matches(name, COMMANDS, 1)
            hint = f"cues {near[0]}" if near else "cues --help"
            if name.partition("#")[0].partition(":")[0].endswith(".py"):
                from cues.base.texts import quoted

                hint = f"cues run {quoted(name)}"
            raise options.WrongUsage(f"There is no command {name!r}.", hint)
        _set(ctx, name, args[1:])
        return super().resolve_command(ctx, args)

    @override
    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """The commands by the table above, so that none is loaded; after a dash the options of ``cues`` itself."""
        if incomplete.startswith("-"):
            return super().shell_complete(ctx, incomplete)
        from click.shell_completion import CompletionItem

        return [CompletionItem(name, help=text) for name, text in COMMANDS.items() if name.startswith(incomplete)]

    @override
    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _set(ctx: click.Context, name: str, words: Sequence[str]) -> None:
    """Give the settings of the file to the command that is about to be parsed."""
    from cues.cli import settings

    may_fail = not ctx.resilient_parsing and not {"-h", "--help"} & set(words)
    with contextlib.nullcontext() if may_fail else contextlib.suppress(click.UsageError, OSError):
        file = settings.of_call(words)
        variables = frozenset(key for key, value in os.environ.items() if value)
        ctx.with_resource(settings.environment(file, COMMANDS))
        ctx.meta[settings.__name__] = settings.Given(file, variables, os.environ.get("CUES_STORE"))
        if file is not None and file.tables.get(name):
            ctx.default_map = {name: file.options(name, load(name).params)}


def _version(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from cues import __version__
        from cues.native import implementation

        out(f"cues {__version__}\ncore: {implementation()}")
        ctx.exit()


@click.group(
    cls=Commands,
    epilog=EPILOG,
    context_settings={**options.CONTEXT, "auto_envvar_prefix": "CUES"},
    invoke_without_command=True,
)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Show the version.")
@click.pass_context
def commands(ctx: click.Context) -> None:
    """Queues on local append logs, and processors that move messages between them exactly once."""
    if ctx.invoked_subcommand is None:
        out(ctx.get_help())


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    printing.begin()
    with printing.logs():
        return options.finish(_run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    asked = os.environ.get(COMPLETE)
    if asked:
        return importlib.import_module("cues.cli.completion").complete(commands, COMPLETE, asked)  # type: ignore[no-any-return]
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        with commands.make_context("cues", list(words), obj=words) as ctx:
            result: Any = commands.invoke(ctx)
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as done:
        return done.exit_code
    except (KeyboardInterrupt, click.Abort):
        return options.INTERRUPTED
    except click.UsageError as error:
        options.report_usage(error)
        return options.WRONG_USAGE
    except click.ClickException as error:
        options.report(error.format_message(), "")
        return options.FAILED
    except CuesError as error:
        options.report(error.message, error.hint, before=getattr(error, "trace", ""))
        if isinstance(error, QueueFull):
            return options.QUEUE_FULL
        if isinstance(error, (AlreadyRunning, StoreShared)):
            return options.RUNNING
        from cues.operate.refused import Refused

        return options.WRONG_USAGE if isinstance(error, (NotInstalled, Refused)) else options.FAILED
    except OSError as error:
        if error.filename is None:
            raise
        options.report(
            f"{error.filename}: {error.strerror}.", "check the permissions of that path, or give another path."
        )
        return options.FAILED
