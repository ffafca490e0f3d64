"""The pages of the reference, as docs/make_reference.py makes them from the code, hold every public name."""

from __future__ import annotations

import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

DOCS = Path(__file__).parent.parent / "docs"


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_reference", DOCS / "make_reference.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATOR = generator()


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return GENERATOR.pages()  # type: ignore[no-any-return]


@pytest.mark.interpreted
def test_the_command_writes_each_page_as_a_file(pages: dict[str, str], tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(DOCS / "make_reference.py"), str(tmp_path)], check=True, timeout=60)
    written = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert written == pages
    assert written.keys() == {"index.md", *(f"{name}.md" for name in GENERATOR.MODULES)}


@pytest.mark.interpreted
def test_every_link_of_the_docs_into_the_reference_has_a_page_and_a_heading(pages: dict[str, str]) -> None:
    links = [
        (page.name, name, heading)
        for page in sorted(DOCS.rglob("*.md"))
        for name, heading in re.findall(r"\]\((?:\.\./)?reference/([\w.]+)(?:#([\w-]+))?\)", page.read_text("utf-8"))
    ]
    assert len(links) > 30
    for page, name, heading in links:
        assert name in pages, f"{page}: reference/{name}"
        if heading:
            headings = [text.lower() for text in re.findall(r"^#+ (.*)$", pages[name], re.M)]
            assert heading in headings, f"{page}: reference/{name}#{heading}"


@pytest.mark.parametrize("name", GENERATOR.MODULES)
@pytest.mark.interpreted
def test_every_public_name_has_a_section(pages: dict[str, str], name: str) -> None:
    module = importlib.import_module(name)
    headings = set(re.findall(r"^## (\w+)$", pages[f"{name}.md"], re.M))
    for public in GENERATOR.public_names(module):
        value = getattr(module, public)
        if name == "cues" and (isinstance(value, ModuleType) or getattr(value, "__module__", "") == "cues.errors"):
            assert f"cues.{public}" in GENERATOR.MODULES or f"`{public}`" in pages["cues.md"], public
        else:
            assert public in headings, public


@pytest.mark.interpreted
def test_no_page_shows_an_address_of_memory(pages: dict[str, str]) -> None:
    for name, text in pages.items():
        assert " at 0x" not in text, name
