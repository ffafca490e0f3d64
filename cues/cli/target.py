"""The command line's part of targets: the argument that names one, and ``--store``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

from cues.base.texts import quoted
from cues.cli.options import F, candidates_of, store_option
from cues.operate.place import Place, place_of
from cues.operate.target import resolve


def takes_store(metavar: str) -> Callable[[F], F]:
    """The argument that names a store, and ``--store``. Passes the :class:`Target` as ``target``.

    A directory of ``cues run --queues`` is refused.
    """

    def run(fn: F, place: Place, given: dict[str, Any]) -> Any:
        target = place.target
        hint = f"name the graph file or its store; or use cues tail {quoted(target.location)}#QUEUE."
        place.only_stores(f"{target.command} is", hint)
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
                return run(fn, place, given)

        required = not metavar.startswith("[")
        argument = click.argument("target", metavar=metavar, required=required, shell_complete=candidates_of("names"))
        return argument(store_option(call))  # type: ignore[return-value]

    return decorate


def named(target: str | None, store: str | None) -> Place:
    """The place that the command which runs now names."""
    return place_of(resolve(target, store, click.get_current_context().command_path))
