"""Each single bit of a shared directory: a flip is found by ``cues check``, or changes nothing that is read."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import seeds
from directory_steps import DriverRun, messages_of
from sets import EIGHTHS, is_in

from cues import Graph, QueueOptions, Stream
from cues.errors import CuesError, Diverged
from cues.spark.cluster import inspection, state_files
from cues.spark.cluster.directory import QueueDirectory, parsed_entry, sealed_entry
from cues.spark.cluster.files import LocalFiles

KINDS = {
    "log": "*/_delta_log/*.json",
    "queue": "*/_cues/queue.json",
    "writer": "*/_cues/writer.json",
    "identity": "_cues/id.json",
    "record": "_cues/steps/*/*.json",
    "state": "_cues/state/*/*.parquet",
}


def total(message: dict[str, Any], process: Any) -> dict[str, Any]:
    process.state["total"] = process.state.get("total", 0) + message["i"]
    return {"key": message["key"], "total": process.state["total"], "text": "é" * 20}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A queue that is fed, a keyed sum of two partitions, three steps."""
    files = LocalFiles(str(tmp_path / "d"))
    graph = Graph("g", [Stream(total, "in", "out", id="sum")], queues={"in": QueueOptions(partitions=2, key="key")})
    run = DriverRun(files, graph).claim()
    for step in range(3):
        run.feed("in", [{"i": step * 4 + n, "key": n % 3} for n in range(4)])
        run.run()
    assert inspection.problems_of(files.url) == []
    return Path(files.url)


def everything(place: Path) -> Any:
    """All that readers and a next start take from the directory."""
    files = LocalFiles(str(place), make=False)
    state_files.cache.clear()
    found: list[Any] = []
    for queue in ("in", "out"):
        directory = QueueDirectory(files, queue, QueueOptions(), make=False)
        parts = [inspection.QueueReader(str(place), f"{queue}/{n}") for n in range(len(directory.logs))]
        found.append((queue, directory.identity, inspection.writer_of(str(place), queue), messages_of(directory)))
        found.append([[tuple(vars(each).items()) for each in part.read([1])] for part in parts])
        found.append([directory.published(writer) for writer in ("g.sum", "g.feed")])
    for last in inspection.processors_of(str(place)):
        folder = state_files.folder_of_state(last.processor)
        rows = state_files.load(files, folder, last.record.state, None)
        found.append((last.record, inspection.records_of(str(place), last.processor, None), sorted(rows.items())))
    return found


def files_of(place: Path) -> dict[str, list[Path]]:
    found = {kind: sorted(place.glob(pattern)) for kind, pattern in KINDS.items()}
    found["messages"] = [file for queue in ("in", "out") for file in sorted((place / queue).rglob("*.parquet"))]
    assert all(found.values())
    return found


FEW = 15
READS = 8


def flips(files: dict[str, list[Path]], eighth: int | None) -> Iterator[tuple[str, Path, int, int]]:
    """A few bits of each kind of file, chosen at random; or all those of a part."""
    dice = random.Random(seeds.new())
    for kind, paths in files.items():
        if eighth is None:
            for path in dice.choices(paths, k=FEW):
                yield kind, path, dice.randrange(path.stat().st_size), dice.randrange(8)
        else:
            all = ((kind, p, at, bit) for p in paths for at in range(p.stat().st_size) for bit in range(8))
            yield from (flip for flip in all if is_in(eighth, *flip[2:]))


@pytest.mark.parametrize("eighth", EIGHTHS)
def test_each_bit_of_a_directory_is_checked_or_harmless(place: Path, eighth: int | None) -> None:
    """And no error of a library comes through, neither from the check nor from a reader.

    In the long set, the reader looks at all that the check does not find, and at one of :data:`READS` others.
    """
    expected, results = everything(place), Counter[tuple[str, str]]()
    for number, (kind, path, at, bit) in enumerate(flips(files_of(place), eighth)):
        right = path.read_bytes()
        wrong = bytearray(right)
        wrong[at] ^= 1 << bit
        path.write_bytes(wrong)
        what = f"bit {bit} of byte {at} of {path.relative_to(place)}"
        try:
            try:
                problems = inspection.problems_of(str(place))
            except CuesError as error:
                problems = [str(error)]
            read = None
            if not problems or eighth is None or number % READS == 0:
                with contextlib.suppress(CuesError):
                    read = everything(place)
            assert read == expected or problems, f"{what} went unnoticed"
        except Exception as error:
            raise AssertionError(what) from error
        finally:
            path.write_bytes(right)
        results[kind, "found" if problems else "harmless"] += 1
    print(sorted(results.items()))
    assert all(results[kind, "found"] > results[kind, "harmless"] for kind in KINDS), results


def test_a_file_without_checksums_is_read_and_its_damage_is_found(place: Path) -> None:
    """Earlier versions wrote neither checksums of pages nor a seal."""
    import pyarrow.parquet as pq

    expected, files = everything(place), files_of(place)
    for path in [*files["messages"], *files["state"]]:
        table = pq.ParquetFile(path).read()
        pq.write_table(table.replace_schema_metadata(), path, use_dictionary=False, compression="none")
    assert everything(place) == expected
    assert inspection.problems_of(str(place)) == []
    path = files["messages"][-1]
    path.write_bytes(path.read_bytes().replace(b"offset", b"offsot"))
    (problem,) = inspection.problems_of(str(place))
    assert "does not have the column offset, which is int64" in problem


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (b"\xff", "can't decode"),
        (b"[]", "an action is not a JSON object"),
        (b'{"add": {}}', "KeyError"),
        (b'{"txn": {"appId": "g.sum", "version": "3"}}', "the transaction 'g.sum', '3'"),
        (b'{"metaData": {"schemaString": "{}"}}', "KeyError"),
    ],
)
def test_a_damaged_entry_of_the_log_is_named_by_all_that_read_it(place: Path, wrong: bytes, reason: str) -> None:
    files = LocalFiles(str(place), make=False)
    running = QueueDirectory(files, "out", QueueOptions(), make=False)
    name = f"{running.version + 1:020d}.json"
    (place / "out" / "_delta_log" / name).write_bytes(wrong)
    with pytest.raises(Diverged, match=rf"out/_delta_log/{name}, an entry .* is damaged: .*Try:") as caught:
        running.read_on()
    assert reason in str(caught.value)
    assert any(name in problem for problem in inspection.problems_of(str(place)))


def test_a_path_in_the_log_whose_wrong_bit_makes_a_nul_is_found(place: Path) -> None:
    """``-00`` became ``%00``, and an error of Arrow came through: delta-rs reads the log, and no checksum."""
    path = next(path for path in files_of(place)["log"] if b"-00000000" in path.read_bytes())
    path.write_bytes(path.read_bytes().replace(b"-00000000", b"%00000000"))
    with pytest.raises(Diverged, match=rf"{path.name}, an entry of the log .* is damaged: .*Try:"):
        everything(place)
    assert any(path.name in problem for problem in inspection.problems_of(str(place)))


def test_each_bit_of_an_entry_of_the_log_is_checked() -> None:
    files = LocalFiles("/", make=False)
    raw = sealed_entry([{"txn": {"appId": "g.sum", "version": 3}}, {"remove": {"path": "a%20b"}}])
    for at in range(len(raw)):
        for bit in range(8):
            wrong = bytearray(raw)
            wrong[at] ^= 1 << bit
            with pytest.raises(Diverged):
                parsed_entry(files, "0.json", bytes(wrong))


def test_an_entry_without_a_checksum_is_read() -> None:
    raw = b'{"txn": {"appId": "g.sum", "version": 3}}\n{"remove": {"path": "a%20b"}}'
    entry = parsed_entry(LocalFiles("/", make=False), "0.json", raw)
    assert (entry.published, entry.removed) == ({"g.sum": 3}, ["a b"])
