"""Run the blocks of a page of Markdown in order, in one directory, as a reader would do it.

    ```python            a program of its own; ``print(…)  # text`` promises that ``text`` is printed
    # file.py            the block is the file ``file.py``; likewise a ```toml block with ``# file.toml``
    # file.py: add       the block is added to the end of the file
    # file.py: replace L the block replaces the line L of the file
    ```sh                each line that begins with ``cues`` is a command (``# exit code 1`` promises that code)
    ```text              lines that the last command printed

Blocks without a language are shown, not run.
"""

from __future__ import annotations

import functools
import gc
import importlib
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

import cues

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.M | re.S)
HEADER = re.compile(r"# (\w+\.(?:py|toml))(?:: (add|replace (.*)))?\n")


@functools.cache
def names_of_tests() -> set[str]:
    """The names of all tests, for pages that name some."""
    texts = [path.read_text() for path in Path(__file__).parent.glob("*.py")]
    return {name for text in texts for name in re.findall(r"def (test_\w+)\(", text)}


def run_page(page: Path, directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> int:
    """Run a page; returns how many blocks it ran."""
    monkeypatch.delenv("CUES_STORE", raising=False)
    monkeypatch.chdir(directory)
    ran = 0
    printed = ""
    capsys.readouterr()
    for language, block in BLOCK.findall(page.read_text()):
        header = HEADER.match(block)
        if language in ("python", "toml") and header:
            _write(Path(header[1]), block[header.end() :], header[2] or "", header[3] or "")
        elif language == "python":
            exec(compile(block, str(page), "exec"), {"__name__": "__main__"})
            printed = capsys.readouterr().out
            for promised in re.findall(r"print\(.*\)\s+# (.*)", block):
                assert promised in printed.splitlines(), f"{page.name}: {promised!r} is not in {printed!r}"
        elif language == "sh":
            printed = _commands(block, page, capsys)
        elif language == "text":
            for line in block.splitlines():
                assert line in printed, f"{page.name}: {line!r} is not in {printed!r}"
        ran += language in ("python", "sh", "text")
    _close_stores(directory)
    return ran


def _close_stores(directory: Path) -> None:
    """Close the stores that examples keep open for the life of their process, such as those of web servers."""
    for thing in gc.get_objects():
        if type(thing) is not cues.Store or not hasattr(
            thing, "core"
        ):  # an error of another test may hold half a store
            continue
        if not thing.closed and directory in Path(thing.path).resolve().parents:
            thing.close()


def _write(path: Path, text: str, how: str, line: str) -> None:
    if how == "add":
        text = path.read_text() + "\n\n" + text
    elif how:
        before = path.read_text()
        assert before.count(line) == 1, line
        text = before.replace(line, text.rstrip("\n"))
    path.write_text(text)


def _commands(block: str, page: Path, capsys: pytest.CaptureFixture[str]) -> str:
    from cues.cli.app import run

    printed = ""
    for line in block.splitlines():
        words = shlex.split(line, comments=False)
        if words[:1] != ["cues"]:
            continue
        code = re.search(r"# exit code (\d+)", line)
        command = shlex.split(re.split(r"\s+# ", line)[0])[1:]
        for name, module in list(sys.modules.items()):  # the file may have changed since the last command
            if str(getattr(module, "__file__", None) or "").startswith(f"{Path.cwd()}{os.sep}"):
                del sys.modules[name]
        importlib.invalidate_caches()
        got = run(command)
        output = capsys.readouterr()
        assert got == int(code[1] if code else 0), f"{page.name}: {line} ended with {got}: {output.err}"
        printed = output.out
    return printed
