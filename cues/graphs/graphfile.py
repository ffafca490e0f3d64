"""A user's graph file: importing it, finding its graph, and showing its errors.

    graph.py              the file's only graph
    graph.py:name         the graph of that name
    graph.py:make("x")    the graph that a function returns; arguments are literals

The file's folder is the first on ``sys.path``, as for ``python graph.py``. The module is registered under the
file's name, or under a unique name if that is taken. So its functions can be pickled, and other modules of the
folder that import it get the same module.
"""

from __future__ import annotations

import ast
import importlib.machinery
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from cues.base.data import dataclass
from cues.base.texts import quoted
from cues.errors import CuesError, GraphError
from cues.graphs.graph import Graph


class FileFailed(CuesError):
    """A graph file is missing, or its import failed.

    ``trace`` is the user's part of the traceback; empty if there is none.
    """

    trace: str


@dataclass(frozen=True)
class GraphFile:
    graph: Graph
    path: Path
    target: str
    """The text that the user wrote."""


def is_file(target: str) -> bool:
    """Return whether ``target`` can only mean a graph file."""
    path, _, _ = split(target)
    return path.is_file() or (path.suffix == ".py" and not path.is_dir())


def split(target: str) -> tuple[Path, str, str]:
    """Split ``file.py:make(1)`` into path, name and call arguments (``"(1)"``, or ``""`` without a call)."""
    path, colon, name = target.partition(".py:")
    if not colon:
        return Path(target), "", ""
    name, call, rest = name.partition("(")
    return Path(path + ".py"), name, call + rest


def load(target: str) -> GraphFile:
    """Import the file and return its graph. Raises :class:`FileFailed` with the user's traceback."""
    path, name, call = split(target)
    module = _module(path)
    if not name:
        return _placed(_only_graph(module, path), path, target)
    try:
        loaded = getattr(module, name)
    except AttributeError:
        named = [n for n, value in vars(module).items() if isinstance(value, Graph) or _is_own_function(module, value)]
        import difflib

        near = difflib.get_close_matches(name, named, 1)
        raise GraphError(
            f"{path} has no {name!r}; it has {', '.join(named) or 'no graph and no function'}.",
            f"{_run(path, near[0])}." if near else "use one of those." if named else "write graph = cues.Graph(…).",
        ) from None
    if call:
        loaded = _call(loaded, target, path, name, call)
    if not isinstance(loaded, Graph):
        hint = f"give {path}:{name}()." if callable(loaded) else "give the name of a cues.Graph."
        what = "returned" if call else "is"
        raise GraphError(f"{path}:{name}{call} {what} {_kind(loaded)}, not a graph.", hint)
    return _placed(loaded, path, target)


def _placed(graph: Graph, path: Path, target: str) -> GraphFile:
    """Place relative stores of its queues beside the file, as its own store is."""
    graph.directory = path.resolve().parent
    return GraphFile(graph, path, target)


def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise _no_file(path)
    if path.suffix != ".py":
        raise FileFailed(f"{path} is not a Python file.", "give a .py file that holds a cues.Graph.", trace="")
    path = path.resolve()
    name = _module_name(path)
    loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    folder = str(path.parent)
    if folder not in sys.path[:1]:
        sys.path.insert(0, folder)
    loader = importlib.machinery.SourceFileLoader(name, str(path))
    spec = importlib.util.spec_from_file_location(name, path, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        loader.exec_module(module)
    except SystemExit as error:
        del sys.modules[name]
        reason = error.code if isinstance(error.code, str) else f"it called exit({error.code!r})"
        raise FileFailed(f"{shown(path)} ended before its graph was there: {reason}", "", trace="") from None
    except Exception as error:
        del sys.modules[name]
        raise _failed(error, f"{shown(path)} cannot be imported.", _hint_of(error, path)) from None
    return module


def _hint_of(error: Exception, path: Path) -> str:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is not None and last.tb_frame.f_code is type(os.environ).__getitem__.__code__:
        return f"set the variable {error.args[0]}. Commands that only read a store need no graph file: cues status DIR."
    return f"python {shown(path)}."


def _module_name(path: Path) -> str:
    """Return the file's own name if it is free, so that other modules that import the file get this module."""
    taken = sys.modules.get(path.stem)
    if taken is None:
        free = path.stem.isidentifier() and path.stem not in sys.stdlib_module_names
    else:
        free = getattr(taken, "__file__", None) == str(path)
    return path.stem if free else f"{path.stem}_{xxhash.xxh3_64_hexdigest(str(path).encode())[:8]}"


def _only_graph(module: ModuleType, path: Path) -> Graph:
    graphs: dict[int, tuple[str, Graph]] = {}
    for name, value in vars(module).items():
        if isinstance(value, Graph):
            graphs.setdefault(id(value), (name, value))
    if len(graphs) == 1:
        ((_, graph),) = graphs.values()
        return graph
    if not graphs:
        makers = [
            name
            for name, value in vars(module).items()
            if _is_own_function(module, value) and "graph" in f"{name} {getattr(value, '__annotations__', '')}".lower()
        ]
        raise GraphError(
            f"{path} holds no graph.",
            f"{_run(path, makers[0] + '()')}." if makers else "write graph = cues.Graph('…') in the file.",
        )
    named = [name for name, _ in graphs.values()]
    raise GraphError(f"{path} holds {len(graphs)} graphs: {', '.join(named)}.", f"{_run(path, named[0])}.")


def _is_own_function(module: ModuleType, value: Any) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _call(factory: Any, target: str, path: Path, name: str, call: str) -> Any:
    if not callable(factory):
        raise GraphError(f"{path}:{name} is {_kind(factory)}, which cannot be called.", f"give {path}:{name}.")
    try:
        (expression,) = ast.parse(f"f{call}", mode="exec").body
        assert isinstance(expression, ast.Expr)
        node = expression.value
        assert isinstance(node, ast.Call)
        arguments = [ast.literal_eval(value) for value in node.args]
        keywords = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords if keyword.arg}
    except (SyntaxError, ValueError, AssertionError):
        raise GraphError(
            f"{target!r}: the arguments of {name} must be literals.", f"give literals, as in {path}:{name}('text', 3)."
        ) from None
    try:
        return factory(*arguments, **keywords)
    except Exception as error:
        raise _failed(error, f"{shown(path)}: {name}{call} failed.", f"python {shown(path)}.") from None


def _run(path: Path, name: str) -> str:
    return f"cues run {quoted(f'{path}:{name}')}"


def _no_file(path: Path) -> FileFailed:
    folder = path.parent
    candidates = sorted(p.name for p in folder.glob("*.py")) if folder.is_dir() else []
    import difflib

    near = difflib.get_close_matches(path.name, candidates, 1)
    return FileFailed(
        f"{path} is a directory, and a graph file is expected." if path.is_dir() else f"There is no file {path}.",
        f"cues run {quoted(folder / near[0])}." if near else "give the path of a Python file that holds a cues.Graph.",
        trace="",
    )


def _failed(error: Exception, message: str, hint: str) -> FileFailed:
    trace = users_trace(error)
    if isinstance(error, CuesError):
        # The error tells the problem, and the user's own frame tells the place.
        frames = [line for line in trace.splitlines() if line.startswith("  ")]
        return FileFailed(error.message, error.hint, trace="\n".join(frames))
    return FileFailed(message, hint, trace=trace)


def users_trace(error: BaseException) -> str:
    """The traceback of an error, without our frames and those of the import system."""
    trace = traceback.TracebackException.from_exception(error)
    _cut(trace, error)
    return "".join(trace.format())


def _cut(trace: traceback.TracebackException, error: BaseException) -> None:
    kept = []
    for summary, (frame, _) in zip(trace.stack, traceback.walk_tb(error.__traceback__)):
        module = str(frame.f_globals.get("__name__", ""))
        if module != "cues" and not module.startswith(("cues.", "importlib._bootstrap", "importlib.machinery")):
            kept.append(summary)
    trace.stack = traceback.StackSummary.from_list(kept)
    if trace.__cause__ is not None and error.__cause__ is not None:
        _cut(trace.__cause__, error.__cause__)
    if trace.__context__ is not None and error.__context__ is not None:
        _cut(trace.__context__, error.__context__)


def shown(path: Path | str) -> str:
    """Return a path in its shortest form."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
