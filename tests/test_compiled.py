"""What mypyc cannot compile, or would compile to something else, is not in the modules that it compiles.

``.ci/compiled`` builds the wheel and runs the default tests on it. These tests look at the source only.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, Protocol

import pytest

from cues.native import implementation

ROOT = Path(__file__).resolve().parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cues"]["compile"]
NAMED = sorted({path.relative_to(ROOT).as_posix() for pattern in SETTINGS["modules"] for path in ROOT.glob(pattern)})
COMPILED = [path for path in NAMED if path not in SETTINGS["pure"]]


def module_of(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".")


def ordinary(tree: ast.Module) -> set[str]:
    """The classes that their decorator keeps from being compiled."""
    return {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and any("native_class=False" in ast.unparse(d) for d in node.decorator_list)
    }


def test_the_modules_that_stay_python_are_named_once_and_exist() -> None:
    assert len(COMPILED) > 50
    assert len(set(SETTINGS["pure"])) == len(SETTINGS["pure"])
    assert set(SETTINGS["pure"]) <= set(NAMED)


@pytest.mark.parametrize("path", COMPILED)
def test_no_compiled_class_has_a_base_that_is_not_compiled(path: str) -> None:
    """Such a class would use the memory of its base for its own attributes."""
    module = importlib.import_module(module_of(path))
    kept = ordinary(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    compiled = {module_of(each) for each in COMPILED}
    for name, cls in vars(module).items():
        if not inspect.isclass(cls) or cls.__module__ != module.__name__:
            continue
        if name in kept:  # the compiler finds a base such as MutableMapping under the name in typing, which is no class
            assert all(base.__module__ == "builtins" for base in cls.__mro__[1:]), f"{name} needs a module of its own"
            continue
        if issubclass(cls, (BaseException, tuple)):
            continue
        foreign = [b for b in cls.__mro__[1:-1] if b.__module__ not in compiled and b not in (Generic, Protocol)]
        assert not foreign, f"{name} inherits from {foreign[0].__name__}: add @mypyc_attr(native_class=False)"


@pytest.mark.parametrize("path", COMPILED)
def test_no_construction_is_used_that_changes_its_meaning(path: str) -> None:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert list(changed(tree)) == []


def changed(tree: ast.Module) -> Iterator[str]:
    """What compiled code does differently, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = {alias.name for alias in node.names} | {getattr(node, "module", None)}
            if "weakref" in names:
                yield f"line {node.lineno}: compiled objects have no weak references"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            lazy = [a for a in node.args if isinstance(a, ast.GeneratorExp) or ast.unparse(a).startswith("map(")]
            if node.func.attr == "extend" and lazy:
                yield f"line {node.lineno}: extend() loses the items before an exception"
            if ast.unparse(node.func) == "super().__init__":
                packed = [a for a in node.args if isinstance(a, ast.Starred)] + [k for k in node.keywords if not k.arg]
                if packed:
                    yield f"line {node.lineno}: super().__init__() passes a packed argument as one argument"


def test_what_is_looked_for_is_found() -> None:
    calls = ["a.extend(f(x) for x in y)", "a.extend(map(f, y))", "super().__init__(*a)", "super().__init__(**k)"]
    assert len(list(changed(ast.parse("\n".join(["import weakref", *calls]))))) == 5


@pytest.mark.interpreted
def test_an_installation_from_the_source_is_pure_python() -> None:
    assert implementation() == "pure Python"
