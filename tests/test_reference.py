"""The reference pages are those that docs/make_reference.py writes from the code, and they hold every public name."""

from __future__ import annotations

import importlib
import importlib.util
import re
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
PAGES = GENERATOR.pages()


@pytest.mark.interpreted
def test_the_committed_pages_are_what_the_generator_writes() -> None:
    committed = {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md")}
    assert sorted(committed) == sorted(PAGES), "run: python docs/make_reference.py"
    stale = [name for name, text in PAGES.items() if committed[name] != text]
    assert not stale, f"{stale} differ from the code; run: python docs/make_reference.py"


@pytest.mark.parametrize("name", GENERATOR.MODULES)
@pytest.mark.interpreted
def test_every_public_name_has_a_section(name: str) -> None:
    module = importlib.import_module(name)
    headings = set(re.findall(r"^## (\w+)$", PAGES[f"{name}.md"], re.M))
    for public in GENERATOR.public_names(module):
        value = getattr(module, public)
        if name == "cues" and (isinstance(value, ModuleType) or getattr(value, "__module__", "") == "cues.errors"):
            assert f"cues.{public}" in GENERATOR.MODULES or f"`{public}`" in PAGES["cues.md"], public
        else:
            assert public in headings, public


@pytest.mark.interpreted
def test_every_command_and_every_option_of_it_is_on_the_page() -> None:
    from cues.cli.app import COMMANDS, load

    for name in COMMANDS:
        section = re.search(rf"^## cues {name}\n(.*?)(?=^## |\Z)", PAGES["commands.md"], re.M | re.S)
        assert section, name
        for parameter in load(name).params:
            if parameter.param_type_name == "option" and not getattr(parameter, "hidden", False):
                assert all(f"`{spelled}`" in section[1] for spelled in parameter.opts), f"{name} {parameter.opts}"


@pytest.mark.interpreted
def test_no_page_shows_an_address_of_memory() -> None:
    for name, text in PAGES.items():
        assert " at 0x" not in text, name
