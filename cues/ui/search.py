"""Searches of the page, in a process of their own that ends when one takes too long.

A search is an expression that somebody else may have written: a regular expression that never ends, for example, holds
Python's lock, so nothing in its process could end it. Here the kernel does: the child sets an alarm, for which it has
no handler, before each search.

    page                                     child (python -m cues.ui.search)
    starts it at the first search        →   opens the store read-only
    writes a question, one line of JSON  →   sets the alarm, searches
    reads the answer                     ←   one line of JSON; or the end of the pipe, because the alarm ended it
    ends, however                        →   reads the end of its standard input, and ends

One search is made at a time, and few wait for it, so searches never take the threads of other questions.
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import threading
from typing import IO, Any, Final

from cues.errors import CuesError, QueueNotFound, StoreError, Unsupported
from cues.ui.guard import Refusal
from cues.ui.look import look_of

LIMIT_S: Final = 5.0
"""A search that takes longer is ended. Most answer within :data:`cues.ui.look.SEARCH_S`, with what they have."""
WAITING_MAX: Final = 4
"""Searches that wait for another one; more are refused."""


def refusal_of(error: Exception) -> Refusal | None:
    """The text of an error for the person who asked; None for an error that is not theirs."""
    if isinstance(error, CuesError):
        status = (
            404 if isinstance(error, (QueueNotFound, StoreError)) else 501 if isinstance(error, Unsupported) else 400
        )
        text, hint = (text.replace("--where ", "the search ") for text in (error.message, error.hint))
        return Refusal(status, text, hint)
    if isinstance(error, TypeError) and "argument" in str(error):  # a parameter that is needed
        return Refusal(400, f"The question is not whole: {error}.")
    return None


class Searcher:
    """Asks the child; starts it at the first question, and again after one that it did not survive."""

    def __init__(self, settings: dict[str, Any], limit_s: float) -> None:
        self._settings = settings | {"limit_s": limit_s}
        self._limit_s = limit_s
        self.one = threading.Lock()
        self.few = threading.Semaphore(WAITING_MAX + 1)
        self._child: subprocess.Popen[str] | None = None
        self._closed = False

    def messages(self, **question: Any) -> dict[str, Any]:
        """Return what :meth:`Look.messages` answers in the child. Raises :class:`Refusal`."""
        if not self.few.acquire(blocking=False):
            raise Refusal(503, "Other searches are running.", "search again in a moment.")
        try:
            with self.one:
                answer = self._ask(question)
        finally:
            self.few.release()
        if "refused" in answer:
            raise Refusal(*answer["refused"])
        return answer

    def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        child = self._started()
        assert child.stdin is not None and child.stdout is not None
        line = ""
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(json.dumps(question) + "\n")
            child.stdin.flush()
            line = child.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._end(child)
        if child.returncode == -signal.SIGALRM:
            raise Refusal(
                400, f"The search was ended after {self._limit_s:g} s.", "write one that does less for each message."
            )
        raise Refusal(503, "The process that searches ended.", "search again.")

    def _started(self) -> subprocess.Popen[str]:
        if self._child is None or self._child.poll() is not None:
            if self._closed:
                raise Refusal(503, "The page is ending.")
            self._child = subprocess.Popen(
                [sys.executable, "-m", "cues.ui.search"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            assert self._child.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._child.stdin.write(json.dumps(self._settings) + "\n")
        return self._child

    def _end(self, child: subprocess.Popen[str]) -> None:
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        child.wait()

    def close(self) -> None:
        """End the child, and refuse what waits for it."""
        self._closed = True
        child = self._child
        if child is not None:
            child.kill()
            child.wait()


def main(questions: IO[str], answers: IO[str]) -> None:
    """Answer until there are no more questions."""
    from cues import jsontext

    settings = json.loads(questions.readline())
    with contextlib.closing(look_of(settings)) as look:
        for line in questions:
            signal.setitimer(signal.ITIMER_REAL, settings["limit_s"])
            try:
                answer = look.messages(**json.loads(line))
            except Exception as error:
                refusal = refusal_of(error)
                if refusal is None:
                    raise
                answer = {"refused": [refusal.status, refusal.text, refusal.hint]}
            text = jsontext.show(answer, compact=True, ascii_only=True)
            signal.setitimer(signal.ITIMER_REAL, 0)
            answers.write(text + "\n")
            answers.flush()


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    main(sys.stdin, sys.stdout)
