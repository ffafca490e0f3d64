"""Rows with the right checksum and another form than any version wrote: the error is that of a damaged store.

A store has rows of all kinds. A row is taken apart (msgpack, or bytes), one element of it is given another type,
another number, or is left out, and the checksum is made anew. Then the store is checked, measured and run.
"""

from __future__ import annotations

import random
import shutil
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import seeds
from forks import Forks
from sets import bounded

import cues
from cues import codec, groups
from cues.base import names
from cues.base.names import ProcessorKey
from cues.engine import replays
from cues.engine.replays import ReplayNote
from cues.errors import CuesError, StoreDamaged
from cues.forwarding import external_writers
from cues.forwarding.external_writers import SourceRow
from cues.groups.group_rows import MemberRow
from cues.operate import target as targets
from cues.operate.stores import StorePlace
from cues.records import sealed
from cues.steps.pending import Due, PendingRow
from cues.storage import timeline, transaction
from cues.testing import run_until_idle
from cues.tools import check
from cues.txn import Publisher
from cues.txn.consumer_rows import ConsumerRow

pytestmark = pytest.mark.damages_stores

OTHERS: list[Any] = [
    None, True, -1, 0, 7, 1 << 63, 1.5, float("inf"), "", "text", b"", b"12345678", [], [[]], [1, 2, 3], {}, {"a": 1},
    {1: 2},
]  # fmt: skip


def graph_of(place: Path) -> cues.Graph:
    """A source, keyed state, errors, a pause, timers, and queues in another store."""
    graph = cues.Graph(
        "g", store=place / "s", errors="errors", queues={"away": cues.QueueOptions(path=place / "other")}
    )

    @graph.source("in")
    def numbers(position: Any) -> Iterator[tuple[int, dict[str, int]]]:
        yield from ((n, {"n": n, "k": n % 2}) for n in range(position or 0, 6))

    @graph.stream("in", "away", id="f", key="k", max_errors="5/h")
    def f(message: dict[str, Any], process: Any) -> dict[str, Any]:
        process.state["sum"] = process.state.get("sum", 0) + message["n"]
        if message["n"] == 3:
            raise ValueError("three")
        return message

    graph.stream("away", "back", id="r")(lambda message: message)
    graph.sink("back", id="s")(lambda message: None)
    return graph


def make(path: str) -> None:
    place = Path(path)
    with cues.open(place / "s") as store, cues.open(place / "other") as other, Publisher() as publisher:
        run_until_idle(graph_of(place), store)
        store.queue("in").tailer("reader").read_many(2)
        store.queue("old", retention="1h").appender().write({"n": 1})
        queue = store.queue("journal")
        publisher.publish_uncommitted(lambda message: queue, {"n": 1})
        intents = publisher.build_ack_intents()
        publisher.append_ack_intents(intents)
        publisher.publish_uncommitted(lambda message: queue, {"n": 2})
        with groups.Member(store, ["in"], "team") as member:
            member.poll()
        cues.redrive(graph_of(place), store=store, all=True)
        cues.pause(store, processor="s")
        row = ConsumerRow("c", "file.json", 1, {"in": 2}, (other.id,), 7)

        def put(txn: Any) -> None:
            external_writers.put(txn, "job", SourceRow("old", 2, ["range", 1]))
            sealed.put(txn, names.consumer_key("ab" * 8), row.pack())
            sealed.put(txn, names.age_key("old"), codec.pack([[1, 7]]))
            sealed.put(txn, names.graph_key("g"), codec.pack({"processors": ["g.f"], "keys": {"g.f": "k"}}))
            sealed.put(
                txn, names.pending_key(ProcessorKey("g.s")), PendingRow(7, {(other.id, "away"): Due(7, 1, 2)}).pack()
            )
            gone = MemberRow(b"12345678", 7, b"87654321", 30.0, True, 1 << 62, ("in",), (("in",),), ("o*",))
            sealed.put(txn, names.member_key("team", "gone"), gone.pack())
            timeline.begin(txn, [("in", row_of_log)])

        row_of_log = store.queue("in").core.row()
        store.core.commit(put)


def uses() -> Iterator[tuple[str, Callable[[cues.Store, Path], Any]]]:
    yield "check", lambda store, place: store.check() or check.check_others(store)
    yield "measure", lambda store, place: StorePlace(targets.resolve(store.path)).measure()
    yield "groups", lambda store, place: [groups.describe(store, name) for name in groups.list_groups(store)]
    yield "member", lambda store, place: groups.Member(store, ["in"], "team").close()
    yield "read", lambda store, place: list(store.queue("in").tailer("reader"))
    yield "append", lambda store, place: store.queue("old").appender().write_many([{"n": 1}, {"n": 2}])
    yield "run", lambda store, place: run_until_idle(graph_of(place), store)
    yield "resume", lambda store, place: cues.resume(store)
    yield "purge", lambda store, place: store.queue("in").purge(before=3)
    yield "backup", lambda store, place: store.backup(place / "b")


# --- other forms ----------------------------------------------------------------------------------


def parts_of(raw: bytes) -> tuple[bytes, Any]:
    """Return the bytes before the msgpack of a row, and its value; ``b""`` and None if it has no msgpack."""
    body = raw[:-8]
    for start in (0, 1, 32):
        try:
            value = codec.unpack(body[start:])
        except Exception:  # it is not msgpack
            continue
        if isinstance(value, (list, dict)):
            return body[:start], value
    return b"", None


def changed(value: Any, dice: random.Random) -> Any:
    """The value with one element of another type, one more, or one less."""
    if isinstance(value, dict) and value and dice.random() < 0.8:
        key = dice.choice(list(value))
        rest = {name: kept for name, kept in value.items() if name != key}
        return rest if dice.random() < 0.2 else {**rest, key: changed(value[key], dice)}
    if isinstance(value, list) and value and dice.random() < 0.8:
        at = dice.randrange(len(value))
        choice = dice.random()
        new = [] if choice < 0.15 else [value[at], None] if choice < 0.3 else [changed(value[at], dice)]
        return [*value[:at], *new, *value[at + 1 :]]
    return dice.choice([other for other in OTHERS if type(other) is not type(value) or dice.random() < 0.3])


def other_form(key: bytes, raw: bytes, dice: random.Random) -> bytes:
    """The row with another form, and with the right checksum."""
    head, value = parts_of(raw)
    if value is not None and dice.random() < 0.85:
        return sealed.seal(key, head + codec.pack(changed(value, dice)))
    body = raw[:-8]
    at = dice.randrange(len(body) + 1)
    rest = dice.choice([body[:at], body + bytes(at), body[at:], body[:at] + dice.randbytes(3) + body[at + 3 :], b"\0"])
    return sealed.seal(key, rest or b"\0")


def kind_of(key: bytes) -> str:
    return key.split(b"\0")[1].decode()


def rows_of(place: Path) -> list[tuple[str, bytes, bytes]]:
    """The rows with a checksum of both stores: the name of the store, key and row."""
    found = []
    for name in ("s", "other"):
        with cues.open(place / name) as store, store.core.view() as txn:
            found += [(name, bytes(key), bytes(raw)) for key, raw in transaction.rows(txn, b"\0")]
    return [row for row in found if row[1] != names.FORMAT_KEY and sealed.intact(*row[1:])]


def attack(path: str, seed: int, count: int) -> tuple[list[str], int, int]:
    """Use stores with rows of other forms; return the errors that are not of Cues.

    And how many of these rows the check found, and how many uses ended without an error.
    """
    dice, place, found, told_of, ended = random.Random(seed), Path(path), list[str](), 0, 0
    rows = rows_of(place)
    kinds = sorted({kind_of(key) for _, key, _ in rows})
    for n in range(count):
        kind = kinds[n % len(kinds)]
        where, key, raw = dice.choice([row for row in rows if kind_of(row[1]) == kind])
        wrong = other_form(key, raw, dice)
        copy = place / str(n)
        for name in ("s", "other"):
            (copy / name).mkdir(parents=True)
            shutil.copy(place / name / "data.mdb", copy / name)
        with cues.open(copy / where) as store:
            store.core.commit(lambda txn, key=key, wrong=wrong: txn.put(key, wrong))
        told = None
        for use, call in uses():  # those that only look are the first
            problem = ""
            try:
                with cues.open(copy / "s") as store:
                    result = call(store, copy)
                told = bool(result) if told is None else told
                ended += 1
            except StoreDamaged as error:
                problem = "" if told or where != "s" else f"the check found nothing: {error}"
            except CuesError:
                pass  # it contradicts another row
            except Exception as error:
                last = traceback.extract_tb(error.__traceback__)[-1]
                problem = f"{error!r} at {last.filename}:{last.lineno}"
            if problem:
                found.append(f"{use}, {key!r} = {parts_of(wrong)[1] or wrong!r}: {problem}")
        told_of += bool(told)
        shutil.rmtree(copy)
    return found, told_of, ended


@bounded("count", 78, 20_000)
def test_a_row_of_another_form_is_damage_wherever_it_is_read(tmp_path: Path, forks: Forks, count: int) -> None:
    forks.run("test_row_forms:make", str(tmp_path))
    seed = seeds.new()
    outcome = forks.run("test_row_forms:attack", str(tmp_path), seed, count)
    assert not outcome.error and not outcome.signal, (seed, outcome)
    found, told_of, ended = outcome.value
    assert not found, f"seed {seed}: {len(found)} of {count}, first: {found[:5]}"
    print(f"{told_of} of {count} rows are found by the check; {ended} uses ended without an error")
    assert told_of > count // 3 and ended > count, (seed, told_of, ended)


FORMS: list[tuple[Any, Any, bool]] = [
    (1, int, True), (True, int, False), (1.0, int, False), (None, int, False), (None, (int, None), True),
    ({}, object, True), ([], [int, ...], True), ([1, "x"], [int, ...], False), ([1, "x"], [int, str], True),
    ([1], [int, str], False), ((1, "x"), [int, str], True), ({"a": 1}, {str: int}, True), ({1: 1}, {str: int}, False),
    ({"a": 1, "more": 2}, {"a": int}, True), ({"more": 2}, {"a": int}, False), ({}, {"a?": int}, True),
    ({"a": "x"}, {"a?": int}, False), ({"a": [[1, 2]]}, {"a": [[int, int], ...]}, True), ([], {"a": int}, False),
]  # fmt: skip


@pytest.mark.parametrize(("value", "form", "does"), FORMS)
def test_a_value_has_a_form_or_not(value: Any, form: Any, does: bool) -> None:
    assert sealed.fits(value, form) is does


def test_the_note_of_a_replay_ignores_new_keys_and_refuses_other_forms() -> None:
    note = ReplayNote("/old", b"12345678", "g", ["f"], None, True, {"in": [[1, 5]]}, {"in": b"1"}, [], [], {})
    plain = vars(note)
    assert replays.unpack(sealed.seal(names.REPLAY_KEY, codec.pack(plain | {"later": 1}))) == note
    for name in ("source", "copied", "log_rows"):
        with pytest.raises(StoreDamaged, match="note of the replay cannot be used: no version of Cues wrote"):
            replays.unpack(sealed.seal(names.REPLAY_KEY, codec.pack(plain | {name: 7})))
