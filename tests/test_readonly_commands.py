"""All commands over a store whose files and directory may not be written: those that look work, the others refuse.

The table has each command of ``cues``, so a new one must be declared here. The commands run in one process, which as
root gives up the right to write files whose modes forbid it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cues
from cues import testing
from cues.cli.app import COMMANDS

GRAPH = """
import cues
graph = cues.Graph("g", store={store!r}, errors="errors")
graph.source("a")

@graph.stream("a", "b")
def double(message):
    return {{"n": 2 * message["n"]}}

@graph.sink("b")
def look(message):
    pass
"""

LOOKS: dict[str, list[str]] = {
    "show": ["graph.py"],
    "status": ["STORE"],
    "metrics": ["STORE"],
    "top": ["STORE", "--once"],
    "history": ["STORE"],
    "queues": ["STORE"],
    "tail": ["STORE#b", "-n", "all"],
    "sql": ["graph.py", "select sum(n) from b"],
    "export": ["STORE#a", "a.jsonl"],
    "tries": ["STORE#g.double"],
    "errors": ["STORE"],
    "check": ["STORE"],
    "salvage": ["STORE", "salvaged"],
    "doctor": ["STORE"],
    "backup": ["STORE", "backups"],
    "restore": ["backups", "restored"],
    "follow": ["STORE", "copy", "--once"],
    "replay": ["graph.py", "--into", "replayed"],
    "init": ["project"],
    "deploy": ["systemd", "graph.py"],
    "config": [],
    "completion": ["bash"],
}
"""Commands that write nothing into the store. What they write is in a directory of the user."""

WRITES: dict[str, list[str]] = {
    "run": ["graph.py", "--idle-exit", "0"],
    "send": ["STORE#a", "n=1"],
    "import": ["STORE#a", "more.jsonl"],
    "close": ["graph.py"],
    "redrive": ["STORE", "--all", "--yes"],
    "discard": ["STORE", "--all", "--reason", "tried", "--yes"],
    "pause": ["STORE"],
    "resume": ["STORE"],
    "seek": ["STORE#g.double", "--to", "start", "--yes"],
    "forget": ["STORE#group:readers", "--yes"],
    "grow": ["STORE#a", "3", "--yes"],
    "purge": ["STORE#a", "--before", "2", "--yes"],
    "compact": ["STORE"],
}
ELSEWHERE = {
    "ui": "serves what status, tail and errors print, until Ctrl-C",
    "optimize": "takes a directory of cues run --queues",
    "vacuum": "takes a directory of cues run --queues",
}

CHILD = """
import contextlib, ctypes, io, json, os, sys
if os.geteuid() == 0:  # without CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH, root is a user like others
    header, sets, library = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)(), ctypes.CDLL(None)
    assert [library.prctl(24, 1), library.prctl(24, 2), library.capget(header, sets)] == [0, 0, 0]  # its children too
    sets[0] &= ~6
    sets[1] &= ~6
    assert library.capset(header, sets) == 0
try:
    open("../store/data.mdb", "r+b")
except PermissionError:
    pass
else:
    raise SystemExit("the modes of files have no effect here")
from cues.cli import app
found = {}
for name, words in json.load(sys.stdin).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = app.run([name, *words])
    found[name] = [code, out.getvalue(), err.getvalue()]
json.dump(found, sys.__stdout__)
"""


def test_every_command_is_in_the_table() -> None:
    assert sorted([*LOOKS, *WRITES, *ELSEWHERE]) == sorted(COMMANDS)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[dict[str, Any], list[bool]]]:
    """The exit code, the output and the errors of each command; and whether the store is as it was."""
    place = tmp_path_factory.mktemp("readonly")
    store, own = place / "store", place / "own"
    own.mkdir()
    (own / "graph.py").write_text(GRAPH.format(store=str(store)))
    (own / "more.jsonl").write_text('{"n": 5}\n')
    filled(store)
    before = contents(store)
    paths = [store, *store.rglob("*")]
    for path in paths:
        path.chmod(0o555 if path.is_dir() else 0o444)
    try:
        lines = {
            name: [word.replace("STORE", str(store)) for word in words] for name, words in {**LOOKS, **WRITES}.items()
        }
        child = subprocess.run(
            [sys.executable, "-c", CHILD], input=json.dumps(lines), cwd=own, capture_output=True, text=True, check=False
        )
        assert child.returncode == 0, child.stderr
        yield json.loads(child.stdout), [contents(store) == before, (own / "a.jsonl").exists()]
    finally:
        for path in paths:
            path.chmod(0o700 if path.is_dir() else 0o600)


def filled(path: Path) -> None:
    def double(message: dict[str, Any]) -> dict[str, Any]:
        return {"n": 2 * message["n"]}

    graph = cues.Graph("g", errors="errors")
    graph.source("a")
    graph.stream("a", "b")(double)
    graph.sink("b", id="look")(lambda message: None)
    with cues.open(path) as store:
        store.queue("a").appender().write_many([{"n": 1}, {"n": 2}, {"bad": 3}])
        testing.run_until_idle(graph, store)


def contents(path: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOKS)
def test_a_command_that_looks_works(name: str, results: Any) -> None:
    code, out, err = results[0][name]
    assert code == 0 and "Traceback" not in err, (out, err)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITES)
def test_a_command_that_writes_refuses(name: str, results: Any) -> None:
    code, out, err = results[0][name]
    assert code == 1 and "Traceback" not in err and "Try: " in err, (code, out, err)
    assert "its files are read-only" in err and "give this user permission" in err


@pytest.mark.slow
def test_the_store_is_as_it_was(results: Any) -> None:
    found, checks = results
    assert all(checks) and "6" in found["sql"][1]
