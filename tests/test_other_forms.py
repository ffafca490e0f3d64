"""Decoders of data with the right checksum that no version of Cues wrote: each raises the one error of its kind.

A valid value is decoded, one part of it is replaced by each of other types, dropped, or added, and the result is
encoded with the right checksum and given to the product. It is accepted, or refused by an error that says what to try.
Bytes that are not such a structure at all are in tests/fuzzing.py.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import fuzzing
import pytest

import cues
from cues import codec
from cues.errors import CuesError, Diverged, GraphError, StoreDamaged
from cues.queues.log import Log
from cues.records import batch
from cues.spark.cluster import batches, files, lease, ledger
from cues.spark.cluster.directory import parsed_entry, sealed_entry

OTHERS: list[Any] = [None, True, -1, 1 << 70, 2.5, "", "x", [], [1], [[], {}], {}, {"x": {}}]


def variants(value: Any, others: Iterable[Any] = OTHERS) -> Iterator[Any]:
    """The value with one part replaced, dropped or added."""
    for path in list(_paths(value)):
        for other in others:
            yield _with(value, path, other)
        if path:
            yield _with(value, path, _DROP)
        if isinstance(_at(value, path), dict):
            yield _with(value, (*path, "another"), 1)
        if isinstance(_at(value, path), list):
            yield _with(value, path, [*_at(value, path), 1])


_DROP = object()


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from _paths(part, (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _with(value: Any, path: tuple[Any, ...], other: Any) -> Any:
    if not path:
        return other
    value = copy.deepcopy(value)
    holder = _at(value, path[:-1])
    if other is _DROP:
        del holder[path[-1]]
    else:
        holder[path[-1]] = other
    return value


def refused(values: Iterable[Any], decode: Callable[[Any], Any], error: type[CuesError]) -> tuple[int, int]:
    """Decode all values; return how many were accepted, and how many were refused by this error."""
    counts = [0, 0]
    for value in values:
        try:
            decode(value)
            counts[0] += 1
        except Exception as found:
            if not isinstance(found, error) or " Try: " not in str(found):
                raise AssertionError(f"{type(found).__name__}: {found} for {value!r:.500}") from found
            counts[1] += 1
    return counts[0], counts[1]


class Here(files.Files):
    """One file, whatever its name is."""

    url = "here"

    def __init__(self, raw: bytes) -> None:
        self.raw = raw

    def read(self, name: str) -> bytes | None:
        return self.raw

    def ensure(self, name: str, data: bytes) -> bytes:
        return self.raw

    def names(self, folder: str) -> list[str]:
        return ["g.driver.json"]


Here.__abstractmethods__ = frozenset()  # type: ignore[misc]


def of_json(decode: Callable[[Here], Any]) -> Callable[[Any], Any]:
    def use(value: Any) -> Any:
        raw = files.sealed_json(value) if isinstance(value, dict) else json.dumps(value).encode()
        return decode(Here(raw))

    return use


RECORDS = [json.loads(raw) for raw in fuzzing.directory_records()]
for record in RECORDS:
    del record["seal"]
RECORDS[1] |= {
    "taking": {"ranges": {"g.f.in": [1, 4]}, "size": 3, "now_ns": 5},
    "state": [[10, ["a"]], [10, ["b"], 7]],
    "held": [{"files": {"g.f.in": "h"}, "count": 3, "start": 1, "next_ns": 8, "bytes": 90}],
    "ends": {"out": 7},
    "format": ledger.FORMAT,
}
SMALL: dict[str, tuple[Any, Callable[[Here], Any]]] = {
    "claim": (RECORDS[0], lambda at: _ledger(at).read()),
    "step": (RECORDS[1], lambda at: _ledger(at).read()),
    "queue": ({"identity": "0a1b2c3d4e5f6071", "queue": "q"}, lambda at: files.identity_of(at, "queue.json", at.raw)),
    "plan": ({"id": "ab", "settings": {"a": "1"}}, lambda at: batches.Batches(at, "g.f").begin({})),
    "batch": (
        {"list": [{"in": [1, 4]}, "9f"]},
        lambda at: batches.Batches(at, "g.f").list_in("b", at.raw, batches.BATCH),
    ),
    "lease": (
        {"owner": "me", "host": "h", "pid": 1, "since": "2026-03-01T12:00:00+00:00"},
        lambda at: list(lease.holders(at)),
    ),
}


def _ledger(at: Here) -> ledger.Ledger:
    found = ledger.Ledger(at, "g.f", "me")
    found.newest = lambda: 3  # type: ignore[method-assign]
    return found


@pytest.mark.interpreted
@pytest.mark.parametrize("kind", SMALL)
def test_a_small_file_of_a_shared_directory_of_another_form_is_refused(kind: str) -> None:
    valid, decode = SMALL[kind]
    use = of_json(decode)
    use(valid)
    accepted, found = refused(variants(valid), use, Diverged)
    assert accepted + found > 30 and (found > accepted or kind == "lease"), (accepted, found)


def test_an_entry_of_a_log_of_another_form_is_refused() -> None:
    for raw in fuzzing.log_entries():
        valid = [json.loads(line) for line in raw.decode().splitlines()[1:]]
        refused(
            (each for each in variants(valid) if isinstance(each, list)),
            lambda value: parsed_entry(Here(b""), "3.json", sealed_entry(value)),
            Diverged,
        )


def test_the_plain_data_of_a_graph_of_another_form_is_refused() -> None:
    def use(data: Any) -> None:
        graph = cues.Graph.from_dict(data)
        try:
            graph.plan()
        except CuesError as error:
            raise GraphError(error.message, error.hint) from error

    use(fuzzing.a_graph())
    accepted, found = refused(variants(fuzzing.a_graph()), use, CuesError)  # type: ignore[arg-type]
    assert found > accepted > 20


@pytest.mark.damages_stores
def test_a_record_of_another_form_is_refused(tmp_path: Path) -> None:
    """Bodies, provenance and headers, each with the right checksum, at all places at which they are read."""
    with cues.open(tmp_path / "s", "process") as store:
        log = Log(store, store.queue("in").core.log.queue)
        bodies = [codec.pack(each) for each in variants([{"n": 1, "of": {"m": [1]}}, {"n": 2}])]
        bodies += [b"", b"\xc1", b"\x92\x81", codec.pack([{}] * 2) + b"x"]
        origins = [codec.pack(each) for each in variants([{"in": [[7], 5]}, {"tx/t": 3}])]
        good = codec.pack([{"n": 1}, {"n": 2}])
        raws = [batch.seal(batch.Page(0, 2, body), 1, 7) for body in bodies]
        raws += [
            batch.seal(batch.Page(batch.PROVENANCE, 2, len(one).to_bytes(2, "big") + one + good), 1, 7)
            for one in origins
        ]
        whole = batch.seal(batch.Page(batch.PRODUCER | batch.HASH, 2, bytes(32) + good), 1, 7)
        for at in range(8, len(whole)):
            rest = whole[8:at]
            raws.append(batch.checksum(rest, 1) + rest)
            raws += [(batch.checksum(r := rest + bytes([b]) + whole[at + 1 :], 1) + r) for b in (0, 1, 0x7F, 0xFF)]

        def read(raw: bytes) -> None:
            (record,) = log.batches([(1, raw, [])])
            assert record.stamps is None or record.stamps.clocks is not None
            record.provenance("in", frozenset({"t", "tx"})).at(0)
            messages = record.messages()
            assert len(messages) == record.head.count and all(isinstance(each, dict) for each in messages)

        read(batch.seal(batch.Page(0, 2, good), 1, 7))
        accepted, found = refused(raws, read, CuesError)  # type: ignore[arg-type]
        assert found > 100 and accepted > 10, (accepted, found)
        with pytest.raises(StoreDamaged, match="queue in that holds the messages 1 to 2 has the right checksum"):
            read(raws[0])
