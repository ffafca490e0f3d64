"""``Store.check`` and ``cues check``: silent about what holds, and finding everything that does not."""

from __future__ import annotations

import json
import random
import re
import shutil
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import damage
import pytest
import seeds
from forks import Forks
from terminal import cues

import cues as library
from cues.tools import check


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound store; tests copy it."""
    path = tmp_path_factory.mktemp("sound") / "s"
    damage.make(path)
    return path


@pytest.fixture
def store(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    (tmp_path / "s").mkdir()
    shutil.copy(sound / "data.mdb", tmp_path / "s")
    return tmp_path / "s"


def problems(path: Path) -> list[str]:
    with library.open(path, readonly=True) as opened:
        return opened.check()


def findings(path: Path) -> list[str]:
    """The problems of a store that may not even open."""
    try:
        return problems(path)
    except library.errors.StoreDamaged as error:
        return [str(error)]


def test_a_sound_store_has_no_problems_in_process_in_a_child_and_by_command(store: Path) -> None:
    assert problems(store) == []
    seen: list[str] = []
    assert check.walk(str(store), lambda what, done, total: seen.append(what)) == []
    assert {"numbers", "counted", "plain", "state of g.count"} <= set(seen)
    result = cues("check", store, "--table")
    assert result.code == 0
    assert all(json.loads(line)["type"] == "progress" for line in result.err.splitlines())  # told where it takes long
    assert result.out.endswith("no problem found\n")


@pytest.mark.damages_stores
@pytest.mark.parametrize("spoil", damage.DAMAGES, ids=lambda spoil: spoil.__name__)
def test_every_kind_of_damage_is_named(store: Path, spoil: Callable[[Any, Any], None], forks: Forks) -> None:
    with library.open(store) as opened:
        for name, _ in opened.core.entries():
            opened.core.database(name)
        opened.core.commit(lambda txn: spoil(opened, txn))
    found = forks.run("test_check:findings", store).value
    assert any(damage.DAMAGES[spoil] in problem for problem in found), found
    assert len(found) <= 3, found


@pytest.mark.damages_stores
@pytest.mark.parametrize("flips", [20, pytest.param(120, marks=pytest.mark.slow)])
def test_a_flipped_bit_is_found_or_changes_nothing_that_is_read(
    sound: Path, tmp_path: Path, forks: Forks, flips: int
) -> None:
    """Whatever bit is flipped: the check names a problem (or LMDB gives up), or all reads as before."""
    seed = seeds.new()
    dice = random.Random(seed)
    size = (sound / "data.mdb").stat().st_size
    with library.open(sound, readonly=True) as opened:
        used = min(size, opened.info()["used"])
    expected = forks.run("damage:digest_of", str(sound)).value
    found = crashed = harmless = 0
    for number in range(flips):
        offset, bit = dice.randrange(used), dice.randrange(8)
        copy = tmp_path / f"{number % 2}"
        outcome = forks.wait(forks.start("damage:flip", str(sound), str(copy), offset, bit))
        if outcome.signal:
            crashed += 1  # `cues check` walks in a child, and says so
            continue
        assert not outcome.error, (seed, offset, bit, outcome.error)
        named, digest = outcome.value
        if named:
            found += 1
        else:
            assert digest == expected, f"seed {seed}: bit {bit} of byte {offset} went unnoticed"
            harmless += 1
    assert found > flips // 8, (found, crashed, harmless)


@pytest.mark.damages_stores
def test_a_truncated_file_is_found_and_not_opened(store: Path) -> None:
    data = store / "data.mdb"
    with library.open(store, readonly=True) as opened:
        used = opened.info()["used"]
    with data.open("r+b") as file:
        file.truncate(used // 2)
    result = cues("check", store)
    assert result.code == 1
    assert "is truncated" in result.out
    assert "1 problem" in result.err
    assert data.stat().st_size == used // 2


@pytest.mark.damages_stores
def test_a_damaged_batch_is_named_and_its_neighbours_stay_readable(store: Path) -> None:
    data = bytearray((store / "data.mdb").read_bytes())
    for found in re.finditer(damage.MARK, bytes(data)):  # LMDB may have left older copies of its page
        data[found.start()] ^= 1
    (store / "data.mdb").write_bytes(data)
    result = cues("check", f"{store}", "--table")
    assert result.code == 1
    assert "of queue plain is damaged" in result.out
    with library.open(store, readonly=True) as opened:
        total = len(opened.queue("plain"))
    tail = cues("tail", f"{store}#plain", "-n", "all")
    assert tail.code == 1
    assert "is damaged" in tail.err
    assert len(tail.out.splitlines()) == total - 1


@pytest.mark.damages_stores
def test_a_structure_that_crashes_lmdb_is_reported_and_does_not_crash_the_command(store: Path) -> None:
    """Every branch page points beyond the end of the map: whatever LMDB does then, the command says so."""
    data = bytearray((store / "data.mdb").read_bytes())
    for page in range(2, len(data) // 4096):
        at = page * 4096
        flags, lower = struct.unpack_from("=HH", data, at + 10)
        if flags == 0x01:
            for number in range((lower - 16) // 2):
                (node,) = struct.unpack_from("=H", data, at + 16 + 2 * number)
                struct.pack_into("=H", data, at + node, 0xFFF0)
                struct.pack_into("=H", data, at + node + 2, 0x7FFF)
    (store / "data.mdb").write_bytes(data)
    result = cues("check", store, "--table")
    assert result.code == 1
    assert result.out.strip()
    assert "Traceback" not in result.out + result.err
    assert "Try: " in result.err


def test_a_crash_of_the_child_is_a_finding(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONFAULTHANDLER", "0")
    real = check.subprocess.Popen

    def popen(arguments: list[str], **options: Any) -> Any:
        arguments = [*arguments]
        arguments[3] = (
            "import os, json, signal; print(json.dumps({'at': 'numbers', 'done': 1, 'total': 2}), flush=True);"
            "os.kill(os.getpid(), signal.SIGBUS)"
        )
        return real(arguments, **options)

    monkeypatch.setattr(check.subprocess, "Popen", popen)
    (problem,) = check.walk(str(store))
    assert "SIGBUS" in problem
    assert "numbers" in problem


def test_a_path_that_is_not_a_store_is_an_error_and_not_damage(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(b"not LMDB" * 2000)
    result = cues("check", tmp_path)
    assert result.code == 1
    assert result.out == ""
    assert "not an LMDB file" in result.err


def test_a_store_that_is_written_trimmed_and_purged_meanwhile_is_sound(tmp_path: Path) -> None:
    """A check during a run sees many transactions. A change between them is not damage."""
    graph = library.Graph("busy", store=tmp_path / "s", durability="process", errors="errors")
    graph.source("orders")
    graph.queues["priced"] = library.QueueOptions(retention=500)

    @graph.stream("orders", "priced", key="k")
    def price(order: dict[str, Any], process: Any) -> dict[str, Any]:
        process.state["sum"] = process.state.get("sum", 0) + order["n"]
        process.state["text"] = "x" * (order["n"] % 9000)
        return order

    stop = threading.Event()
    with graph.start() as running:

        def write() -> None:
            queue = running.store.queue("orders")
            n = 0
            while not stop.is_set():
                queue.appender().write_many([{"n": n + i, "k": i % 50} for i in range(100)])
                n += 100
                if n % 5000 == 0:
                    queue.purge(before=max(1, queue.last_index - 3000))
                    running.wait_idle(timeout=60)

        writer = threading.Thread(target=write)
        writer.start()
        try:
            for _ in range(10):
                assert running.store.check() == []
        finally:
            stop.set()
            writer.join()
        assert running.wait_idle(timeout=60)


def test_types_that_only_the_users_program_knows_are_not_damage(tmp_path: Path) -> None:
    code = f"""
import cues
class Money: ...
cues.codec.register(Money, 42, lambda m: b"1", lambda b: Money())
with cues.open({str(tmp_path / "s")!r}) as store:
    store.queue("q").appender().write({{"m": Money()}})
"""
    import subprocess
    import sys

    subprocess.run([sys.executable, "-c", code], check=True)
    assert problems(tmp_path / "s") == []
    tail = cues("tail", f"{tmp_path / 's'}#q")
    assert tail.code == 1
    assert "codec.register" in tail.err
