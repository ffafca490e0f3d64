"""Words that may follow on a command line: names in stores, files and directories, for the completion of a shell.

A Tab must be quick and without effect: a graph file is parsed, not imported, and the names in a store are read from its
file without opening it (``storage/datafile.py``). What cannot be read has no candidates.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
from click.shell_completion import CompletionItem

from cues.base import names as keys
from cues.storage import datafile


def names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """The queues or processors after ``store#`` or ``graph.py#``; before the ``#`` files and directories."""
    place, hash, _ = incomplete.partition("#")
    if not hash:
        return [CompletionItem(incomplete, type="file")]
    of_processors = "PROCESSOR" in str(parameter.metavar)
    known: list[str] = []
    for path in _stores(ctx, place):
        known += _rows(path, keys.PROCESSORS) if of_processors else _queues(path)
        if "group:" in str(parameter.metavar):
            known = known if of_processors else []
            known += [f"group:{group}" for group in _rows(path, keys.group_key(""))]
    return _offered((f"{place}#{name}" for name in known), incomplete)


def queue_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """The queues of the store that the command line names."""
    return _offered((name for path in _stores(ctx, None) for name in _queues(path)), incomplete)


def processor_names(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """The processors of the store that the command line names, without their graph if no dot is typed."""
    ids = [id.partition("/")[0] for path in _stores(ctx, None) for id in _rows(path, keys.PROCESSORS)]
    short = [id.partition(".")[2] for id in ids]
    return _offered(ids if "." in incomplete or len(set(short)) < len(set(ids)) else short, incomplete)


def directories(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem[str]]:
    """Directories, which the shell completes."""
    return [CompletionItem(incomplete, type="dir")]


def _offered(values: Iterable[str], incomplete: str) -> list[CompletionItem[str]]:
    return [CompletionItem(value) for value in dict.fromkeys(values) if value.startswith(incomplete)]


def _stores(ctx: click.Context, place: str | None) -> Iterator[Path]:
    """The stores that a target may mean; None: the target of the command line, before its ``#``."""
    if place is None:
        # Without the value of its last option, click leaves the arguments of a command line as they are.
        target = ctx.params.get("target") or ctx.params.get("graph") or next(iter(ctx.args), "")
        place = str(target).partition("#")[0]
    given = ctx.meta.get("cues.cli.settings")
    usual = os.environ.get("CUES_STORE") or getattr(given, "store", None)
    chosen: str | None = ctx.params.get("store")
    if os.path.isdir(place):
        yield Path(place)
    elif place:
        path, colon, name = place.partition(".py:")
        file = Path(path + ".py") if colon else Path(place)
        yield from [Path(chosen)] if chosen else _declared(file, name.partition("(")[0], usual)
    elif named := chosen or usual:
        yield Path(named)


def _declared(file: Path, name: str, usual: str | None) -> Iterator[Path]:
    """The stores of the graphs that a file makes: ``name = cues.Graph("id", store="…")``, read without running it."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for statement in ast.walk(tree):
        if not isinstance(statement, (ast.Assign, ast.Return, ast.AnnAssign)):
            continue
        call = statement.value
        if not isinstance(call, ast.Call) or ast.unparse(call.func).rpartition(".")[2] != "Graph":
            continue
        if name and isinstance(statement, ast.Assign) and name not in map(ast.unparse, statement.targets):
            continue
        values = {word.arg: word.value for word in call.keywords}
        store, id = values.get("store"), call.args[0] if call.args else values.get("id")
        if isinstance(store, ast.Constant) and isinstance(store.value, str):
            yield Path(store.value)
        elif store is None and usual:
            yield Path(usual)
        elif store is None and isinstance(id, ast.Constant):
            yield file.parent / "data" / str(id.value)


def _queues(path: Path) -> list[str]:
    return [name for name in _rows(path, keys.queue_key("")) if "." not in name]


def _rows(path: Path, prefix: bytes) -> list[str]:
    try:
        return sorted(key[len(prefix) :].decode() for key in datafile.row_keys(path, prefix))
    except Exception:  # no store, no permission, a damaged file, a page that a writer is using again
        return []
