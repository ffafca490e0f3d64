"""The place where another process finds a graph, and the test that it found the same one.

    origin_of    the file or module, and the name in it, by which a graph can be imported
    Origin.load  import it, in a worker
    digests      of each processor and of the rest: equal if two processes built the same graph

No part of a graph is sent to another process. Functions, `system` and connections are made again by importing
the file. So a graph must be a global of a file or module, or be returned by a function that can be called with
literal arguments (``graph.py:make(3)``). A graph that was made in a REPL or inside a function has no origin.

Not guaranteed: that equal digests mean equal behaviour. Names, options and the code of functions are in
the digests. The values in closures, and imported modules, are not.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import xxhash

from cues.base.data import dataclass
from cues.errors import GraphError
from cues.graphs import graphfile
from cues.graphs.graph import Graph
from cues.graphs.plan import Plan


@dataclass(frozen=True)
class Origin:
    """The file or module to import, and the graph in it."""

    target: str
    """``/path/graph.py:name``, ``/path/graph.py:make(3)``, or ``package.module:name``."""
    file: bool
    """True if ``target`` begins with a file."""

    def load(self) -> Graph:
        """Import it. Raises :class:`GraphError`, and the errors of :func:`graphfile.load`."""
        if self.file:
            return graphfile.load(self.target).graph
        module, _, name = self.target.partition(":")
        try:
            graph = getattr(importlib.import_module(module), name, None)
        except Exception as error:
            raise GraphError(
                f"A worker cannot import {module} ({type(error).__name__}: {error}).",
                f"run python -c 'import {module}' to see the error.",
                processor="",
            ) from error
        if not isinstance(graph, Graph):
            raise GraphError(
                f"{self.target} is not a graph where a worker imports it.",
                "make the graph a global of that module.",
                processor="",
            )
        return graph


def origin_of(graph: Graph, target: str | None) -> Origin:
    """Return the place where workers find ``graph``. ``target`` names it if it cannot be found out.

    Raises :class:`GraphError` if workers cannot find it.
    """
    if target is not None:
        path, name, call = graphfile.split(target)
        return Origin(f"{path.resolve()}:{name}{call}" if name else str(path.resolve()), file=True)
    # __main__ comes last, because a worker that imports it runs the program once more.
    modules = sorted(sys.modules.items(), key=lambda item: item[0] == "__main__")
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
        f"The graph {graph.id!r} is not a global of a file, so worker processes cannot import it: it was made inside a"
        " function, at a prompt, or with python -c.",
        f"write {graph.id} = cues.Graph(…) at the top of a file, or pass target='graph.py:make()' for a graph that a"
        " function returns.",
        processor="",
    )


# --- the same graph -------------------------------------------------------------------------------


def digests(plan: Plan) -> dict[str, str]:
    """By processor id, and of the rest under ``""``. They are equal in every process that builds the same graph."""
    rest = _digest((plan.id, dict(plan.queues), plan.source))
    return {node.id: _digest(node) for node in plan.nodes} | {"": rest}


def compare(graph: Graph, built: Mapping[str, str], expected: Mapping[str, str]) -> None:
    """Raise :class:`GraphError` if the digests of this start and of a worker differ, with the processors."""
    differ = sorted(id for id in built.keys() | expected.keys() if built.get(id) != expected.get(id))
    if differ:
        what = ", ".join(id or "its queues" for id in differ)
        raise GraphError(
            f"A worker that imports the graph {graph.id!r} builds another one than this start has ({what}).",
            "start again if the file was changed meanwhile; else build the graph without values that differ between"
            " processes (arguments, variables, time).",
            processor=differ[0],
        )


def _digest(value: Any) -> str:
    return str(xxhash.xxh3_64_hexdigest(repr(_plain(value)).encode("utf-8", "backslashreplace")))


def _plain(value: Any) -> Any:
    """The value as nested tuples, which are the same in every process: without addresses, with sets in order."""
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
        return "list", tuple(map(_plain, value))
    if isinstance(value, (set, frozenset)):
        return "set", tuple(sorted(repr(_plain(member)) for member in value))
    if callable(value):
        return _function(value)
    return type(value).__qualname__, str(value) if isinstance(value, Path) else ""


def _function(fn: Callable[..., Any]) -> Any:
    """The name and the code of a function. Not its module, which is ``__main__`` in the process that runs the file."""
    code = getattr(fn, "__code__", None) or getattr(type(fn).__call__, "__code__", None)
    return "function", getattr(fn, "__qualname__", type(fn).__qualname__), _plain(code)
