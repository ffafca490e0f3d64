"""Each single bit of what a store keeps: a flip is found by the check, or changes nothing that is read.

Live are the meta pages, the heads and the entries of all pages that the last commit names, and the list of free
pages. The content of free pages, and the room between the entries of a page, are not read.
"""

from __future__ import annotations

import gzip
import os
import random
import re
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import damage
import pytest
import seeds
from forks import Forks
from sets import EIGHTHS, is_in

import cues as library
from cues.base import names
from cues.base.names import ProcessorKey
from cues.errors import Diverged
from cues.spark.cluster.files import ANY_FORM, parsed, sealed_json
from cues.storage import transaction
from cues.storage.pages import DataFile, Root

pytestmark = pytest.mark.damages_stores

KEYS = Path(__file__).parent / "golden" / "v1-all-keys"
"""Stores with every kind of row (tests/golden/everything.py)."""


def make(path: Path) -> None:
    """A store of a few pages: a graph with state, an error message, a cut message, a named tailer."""
    graph = library.Graph("g", store=path, errors="errors")

    @graph.stream("in", "out", id="f", key="k")
    def f(message: dict[str, Any], process: Any) -> dict[str, Any]:
        process.state["sum"] = process.state.get("sum", 0) + message["n"]
        if message["n"] == 3:
            raise ValueError("three")
        return message

    with library.open(path, map_size=damage.MAP_BYTES) as store:
        queue = store.queue("in")
        queue.appender().write_many([{"n": n, "k": n % 2} for n in range(6)])
        queue.appender().write({"n": 7, "k": 0, "long": "x" * 5000})
        with graph.start(store=store) as running:
            running.wait_idle(30)
        queue.tailer("reader").read_many(2)


def everything(path: str) -> tuple[list[str], str]:
    """The problems of a store; and without problems, all rows, messages and values of state that can be read."""
    try:
        with library.open(path, readonly=True) as store:
            problems = store.check()
            if problems:
                return problems, ""
            found = [damage.digest(store)]
            with store.core.view() as txn:
                found += [repr(row) for row in transaction.rows(txn, b"\0")]
            for name, _ in list(store.core.entries()):
                handle = store.core.database(name)
                with store.core.view() as txn:
                    found += [repr((name, key, value)) for key, value in txn.cursor(handle)]
            return [], "\n".join(found)
    except library.CuesError as error:
        return [str(error)], ""


def damaged(source: str, copy: str, places: list[tuple[int, int]]) -> Iterator[Path]:
    """A copy of a store in which one after another of these bits is wrong, and at the end none."""
    directory = Path(copy)
    directory.mkdir(parents=True)
    data = Path(source, "data.mdb").read_bytes()
    (directory / "data.mdb").write_bytes(data)
    with (directory / "data.mdb").open("r+b", buffering=0) as file:
        for offset, bit in places:
            os.pwrite(file.fileno(), bytes([data[offset] ^ 1 << bit]), offset)
            yield directory
            os.pwrite(file.fileno(), data[offset : offset + 1], offset)
            # Nothing that the reader made is left, and the data file keeps nothing but the wrong bit.
            for path in directory.iterdir():
                if path.name != "data.mdb":
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert (directory / "data.mdb").read_bytes() == data, "a reader changes nothing"
    yield directory
    shutil.rmtree(directory)


def flipped(source: str, copy: str, places: list[tuple[int, int]]) -> list[tuple[list[str], str]]:
    """Flip these bits of a store one after another; the results of each, and of the store without a wrong bit."""
    return [everything(str(directory)) for directory in damaged(source, copy, places)]


def live(path: Path) -> Iterator[tuple[int, str]]:
    """The offsets of the bytes that are in use, and what they are: a kind of row, or a part of the structure."""
    with (path / "data.mdb").open("rb") as file:
        data = DataFile(file.fileno())
        size = data.page_bytes
        meta = data.metas[0]
        number = meta.txnid & 1
        yield from ((number * size + at, "meta") for at in range(152))
        roots: list[tuple[str, Root]] = [("", meta.main), ("free", meta.free)]
        for name, root in roots:
            pages: list[int] = []
            for entry in data.walk(
                root, name, lambda page, count, name, kind: pages.append(page), bool(name != "free")
            ):
                if getattr(entry, "root", None) is not None:
                    roots.append((entry.key.decode(), entry.root))  # type: ignore[union-attr]
            for page in pages:
                start = page * size
                raw = os.pread(file.fileno(), size, start)
                flags, lower = struct.unpack_from("=HH", raw, 10)
                if flags == 4:
                    yield from ((start + at, f"{name} value") for at in range(size))
                    continue
                yield from ((start + at, f"{name or 'rows'} page") for at in range(lower))
                for (at,) in struct.iter_unpack("=H", raw[16:lower]):
                    low, high, node, length = struct.unpack_from("=HHHH", raw, at)
                    key = raw[at + 8 : at + 8 + length]
                    kind = key.split(b"\0")[1].decode() if key.startswith(b"\0") and not name else ""
                    kind = "branch" if flags == 1 else kind
                    stored = 0 if flags == 1 else 8 if node & 1 else low | high << 16
                    what = f"{name or 'rows'} {kind}".strip()
                    yield from ((start + at + n, f"{what} node") for n in range(8))
                    yield from ((start + at + 8 + n, f"{what} key") for n in range(length))
                    yield from ((start + at + 8 + length + n, f"{what} value") for n in range(stored))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Path:
    path = tmp_path_factory.mktemp("bits") / "s"
    forks.run("test_bits:make", path)
    return path


def judge(store: Path, tmp_path: Path, forks: Forks, places: list[tuple[int, str, int]]) -> tuple[int, int, int]:
    """Flip each of these bits. Returns how many were found, crashed the reader, and changed nothing."""
    _, expected = forks.run("test_bits:everything", str(store)).value
    assert expected
    counts = [0, 0, 0]

    def look(part: list[tuple[int, str, int]], at: str) -> None:
        copy = tmp_path / at
        outcome = forks.run("test_bits:flipped", str(store), str(copy), [(offset, bit) for offset, _, bit in part])
        if outcome.signal and len(part) > 1:  # one by one, to know which
            for number, place in enumerate(part):
                look([place], f"{at}-{number}")
            return
        if outcome.signal:
            counts[1] += 1  # `cues check` reads in a child, and says so
            return
        assert not outcome.error, (part, outcome.error)
        *results, right = outcome.value
        assert right == ([], expected)
        for (offset, what, bit), (problems, read) in zip(part, results, strict=True):
            counts[0 if problems else 2] += 1
            assert problems or read == expected, f"bit {bit} of byte {offset} ({what}) went unnoticed"

    for start in range(0, len(places), 50):
        look(places[start : start + 50], str(start))
    return counts[0], counts[1], counts[2]


@pytest.fixture(params=EIGHTHS)
def eighth(request: pytest.FixtureRequest) -> Any:
    return request.param


def chosen(places: list[tuple[int, str, int]], eighth: int | None, dice: random.Random) -> list[tuple[int, str, int]]:
    """The bits of a part; or two of each kind, at random."""
    if eighth is not None:
        return [(offset, what, bit) for offset, what, bit in places if is_in(eighth, offset, bit)]
    kinds: dict[str, list[tuple[int, str, int]]] = {}
    for place in places:
        kinds.setdefault(place[1], []).append(place)
    return [dice.choice(kinds[kind]) for kind in sorted(kinds) for _ in range(2)]


def test_each_bit_that_is_in_use_is_checked_or_harmless(
    store: Path, tmp_path: Path, eighth: int | None, forks: Forks
) -> None:
    """All of them in the long set; a sample, and two of each kind of row and of page, in the slow set."""
    dice = random.Random(seeds.new())
    all = [(offset, what, bit) for offset, what in live(store) for bit in range(8)]
    places = chosen(all, eighth, dice) + (dice.sample(all, 150) if eighth is None else [])
    found, crashed, harmless = judge(store, tmp_path, forks, places)
    print(f"{found} found, {crashed} crashed, {harmless} harmless, of {len(places)}")
    assert found > len(places) * 2 // 3, (found, crashed, harmless)


def golden(name: str, tmp_path: Path) -> Path:
    """A golden store with many kinds of rows."""
    store = tmp_path / "golden"
    store.mkdir()
    (store / "data.mdb").write_bytes(gzip.decompress((KEYS / name / "data.mdb.gz").read_bytes()))
    return store


def keys_of(store: Path) -> list[tuple[int, str, int]]:
    """The bits of the keys of rows, of the names of databases, and of the keys of rows about error messages.

    Without those of branch pages, which only divide the keys of two pages: several keys do that.
    """
    places = [(at, what, bit) for at, what in live(store) for bit in range(8)]
    return [place for place in places if re.fullmatch("(rows|errors)(?! branch)( [a-z]+)? key", place[1])]


@pytest.mark.parametrize("name", ["home", "other", "replay"])
def test_each_bit_of_the_key_of_every_kind_of_row_is_checked(
    tmp_path: Path, name: str, eighth: int | None, forks: Forks
) -> None:
    """All of them in the long set; two of each kind, and two of the database of error messages, in the slow set."""
    store = golden(name, tmp_path)
    places = chosen(keys_of(store), eighth, random.Random(seeds.new()))
    kinds = {what for _, what, _ in places}
    found, crashed, harmless = judge(store, tmp_path, forks, places)
    print(f"{name}: {found} found, {crashed} crashed, of {len(places)} of {len(kinds)} kinds")
    assert not harmless, "a key is never harmless"


@pytest.mark.parametrize("name", ["home", "other", "replay"])
def test_the_first_byte_of_the_first_and_the_last_key_is_checked(tmp_path: Path, name: str, forks: Forks) -> None:
    """With it they may still be in order. The first row about an error message was not looked at then, and the last
    row of the unnamed database was taken for the name of a database."""
    store = golden(name, tmp_path)
    data = (store / "data.mdb").read_bytes()
    keys = {at: what for at, what, _ in keys_of(store)}
    starts = [at for at in keys if at - 1 not in keys]
    rows = [at for at in starts if keys[at].startswith("rows") and data[at] == 0]
    errors = [at for at in starts if keys[at].startswith("errors")]
    ends = [
        (at, keys[at], bit)
        for of in (starts, rows, errors)
        for at in {end(of, key=lambda at: data[at : at + 40]) for end in (min, max) if of}
        for bit in range(8)
    ]
    assert judge(store, tmp_path, forks, ends) == (len(ends), 0, 0)


def test_state_under_the_name_of_a_part_that_no_processor_has_is_found(tmp_path: Path, forks: Forks) -> None:
    """``g.units/1`` became ``g.units.1``, and so a part of ``g.units``."""
    store = golden("home", tmp_path)
    at = (store / "data.mdb").read_bytes().index(b"state:g.units/1") + len("state:g.units")
    places = [place for place in keys_of(store) if place[0] == at]
    assert len(places) == 8 and judge(store, tmp_path, forks, places) == (8, 0, 0)
    units = {"g.units", "g.units/1"}
    parts = [part(ProcessorKey(unit)) for unit in units for part in names.PARTS]
    assert all(names.is_of_unit(name, units) for name in (*units, *parts))
    assert not any(names.is_of_unit(name, units) for name in ("g.units.1", "g.unit", "g.timer", "g", ""))


def searched(source: str, copy: str, places: list[tuple[int, int]]) -> list[str]:
    """Flip each of these bits of a store, and return the error of a look at all rows, as a start makes it."""
    found = []
    for directory in damaged(source, copy, places):
        try:
            with library.open(directory, readonly=True) as store:
                store.core.search()
            found.append("")
        except library.CuesError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("name", ["home", "other", "replay"])
def test_a_start_finds_each_kind_of_row_under_each_wrong_key(
    tmp_path: Path, name: str, eighth: int | None, forks: Forks
) -> None:
    """All bits of the keys of rows in the long set, two of each kind in the slow set.

    LMDB keeps the place of the row, so a search for others may end there. Not among them are the empty notes of
    readers, which a start writes again, and the names of logs, which are found when a log is opened.
    """
    store = golden(name, tmp_path)
    places = [place for place in keys_of(store) if re.fullmatch("rows (?!sub )[a-z]+ key", place[1])]
    places = chosen(places, eighth, random.Random(seeds.new()))
    assert len(places) > 10
    for start in range(0, len(places), 100):
        part = places[start : start + 100]
        outcome = forks.run(
            "test_bits:searched", str(store), str(tmp_path / "copy"), [(at, bit) for at, _, bit in part]
        )
        assert not outcome.error and not outcome.signal, outcome.error
        *errors, right = outcome.value
        assert right == "", "the store without a wrong bit"
        for place, error in zip(part, errors, strict=True):
            assert " Try: " in error, place


def test_a_reader_whose_key_lost_its_separator_is_found(store: Path, tmp_path: Path, forks: Forks) -> None:
    """Its key is no longer that of any queue and name, so a check that made the key again would find no row."""
    separators = [
        offset
        for offset, what in live(store)
        if what == "rows reader key" and (store / "data.mdb").read_bytes()[offset] == 0
    ]
    places = [(offset, "separator", bit) for offset in separators for bit in range(8)]
    assert judge(store, tmp_path, forks, places) == (24, 0, 0)


def test_a_wrong_bit_in_the_number_of_the_last_commit_is_found(tmp_path: Path, forks: Forks) -> None:
    """Smaller by two it is that of an older commit, and LMDB takes the commit between the two for the last."""
    path = tmp_path / "s"
    for commit in range(4):
        with library.open(path, map_size=damage.MAP_BYTES) as store:
            store.queue("in").appender().write({"n": commit})
            assert store.check() == []
        with (path / "data.mdb").open("rb") as file:
            data = DataFile(file.fileno())
            number = data.metas[0].txnid
            start = (number & 1) * data.page_bytes
        at = (path / "data.mdb").read_bytes().index(number.to_bytes(8, sys.byteorder), start, start + 152)
        places = [(at, "number of the last commit", bit) for bit in range(8)]
        assert judge(path, tmp_path / f"copies {commit}", forks, places) == (8, 0, 0)


class _Here:
    url = "here"


def test_each_bit_of_a_json_record_is_checked() -> None:
    """Of a shared directory: a record of a processor, of a queue, and an empty one."""
    records: list[dict[str, Any]] = [
        {},
        {"identity": "0a1b2c3d4e5f6071", "partitions": 3},
        {"record": 7, "epoch": 2, "files": [["orders/g.f-7-a.parquet", 41, 5]], "position": None, "hash": "9f" * 16},
        {"text": 'é\n"quoted"\\', "n": [1, 2.5, True, None]},
    ]
    for record in records:
        raw = sealed_json(record)
        assert parsed(_Here(), "x.json", raw, ANY_FORM) == record  # type: ignore[arg-type]
        for at in range(len(raw)):
            for bit in range(8):
                wrong = bytearray(raw)
                wrong[at] ^= 1 << bit
                with pytest.raises(Diverged):
                    parsed(_Here(), "x.json", bytes(wrong), ANY_FORM)  # type: ignore[arg-type]
