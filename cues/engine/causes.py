"""The cause of an error message as text, and the text by which error messages are grouped."""

from __future__ import annotations

import re
from typing import Final

from cues.steps.error_records import ErrorRecord

_QUOTED: Final = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`")
_NUMBER: Final = re.compile(
    r"(?i:\b(status|code|answered|error|errno|http(?:/\d(?:\.\d)?)?|sqlstate|exit|signal)\W{1,3})?"
    r"(0x[0-9a-fA-F]+|\d+(?:\.\d+)?)"
)
"""A number, after a word that makes it a code: 404 and 500 are different causes."""


def cause_of(record: ErrorRecord) -> str:
    """Type and first line of the outermost exception."""
    first, *more = record.text.strip().splitlines() or [""]
    return f"{record.type}: {first}{' …' if more else ''}"


def normalised(cause: str) -> str:
    """A cause without the parts that differ from message to message: quoted text, and numbers that are no codes."""
    return _NUMBER.sub(lambda found: found[0] if found[1] else "N", _QUOTED.sub("'…'", cause))[:300]
