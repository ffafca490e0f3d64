"""The shape of the package: layers, lazy imports, public names, what an installation brings."""

from __future__ import annotations

import ast
import functools
import importlib
import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import cues
from cues.steps.calls import Calls
from cues.steps.commit import Committer
from cues.steps.fence import Fence
from cues.steps.parts import PartBuilder
from cues.steps.recovery import Recovery
from cues.steps.runner import Runner
from cues.steps.stepper import Stepper
from cues.steps.taker import Taker

ROOT = Path(cues.__file__).parent
PROCESSORS = ROOT.parent / "processors"

# Folders from the bottom up. A module imports only from its own folder and from folders before it. "" is the public
# modules at the top of the package that are imported from below; TOP are those that only users import.
FOLDERS = (
    "", "base", "records", "storage", "producers", "queues", "graphs", "forwarding", "steps", "checkpoints", "txn",
    "groups", "engine", "spark", "tools", "operate", "cli", "ui",
)  # fmt: skip
TOP = {"testing", "testing_plugin", "__main__"}

BY_NAME = {
    "engine.origin",  # the user's module that holds a graph
    "queues.tables",  # pyarrow, pandas and polars, which are extras
    "graphs.graph",  # the engine that a start asks for
    "base.shown",  # the pictures of a notebook
    "queues.store",  # Store.check: the check knows every row of every layer
    "cli.ui", "cli.page",  # the page, whose packages are an extra
    "imported",  # packages of extras
    "base.lazy", "cli.app",  # names that load on first use
}  # fmt: skip
"""Modules that import others by a name computed at run time."""

PUBLIC = (
    "cues", "cues.errors", "cues.codec", "cues.testing", "cues.checkpoints", "cues.processors", "cues.faults",
    "cues.overrides", "cues.jsontext", "cues.arguments", "cues.buffers", "cues.imported",
)  # fmt: skip
"""Modules whose names are for users, and so for processors."""


@functools.cache
def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    found.pop("__init__")
    return found


def folder(module: str) -> int:
    """The rank of a module's folder."""
    first = module.split(".")[0]
    if first in TOP:
        return len(FOLDERS)
    return FOLDERS.index(first if first in FOLDERS else "")


def imports(path: Path) -> set[str]:
    """The modules of this package that a module imports: at the top, inside functions, and for the type checker."""
    known = modules()
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "cues":
            rest = node.module.partition(".")[2]
            for alias in node.names:
                name = f"{rest}.{alias.name}" if rest else alias.name
                found.add(name if name in known else rest)
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[2] for alias in node.names if alias.name.split(".")[0] == "cues"}
    return found - {""}


@functools.cache
def graph() -> dict[str, set[str]]:
    """The imports of every module."""
    return {name: imports(path) for name, path in modules().items()}


@pytest.mark.interpreted
def test_a_module_imports_only_from_its_folder_and_those_below() -> None:
    arrows = [(module, other) for module, found in graph().items() for other in found]
    assert [f"{module} → {other}" for module, other in arrows if folder(other) > folder(module)] == []


@pytest.mark.interpreted
def test_no_module_imports_itself_by_way_of_others() -> None:
    """Imports under TYPE_CHECKING and inside functions count."""
    arrows = dict(graph())
    while leaves := [name for name, found in arrows.items() if not found & arrows.keys()]:
        for name in leaves:
            del arrows[name]
    assert not arrows, f"modules in a circle, or above one: {sorted(arrows)}"


FLOORS_MAX = 9
"""Modules of ``steps/`` in the longest chain of imports."""


@pytest.mark.interpreted
def test_the_steps_have_few_floors() -> None:
    """Imports under TYPE_CHECKING and inside functions count."""
    steps = {name for name in graph() if folder(name) == FOLDERS.index("steps")}

    @functools.cache
    def floor(name: str) -> int:
        return 1 + max((floor(other) for other in graph()[name] & steps), default=0)

    highest = max(steps, key=floor)
    assert floor(highest) <= FLOORS_MAX, f"{highest} is on floor {floor(highest)}"


@pytest.mark.interpreted
def test_a_stepper_has_its_parts_and_is_none_of_them() -> None:
    """Its parts inherit from nothing. Only Spark has another way to take messages."""
    for kind in (Taker, Runner, PartBuilder, Committer, Recovery, Fence, Stepper):
        assert [base for base in kind.__mro__ if base not in (kind, object, Calls)] == []
    for part in (PartBuilder, Committer, Recovery, Fence):
        assert part.__subclasses__() == []
    assert {kind.__module__ for kind in Taker.__subclasses__()} <= {"cues.spark.stretches"}
    assert {kind.__module__ for kind in Stepper.__subclasses__()} <= {"cues.steps.feed", "cues.spark.stretches"}


def test_the_design_names_the_layers_in_their_order() -> None:
    assert " → ".join(FOLDERS[1:]) + "\n" in (ROOT.parent / "docs" / "design.md").read_text(encoding="utf-8")


BRANCHES = re.compile(
    r"is_shared|running\.shared\b|isinstance\([^()]*StorePlace|place\.kind (==|!=|in)|\bqueues is (not )?None|\bis_url"
    r"|cues\.spark|DirectoryPlace|_cues/id\.json"
)
"""The ways in which code asks whether messages are in a store or in a directory of ``cues run --queues``."""


def test_commands_and_the_page_do_not_ask_for_the_kind_of_place() -> None:
    """They draw what cues/operate gives them. And the page needs nothing of the command line."""
    for path in [*(ROOT / "cli").glob("*.py"), *(ROOT / "ui").glob("*.py")]:
        assert not BRANCHES.search(path.read_text()), f"{path.name}: {BRANCHES.search(path.read_text())}"
    for path in (ROOT / "ui").glob("*.py"):
        assert not any(other.split(".")[0] == "cli" for other in imports(path)), path.name


@pytest.mark.interpreted
def test_modules_that_import_by_name_are_known() -> None:
    found = {name for name, path in modules().items() if "import_module(" in path.read_text()}
    assert found == BY_NAME


def test_only_the_storage_folder_imports_lmdb() -> None:
    users = [name for name, path in modules().items() if "import lmdb" in path.read_text()]
    assert users == [
        f"storage.{name}"
        for name in (
            "environment",
            "exclusive",
            "format_record",
            "lmdb_errors",
            "lmdb_map",
            "map_growth",
            "replica",
            "store_core",
        )
    ]


def test_processors_use_only_public_names() -> None:
    public = {*cues.__all__, *(name.partition(".")[2] for name in PUBLIC)}
    for path in PROCESSORS.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "cues":
                of_options = path.name == "__init__.py" and node.module == "cues.graphs.options"  # it shows their names
                assert of_options or node.module in PUBLIC or node.module.startswith("cues.processors."), path
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
