"""A user's file: importing it, finding the graph in it, and showing what went wrong in their words.

    graph.py              the file's only graph
    graph.py:name         the graph of that name
    graph.py:make("x")    the graph that a function returns; arguments are literals

The file's folder comes first on ``sys.path``, as for ``python graph.py``, and the module is registered
under the file's name (or one of its own, where that is taken), so that its functions can be pickled
and other modules of the folder that import it get the same one.
"""

from __future__ import annotations

import ast
import difflib
import importlib.machinery
import importlib.util
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import xxhash

from cues.errors import CuesError, GraphError
from cues.graphs.graph import Graph


class FileFailed(CuesError):
    """A graph file that is not there, or failed while it was imported.

    ``trace`` is the user's part of the traceback, and empty where there is none.
    """

    trace: str


@dataclass(frozen=True)
class GraphFile:
    """A graph and where it came from."""

    graph: Graph
    path: Path
    target: str
    """What the user wrote."""


def is_file(target: str) -> bool:
    """Whether ``target`` can only be meant as a graph file."""
    path, _, _ = split(target)
    return path.is_file() or (path.suffix == ".py" and not path.is_dir())


def split(target: str) -> tuple[Path, str, str]:
    """``file.py:make(1)`` as path, name and call arguments (``""`` without, ``"(1)"`` with)."""
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
        found = getattr(module, name)
    except AttributeError:
        named = [n for n, value in vars(module).items() if isinstance(value, Graph) or _is_own_function(module, value)]
        near = difflib.get_close_matches(name, named, 1)
        raise GraphError(
            f"{path} has no {name!r}; it has {', '.join(named) or 'no graph and no function'}.",
            f"cues run {path}:{near[0]}." if near else "one of those." if named else "graph = cues.Graph(…).",
        ) from None
    if call:
        found = _call(found, target, path, name, call)
    if not isinstance(found, Graph):
        hint = f"{path}:{name}()." if callable(found) else "the name of a cues.Graph."
        what = "returned" if call else "is"
        raise GraphError(f"{path}:{name}{call} {what} {_kind(found)}, not a graph.", hint)
    return _placed(found, path, target)


def _placed(graph: Graph, path: Path, target: str) -> GraphFile:
    """Relative stores of its queues are beside the file, as its own store is."""
    graph.directory = path.resolve().parent
    return GraphFile(graph, path, target)


def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise _no_file(path)
    if path.suffix != ".py":
        raise FileFailed(f"{path} is not a Python file.", "a file that ends in .py and holds a cues.Graph.", trace="")
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
        said = error.code if isinstance(error.code, str) else f"it called exit({error.code!r})"
        raise FileFailed(f"{_shown(path)} ended before its graph was there: {said}", "", trace="") from None
    except Exception as error:
        del sys.modules[name]
        raise _failed(error, f"{_shown(path)} cannot be imported.", f"python {_shown(path)}.") from None
    return module


def _module_name(path: Path) -> str:
    """The file's own name where it is free, so that whoever imports it gets this module."""
    unique = f"{path.stem}_{xxhash.xxh3_64_hexdigest(str(path).encode())[:8]}"
    taken = sys.modules.get(path.stem)
    if taken is not None and getattr(taken, "__file__", None) == str(path):
        return path.stem
    if taken is not None or not path.stem.isidentifier() or path.stem in sys.stdlib_module_names:
        return unique
    return path.stem


def _only_graph(module: ModuleType, path: Path) -> Graph:
    found: dict[int, tuple[str, Graph]] = {}
    for name, value in vars(module).items():
        if isinstance(value, Graph):
            found.setdefault(id(value), (name, value))
    if len(found) == 1:
        ((_, graph),) = found.values()
        return graph
    if not found:
        makers = [
            name
            for name, value in vars(module).items()
            if _is_own_function(module, value) and "graph" in f"{name} {getattr(value, '__annotations__', '')}".lower()
        ]
        raise GraphError(
            f"{path} holds no graph.",
            f"cues run '{path}:{makers[0]}()'." if makers else "graph = cues.Graph('…') in the file.",
        )
    named = [name for name, _ in found.values()]
    raise GraphError(f"{path} holds {len(found)} graphs: {', '.join(named)}.", f"cues run {path}:{named[0]}.")


def _is_own_function(module: ModuleType, value: Any) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _call(factory: Any, target: str, path: Path, name: str, call: str) -> Any:
    if not callable(factory):
        raise GraphError(f"{path}:{name} is {_kind(factory)}, which cannot be called.", f"{path}:{name}.")
    try:
        (expression,) = ast.parse(f"f{call}", mode="exec").body
        assert isinstance(expression, ast.Expr)
        found = expression.value
        assert isinstance(found, ast.Call)
        arguments = [ast.literal_eval(one) for one in found.args]
        keywords = {one.arg: ast.literal_eval(one.value) for one in found.keywords if one.arg}
    except (SyntaxError, ValueError, AssertionError):
        raise GraphError(
            f"{target!r}: the arguments of {name} must be literals.", f"{path}:{name}('text', 3)."
        ) from None
    try:
        return factory(*arguments, **keywords)
    except Exception as error:
        raise _failed(error, f"{_shown(path)}: {name}{call} failed.", f"python {_shown(path)}.") from None


def _no_file(path: Path) -> FileFailed:
    folder = path.parent
    candidates = sorted(p.name for p in folder.glob("*.py")) if folder.is_dir() else []
    near = difflib.get_close_matches(path.name, candidates, 1)
    return FileFailed(
        f"There is no file {path}.",
        f"cues run {folder / near[0]}." if near else "the path of a Python file that holds a cues.Graph.",
        trace="",
    )


def _failed(error: Exception, message: str, hint: str) -> FileFailed:
    trace = users_trace(error)
    if isinstance(error, CuesError):
        # What is wrong is said by the error; where, by the user's own frame.
        lines = trace.splitlines()
        frames = [line for line in lines if line.startswith("  ")]
        return FileFailed(error.message, error.hint, trace="\n".join(frames))
    return FileFailed(message, hint, trace=trace)


def users_trace(error: BaseException) -> str:
    """The traceback of an error without the frames that are ours or the import system's."""
    found = traceback.TracebackException.from_exception(error)
    _cut(found, error)
    return "".join(found.format())


def _cut(found: traceback.TracebackException, error: BaseException) -> None:
    kept = []
    for summary, (frame, _) in zip(found.stack, traceback.walk_tb(error.__traceback__)):
        module = str(frame.f_globals.get("__name__", ""))
        if module != "cues" and not module.startswith(("cues.", "importlib._bootstrap", "importlib.machinery")):
            kept.append(summary)
    found.stack = traceback.StackSummary.from_list(kept)
    if found.__cause__ is not None and error.__cause__ is not None:
        _cut(found.__cause__, error.__cause__)
    if found.__context__ is not None and error.__context__ is not None:
        _cut(found.__context__, error.__context__)


def _shown(path: Path) -> Path:
    """A path as short as it can be said."""
    try:
        return path.relative_to(Path.cwd())
    except ValueError:
        return path


def _kind(value: Any) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
