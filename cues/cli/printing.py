"""The one door of the output: every line of every command goes through :func:`out`, :func:`err` or :func:`data`.

One rule of escaping: a sign that a terminal may obey (ESC and the other controls, also U+009B and DEL, and signs that
turn the direction of text or hide it) is printed as JSON writes it, ``\\u001b``. So a line of JSON keeps its value.
Line ends and tabs stay. Colours are made here, after the escaping: :func:`coloured`.

An output that cannot be written (closed, on a full disk) raises nothing, so that no work is left half done for the
sake of a line. It is known by :func:`lost`, and ``options.finish`` makes it an exit code. ``sys.stdout`` itself stays
what it is: the functions of users print to it too.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Final, Literal, TextIO

from cues.overrides import override

_SIGNS: Final = (
    "[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b\u200e\u200f"
    "\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000110bd\U000110cd\U00013430-\U0001343f"
    "\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e007f]"
)
"""Controls (but tab and line end), separators of lines, halves of pairs, and signs of format; of these the joiners
U+200C and U+200D are printed, because words and emoji have them."""

_PLAIN: Final = {"→": "->", "←": "<-", "…": "...", "×": "x", "·": "-", "─": "-", "▶": ">"}
"""Our own signs, for an encoding that does not have them."""

DIM: Final = "2"
_RESET: Final = "\033[0m"

_lost: Exception | None = None
"""Why standard output could not be written; nothing is written to it any more."""


class Printable(str):
    """A text that is escaped already, and may have our colours."""

    __slots__ = ()


def escaped(text: str) -> Printable:
    """The text without signs that a terminal obeys; a :class:`Printable` is returned as it is."""
    if isinstance(text, Printable):
        return text
    return Printable(text if text.isprintable() else re.sub(_SIGNS, lambda found: json.dumps(found[0])[1:-1], text))


def coloured(code: str, text: str) -> Printable:
    """A text in a colour of the terminal (``1;31``), or without one if ``code`` is empty."""
    return Printable(f"\033[{code}m{escaped(text)}{_RESET}") if code else escaped(text)


def uncoloured(text: Printable) -> Printable:
    """The text that :func:`coloured` was made of."""
    return Printable(re.sub(r"\033\[[\d;]*m", "", text))


def out(*parts: str, end: str = "\n") -> bool:
    """Print a line on standard output. Return False if it takes no more, so that a long command may end."""
    if _lost is None:
        _keep(put(sys.stdout, _joined(parts, end)))
    return _lost is None


def err(*parts: str) -> None:
    """Print a line on standard error. An error of standard error itself is ignored."""
    put(sys.stderr, _joined(parts, "\n"))


def ask(question: str) -> bool:
    """Ask on the terminal, without standard output, which may be closed."""
    put(sys.stderr, _joined((question, " [y/N]: "), ""))
    sys.stderr.flush()
    answer = sys.stdin.readline()
    if not answer:
        raise KeyboardInterrupt
    return answer.strip().lower() in ("y", "yes")


def data(raw: bytes) -> bool:
    """Write bytes to standard output as they are; to a terminal as an escaped text. Returns what :func:`out` does."""
    if is_terminal("stdout"):
        return out(raw.decode("utf-8", "backslashreplace").replace("\r\n", "\n"), end="")
    if _lost is None:
        _keep(_try(sys.stdout, lambda stream: stream.buffer.write(raw)))
    return _lost is None


def flush() -> bool:
    """Write what is buffered. Returns what :func:`out` does."""
    if sys.stderr is not None:
        _try(sys.stderr, lambda stream: stream.flush())
    if _lost is None and sys.stdout is not None:
        _keep(_try(sys.stdout, lambda stream: stream.flush()))
    return _lost is None


def lost() -> Exception | None:
    """Why standard output could not be written; None if it could."""
    return _lost


def begin() -> None:
    """A command begins: nothing is lost yet."""
    _keep(None)


def is_terminal(name: Literal["stdin", "stdout", "stderr"]) -> bool:
    """Return whether a standard stream is a terminal; one that is closed is none."""
    stream: TextIO | None = getattr(sys, name)
    return stream is not None and stream.isatty()


def colour(name: Literal["stdout", "stderr"] = "stdout") -> bool:
    """Return whether a standard stream is a terminal that may be coloured."""
    return is_terminal(name) and not os.environ.get("NO_COLOR")


def is_unicode() -> bool:
    """Return whether standard output can write every sign."""
    return (getattr(sys.stdout, "encoding", "") or "").lower().replace("-", "") == "utf8"


def report(message: str, hint: str, before: str = "") -> None:
    """Print an error on standard error, with what to try."""
    red, bold = ("1;31", "1") if colour("stderr") else ("", "")
    if before:
        err(before.rstrip("\n"))
    err(coloured(red, "Error:"), " ", message)
    if hint:
        err(coloured(bold, "Try:"), " ", hint)


def printed(show: Callable[[], None]) -> list[Printable]:
    """The lines that ``show`` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as text:
        show()
    return [Printable(line) for line in text.getvalue().splitlines()]


@contextlib.contextmanager
def logs() -> Iterator[None]:
    """Inside the block log records for which no handler is set up are printed by :func:`err`."""
    before = logging.lastResort
    logging.lastResort = _Logs(logging.WARNING)
    try:
        yield
    finally:
        logging.lastResort = before


class _Logs(logging.Handler):
    @override
    def emit(self, record: logging.LogRecord) -> None:
        err(self.format(record))


def put(stream: TextIO | None, text: Printable) -> Exception | None:
    """Write a text to a stream, with the signs that its encoding has; return the error if that failed."""
    return _try(stream, lambda stream: stream.write(_encodable(text, stream.encoding or "utf-8")))


def _joined(parts: tuple[str, ...], end: str) -> Printable:
    return Printable("".join(map(escaped, parts)) + end)


def _keep(error: Exception | None) -> None:
    global _lost
    _lost = error


def _try(stream: TextIO | None, write: Callable[[TextIO], object]) -> Exception | None:
    if stream is None:
        return OSError(errno.EBADF, "it is closed")
    try:
        write(stream)
    except (OSError, ValueError) as error:  # ValueError: the file object is closed
        # Python flushes at its end what is left in the buffer, and must not fail again.
        with contextlib.suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        return error
    return None


def _encodable(text: Printable, encoding: str) -> str:
    try:
        text.encode(encoding)
    except UnicodeEncodeError:
        known = {sign: bool(sign.encode(encoding, "ignore")) for sign in set(text)}
        return "".join(c if known[c] else _PLAIN.get(c) or json.dumps(c)[1:-1] for c in text)
    return text
