"""Where another process finds a graph, and whether what it found is the same one.

    origin_of    the file or module, and the name in it, by which a graph can be imported
    Origin.load  import it: what a worker does
    digests      of each processor and of the rest: equal where two processes built the same graph

Nothing of a graph travels between processes: functions, `system` and connections are made anew by importing
the file. So a graph must be a global of a file or module, or come from a function that can be named with
literal arguments (``graph.py:make(3)``); one that was made in a REPL or inside a function has no origin.

Not guaranteed: that equal digests mean equal behaviour. Names, options and the code of functions are in
them, what functions close over and import is not.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import xxhash

from cues.errors import GraphError
from cues.graphs import graphfile
from cues.graphs.graph import Graph
from cues.graphs.plan import Plan


@dataclass(frozen=True)
class Origin:
    """What to import, and the graph in it."""

    target: str
    """``/path/graph.py:name``, ``/path/graph.py:make(3)``, or ``package.module:name``."""
    file: bool
    """Whether ``target`` begins with a file."""

    def load(self) -> Graph:
        """Import it. Raises :class:`GraphError`, or what :func:`graphfile.load` raises."""
        if self.file:
            return graphfile.load(self.target).graph
        module, _, name = self.target.partition(":")
        try:
            found = getattr(importlib.import_module(module), name, None)
        except Exception as error:
            raise GraphError(
                f"A worker cannot import {module} ({type(error).__name__}: {error}).",
                f"python -c 'import {module}'.",
                processor="",
            ) from error
        if not isinstance(found, Graph):
            raise GraphError(
                f"{self.target} is not a graph where a worker imports it.",
                "make the graph a global of that module.",
                processor="",
            )
        return found


def origin_of(graph: Graph, target: str | None = None) -> Origin:
    """Where workers find ``graph``; ``target`` says it where it cannot be found out.

    Raises :class:`GraphError` where there is no such place.
    """
    if target is not None:
        path, name, call = graphfile.split(target)
        return Origin(f"{path.resolve()}:{name}{call}" if name else str(path.resolve()), file=True)
    # A module that is imported before __main__: whoever imports that runs the program once more.
    modules = sorted(sys.modules.items(), key=lambda found: found[0] == "__main__")
    for name, module in modules:
        attribute = next((a for a, value in tuple(vars(module).items()) if value is graph), None)
        if attribute is None or not isinstance(module, ModuleType):
            continue
        spec = getattr(module, "__spec__", None)
        known = spec.name if spec is not None else name
        if "." in known and not known.endswith(".__main__"):
            return Origin(f"{known}:{attribute}", file=False)
        file = getattr(module, "__file__", None)
        if file and file.endswith(".py") and Path(file).exists():
            return Origin(f"{Path(file).resolve()}:{attribute}", file=True)
    raise GraphError(
        f"The graph {graph.id!r} is no global of a file, so worker processes cannot import it: it was made inside a"
        " function, at a prompt, or with python -c.",
        f"{graph.id} = cues.Graph(…) at the top of a file; or target='graph.py:make()' for what a function returns.",
        processor="",
    )


# --- the same graph -------------------------------------------------------------------------------


def digests(plan: Plan) -> dict[str, str]:
    """By processor id, and under ``""`` of the rest; equal in every process that builds the same."""
    found = {node.id: _digest(node) for node in plan.nodes}
    found[""] = _digest((plan.id, dict(plan.queues), plan.source))
    return found


def compare(graph: Graph, here: Mapping[str, str], there: Mapping[str, str]) -> None:
    """Raise :class:`GraphError` naming what differs between the digests of this start and those of a worker."""
    differ = sorted(id for id in here.keys() | there.keys() if here.get(id) != there.get(id))
    if differ:
        what = ", ".join(id or "its queues" for id in differ)
        raise GraphError(
            f"A worker that imports the graph {graph.id!r} builds another one than this start has ({what}).",
            "start again if the file was changed meanwhile; else build it without what differs between processes"
            " (arguments, variables, time).",
            processor=differ[0],
        )


def _digest(value: Any) -> str:
    return str(xxhash.xxh3_64_hexdigest(repr(_plain(value)).encode("utf-8", "backslashreplace")))


def _plain(value: Any) -> Any:
    """The same nested tuples for the same value in every process: no addresses, no order of sets."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return type(value).__name__, repr(value)
    if isinstance(value, CodeType):
        return value.co_code.hex(), value.co_names, tuple(_plain(const) for const in value.co_consts)
    if isinstance(value, functools.partial):
        return "partial", _plain(value.func), _plain(value.args), _plain(value.keywords)
    if isinstance(value, type):
        return "class", value.__qualname__
    if dataclasses.is_dataclass(value):
        return type(value).__name__, tuple((f.name, _plain(getattr(value, f.name))) for f in dataclasses.fields(value))
    if isinstance(value, Mapping):
        return "map", tuple(sorted((repr(_plain(k)), _plain(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return "list", tuple(_plain(one) for one in value)
    if isinstance(value, (set, frozenset)):
        return "set", tuple(sorted(repr(_plain(one)) for one in value))
    if callable(value):
        return _function(value)
    return type(value).__qualname__, str(value) if isinstance(value, Path) else ""


def _function(fn: Callable[..., Any]) -> Any:
    """Its name and code. Not its module: a file that is run is ``__main__`` in one process, and not in the others."""
    code = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    return "function", getattr(fn, "__qualname__", type(fn).__qualname__), _plain(code)
