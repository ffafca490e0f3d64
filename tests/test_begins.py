"""Records of several lines, as stack traces in a log: by their beginnings, in files that are whole and that grow."""

from __future__ import annotations

import gzip
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import seeds
from sets import slow_except
from test_file_columns import same
from test_processors_file_source import Run, append, at_every_place

import cues
from cues import testing
from cues.errors import InvalidArgument
from cues.processors.file_source import Files

BEGINS = r"\d+ "
LOG = "head\n\n1 a\n  at x\n\n  at y\n2 b\n3 c\n  at z\n"
RECORDS = ["head", "1 a\n  at x\n\n  at y", "2 b", "3 c\n  at z"]


def lines(source: Files, position: Any = None, process: Any = None) -> list[Any]:
    found = [item for _, item in source(position, process) if item is not None]
    return [str(item) if isinstance(item, Exception) else item["line"] for item in found]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_record_is_all_lines_up_to_the_next_beginning(end: str, pack: Any, tmp_path: Path) -> None:
    path = tmp_path / ("a.log" if pack is bytes else "a.log.gz")
    for last in ("", end):
        path.write_bytes(pack(b"\xef\xbb\xbf" + LOG.removesuffix("\n").replace("\n", end).encode() + last.encode()))
        source = Files(path, begins=BEGINS, at="at")
        found = [(row["at"].rpartition(":")[2], row["line"]) for _, row in source(None) if row is not None]
        assert found == list(zip(["1", "3", "7", "8"], RECORDS))
        same(source)
        at_every_place(lambda: Files(path, begins=BEGINS), RECORDS, range(1, 4))
        path.unlink()


@pytest.mark.parametrize("seed", seeds.among(range(100), fast=10))
def test_records_are_those_of_a_regular_expression_over_the_whole_text(seed: int, tmp_path: Path) -> None:
    dice = random.Random(seed)
    text = "".join(
        dice.choice(["1 a", "22 é", "  at x", "", "x1 ", "1", "\t"]) + "\n" for _ in range(dice.randrange(40))
    )
    (tmp_path / "a.log").write_text(text)
    parts = re.split(r"(?m)^(?=\d+ )", text)
    found = lines(Files(tmp_path / "a.log", begins=BEGINS))
    assert found == [part.rstrip("\n") for part in parts if part.strip("\n")]
    at_every_place(lambda: Files(tmp_path / "a.log", begins=BEGINS), found, range(1, len(found)))


def test_a_record_that_is_too_long_fails_alone_and_is_not_in_memory(tmp_path: Path) -> None:
    text = b"1 a\n2 b\n" + b"  at x\n" * 20 + b"3 c\n4 " + b"x" * 300 + b"\n  y\n5 d\n6 \xff\n"
    (tmp_path / "a.log").write_bytes(text)
    found = lines(Files(tmp_path / "a.log", begins=BEGINS, line_bytes_max=100))
    assert [found[0], found[2], found[4]] == ["1 a", "3 c", "5 d"]
    assert "line 2: 144 bytes long, at most line_bytes_max=100" in found[1] and "line 24: 307 bytes" in found[3]
    assert "not utf-8: byte 0xff" in found[5] and len(found) == 6


@pytest.mark.parametrize("name", ["app.log", "app-*.log"])
def test_the_last_record_waits_for_the_next_or_for_a_pause(name: str, tmp_path: Path) -> None:
    """Whether one path is followed or a pattern; a half line waits until it is whole."""
    log = tmp_path / name.replace("*", "1")
    log.write_text("1 a\n  at")
    run = Run(Files(tmp_path / name, begins=BEGINS, follow=True, idle_exit_s=0, grace_s=3600, poll_s=0.001))
    got: list[Any] = []
    iterator = run.source(None, run.process)

    def take(count: int) -> list[Any]:
        found = [item["line"] for _, item in itertools.islice((pair for pair in iterator if pair[1]), count)]
        got.extend(found)
        return found

    append(log, " x\n  at y\n2 b\n")
    assert take(1) == ["1 a\n  at x\n  at y"]
    append(log, "  at z\n")
    append(log, "3 c\n  at v\n")
    assert take(1) == ["2 b\n  at z"]
    os.utime(log, (time.time() - 9_999,) * 2)  # a pause
    assert take(1) == ["3 c\n  at v"]
    assert take(1) == [] and got == ["1 a\n  at x\n  at y", "2 b\n  at z", "3 c\n  at v"]


def test_a_rotated_file_ends_its_last_record(tmp_path: Path) -> None:
    log = tmp_path / "app.log"
    log.write_text("1 a\n  at x\n")
    run = Run(Files(log, begins=BEGINS, follow=True, idle_exit_s=0, grace_s=0, poll_s=0.001))
    assert run() == ["1 a\n  at x"]
    append(log, "  at y\n2 b\n  at z\n")
    log.rename(tmp_path / "app.log.1")
    log.write_text("  at v\n3 c\n")
    assert run() == ["  at y", "2 b\n  at z", "  at v", "3 c"]


@pytest.mark.parametrize("format", ["csv", "jsonl", "json", "avro", "parquet", "arrow"])
def test_only_text_has_beginnings(format: str) -> None:
    with pytest.raises(InvalidArgument, match="begins="):
        Files("a", format, begins=BEGINS)


@pytest.mark.parametrize("begins", ["(", 7, "*"])
def test_what_is_no_regular_expression_is_refused(begins: Any) -> None:
    with pytest.raises(InvalidArgument, match="Try:"):
        Files("a.log", begins=begins)


GRAPH = """
import os, signal, threading
import cues
from cues.processors.file_source import Files

if "KILL_AFTER" in os.environ:
    threading.Timer(float(os.environ["KILL_AFTER"]), os.kill, (os.getpid(), signal.SIGKILL)).start()
graph = cues.Graph("g", errors="errors")
graph.add(cues.Source("rows", Files("app.log", begins=r"\\d+ ", follow=True, idle_exit_s=0, grace_s=0.3, poll_s=0.01)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("kills", slow_except([1], [1, 25]))
def test_killed_at_any_time_while_a_log_grows_and_is_rotated(kills: int, tmp_path: Path) -> None:
    dice = random.Random(seeds.new())
    (tmp_path / "graph.py").write_text(GRAPH)
    log = tmp_path / "app.log"
    log.write_text("0 first\n")
    command = [
        str(Path(sys.executable).with_name("cues")),
        "run",
        "graph.py",
        "--store",
        "store",
        "--durability",
        "process",
    ]
    expected, written, rotated = ["0 first"], 1, 0
    subprocess.run(
        command, cwd=tmp_path, check=True, capture_output=True
    )  # files that were rotated before are not read
    for kill in range(kills + 1):
        environment = os.environ | ({"KILL_AFTER": str(0.2 + dice.random() * 0.4)} if kill < kills else {})
        with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE) as process:
            for _ in range(20):
                for _ in range(dice.randrange(20)):
                    record = "\n".join([f"{written} message", *["  at x"] * dice.randrange(4)])
                    append(log, record + "\n")
                    expected.append(record)
                    written += 1
                if dice.random() < 0.1:
                    for number in range(rotated, 0, -1):  # none is removed: a run may be killed before it reads
                        (tmp_path / f"app.log.{number}").rename(tmp_path / f"app.log.{number + 1}")
                    rotated += 1
                    log.rename(tmp_path / "app.log.1")
                    log.touch()
                time.sleep(0.01)
            _, said = process.communicate(timeout=60)
            assert process.returncode in (0, -signal.SIGKILL), said.decode()
    with cues.open(tmp_path / "store") as store:
        found = [row["line"] for row in testing.messages(store, "rows")]
    assert found == expected


def test_a_process_without_a_pause_reads_whole_files(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text(LOG)
    process = SimpleNamespace(state={}, stopping=False)
    assert lines(Files(tmp_path / "a.log", begins=BEGINS, watch=True, idle_exit_s=0), None, process) == RECORDS
