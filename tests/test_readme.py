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
    """Each block unchanged: in a directory of its own, with no name but its own imports."""
    monkeypatch.delenv("CUES_STORE", raising=False)
    for number, block in enumerate(blocks("python")):
        directory = tmp_path / str(number)
        directory.mkdir()
        monkeypatch.chdir(directory)
        exec(compile(block, "README.md", "exec"), {"__name__": "__main__"})
        printed = capsys.readouterr().out.splitlines()
        promised = re.findall(r"print\(.*\)\s+# (.*)", block)
        assert promised, "a block that shows no result"
        for line in promised:
            assert line in printed


def test_the_quick_start_is_shown_and_sent_to_without_starting_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cues.cli.app import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CUES_STORE", raising=False)
    Path("shop.py").write_text(blocks("python")[0])
    assert run(["show", "shop.py"]) == 0 and "orders" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["shop.py"]
    assert run(["send", "shop.py#orders", "count=3", "price=4"]) == 0
    assert run(["run", "shop.py", "--idle-exit", "0"]) == 0
    capsys.readouterr()
    assert run(["tail", "shop.py#priced"]) == 0
    assert capsys.readouterr().out == '{"count": 3, "price": 4, "total": 12}\n'


def test_the_readme_is_short() -> None:
    assert len(README.encode()) <= 7000


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
