"""A name that begins with an underscore belongs to its module; the product has no other use, and tests have few."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

STANDARD = {
    "_replace",
    "_asdict",
    "_fields",
    "_make",
    "_repr_html_",
    "_exit",
    "_getframe",
    "_STATE",
    "_TRACER_PROVIDER",
}
"""Names with an underscore that Python, notebooks, the client of Kafka and OpenTelemetry spell so."""

TESTS = {
    "conftest.py": 1,
    "golden/make.py": 1,
    "pending_runs.py": 1,
    "small.py": 3,
    "test_checkpoints.py": 2,
    "test_delivery.py": 2,
    "test_directory_partitions.py": 1,
    "test_halving.py": 1,
    "test_interrupts.py": 3,
    "test_model.py": 1,
    "test_opening.py": 2,
    "test_preparing.py": 3,
    "test_processors_kafka.py": 2,
    "test_schedules.py": 6,
    "test_sink_checkpoint.py": 2,
    "test_source_state.py": 3,
    "test_two_stores.py": 1,
    "test_txn_abort.py": 1,
    "test_txn_reader.py": 1,
    "test_txn_sequencer.py": 4,
    "test_txn_turns.py": 1,
    "test_ui.py": 1,
}
"""Uses in tests that are left, by file: faults that they inject, and memory that they look into."""

_KINDS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Attribute | ast.Name | ast.ImportFrom


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, _KINDS)]


@cache
def defined(path: Path) -> set[str]:
    """The private names that a module defines: functions, classes, attributes of ``self``, variables."""
    found = set()
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return {name for name in found if is_private(name)}


_PRIVATE = re.compile(r"\b_\w+")


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in STANDARD


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def foreign(paths: list[Path], names: set[str]) -> Counter[str]:
    """How often each file uses one of ``names``, of an object other than ``self``, and does not define it."""
    found: Counter[str] = Counter()
    for path in paths:
        if names.isdisjoint(_PRIVATE.findall(path.read_text())):
            continue  # two of three files of tests: it takes longer to parse them
        others, place = names - defined(path), str(path.relative_to(ROOT))
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and node.attr in others:
                found[place] += not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("cues", "processors"):
                found[place] += sum(is_private(alias.name) for alias in node.names)
    return +found


@pytest.mark.interpreted
def test_private_names_are_used_in_their_module() -> None:
    product = files("cues", "processors")
    names = set().union(*map(defined, product))
    assert not foreign(product, names), "it needs a public name, or a function in its module"
    tests = {place.removeprefix("tests/"): count for place, count in foreign(files("tests"), names).items()}
    assert tests == TESTS, (
        "a use that is gone lowers its number; a new one needs a public name, or a helper in small.py"
    )


_REPLACED = re.compile(r'(?:setattr|patch\.object)?\([\w.]+, "(_\w+)"')
"""A private name as text: of an attribute that a test replaces."""


@pytest.mark.interpreted
def test_private_names_that_tests_replace_are_there() -> None:
    """A test replaces them when it runs, which may be in the long set: a new name in the product went unnoticed."""
    words = {word for path in files("cues", "processors") for word in re.findall(r"\w+", path.read_text())}
    gone = []
    for path in files("tests"):
        text = path.read_text()
        names = {name for name in _REPLACED.findall(text) if is_private(name) and f"def {name}" not in text}
        gone += [f"{path.relative_to(ROOT)}: {name}" for name in names - words]
    assert not gone
