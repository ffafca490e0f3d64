"""Sinks that write files exactly once: lines, CSV, Parquet or Arrow, on this machine or in an object store.

    out = FileSink("out", "parquet", roll_bytes=64_000_000, roll_s=3600)
    graph.add(out.sink("priced"))

    @graph.sink("priced", batch=True, checkpoint=out)             the same with a function of your own
    def save(priced, process):
        process.connection.write([{"id": p["id"], "total": p["total"]} for p in priced])

The protocol is that of :mod:`cues.checkpoints.deliveries`: a row for each processor and partition holds the positions
of the messages that the files have. A message that the files have is not written again. Two processors, or two
partitions of one, never share a file or a row.

**On this machine** ::

    out/shop.save-0-00000001.jsonl        finished: <graph>.<processor>-<partition>-<number>
    out/_cues/shop.save/0.json            the row: positions, and the committed length of the open file
    out/_cues/shop.save/0-00000002.open   the open file; readers do not see it
    out/_cues/shop.save/0.lock            held during a transaction

With ``partition_by=`` (hive.py) a finished file is in the directory of its values, as
``out/day=2026-01-31/city=Zug/shop.save-0-00000002.jsonl``. Each directory has an open file of its own, all of them in
one row. A step appends to the open files of its rows and commits them together. When more than ``open_files_max`` are
open, the one that was written to least recently is finished.

    1. lock     the row's lock, and read the row
    2. settle   finish the files that the row names as finished; cut the open file to its committed length
    3. run      the user's function; its rows are encoded as it writes them
    4. append   to the open file, and sync it
    5. commit   replace the row, by a rename, and sync it: positions, the new length, files that are finished
    6. finish   rename a finished file to its name (after it was compressed, or made a table), each rename durable
                before the next change of names

Before 5 nothing has changed, since 2 cuts the file. After 5 everything is decided, since 2 of the next transaction
repeats 6. A file is visible only after all of its rows are committed, so what a reader sees is never taken back; its
name is a number that the row counts, so it is the same however often 6 is repeated.

**In an object store** nothing can be cut, so each step is an object, finished by its put. The row names the object
before it is written (*intent*), and the object is the commit: if it is there, the row is what the intent says. Each
owner writes a row of its own epoch, so an owner that was replaced changes no row of its successor. It can only put the
same object again: a start takes exactly the range of the delivery that was under way, whose hash is in the name.

Not guaranteed: a file is finished by time only while the graph runs. A file that is overdue at a start is finished when
the sink begins; call :meth:`FileSink.finish` after the last run of a job. ``durability="process"`` does not survive a
power cut. The directory is on a filesystem with renames and locks (not on some network filesystems). Rows of files that
are removed from ``_cues`` by hand are lost. A function in ``partition_by=`` gives the same values whenever it is called
with a row.
In an object store, a purge by hand of messages whose step is under way may write some
of them twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import glob
import io
import json
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any, Final, Literal, cast

import cues
from cues import faults
from cues.arguments import check_number, path_of, texts_of, version_hint
from cues.checkpoints import Row, sync_directory, sync_names, write_once
from cues.checkpoints import Transaction as TargetTransaction
from cues.errors import CheckpointError, Diverged, InvalidArgument
from cues.overrides import override
from cues.processors import SINK, formats, hive, places, takes

TIMEOUT_S: Final = 30.0
"""Seconds for which a transaction waits for another one of the same processor before it fails."""

ROLL_BYTES: Final = 64_000_000
"""Bytes of the open file after which it is finished, by default: large enough for a scan, small enough to copy."""

OPEN_FILES_MAX: Final = 100
"""Open files of one processor, by default. The row names each of them, and a step syncs those that it appends to."""

_VERSION: Final = 2
"""Of rows. In a row of version 1 there is one open file, which has its layout in it."""
_DURABLE_MAX: Final = 10_000
"""Directories that a sink remembers as durable, about 2 MB. When there are more, each is synced once again."""
AGAIN_S: Final = 5.0
"""Seconds before a file is finished again that could not be finished by time, as on a full disk."""

_LOOK_S: Final = 0.005
_FOLDER: Final = "_cues"


def write(messages: Any, process: cues.Process) -> None:
    """Write the messages of a step to the files of ``checkpoint=``: the function of :meth:`FileSink.sink`."""
    process.connection.write(messages)


@takes(SINK)
class FileSink:
    """A directory of files as the target of sinks (``checkpoint=``); see the module.

    ``path``         a directory, or a URL of an object store (through fsspec)
    ``format``       ``"text"`` (messages ``{"line": text}``), ``"jsonl"``, ``"csv"``, ``"parquet"`` or ``"arrow"``
    ``roll_bytes``   finish the open file when it has so many bytes (of its open form); 0: after each step
    ``roll_s``       finish it so many seconds after its first row; None: never by time
    ``durability``   ``"disk"``: a commit survives a power cut; ``"process"``: it survives ``kill -9``; no sync
    ``compression``  of finished files of lines: ``"gzip"``, ``"bz2"``, ``"xz"``, ``"zstd"``
    ``columns``      of CSV; None: those of the rows. A row with new ones begins a new file, with all columns so far
    ``schema``       of a table, a ``pyarrow.Schema``; None: inferred and widened (:mod:`cues.processors.columns`). A
                     row that does not fit fails its message
    ``partition_by`` names of columns, whose values are directories (``day=2026-01-31/city=Zug``) and are left out of
                     the files; or a function of a row (a dict) that returns such values by name, which are not columns
                     of the row (:mod:`cues.processors.hive`)
    ``open_files_max``   directories with an open file, of one processor and partition
    ``at_end``       when all sources of the graph have ended: ``"finish"`` the open file, or ``"keep"`` it open for the
                     next run
    ``timeout_s``    seconds to wait for another transaction of the same processor

    In an object store each step is one object, and ``roll_bytes``, ``roll_s`` and ``durability`` have no effect.

    A row that the format cannot hold fails its message (ValueError, TypeError). A failure of the disk or the store is
    :class:`cues.errors.CheckpointError`, which stops the sink at this message; a later start continues there.

    Kind: sink
    Needs: nothing for text, JSON lines and CSV; extra `files` for Parquet, Arrow, zstd and URLs
    Guarantee: exactly once: each message is in the finished files once, and no finished file changes
    Mechanism: row of delivery beside the files, committed by a rename (in an object store: by the put of the object)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        format: str = "jsonl",
        *,
        roll_bytes: int = ROLL_BYTES,
        roll_s: float | None = None,
        durability: Literal["disk", "process"] = "disk",
        compression: str | None = None,
        columns: Sequence[str] | None = None,
        schema: Any = None,
        delimiter: str = ",",
        partition_by: str | Sequence[str] | Callable[[Row], Row] | None = None,
        open_files_max: int = OPEN_FILES_MAX,
        at_end: str = "finish",
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        given = path_of("path", path)
        self.path = given.rstrip("/") if places.is_remote(given) else os.path.abspath(places.local_path(given))
        self.format = format
        self._encoding = formats.make(format, compression, columns, schema, delimiter)
        if durability not in ("disk", "process"):
            raise InvalidArgument(f"durability={durability!r} is unknown.", "use 'disk' or 'process'.")
        check_number("roll_bytes", roll_bytes, 0, whole=True)
        check_number("roll_s", 0 if roll_s is None else roll_s, 0)
        check_number("timeout_s", timeout_s, 0)
        check_number("open_files_max", open_files_max, 1, whole=True)
        self._by = hive.By(partition_by)
        self._by.check("columns", None if columns is None else texts_of("columns", columns))
        self._by.check("schema", None if schema is None else schema.names)
        if at_end not in ("finish", "keep"):
            raise InvalidArgument(f"at_end={at_end!r} is unknown.", "use 'finish' or 'keep'.")
        self.roll_bytes, self.roll_s, self.durability, self.timeout_s = roll_bytes, roll_s, durability, timeout_s
        self.at_end, self.open_files_max = at_end, open_files_max
        self._again = functools.partial(
            FileSink, self.path, format, roll_bytes=roll_bytes, roll_s=roll_s, durability=durability,
            compression=compression, columns=columns, schema=schema, delimiter=delimiter,
            partition_by=partition_by, open_files_max=open_files_max, at_end=at_end, timeout_s=timeout_s,
        )  # fmt: skip
        self._durable: set[Path] = set()
        """Directories whose names this process has synced."""
        self._timers: dict[str, threading.Timer] = {}
        self._rolling = threading.Lock()

    @override
    def __reduce__(self) -> Any:
        """Pickle the path and the options; another process opens the files itself."""
        return self._again, ()

    @property
    def where(self) -> str:
        """The directory, for error messages."""
        return self.path

    def sink(self, inputs: Any, **options: Any) -> cues.Sink:
        """Return a sink that writes the messages of ``inputs`` as they are; ``options`` are those of ``cues.Sink``."""
        return cues.Sink(write, inputs, **{"batch": True, "checkpoint": self, "id": "save", **options})

    def transaction(self, process: cues.Process) -> AbstractContextManager[Transaction]:
        """Run the block in a transaction with exactly the messages that are new to the files.

        ``connection.write(rows)`` takes one row or a list of rows. Raises :class:`cues.Fenced` or
        :class:`cues.errors.Diverged` before the block runs (see :func:`cues.checkpoints.admit`), and
        :class:`cues.errors.CheckpointError` when the files cannot be written.
        """
        remote = places.is_remote(self.path)
        table: Any = _Objects(self, process) if remote else _Directory(self, process.id)
        return cast("AbstractContextManager[Transaction]", write_once(table, process, Transaction))

    def finish(self) -> list[str]:
        """Finish the open files of all processors, also of a graph that runs; return all finished files."""
        if not places.is_remote(self.path):
            for row in sorted(Path(self.path, _FOLDER).glob("*/*.json")):
                _Directory(self, f"{row.parent.name}/{row.stem}").roll(lambda open: True)
        return self.finished()

    def __cues_finish__(self, processors: Iterable[str], kept: bool) -> list[str]:
        """Finish the open files of these units, because all sources have ended; return where they are."""
        if (self.at_end == "keep" and not kept) or places.is_remote(self.path):
            return []
        texts = []
        for processor in processors:
            texts += [f"finished {path}" for path in _Directory(self, processor).roll(lambda open: True)]
        return texts

    def finished(self) -> list[str]:
        """Return the paths of the finished files, sorted by directory, processor, partition and number."""
        within = "" if self._by.is_one else "**/"
        return places.place_of(self.path).list(f"{glob.escape(self.path)}/{within}*{self._encoding.ending}")

    def holds(self, processors: Iterable[str]) -> list[str]:
        """Return those of the processors that have a row here: they are refused from another store."""
        if places.is_remote(self.path):
            system = places.filesystem(self.path)
            system.invalidate_cache()
            return [p for p in processors if system.exists(f"{self.path}/{_FOLDER}/{p.partition('/')[0]}")]
        return [p for p in processors if os.path.isdir(os.path.join(self.path, _FOLDER, p.partition("/")[0]))]

    def close(self) -> None:
        """Stop the timers of ``roll_s``, and await one that is at work: no file changes after the end of a run.

        Nothing else is open between two transactions.
        """
        with self._rolling:
            while self._timers:  # a transaction may begin one meanwhile
                self._timers.popitem()[1].cancel()

    def __cues_continue__(self, unit: str) -> None:
        """Finish what an earlier process left open and is overdue, and await the rest: messages may not come for long.

        A failure is not raised: the next message meets it too, and its step waits or stops.
        """
        if self.roll_s is not None and not places.is_remote(self.path) and self.holds([unit]):
            self._roll_later(unit, 0.0)

    def _roll_later(self, processor: str, since: float) -> None:
        """Finish the open file of a processor when its time is over, whether or not messages come."""
        if self.roll_s is not None and processor not in self._timers:
            self._roll_in(processor, min(self.roll_s, since + self.roll_s - time.time()))  # the clock may be set back

    def _roll_in(self, processor: str, wait_s: float) -> None:
        own = weakref.ref(self)

        def roll() -> None:
            if (sink := own()) is None:
                return
            with sink._rolling:
                if sink._timers.get(processor) is not timer:
                    return  # the sink was closed
                del sink._timers[processor]
                try:
                    _Directory(sink, processor).roll(sink._is_due)
                except cues.CuesError:  # a full disk; the next transaction reports it, if there is one
                    sink._roll_in(processor, AGAIN_S)

        timer = threading.Timer(max(0.0, wait_s), roll)
        timer.daemon = True
        self._timers[processor] = timer
        timer.start()

    def _is_due(self, open_file: dict[str, Any]) -> bool:
        """Return whether the open file is to be finished now."""
        age_s = time.time() - open_file["since"]  # negative after the clock was set back
        old = self.roll_s is not None and not 0 <= age_s < self.roll_s
        return old or int(open_file["length"]) >= self.roll_bytes

    @override
    def __repr__(self) -> str:
        return f"<cues.processors.FileSink {self.path}>"


takes({**SINK, "checkpoint": FileSink})(write)
write.takes_columns = True  # type: ignore[attr-defined]  # its messages are given as they lie on the queue


class Transaction(TargetTransaction["Writer"]):
    """One open transaction of :meth:`FileSink.transaction`. Use it inside the block only."""


class Writer:
    """The rows of one transaction: ``process.connection`` in a sink with ``checkpoint=FileSink(…)``."""

    def __init__(self, encoding: formats.Format, by: hive.By, state: dict[str, Any]) -> None:
        self._encoding, self._by = encoding, by
        self._state = state
        self._row: Row | None = None
        """The row after this transaction."""
        self._layout = state["layout"]
        """That of the last rows, with which another file begins."""
        self._layouts: dict[str, Any] = {at: each["layout"] for at, each in state["open"].items()}
        """By directory, that of its open file."""
        self._parts: dict[str, list[formats.Added]] = {}
        """By directory, what is appended."""

    def write(self, rows: Any) -> None:
        """Write one row, a list of rows, which are dicts, or a table of Arrow or polars. They are encoded at once.

        Raises ValueError or TypeError if a row does not fit the format; then nothing of the call is written.
        """
        layouts, layout, parts = dict(self._layouts), self._layout, []
        for some in _runs(rows):
            for at, own in self._by.split(some):
                add = self._encoding.add if isinstance(own, list) else self._encoding.add_table
                added = add(at in layouts, layouts.get(at, layout), own)
                layouts[at] = layout = added.layout
                parts.append((at, added))
        for at, added in parts:
            known = self._parts.setdefault(at, [])
            if known and not added.new:  # one write to a file
                added = formats.Added(known[-1].new, added.layout, known.pop().data + added.data)
            known.append(added)
        self._layouts, self._layout = layouts, layout


def _runs(rows: Any) -> Iterator[Any]:
    """Yield lists of dicts, and tables of Arrow, none of which is empty."""
    if hasattr(rows, "runs"):  # the messages of a step, of which some lie in columns
        found = rows.runs()
    elif hasattr(rows, "__arrow_c_stream__"):
        pa = places.arrow()
        found = [pa.table(rows)]
    else:
        found = [[rows] if isinstance(rows, dict) else list(rows)]
    yield from (some for some in found if len(some))


class _OfFunction(Exception):
    """Carries an OSError of the user's function past the handler of ours."""

    def __init__(self, error: OSError) -> None:
        self.error = error


class _Directory:
    """The row and the files of one processor and partition in a directory: a ``PositionTable`` of one row."""

    def __init__(self, sink: FileSink, processor: str) -> None:
        self.where = sink.path
        self._sink, self._encoding, self._processor = sink, sink._encoding, processor
        self._name, _, partition = processor.partition("/")
        self._partition = partition or "0"
        self._folder = Path(sink.path, _FOLDER, self._name)

    @contextmanager
    def begin(self) -> Iterator[Writer]:
        # 1. Lock.
        with self._failures(), self._locked():
            state = self._read()
            # 2. Settle.
            self._settle(state)
            writer = Writer(self._encoding, self._sink._by, state)
            # 3. Run.
            try:
                yield writer
            except OSError as error:
                raise _OfFunction(error) from error
            self._commit(writer, state)
        self._roll_later(state)

    @contextmanager
    def _failures(self) -> Iterator[None]:
        """Raise failures of the files as CheckpointError, and those of the user's function as they are."""
        try:
            yield
        except _OfFunction as failure:
            raise failure.error from None
        except OSError as error:
            raise CheckpointError(
                f"The files of {self._processor} in {self.where} cannot be written: {error}",
                "start the graph again when they can be written; what was not committed is cut off then.",
                where=self.where,
            ) from error

    def read(self, writer: Writer, processor: str, *, lock: bool) -> Row | None:
        if writer._row is not None:
            return writer._row
        kept = writer._state["row"]
        what, otherwise = f"The row of {processor} in {self.where}", "use another directory."
        return None if kept is None else Row.kept(kept, what, otherwise)

    def write(self, writer: Writer, processor: str, row: Row, *, insert: bool) -> bool:
        writer._row = row
        return True

    def is_open(self, writer: Writer) -> bool:
        return True

    def processors(self, writer: Writer) -> Iterable[str]:
        return [self._processor]

    def roll(self, is_due: Callable[[dict[str, Any]], bool]) -> list[str]:
        """Finish the open files that are due; return their paths. No position moves, so anyone may call it any time."""
        finished: list[str] = []
        with self._failures(), self._locked():
            state = self._read()
            self._settle(state)
            if self._end_all(state, is_due):
                self._replace(state)
                finished = [str(self._finished_path(each)) for each in state["finishing"]]
                self._settle(state)
        self._roll_later(state)
        return finished

    def _finished_path(self, finished: dict[str, Any]) -> Path:
        name = f"{self._name}-{self._partition}-{finished['number']:08}{self._encoding.ending}"
        return Path(self.where, finished["at"], name)

    def _commit(self, writer: Writer, state: dict[str, Any]) -> None:
        assert writer._row is not None
        columns = writer._row.columns()
        if columns == state["row"] and not writer._parts:
            return
        # 4. Append.
        begun = state["next"]
        for at, parts in writer._parts.items():
            for new, layout, data in parts:
                if new:
                    self._end(state, at)
                    self._begin(state, at)
                open_file = state["open"][at] = state["open"].pop(at)  # the last one of all
                self._append(open_file, data)
                open_file["layout"] = layout
        state["layout"] = writer._layout
        self._end_all(state, self._sink._is_due)
        for at in [*state["open"]][: -self._sink.open_files_max]:  # not earlier: rows of this step may be for them
            self._end(state, at)
        if state["next"] > begun:
            self._sync(self._folder)
        faults.point("files.appended")
        # 5. Commit.
        state["row"] = columns
        self._replace(state)
        faults.point("files.committed")
        # 6. Finish.
        self._settle(state)

    def _begin(self, state: dict[str, Any], at: str) -> None:
        state["open"][at] = {"at": at, "number": state["next"], "length": 0, "since": time.time()}
        state["next"] += 1

    def _end(self, state: dict[str, Any], at: str) -> None:
        if at in state["open"]:
            state["finishing"].append(state["open"].pop(at))

    def _end_all(self, state: dict[str, Any], is_due: Callable[[dict[str, Any]], bool]) -> bool:
        """End the open files that are due; return whether there is one."""
        due = [at for at, open_file in state["open"].items() if is_due(open_file)]
        for at in due:
            self._end(state, at)
        return bool(due)

    def _append(self, open_file: dict[str, Any], data: bytes) -> None:
        # A file of this number may be there: its transaction did not commit.
        with open(self._open_path(open_file), "r+b" if open_file["length"] else "wb") as file:
            file.seek(open_file["length"])
            file.write(data)
            file.flush()
            if self._sink.durability == "disk":
                os.fsync(file.fileno())
        open_file["length"] += len(data)

    def _settle(self, state: dict[str, Any]) -> None:
        """Bring the files to what the row says."""
        for open_file in state["open"].values():
            self._cut(open_file)
        for finished in state["finishing"]:
            self._finish(finished)
        state["finishing"] = []  # the next row does not name them any more

    def _cut(self, open_file: dict[str, Any]) -> None:
        path, length = f"{self._folder}/{self._open_name(open_file)}", open_file["length"]
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            size = 0
        if size < length:
            raise Diverged(
                f"{path} has {size:,} bytes, but {length:,} were committed: rows of {self._processor} are lost.",
                f"restore the directory {self.where}; or use a new one, and a new store.",
                processor=self._processor,
            )
        if size > length:
            os.truncate(path, length)

    def _finish(self, finished: dict[str, Any]) -> None:
        source = self._open_path(finished)
        target, done = self._finished_path(finished), source.with_suffix(".done")
        if not done.exists():
            if not source.exists():
                return  # it was finished before, and its reader may have moved it
            self._cut(finished)
            if self._encoding.is_plain:
                # Nothing is appended any more that would sync a cut, by this process or by one that died after it.
                self._sync(source)
                os.replace(source, done)
            else:
                following = source.with_suffix(".next")
                with open(source, "rb") as read, open(following, "wb") as written:
                    self._encoding.finish(read, written, finished["layout"])
                    written.flush()
                    if self._sink.durability == "disk":
                        os.fsync(written.fileno())
                faults.point("files.converted")
                os.replace(following, done)
        faults.point("files.finishing")
        # Each name is durable before the next one goes. A power cut could keep a later change alone: the rows would be
        # in no file, or the source back beside its finished file.
        self._sync(self._folder)
        if source.exists():
            source.unlink()
            self._sync(self._folder)
        if target.exists():
            raise CheckpointError(
                f"{target} exists already, and {self._processor} did not write it.",
                "move it away; files of another store belong into another directory.",
                where=self.where,
            )
        self._make_directory(target.parent)
        # By one rename, which takes it from here: it appears once, whatever its readers do with it.
        os.rename(done, target)
        self._sync(target.parent)
        self._sync(self._folder)
        faults.point("files.finished")

    def _make_directory(self, path: Path) -> None:
        """Make a directory that survives a power cut, with those in which it is.

        A directory that is there already is synced too, once by each process, because the process that made it may have
        died before it synced the name.
        """
        durable = self._sink._durable
        if path in durable and path.is_dir():
            return
        if path == Path(self.where):
            path.mkdir(parents=True, exist_ok=True)
            if self._sink.durability == "disk":
                sync_names(path)
        else:
            self._make_directory(path.parent)
            path.mkdir(exist_ok=True)
            self._sync(path.parent)
        if len(durable) >= _DURABLE_MAX:
            durable.clear()
        durable.add(path)

    def _open_path(self, open_file: dict[str, Any]) -> Path:
        return self._folder / self._open_name(open_file)

    def _open_name(self, open_file: dict[str, Any]) -> str:
        return f"{self._partition}-{open_file['number']:08}.open"

    def _read(self) -> dict[str, Any]:
        path = self._folder / f"{self._partition}.json"
        try:
            state = json.loads(path.read_text())
        except FileNotFoundError:
            state = None
        except ValueError:
            state = {}
        return _read_state(state, str(path), self._sink)

    def _replace(self, state: dict[str, Any]) -> None:
        path = self._folder / f"{self._partition}.json"
        following = path.with_suffix(".json.next")
        with open(following, "w") as file:
            file.write(json.dumps(_packed(state)))
            file.flush()
            if self._sink.durability == "disk":
                os.fsync(file.fileno())
        os.replace(following, path)
        self._sync(self._folder)

    def _sync(self, path: Path) -> None:
        """Sync a directory or a file."""
        if self._sink.durability == "disk":
            sync_directory(path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self._make_directory(self._folder)
        with open(self._folder / f"{self._partition}.lock", "a") as file:
            deadline = time.monotonic() + self._sink.timeout_s
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() >= deadline:
                        raise CheckpointError(
                            f"The files of {self._processor} in {self.where} have been locked by another process for"
                            f" more than {self._sink.timeout_s:g} s.",
                            "end that process (kill -9 is safe), or wait.",
                            where=self.where,
                        ) from None
                    time.sleep(_LOOK_S)
            yield

    def _roll_later(self, state: dict[str, Any]) -> None:
        if state["open"]:
            self._sink._roll_later(self._processor, min(each["since"] for each in state["open"].values()))


class _Objects:
    """The rows and the objects of one processor and partition in an object store: a ``PositionTable`` of one row."""

    def __init__(self, sink: FileSink, process: cues.Process) -> None:
        self.where = sink.path
        self._sink, self._encoding, self._processor = sink, sink._encoding, process.id
        self._delivery = process.delivery
        self._name, _, partition = process.id.partition("/")
        self._partition = partition or "0"
        self._system = places.filesystem(sink.path)
        self._folder = f"{sink.path}/{_FOLDER}/{self._name}/{self._partition}"

    @contextmanager
    def begin(self) -> Iterator[Writer]:
        try:
            state = self._read()
        except OSError as error:
            raise self._failure(error) from error
        writer = Writer(self._encoding, self._sink._by, state)
        yield writer
        try:
            self._commit(writer, state)
        except OSError as error:
            raise self._failure(error) from error

    read, write, is_open, processors = _Directory.read, _Directory.write, _Directory.is_open, _Directory.processors

    def _commit(self, writer: Writer, state: dict[str, Any]) -> None:
        assert writer._row is not None
        columns = writer._row.columns()
        if columns == state["row"] and not writer._parts:
            return
        objects = self._built(writer)
        state["layout"] = writer._layout
        if objects:
            number, hash = state["next"], self._delivery.hash[:16]
            names = [
                f"{at and at + '/'}{self._name}-{self._partition}-{number + n:08}-{hash}{self._encoding.ending}"
                for n, (at, _) in enumerate(objects)
            ]
            # The last object is the commit, so it is put last.
            intent = {"names": names, "row": columns, "next": number + len(names)}
            self._put_row({**state, "intent": intent})
            faults.point("files.appended")
            for name, (_, data) in zip(names, objects, strict=True):
                if not self._system.exists(f"{self.where}/{name}"):
                    self._system.pipe_file(f"{self.where}/{name}", data)
            faults.point("files.committed")
            state["next"] = number + len(names)
        self._put_row({**state, "row": columns, "intent": None})
        faults.point("files.finished")

    def _built(self, writer: Writer) -> list[tuple[str, bytes]]:
        """The objects of a transaction in their finished form, with their directories.

        A directory has one, or more if its rows do not fit one layout.
        """
        built = []
        for at, parts in writer._parts.items():
            for _, layout, data in parts:
                out = io.BytesIO()
                self._encoding.finish(cast(IO[bytes], io.BytesIO(data)), out, layout)
                built.append((at, out.getvalue()))
        return built

    def _read(self) -> dict[str, Any]:
        """The state of the newest owner, with its intent carried out if its object is there."""
        self._system.invalidate_cache()
        try:
            rows = sorted(name for name in self._system.ls(self._folder, detail=False) if name.endswith(".json"))
        except FileNotFoundError:
            rows = []
        if not rows:
            return _read_state(None, self._folder, self._sink)
        newest = rows[-1]
        found = json.loads(self._system.cat_file(newest))
        state = _read_state(found, newest, self._sink)
        intent = found.get("intent")
        if intent and self._system.exists(f"{self.where}/{intent['names'][-1]}"):
            state.update(row=intent["row"], next=intent["next"])
        for older in rows[:-2]:  # the last two stay: the owner before this one may still put its row
            with contextlib.suppress(OSError):
                self._system.rm_file(older)
        return state

    def _put_row(self, state: dict[str, Any]) -> None:
        own = f"{self._delivery.generation:08}-{self._delivery.epoch:016}.json"
        self._system.pipe_file(f"{self._folder}/{own}", json.dumps(_packed(state)).encode())

    def _failure(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"The objects of {self._processor} in {self.where} cannot be read or written: {error}",
            "start the graph again when the object store can be reached.",
            where=self.where,
        )


def _read_state(kept: dict[str, Any] | None, where: str, sink: FileSink) -> dict[str, Any]:
    """Return what a row says, None for a new one; refuse one that this sink cannot continue.

    ``open`` has the open file of each directory, by the time of the last write.
    """
    ending, by = sink._encoding.ending, sink._by.shown
    state = {"cues": _VERSION, "format": sink.format, "ending": ending, "by": by, "row": None, "next": 1}
    state |= {"layout": None, "open": {}, "finishing": []}
    if kept is None:
        return state
    if kept.get("cues") not in (1, _VERSION):
        raise CheckpointError(
            f"{where} is not a row of file sinks of version {_VERSION}.",
            version_hint(kept.get("cues"), _VERSION, "use another directory, or the version of Cues that wrote it."),
            where=where,
        )
    if kept["cues"] == 1:
        files = [kept["open"]] if kept["open"] else []
        opened = [{"at": "", **each} for each in files]
        finishing = [{"at": "", **each} for each in kept["finishing"]]
        layout, known_by = (kept["open"] or kept)["layout"] if files or "layout" in kept else None, []
    else:
        layouts = kept["layouts"]
        opened, finishing = (
            [{**each, "layout": layouts[each["layout"]]} for each in kept[name]] for name in ("open", "finishing")
        )
        layout, known_by = layouts[kept["layout"]], kept["by"]
    if (opened or finishing) and (kept["format"], kept["ending"]) != (sink.format, ending):
        raise CheckpointError(
            f"{where} names an open file of the format {kept['format']!r} ({kept['ending']}), not {sink.format!r}"
            f" ({ending}).",
            f"call FileSink(…, {kept['format']!r}).finish() with the options from before, once.",
            where=where,
        )
    state |= {"row": kept["row"], "next": kept["next"], "finishing": finishing}
    state["open"] = {each["at"]: each for each in opened}
    if kept["format"] == sink.format and known_by == by:  # others have other columns in the files
        state["layout"] = layout
    return state


def _packed(state: dict[str, Any]) -> dict[str, Any]:
    """A row as it is kept: a layout is there once, because most files have the same."""
    layouts: list[Any] = []

    def number(layout: Any) -> int:
        if layout not in layouts:
            layouts.append(layout)
        return layouts.index(layout)

    packed = {**state, "layout": number(state["layout"])}
    for name, files in (("open", state["open"].values()), ("finishing", state["finishing"])):
        packed[name] = [{**each, "layout": number(each["layout"])} for each in files]
    return {**packed, "layouts": layouts}
