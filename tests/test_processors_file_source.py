"""Sources over globs, watched directories and followed logs: what is read, in which order, and across rotations.

That each record is on the queue once, wherever the run is killed, is shown in test_contracts_sources.py.
"""

from __future__ import annotations

import bz2
import gzip
import logging
import lzma
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cues
from cues import codec, testing
from cues.errors import Diverged, InvalidArgument
from cues.processors import file_source, files
from cues.processors.file_source import Files


def lines(source: Files, position: Any = None) -> list[Any]:
    """The lines of a text source until it ends; an error in place of a line is shown by its type."""
    return [item["line"] if isinstance(item, dict) else type(item) for _, item in source(position)]


def followed(path: Path, **options: Any) -> Files:
    """A source that reads what is there, as a run of a job that is started again and again."""
    return Files(path, **{"follow": True, "idle_exit_s": 0, "grace_s": 0, "poll_s": 0.01, **options})


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


class Run:
    """Runs of one source, each of which continues at the position of the one before."""

    def __init__(self, source: Files) -> None:
        self.source, self.position = source, None

    def __call__(self) -> list[str]:
        found = []
        for position, item in self.source(self.position):
            self.position = codec.unpack(codec.pack(position))  # type: ignore[assignment]
            assert isinstance(item, dict)
            found.append(item["line"])
        return found


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
    with pytest.raises(ValueError, match=r"a\.csv: its lines end with CR"):
        list(Files(tmp_path / "a.csv")(None))


def test_a_name_that_is_not_utf8_is_read_and_known_again(tmp_path: Path) -> None:
    for name in (b"a.log", b"b\xe9.log", b"c.log"):
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name))).write_text("1\n2\n")
    whole = list(Files(tmp_path)(None))
    assert [row for _, row in whole] == [{"line": "1"}, {"line": "2"}] * 3
    for stop in range(6):
        position = codec.unpack(codec.pack(whole[stop][0]))
        assert list(Files(tmp_path)(position)) == whole[stop + 1 :]


def test_zstd_is_read_with_pyarrow(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    pytest.importorskip("pyarrow")
    compressor = zstandard.ZstdCompressor()
    data = "".join(f"line {n}\n" for n in range(20_000)).encode()
    (tmp_path / "a.log.zst").write_bytes(compressor.compress(data[:1000]) + compressor.compress(data[1000:]))
    whole = list(Files(tmp_path)(None))
    assert [row["line"] for _, row in whole if isinstance(row, dict)] == data.decode().split("\n")[:-1]
    assert list(Files(tmp_path)(whole[9_999][0])) == whole[10_000:]


def test_a_new_file_is_read_by_the_next_run_and_a_finished_one_never_again(tmp_path: Path) -> None:
    run = Run(Files(tmp_path / "*.log"))
    (tmp_path / "b.log").write_text("1\n")
    assert run() == ["1"]
    append(tmp_path / "b.log", "2\n")
    (tmp_path / "c.log").write_text("3\n")
    (tmp_path / "a.log").write_text("late\n")  # before one that was read, but not long before
    assert run() == ["late", "3"]
    os.remove(tmp_path / "b.log")
    assert run() == []


def test_the_position_has_a_bound_however_many_files_there_are(tmp_path: Path) -> None:
    for number in range(200):
        (tmp_path / f"{number:06}.log").write_text("x\ny\n")
    sizes = [len(codec.pack(position)) for position, _ in Files(tmp_path)(None)]
    name = len(str(tmp_path / "000000.log")) + 3
    assert len(sizes) == 400 and max(sizes) <= (file_source.FINISHED_MAX + 2) * name + 100


def test_a_file_that_comes_too_late_stops_the_source_by_name(tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"{number:03}.log").write_text("x\n")
    reading = Files(tmp_path, watch=True, idle_exit_s=0)(None)
    for _ in range(30):
        next(reading)
    (tmp_path / "000-late.log").write_text("x\n")
    (tmp_path / "999.log").write_text("x\n")
    with pytest.raises(file_source.FileTooLate, match=r"000-late.*Try:"):
        list(reading)


def test_a_file_that_changed_before_its_position_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("1\n2\n3\n")
    position = next(iter(Files(path)(None)))[0]
    path.write_text("x\n2\n3\n")
    with pytest.raises(files.FileChanged, match="not the file"):
        list(Files(path)(position))
    path.unlink()
    with pytest.raises(files.FileChanged, match="gone"):
        list(Files(path)(position))


def test_a_position_of_another_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match="not one of"):
        list(Files(tmp_path)([0, 7, 1]))


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
    whole = list(Files(tmp_path)(None))
    assert [row for _, row in whole] == table.to_pylist()
    for stop in (0, 499, 500, 1_199, 1_200, 2_498, 2_499):
        assert list(Files(tmp_path)(whole[stop][0])) == whole[stop + 1 :]


def test_a_damaged_table_stops_the_source_with_the_name_of_the_file(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1 no table PAR1")
    with pytest.raises(ValueError, match=r"a\.parquet, row 1: .*parquet"):
        list(Files(tmp_path)(None))


def test_objects_are_read_through_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    memory, bucket = fsspec.filesystem("memory"), f"memory://{tmp_path.name}"
    memory.pipe_file(f"{bucket}/a.jsonl", b'{"n": 1}\n{"n": 2}\n')
    memory.pipe_file(f"{bucket}/b.jsonl.gz", gzip.compress(b'{"n": 3}\n{"n": 4}\n'))
    whole = list(Files(f"{bucket}/*.jsonl*")(None))
    assert [row for _, row in whole] == [{"n": n} for n in range(1, 5)]
    for stop in range(4):
        assert list(Files(f"{bucket}/*.jsonl*")(whole[stop][0])) == whole[stop + 1 :]


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
    source = followed(path, record_lines_max=5)
    path.write_text('a,b\n1,"x\n')
    assert list(source(None)) == []
    append(path, 'y"\n')
    assert [row for _, row in source(None)] == [{"a": "1", "b": "x\ny"}]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(30)
