"""Places on a queue in command lines: an index, a time, ``start`` or ``end``."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from cues.errors import InvalidArgument
from cues.operate.refused import Refused
from cues.queues.base import index_of
from cues.queues.log import Log
from cues.queues.options import duration_of

HELP = "start, end, an index (7), a time (2026-01-31T12:00Z), or a time ago (15m, 2h, 1d)"

Position = str | int | datetime


def parse(text: str, option: str) -> Position:
    """Parse a place: ``"start"``, ``"end"``, an index, or an aware datetime."""
    if text in ("start", "end"):
        return text
    if re.fullmatch(r"[+-]?\d[\d_,]*", text):
        index = int(text.replace(",", "").replace("_", ""))
        if index < 1:
            raise Refused(f"{option} {text}: the first index is 1.", f"give {option} start, or {option} 1")
        return index
    if re.fullmatch(r"[\d._]+\s*[a-zA-Z]+", text):
        try:
            return datetime.now(UTC) - timedelta(seconds=duration_of(text, option, zero=True))
        except InvalidArgument as error:
            raise Refused(error.message, f"give {option} {HELP}.") from None
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise Refused(f"{option} {text!r} is not a place on a queue.", f"give {option} {HELP}.") from None
    if when.tzinfo is None:
        raise Refused(
            f"{option} {text} has no time zone, so it is not a point in time.",
            f"give {option} {text}{'' if 'T' in text or ' ' in text else 'T00:00'}Z for UTC, or an offset (+01:00).",
        )
    return when


def now_on(log: Log, place: Position, option: str) -> int:
    """The present index of a place on a log; a purged place gives the first remaining index."""
    with log.store.core.view() as txn:
        try:
            return index_of(txn, log, log.row(txn), place, f"{option} {place}")
        except InvalidArgument as error:
            raise InvalidArgument(f"{error.message.rstrip('.')} (queue {log.id}).", error.hint) from None
