"""Times of delivery: a message that processors get later, although it is on its queue at once."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from cues.base import clock, names
from cues.errors import InvalidArgument
from cues.queues.options import duration_of
from cues.records.batch import not_a_dict

At = datetime | float | None
Delay = str | timedelta | float | None


def delayed(message: dict[str, Any], deliver_at: At = None, delay: Delay = None) -> dict[str, Any]:
    """Return a copy of a message with a time before which no processor gets it, for any way to write a message.

    ``deliver_at`` is an aware datetime, or seconds since the epoch. ``delay`` counts from now: seconds, a timedelta,
    or a text such as ``"10m"`` (``s``, ``m``, ``h``, ``d``, ``w``). A time in the past delivers at once. The time is
    the key ``q/deliver-at`` of the metadata of the message, and is not passed on to messages that are made of it.

    Only processors of graphs wait. Tailers, and consumers of :mod:`cues.txn` and :mod:`cues.groups`, read the message
    at once. Raises :class:`InvalidArgument` unless one of both times is given, and is one.
    """
    if not isinstance(message, dict):
        raise not_a_dict(message)
    meta = message.get(names.META, {})
    if not isinstance(meta, dict):
        return message  # refused where it is written
    return {**message, names.META: {**meta, names.DELIVER_AT: clock.to_datetime(_time_ns(deliver_at, delay))}}


def _time_ns(deliver_at: At, delay: Delay) -> int:
    if (deliver_at is None) == (delay is None):
        given = "both" if delay is not None else "none"
        raise InvalidArgument(
            f"A delayed message has deliver_at= or delay=, and {given} of them is given.",
            "give one: delay='10m', or deliver_at=datetime.now(timezone.utc) + timedelta(days=1).",
        )
    if deliver_at is not None:
        return clock.instant_ns(deliver_at, "deliver_at")
    seconds = duration_of(delay, "delay", zero=True)  # type: ignore[arg-type]
    return clock.instant_ns(clock.now_ns() / 1e9 + seconds, "The time after the delay")
