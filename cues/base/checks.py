"""Checks of arguments, for many modules."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any


def is_count(value: Any, least: int = 1, most: float = math.inf) -> bool:
    """Return whether ``value`` is an integer from ``least`` to ``most``; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number; a bool is not."""
    # A comparison, because no float is as large as some integers.
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -math.inf < value < math.inf


def nearest(name: object, known: Iterable[str], form: str, otherwise: str) -> str:
    """Return ``form`` with the known name that is most like ``name``; ``otherwise`` where none is like it."""
    import difflib

    near = difflib.get_close_matches(str(name), list(known), 1)
    return form.format(near[0]) if near else otherwise
