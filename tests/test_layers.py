"""The shape of the package: layers, lazy imports, public names, what an installation brings."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import cues

ROOT = Path(cues.__file__).parent
PROCESSORS = ROOT.parent / "processors"

# Each module may import only what stands before it. The numbers are the layers of docs/design.md.
ORDER = [
    (0, "errors names codec clock faults events provenance txn txn.identity txn.stamps batch hashes tries"),
    (0, "partitioners options txn.messages txn.framing txn.mapping txn.sequencer"),
    (1, "locks wakeup datafile writers store"),
    (2, "producers log spread queue tailer merged state abroad outside fork leases ownership claims retention"),
    (3, "processor taking concurrency eventloop imperative failure results process runner delivery feed forwarder"),
    (3, "txn.stamped pending txn.publisher txn.reader txn.committed txn.journals"),
    (3, "checkpoints checkpoints.deliveries checkpoints.packing checkpoints.sql checkpoints.jsonfile"),
    (3, "checkpoints.lmdbstore txn.consumer"),
    (4, "topology plan compose graph graphfile draw"),
    (4, "groups groups.sticky groups.table groups.held groups.holdings groups.membership groups.session"),
    (
        5,
        "engine engine.stores engine.assembly engine.local"
        " engine.assignment engine.origin engine.wire engine.workers engine.child engine.record"
        " engine.supervisor engine.supervised",
    ),
    (
        5,
        "spark.java spark.options spark.position spark.place spark.columns spark.checkpoint"
        " spark.slices spark.reading spark.staging spark.writing spark.datasource spark.session spark.source spark"
        " spark.remote spark.stretch spark.backfill spark.cluster spark.cluster.files spark.cluster.directory"
        " spark.cluster.ledger spark.cluster.looking spark.cluster.lease spark.cluster.driver spark.cluster.rows"
        " spark.cluster.tasks spark.cluster.landing spark.cluster.kept spark.cluster.frames spark.cluster.inlet"
        " spark.cluster.step spark.cluster.feeder spark.cluster.keeping spark.cluster.engine spark.engine",
    ),
    (6, "check compaction testing metrics cli __main__"),
]
RANK = {module: place for place, module in enumerate(m for _, names in ORDER for m in names.split())}

# Five calls go upward; each loads its target by name when it is called.
UPWARD = {
    ("store", "queue"): "Store.queue: what a user calls first",
    ("store", "check"): "Store.check: a suspect store is checked before it is used",
    ("queue", "tailer"): "Queue.tailer: a queue hands out its readers",
    ("groups.membership", "groups.session"): "Member.session: a member begins its steps",
    ("queue", "merged"): "Queue.tailer, of a queue with several partitions",
    ("queue", "txn.committed"): "Queue.tailer: the same, of what is committed",
    ("queue", "retention"): "retention looks at positions, of processors and of named tailers",
}
"""Imports inside functions that go up, and why."""


PUBLIC = ("cues", "cues.errors", "cues.codec", "cues.testing", "cues.checkpoints", "cues.processors")
"""Modules whose names are for users, and so for processors."""


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    found.pop("__init__")
    return found


def group(module: str) -> str:
    """Where a module stands in ORDER: the command line counts as one."""
    return "cli" if module.split(".")[0] == "cli" else module


def imports(path: Path) -> list[tuple[str, bool]]:
    """What a module imports of this package, and whether at run time on import (not typing, not in a function)."""
    tree = ast.parse(path.read_text())
    found: list[tuple[str, bool]] = []

    def visit(node: ast.AST, typing_only: bool, inside: bool) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
                continue  # names for the type checker load nothing
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                visit(child, typing_only, True)
                continue
            if isinstance(child, ast.ImportFrom) and child.module and child.module.split(".")[0] == "cues":
                rest = child.module.partition(".")[2]
                for alias in child.names:
                    name = f"{rest}.{alias.name}" if rest else alias.name
                    found.append((name if name in modules() else rest, inside))
            elif isinstance(child, ast.Import):
                for alias in child.names:
                    if alias.name.split(".")[0] == "cues":
                        found.append((alias.name.partition(".")[2], inside))
            visit(child, typing_only, inside)

    visit(tree, False, False)
    return [(name, inside) for name, inside in found if name]


@pytest.mark.parametrize("module", sorted(modules()))
def test_a_module_imports_only_what_stands_below_it(module: str) -> None:
    me = group(module)
    assert me in RANK, f"{module} stands in no layer: put it into ORDER and docs/design.md"
    for other, inside in imports(modules()[module]):
        target = group(other)
        if target == me:
            continue
        if RANK[target] >= RANK[me]:
            assert inside, f"{module} imports {other}, which stands above it"
            assert (module, other) in UPWARD, f"{module} loads {other} upward, which is not on the list"


def test_only_the_store_imports_lmdb() -> None:
    users = [name for name, path in modules().items() if "import lmdb" in path.read_text()]
    assert users == ["store"]


def test_processors_use_only_public_names() -> None:
    public = set(cues.__all__)
    for path in PROCESSORS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "cues":
                assert node.module in PUBLIC, path
                if node.module == "cues":
                    assert {alias.name for alias in node.names} <= public, path


def test_importing_cues_loads_neither_lmdb_nor_click() -> None:
    code = "import sys, cues; print([m for m in ('lmdb', 'click', 'msgpack', 'xxhash') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_a_graph_without_async_functions_loads_no_asyncio() -> None:
    """It takes as long to import as everything else together, and a restart waits for it."""
    code = "import sys, cues.engine.local; print([m for m in ('asyncio', 'concurrent.futures') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_public_name_loads_and_all_is_sorted() -> None:
    assert cues.__all__ == sorted(cues.__all__)
    for name in cues.__all__:
        assert getattr(cues, name) is not None
    assert cues.open is cues.Store
    assert cues.__version__ == metadata.version("cues-streams")
    with pytest.raises(AttributeError):
        cues.nothing_of_that_name  # noqa: B018


def test_the_core_install_brings_four_packages() -> None:
    needed = [r for r in metadata.requires("cues-streams") or [] if "extra ==" not in r]
    assert sorted(r.split(">")[0].split("=")[0].strip() for r in needed) == ["click", "lmdb", "msgpack", "xxhash"]


def test_the_distribution_installs_no_top_level_processors() -> None:
    assert importlib.import_module("cues.processors").__name__ == "cues.processors"
    packages = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert all(package.split(".")[0] == "cues" for package in packages)
    assert (ROOT / "py.typed").exists()
