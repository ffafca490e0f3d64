"""Texts for people: sizes, and commands that can be copied into a shell whatever the names in them are."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import cues
from cues import errors
from cues.base.texts import quoted, size
from cues.cli.app import COMMANDS

_COMMAND = re.compile(rf"\bcues (?:{'|'.join(COMMANDS)})(?: (?:--[a-z-]+|\S*X\S*|…))* \S*$")
"""The end of a text in which a command has begun, and goes on. X stands for a value."""


def test_sizes_are_read_by_people() -> None:
    assert [size(n) for n in (0, 999, 4_096, 82_305_957_888, 10**14)] == [
        "0 B",
        "999 B",
        "4.1 KB",
        "82 GB",
        "100,000 GB",
    ]


@pytest.mark.parametrize(
    "word", ["data/shop", "graph.py#orders", "s3://b/q#g.p", "my shop#a", "a'b", "$HOME", "#x", "", "a;b"]
)
def test_a_quoted_word_is_one_word_of_a_shell(word: str) -> None:
    assert shlex.split(f"cues status {quoted(word)}") == ["cues", "status", word]


def unquoted(tree: ast.AST) -> Iterator[int]:
    """The lines of values in commands that are not quoted."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr):
            continue
        before = ""
        for part in node.values:
            if isinstance(part, ast.Constant):
                before += str(part.value)
            elif isinstance(part, ast.FormattedValue):
                value = part.value
                by = value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""
                if (_COMMAND.search(before) or before == " --store ") and by != "quoted":
                    yield part.lineno
                before += "X"


@pytest.mark.interpreted
def test_each_value_in_a_command_is_quoted() -> None:
    """A path with a space, copied from a hint, would name another store."""
    root = Path(cues.__file__).parent
    found = [
        f"{path.relative_to(root)}:{line}"
        for path in sorted([*root.rglob("*.py"), *(root.parent / "processors").glob("*.py")])
        for line in unquoted(ast.parse(path.read_text()))
    ]
    assert not found


_NO_ACTION = {"a", "an", "the", "this", "these", "that", "its", "it", "they", "there", "no", "above"}
"""First words of a text that says a cause or a wish."""
_NAMES = ("hint", "advice")


def hints(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The line and the beginning of each text after ``Try:``: of errors, and of names and arguments for it."""
    for node in ast.walk(tree):
        given: list[ast.expr | None] = []
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            is_error = isinstance(kind := getattr(errors, name, None), type) and issubclass(kind, BaseException)
            given = [*(node.args[1:2] if is_error else ()), *(k.value for k in node.keywords if k.arg in _NAMES)]
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named = {each.id for each in targets if isinstance(each, ast.Name)}
            if named & {*_NAMES}:
                given = [node.value]
            elif "_ADVICE" in named:
                given = [row.elts[1] for row in getattr(node.value, "elts", []) if isinstance(row, ast.Tuple)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and "Try: " in node.value:
            yield node.lineno, node.value.rpartition("Try: ")[2]
        while given:
            text = given.pop()
            if isinstance(text, ast.IfExp):
                given += [text.body, text.orelse]
            elif isinstance(text, ast.BinOp):
                given.append(text.left)
            elif isinstance(text, ast.JoinedStr) and text.values:
                given.append(text.values[0])
            elif isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield text.lineno, text.value


@pytest.mark.interpreted
def test_each_hint_begins_with_an_action() -> None:
    """``Try: a worker process ended…`` says what happened; a reader looks there for what to do."""
    root = Path(cues.__file__).parent
    checked = [
        (f"{path.relative_to(root.parent)}:{line}", text.split()[0].lower())
        for path in sorted([*root.rglob("*.py"), *(root.parent / "processors").glob("*.py")])
        for line, text in hints(ast.parse(path.read_text()))
        if text.strip()
    ]
    assert len(checked) > 900
    assert [where for where, word in checked if word in _NO_ACTION] == []
