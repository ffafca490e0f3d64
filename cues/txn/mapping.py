"""Which partition a message belongs to: a mapping is a callable from a message to a queue.

    random       any of them
    modulo       fnv1a(key) modulo their number, in the order of the list
    rendezvous   the one whose name, hashed and xored with the hashed key, gives the most

When the number of partitions changes, modulo moves almost every key, and rendezvous only those that the
new partition wins. Hashes and choices are those of Gazette (``message/mappings.go``).

Not guaranteed: that rendezvous spreads keys evenly. Over a few partitions whose names are alike it may leave
one out; FNV-1a changes little in its upper bits for the last letters of a name.

Partitions are queues, of any number of stores, or plain names; then a mapping answers names. They are
given as a sequence, or as a callable that gives one and may give another each time:
``store.matching("pageviews/*")`` gives the partitions that the queue has by then.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from cues.errors import InvalidArgument, NoPartitions
from cues.partitioners import fnv1a32

if TYPE_CHECKING:
    from cues.queue import Queue

P = TypeVar("P")
Partitions = Sequence[P] | Callable[[], Sequence[P]]
Mapping = Callable[[Any], P]
Key = Callable[[Any], bytes]


def random_mapping(partitions: Partitions[P]) -> Mapping[P]:
    """Any partition, each as likely. Raises :class:`NoPartitions`."""
    _check(partitions)

    def choose(message: Any) -> P:
        return random.choice(_list(partitions))

    return choose


def modulo_mapping(key: Key, partitions: Partitions[P]) -> Mapping[P]:
    """The partition at ``fnv1a32(key(message))`` modulo their number. Raises :class:`NoPartitions`."""
    _check(partitions, key)

    def choose(message: Any) -> P:
        found = _list(partitions)
        return found[fnv1a32(key(message)) % len(found)]

    return choose


def rendezvous_mapping(key: Key, partitions: Partitions[P]) -> Mapping[P]:
    """The partition whose hashed name, xored with the hashed key, is the largest; of equals the first.

    A queue's name here is its :func:`journal_of`, which no queue of another store has. Raises :class:`NoPartitions`.
    """
    _check(partitions, key)
    known: tuple[list[P], list[int]] = [], []

    def choose(message: Any) -> P:
        nonlocal known
        found = list(_list(partitions))
        if known[0] != found:
            known = found, [fnv1a32(name_of(partition).encode()) for partition in found]
        hashed = fnv1a32(key(message))
        best, chosen = 0, 0
        for place, name in enumerate(known[1]):
            if hashed ^ name > best:
                best, chosen = hashed ^ name, place
        return found[chosen]

    return choose


def name_of(partition: Any) -> str:
    """A plain name as it is, a queue's :func:`journal_of`."""
    return partition if isinstance(partition, str) else journal_of(partition)


def journal_of(queue: Queue) -> str:
    """The name of a log among those of all stores: ``<id of the store>/<queue>``, with ``/<n>`` for partition n > 0."""
    try:
        return f"{queue.store.id.hex()}/{queue.log.id}"
    except AttributeError:
        raise InvalidArgument(f"A queue was expected, found {queue!r:.60}.", "store.queue('orders').") from None


def _check(partitions: object, key: object = len) -> None:
    """Refuse what would be found out message by message, or not at all: text is a sequence as well."""
    if not callable(key):
        raise InvalidArgument(f"key={key!r} cannot be called.", f"lambda message: message[{key!r}].encode().")
    if isinstance(partitions, (str, bytes)) or not (callable(partitions) or isinstance(partitions, Sequence)):
        raise InvalidArgument(
            f"The partitions are {partitions!r}.",
            "a list of queues, or a callable that gives one: store.matching('a/*').",
        )


def _list(partitions: Partitions[P]) -> Sequence[P]:
    found = partitions() if callable(partitions) else partitions
    if not found:
        raise NoPartitions("The mapping has no partitions to choose from.", "once there is one, again.")
    return found
