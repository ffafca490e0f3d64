"""A directory on any filesystem that Hadoop knows, as the driver uses it.

All calls use the JVM's own client, which has the cluster's settings and credentials. Only messages are
read and written by Spark.

Exactness depends on :meth:`Files.put`: a file appears under its name whole, or not at all, and of
several drivers that put the same name, one succeeds. A draft is written beside it, and then

    file://          the draft gets the name as a second hard link, which fails if the name is taken (NFS too)
    anything else    the draft is renamed without permission to overwrite, which HDFS and Azure's hierarchical
                     namespaces decide in one place

Not guaranteed: the same on object stores whose rename is a copy (s3a, gs, wasb). There the steps of one
driver are exact, but only the lease keeps two drivers apart.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import quote

from cues.errors import Unsupported
from cues.spark.session import in_short

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RENAME_COPIES: Final = ("s3a", "s3", "s3n", "gs", "wasb", "wasbs", "oss", "cosn")
"""Schemes whose rename does not decide between two drivers."""


class Files:
    """A directory; names are relative to it. Used by many threads."""

    def __init__(self, session: SparkSession, place: str | os.PathLike[str]) -> None:
        """Open or make the directory. Raises :class:`Unsupported` if the filesystem cannot be reached."""
        place = os.fspath(place)
        if "://" not in place and not place.startswith("file:"):
            place = "file://" + quote(os.path.abspath(os.path.expanduser(place)))
        self._jvm = cast(Any, session._jvm)
        self._hadoop: Any = self._jvm.org.apache.hadoop
        conf = cast(Any, session._jsc).hadoopConfiguration()
        try:
            root = self._hadoop.fs.Path(self._jvm.java.net.URI(place))
            # A separate instance, because Spark's cached one must continue to write checksums.
            self._fs: Any = self._hadoop.fs.FileSystem.newInstance(root.toUri(), conf)
            self._fs.setWriteChecksum(False)
            self._root = self._fs.makeQualified(root)
            self._fs.mkdirs(self._root)
        except Exception as error:
            raise Unsupported(
                f"The queues cannot be kept in {place}: {in_short(error)}.",
                "name a directory that this machine and all executors share: a path, or a URL that Hadoop knows.",
            ) from error
        self.url = str(self._root.toString())
        self.scheme = str(self._root.toUri().getScheme())
        self._context: Any = self._hadoop.fs.FileContext.getFileContext(self._root.toUri(), conf)
        rename = self._jvm.java.lang.Class.forName("org.apache.hadoop.fs.Options$Rename")
        self._no_options = self._jvm.java.lang.reflect.Array.newInstance(rename, 0)

    def path(self, name: str) -> Any:
        """A name as a Path of Hadoop."""
        return self._hadoop.fs.Path(self._root, name) if name else self._root

    def url_of(self, name: str) -> str:
        """A name as a URL for Spark's readers and writers, without escapes."""
        return str(self.path(name).toString())

    # --- reading ---

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; none if the folder does not exist."""
        statuses = _unless_missing(self._fs.listStatus, self.path(folder))
        return sorted(str(status.getPath().getName()) for status in statuses or ())

    def parts(self, folder: str) -> list[str]:
        """The files that a job of Spark has written into a folder."""
        return [name for name in self.names(folder) if name.startswith("part-")]

    def status(self, name: str) -> tuple[int, int] | None:
        """The size and the time of a file, in bytes and ms; None if it does not exist."""
        status = _unless_missing(self._fs.getFileStatus, self.path(name))
        return None if status is None else (int(status.getLen()), int(status.getModificationTime()))

    def read(self, name: str) -> str | None:
        """The text of a small file; None if it does not exist."""
        stream = _unless_missing(self._fs.open, self.path(name))
        if stream is None:
            return None
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    # --- changing ---

    def put(self, name: str, text: str) -> bool:
        """Write a small file if the name is not taken. Return whether it was written.

        The file exists whole or not at all. It is on the disk as far as the filesystem guarantees it.
        """
        folder, _, last = name.rpartition("/")
        draft = f"{folder}/.{last}.{secrets.token_hex(8)}"
        self.write(draft, text)
        try:
            if self.scheme == "file":
                return self._link(draft, name)
            self._context.rename(self.path(draft), self.path(name), self._no_options)
            return True
        except Exception as error:
            if _is(error, "FileAlreadyExistsException"):
                return False
            raise
        finally:
            self._fs.delete(self.path(draft), False)

    def ensure(self, name: str, text: str) -> str:
        """Return the text of a small file. If it does not exist, write ``text``, or read that of another writer."""
        kept = self.read(name)
        if kept is None:
            self.put(name, text)
            kept = self.read(name)
        return kept or ""

    def _link(self, draft: str, name: str) -> bool:
        try:
            os.link(self._local(draft), self._local(name))
        except FileExistsError:
            return False
        except PermissionError as error:
            raise Unsupported(
                f"{self.url} makes no hard links ({error.strerror}). Cues needs them, so that only one of two"
                " drivers can commit.",
                "name a directory on a filesystem that has them, or a Hadoop URL such as hdfs://….",
            ) from error
        _sync(os.path.dirname(self._local(name)))
        return True

    def _local(self, name: str) -> str:
        return str(self.path(name).toUri().getPath())

    def write(self, name: str, text: str) -> None:
        """Write a small file, over the old one if there is one. A reader may see a part of it meanwhile."""
        stream = self._fs.create(self.path(name), True)
        try:
            stream.write(bytearray(text.encode()))
            stream.hsync()
        finally:
            stream.close()

    def move(self, name: str, to: str) -> None:
        """Rename a file, and sync it on a plain mount. No other writer may use the new name."""
        target = self.path(to)
        self._fs.mkdirs(target.getParent())
        if self.scheme == "file":
            _sync(self._local(name))
        if not self._fs.rename(self.path(name), target):
            raise OSError(f"{self.url_of(name)} cannot be renamed to {target}")
        if self.scheme == "file":
            _sync(os.path.dirname(self._local(to)))

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with its content, if it exists."""
        self._fs.delete(self.path(name), True)

    def close(self) -> None:
        """Close the client, if its Java still runs."""
        with contextlib.suppress(Exception):
            self._fs.close()


def _sync(path: str) -> None:
    """Sync a file or a folder: after a power cut, a record must not name files that are not there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def folder_of(name: str) -> str:
    """The name of the folder of a queue or processor. Names that begin with ``_`` or a dot are hidden in Hadoop."""
    folder = quote(name, safe="")
    return folder if folder[0] not in "_." else f"%{ord(folder[0]):02X}{folder[1:]}"


def _unless_missing(call: Callable[[Any], Any], path: Any) -> Any:
    """``call(path)``, or None if the file does not exist."""
    try:
        return call(path)
    except Exception as error:
        if _is(error, "FileNotFoundException"):
            return None
        raise


def _is(error: Exception, kind: str) -> bool:
    """Return True if Java raised an exception of this class."""
    java = getattr(error, "java_exception", None)
    if java is not None:
        return str(java.getClass().getSimpleName()) == kind
    return kind in str(error).partition("\n")[0]
