"""docs/processors.md: its table is made from docstrings (``python tests/test_processors_docs.py``), its block runs.

Processors are found by entry points, ours and those of others.
"""

from __future__ import annotations

import importlib
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pages import run_page

from cues import processors

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "processors.md"
MARK = "<!-- table: python tests/test_processors_docs.py -->\n"


def declared() -> dict[str, str]:
    """The entry points of this distribution."""
    points: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][
        processors.GROUP
    ]
    return points


def loaded(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)


def table() -> str:
    lines = ["| processor | kind | needs | guarantee | mechanism | options |", "|---|---|---|---|---|---|"]
    for place in declared().values():
        module, _, name = place.partition(":")
        facts = processors.facts_of(loaded(place))
        cells = " | ".join(facts[fact] for fact in processors.FACTS)
        link = f"[`{module.rpartition('.')[2]}.{name}`](reference/{module}.md#{name.lower()})"
        lines.append(f"| {link} | {cells} | {options_of(loaded(place))} |")
    return "\n".join(lines) + "\n" + LEGEND


def options_of(processor: Any) -> str:
    """The options that a processor takes, besides those that every one does."""
    takes = getattr(processor, "takes", None)
    if takes is None:
        return "those of your function"
    base, name = (processors.ANY, "all") if takes is processors.SOURCE else (processors.READING, "reading")
    own = [option for option, value in takes.items() if option not in base and value is ...]
    return ", ".join([name, *(f"`{option}`" for option in own if option != "checkpoint")])


LEGEND = (
    "\nOptions: *all* and *reading* are those with this word in the column *ready-made* of"
    " [options.md](options.md#processors). *Reading* includes *all*. A declaration refuses any other option.\n"
)


def page() -> str:
    return re.sub(
        rf"{re.escape(MARK)}(\n\|.*?\n)?(\nOptions: .*?\n)?\n(?!\||Options)",
        lambda _: f"{MARK}\n{table()}\n",
        PAGE.read_text(),
        flags=re.S,
    )


def test_the_table_is_made_from_the_docstrings() -> None:
    assert table() in PAGE.read_text(), "run: python tests/test_processors_docs.py"


@pytest.mark.parametrize("place", declared().values())
def test_every_processor_says_its_facts(place: str) -> None:
    assert all(processors.facts_of(loaded(place)).values())


def test_the_block_of_the_page_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_page(PAGE, tmp_path, monkeypatch, capsys) > 0


def test_a_processor_of_another_distribution_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "others-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cues.processors]\nothers-source = others_module:numbers\n")
    (tmp_path / "others_module.py").write_text(
        'def numbers(position):\n    """Yield numbers.\n\n    Kind: source\n    Needs: nothing\n    """\n'
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = processors.available()["others-source"].load()
    assert processors.facts_of(found) == {"Kind": "source", "Needs": "nothing", "Guarantee": "", "Mechanism": ""}


if __name__ == "__main__":
    PAGE.write_text(page())
    sys.stdout.write(f"{PAGE} written\n")
