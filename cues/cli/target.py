"""The command line's part of targets: the argument that names one, and ``--store``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import click

from cues.base.texts import quoted
from cues.cli.options import F, candidates_of, note, store_option
from cues.engine import record
from cues.operate.place import Place, place_of
from cues.operate.target import Target, resolve, shown

_SENDS: Final = "name the graph file: the messages are put into its store, and the driver copies them into {dir}."
_COPIES: Final = "copy {dir} with the tools of its file system or object store, while no driver runs."
_STOPS: Final = "stop the driver, which loses nothing, and start it when the processor may continue; cues status {dir}."
INSTEAD: Final = {
    "send": _SENDS,
    "import": _SENDS,
    "pause": _STOPS,
    "resume": _STOPS,
    "backup": _COPIES,
    "follow": _COPIES,
    "salvage": "run cues check {dir}, and put a copy of the damaged files back.",
    "compact": "use cues optimize {dir}, and cues vacuum {dir}.",
    "export": "use cues tail {dir}#QUEUE -n all --json; each queue is a Delta table too.",
    "metrics": "use cues status {dir} --json, or cues run --metrics.",
    "forget": "leave its records: only cues purge {dir}#QUEUE waits for a removed processor, and not with --force.",
}
"""What to use for a directory instead of a command that is for stores."""
_OF_PROCESSORS: Final = frozenset(
    ("errors", "redrive", "discard", "pause", "resume", "forget", "tries", "history", "seek", "purge", "grow", "tail")
)
"""Commands about processors and what they wrote, which are not in the store of a graph with ``--queues``."""


def takes_store(metavar: str) -> Callable[[F], F]:
    """The argument that names a store, and ``--store``. Passes the :class:`Target` as ``target``.

    A directory of ``cues run --queues`` is refused.
    """

    def run(fn: F, place: Place, given: dict[str, Any]) -> Any:
        target = place.target
        hint = INSTEAD.get(target.command.rpartition(" ")[-1], "name the graph file or its store.")
        place.only_stores(f"{target.command} is", hint.format(dir=quoted(target.location)))
        return fn(target=target, **given)

    return _argument(metavar, run)


def takes_place(metavar: str) -> Callable[[F], F]:
    """The same for a store or a directory of ``cues run --queues``. Passes it as ``place``, and closes it."""
    return _argument(metavar, lambda fn, place, given: fn(place=place, **given))


def _argument(metavar: str, run: Callable[[Any, Place, dict[str, Any]], Any]) -> Callable[[F], F]:
    def decorate(fn: F) -> F:
        @functools.wraps(fn)
        def call(target: str | None, store: str | None, **given: Any) -> Any:
            with named(target, store) as place:
                _tell_of_directory(place.target)
                return run(fn, place, given)

        required = not metavar.startswith("[")
        argument = click.argument("target", metavar=metavar, required=required, shell_complete=candidates_of("names"))
        return argument(store_option(call))  # type: ignore[return-value]

    return decorate


def _tell_of_directory(target: Target) -> None:
    """Print that the graph file names the store of the sources, if the last run had the queues in a directory."""
    if target.file is None or target.command.rpartition(" ")[-1] not in _OF_PROCESSORS:
        return
    noted = record.queues_of(target.path, target.file.graph.id)
    if noted is not None:
        place = quoted(noted.directory + (f"#{target.name}" if target.name else ""))
        note(
            f"{target.file.graph.id} last ran with its queues in {noted.directory}, and {shown(target.path)} is the"
            f" store of its sources: {target.command} {place}"
        )


def named(target: str | None, store: str | None) -> Place:
    """The place that the command which runs now names."""
    return place_of(resolve(target, store, click.get_current_context().command_path))
