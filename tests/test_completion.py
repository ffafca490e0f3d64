"""What a shell offers at a Tab: commands, options, files and the names in a store, without effect on the store."""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from terminal import CUES, environment

import cues as library
from cues import groups
from cues.base import names
from cues.cli.app import COMMANDS
from cues.cli.app import run as cli
from cues.storage import datafile

GRAPH = """
import cues
raise SystemExit("a Tab must not run this file")
graph = cues.Graph("shop", durability="process")
"""
BASH = shutil.which("bash")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a graph file and its store: two queues, two processors, a group. Tests only read it."""
    folder = tmp_path_factory.mktemp("shop")
    graph = library.Graph("shop", durability="process")
    graph.source("orders")
    graph.stream("orders", "priced")(price)
    graph.sink("priced")(save)
    store = folder / "data" / "shop"
    with library.open(store, durability="process") as opened:
        opened.queue("orders").appender().write({"n": 1})
    with graph.start(store=store) as running:
        running.wait_done(0)
    with library.open(store) as opened, groups.Member(opened, "orders", "billing"):
        pass
    (folder / "shop.py").write_text(GRAPH)
    return folder


def price(order: dict[str, int]) -> dict[str, int]:
    return order


def save(order: dict[str, int]) -> None: ...


@pytest.fixture(autouse=True)
def inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.delenv("CUES_STORE", raising=False)


def offered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shell: str, line: str
) -> list[tuple[str, str]]:
    """Type and value of what a shell gets for a line; its last word is under the cursor."""
    words = line.split(" ")
    monkeypatch.setenv("_CUES_COMPLETE", f"{shell}_complete")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", words[-1] if shell == "fish" else str(len(words) - 1))
    capsys.readouterr()
    assert cli([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines() if out.strip() else []
    if shell == "zsh":
        return list(zip(lines[::3], lines[1::3]))
    return [(kind, value.partition("\t")[0]) for kind, _, value in (line.partition(",") for line in lines)]


LINES = [
    ("cues ta", ["tail"]),
    ("cues tail --fol", ["--follow"]),
    ("cues tail data/shop#", ["data/shop#orders", "data/shop#priced"]),
    ("cues tail data/shop#o", ["data/shop#orders"]),
    ("cues tail shop.py#p", ["shop.py#priced"]),
    ("cues send shop.py:graph#o", ["shop.py:graph#orders"]),
    ("cues send shop.py:other#o", []),
    ("cues tail --store nowhere shop.py#o", []),
    ("cues tries data/shop#", ["data/shop#shop.price", "data/shop#shop.save"]),
    ("cues redrive shop.py --processor ", ["price", "save"]),
    ("cues redrive shop.py --processor=p", ["price"]),
    ("cues errors data/shop --processor shop.s", ["shop.save"]),
    ("cues redrive --store data/shop shop.py --processor s", ["save"]),
    ("cues compact data/shop --remove p", ["priced"]),
    ("cues forget data/shop#group", ["data/shop#group:billing"]),
    ("cues forget data/shop p", ["price"]),
    ("cues run shop.py --engine s", ["spark"]),
    ("cues tail data/none#", []),
    ("cues tail #o", []),
    ("cues nothing data/shop#", []),
    ("cues tail --count x data/shop#o", ["data/shop#orders"]),
]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_the_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, shell: str
) -> None:
    for line, expected in LINES:
        found = offered(capsys, monkeypatch, shell, line)
        assert sorted(value for _, value in found) == expected, line
        assert {kind for kind, _ in found} <= {"plain"}
    for line, kind in (("cues run ", "file"), ("cues tail data/s", "file"), ("cues tail --store d", "dir")):
        assert [kind for kind, _ in offered(capsys, monkeypatch, shell, line)] == [kind]
    assert [value for _, value in offered(capsys, monkeypatch, shell, "cues ")] == list(COMMANDS)


def test_bash_keeps_the_part_before_a_colon(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It divides words there, so the words of ``data/shop#group:b`` are three, and only the last is replaced."""
    for line, expected in (
        ("cues forget data/shop#group : b", ["billing"]),
        ("cues forget data/shop#group :", ["billing"]),
        ("cues forget data/shop#group : x", []),
        ("cues tail shop.py : graph#o", ["graph#orders"]),
    ):
        assert [value for _, value in offered(capsys, monkeypatch, "bash", line)] == expected, line


def test_the_store_of_the_settings_is_the_one_of_a_bare_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cues.toml").write_text(f"store = {json.dumps(str(place / 'data' / 'shop'))}\n")
    assert offered(capsys, monkeypatch, "zsh", "cues tail #o") == [("plain", "#orders")]
    (tmp_path / "cues.toml").write_text("store = \n")
    assert offered(capsys, monkeypatch, "zsh", "cues tail #o") == []
    monkeypatch.setenv("CUES_STORE", str(place / "data" / "shop"))
    assert offered(capsys, monkeypatch, "zsh", "cues tail #o") == [("plain", "#orders")]


def test_a_store_that_cannot_be_read_has_no_names(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: Path
) -> None:
    """Every prefix of the file, every page overwritten, and files that are no stores: never an error."""
    used = datafile.used(place / "data" / "shop")
    with (place / "data" / "shop" / "data.mdb").open("rb") as file:  # which is as long as the map
        whole = file.read(used)
    monkeypatch.chdir(tmp_path)
    store = tmp_path / "broken"
    store.mkdir()
    (tmp_path / "wrong.py").write_text("graph = cues.Graph(\n")
    for damaged in (
        b"", b"text", bytes(9000), os.urandom(20_000),
        *(whole[:end] for end in range(0, used, 2048)),
        *(whole[:at] + b"\xff" * 4096 + whole[at + 4096 : used] for at in range(0, used, 4096)),
    ):  # fmt: skip
        (store / "data.mdb").write_bytes(damaged)
        datafile_keys(store)
    (store / "data.mdb").write_bytes(b"text")
    assert offered(capsys, monkeypatch, "bash", "cues tail broken#") == []
    assert offered(capsys, monkeypatch, "bash", "cues tail wrong.py#") == []


def datafile_keys(store: Path) -> list[bytes]:
    """The keys, or the errors that are allowed."""
    import struct

    try:
        return datafile.row_keys(store, names.queue_key(""))
    except (ValueError, struct.error, IndexError):
        return []


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(1 << 20)


def test_a_tab_changes_nothing_in_the_directory_of_a_store(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    """Nor is a file made: the completion opens only the data file."""

    def state() -> dict[str, tuple[int, int, bytes]]:
        files = sorted(path for path in (place / "data" / "shop").iterdir() if path.is_file())
        return {file.name: (file.stat().st_mtime_ns, file.stat().st_size, _head(file)) for file in files}

    before = state()
    opened: list[str] = []
    watching = [True]
    sys.addaudithook(lambda event, given: opened.append(str(given[0])) if event == "open" and watching else None)
    try:
        assert offered(capsys, monkeypatch, "bash", "cues tail data/shop#o") == [("plain", "data/shop#orders")]
    finally:
        watching.clear()
    assert state() == before
    assert {Path(path).name for path in opened if "shop/" in path} <= {"data.mdb"}


def test_keys_are_those_of_lmdb_in_a_large_store(tmp_path: Path) -> None:
    """With several levels of pages, long names, and many rows of other kinds."""
    with library.open(tmp_path / "s", durability="process") as store:
        for n in range(150):
            store.queue(f"queue-{n:03}-{'x' * (n % 60)}", partitions=1 + n % 3).appender().write({"n": n})
        assert [
            key[len(names.queue_key("")) :].decode() for key in datafile.row_keys(tmp_path / "s", b"\0queue\0")
        ] == (store.queues())
        with store.core.view() as txn:
            every = [bytes(key) for key, _ in txn.cursor()]
    for prefix in (b"", b"\0", b"\0row\0", b"\0queue\0queue-1", b"\0zzz", b"\xff"):
        assert datafile.row_keys(tmp_path / "s", prefix) == [key for key in every if key.startswith(prefix)]


@pytest.mark.slow
def test_names_are_right_while_the_store_is_written(tmp_path: Path) -> None:
    """Queues are made and messages appended meanwhile: looks never fail, and find the names from before."""
    known = [f"q{n:03}" for n in range(60)]
    with library.open(tmp_path / "s", durability="process") as store:
        for name in known:
            store.queue(name)
        end = threading.Event()

        def write() -> None:
            appender = store.queue(known[0]).appender()
            for n in range(100_000):
                if end.is_set():
                    break
                appender.write({"n": n})
                if n % 50 == 0 and n < 20_000:
                    store.queue(f"r{n:06}")

        writer = threading.Thread(target=write)
        writer.start()
        try:
            looks = made = 0
            limit = time.monotonic() + 240
            while (looks < 300 or made < 40) and time.monotonic() < limit:
                found = {key[7:].decode("utf-8", "replace") for key in datafile_keys(tmp_path / "s")}
                made = len(found) - len(known)
                looks += known[-1] in found
        finally:
            end.set()
            writer.join(60)
        assert looks >= 300
        assert made >= 40


@pytest.mark.slow
@pytest.mark.skipif(BASH is None, reason="bash is not installed")
def test_in_a_real_bash_tab_completes_the_line(tmp_path: Path, place: Path) -> None:
    """The script is sourced, keys are pressed on a terminal, and the command gets the completed arguments."""
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "cues"
    tool.write_text(f"#!{sys.executable}\nimport sys\nfrom cues.cli import main\nmain()\n")
    tool.chmod(0o755)
    script = subprocess.run([*CUES, "completion", "bash"], capture_output=True, text=True, check=True).stdout
    (tmp_path / "rc").write_text(f"PS1='ready> '\n{script}")
    master, slave = pty.openpty()
    assert BASH is not None
    env = environment(PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}", INPUTRC="/dev/null")
    with subprocess.Popen(
        [BASH, "--noprofile", "--rcfile", str(tmp_path / "rc"), "-i"],
        stdin=slave, stdout=slave, stderr=slave, cwd=place, env=env, start_new_session=True,
    ) as process:  # fmt: skip
        os.close(slave)
        text = ""

        def until(words: str) -> None:
            nonlocal text
            limit = time.monotonic() + 60
            while words not in text:
                ready, _, _ = select.select([master], [], [], max(0.0, limit - time.monotonic()))
                assert ready, f"no {words!r} in {text!r}"
                text += os.read(master, 65536).decode("utf-8", "replace")

        try:
            until("ready> ")
            for keys, expected in (
                ("cues tai\tdata/shop#or\t--fo\t", "cues tail data/shop#orders --follow "),
                ("cues forget data/shop#gr\t", "data/shop#group:billing "),
                ("cues forget data/shop#group:b\t", "data/shop#group:billing "),
                ("cues tail sho\t", "cues tail shop.py "),
                ("cues redrive shop.py --processor pr\t", "--processor price "),
            ):
                text = ""
                os.write(master, keys.encode())
                until(expected)
                os.write(master, b"\x15")  # clear the line
                assert "Traceback" not in text
        finally:
            process.kill()
            os.close(master)
