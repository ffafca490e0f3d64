"""``cues send --timeout``: a bounded queue without room, from a shell."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from terminal import Command
from terminal import cues as command

import cues
from cues.cli.app import run as cli

LIMIT_S = 60


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A store whose queue ``orders`` has room for no message, because the reader ``billing`` has read none of three."""
    with cues.open(tmp_path / "store", durability="process") as store:
        queue = store.queue("orders", max_lag=3)
        queue.appender().write({"n": -1})
        with queue.tailer("billing") as tailer:
            tailer.read()  # from now on it is a reader for which writers wait
        queue.appender().write_many([{"n": n} for n in range(3)])
    return tmp_path / "store"


def numbers(store: Path) -> list[int]:
    with cues.open(store, readonly=True) as opened:
        queue = opened.queue("orders")
        tailer = queue.tailer()
        return [message["n"] for message in (tailer.read() for _ in range(len(queue))) if message is not None]


def read(store: Path) -> None:
    with cues.open(store) as opened, opened.queue("orders").tailer("billing") as tailer:
        tailer.to_end()


@pytest.mark.parametrize("timeout", ["0", "0.02"])
def test_without_room_nothing_is_sent_and_the_exit_code_is_4(
    full: Path, capsys: pytest.CaptureFixture[str], timeout: str
) -> None:
    assert cli(["send", f"{full}#orders", '{"n": 3}', '{"n": 4}', "--timeout", timeout]) == 4
    out, err = capsys.readouterr()
    assert json.loads(out)["sent"] == 0
    assert f"Waited {float(timeout):g} s for room on 'orders': billing has not read 3 messages" in err
    assert "Nothing was written." in err
    assert "Try: " in err
    assert "tailer('billing').to_end()" in err
    assert numbers(full) == [-1, 0, 1, 2]
    read(full)
    assert cli(["send", f"{full}#orders", '{"n": 3}', "--timeout", timeout]) == 0
    assert numbers(full) == [-1, 0, 1, 2, 3]


def test_a_timeout_without_a_bound_waits_for_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["send", f"{tmp_path}/new#orders", "n=1", "--create", "--timeout", "0"]) == 0
    assert cli(["send", f"{tmp_path}/new#orders", "n=1", "--timeout", "-1"]) == 2


@pytest.mark.slow
def test_the_lines_that_are_not_sent_are_named(full: Path) -> None:
    """Lines 1 and 2 are a commit; the next commit has no room, and nothing of it is written."""
    read(full)
    with Command("send", f"{full}#orders", "--timeout", "60") as waiting:
        assert waiting.wait() == 0  # no line, no wait
    first = "".join(json.dumps({"n": n}) + "\n" for n in range(3, 6))
    assert command("send", f"{full}#orders", "--timeout", "0", stdin=first).code == 0
    result = command("send", f"{full}#orders", "--timeout", "0", stdin='\n{"n": 6}\n{"n": 7}\nwrong\n')
    assert result.code == 4
    assert "Line 2 and the following ones are not sent; 0 messages before are." in result.err
    assert "tail -n +2 FILE | cues send" in result.err
    assert "Nothing was written" not in result.err
    assert numbers(full) == list(range(-1, 6))


@pytest.mark.slow
def test_a_wait_ends_when_the_reader_reads(full: Path) -> None:
    with Command("send", f"{full}#orders", "n=3", "--timeout", "60") as waiting:
        limit = time.monotonic() + LIMIT_S
        while not list((full / "waits").glob("*")):  # the note of a writer that waits
            assert time.monotonic() < limit
            time.sleep(0.02)
        read(full)
        assert waiting.wait() == 0
    assert numbers(full) == [-1, 0, 1, 2, 3]
