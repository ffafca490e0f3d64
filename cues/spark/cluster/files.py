"""A directory on any filesystem that Hadoop knows, as the driver uses it.

Everything goes through the JVM's own client, which has the cluster's settings and credentials. Messages
do not: they are read and written by Spark.

What exactness rests on is :meth:`Files.put`: a file appears under its name whole, or not at all, and of
several that try to, one does. A draft is written beside it and then

    file://          gets the name as a second hard link, which fails where the name is taken (NFS too)
    anything else    is renamed without leave to overwrite, which HDFS and Azure's hierarchical
                     namespaces decide in one place

Not guaranteed: the same on object stores whose rename is a copy (s3a, gs, wasb). There the steps of one
driver are exact; two at once are kept apart by their lease only.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

from cues.errors import Unsupported
from cues.spark.session import in_short

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RENAME_COPIES: Final = ("s3a", "s3", "s3n", "gs", "wasb", "wasbs", "oss", "cosn")
"""Schemes whose rename does not decide between two that try."""


class Status(NamedTuple):
    """The status of a file on the filesystem."""

    url: str
    """Its whole URL, as Spark's log has it."""
    size: int
    modified_ms: int
    replication: int
    block_size: int


class Files:
    """A directory; names are relative to it. Used by many threads."""

    def __init__(self, session: SparkSession, place: str | os.PathLike[str]) -> None:
        """Have the directory. Raises :class:`Unsupported` where the filesystem cannot be reached."""
        place = os.fspath(place)
        if "://" not in place and not place.startswith("file:"):
            place = "file://" + quote(os.path.abspath(os.path.expanduser(place)))
        self._jvm: Any = _any(session._jvm)
        self._hadoop: Any = self._jvm.org.apache.hadoop
        conf = _any(session._jsc).hadoopConfiguration()
        try:
            root = self._hadoop.fs.Path(self._jvm.java.net.URI(place))
            # An instance of its own: Spark's, which is cached, goes on writing checksums.
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
        """A name as Hadoop's Path."""
        return self._hadoop.fs.Path(self._root, name) if name else self._root

    def url_of(self, name: str) -> str:
        """A name as Spark's readers and writers take it: nothing is escaped."""
        return str(self.path(name).toString())

    # --- looking ---

    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted; none where the folder does not exist."""
        try:
            found = self._fs.listStatus(self.path(folder))
        except Exception as error:
            if _is(error, "FileNotFoundException"):
                return []
            raise
        return sorted(str(one.getPath().getName()) for one in found)

    def parts(self, folder: str) -> list[str]:
        """The files that a job of Spark has written into a folder."""
        return [name for name in self.names(folder) if name.startswith("part-")]

    def status(self, name: str) -> Status | None:
        """Size and times of a file; None where it is not there."""
        try:
            found = self._fs.getFileStatus(self.path(name))
        except Exception as error:
            if _is(error, "FileNotFoundException"):
                return None
            raise
        return Status(
            str(found.getPath().toUri().toString()),
            int(found.getLen()),
            int(found.getModificationTime()),
            int(found.getReplication()),
            int(found.getBlockSize()),
        )

    def read(self, name: str) -> str | None:
        """The text of a small file; None where it is not there."""
        try:
            stream = self._fs.open(self.path(name))
        except Exception as error:
            if _is(error, "FileNotFoundException"):
                return None
            raise
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    # --- changing ---

    def put(self, name: str, text: str) -> bool:
        """Write a small file unless there is one of that name; True where it is this one.

        It is there whole or not at all, and on the disk as far as the filesystem says so.
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

    def _link(self, draft: str, name: str) -> bool:
        try:
            os.link(self._local(draft), self._local(name))
        except FileExistsError:
            return False
        except PermissionError as error:
            raise Unsupported(
                f"{self.url} makes no hard links ({error.strerror}), by which a commit of one driver"
                " excludes another's.",
                "name a directory on a filesystem that has them, or a Hadoop URL such as hdfs://….",
            ) from error
        handle = os.open(os.path.dirname(self._local(name)), os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        return True

    def _local(self, name: str) -> str:
        return str(self.path(name).toUri().getPath())

    def write(self, name: str, text: str) -> None:
        """Write a small file over whatever is there. Who reads it meanwhile may see a part."""
        stream = self._fs.create(self.path(name), True)
        try:
            stream.write(bytearray(text.encode()))
            stream.hsync()
        finally:
            stream.close()

    def move(self, name: str, to: str) -> None:
        """Rename a file, to a name that nobody else uses."""
        target = self.path(to)
        self._fs.mkdirs(target.getParent())
        if not self._fs.rename(self.path(name), target):
            raise OSError(f"{self.url_of(name)} cannot be renamed to {target}")

    def delete(self, name: str) -> None:
        """Delete a file, or a folder with all in it; nothing happens where it is not there."""
        self._fs.delete(self.path(name), True)

    def close(self) -> None:
        """Let the client go, if its Java is still there."""
        with contextlib.suppress(Exception):
            self._fs.close()


def _any(value: Any) -> Any:
    return value


def folder_of(name: str) -> str:
    """A queue's or processor's name as that of a folder: hidden, in Hadoop, is what begins with ``_`` or a dot."""
    found = quote(name, safe="")
    return found if found[0] not in "_." else f"%{ord(found[0]):02X}{found[1:]}"


def _is(error: Exception, kind: str) -> bool:
    """Return True where Java raised an exception of this class."""
    java = getattr(error, "java_exception", None)
    if java is not None:
        return str(java.getClass().getSimpleName()) == kind
    return kind in str(error).partition("\n")[0]
