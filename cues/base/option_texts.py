"""The texts of options: one table for docstrings and for docs/options.md.

A table gives for each option its default and its effect, with the unit. :func:`describes` appends a table to the
docstring of a function or class, so that ``help()`` lists every option; the tests compare docs/options.md with it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NamedTuple, TypeVar

T = TypeVar("T")


class OptionText(NamedTuple):
    """The default of an option and its effect, in one or two sentences of Markdown."""

    default: Any
    text: str

    @property
    def shown(self) -> str:
        """The default as Python source."""
        return f'"{self.default}"' if isinstance(self.default, str) else repr(self.default)


_WIDTH: Final = 92


@functools.cache
def _wrapped(text: str) -> list[str]:
    """The lines of a text, indented. A table is in many docstrings, and an import of Cues makes them all."""
    lines, line = [], "   "
    for word in text.split():
        if len(line) + len(word) >= _WIDTH:
            lines.append(line)
            line = "   "
        line += f" {word}"
    return [*lines, line]


def describes(table: Mapping[str, OptionText], names: Iterable[str]) -> Callable[[T], T]:
    """Append the options ``names`` to the docstring of the decorated function or class."""
    lines = ["Options:", ""]
    for name in names:
        option = table[name]
        lines.append(f"{name}={option.shown}")
        lines += _wrapped(option.text)

    def append(described: T) -> T:
        if described.__doc__:  # None under python -OO
            described.__doc__ = "\n".join([inspect.cleandoc(described.__doc__), "", *lines])
        return described

    return append
