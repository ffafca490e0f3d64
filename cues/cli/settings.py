"""Settings: the options of commands, from a file beside the graph or in the environment.

    cues.toml                           pyproject.toml
    store = "data/shop"                 [tool.cues]
    [run]                               store = "data/shop"
    idle-exit = 5                       [tool.cues.run]
                                        idle-exit = 5

1. The first of these directories that has a ``cues.toml``, or a ``pyproject.toml`` with ``[tool.cues]``, has the
   settings: that of the graph file, its parents up to the root of the repository, then the working directory and its
   parents likewise. Outside of a repository no parent is looked at.
   A settings file decides where data go, so it must be of whoever runs the command: a file that others own, or that is
   where others may write (:mod:`cues.base.trust`), is refused, and so is the mark of a repository that is not theirs.
2. A setting of all commands (``store``, ``output``) has the effect of its variable, which is set for the process if it
   is not set already: code that reads ``CUES_STORE`` needs to know nothing about files.
3. A table has the name of a command, and its keys are the command's options. They become click's ``default_map``. So a
   command line comes before the environment, which comes before the file, which comes before the default.

The tables of other commands are not checked, because that would import their modules; ``cues config`` checks all.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from cues.base.data import dataclass
from cues.cli.options import WrongUsage

NAME: Final = "cues.toml"
PREFIX: Final = "CUES"
"""The first word of every variable."""
SHARED: Final = ("store", "output")
"""The settings that all commands share."""
ONCE: Final = frozenset(
    (
        *("yes", "fresh", "take-over", "accept-topology", "force", "reset-state", "again"),
        *("adopt", "promote", "abandon", "with-parent", "remove", "forget"),
    )
)
"""Options that confirm, delete or give up something: a file that is always read must not give them."""
SECRETS: Final = frozenset({"token"})
OTHERS: Final = frozenset({"compile"})
"""Tables of ``[tool.cues]`` that are not settings of commands."""
_PATHS: Final = frozenset({"DIR", "STORE"})
"""Names, in the help, of values that are paths: in a file they are relative to it."""
_ROOTS: Final = (".git", ".hg")
"""The entries of the root of a repository."""


@dataclass(frozen=True)
class SettingsFile:
    """The file with the settings, parsed. Its tables are checked only by :meth:`options`."""

    path: Path
    tables: Mapping[str, Any]
    prefix: tuple[str, ...]
    """The table of the file that has all settings: ``("tool", "cues")`` in a pyproject.toml."""
    lines: Mapping[tuple[str, ...], int]

    def place(self, *keys: str) -> str:
        """File, line and table of a setting, as a person looks for it."""
        line = self.lines.get((*self.prefix, *keys))
        table = ".".join((*self.prefix, *keys[:-1]))
        return f"{_shown(self.path)}{f':{line}' if line else ''}{f' [{table}]' if table else ''}"

    def shared(self, commands: Iterable[str]) -> dict[str, str]:
        """The settings of all ``commands``, checked. Raises :class:`WrongUsage`, also for a table of no command."""
        values = {}
        for key, value in self.tables.items():
            if isinstance(value, dict):
                if key not in commands:
                    raise self._unknown((key,), f"there is no command {key!r}", commands, "[{}]")
            elif key in ONCE:
                raise self._once((key,))
            elif key not in SHARED:
                known = f"the settings of all commands are {', '.join(SHARED)}; options of a command are in its table"
                raise self._unknown((key,), known, SHARED)
            elif not isinstance(value, str) or not value:
                raise self._wrong((key,), value, "a text")
            elif key == "output" and value not in ("json", "table"):
                raise self._wrong((key,), value, '"json" or "table"')
            else:
                values[key] = self._path(value) if key == "store" else value
        return values

    def options(self, command: str, parameters: Sequence[click.Parameter]) -> dict[str, Any]:
        """The settings of a command by the names of its parameters, checked, as click reads them."""
        known = {key: option for key, option in options_of(parameters).items() if key not in SHARED}
        values = {}
        for key, value in (self.tables.get(command) or {}).items():
            keys = (command, key)
            if key in SHARED and key not in known:
                raise self._error(
                    keys,
                    f"{key} is a setting of all commands.",
                    f"write it at the top{self._above}, before the tables.",
                )
            if key in ONCE:
                raise self._once(keys)
            if key not in known:
                allowed = [name for name in known if name not in ONCE]
                listed = ", ".join(allowed) or "no options that a file may give"
                raise self._unknown(keys, f"cues {command} has {listed}", allowed)
            converted = self._converted(keys, known[key], value)
            if converted is not None:
                values[str(known[key].name)] = converted
        return values

    @property
    def _above(self) -> str:
        return f" of [{'.'.join(self.prefix)}]" if self.prefix else " of the file"

    def _converted(self, keys: tuple[str, ...], option: click.Option, value: Any) -> Any:
        if option.multiple:
            if not isinstance(value, list):
                raise self._wrong(keys, value, f"a list of {_expected(option)}")
            return [self._one(keys, option, item) for item in value]
        if option.is_flag:
            if not isinstance(value, bool):
                raise self._wrong(keys, value, "true or false")
            return value
        if isinstance(value, bool) and getattr(option, "_flag_needs_value", False):  # --ui: with or without a value
            return option.flag_value if value else None
        return self._one(keys, option, value)

    def _one(self, keys: tuple[str, ...], option: click.Option, value: Any) -> str:
        numeric = isinstance(option.type, (click.types.IntParamType, click.types.FloatParamType))
        if isinstance(value, bool) or not isinstance(value, (int, float) if numeric else (int, float, str)):
            raise self._wrong(keys, value, _expected(option))
        text = str(value)
        try:
            option.type.convert(text, option, None)
        except click.BadParameter as error:
            raise self._wrong(keys, value, _expected(option), f" ({error.message.rstrip('.')})") from None
        return self._path(text) if option.metavar in _PATHS else text

    def _path(self, text: str) -> str:
        path = Path(text).expanduser()
        if "://" in text or path.is_absolute():
            return text if "://" in text else str(path)
        return str(path) if self.path.parent == Path.cwd() else str(self.path.parent / path)

    def _wrong(self, keys: tuple[str, ...], value: Any, expected: str, why: str = "") -> WrongUsage:
        return self._error(
            keys,
            f"{keys[-1]} is {_literal(value)}, and {expected} is expected{why}.",
            f"write {expected}, or remove it.",
        )

    def _once(self, keys: tuple[str, ...]) -> WrongUsage:
        return self._error(
            keys,
            f"{keys[-1]} confirms, deletes or gives up something, so it is not a setting of a file.",
            f"remove it, and give --{keys[-1]} on the command line.",
        )

    def _unknown(self, keys: tuple[str, ...], known: str, names: Any, form: str = "{}") -> WrongUsage:
        import difflib

        near = difflib.get_close_matches(keys[-1], list(names), 1, 0.5)
        hint = f"write {form.format(near[0])}." if near else "remove it, or see cues config."
        return self._error(keys, f"{form.format(keys[-1])} is not a setting: {known}.", hint)

    def _error(self, keys: tuple[str, ...], message: str, hint: str) -> WrongUsage:
        return WrongUsage(f"{self.place(*keys)}: {message}", hint)


@dataclass(frozen=True)
class Given:
    """The settings of a call, kept in the context for ``cues config``."""

    file: SettingsFile | None
    variables: frozenset[str]
    """The variables that were set before those of the file."""
    store: str | None
    """The store of a call that names none."""


def options_of(parameters: Sequence[click.Parameter]) -> dict[str, click.Option]:
    """The options by their names in a file: the long name, or the name of a variable of all commands."""
    named: dict[str, click.Option] = {}
    for parameter in parameters:
        if isinstance(parameter, click.Option) and parameter.name != "help":
            long = next(name for name in (*parameter.opts, *parameter.secondary_opts) if name.startswith("--"))
            shared = isinstance(parameter.envvar, str)
            key = str(parameter.envvar).removeprefix(f"{PREFIX}_").lower() if shared else long[2:]
            named.setdefault(key, parameter)
    return named


def variable_of(command: str, option: click.Option) -> str:
    """The variable of an option, as click and the help name it."""
    if isinstance(option.envvar, str):
        return option.envvar
    return f"{PREFIX}_{command}_{option.name}".upper().replace("-", "_")


def of_call(words: Sequence[str]) -> SettingsFile | None:
    """The file for a command line, of which the first word that names a Python file is the graph file."""
    for word in words:
        graph = re.match(r"[^-].*?\.py(?=$|[:#])", word)
        if graph and Path(graph[0]).is_file():
            return find(Path(graph[0]).resolve().parent)
    return find(None)


def find(directory: Path | None) -> SettingsFile | None:
    """The file with the settings: from ``directory`` upwards, then from the working directory upwards."""
    starts = [directory] if directory is not None else []
    with contextlib.suppress(FileNotFoundError):  # a working directory that was removed
        starts.append(Path.cwd())
    for start in starts:
        for folder in _upwards(start):
            for name, prefix in ((NAME, ()), ("pyproject.toml", ("tool", "cues"))):
                path = folder / name
                if path.is_file():
                    file = _parsed(path, prefix)
                    if file is not None:
                        _check_trust(path)
                        return file
    return None


def _check_trust(path: Path) -> None:
    from cues.base import trust

    why = trust.problem(path)
    if why is not None:
        import shlex

        raise WrongUsage(
            f"The settings in {_shown(path)} are not used, because {why}.",
            "if they are yours: chown the file and its directory, and take the right to write from others; or set"
            f" {trust.VARIABLE}={shlex.quote(str(path.parent))}. If not: work in a directory of your own.",
        )


def _upwards(start: Path) -> Iterator[Path]:
    folders = (start, *start.parents)
    root = next((folder for folder in folders if any(map(_is_root, (folder / entry for entry in _ROOTS)))), start)
    for folder in folders:
        yield folder
        if folder == root:
            return


def _is_root(mark: Path) -> bool:
    if not mark.exists():
        return False
    from cues.base import trust

    return trust.is_own(mark)


def _parsed(path: Path, prefix: tuple[str, ...]) -> SettingsFile | None:
    """Parse a file; None if it is a pyproject.toml without settings."""
    import tomllib

    try:
        text = path.read_text(encoding="utf-8")
        tables: Any = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise WrongUsage(f"{_shown(path)} is not TOML: {error}.", "correct the file.") from None
    for at, key in enumerate(prefix):
        tables = tables.get(key, {})
        if not isinstance(tables, dict):
            raise WrongUsage(
                f"{_shown(path)}: {'.'.join(prefix[: at + 1])} is not a table.", f"write [{'.'.join(prefix)}]."
            )
    if prefix:
        tables = {key: value for key, value in tables.items() if key not in OTHERS}
        if not tables:
            return None
    return SettingsFile(path, tables, prefix, _lines(text))


_KEY: Final = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_KEYS: Final = rf"{_KEY}(?:\s*\.\s*{_KEY})*"


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """The lines of keys and tables, which tomllib does not tell; for an unusual form, none."""
    table: tuple[str, ...] = ()
    lines: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(rf"\s*\[\s*({_KEYS})\s*\]\s*(?:#.*)?$", line):
            table = _parts(header[1])
            lines.setdefault(table, number)
        elif pair := re.match(rf"\s*({_KEYS})\s*=", line):
            keys = (*table, *_parts(pair[1]))
            for end in range(len(table) + 1, len(keys) + 1):
                lines.setdefault(keys[:end], number)
    return lines


def _parts(keys: str) -> tuple[str, ...]:
    return tuple(key.strip("\"'") for key in re.findall(_KEY, keys))


@contextlib.contextmanager
def environment(file: SettingsFile | None, commands: Iterable[str]) -> Iterator[None]:
    """Set the variables of the settings that all commands share, inside the block, unless they are set already."""
    values = {f"{PREFIX}_{key.upper()}": value for key, value in (file.shared(commands) if file else {}).items()}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update({name: value for name, value in values.items() if not before[name]})
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _expected(option: click.Option) -> str:
    kind = option.type
    if isinstance(kind, click.Choice):
        return "one of " + ", ".join(f'"{choice}"' for choice in kind.choices)
    if isinstance(kind, (click.types.IntParamType, click.types.FloatParamType)):
        noun = "a whole number" if isinstance(kind, click.types.IntParamType) else "a number"
        least, most = getattr(kind, "min", None), getattr(kind, "max", None)
        bounds = [f"from {least}"] if least is not None else []
        return " ".join([noun, *bounds, *([f"to {most}"] if most is not None else [])])
    return f"a text ({option.metavar})" if option.metavar else "a text"


def _literal(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a table"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _shown(path: Path) -> str:
    with contextlib.suppress(ValueError, FileNotFoundError):
        return str(path.relative_to(Path.cwd()))
    return str(path)
