"""Every command and option is documented in docs/cli.md, and its examples are command lines that parse."""

from __future__ import annotations

import itertools
import re
import shlex
from pathlib import Path

import click
import pytest

from cues.cli.app import COMMANDS, load
from cues.cli.app import commands as group

PAGE = Path(__file__).parent.parent / "docs" / "cli.md"
SECTIONS = {
    found[1]: found[2] for found in re.finditer(r"^## cues (\w+)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
}


def command(name: str) -> click.Command:
    return load(name)


def test_there_is_a_section_for_each_command_in_its_order() -> None:
    assert list(SECTIONS) == list(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_of_a_command_is_on_the_page(name: str) -> None:
    everywhere = {"--json", "--table", "--store", "--yes"}
    for parameter in command(name).params:
        if isinstance(parameter, click.Option):
            long = next(option for option in parameter.opts if option.startswith("--"))
            short = [option for option in parameter.opts if not option.startswith("--")]
            text = PAGE.read_text() if long in everywhere else SECTIONS[name]
            assert any(f"{option}`" in text or f"{option} " in text for option in (long, *short)), f"{name} {long}"


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "completion"])  # prints a script
def test_every_command_has_the_same_output_options(name: str) -> None:
    options = {option for parameter in command(name).params for option in parameter.opts}
    assert "--store" in options or name in ("show", "init", "config")
    # tail prints messages, which are JSON whatever stdout is; metrics prints the format of Prometheus.
    assert {"--json", "--table"} <= options or name in ("tail", "metrics")


def examples() -> list[str]:
    blocks = "\n".join(re.findall(r"^```\n(.*?)^```", PAGE.read_text(), re.M | re.S))
    helps = "\n".join(command(name).help or "" for name in COMMANDS)
    return sorted({line.strip() for line in (blocks + "\n" + helps).splitlines() if line.strip().startswith("cues ")})


@pytest.mark.parametrize("line", examples())
def test_every_example_parses(line: str) -> None:
    _, name, *words = shlex.split(re.split("  +", line)[0])
    arguments = list(itertools.takewhile(lambda word: word not in ("|", "<", ">", ">>"), words))
    found = group.get_command(click.Context(group), name)
    assert found is not None
    found.make_context(name, arguments)
