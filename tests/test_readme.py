"""The README: its Python blocks run and print what they say; its commands are those that CI runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.S)


def test_every_python_block_runs_and_prints_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUES_STORE", raising=False)
    names: dict[str, object] = {"__name__": "readme"}
    for block in blocks("python"):
        exec(compile(block, "README.md", "exec"), names)
        printed = capsys.readouterr().out.splitlines()
        promised = re.findall(r"print\(.*\)\s+# (.*)", block)
        assert promised, "a block that shows no result"
        for line in promised:
            assert line in printed


def test_a_quick_start_has_at_most_ten_statements() -> None:
    import ast

    body = ast.parse(blocks("python")[0]).body
    assert sum(len(getattr(node, "body", [])) or 1 for node in body) <= 10


def test_the_test_command_is_the_one_that_ci_runs() -> None:
    line = next(b.strip() for b in blocks("sh") if "pytest" in b)
    assert line in (ROOT / ".ci" / "run").read_text()


def test_every_linked_page_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target


def test_commands_of_the_readme_exist() -> None:
    from cues.cli.app import COMMANDS

    for block in blocks("sh"):
        for name in re.findall(r"^cues (\w+)", block, re.M):
            assert name in COMMANDS, name
