"""Failures inside Spark, in words of one line."""

from __future__ import annotations

import re


def in_short(error: Exception) -> str:
    """The one line that explains a failure inside Spark, without a full stop at its end.

    It is taken from Python's traceback if there is one, else from an error of Cues without one, else from Java's.
    """
    text = str(error)
    _, python, trace = text.rpartition("Traceback (most recent call last):\n")
    own = re.search(r"\bcues\.errors\.\w+: .*", text)
    if own and not python:
        line = own[0]
    elif python:
        line = next((line for line in trace.splitlines() if line and not line[0].isspace()), "")
    else:
        cause = re.search(r"most recent failure: (?:Lost task .*?\): )?(.*)", text) or re.search(r"^: (.*)", text, re.M)
        line = cause[1] if cause else text.partition("\n")[0]
        line = re.sub(r"^(?:[a-z]\w*\.)+[A-Z]\w*: ", "", line).partition(". Consider setting ")[0]
    return line.strip().rstrip(".") or type(error).__name__
