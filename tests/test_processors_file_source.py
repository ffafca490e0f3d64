"""Sources over globs, watched directories and followed logs: what is read, in which order, and across rotations.

That each record is on the queue once, wherever the run is killed, is shown in test_contracts_sources.py.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import logging
import lzma
import os
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cues
from cues import codec, testing
from cues.errors import Diverged, InvalidArgument
from cues.processors import files, places
from cues.processors.file_source import Files


def lines(source: Files, position: Any = None) -> list[Any]:
    """The lines of a text source until it ends; an error in place of a line is shown by its type."""
    items = [item for _, item in source(position) if item is not None]
    return [item["line"] if isinstance(item, dict) else type(item) for item in items]


def followed(path: Path, **options: Any) -> Files:
    """A source that reads what is there, as a run of a job that is started again and again."""
    return Files(path, **{"follow": True, "idle_exit_s": 0, "grace_s": 0, "poll_s": 0.01, **options})


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


class Packed(dict[Any, Any]):
    """Rows of a state, which keep what they would on disk."""

    def __setitem__(self, field: Any, value: Any) -> None:
        super().__setitem__(codec.unpack(codec.pack(field)), codec.unpack(codec.pack(value)))


class Run:
    """Runs of one source, each of which continues at the position and with the state of the one before."""

    def __init__(self, source: Files) -> None:
        self.source, self.position = source, None
        self.process = SimpleNamespace(state=Packed(), stopping=False)

    def __call__(self, count: int | None = None) -> list[Any]:
        """Return the lines of a run until it ends, or until it is killed after so many."""
        found: list[Any] = []
        for position, item in self.source(self.position, self.process):
            assert position != self.position
            self.position = codec.unpack(codec.pack(position))  # type: ignore[assignment]
            if item is not None:
                found.append(item["line"] if isinstance(item, dict) and len(item) == 1 and "line" in item else item)
            if len(found) == count:
                break
        return found


def at_every_place(make: Callable[[], Files], whole: list[Any], stops: Iterable[int]) -> None:
    """A run that is killed after so many records is continued by the next one with the others."""
    for stop in stops:
        run = Run(make())
        assert run(stop) == whole[:stop]
        assert run() == whole[stop:]
        assert run() == []


# --- in the order of names ----------------------------------------------------------------------


def test_files_are_read_in_the_order_of_their_names_and_compressed_ones_too(tmp_path: Path) -> None:
    (tmp_path / "d.log").write_text("7\n8")
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(b"1\n2\n"))
    (tmp_path / "b.log.bz2").write_bytes(bz2.compress(b"3\n4\n"))
    (tmp_path / "c.log.xz").write_bytes(lzma.compress(b"5\n6\n"))
    for hidden in ("_x.log", ".y.log", "z.log.tmp"):
        (tmp_path / hidden).write_text("hidden\n")
    assert lines(Files(tmp_path)) == [str(n) for n in range(1, 9)]
    assert lines(Files(tmp_path / "*.log")) == ["7", "8"]


@pytest.mark.parametrize("name", ["a[1].log", "_a.log", ".a.log", "a.log.tmp"])
def test_a_file_that_is_named_by_its_path_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "a1.log").write_text("another\n")
    (tmp_path / name).write_text("named\n")
    assert lines(Files(tmp_path / name, format="text")) == ["named"]


@pytest.mark.parametrize("encoding", ["utf-8", "UTF-8", "utf8"])
@pytest.mark.parametrize(("name", "data"), [("a.jsonl", b'{"n": "1"}\n'), ("a.csv", b"n\n1\n")])
def test_a_byte_order_mark_is_no_part_of_the_first_line(name: str, data: bytes, encoding: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + data)
    assert [row for _, row in Files(tmp_path / name, encoding=encoding)(None)] == [{"n": "1"}]


def test_csv_whose_lines_end_with_cr_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b"a,b\r1,2\r")
    (error,) = lines_or_errors(tmp_path)
    assert isinstance(error, files.BadFile) and "a.csv: it cannot be read: its lines end with CR" in str(error)


def lines_or_errors(path: Path, **options: Any) -> list[Any]:
    return [item for _, item in Files(path, **options)(None) if item is not None]


def test_a_name_that_is_not_utf8_is_read_and_known_again(tmp_path: Path) -> None:
    for name in (b"a.log", b"b\xe9.log", b"c.log"):
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name))).write_text("1\n2\n")
    at_every_place(lambda: Files(tmp_path), ["1", "2"] * 3, range(1, 6))


def test_zstd_is_read_with_pyarrow(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    pytest.importorskip("pyarrow")
    compressor = zstandard.ZstdCompressor()
    data = "".join(f"line {n}\n" for n in range(20_000)).encode()
    (tmp_path / "a.log.zst").write_bytes(compressor.compress(data[:1000]) + compressor.compress(data[1000:]))
    at_every_place(lambda: Files(tmp_path), data.decode().split("\n")[:-1], [10_000])


def test_a_new_file_is_read_by_the_next_run_whatever_its_name_and_a_finished_one_never_again(tmp_path: Path) -> None:
    run = Run(Files(tmp_path / "*.log"))
    for number in range(1, 65):
        (tmp_path / f"part-{number}.log").write_text(f"{number}\n")
    assert run() == [str(n) for n in range(1, 65)]  # numbers are in the order of their values
    for number in range(65, 130):
        (tmp_path / f"part-{number}.log").write_text(f"{number}\n")
    (tmp_path / "a.log").write_text("late\n")
    assert run() == ["late", *(str(n) for n in range(65, 130))]
    os.remove(tmp_path / "part-3.log")
    assert run() == []


def test_the_position_does_not_grow_with_the_files(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number:06}.log").write_text("x\ny\n")
    sizes = [len(codec.pack(position)) for position, _ in Files(tmp_path)(None)]
    assert len(sizes) == 400 and max(sizes) <= len(str(tmp_path / "000000.log")) + 60


def test_files_in_the_order_of_their_times(tmp_path: Path) -> None:
    for number, name in enumerate(["b", "c", "a"]):
        (tmp_path / f"{name}.log").write_text(f"{name}\n")
        os.utime(tmp_path / f"{name}.log", (number, number))
    assert lines(Files(tmp_path, order="modified")) == ["b", "c", "a"]


def test_a_watched_directory_takes_files_in_any_order(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number:03}.log").write_text(f"{number}\n")
    reading = Files(tmp_path, watch=True, idle_exit_s=0, poll_s=0)(None)
    first = [next(reading)[1] for _ in range(30)]
    (tmp_path / "000-late.log").write_text("late\n")
    (tmp_path / "999.log").write_text("last\n")
    rest = [item for _, item in reading]
    assert [item["line"] for item in [*first, *rest] if isinstance(item, dict)] == [
        *map(str, range(30)),
        "late",
        "last",
    ]


def test_a_file_that_changed_after_it_was_read_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(Files(tmp_path))
    (tmp_path / "a.log").write_text("1\n")
    assert run() == ["1"]
    append(tmp_path / "a.log", "2\n")
    assert run() == []
    assert "a.log has changed since it was read (2 bytes, now 4)" in caplog.text
    caplog.clear()
    assert run() == [] and not caplog.text
    (tmp_path / "a.log").rename(tmp_path / "b.log")  # a remedy that the log names
    assert run() == ["1", "2"]


def test_a_file_is_known_after_it_was_renamed_or_restored_but_an_equal_one_is_another_file(tmp_path: Path) -> None:
    run = Run(Files(tmp_path))
    for name in ("a", "b"):
        (tmp_path / f"{name}.log").write_text("1\n")
    assert run() == ["1", "1"]
    (tmp_path / "a.log").rename(tmp_path / "c.log")
    shutil.copy2(tmp_path / "b.log", tmp_path / "restored.log")
    os.remove(tmp_path / "b.log")
    assert run() == []
    for name in ("d", "e"):
        shutil.copy2(tmp_path / "c.log", tmp_path / f"{name}.log")  # their model is there: they are other files
    assert run() == ["1", "1"]


def test_a_file_that_is_read_is_known_after_a_rename(tmp_path: Path) -> None:
    run = Run(Files(tmp_path))
    for name in ("a", "b"):
        (tmp_path / f"{name}.log").write_text(f"1{name}\n2{name}\n")
    assert run(1) == ["1a"]
    (tmp_path / "a.log").rename(tmp_path / "z.log")
    assert run() == ["2a", "1b", "2b"]


def test_empty_files_are_noted_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(Files(tmp_path))
    for number in range(5):
        (tmp_path / f"{number}.log").write_text("")
    assert run() == [] and len(run.process.state) == 5
    append(tmp_path / "3.log", "late\n")
    assert run() == [] and "3.log has changed" in caplog.text


@pytest.mark.parametrize("current", [False, True])
def test_a_position_of_the_earlier_version_continues(
    current: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It names a floor, the last files that were finished, and the file under way."""
    names = [f"{tmp_path}/{number:02}.log" for number in range(1, 41)]
    for number, name in enumerate(names, 1):
        Path(name).write_text(f"{number}\nx\n")
    found = os.stat(names[31])
    under_way = [names[31], found.st_dev, found.st_ino, 0, b""]
    run = Run(Files(tmp_path))
    run.position = [1, names[14], names[15:31], under_way if current else [], 0, 0]  # type: ignore[assignment]
    assert run()[::2] == [str(n) for n in range(32, 41)]
    assert f"15 files up to {names[14]} count as read" in caplog.text
    caplog.clear()
    assert run() == [] and not caplog.text


def test_a_position_needs_the_state_that_belongs_to_it(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("1\n")
    ((position, _),) = Files(tmp_path)(None)
    with pytest.raises(InvalidArgument, match="without process="):
        Files(tmp_path)(position)


def test_a_file_that_changed_before_its_position_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("1\n2\n3\n")
    run = Run(Files(path))
    assert run(1) == ["1"]
    path.write_text("x\n2\n3\n")
    with pytest.raises(files.FileChanged, match="not the file"):
        run()
    path.unlink()
    with pytest.raises(files.FileChanged, match="gone"):
        run()


def test_a_position_of_another_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="not one of"):
        Run(Files(tmp_path)).source([0, 7, 1], SimpleNamespace(state={}))


def test_a_pattern_is_followed_in_the_order_of_numbers_and_a_file_that_comes_late_is_read(tmp_path: Path) -> None:
    run = Run(followed(tmp_path / "app-*.log"))
    written = []
    for number in range(1, 31):
        append(tmp_path / f"app-{number}.log", f"{number}\n")
        written.append(str(number))
        if number % 4 == 0:
            assert run() == written
            written.clear()
    append(tmp_path / "app-0.log", "late\n")
    append(tmp_path / "app-30.log", "grown\n")
    assert run() == ["29", "30", "grown", "late"] or run.position
    append(tmp_path / "app-7.log", "a program had it open\n")
    assert run() == ["a program had it open"]


def test_the_last_file_by_name_grows_and_its_half_line_waits(tmp_path: Path) -> None:
    run = Run(followed(tmp_path / "app-*.log"))
    (tmp_path / "app-1.log").write_text("1\n2")
    assert run() == ["1"]
    append(tmp_path / "app-1.log", "2\n3")
    assert run() == ["22"]
    (tmp_path / "app-2.log").write_text("4\n5")
    assert run() == ["3", "4"]  # the end of a file that has a successor is a line


@pytest.mark.parametrize("format", ["parquet", "arrow", "stream"])
def test_tables_are_read_by_row_from_every_position(format: str, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    table = pa.table({"n": list(range(2_500)), "s": [f"é{n}" for n in range(2_500)]})
    for name, part in (("a", table.slice(0, 1_200)), ("b", table.slice(1_200))):
        if format == "parquet":
            pq.write_table(part, tmp_path / f"{name}.parquet", row_group_size=500)
        else:
            make = pa.ipc.new_file if format == "arrow" else pa.ipc.new_stream
            with make(str(tmp_path / f"{name}.arrow"), part.schema) as out:
                out.write_table(part, max_chunksize=500)
    at_every_place(lambda: Files(tmp_path), table.to_pylist(), (1, 499, 500, 501, 1_199, 1_200, 1_201, 2_499))


def test_objects_are_read_through_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory, bucket = fsspec.filesystem("memory"), f"memory://{tmp_path.name}"
    memory.pipe_file(f"{bucket}/a.jsonl", b'{"n": 1}\n{"n": 2}\n')
    memory.pipe_file(f"{bucket}/b.jsonl.gz", gzip.compress(b'{"n": 3}\n{"n": 4}\n'))
    at_every_place(lambda: Files(f"{bucket}/*.jsonl*"), [{"n": n} for n in range(1, 5)], range(1, 4))


# --- files that cannot be read ------------------------------------------------------------------


def truncated_gz(path: Path) -> None:
    whole = gzip.compress("".join(f"{n} {n * n}\n" for n in range(9_000)).encode())
    path.with_suffix(".log.gz").write_bytes(whole[:-200])


def parquet_page(path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = path.with_suffix(".parquet")
    pq.write_table(pa.table({"s": [f"text {n}" for n in range(500)]}), path, use_dictionary=False)
    data = bytearray(path.read_bytes())
    data[200:400] = b"\xff" * 200
    path.write_bytes(data)


def parquet_end(path: Path) -> None:
    pytest.importorskip("pyarrow")
    path.with_suffix(".parquet").write_bytes(b"PAR1 no table PAR1")


def header_twice(path: Path) -> None:
    path.with_suffix(".csv").write_text("a,a\n1,2\n")


def not_gz(path: Path) -> None:
    path.with_suffix(".log.gz").write_text("plain text\n")


def not_bz2(path: Path) -> None:
    path.with_suffix(".log.bz2").write_text("plain text\n")


def not_xz(path: Path) -> None:
    path.with_suffix(".log.xz").write_text("plain text\n")


def two_in_a_zip(path: Path) -> None:
    with zipfile.ZipFile(path.with_suffix(".log.zip"), "w") as archive:
        archive.writestr("a", "1")
        archive.writestr("b", "2")


@pytest.mark.parametrize(
    "write",
    [truncated_gz, parquet_page, parquet_end, header_twice, not_gz, not_bz2, not_xz, two_in_a_zip],
)
@pytest.mark.parametrize("bad", ["error", "row"])
def test_a_file_that_cannot_be_read_is_one_message_and_the_others_are_read(
    bad: str, write: Callable[[Path], None], tmp_path: Path
) -> None:
    for name in ("a", "c"):
        (tmp_path / f"{name}.log").write_text(f"{name}\n")
    write(tmp_path / "b")
    (damaged,) = tmp_path.glob("b*")
    run = Run(Files(tmp_path, bad=bad))
    found = run()
    assert found[0] == "a" and found[-1] == "c"
    text = str(found[-2] if bad == "error" else (found[-2]["file"], found[-2]["problem"]))
    assert damaged.name in text and "it cannot be read" in text
    rows = found[1:-2]
    assert rows == [f"{n} {n * n}" for n in range(len(rows))]
    assert run() == []  # each start tries it again, after the rows that were read, and says the same no more
    if write is truncated_gz:
        assert len(rows) > 1_000 and f"after line {len(rows):,}" in text
        data = "".join(f"{n} {n * n}\n" for n in range(9_000)).encode()
        damaged.write_bytes(gzip.compress(data))
        assert run() == [f"{n} {n * n}" for n in range(len(rows), 9_000)]
        assert run() == []


def test_a_damaged_file_is_read_when_it_was_repaired_in_a_watched_directory(tmp_path: Path) -> None:
    (tmp_path / "a.log.gz").write_text("plain text\n")
    reading = Files(tmp_path, watch=True, poll_s=0, idle_exit_s=5)(None)
    assert isinstance(next(reading)[1], files.BadFile)
    (tmp_path / "a.log.gz").write_bytes(gzip.compress(b"1\n"))
    assert next(reading)[1] == {"line": "1"}


def test_without_an_error_queue_a_damaged_file_stops_the_source_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.log.gz").write_text("plain text\n")
    with (
        testing.temporary_store() as store,
        pytest.raises(cues.ProcessorStopped, match=r"a\.log\.gz: it cannot be read"),
    ):
        testing.run_until_idle(cues.Graph("g", [cues.Source("rows", Files(tmp_path))]), store)


def test_an_error_of_the_machine_is_not_charged_to_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.log").write_text("1\n")

    def refuse(self: Any, name: str) -> Any:
        raise OSError(errno.EMFILE, "Too many open files", name)

    monkeypatch.setattr(places.Local, "open", refuse)
    with pytest.raises(OSError, match="Too many"):
        list(Files(tmp_path)(None))


# --- records that cannot be read ----------------------------------------------------------------


def test_a_bad_record_goes_to_the_error_queue_or_stops_the_source(tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    path.write_text('{"n": 1}\nno\n{"n": 2}\n')
    for errors in ("errors", None):
        with testing.temporary_store() as store:
            graph = cues.Graph("g", [cues.Source("rows", Files(path))], errors=errors)
            report = testing.run_until_idle(graph, store, stopped="return")
            wanted = [{"n": 1}, {"n": 2}] if errors else [{"n": 1}]
            assert testing.messages(store, "rows") == wanted
            if errors:
                (error,) = testing.messages(store, "errors")
                text = error["err/cause"][0]["message"]
            else:
                text = str(report.stopped["rows"])
            for part in (str(path), "line 2", "Expecting value", "expected a line of jsonl"):
                assert part in text


def test_a_bad_record_may_be_a_row(tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_text("a,b\n1\n2,3\n")
    rows = [row for _, row in Files(tmp_path / "b.csv", bad="row", at="at")(None)]
    assert isinstance(rows[0], dict) and rows[0]["q/type"] == files.MALFORMED and rows[0]["line"] == 2
    assert rows[1] == {"a": "2", "b": "3", "at": "b.csv:3"}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"encoding": "utf-16"}, "line ends"),
        ({"encoding": "nothing"}, "unknown"),
        ({"format": "xml"}, "use one of"),
        ({"bad": "skip"}, "'error' or 'row'"),
        ({"order": "size"}, "name, modified"),
        ({"delimiter": "||"}, "one character"),
        ({"line_bytes_max": 0}, "from 1 to"),
        ({"follow": True, "format": "parquet"}, "cannot be followed"),
    ],
)
def test_what_cannot_be_read_is_refused_when_it_is_declared(options: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        Files("x", **options)
    with pytest.raises(InvalidArgument, match="does not grow"):
        Files("s3://bucket/a.log", follow=True)


def test_a_name_that_does_not_tell_the_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.xyz").write_text("x\n")
    with pytest.raises(InvalidArgument, match="format="):
        list(Files(tmp_path)(None))


def test_latin_text(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes("é\nü\n".encode("latin-1"))
    assert lines(Files(tmp_path / "a.log", encoding="latin-1")) == ["é", "ü"]
    assert lines(Files(tmp_path / "a.log")) == [files.Malformed] * 2


# --- tail -F ------------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "app.log"


def test_a_followed_file_may_begin_later_and_grow(log: Path) -> None:
    run = Run(followed(log))
    assert run() == []
    append(log, "1\nhal")
    assert run() == ["1"]
    append(log, "f\n")
    assert run() == ["half"]


@pytest.mark.parametrize("ending", [".1", ".2026-11-22", "-20261122"])
def test_a_rotation_by_rename_loses_nothing(ending: str, log: Path) -> None:
    run = Run(followed(log))
    append(log, "1\n2\n")
    assert run() == ["1", "2"]
    append(log, "3\n4")
    log.rename(f"{log}{ending}")
    append(log, "5\n")
    assert run() == ["3", "4", "5"]
    assert run() == []


def test_several_rotations_while_nobody_reads(log: Path) -> None:
    run = Run(followed(log))
    append(log, "0\n")
    assert run() == ["0"]
    for number in range(1, 5):
        append(log, f"{number}\n")
        for older in range(number, 0, -1):
            name = log if older == 1 else Path(f"{log}.{older - 1}")
            name.rename(f"{log}.{older}")
        append(log, "")
    append(log, "5\n")
    assert run() == ["1", "2", "3", "4", "5"]


def test_a_rotated_file_that_was_compressed_is_known_by_its_first_bytes(log: Path) -> None:
    run = Run(followed(log))
    append(log, "1\n2\n")
    assert run() == ["1", "2"]
    append(log, "3\n")
    found = log.stat()
    Path(f"{log}.1.gz").write_bytes(gzip.compress(log.read_bytes()))
    os.utime(f"{log}.1.gz", ns=(found.st_atime_ns, found.st_mtime_ns))
    log.unlink()
    append(log, "4\n")
    assert run() == ["3", "4"]


def test_copy_and_truncate(log: Path) -> None:
    run = Run(followed(log))
    append(log, "1\n2\n")
    assert run() == ["1", "2"]
    append(log, "3\n")
    shutil.copy(log, f"{log}.1")
    os.truncate(log, 0)
    append(log, "4\n")
    assert run() == ["3", "4"]
    shutil.copy(log, f"{log}.1")  # and again, regrown beyond the position
    os.truncate(log, 0)
    append(log, "five\nsix\n")
    assert run() == ["five", "six"]


def test_a_truncation_without_a_copy_is_a_warning(log: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(followed(log))
    append(log, "1\n2\n")
    assert run() == ["1", "2"]
    os.truncate(log, 0)
    append(log, "3\n")
    with caplog.at_level(logging.WARNING):
        assert run() == ["3"]
    assert "was truncated" in caplog.text and "up to byte 4" in caplog.text


def test_a_running_graph_follows_growth_and_every_kind_of_rotation(log: Path) -> None:
    """One start, with a program beside it that writes and rotates: each line once, in order."""
    source = Files(log, follow=True, poll_s=0.005, grace_s=0.2)
    graph = cues.Graph("g", [cues.Source("lines", source)])
    written = 0

    def write(count: int) -> None:
        nonlocal written
        for _ in range(count):
            written += 1
            append(log, f"{written}\n")

    with testing.temporary_store() as store, graph.start(store=store):
        seen = threading.Event()

        def wait() -> None:
            for _ in range(6_000):
                if store.queue("lines").last_index >= written:
                    return
                seen.wait(0.01)
            raise AssertionError(f"{store.queue('lines').last_index} of {written}")

        for round in range(6):
            write(20)
            if round == 0:
                wait()  # from here on the source knows the file
            if round == 2:
                wait()  # lines between the last look and a truncation are in the copy
                write(1)
                shutil.copy(log, f"{log}.copy")
                os.truncate(log, 0)
            elif round % 2:
                log.rename(f"{log}.{9 - round}")
            write(3)
        wait()
        found = [message["line"] for message in testing.messages(store, "lines")]
    assert found == [str(n) for n in range(1, written + 1)]


def test_a_quoted_record_that_is_half_written_waits(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    run = Run(followed(path))
    path.write_text('a,b\n1,"x\n')
    assert run() == []
    append(path, 'y"\n')
    assert run() == [{"a": "1", "b": "x\ny"}]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
