"""Changes that the page makes with ``--allow-write``: failed messages are redriven, or discarded.

A change is the command that a person would type (``cues redrive``, ``cues discard``), in a process of its own. The page
has the store open read-only, which no process may have beside a handle that writes; and if nothing runs the graph, a
redrive calls the user's function, whose failure must not be the page's.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any, Final

from cues.base import names
from cues.errors import CuesError, InvalidArgument
from cues.ui.text import safe

TIMEOUT_S: Final = 20
_KILL_S: Final = 60


class Changes:
    """The changes of one store or graph."""

    def __init__(self, target: str, store: str | None) -> None:
        """``target``: a graph file or a store, as a user writes it; ``store``: the value of ``--store``."""
        self._target = target
        self._store = store

    def redrive(self, **chosen: Any) -> dict[str, Any]:
        """Give the input of failed messages to their processor once more. Failures of the redrive are in the answer.

        ``chosen``: ``queue``, ``index`` and ``partition`` of one, or ``processor`` and ``cause`` of a group.
        """
        return self._run("redrive", self._chosen(**chosen), ["--timeout", str(TIMEOUT_S)])

    def discard(self, reason: str = "", **chosen: Any) -> dict[str, Any]:
        """Mark failed messages as done with."""
        if not (isinstance(reason, str) and 0 < len(reason.strip()) <= 1000 and _is_argument(reason)):
            raise InvalidArgument(
                "A discard needs a reason: a text of at most 1,000 characters, without NUL.", "say why."
            )
        return self._run("discard", self._chosen(**chosen), [f"--reason={reason.strip()}"])

    def _chosen(self, **given: Any) -> list[str]:
        """The target and the options that choose messages."""
        if given.keys() == {"processor", "cause"}:
            processor, cause = given["processor"], given["cause"]
            if not all(isinstance(each, str) and 0 < len(each) <= 1000 for each in (processor, cause)):
                raise InvalidArgument("A group of error messages has a processor and a cause.", "give both.")
            if not _is_argument(processor):
                raise InvalidArgument("A name of a processor has no NUL and no half characters.", "give its name.")
            return [self._target, f"--processor={processor}", f"--where=cause == {cause!a}"]
        queue, index, partition = given.get("queue"), given.get("index"), given.get("partition", 0)
        numbers = type(index) is int and type(partition) is int and index > 0 and partition >= 0
        if not numbers or given.keys() - {"queue", "index", "partition"}:
            raise InvalidArgument("An error message has a queue, a partition and an index.", "give all three.")
        names.check("queue", queue)
        return [f"{self._target}#{names.log_id(str(queue), partition)}", "--index", str(index)]

    def _run(self, verb: str, chosen: Sequence[str], more: Sequence[str]) -> dict[str, Any]:
        arguments = [verb, *chosen, "--yes", "--json", *more]
        if self._store is not None:
            arguments += ["--store", self._store]
        try:
            done = subprocess.run(
                [sys.executable, "-m", "cues", *arguments],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_KILL_S,
            )
        except subprocess.TimeoutExpired:
            raise CuesError(f"cues {verb} took more than {_KILL_S} s.", "look at the errors again.") from None
        lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if not lines:
            said = [line for line in done.stderr.splitlines() if line.strip()]
            raise CuesError(safe(" ".join(said[-2:])[:2000]) or f"cues {verb} said nothing.", "")
        result: dict[str, Any] = json.loads(lines[-1])
        return result


def _is_argument(text: str) -> bool:
    """Return whether a process can be given a text as an argument."""
    return "\0" not in text and not any("\ud800" <= character <= "\udfff" for character in text)
