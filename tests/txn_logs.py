"""Logs of pending and acknowledged messages for tests: written by hand, or at random and well-formed.

A log is a list of envelopes. In a well-formed one a producer's clocks only rise, a transaction ends before the
producer's next begins, and what is written twice (an append that was retried) is written twice before
the producer continues.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from cues.producers.sequencer import Outcome
from cues.txn import Envelope, Flags, ProducerID, Sequencer, build_uuid

OUTSIDE, CONTINUE, ACK = Flags.OUTSIDE_TXN, Flags.CONTINUE_TXN, Flags.ACK_TXN
A, B, C = (ProducerID(bytes((1, 0, 0, 0, 0, n))) for n in (10, 11, 12))
DEAD_BYTES = 2
"""Between two envelopes, as a journal of bytes may have them."""


class Journal:
    """A log that is written message by message."""

    def __init__(self, name: str = "test/journal") -> None:
        self.name = name
        self.log: list[Envelope] = []
        self._offset = 0

    def add(self, producer: bytes, clock: int, flags: int, message: object = None) -> Envelope:
        uuid = build_uuid(producer, clock, flags)
        begin = self._offset + DEAD_BYTES
        self._offset = begin + 100
        made = Envelope(self.name, begin, self._offset, uuid, message)
        self.log.append(made)
        return made

    def range(self, begin: int, end: int) -> Iterator[Envelope]:
        return iter([one for one in self.log if one.begin >= begin and one.end <= end])


class Reader:
    """Reads journals through a sequencer, as ReadCommitted does, and keeps what was delivered."""

    def __init__(self, journals: Sequence[Journal], ring: int) -> None:
        self.journals = {one.name: one for one in journals}
        self.ring = ring
        self.sequencer = Sequencer(ring=ring)
        self.delivered: list[Envelope] = []
        self.outcomes: list[Outcome] = []

    def next_of(self, journal: Journal) -> Envelope | None:
        offset = self.sequencer.offsets.get(journal.name, 0)
        return next((one for one in journal.log if one.begin >= offset), None)

    def read(self, journal: Journal) -> bool:
        """Queue the journal's next message, and start a replay if one is due; False at its end."""
        found = self.next_of(journal)
        if found is None:
            return False
        outcome = self.sequencer.queue(found)
        self.outcomes.append(outcome)
        if outcome is Outcome.AckCommitReplay:
            name, begin, end = self.sequencer.replay_range()
            self.sequencer.start_replay(self.journals[name].range(begin, end))
        return True

    def step(self) -> bool:
        found = self.sequencer.step()
        if found is not None:
            self.delivered.append(found)
        return found is not None

    def drain(self) -> None:
        while self.step():
            pass

    def read_all(self) -> list[Envelope]:
        for journal in self.journals.values():
            while self.read(journal):
                self.drain()
        return self.delivered


def random_journal(rng: random.Random, name: str, size: int, producers: int = 3) -> tuple[Journal, list[Envelope]]:
    """A well-formed log, and what is committed in it, in the order of the commits."""
    journal = Journal(name)
    committed: list[Envelope] = []
    states: list[_Producer] = []
    while len(journal.log) < size:
        if len(states) < producers or rng.random() < 0.02:
            states.append(_Producer(rng))
        rng.choice(states[-producers:]).write(journal, committed)
    return journal, committed


class _Producer:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.id = ProducerID(rng.randbytes(6))
        self.clock = rng.randrange(2, 1000)  # so that the clocks of producers overlap
        self.acked = self.clock - 1
        self.pending: list[Envelope] = []
        self.last: tuple[int, int] | None = None

    def write(self, journal: Journal, committed: list[Envelope]) -> None:
        rng = self.rng
        roll = rng.random()
        if self.last is not None and roll < 0.15:
            journal.add(self.id, *self.last)  # the append was retried
            return
        step = rng.choice((1, 16, 160, 1600))
        if self.pending and roll < 0.20:
            # It died, and what came after it sends the acknowledgement of its checkpoint again.
            journal.add(self.id, self.acked, ACK)
            self.pending.clear()
            self.last = None
            self.clock += 160
        elif self.pending and roll < 0.45:
            self.clock += step
            committed += [*self.pending, journal.add(self.id, self.clock, ACK)]
            self.pending.clear()
            self.acked = self.clock
            self.last = self.clock, ACK
        elif not self.pending and roll < 0.5:
            self.clock += step
            flags = rng.choice((OUTSIDE, OUTSIDE, ACK))
            committed.append(journal.add(self.id, self.clock, flags))
            self.acked = self.clock
            self.last = self.clock, flags
        else:
            self.clock += step
            self.pending.append(journal.add(self.id, self.clock, CONTINUE))
            self.last = self.clock, CONTINUE
