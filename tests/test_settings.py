"""Settings of commands: cues.toml, pyproject.toml and variables, which comes first, and what cues config says."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from cues.cli import settings
from cues.cli.app import COMMANDS, load
from cues.cli.app import run as cli

pytestmark = pytest.mark.slow  # cues config imports every command

GRAPH = """
import cues
graph = cues.Graph("shop", durability="process")
graph.source("orders")

@graph.stream("orders", "priced")
def price(order):
    return order
"""


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("CUES_"):
            monkeypatch.delenv(name)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a directory inside, which is the working directory."""
    (tmp_path / "project" / ".git").mkdir(parents=True)
    (tmp_path / "project" / "inside").mkdir()
    monkeypatch.chdir(tmp_path / "project" / "inside")
    return tmp_path / "project"


def rows(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[tuple[str | None, str], dict[str, Any]]:
    capsys.readouterr()
    code = cli(["config", *arguments, "--json"])
    out, err = capsys.readouterr()
    assert code == 0, err
    return {(row["command"], row["setting"]): row for row in map(json.loads, out.splitlines())}


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert cli(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "\nTry: " in err
    return err


def test_each_setting_is_shown_with_its_place(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "cues.toml").write_text(
        '# ours\nstore = "data/x"\n\n[run]\nidle-exit = 2.5\nmetrics = 9464\nui = true\n\n[redrive]\nindex = [3, 4]\n'
    )
    monkeypatch.setenv("CUES_RUN_METRICS", "9465")
    shown = rows(capsys)
    file = str(project / "cues.toml")
    assert set(shown) == {
        (None, "store"), ("run", "idle-exit"), ("run", "metrics"), ("run", "ui"), ("redrive", "index"),
    }  # fmt: skip
    assert shown[None, "store"]["value"] == str(project / "data/x")
    assert shown[None, "store"]["line"] == 2
    assert shown["run", "idle-exit"] == {
        "command": "run", "setting": "idle-exit", "value": 2.5, "from": f"{file}:5 [run]", "origin": "file",
        "variable": "CUES_RUN_IDLE_EXIT", "file": file, "line": 5,
    }  # fmt: skip
    assert shown["run", "metrics"]["origin"] == "variable"
    assert shown["run", "metrics"]["value"] == "9465"
    everything = rows(capsys, "run")
    assert everything["run", "engine"]["value"] == "embedded"
    assert everything["run", "engine"]["origin"] == "default"
    assert ("tail", "count") not in everything
    assert ("tail", "count") in rows(capsys, "--all")
    assert "CUES_STORE" not in os.environ  # set for the command only


def test_the_command_line_comes_before_variables_these_before_the_file_and_the_file_before_the_default(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    assert cli(["send", "data/shop#orders", "--create", *(json.dumps({"n": n}) for n in range(30))]) == 0

    def printed(*options: str) -> int:
        capsys.readouterr()
        assert cli(["tail", "data/shop#orders", *options]) == 0
        return len(capsys.readouterr().out.splitlines())

    assert printed() == 10
    (project / "cues.toml").write_text("[tail]\ncount = 3\n")
    assert printed() == 3
    monkeypatch.setenv("CUES_TAIL_COUNT", "4")
    assert printed() == 4
    assert printed("--count", "5") == 5
    (project / "cues.toml").unlink()
    assert printed() == 4


def test_the_store_of_the_file_is_used_as_that_of_the_variable(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From any directory of the repository; the variable and --store come before it."""
    store = project / "stores" / "one"
    assert cli(["send", f"{store}#orders", "--create", '{"n": 1}']) == 0
    assert cli(["send", f"{project}/other#orders", "--create", '{"n": 2}']) == 0
    capsys.readouterr()
    (project / "cues.toml").write_text('store = "stores/one"\noutput = "json"\n')
    for variable, expected in (("", 1), (str(project / "other"), 2)):
        monkeypatch.setenv("CUES_STORE", variable)
        assert cli(["tail", "#orders"]) == 0
        assert json.loads(capsys.readouterr().out) == {"n": expected}
    monkeypatch.delenv("CUES_STORE")
    (project / "shop.py").write_text(GRAPH)
    for options, expected in (([], 1), (["--store", str(project / "other")], 2)):
        assert cli(["tail", f"{project}/shop.py#orders", *options]) == 0
        assert json.loads(capsys.readouterr().out) == {"n": expected}


def test_the_nearest_file_is_read_first_that_of_the_graph_and_none_above_the_repository(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def count(*arguments: str) -> Any:
        return rows(capsys, "tail", *arguments)["tail", "count"]["value"]

    (project.parent / "cues.toml").write_text("[tail]\ncount = 1\n")
    default = count()
    assert default not in (1, 2, 3, 4)
    (project / "pyproject.toml").write_text("[project]\nname = 'x'\n[tool.cues.compile]\nany = [1]\n")
    assert count() == default
    (project / "pyproject.toml").write_text("[tool.cues.compile]\nany = [1]\n[tool.cues.tail]\ncount = 2\n")
    assert count() == 2
    assert rows(capsys, "tail")["tail", "count"]["from"].endswith("pyproject.toml:4 [tool.cues.tail]")
    (project / "cues.toml").write_text("[tail]\ncount = 3\n")
    assert count() == 3
    graphs = project.parent / "elsewhere"
    graphs.mkdir()
    (graphs / "shop.py").write_text(GRAPH)
    assert count(str(graphs / "shop.py")) == 3
    (graphs / "cues.toml").write_text("tail.count = 4\n")
    assert count(str(graphs / "shop.py")) == 4
    assert rows(capsys, "tail", str(graphs / "shop.py"))["tail", "count"]["line"] == 1
    monkeypatch.chdir(graphs)
    (graphs / "cues.toml").unlink()
    assert count() == default  # the parent has a file, but there is no repository


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a file one of another user: as root by its owner, else by who we are."""
    if os.geteuid() == 0:
        os.chown(path, 65_534, 65_534)
    else:
        monkeypatch.setattr("os.geteuid", lambda: 65_533)


UNTRUSTED = {
    "its owner": (lambda path, patch: give_away(path / "cues.toml", patch), "cues.toml belongs to"),
    "the owner of its directory": (lambda path, patch: give_away(path, patch), "belongs to"),
    "anybody": (lambda path, patch: (path / "cues.toml").chmod(0o646), "anybody may write to"),
    "a sticky directory": (lambda path, patch: path.chmod(0o1777), "anybody may write to"),
    "a group": (lambda path, patch: (os.chown(path, -1, foreign_group()), path.chmod(0o775)), "the group"),
    "the target of a link": (lambda path, patch: give_away(linked(path), patch), "belongs to"),
}


def foreign_group() -> int:
    own = {0, os.getegid()}
    return 65_534 if os.geteuid() == 0 else next((group for group in os.getgroups() if group not in own), -1)


def linked(path: Path) -> Path:
    target = path.parent / "target.toml"
    (path / "cues.toml").rename(target)
    (path / "cues.toml").symlink_to(target)
    return target


@pytest.mark.parametrize("case", UNTRUSTED)
def test_a_file_that_others_may_have_made_is_refused_unless_its_directory_is_named(
    case: str, project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "cues.toml").write_text("[tail]\ncount = 3\n")
    assert rows(capsys, "tail")["tail", "count"]["value"] == 3
    change, words = UNTRUSTED[case]
    if case == "a group" and foreign_group() == -1:
        pytest.skip("this user is in no other group")
    change(project, monkeypatch)
    assert cli(["config"]) == 2
    said = capsys.readouterr().err
    assert words in said and "cues.toml are not used" in said and "CUES_TRUST=" in said
    monkeypatch.setenv("CUES_TRUST", f"/nowhere:{project}")
    assert rows(capsys, "tail")["tail", "count"]["value"] == 3


def test_a_repository_of_somebody_else_is_none(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project / "cues.toml").write_text("[tail]\ncount = 3\n")
    assert rows(capsys, "tail")["tail", "count"]["value"] == 3
    give_away(project / ".git", monkeypatch)
    assert rows(capsys, "tail")["tail", "count"]["value"] != 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[run]\nidle-exot = 3\n", ["cues.toml:2 [run]: idle-exot is not a setting", "Try: write idle-exit."]),
        ("[rum]\nx = 1\n", ["cues.toml:1", "no command 'rum'", "Try: write [run]."]),
        ("sotre = 'x'\n", ["cues.toml:1", "sotre is not a setting", "Try: write store."]),
        ("store = 3\n", ["cues.toml:1", "store is 3, and a text is expected"]),
        ("output = 'yaml'\n", ['"json" or "table" is expected']),
        ("[run]\nstore = 'x'\n", ["cues.toml:2", "a setting of all commands", "Try: write it at the top"]),
        ("[run]\nidle-exit = 'soon'\n", ['idle-exit is "soon", and a number from 0 is expected']),
        ("[run]\nidle-exit = -1\n", ["a number from 0 is expected"]),
        ("[run]\nidle-exit = true\n", ["idle-exit is true, and a number from 0 is expected"]),
        ("[run]\nquiet = 1\n", ["quiet is 1, and true or false is expected"]),
        ("[run]\nengine = 'flink'\n", ['one of "embedded", "spark" is expected']),
        ("[run]\nmetrics = [1]\n", ["metrics is [1], and a text ([HOST:]PORT) is expected"]),
        ("[run]\nfresh = true\n", ["fresh confirms, deletes or gives up", "give --fresh on the command line"]),
        ("yes = true\n", ["yes confirms, deletes or gives up"]),
        ("[redrive]\nindex = 3\n", ["index is 3, and a list of a whole number is expected"]),
        ("[ui]\nport = 1.5\n", ["port is 1.5, and a whole number from 0 to 65535 is expected"]),
        ("[run\n", ["cues.toml is not TOML", "line 1"]),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_place_and_what_to_write(
    project: Path, capsys: pytest.CaptureFixture[str], text: str, words: list[str]
) -> None:
    (project / "cues.toml").write_text(text)
    said = error(capsys, "config")
    for word in words:
        assert word in said


def test_a_command_checks_its_table_before_it_does_anything_and_no_other_table(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "cues.toml").write_text("[send]\ncreat = true\n")
    assert "write create" in error(capsys, "send", "new#orders", "--create", "{}")
    assert not Path("new").exists()
    (project / "cues.toml").write_text("[send]\ncreate = true\n[run]\nwrong = 1\n")
    assert cli(["send", "new#orders", "{}"]) == 0
    assert cli(["run", "--help"]) == 0  # help is always there


def test_a_wrong_or_unknown_variable_is_named(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUES_RUN_IDLE_EXIT", "soon")
    assert "CUES_RUN_IDLE_EXIT" in error(capsys, "run", "shop.py")
    monkeypatch.setenv("CUES_RUN_IDLE_EXTI", "3")
    monkeypatch.setenv("CUES_UI_TOKEN", "hidden")
    capsys.readouterr()
    assert cli(["config"]) == 0
    out, err = capsys.readouterr()
    assert err == "CUES_RUN_IDLE_EXTI is not the variable of an option; did you mean CUES_RUN_IDLE_EXIT?\n"
    assert "hidden" not in out


def test_every_option_has_a_name_in_a_file_and_its_variable_is_the_one_that_the_help_names() -> None:
    for name in COMMANDS:
        command = load(name)
        known = settings.options_of(command.params)
        text = command.get_help(_context(name))
        for key, option in known.items():
            if option.show_envvar:
                assert settings.variable_of(name, option) in text.replace("\n", ""), (name, key)
    known_once = {key for name in COMMANDS for key in settings.options_of(load(name).params)}
    assert known_once >= settings.ONCE, "an option in ONCE that no command has"


def _context(name: str) -> Any:
    import click

    from cues.cli.app import commands

    parent = click.Context(commands, info_name="cues", auto_envvar_prefix="CUES", terminal_width=400)
    return click.Context(load(name), info_name=name, parent=parent, max_content_width=400, terminal_width=400)
