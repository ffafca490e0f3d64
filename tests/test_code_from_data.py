"""Data that become code: the few calls that can run what they read, and why it is nothing foreign."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import cues

ROOT = Path(cues.__file__).parent.parent
FOLDERS = ("cues", "processors", ".ci")

RUNS_DATA = {
    "pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle", "runpy", "code", "codeop",
}  # fmt: skip
"""Modules of which every call may run what it is given."""
RUNS_TEXT = {"eval", "exec", "compile", "__import__", "execfile"}
"""Built-in functions that run a text."""
METHODS = {"read_pickle", "unsafe_load", "full_load", "Unpickler"}
"""Functions of other modules that unpickle, or make any object."""

ALLOWED = {
    "cues.base.data._init": "the text of __init__ is made of the names of fields of our own classes",
    "cues.schemas._resolved": "an annotation in the user's own graph file, in the names of its function",
    "cues.operate.where.Where._compile": "a method of that name, which makes functions of the nodes that it knows",
    "cues.engine.wire": "between the supervisor and the workers that it started, over pipes that they inherit",
    "cues.spark.executor": "between the driver and the executors of one Spark application, as Spark itself does",
    "cues.spark.work": "errors on their way from an executor to the driver",
    "cues.spark.shipping": "the user's functions on their way to the executors",
    "cues.spark.cluster.frames": "lists of files on their way from the executors to the driver, in rows of one query",
}
"""Places that unpickle or run a text, and why no store, message or network can have put it there."""


def unsafe(node: ast.AST, modules: set[str]) -> str | None:
    """Return the call, if it may run what it reads; ``modules`` are the names that the file imports of RUNS_DATA."""
    if not isinstance(node, ast.Call):
        return None
    for word in node.keywords:
        if word.arg in ("allow_pickle", "shell") and not (
            isinstance(word.value, ast.Constant) and not word.value.value
        ):
            return f"{word.arg}="
    if isinstance(node.func, ast.Name):
        return node.func.id if node.func.id in RUNS_TEXT | modules else None
    if isinstance(node.func, ast.Attribute):
        of, name = node.func.value, node.func.attr
        if isinstance(of, ast.Name) and of.id in modules and name not in ("dumps", "dump"):
            return f"{of.id}.{name}"
        if name in METHODS:
            return name
        if name == "load" and isinstance(of, ast.Name) and of.id == "yaml":
            return "yaml.load"
    return None


def found(text: str, module: str) -> set[str]:
    """Return the places in a module that unpickle or run a text, as ``module.function``."""
    tree, places = ast.parse(text), set()
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name.split(".")[0] in RUNS_DATA}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in RUNS_DATA:
            modules |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            modules |= {alias.asname or alias.name for alias in node.names if alias.name in RUNS_DATA}

    def visit(node: ast.AST, place: str) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            place = f"{place}.{node.name}"
        if unsafe(node, modules):
            places.add(place)
        for child in ast.iter_child_nodes(node):
            visit(child, place)

    visit(tree, module)
    return places


@pytest.mark.interpreted
def test_nothing_that_comes_from_a_store_or_a_network_can_run() -> None:
    places = set[str]()
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            places |= found(path.read_text(), ".".join(path.relative_to(ROOT).with_suffix("").parts))
    known = {name: {place for place in places if f"{place}.".startswith(f"{name}.")} for name in ALLOWED}
    assert places - set().union(*known.values()) == set(), "read msgpack or JSON, or give the reason here"
    assert [name for name in known if not known[name]] == [], "entries that are not needed any more"


@pytest.mark.parametrize(
    "line",
    [
        "import pickle\npickle.loads(x)", "from pickle import loads\nloads(x)", "import pickle as p\np.Unpickler(f)",
        "import marshal\nmarshal.load(f)", "eval(x)", "exec(x)", "yaml.load(f)", "np.load(f, allow_pickle=True)",
        "from pyspark import cloudpickle\ncloudpickle.loads(x)", "subprocess.run(x, shell=True)", "pd.read_pickle(f)",
    ],
)  # fmt: skip
def test_the_search_finds(line: str) -> None:
    assert found(f"def read(x, f):\n    pass\n{line}\n", "m") == {"m"}


@pytest.mark.parametrize(
    "line", ["re.compile(x)", "json.loads(x)", "np.load(f, allow_pickle=False)", "yaml.safe_load(f)"]
)
def test_the_search_leaves_alone(line: str) -> None:
    assert found(line, "m") == set()
