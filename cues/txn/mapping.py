"""Mappings: callables that choose a partition for a message.

    random       any partition
    modulo       the partition at fnv1a(key) modulo their number, in the order of the list
    rendezvous   the partition whose hashed name, xored with the hashed key, is the largest

When the number of partitions changes, modulo moves almost every key. Rendezvous moves only the
keys of the new partition. Hashes and choices are those of Gazette (``message/mappings.go``).

Not guaranteed: that rendezvous spreads keys evenly. Among a few partitions with similar names one may get
no key: the last letters of a name change the upper bits of FNV-1a only a little.

Partitions are queues, of any number of stores, or plain names; then a mapping returns names. Pass
a sequence, or a callable that returns one, which may change from call to call: ``store.matching("pageviews/*")``
returns the partitions that the queue has at that moment.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from cues.errors import InvalidArgument, NoPartitions
from cues.queues.base import journal_of
from cues.queues.partitioners import fnv1a32

P = TypeVar("P")
Partitions = Sequence[P] | Callable[[], Sequence[P]]
Mapping = Callable[[Any], P]
Key = Callable[[Any], bytes]


def random_mapping(partitions: Partitions[P]) -> Mapping[P]:
    """Choose any partition, with equal probability. Raises :class:`NoPartitions`."""
    _check(partitions)

    def choose(message: Any) -> P:
        return random.choice(_list(partitions))

    return choose


def modulo_mapping(key: Key, partitions: Partitions[P]) -> Mapping[P]:
    """Choose the partition at ``fnv1a32(key(message))`` modulo their number. Raises :class:`NoPartitions`."""
    _check(partitions, key)

    def choose(message: Any) -> P:
        listed = _list(partitions)
        return listed[fnv1a32(key(message)) % len(listed)]

    return choose


def rendezvous_mapping(key: Key, partitions: Partitions[P]) -> Mapping[P]:
    """Choose the partition whose hashed name, xored with the hashed key, is the largest; of equals the first.

    The name of a queue is its :func:`journal_of`, which is unique among all stores. Raises :class:`NoPartitions`.
    """
    _check(partitions, key)
    known: tuple[list[P], list[int]] = [], []

    def choose(message: Any) -> P:
        nonlocal known
        listed = list(_list(partitions))
        if known[0] != listed:
            known = listed, [fnv1a32(name_of(partition).encode()) for partition in listed]
        hashed = fnv1a32(key(message))
        best, chosen = 0, 0
        for place, name in enumerate(known[1]):
            if hashed ^ name > best:
                best, chosen = hashed ^ name, place
        return listed[chosen]

    return choose


def name_of(partition: Any) -> str:
    """Return a plain name unchanged, and for a queue its :func:`journal_of`."""
    return partition if isinstance(partition, str) else journal_of(partition)


def _check(partitions: object, key: object = len) -> None:
    """Refuse wrong arguments at once, also text, which is a sequence and would raise no error later."""
    if not callable(key):
        raise InvalidArgument(f"key={key!r} cannot be called.", f"pass lambda message: message[{key!r}].encode().")
    if isinstance(partitions, (str, bytes)) or not (callable(partitions) or isinstance(partitions, Sequence)):
        raise InvalidArgument(
            f"The partitions are {partitions!r}.",
            "pass a list of queues, or a callable that returns one: store.matching('a/*').",
        )


def _list(partitions: Partitions[P]) -> Sequence[P]:
    listed = partitions() if callable(partitions) else partitions
    if not listed:
        raise NoPartitions("The mapping has no partitions to choose from.", "make a partition first.")
    return listed
