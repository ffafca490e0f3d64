"""The sequencer: every outcome, stories of whole logs, and random logs through rings of every size."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import seeds
from txn_logs import ACK, CONTINUE, OUTSIDE, A, B, Journal, Reader, random_journal

from cues.errors import InvalidArgument
from cues.records.identity import ZERO_UUID
from cues.txn import Checkpoint, Envelope, Outcome, ProducerState, SequenceError, Sequencer, build_uuid

DAY_NS = 86_400_000_000_000


def outcomes(journal: Journal, ring: int = 16) -> list[str]:
    reader = Reader([journal], ring)
    reader.read_all()
    return [one.name for one in reader.outcomes]


def clocks(journal: Journal, ring: int = 16) -> list[int]:
    return [one.clock for one in Reader([journal], ring).read_all()]


def test_two_producers_whose_transactions_overlap_are_delivered_as_they_commit() -> None:
    j = Journal()
    a1, b1 = j.add(A, 1, CONTINUE), j.add(B, 5, CONTINUE)
    a2, b2 = j.add(A, 2, CONTINUE), j.add(B, 6, CONTINUE)
    b_ack, a_ack = j.add(B, 7, ACK), j.add(A, 3, ACK)
    outside = j.add(A, 4, OUTSIDE)
    assert Reader([j], 16).read_all() == [b1, b2, b_ack, a1, a2, a_ack, outside]
    assert outcomes(j) == [
        "ContinueBeginSpan", "ContinueBeginSpan", "ContinueExtendSpan", "ContinueExtendSpan",
        "AckCommitRing", "AckCommitRing", "OutsideCommit",
    ]  # fmt: skip
    assert outcomes(j, ring=1)[4:6] == ["AckCommitReplay", "AckCommitReplay"]
    assert outcomes(j, ring=6) == outcomes(j)  # the ring holds exactly what is needed
    assert outcomes(j, ring=5)[4:6] == ["AckCommitRing", "AckCommitReplay"]
    for ring in range(1, 9):
        assert Reader([j], ring).read_all() == [b1, b2, b_ack, a1, a2, a_ack, outside]


def test_what_is_at_or_below_the_producers_clock_is_a_repetition() -> None:
    j = Journal()
    for clock, flags in ((5, OUTSIDE), (5, OUTSIDE), (4, OUTSIDE), (5, CONTINUE), (6, CONTINUE), (6, CONTINUE),
                         (8, CONTINUE), (7, CONTINUE), (9, ACK), (9, ACK), (9, CONTINUE)):  # fmt: skip
        j.add(A, clock, flags)
    assert outcomes(j) == [
        "OutsideCommit", "OutsideAlreadyAcked", "OutsideAlreadyAcked", "ContinueAlreadyAcked", "ContinueBeginSpan",
        "ContinueTxnClockLarger", "ContinueExtendSpan", "ContinueTxnClockLarger", "AckCommitRing", "AckRollback",
        "ContinueAlreadyAcked",
    ]  # fmt: skip
    assert clocks(j) == [5, 6, 8, 9]


def test_an_acknowledgement_that_comes_again_rolls_back_what_is_pending() -> None:
    j = Journal()
    for clock, flags in ((1, CONTINUE), (2, ACK), (3, CONTINUE), (4, CONTINUE), (2, ACK), (3, CONTINUE), (5, ACK)):
        j.add(A, clock, flags)
    assert clocks(j) == [1, 2, 3, 5]
    assert outcomes(j)[4:] == ["AckRollback", "ContinueBeginSpan", "AckCommitRing"]


def test_an_acknowledgement_between_pending_clocks_drops_those_beyond_it() -> None:
    """A producer that begins its next transaction before it acknowledged this one loses it."""
    j = Journal()
    for clock, flags in ((160, CONTINUE), (640, CONTINUE), (480, ACK), (960, ACK)):
        j.add(A, clock, flags)
    for ring in (1, 2, 3, 16):
        assert clocks(j, ring) == [160, 480, 960]
    assert outcomes(j) == ["ContinueBeginSpan", "ContinueExtendSpan", "AckCommitRing", "AckEmpty"]


def test_an_acknowledgement_below_the_last_goes_back_and_delivers_again(caplog: pytest.LogCaptureFixture) -> None:
    """The producer recovered an older state; to ignore that could lose messages."""
    j = Journal()
    for clock, flags in ((1, CONTINUE), (2, ACK), (3, CONTINUE), (4, ACK), (2, ACK), (3, CONTINUE), (4, ACK)):
        j.add(A, clock, flags)
    assert clocks(j) == [1, 2, 3, 4, 3, 4]
    assert "went back from clock 0x4 to 0x2" in caplog.text


def test_a_message_outside_of_transactions_drops_what_is_pending(caplog: pytest.LogCaptureFixture) -> None:
    j = Journal()
    for clock, flags in ((1, CONTINUE), (7, CONTINUE), (3, OUTSIDE), (8, ACK)):
        j.add(A, clock, flags)
    assert clocks(j) == [3, 8]
    assert "drops the pending messages" in caplog.text
    assert outcomes(j)[2:] == ["OutsideCommit", "AckEmpty"]


def test_unknown_flags_mean_outside_of_transactions() -> None:
    j = Journal()
    j.add(A, 1, 0x3FF)
    j.add(A, 2, 3)
    assert outcomes(j) == ["OutsideCommit", "OutsideCommit"]


def test_a_message_without_a_uuid_is_delivered_whenever_it_is_read() -> None:
    sequencer = Sequencer()
    for _ in range(2):
        for uuid in (ZERO_UUID, build_uuid(A, 0, CONTINUE), build_uuid(A, 0, ACK)):
            envelope = Envelope("j", 10, 20, uuid, None)
            assert sequencer.queue(envelope) is Outcome.OutsideCommit
            assert sequencer.step() is envelope
            assert sequencer.step() is None
    assert sequencer.checkpoint() == Checkpoint({"j": 20}, ())


def test_one_producer_in_two_journals_is_two() -> None:
    one, two = Journal("one"), Journal("two")
    one.add(A, 5, CONTINUE)
    two.add(A, 3, CONTINUE)
    one.add(A, 6, ACK)
    reader = Reader([one, two], 16)
    assert [(e.journal, e.clock) for e in reader.read_all()] == [("one", 5), ("one", 6)]
    assert reader.sequencer.has_pending()
    assert set(reader.sequencer.checkpoint().producers) == {
        ProducerState("one", A, 6, -1),
        ProducerState("two", A, 2, two.log[0].begin),
    }
    assert not reader.sequencer.has_pending()  # it looks at what began since the checkpoint


def test_a_checkpoint_in_the_middle_of_a_commit_continues_in_the_middle() -> None:
    j = Journal()
    a1, a2, a3 = j.add(A, 1, CONTINUE), j.add(A, 2, CONTINUE), j.add(A, 3, ACK)
    for ring in (1, 2, 16):
        reader = Reader([j], ring)
        for _ in range(2):
            reader.read(j)
        before = reader.sequencer.checkpoint()
        assert before == Checkpoint({j.name: a2.end}, (ProducerState(j.name, A, 0, a1.begin),))
        reader.read(j)
        reader.step()
        reader.step()
        assert reader.delivered == [a1, a2]
        middle = reader.sequencer.checkpoint()  # a2 is out, so it is not done with
        assert middle == Checkpoint({j.name: a2.end}, (ProducerState(j.name, A, 1, a2.begin),))
        again = Reader([j], ring)
        again.sequencer = Sequencer(middle.producers, ring, middle.offsets)
        assert again.sequencer.checkpoint() == middle
        assert again.read_all() == [a2, a3]
        assert again.sequencer.checkpoint() == Checkpoint({j.name: a3.end}, (ProducerState(j.name, A, 3, -1),))


def test_offsets_of_a_checkpoint_are_a_copy() -> None:
    given = {"j": 3}
    sequencer = Sequencer(offsets=given)
    found = sequencer.checkpoint()
    found.offsets["j"] = 9
    given["j"] = 8
    assert sequencer.checkpoint().offsets == {"j": 3}


def test_calls_out_of_turn_are_refused_and_change_nothing() -> None:
    j = Journal()
    a1, a2, ack = j.add(A, 1, CONTINUE), j.add(A, 2, CONTINUE), j.add(A, 3, ACK)
    sequencer = Sequencer(ring=1)
    assert sequencer.step() is None
    for call in (sequencer.replay_range, lambda: sequencer.start_replay([])):
        with pytest.raises(SequenceError):
            call()
    for envelope in (a1, a2, ack):
        outcome = sequencer.queue(envelope)
    assert outcome is Outcome.AckCommitReplay
    before = sequencer.checkpoint()
    with pytest.raises(SequenceError, match="must be read again"):
        sequencer.step()
    with pytest.raises(SequenceError, match="remain to be handed out"):
        sequencer.queue(ack)
    assert sequencer.checkpoint() == before
    assert sequencer.replay_range() == (j.name, a1.begin, ack.begin)
    sequencer.start_replay([a1, a2])
    delivered = [sequencer.step(), sequencer.step(), sequencer.step()]
    assert delivered == [a1, a2, ack] and sequencer.step() is None


def test_a_replay_of_something_else_is_refused_and_another_one_continues() -> None:
    j = Journal()
    a1, a2, ack = j.add(A, 1, CONTINUE), j.add(A, 2, CONTINUE), j.add(A, 3, ACK)

    def place(begin: int, end: int, journal: str = j.name) -> Envelope:
        return Envelope(journal, begin, end, a2.uuid, None)

    def failing() -> Iterator[Envelope]:
        raise OSError("the disk is gone")
        yield a2

    sequencer = Sequencer(ring=1)
    for envelope in (a1, a2, ack):
        sequencer.queue(envelope)
    sequencer.start_replay([a1])
    assert sequencer.step() == a1
    before = sequencer.checkpoint()
    for replay, text in (
        ([place(a2.begin, a2.end, "other")], r"wrong journal \(other; expected test/journal\)"),
        ([place(a1.begin - 1, a1.end)], rf"wrong begin \({a1.begin - 1}; expected >= {a1.begin}\)"),
        ([place(a2.begin, ack.begin + 1)], rf"wrong end \({ack.begin + 1}; expected <= {ack.begin}\)"),
        (failing(), "replay failed: the disk is gone"),
    ):
        sequencer.start_replay(replay)
        with pytest.raises(SequenceError, match=text):
            sequencer.step()
        assert sequencer.checkpoint() == before
        with pytest.raises(SequenceError, match="must be read again"):
            sequencer.step()  # not as if that replay had come to its end
    sequencer.start_replay([a1, a2])  # a1 was handed out, so it is passed over
    assert [sequencer.step(), sequencer.step(), sequencer.step()] == [a2, ack, None]


def test_the_application_may_write_into_what_it_is_given() -> None:
    j = Journal()
    j.add(A, 1, CONTINUE, {})
    j.add(A, 2, ACK, {})
    sequencer = Sequencer()
    for envelope in j.log:
        sequencer.queue(envelope)
    while found := sequencer.step():
        found.clock = found.producer = found.begin = 99
    assert [state.last_ack for state in sequencer.checkpoint().producers] == [2]


def test_old_producers_are_forgotten_after_the_horizon_and_open_spans_are_kept_on_request() -> None:
    second = 10_000_000 << 4  # of a clock

    def read() -> Sequencer:
        j = Journal()
        j.add(A, 10 * second, CONTINUE)
        j.add(B, 100 * second, OUTSIDE)
        reader = Reader([j], 16)
        reader.read_all()
        return reader.sequencer

    assert len(read().checkpoint().producers) == 2
    assert len(read().checkpoint(90 * 10**9).producers) == 2
    assert len(read().checkpoint(200 * 10**9).producers) == 2  # a horizon before the clock's beginning
    sequencer = read()
    assert sequencer.has_pending()
    assert [one.producer for one in sequencer.checkpoint(89 * 10**9).producers] == [B]
    assert [one.producer for one in read().checkpoint(89 * 10**9, keep_open=True).producers] == [A, B]


def test_the_ring_bounds_what_is_in_memory_however_many_producers_never_acknowledge() -> None:
    sequencer = Sequencer(ring=50)
    for n in range(3000):
        producer = (n % 300).to_bytes(6, "big")
        sequencer.queue(Envelope("j", n, n + 1, build_uuid(producer, 1 + n, CONTINUE), None))
        assert sum(len(partial.span) for partial in sequencer._partials.values()) <= 50
        assert len(sequencer._ring) <= 50


def test_states_that_are_none_are_refused() -> None:
    wrong: Any = (
        (ProducerState("j", b"123", 1),),  # type: ignore[arg-type]
        (ProducerState("j", "123456", 1),),  # type: ignore[arg-type]
        (ProducerState("j", A, -1),),
        (ProducerState("j", A, "1"),),  # type: ignore[arg-type]
        (ProducerState("j", A, 1, -2),),
        [5],
    )
    for states in wrong:
        with pytest.raises(InvalidArgument, match="not a state of a producer"):
            Sequencer(states)
    with pytest.raises(InvalidArgument, match="the second state of its producer"):
        Sequencer((ProducerState("j", A, 1),) * 2)
    wrong = Checkpoint()
    with pytest.raises(InvalidArgument, match=r"checkpoint\.producers"):
        Sequencer(wrong)
    for wrong in (0, "8", 1.5, None):
        with pytest.raises(InvalidArgument, match="ring="):
            Sequencer(ring=wrong)


def random_run(seed: int) -> None:
    """Random logs, read with a ring of any size, restored from a checkpoint at any moment."""
    rng = random.Random(seed)
    pairs = [random_journal(rng, name, rng.randrange(5, 120), rng.randrange(1, 5)) for name in ("one", "two")]
    journals = [journal for journal, _ in pairs]
    ring = rng.choice((1, 2, 3, 5, 8, 30, 1000))
    reader = Reader(journals, ring)
    saved, processed = reader.sequencer.checkpoint(), 0
    restores = rng.choice((0, 0.02, 0.1))
    left = list(journals)
    while left:
        if rng.random() < 0.3:
            out = reader.sequencer._out is not None
            horizon = rng.choice((0, 0, 1 << 60))
            saved, processed = reader.sequencer.checkpoint(horizon), len(reader.delivered) - out
            assert Sequencer(saved.producers, ring, saved.offsets).checkpoint() == saved
        if rng.random() < restores:
            reader.sequencer = Sequencer(saved.producers, ring, saved.offsets)
            del reader.delivered[processed:]
            left = list(journals)
        if reader.sequencer._emit is not None:
            reader.step()
            continue
        journal = rng.choice(left)
        if not reader.read(journal):
            left.remove(journal)
    for journal, committed in pairs:
        found = [one for one in reader.delivered if one.journal == journal.name]
        assert [(e.producer, e.clock, e.flags) for e in found] == [(e.producer, e.clock, e.flags) for e in committed]
        assert [e.begin for e in found] == [e.begin for e in committed]


@pytest.mark.parametrize("block", range(4))
def test_the_size_of_the_ring_never_changes_what_is_delivered(block: int) -> None:
    first = seeds.new()
    for seed in range(first, first + 150):
        try:
            random_run(seed)
        except Exception:
            print(f"CUES_TEST_SEED={seed}")
            raise


@pytest.mark.long
def test_the_size_of_the_ring_never_changes_what_is_delivered_long() -> None:
    first = seeds.new()
    for seed in range(first, first + 20_000):
        try:
            random_run(seed)
        except Exception:
            print(f"CUES_TEST_SEED={seed}")
            raise
