"""Directories of files, on this machine or in an object store: the common part of the file processors.

    place_of("logs/*.jsonl")      Local: the standard library
    place_of("s3://bucket/in")    Remote: fsspec (extra ``files``), for every scheme that fsspec knows

Names of files are paths, or URLs without their scheme. Files whose name begins with ``.`` or ``_``, or ends with
``.tmp``, are not listed: by convention they are not complete. A file that is named by its own path is read.
"""

from __future__ import annotations

import bz2
import functools
import glob
import gzip
import importlib.util
import io
import lzma
import os
import re
import stat
import traceback
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from typing import IO, Any, Final, NamedTuple, Protocol, cast

from cues.errors import NotInstalled
from cues.imported import package

COMPRESSIONS: Final = {"gzip": ".gz", "bz2": ".bz2", "xz": ".xz", "zstd": ".zst"}
"""The compressions, and the endings of their files."""


BUFFER_BYTES: Final = 1 << 20
"""Bytes of an object that are read at once: each read may be a request."""


MAGIC: Final = re.compile(r"[*?\[]")
"""The wildcards of a pattern."""
_TIMES: Final = ("LastModified", "last_modified", "updated", "mtime", "modified", "created")
"""Names of the time of the last write, in the entries of the filesystems of fsspec. Memory has only ``created``."""
_TAGS: Final = ("ETag", "e_tag", "etag")


class Stat(NamedTuple):
    """A file at one moment. ``device`` and ``inode`` are 0 in an object store."""

    device: int
    inode: int
    size: int
    modified: float
    """The time of the last write; 0 if the filesystem does not say it."""
    tag: str = ""
    """The ETag of an object, or its time in a store that has none: with its size it says whether it has changed."""


class Place(Protocol):
    """Files of one filesystem. A missing file raises FileNotFoundError."""

    remote: bool

    def list(self, pattern: str) -> list[str]:
        """Return the files that a path, a directory or a glob pattern names now, sorted by name. A path comes first."""

    def entries(self, pattern: str) -> dict[str, Stat]:
        """Return these files in the same order, each with what identifies it now."""

    def open(self, name: str) -> IO[bytes]:
        """Open a file to read its bytes, as they are stored."""

    def stat(self, name: str) -> Stat:
        """Return what identifies the file."""


class Local:
    """Files of this machine."""

    remote = False

    def list(self, pattern: str) -> list[str]:
        return [*self.entries(pattern)]

    def entries(self, pattern: str) -> dict[str, Stat]:
        if os.path.isfile(pattern):
            names = [pattern]  # a file that is named is read, whatever its name
        else:
            if os.path.isdir(pattern):
                pattern = os.path.join(glob.escape(pattern), "*")
            # not iglob's order, which is that of the directory
            names = sorted(filter(is_complete, glob.glob(pattern, recursive=True)))
        found: dict[str, Stat] = {}
        for name in names:
            with suppress(OSError):  # it is gone by now, or a link to nothing
                entry = os.stat(name)
                if stat.S_ISREG(entry.st_mode):
                    found[name] = _stat_of(entry)
        return found

    def open(self, name: str) -> IO[bytes]:
        return open(name, "rb")

    def stat(self, name: str) -> Stat:
        return _stat_of(os.stat(name))


class Remote:
    """Objects through fsspec. What is listed is read from the store each time, not from a cache."""

    remote = True

    def __init__(self, url: str) -> None:
        self.system: Any = filesystem(url)

    def name(self, url: str) -> str:
        """Return a URL as the names of its filesystem are."""
        return cast(str, self.system._strip_protocol(url))

    def path(self, pattern: str) -> str:
        """Return the path of a URL or a name. That of a directory is a pattern for what is in it."""
        self.system.invalidate_cache()
        path = self.name(pattern)
        return path.rstrip("/") + "/*" if not MAGIC.search(path) and self.system.isdir(path) else path

    def list(self, pattern: str) -> list[str]:
        return [*self.entries(pattern)]

    def entries(self, pattern: str) -> dict[str, Stat]:
        found = self.system.glob(self.path(pattern), detail=True)
        return {
            name: stat_of_object(entry)
            for name, entry in sorted(found.items())
            if entry["type"] == "file" and is_complete(name)
        }

    def open(self, name: str) -> IO[bytes]:
        # The files of most stores have a readline() without a limit, and some read a byte at a time in it.
        try:
            file = self.system.open(name, "rb")
        except Exception as error:
            _end_files_of(error)
            raise
        return cast(IO[bytes], io.BufferedReader(file, BUFFER_BYTES))

    def stat(self, name: str) -> Stat:
        self.system.invalidate_cache()
        entry = self.system.info(name)
        if entry["type"] != "file":
            raise FileNotFoundError(name)
        return stat_of_object(entry)

    def copy(self, name: str, target: str) -> bool:
        """Copy an object, and replace none; return whether the target is a copy of it now.

        A kill after the copy leaves both: a target with the same bytes that is not older is the copy.
        """
        try:
            found, own = self.stat(target), self.stat(name)
        except FileNotFoundError:
            self.system.cp_file(name, target)
            return True
        if found.size != own.size or found.modified < own.modified:
            return False
        with self.open(name) as one, self.open(target) as other:
            return all(one.read(BUFFER_BYTES) == other.read(BUFFER_BYTES) for _ in range(own.size // BUFFER_BYTES + 1))

    def delete(self, name: str) -> None:
        self.system.rm_file(name)


def _end_files_of(error: Exception) -> None:
    """Mark files as closed whose constructor failed: that of obstore has no reader then, and its ``__del__`` fails."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if isinstance(frame.f_locals.get("self"), io.IOBase):
            with suppress(AttributeError):  # only files of fsspec let it be set
                frame.f_locals["self"].closed = True


def place_of(path: str) -> Place:
    """Return the place of a path or URL. ``file://`` is a path of this machine."""
    return Remote(path) if is_remote(path) else Local()


def is_remote(path: str) -> bool:
    """Return whether the path is a URL of another filesystem."""
    return "://" in path and not path.startswith(("file://", "local://"))


def local_path(path: str) -> str:
    """Return a path without ``file://``."""
    return path.partition("://")[2] if "://" in path else path


def filesystem(url: str) -> Any:
    """Return the fsspec filesystem of a URL. Raises :class:`cues.errors.NotInstalled`."""
    fsspec = package(f"{url} needs fsspec", "files", "fsspec")
    scheme = url.partition("://")[0]
    try:
        return fsspec.filesystem(scheme)
    except (ImportError, ValueError) as error:
        raise NotInstalled(
            f"fsspec has no filesystem for {url}: {error}",
            "install the package that fsspec names for this scheme, such as s3fs or gcsfs; or register one.",
        ) from None


def arrow() -> Any:
    """Return the module pyarrow. Raises :class:`cues.errors.NotInstalled`."""
    return package("Parquet, Arrow and zstd files need pyarrow", "files", "pyarrow")


@functools.lru_cache
def has(package: str) -> bool:
    """Return whether a package is installed."""
    return importlib.util.find_spec(package) is not None


def compression_of(name: str) -> str | None:
    """Return the compression of a file by the ending of its name; ``zip`` too."""
    if name.endswith(".zip"):
        return "zip"
    return next((kind for kind, ending in COMPRESSIONS.items() if name.endswith(ending)), None)


def plain_name(name: str) -> str:
    """Return the name without the ending of its compression."""
    return name.rpartition(".")[0] if compression_of(name) else name


def open_plain(file: IO[bytes], name: str, stack: ExitStack) -> IO[bytes]:
    """Return the uncompressed bytes of an open file, by the ending of its name. ``stack`` closes what is opened."""
    kind = compression_of(name)
    if kind == "gzip":
        return cast(IO[bytes], stack.enter_context(gzip.GzipFile(fileobj=file)))
    if kind == "bz2":
        return cast(IO[bytes], stack.enter_context(bz2.BZ2File(file)))
    if kind == "xz":
        return cast(IO[bytes], stack.enter_context(lzma.LZMAFile(file)))
    if kind == "zstd":
        return cast(IO[bytes], stack.enter_context(_Seekable(file)))
    if kind == "zip":
        archive = stack.enter_context(zipfile.ZipFile(file))
        names = archive.namelist()
        if len(names) != 1:
            raise ValueError(f"{name}: an archive of {len(names)} files, expected one")
        return stack.enter_context(archive.open(names[0]))
    return file


@contextmanager
def compressing(file: IO[bytes], kind: str | None) -> Iterator[IO[bytes]]:
    """Write compressed bytes to an open file. Equal contents give equal bytes."""
    if kind is None:
        yield file
    elif kind == "zstd":
        with arrow().CompressedOutputStream(arrow().PythonFile(_Unclosed(file), mode="w"), "zstd") as out:
            yield out
    else:
        with ExitStack() as stack:
            opened: Any
            if kind == "gzip":
                opened = gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0)
            else:
                opened = bz2.BZ2File(file, "wb") if kind == "bz2" else lzma.LZMAFile(file, "wb")  # noqa: SIM115
            yield stack.enter_context(opened)


class _Unclosed:
    """A file that stays open when a stream of Arrow over it is closed."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self.read, self.write, self.seek, self.tell, self.flush = (
            file.read,
            file.write,
            file.seek,
            file.tell,
            file.flush,
        )

    def close(self) -> None:
        """Do nothing."""


class _Seekable:
    """The uncompressed bytes of a zstd file, as :func:`cues.processors.files.records` uses them."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._open()

    def _open(self) -> None:
        self._file.seek(0)
        stream = arrow().CompressedInputStream(arrow().PythonFile(_Unclosed(self._file), mode="r"), "zstd")
        self._stream, self._buffer, self._at = stream, b"", 0

    def readline(self, limit: int = -1) -> bytes:
        while (end := self._buffer.find(b"\n")) < 0 and (limit < 0 or len(self._buffer) < limit):
            piece = self._stream.read(1 << 16)
            if not piece:
                break
            self._buffer += piece
        stop = end + 1 if end >= 0 else len(self._buffer)
        return self._taken(min(stop, limit) if limit >= 0 else stop)

    def read(self, size: int) -> bytes:
        while len(self._buffer) < size:
            piece = self._stream.read(1 << 16)
            if not piece:
                break
            self._buffer += piece
        return self._taken(min(size, len(self._buffer)))

    def _taken(self, size: int) -> bytes:
        taken, self._buffer = self._buffer[:size], self._buffer[size:]
        self._at += len(taken)
        return taken

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int) -> int:
        """Move to a byte, at most to the end. There is no index, so the bytes before it are read."""
        if offset < self._at:
            self._open()
        while self._at < offset and self.read(min(1 << 16, offset - self._at)):
            pass
        return self._at

    def __enter__(self) -> _Seekable:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def stat_of_object(entry: Mapping[str, Any]) -> Stat:
    """Return what a listing of fsspec says of an object."""
    found = next((entry[name] for name in _TIMES if entry.get(name) is not None), 0.0)
    if isinstance(found, str):
        found = datetime.fromisoformat(found)
    modified = found.timestamp() if isinstance(found, datetime) else float(found)
    tag = next((str(entry[name]).strip('"') for name in _TAGS if entry.get(name)), repr(modified) if modified else "")
    return Stat(0, 0, entry.get("size") or 0, modified, tag)


def _stat_of(entry: os.stat_result) -> Stat:
    return Stat(entry.st_dev, entry.st_ino, entry.st_size, entry.st_mtime)


def is_complete(name: str) -> bool:
    """Return whether a name is one of a file that is complete, by convention."""
    last = os.path.basename(name)
    return not last.startswith((".", "_")) and not last.endswith(".tmp")
