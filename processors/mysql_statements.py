"""Statements in the log of MySQL: those that truncate a table, and those that change rows without events of rows."""

from __future__ import annotations

import re
from typing import Final

_NAME: Final = r"""(?:`(?:[^`]|``)+`|"(?:[^"]|"")+"|[\w$]+)"""
_TRUNCATE: Final = re.compile(rf"truncate\s+(?:table\s+)?({_NAME})(?:\s*\.\s*({_NAME}))?", re.I)
_CONDITIONAL: Final = re.compile(r"/\*M?!\d*(.*?)\*/", re.S)
"""A comment that the server executes."""
_QUOTED: Final = re.compile(r"""'(?:[^'\\]|\\.|'')*'|"(?:[^"\\]|\\.|"")*"|`[^`]*`""", re.S)
_COMMENT: Final = re.compile(rf"({_QUOTED.pattern})|/\*.*?\*/|--[^\n]*\n|#[^\n]*\n", re.S)
_FOR: Final = re.compile(r"""set\s+statement\s(?:'[^']*'|"[^"]*"|[^'"])*?\sfor\s+""", re.I)
"""Settings that are for one statement, before it."""
_HARMLESS: Final = re.compile(r"(savepoint|rollback|release|create|drop\s+temporary|xa)\b", re.I)
"""Statements that stand between the rows of a transaction: they change none."""
_STATEMENT: Final = re.compile(
    r"(insert|update|delete|replace|load|create\s+(or\s+replace\s+)?table\b.*\bselect)\b", re.I | re.S
)
"""Statements that change rows. (With rows in the log, CREATE … SELECT has the columns in the place of SELECT.)"""


def plain(text: str) -> str:
    """Return the statement that the server executes: without comments, and without settings for it alone."""
    text = _COMMENT.sub(lambda found: found[1] or " ", _CONDITIONAL.sub(r" \1 ", text)).lstrip()
    found = _FOR.match(text)
    return text[found.end() :] if found else text


def truncated(statement: str, schema: str) -> str | None:
    """Return the table, ``database.table``, of a TRUNCATE; None for another statement."""
    found = _TRUNCATE.match(statement)
    if found is None:
        return None
    names = [_unquoted(name) for name in (found[1], found[2]) if name]
    return ".".join(names if found[2] else [schema, *names])


def has_no_rows(statement: str, *, in_rows: bool) -> bool:
    """Return whether a statement changes rows that have no events; ``in_rows``: it is between events of rows."""
    return bool(_STATEMENT.match(_QUOTED.sub("_", statement))) or (in_rows and not _HARMLESS.match(statement))


def _unquoted(name: str) -> str:
    mark = name[0]
    return name[1:-1].replace(mark * 2, mark) if mark in '`"' else name
