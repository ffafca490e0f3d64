"""``cues config``: the settings of the commands, and where each comes from."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import click

from cues.base.texts import quoted
from cues.cli import settings
from cues.cli.options import WrongUsage, command, note, option
from cues.cli.output import CommandOutput, TableColumn, output_options

_COLUMNS: Final = (
    TableColumn("command", "command"),
    TableColumn("setting", "setting"),
    TableColumn("value", "value"),
    TableColumn("from", "from"),
    TableColumn("variable", "variable"),
)


@command()
@click.argument("of", metavar="[COMMAND]", required=False)
@click.argument("graph", metavar="[GRAPH]", required=False)
@option("--all", "everything", is_flag=True, help="Also the settings of all commands that have their default.")
@output_options
def config(of: str | None, graph: str | None, everything: bool, output: CommandOutput) -> None:
    """Print the settings of a command, and where each comes from.

    A value on the command line comes before the variable, the variable before the file, and the file before the
    default. The file is cues.toml, or pyproject.toml with [tool.cues]: in the directory of the graph file, in one of
    its parents up to the root of the repository, or likewise from the working directory.

    \b
      cues config                    what is set, for all commands
      cues config run                every option of cues run
      cues config run graph.py       the same, with the file that is nearest to graph.py
      cues config --all --json

    A file with an unknown key or a wrong value ends with exit code 2, and the error names file, line and key. A
    variable that no option has is named on stderr.
    """
    from cues.cli.app import COMMANDS, load

    if of is not None and graph is None and of.partition(":")[0].endswith(".py"):
        of, graph = None, of
    if of is not None and of not in COMMANDS:
        near = difflib.get_close_matches(of, COMMANDS, 1)
        raise WrongUsage(f"There is no command {of!r}.", f"cues config {quoted(near[0])}" if near else "cues --help")
    given = click.get_current_context().find_root().meta[settings.__name__]
    file: settings.SettingsFile | None = given.file
    shown: list[dict[str, Any]] = []
    variables: set[str] = set()
    for name in COMMANDS:
        parameters = load(name).params
        known = settings.options_of(parameters)
        variables |= {settings.variable_of(name, each) for each in known.values()}
        values = file.options(name, parameters) if file is not None else {}  # checks every table
        if of in (None, name):
            shown += _of_command(name, known, values, file)
    shared = list(_shared(file.shared(COMMANDS) if file else {}, file, given.variables))
    rows = [row for row in (*shared, *shown) if everything or of is not None or row["origin"] != "default"]
    output.rows(rows, _COLUMNS)
    if not output.json and not rows:
        note("Nothing is set: every option has its default. cues config --all prints them.")
    for variable in sorted(os.environ):
        words = variable.split("_")
        if (
            words[0] == settings.PREFIX
            and len(words) > 2
            and words[1].lower() in COMMANDS
            and variable not in variables
        ):
            if variable == "CUES_UI_TOKEN":
                continue
            near = difflib.get_close_matches(variable, variables, 1)
            note(f"{variable} is not the variable of an option{f'; did you mean {near[0]}?' if near else '.'}")


def _of_command(
    name: str, known: dict[str, click.Option], values: dict[str, Any], file: settings.SettingsFile | None
) -> Iterator[dict[str, Any]]:
    for key, each in known.items():
        if key in settings.SHARED or isinstance(each.envvar, str):
            continue
        variable = settings.variable_of(name, each)
        if os.environ.get(variable):
            yield _row(name, key, os.environ[variable], "variable", variable)
        elif file is not None and each.name in values:
            yield _row(name, key, file.tables[name][key], "file", variable, file, (name, key))
        else:
            default = each.default if isinstance(each.default, (bool, int, float, str)) else None
            yield _row(name, key, default, "default", variable)


def _shared(
    values: dict[str, str], file: settings.SettingsFile | None, set_before: frozenset[str]
) -> Iterator[dict[str, Any]]:
    for key in (*settings.SHARED, "yes"):
        variable = f"{settings.PREFIX}_{key.upper()}"
        if variable in set_before:
            yield _row("", key, os.environ[variable], "variable", variable)
        elif file is not None and key in values:
            yield _row("", key, values[key], "file", variable, file, (key,))
        else:
            yield _row("", key, False if key == "yes" else None, "default", variable)


def _row(
    name: str,
    key: str,
    value: Any,
    origin: str,
    variable: str,
    file: settings.SettingsFile | None = None,
    keys: tuple[str, ...] = (),
) -> dict[str, Any]:
    if key in settings.SECRETS and value:
        value = "(set)"
    place = {"variable": variable, "default": "default"}.get(origin) or (file.place(*keys) if file else "")
    row = {"command": name or None, "setting": key, "value": value, "from": place, "origin": origin}
    row["variable"] = variable
    if file is not None:
        row |= {"file": str(Path(file.path)), "line": file.lines.get((*file.prefix, *keys))}
    return row
