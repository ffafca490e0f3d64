"""The pages of docs: their blocks run, in order, as a reader would run them; their paths and links exist."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pages import run_page

from cues.queues.options import QUEUE_TEXTS

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
LEARNING = [
    *(DOCS / name for name in ("tutorial.md", "concepts.md", "which.md")),
    *sorted((DOCS / "how-to").glob("*.md")),
]
ALL = sorted(DOCS.rglob("*.md"))


@pytest.mark.parametrize("page", LEARNING, ids=lambda page: page.stem)
def test_every_block_of_a_page_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "checkpoints import SQLCheckpoint" in page.read_text():
        pytest.importorskip("sqlalchemy")
    for extra, package in (("metrics", "prometheus_client"), ("watch", "rich"), ("time", "cronsim")):
        if f"cues-streams[{extra}]" in page.read_text():
            pytest.importorskip(package)
    assert run_page(page, tmp_path, monkeypatch, capsys) > 0


def test_the_tutorial_has_ten_steps() -> None:
    steps = re.findall(r"^## (\d+)\. ", (DOCS / "tutorial.md").read_text(), re.M)
    assert steps == [str(number) for number in range(1, 11)]


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.stem)
def test_every_file_that_a_page_names_exists(page: Path) -> None:
    """A path with a folder exists under the repository, ``cues/``, ``tests/`` or ``docs/``; links exist too."""
    for named in set(re.findall(r"`((?:\.\./)?[\w./-]+/\w+\.py)(?::\w+)?`", page.read_text())):
        path = named.removeprefix("../")
        assert any((place / path).exists() for place in (ROOT, ROOT / "cues", ROOT / "tests", DOCS)), named
    for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "reference/" not in target:  # made from the code: tests/test_reference.py
            assert (page.parent / target).exists(), target


def test_the_first_line_of_each_module_says_what_it_holds() -> None:
    """One whole sentence or noun phrase; together these lines are the map of the code."""
    for folder in ("cues", "processors"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            line = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
            assert line.endswith(".") and 20 < len(line) <= 120, f"{path}: {line!r}"
            assert line.split()[0] not in ("What", "Who", "Whose", "How", "Where"), f"{path}: {line!r}"


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.stem)
def test_no_heading_begins_with_a_question_word(page: Path) -> None:
    """A heading is a noun phrase, an instruction or a question."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    assert not re.findall(r"^#+ (?:What|Who|Whose|How|Where|Which|Why)\b[^?\n]*$", text, re.M)


def test_every_page_of_the_docs_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for page in sorted(DOCS.rglob("*.md")):
        assert f" {page.relative_to(DOCS).as_posix()}\n" in navigation, page.name


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec("mkdocs") or not importlib.util.find_spec("material"),
    reason="mkdocs-material is not installed: pip install -e '.[docs]'",
)
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert built.returncode == 0, built.stdout + built.stderr
    for page in ("tutorial", "reference", "reference/cues"):
        assert (tmp_path / "site" / page / "index.html").exists(), page


def test_the_first_page_of_spark_is_one_screen() -> None:
    assert len((DOCS / "spark.md").read_text().splitlines()) <= 60


def test_the_page_of_spark_names_each_option_of_queues_that_spark_refuses() -> None:
    """A reader finds in one list what the checks of a start refuse."""
    pytest.importorskip("pyspark")
    from cues.spark.cluster import engine

    page = (DOCS / "spark.md").read_text()
    named = set(re.findall(r"(\w+)=", inspect.getsource(engine.check))) & {*QUEUE_TEXTS}
    assert len(named) > 2
    assert [name for name in sorted(named) if f"`{name}=" not in page] == []
