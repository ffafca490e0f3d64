"""The work of every contestant, and the comparison of what it left with what it should have left.

Imports the standard library only, so that the peers' own environments can run it.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

BATCH = 1000
"""Messages of a batch, wherever a contestant can choose it."""
Message = dict[str, Any]


class Fault(AssertionError):
    """A contestant left something else than it should have."""


@functools.cache
def messages(count: int) -> list[Message]:
    return [
        {"id": i, "symbol": f"SYM{i % 500:03}", "side": "buy" if i % 2 else "sell", "size": i % 900, "price": i / 8}
        for i in range(count)
    ]


def total(order: Message) -> Message:
    """The function of every pipeline."""
    return {**order, "total": order["size"] * order["price"]}


def batches(messages: list[Message]) -> Iterator[list[Message]]:
    for start in range(0, len(messages), BATCH):
        yield messages[start : start + BATCH]


def running_totals(messages: Iterable[Message]) -> Iterator[Message]:
    """The function of the row ``keyed``: the number and the size of all orders of a symbol so far."""
    sums: dict[str, tuple[int, int]] = {}
    for order in messages:
        count, size = sums.get(order["symbol"], (0, 0))
        sums[order["symbol"]] = state = (count + 1, size + order["size"])
        yield {"id": order["id"], "symbol": order["symbol"], "count": state[0], "sum": state[1]}


QUEUES = ("first", "second", "third")
EACH = 10
"""Messages of a transaction of the row ``transactions-append``; message n belongs to queue n modulo 3."""


def transactions(count: int) -> Iterator[list[Message]]:
    for start in range(0, count, EACH):
        yield messages(count)[start : start + EACH]


def each_queue(count: int) -> list[list[Message]]:
    """The messages of each of the :data:`QUEUES`."""
    return [messages(count)[n :: len(QUEUES)] for n in range(len(QUEUES))]


EVENTS_S = 100
"""Messages in a second of event time, for windows."""
WINDOW_S = 60


def minutes(messages: Iterable[Message]) -> Counter[tuple[str, int]]:
    """The messages of each symbol in each minute of event time; the event time of a message is its id / 100."""
    return Counter((order["symbol"], order["id"] // EVENTS_S // WINDOW_S) for order in messages)


def must_be(result: Iterable[Any], expected: Iterable[Any]) -> None:
    """Assert that every message is in the result, once, in order, as it was written.

    The error says how many are lost, repeated or changed; or that all are there in another order.
    """
    pairs = itertools.zip_longest(result, expected)
    right: list[Any] = []
    for number, (message, wanted) in enumerate(pairs):
        if message != wanted:
            rest = list(pairs)
            have = [m for m, _ in [(message, wanted), *rest] if m is not None]
            want = [w for _, w in [(message, wanted), *rest] if w is not None]
            difference = _difference(right + have, right + want)
            raise Fault(f"{difference}; message {number} is {message!r}, must be {wanted!r}")
        right.append(message)


def _difference(have: list[Any], want: list[Any]) -> str:
    found, wanted = Counter(map(_frozen, have)), Counter(map(_frozen, want))
    lost, more = wanted - found, found - wanted
    repeated = sum(n for message, n in more.items() if message in wanted)
    parts = {
        "lost": lost.total(),
        "repeated": repeated,
        "not asked for": more.total() - repeated,
    }
    return ", ".join(f"{n} {what}" for what, n in parts.items() if n) or "reordered"


def _frozen(message: Any) -> str:
    return repr(sorted(message.items()) if isinstance(message, dict) else message)
