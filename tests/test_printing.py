"""The one door of the output: what a terminal obeys is escaped, and an output that cannot be written is said once."""

from __future__ import annotations

import ast
import io
import json
import logging
import os
import subprocess
import sys
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from terminal import CUES, Command, cues, environment

import cues as library
from cues.cli import app, options, printing

CLI = Path(app.__file__).parent
EVIL = "\033]0;OWNED\007\033[2J\x9b31mred\x7f\u202egnp\u2066\u2028\u200b\rX"
RAW = frozenset(EVIL) - set("]0;OWNED[2J31mredgnpX")

SHOP = """
import logging
import cues
graph = cues.Graph("shop", errors="errors")
graph.source("orders")

@graph.stream("orders", "priced")
def price(order):
    logging.warning("look: %s", order["name"])
    if order["n"] > 2:
        raise ValueError("cannot price " + order["name"])
    return order
"""


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A graph that has run: two orders are priced and nine failed; each has signs that a terminal obeys."""
    path = tmp_path_factory.mktemp("shop") / "shop.py"
    path.write_text(SHOP)
    with library.open(path.parent / "data" / "shop", durability="process") as store:
        store.queue("orders").appender().write_many([{"n": n, "name": EVIL} for n in range(1, 12)])
    ran = cues("run", path, "--idle-exit", "0")
    assert ran.code == 0 and json.loads(ran.out)["failed"] == 9
    assert not RAW & set(ran.out + ran.err)
    journal = path.parent / "more.jsonl"
    journal.write_text(json.dumps({"n": 1, "q/uuid": "0198c0de-0000-7000-8000-000000000001"}) + "\n")
    return path


COMMANDS = {
    "run": "run {shop} --idle-exit 0",
    "show": "show {shop}",
    "status": "status {shop}",
    "metrics": "metrics {shop}",
    "top": "top {shop} --once --every 0.1",
    "history": "history {shop}",
    "queues": "queues {shop}",
    "tail": "tail {shop}#orders --meta",
    "sql": 'sql {shop} from"orders"',
    "send": "send {shop}#orders n=1 name=x",
    "import": "import {store}#more {folder}/more.jsonl --create",
    "export": "export {shop}#orders",
    "tries": "tries {shop}#price",
    "errors": "errors {shop}",
    "errors --index": "errors {shop} --index 1",
    "errors --group": "errors {shop} --group",
    "close": "close {shop}",
    "redrive": "redrive {shop} --index {n} --yes",
    "discard": "discard {shop} --index 4 --reason x",
    "pause": "pause {shop}#price",
    "resume": "resume {shop}#price",
    "check": "check {shop}",
    "salvage": "salvage {store} {folder}/salvaged{n}",
    "doctor": "doctor {shop}",
    "seek": "seek {shop}#price end --yes",
    "replay": "replay {shop} --into {folder}/replay{n} --yes",
    "forget": "forget {store}#group:x --yes",
    "grow": "grow {shop}#orders 1 --yes",
    "purge": "purge {shop}#orders --before 1 --yes",
    "compact": "compact {shop} --yes",
    "optimize": "optimize {shop} --yes",
    "vacuum": "vacuum {shop} --yes",
    "backup": "backup {shop} {folder}/backup",
    "restore": "restore {folder}/backup {folder}/restored{n} --yes",
    "follow": "follow {shop} {folder}/copy --once",
    "init": "init {folder}/new{n}",
    "deploy": "deploy systemd {shop}",
    "config": "config",
    "completion": "completion bash",
    "--help": "run --help",
    "--version": "--version",
    "no command": "",
    "wrong usage": "tail {shop}#orders --count x",
}
"""Each command with arguments that it can be called with again and again; ``n`` is the number of the call."""


def words(command: str, shop: Path, number: int) -> list[str]:
    folder = shop.parent
    given = {"shop": shop, "folder": folder, "store": folder / "data" / "shop", "n": number}
    return [word.format(**given) for word in COMMANDS[command].split()]


class Full(io.RawIOBase):
    """A disk without space; its error comes at the flush, as that of a real file does."""

    error: OSError = OSError(28, "No space left on device")

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        raise self.error


class Unread(Full):
    """A pipe whose reader has ended."""

    error = BrokenPipeError(32, "Broken pipe")


def text_of(raw: io.RawIOBase, encoding: str = "utf-8") -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BufferedWriter(raw), encoding)


@pytest.fixture(autouse=True)
def call_as_outside(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("CUES_")]:
        monkeypatch.delenv(name)
    yield
    printing.begin()


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_prints_through_the_door(
    command: str, shop: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing that a terminal obeys; and an output that is closed, full, unread or ASCII changes only the exit code."""
    monkeypatch.setenv("CUES_OUTPUT", "table")
    usual = app.run(words(command, shop, 1))
    out, err = capsys.readouterr()
    assert not RAW & set(err if command == "export" else out + err)  # an export is bytes, but on a terminal
    assert out or err
    for number, (stream, lost) in enumerate(((None, 1), (text_of(Full()), 1), (text_of(Unread()), 0)), 2):
        monkeypatch.setattr(sys, "stdout", stream)
        code = app.run(words(command, shop, number))
        err = capsys.readouterr().err
        assert code == (options.OUTPUT_LOST if lost and not usual and out else usual), (stream, err)
        assert ("The output could not be written: " in err) == bool(lost and out), (stream, err)
        assert "Traceback" not in err
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "ascii"))
    assert app.run(words(command, shop, 5)) == usual
    assert bool(raw.getvalue()) == bool(out)


def test_the_table_has_every_command() -> None:
    assert {name.partition(" ")[0] for name in COMMANDS} >= set(app.COMMANDS) - {"ui"}  # a server


def test_no_module_of_the_commands_prints_elsewhere() -> None:
    """Only the door touches the standard outputs; live.py replaces them while it draws, for the prints of functions."""
    found = []
    for path in CLI.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_print = isinstance(node, ast.Name) and node.id == "print"
            stream = isinstance(node, ast.Attribute) and node.attr in ("stdout", "stderr", "__stdout__", "__stderr__")
            of = node.value.id if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) else ""
            echoes = of == "click" and node.attr in ("echo", "secho", "confirm", "prompt", "pause")
            of_sys = of == "sys" and stream
            if path.name != "printing.py" and (is_print or (of_sys and path.name != "live.py") or echoes):
                found.append(f"{path.name}:{node.lineno}")
    assert found == []


@pytest.mark.parametrize("text", [EVIL, "a\tb\nc", "é → 😀 👩\u200d👧 \u200c", '\\\x9b"', "\ud800", "\U000e0041"])
def test_what_is_escaped_is_json_of_the_same_value(text: str) -> None:
    line = printing.escaped(json.dumps(text, ensure_ascii=False))
    assert json.loads(line) == text
    assert not RAW & set(line)
    assert printing.escaped(str(line)) == line
    line.encode()


@pytest.mark.interpreted
def test_every_control_and_every_sign_of_format_is_escaped() -> None:
    kept = {c for c in map(chr, range(sys.maxunicode + 1)) if printing.escaped(c) == c}
    obeyed = {c for c in kept if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}
    assert obeyed == {"\t", "\n", "\u200c", "\u200d"}
    assert len(kept) > 1_000_000


def test_only_our_own_colours_reach_a_terminal() -> None:
    assert printing.coloured("2", "a\033[31m") == "\033[2ma\\u001b[31m\033[0m"
    assert printing.escaped(printing.coloured("2", "a")) == "\033[2ma\033[0m"
    assert printing.escaped("" + f"{printing.coloured('2', 'a')}") == "\\u001b[2ma\\u001b[0m"  # no longer ours


def test_signs_that_an_encoding_lacks_are_replaced() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, "latin-1", write_through=True)
    assert printing.put(stream, printing.escaped("é → ☃ ×")) is None
    assert raw.getvalue() == "é -> \\u2603 ×".encode("latin-1")


def test_log_records_without_a_handler_are_escaped(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.root, "handlers", [])
    monkeypatch.setattr(logging.getLogger("cues"), "handlers", [])
    before = logging.lastResort
    with printing.logs():
        logging.getLogger("cues").warning("bad %s", EVIL)
    err = capsys.readouterr().err
    assert err.startswith("bad \\u001b]0;") and not RAW & set(err)
    assert logging.lastResort is before


def test_a_live_table_shows_no_signs_that_a_terminal_obeys(shop: Path) -> None:
    with library.open(shop.parent / "data" / "shop") as store:
        store.queue("orders").appender().write({"n": 9, "name": EVIL})
    cues("resume", f"{shop}#price")  # a test before may have paused it
    for arguments in (
        ("run", shop, "--idle-exit", "0"),
        ("status", shop, "--watch", "0.1"),
        ("export", f"{shop}#orders"),
    ):
        with Command(*arguments, terminal=True) as running:
            if "--watch" in arguments:
                running.until("Ctrl-C ends")
                running.type("\x03")
            running.wait()
        assert "\\u001b]0;OWNED" in running.text
        assert not {"\x9b", "\u202e", "\u2066", "\x7f"} & set(running.text)
        assert "\033]" not in running.text and "\033[2J" not in running.text


def closed(command: str, redirect: str, **more: str) -> subprocess.CompletedProcess[str]:
    line = ["sh", "-c", f'exec "$@" {redirect}', "sh", *CUES, *command.split()]
    return subprocess.run(line, stderr=subprocess.PIPE, text=True, env=environment(**more), timeout=40)


@pytest.mark.parametrize("redirect", [">&-", ">/dev/full"])
def test_a_message_is_sent_once_and_the_exit_code_says_that_the_report_is_lost(tmp_path: Path, redirect: str) -> None:
    done = closed(f"send {tmp_path}/s#q n=1 --create", redirect)
    assert done.returncode == options.OUTPUT_LOST
    assert done.stderr.startswith("Error: The output could not be written: ") and "\nTry: " in done.stderr
    with library.open(tmp_path / "s", readonly=True) as store:
        assert len(store.queue("q")) == 1


@pytest.mark.parametrize("redirect", ["2>&-", "2>/dev/full", ">&- 2>&-", "<&- 2>/dev/full"])
def test_an_error_output_that_cannot_be_written_changes_no_exit_code(tmp_path: Path, redirect: str) -> None:
    assert closed(f"tail {tmp_path}/none#q", redirect).returncode == options.FAILED


def test_a_closed_input_is_refused_in_words(tmp_path: Path) -> None:
    for command in (f"send --create {tmp_path}/s#q", f"import --create {tmp_path}/s#q - --content-type text/csv"):
        done = closed(command, "<&-")
        assert done.returncode == options.WRONG_USAGE and "Standard input is closed" in done.stderr


def test_a_reader_that_has_enough_ends_a_long_command(tmp_path: Path) -> None:
    with library.open(tmp_path / "s", durability="process") as store:
        store.queue("q").appender().write_many([{"n": n, "text": "x" * 100} for n in range(5000)])
    for command in ("tail -n all", "tail -n all -f", "export"):
        words = [*CUES, *command.split(), f"{tmp_path}/s#q"]
        with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as running:
            assert running.stdout is not None and running.stderr is not None
            assert running.stdout.readline()
            running.stdout.close()
            assert running.wait(40) == 0
            assert running.stderr.read() == b""
