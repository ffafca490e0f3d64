"""The incidents of docs/how-to/incidents.md, each from start to end, by the commands and the files of that page.

Blocks of Python are files, named in their first line. Lines of a console that begin with ``$`` are run, in a process of
their own; the lines below one must be in its output, and ``…`` stands for any text. A full disk, and a machine that is
lost, are in test_incidents_storage.py.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import cues

pytestmark = pytest.mark.slow

PAGE = Path(__file__).parent.parent / "docs" / "how-to" / "incidents.md"
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.MULTILINE | re.DOTALL))
TABLES = {"run", "status", "errors", "redrive", "discard", "resume", "replay"}
"""The commands that print tables on a terminal, as the page has them, and JSON in a pipe."""
RESULTS = {
    "A message that the function cannot handle": ("bank", "transfers", "booked", {4}),
    "Many failed messages after a deploy": ("shop", "orders", "priced", {2}),
    "A message that kills its worker": ("album", "images", "scaled", set()),
    "A wrong deploy": ("sales", "sold", "totals", set()),
    "A renamed function": ("visits", "seen", "counted", set()),
}
"""The store, the queues that go in and out, and the messages that were left out or discarded, by index."""


def run(folder: Path, line: str) -> str:
    """Run a line of a console; return all that it printed."""
    text, _, comment = line.partition("  # ")
    words = shlex.split(text)
    if words[0] == "cues":
        table = ["--table"] if words[1] in TABLES else []
        words = [sys.executable, "-m", *words, *table]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    code = int(comment.removeprefix("exit code ")) if comment else 0
    assert done.returncode == code, f"$ {line}: {done.returncode}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def play(folder: Path, section: str) -> None:
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
        if language == "python":
            name = block.partition("\n")[0].removeprefix("# ")
            (folder / name).write_text(block)
            continue
        assert language == "console"
        for command in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, *expected = command.rstrip().splitlines()
            printed = run(folder, line)
            if line.startswith("cues tail"):
                assert printed.splitlines() == expected, f"$ {line}\n{printed}"
            for shown in expected:
                pattern = ".*".join(map(re.escape, shown.split("…")))
                assert re.search(pattern, printed), f"$ {line}\n{printed}\nhas not: {shown}"


def test_the_page_has_these_incidents() -> None:
    assert list(SECTIONS) == list(RESULTS)


@pytest.mark.parametrize("title", RESULTS)
def test_an_incident_is_resolved_by_its_commands_and_nothing_is_lost(title: str, tmp_path: Path) -> None:
    play(tmp_path, SECTIONS[title])
    graph, source, output, left_out = RESULTS[title]
    with cues.open(tmp_path / "data" / graph) as store:
        assert not store.check()
        taken = [message for n, message in enumerate(store.queue(source).tailer(), 1) if n not in left_out]
        written = list(store.queue(output).tailer())
        assert len(written) == len(taken)
        if all("id" in message for message in taken):
            assert sorted(message["id"] for message in written) == sorted(message["id"] for message in taken)
        if output == "totals":
            sums = {item: sum(m["count"] for m in taken if m["item"] == item) for item in ("tea", "rum")}
            assert {message["item"]: message["sum"] for message in written} == sums
    printed = run(tmp_path, f"cues status {graph}.py").lower()
    assert "paused" not in printed and "orphan" not in printed
    lines = run(tmp_path, f"cues errors {graph}.py --json").splitlines() if graph != "bank" else []
    assert [json.loads(line) for line in lines if line.startswith("{")] == []
