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

    1. lock     the row's lock, and read the row
    2. settle   finish the files that the row names as finished; cut the open file to its committed length
    3. run      the user's function; its rows are encoded as it writes them
    4. append   to the open file, and sync it
    5. commit   replace the row, by a rename, and sync it: positions, the new length, files that are finished
    6. finish   rename a finished file to its name (after it was compressed, or made a table)

Before 5 nothing has changed, since 2 cuts the file. After 5 everything is decided, since 2 of the next transaction
repeats 6. A file is visible only after all of its rows are committed, so what a reader sees is never taken back; its
name is a number that the row counts, so it is the same however often 6 is repeated.

**In an object store** nothing can be cut, so each step is an object, finished by its put. The row names the object
before it is written (*intent*), and the object is the commit: if it is there, the row is what the intent says. Each
owner writes a row of its own epoch, so an owner that was replaced changes no row of its successor. It can only put the
same object again: a start takes exactly the range of the delivery that was under way, whose hash is in the name.

Not guaranteed: a file is finished by time only while the process runs, and at the next message after a restart; call
:meth:`FileSink.finish` after the last run of a job. ``durability="process"`` does not survive a power cut. The
directory is on a filesystem with renames and locks (not on some network filesystems). Rows of files that are removed
from ``_cues`` by hand are lost. In an object store, a purge by hand of messages whose step is under way may write some
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
from cues.arguments import check_number, path_of
from cues.checkpoints import Row, write_once
from cues.checkpoints import Transaction as TargetTransaction
from cues.errors import CheckpointError, Diverged, InvalidArgument
from cues.overrides import override
from cues.processors import SINK, formats, places, takes

TIMEOUT_S: Final = 30.0
"""Seconds for which a transaction waits for another one of the same processor before it fails."""

ROLL_BYTES: Final = 64_000_000
"""Bytes of the open file after which it is finished, by default: large enough for a scan, small enough to copy."""

_VERSION: Final = 1
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
        if at_end not in ("finish", "keep"):
            raise InvalidArgument(f"at_end={at_end!r} is unknown.", "use 'finish' or 'keep'.")
        self.roll_bytes, self.roll_s, self.durability, self.timeout_s = roll_bytes, roll_s, durability, timeout_s
        self.at_end = at_end
        self._again = functools.partial(
            FileSink, self.path, format, roll_bytes=roll_bytes, roll_s=roll_s, durability=durability,
            compression=compression, columns=columns, schema=schema, delimiter=delimiter, at_end=at_end,
            timeout_s=timeout_s,
        )  # fmt: skip
        self._timers: dict[str, threading.Timer] = {}

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
        """Return the paths of the finished files, sorted by processor, partition and number."""
        return places.place_of(self.path).list(f"{glob.escape(self.path)}/*{self._encoding.ending}")

    def holds(self, processors: Iterable[str]) -> list[str]:
        """Return those of the processors that have a row here: they are refused from another store."""
        if places.is_remote(self.path):
            system = places.filesystem(self.path)
            system.invalidate_cache()
            return [p for p in processors if system.exists(f"{self.path}/{_FOLDER}/{p.partition('/')[0]}")]
        return [p for p in processors if os.path.isdir(os.path.join(self.path, _FOLDER, p.partition("/")[0]))]

    def close(self) -> None:
        """Stop the timers of ``roll_s``. Nothing else is open between two transactions."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()

    def _roll_later(self, processor: str, since: float) -> None:
        """Finish the open file of a processor when its time is over, whether or not messages come."""
        if self.roll_s is None or processor in self._timers:
            return
        own = weakref.ref(self)

        def roll() -> None:
            if (sink := own()) is None:
                return
            sink._timers.pop(processor, None)
            with contextlib.suppress(cues.CuesError):  # the next transaction reports it
                _Directory(sink, processor).roll(sink._is_due)

        timer = threading.Timer(max(0.0, since + self.roll_s - time.time()), roll)
        timer.daemon = True
        self._timers[processor] = timer
        timer.start()

    def _is_due(self, open_file: dict[str, Any]) -> bool:
        """Whether the open file is to be finished now."""
        old = self.roll_s is not None and time.time() - open_file["since"] >= self.roll_s
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

    def __init__(self, encoding: formats.Format, state: dict[str, Any]) -> None:
        self._encoding = encoding
        self._state = state
        self._row: Row | None = None
        """The row after this transaction."""
        self._layout = state["open"]["layout"] if state["open"] else state.get("layout")
        self._parts: list[formats.Added] = []
        """What is appended."""

    def write(self, rows: Any) -> None:
        """Write one row, a list of rows, which are dicts, or a table of Arrow or polars. They are encoded at once.

        Raises ValueError or TypeError if a row does not fit the format; then nothing of the call is written.
        """
        begun = bool(self._parts) or self._state["open"] is not None
        layout, parts = self._layout, []
        for some in _runs(rows):
            if isinstance(some, list):
                added = self._encoding.add(begun, layout, some)
            else:
                added = self._encoding.add_table(begun, layout, some)
            begun, layout = True, added.layout
            parts.append(added)
        self._parts += parts
        self._layout = layout


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
            writer = Writer(self._encoding, state)
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
        return None if kept is None else Row.of(**kept)

    def write(self, writer: Writer, processor: str, row: Row, *, insert: bool) -> bool:
        writer._row = row
        return True

    def is_open(self, writer: Writer) -> bool:
        return True

    def processors(self, writer: Writer) -> Iterable[str]:
        return [self._processor]

    def roll(self, is_due: Callable[[dict[str, Any]], bool]) -> list[str]:
        """Finish the open file if it is due; return its path. No position moves, so anyone may call it at any time."""
        finished: list[str] = []
        with self._failures(), self._locked():
            state = self._read()
            self._settle(state)
            if state["open"] is not None and is_due(state["open"]):
                self._end(state)
                self._replace(state)
                finished = [str(self._finished_path(each)) for each in state["finishing"]]
                self._settle(state)
        self._roll_later(state)
        return finished

    def _finished_path(self, finished: dict[str, Any]) -> Path:
        name = f"{self._name}-{self._partition}-{finished['number']:08}{self._encoding.ending}"
        return Path(self.where, name)

    def _commit(self, writer: Writer, state: dict[str, Any]) -> None:
        assert writer._row is not None
        columns = writer._row.columns()
        if columns == state["row"] and not writer._parts:
            return
        # 4. Append.
        for new, layout, data in writer._parts:
            if new:
                self._end(state)
                self._begin(state, layout)
            self._append(state["open"], data)
            state["open"]["layout"] = state["layout"] = layout
        if state["open"] is not None and self._sink._is_due(state["open"]):
            self._end(state)
        faults.point("files.appended")
        # 5. Commit.
        state["row"] = columns
        self._replace(state)
        faults.point("files.committed")
        # 6. Finish.
        self._settle(state)

    def _begin(self, state: dict[str, Any], layout: Any) -> None:
        state["open"] = {"number": state["next"], "length": 0, "since": time.time(), "layout": layout}
        state["next"] += 1

    def _end(self, state: dict[str, Any]) -> None:
        if state["open"] is not None:
            state["finishing"].append(state["open"])
            state["open"] = None

    def _append(self, open_file: dict[str, Any], data: bytes) -> None:
        # A file of this number may be there: its transaction did not commit.
        with open(self._open_path(open_file), "r+b" if open_file["length"] else "wb") as file:
            file.seek(open_file["length"])
            file.write(data)
            file.flush()
            if self._sink.durability == "disk":
                os.fsync(file.fileno())
        if not open_file["length"]:
            self._sync(self._folder)
        open_file["length"] += len(data)

    def _settle(self, state: dict[str, Any]) -> None:
        """Bring the files to what the row says."""
        if state["open"] is not None:
            self._cut(state["open"])
        for finished in state["finishing"]:
            self._finish(finished)
        state["finishing"] = []  # the next row does not name them any more

    def _cut(self, open_file: dict[str, Any]) -> None:
        path, length = self._open_path(open_file), open_file["length"]
        size = path.stat().st_size if path.exists() else 0
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
        source.unlink(missing_ok=True)
        if target.exists():
            raise CheckpointError(
                f"{target} exists already, and {self._processor} did not write it.",
                "move it away; files of another store belong into another directory.",
                where=self.where,
            )
        # By one rename, which takes it from here: it appears once, whatever its readers do with it.
        os.rename(done, target)
        self._sync(Path(self.where))
        self._sync(self._folder)
        faults.point("files.finished")

    def _open_path(self, open_file: dict[str, Any]) -> Path:
        return self._folder / f"{self._partition}-{open_file['number']:08}.open"

    def _read(self) -> dict[str, Any]:
        path = self._folder / f"{self._partition}.json"
        try:
            state = json.loads(path.read_text())
        except FileNotFoundError:
            return _new_state(self._sink.format)
        except ValueError:
            state = {}
        return _checked(state, str(path), self._sink.format, self._encoding)

    def _replace(self, state: dict[str, Any]) -> None:
        path = self._folder / f"{self._partition}.json"
        state["ending"] = self._encoding.ending
        following = path.with_suffix(".json.next")
        with open(following, "w") as file:
            file.write(json.dumps(state))
            file.flush()
            if self._sink.durability == "disk":
                os.fsync(file.fileno())
        os.replace(following, path)
        self._sync(self._folder)

    def _sync(self, folder: Path) -> None:
        if self._sink.durability == "disk":
            descriptor = os.open(folder, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if not self._folder.is_dir():
            self._folder.mkdir(parents=True, exist_ok=True)
            for folder in (self._folder.parent, self._folder.parent.parent):
                self._sync(folder)
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
        if state["open"] is not None:
            self._sink._roll_later(self._processor, state["open"]["since"])


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
        writer = Writer(self._encoding, state)
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
                f"{self._name}-{self._partition}-{number + n:08}-{hash}{self._encoding.ending}"
                for n in range(len(objects))
            ]
            # The last object is the commit, so it is put last.
            intent = {"names": names, "row": columns, "next": number + len(names)}
            self._put_row({**state, "intent": intent})
            faults.point("files.appended")
            for name, data in zip(names, objects, strict=True):
                if not self._system.exists(f"{self.where}/{name}"):
                    self._system.pipe_file(f"{self.where}/{name}", data)
            faults.point("files.committed")
            state["next"] = number + len(names)
        self._put_row({**state, "row": columns, "intent": None})
        faults.point("files.finished")

    def _built(self, writer: Writer) -> list[bytes]:
        """The objects of a transaction in their finished form: one, or more if rows do not fit one layout."""
        whole: list[tuple[bytes, Any]] = []
        for new, layout, data in writer._parts:
            before = b"" if new or not whole else whole.pop()[0]
            whole.append((before + data, layout))
        built = []
        for data, layout in whole:
            out = io.BytesIO()
            self._encoding.finish(cast(IO[bytes], io.BytesIO(data)), out, layout)
            built.append(out.getvalue())
        return built

    def _read(self) -> dict[str, Any]:
        """The state of the newest owner, with its intent carried out if its object is there."""
        self._system.invalidate_cache()
        try:
            rows = sorted(name for name in self._system.ls(self._folder, detail=False) if name.endswith(".json"))
        except FileNotFoundError:
            rows = []
        if not rows:
            return _new_state(self._sink.format)
        newest = rows[-1]
        state = _checked(json.loads(self._system.cat_file(newest)), newest, self._sink.format, self._encoding)
        intent = state.get("intent")
        if intent and self._system.exists(f"{self.where}/{intent['names'][-1]}"):
            state.update(row=intent["row"], next=intent["next"])
        state["intent"] = None
        for older in rows[:-2]:  # the last two stay: the owner before this one may still put its row
            with contextlib.suppress(OSError):
                self._system.rm_file(older)
        return state

    def _put_row(self, state: dict[str, Any]) -> None:
        own = f"{self._delivery.generation:08}-{self._delivery.epoch:016}.json"
        state = {**state, "ending": self._encoding.ending}
        self._system.pipe_file(f"{self._folder}/{own}", json.dumps(state).encode())

    def _failure(self, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"The objects of {self._processor} in {self.where} cannot be read or written: {error}",
            "start the graph again when the object store can be reached.",
            where=self.where,
        )


def _new_state(format: str) -> dict[str, Any]:
    return {"cues": _VERSION, "format": format, "row": None, "next": 1, "open": None, "finishing": []}


def _checked(state: dict[str, Any], where: str, format: str, encoding: formats.Format) -> dict[str, Any]:
    """Return the state, or refuse one that this sink cannot continue."""
    if state.get("cues") != _VERSION:
        raise CheckpointError(
            f"{where} is not a row of file sinks of version {_VERSION}.",
            "use another directory, or the version of Cues that wrote it.",
            where=where,
        )
    unsettled = state["open"] is not None or state["finishing"]
    if unsettled and (state["format"], state["ending"]) != (format, encoding.ending):
        raise CheckpointError(
            f"{where} names an open file of the format {state['format']!r} ({state['ending']}), not {format!r}"
            f" ({encoding.ending}).",
            f"call FileSink(…, {state['format']!r}).finish() with the options from before, once.",
            where=where,
        )
    state["format"] = format
    return state
