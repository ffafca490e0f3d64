"""A copy (cp) of a store that was open is recognised: refused for writing, until it was checked and adopted."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from children import Child
from terminal import cues as command

import cues
from cues.cli.app import run as cli
from cues.errors import StoreCopied, StoreDamaged
from cues.storage import environment, timeline

DURABILITIES = ("disk", "process")


def send(store: cues.Store, *numbers: int) -> None:
    store.queue("q").appender().write_many([{"n": n, "x": "x" * 500} for n in numbers])


def numbers(path: Path, readonly: bool = False) -> list[int]:
    with cues.open(path, readonly=readonly) as store:
        return [message["n"] for message in store.queue("q").tailer()]


def cp(source: Path, to: Path) -> Path:
    subprocess.run(["cp", "-r", "--sparse=always", source, to], check=True)
    return to


@pytest.fixture
def copy(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of a store that this process has open, and that is whole because nothing is written meanwhile."""
    with cues.open(tmp_path / "s", durability=getattr(request, "param", "process")) as store:
        send(store, *range(300))
        store.queue("q").purge(before=200)
        return cp(tmp_path / "s", tmp_path / "copy")


@pytest.mark.parametrize("copy", DURABILITIES, indirect=True)
def test_a_copy_of_an_open_store_is_refused_until_it_was_adopted(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        with pytest.raises(StoreCopied, match="may have pages of different moments, and be damaged") as caught:
            cues.open(copy)
        assert f"cues check {copy} --adopt" in caught.value.hint and "cues backup" in caught.value.hint
    assert numbers(copy, readonly=True) == list(range(199, 300))
    assert "is a copy that was made" in caplog.text
    assert cli(["check", str(copy)]) == 0
    with pytest.raises(StoreCopied):  # a check alone changes nothing
        cues.open(copy)
    assert cli(["check", str(copy), "--adopt"]) == 0
    assert '"adopted": true' in capsys.readouterr().out
    with cues.open(copy) as store:
        send(store, 300)
        assert not store.check()
        with store.core.view() as txn:
            assert [first for first, _ in timeline.read(txn, "q")] == [301]  # it has hashes of its own
    assert numbers(copy) == list(range(199, 301))
    assert numbers(tmp_path / "s") == list(range(199, 300))
    assert cli(["check", str(copy), "--adopt"]) == 0
    assert "adopted" not in capsys.readouterr().out


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_copy_of_a_store_whose_process_was_killed_is_refused_and_the_store_is_not(
    tmp_path: Path, durability: str
) -> None:
    code = """
import os, sys, cues
store = cues.open(sys.argv[1], durability=sys.argv[2])
store.queue("q").appender().write({"n": 1})
os.kill(os.getpid(), 9)
"""
    with Child(code, tmp_path / "s", durability) as child:
        assert child.returncode() == -9
    with pytest.raises(StoreCopied):
        cues.open(cp(tmp_path / "s", tmp_path / "copy"))
    os.chmod(tmp_path / "s" / "locks", 0o600)  # changes its change time, as a copy does
    (tmp_path / "s").rename(tmp_path / "moved")
    assert numbers(tmp_path / "moved") == [1]
    assert numbers(cp(tmp_path / "moved", tmp_path / "other")) == [1]


@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_copy_of_a_closed_store_and_a_restore_are_not_refused(tmp_path: Path, durability: str) -> None:
    with cues.open(tmp_path / "s", durability=durability) as store:
        send(store, 1, 2)
        store.backup(tmp_path / "b")
    assert numbers(cp(tmp_path / "s", tmp_path / "copy")) == [1, 2]
    assert cli(["restore", str(tmp_path / "b"), str(tmp_path / "restored")]) == 0
    assert numbers(tmp_path / "restored") == [1, 2]


def test_a_damaged_copy_is_not_adopted(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (copy / "data.mdb").open("rb") as file:
        data = file.read(4 << 20)  # the file is as long as its map
    at = data.rindex(b"x" * 400)
    with (copy / "data.mdb").open("r+b") as file:
        file.seek(at)
        file.write(b"y" * 10)
    assert cli(["check", str(copy), "--adopt"]) == 1
    assert "problem" in capsys.readouterr().err
    with pytest.raises(StoreCopied):
        cues.open(copy)


@pytest.mark.parametrize("fault", ["adopt.copied", "adopt.renamed"])
def test_an_adoption_that_was_killed_is_made_again(copy: Path, fault: str) -> None:
    killed = command("check", copy, "--adopt", CUES_FAULT=fault)
    assert killed.code == -9, killed.err
    with pytest.raises(StoreCopied):
        cues.open(copy)
    assert command("check", copy, "--adopt").code == 0
    assert numbers(copy) == list(range(199, 300))


def test_the_control_a_store_that_was_neither_copied_nor_open_has_no_mark(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s") as store:
        send(store, 1)
        assert (tmp_path / "s" / "open").exists()
    assert not (tmp_path / "s" / "open").exists()
    shutil.copytree(tmp_path / "s", tmp_path / "copy")
    (tmp_path / "copy" / "open").write_text("")
    with pytest.raises(StoreCopied):
        cues.open(tmp_path / "copy")


@pytest.mark.slow
@pytest.mark.parametrize("durability", DURABILITIES)
def test_a_copy_that_is_made_while_the_store_is_written_is_never_opened_for_writing(
    tmp_path: Path, durability: str
) -> None:
    """Its pages are of different moments: it is refused as a copy, and adopted only if the check finds it whole."""
    code = """
import sys, cues
with cues.open(sys.argv[1], durability=sys.argv[2]) as store:
    queue, n = store.queue("q"), 0
    while True:
        queue.appender().write_many([{"n": n + i, "x": "x" * 500} for i in range(50)])
        n += 50
        if n == 500:
            print("ready", flush=True)
        if n % 2000 == 0:
            queue.purge(before=n - 1000)
"""

    with Child(code, tmp_path / "s", durability) as child:
        assert child.line() == "ready"
        for number in range(4):
            copy = cp(tmp_path / "s", tmp_path / f"copy{number}")
            with pytest.raises((StoreCopied, StoreDamaged)):
                cues.open(copy)
            if cli(["check", str(copy), "--adopt"]) == 0:
                found = numbers(copy)
                assert found == list(range(found[0], found[0] + len(found)))
                with cues.open(copy) as store:
                    store.queue("q").appender().write({"n": -1})
            shutil.rmtree(copy)
        child.kill()


@pytest.mark.parametrize("fault", ["open.marked", "copy.begun"])
def test_a_clean_copy_is_opened_beside_and_after_a_process_that_opens_it_first(fault: str, tmp_path: Path) -> None:
    """The first process stops, and is killed, between the files "open" and "mark" of the copy."""
    with cues.open(tmp_path / "s", "process", 1 << 24) as store:
        send(store, 1, 2)
    copy = cp(tmp_path / "s", tmp_path / "copy")
    write = "import sys, cues; cues.open(sys.argv[1]).queue('q').appender().write({'n': 3})"
    with Child(write, copy, CUES_FAULT=f"{fault}:1:stop") as first:
        first.wait_stopped()
        assert (copy / "open").exists()
        assert not environment.is_refused(copy)
    assert numbers(copy) == [1, 2]
    with cues.open(copy, readonly=True) as store, store.core.view() as txn:
        assert len(timeline.read(txn, "q")) == 1
    assert numbers(copy) == [1, 2]
