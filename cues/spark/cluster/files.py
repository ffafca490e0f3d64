"""The directory that driver and executors share: a path on a mount, or a prefix of an object store.

    /mnt/queues               a filesystem that every machine has mounted at this path
    s3://bucket/queues        an object store; also gs://, az:// and abfs://

No call uses Spark or Hadoop. A task opens the directory by its place again, so settings and credentials of an object
store are the variables that its own tools use (``AWS_ENDPOINT_URL``, ``GOOGLE_APPLICATION_CREDENTIALS``, …), set for
the driver and for the executors.

Exactness depends on :meth:`Files.put`: a file appears under its name whole, or not at all, and of several drivers
that put the same name, one succeeds.

    a mount          a draft gets the name as a second hard link, which fails if the name is taken (NFS too)
    an object store  a put on the condition that the name is not taken

On a mount a name is durable only after a sync of its folder, and the process that made the name may die before that
sync. So a process that found a name syncs the folder too, before it writes anything that depends on the name:
:meth:`Files.put` if the name is taken, :meth:`Files.ensure`, and the readers of records and logs, by
:meth:`Files.settle`. That is a sync (2 ms on a disk with ext4) or two for each queue and processor at a start, and one
for each look that finds new entries of another writer. A step makes none of these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import io
import json
import os
import re
import secrets
import shutil
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, Union
from urllib.parse import unquote

import xxhash

from cues.base.texts import quoted
from cues.errors import Diverged, Unsupported
from cues.overrides import override
from cues.records import sealed
from cues.spark.installed import require_packages
from cues.storage import door
from cues.storage.datafile import sync_names

ID: Final = "_cues/id.json"
"""The file that makes a directory one of queues."""
_STORES: Final = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss")
"""The schemes of object stores."""
_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/{1,2}")
"""The beginning of a URL; Hadoop also writes it with one slash, as in ``dbfs:/flights``."""
_PARTITION: Final = "="
"""It is in the name of a folder of a Delta table's partition. No folder of :func:`folder_of` has it."""
_COPIES: Final = 16
"""Files of an object store that get their new names at the same time."""
_TRIES: Final = 10
"""A folder is made so often, while others delete it. If there is no file to move, all of them fail."""
_DURABLE_MAX: Final = 10_000
"""Folders that a process remembers as durable, about 2 MB. When there are more, each is synced once again."""
_durable: Final[set[str]] = set()
"""Folders whose names are on the disk, and those of the folders above. A task opens the directory anew."""
_T = TypeVar("_T")


def is_object_store(place: str) -> bool:
    """Return True for the URL of an object store."""
    return place.partition("://")[0] in _STORES and "://" in place


@functools.cache
def open_files(place: str, make: bool = True) -> Files:
    """Open the directory, and make it if it is missing. Raises :class:`Unsupported` if it cannot be reached.

    Executors do not make it: what they do not see is not shared with the driver.
    """
    if is_object_store(place):
        return ObjectFiles(place)
    scheme, path = "", place
    if found := _SCHEME.match(place):
        scheme, path = found[1], unquote(place.removeprefix("file:").removeprefix("//"))
    if not path or scheme not in ("", "file"):
        why = f"{found[0]} is not supported" if found else "the name is empty"
        raise Unsupported(
            f"Queues cannot be kept in {quoted(place)}: {why}.",
            f"name a path that every machine has mounted, or a URL that begins with {':// or '.join(_STORES)}://.",
        )
    return LocalFiles(path, make)


def require_place(place: str) -> None:
    """Raise :class:`Unsupported` if the directory cannot be reached, or cannot be made. Nothing is changed."""
    files = open_files(place, make=False)
    if isinstance(files, LocalFiles):
        files.require_makeable()


class Files(ABC):
    """A directory. Names are relative to it. Used by many threads."""

    url: str
    """The directory, as errors show it."""

    def __init__(self, place: str) -> None:
        self.place = place

    @override
    def __reduce__(self) -> Any:
        return open_files, (self.place, False)

    @abstractmethod
    def names(self, folder: str) -> list[str]:
        """The names in a folder, sorted, without those that begin with a dot; none if the folder does not exist."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """The size of a file in bytes; None if it does not exist."""

    @abstractmethod
    def listed(self, folder: str) -> dict[str, tuple[int, float]]:
        """By name: the size in bytes of each file in a folder, and when it was written, in seconds since 1970.

        Files in folders of partitions (``partition=0/first=1/…``) are among them.
        """

    @abstractmethod
    def read(self, name: str) -> bytes | None:
        """The content of a file; None if it does not exist."""

    @abstractmethod
    def open(self, name: str) -> Any:
        """A file for pyarrow's readers. Raises :class:`FileNotFoundError`."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> bool:
        """Write a small file if the name is not taken. Return True if this call has written it.

        The file exists whole or not at all. It is on the disk as far as the filesystem guarantees it, also that of
        another writer.
        """

    @abstractmethod
    def write(self, name: str, data: bytes) -> None:
        """Write a note, over the old one if there is one: a file on which nothing depends.

        A reader may see a part of it meanwhile, and after a death too. A power cut may take it back.
        """

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Write a small file, over the old one if there is one: after a death or a power cut it is one of the two.

        It is on the disk, with its name, when the call returns.
        """

    @abstractmethod
    def create(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """A new file for pyarrow's writers. It is on the disk when the block ends."""

    @abstractmethod
    def move(self, names: Mapping[str, str]) -> None:
        """Give files new names, by the old ones. After an error some files may have both names, or the new one."""

    @abstractmethod
    def delete(self, name: str) -> None:
        """Delete a file, or a folder with its content, if it exists."""

    @abstractmethod
    def settle(self, folder: str, names: Iterable[str] = ()) -> None:
        """Bring files of a folder that a library has written to the disk, and the names in the folder.

        Without ``names``, it makes durable what a listing or a read of the folder has found.
        """

    @abstractmethod
    def table(self, name: str) -> str:
        """The URL of a folder, for delta-rs."""

    @abstractmethod
    def for_spark(self, name: str) -> str:
        """The URL of a folder, for Spark's own files: the checkpoint of a stream."""

    def ensure(self, name: str, data: bytes) -> bytes:
        """Return the content of a small file. If it does not exist, write ``data``, or read that of another writer.

        The name is durable, and so are all others that the folder had before the call.
        """
        kept = self.read(name)
        if kept is None:
            self.put(name, data)
            kept = self.read(name)
        else:
            self.settle(os.path.dirname(name))
        return kept or b""


class LocalFiles(Files):
    """A directory on a mount."""

    def __init__(self, place: str, make: bool = True) -> None:
        self.url = os.path.abspath(os.path.expanduser(place))
        super().__init__(self.url)
        if re.search("%[0-9A-Fa-f]{2}", self.url):
            raise Unsupported(
                f"The queues cannot be kept in {self.url}: delta-rs, which reads their logs, decodes the percent sign.",
                "name a directory without a percent sign in its path.",
            )
        try:
            if make:
                _make_durable(self.url)
        except OSError as error:
            raise self._unusable(error.strerror) from error

    def require_makeable(self) -> None:
        """Raise :class:`Unsupported` if this is not a directory into which this process may write, and cannot be."""
        there = Path(self.url)
        while not os.path.lexists(there):
            there = there.parent
        if not there.is_dir():
            raise self._unusable(f"{there} is not a directory")
        if not os.access(there, os.W_OK | os.X_OK):
            raise self._unusable(f"this user may not write into {there}")

    def _unusable(self, why: str | None) -> Unsupported:
        text = f"The queues cannot be kept in {self.url}: {why}."
        return Unsupported(text, "name a directory that this machine and all executors share.")

    def path(self, name: str) -> str:
        return os.path.join(self.url, name)

    @override
    def names(self, folder: str) -> list[str]:
        try:
            return sorted(name for name in os.listdir(self.path(folder)) if name[0] != ".")
        except FileNotFoundError:
            return []

    @override
    def size(self, name: str) -> int | None:
        try:
            return os.stat(self.path(name)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return None

    @override
    def listed(self, folder: str) -> dict[str, tuple[int, float]]:
        found = {}
        with contextlib.suppress(FileNotFoundError), os.scandir(self.path(folder)) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # another process deletes files
                    if entry.name[0] == ".":
                        continue
                    if entry.is_file():
                        found[entry.name] = entry.stat().st_size, entry.stat().st_mtime
                    elif _PARTITION in entry.name:
                        inside = self.listed(f"{folder}/{entry.name}")
                        found |= {f"{entry.name}/{name}": about for name, about in inside.items()}
        return found

    @override
    def read(self, name: str) -> bytes | None:
        try:
            with open(self.path(name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    @override
    def open(self, name: str) -> Any:
        return self.path(name)

    @override
    def put(self, name: str, data: bytes) -> bool:
        path, written = self.path(name), True
        draft = _draft_of(path)
        self.store(draft, data)
        try:
            os.link(draft, path)
        except FileExistsError:
            written = self.read(name) == data  # a client of NFS repeats a link whose answer was lost
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
                raise
            raise Unsupported(
                f"{self.url} is on a filesystem without hard links, which decide between two drivers.",
                "name a directory on a filesystem that has them, or an object store.",
            ) from error
        finally:
            os.unlink(draft)
        # Also if the name was taken: the caller goes on from that file. It has its content before its name.
        _sync(os.path.dirname(path))
        return written

    @override
    def write(self, name: str, data: bytes) -> None:
        self.store(self.path(name), data)

    @override
    def replace(self, name: str, data: bytes) -> None:
        path = self.path(name)
        draft = _draft_of(path)
        try:
            self.store(draft, data)
            os.replace(draft, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(draft)
            raise
        _sync(os.path.dirname(path))

    def store(self, path: str, data: bytes) -> None:
        _make_durable(os.path.dirname(path))
        with open(path, "wb", opener=door.opener) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    @override
    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Any]:
        path = self.path(name)
        with _in_folder(path, lambda: open(path, "wb", opener=door.opener)) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _sync(os.path.dirname(path))

    @override
    def move(self, names: Mapping[str, str]) -> None:
        for old, new in names.items():
            source, target = self.path(old), self.path(new)
            _in_folder(target, functools.partial(os.rename, source, target))
            _sync(os.path.dirname(target))

    @override
    def delete(self, name: str) -> None:
        path = self.path(name)
        with contextlib.suppress(FileNotFoundError):
            if os.path.isdir(path):
                shutil.rmtree(path)
            else:
                os.unlink(path)
        with contextlib.suppress(OSError):  # not empty
            while _PARTITION in os.path.basename(name := os.path.dirname(name)):
                os.rmdir(self.path(name))

    @override
    def settle(self, folder: str, names: Iterable[str] = ()) -> None:
        for name in names:
            _sync(self.path(f"{folder}/{name}"))
        _sync(self.path(folder))

    @override
    def table(self, name: str) -> str:
        return self.path(name)

    @override
    def for_spark(self, name: str) -> str:
        return f"file://{self.path(name)}"  # Hadoop does not decode it


class ObjectFiles(Files):
    """A prefix of an object store."""

    def __init__(self, place: str) -> None:
        super().__init__(place.rstrip("/"))
        require_packages(place, "obstore")
        import obstore
        from obstore.store import from_url

        self.url = self.place
        self.obstore = obstore
        try:
            self.store: Any = from_url(self.url.replace("s3a://", "s3://", 1))
            self.names("_cues")
        except Exception as error:
            why = str(error).partition("\n")[0].rstrip(".")
            hint = "check the name, and the variables with the credentials of the object store."
            if "builder error" in why:
                hint = "set AWS_ALLOW_HTTP=true if the address of the store (AWS_ENDPOINT_URL) begins with http://."
            raise Unsupported(f"The queues cannot be kept in {place}: {why}.", hint) from error

    @override
    def names(self, folder: str) -> list[str]:
        prefix = f"{folder}/"
        listed = self.obstore.list_with_delimiter(self.store, prefix)
        paths = [*listed["common_prefixes"], *(found["path"] for found in listed["objects"])]
        names = {path.rstrip("/").removeprefix(prefix) for path in paths}
        return sorted(name for name in names if name and name[0] != ".")

    @override
    def size(self, name: str) -> int | None:
        try:
            return int(self.obstore.head(self.store, name)["size"])
        except FileNotFoundError:
            return None

    @override
    def listed(self, folder: str) -> dict[str, tuple[int, float]]:
        prefix = f"{folder}/"
        pages = self.obstore.list_with_delimiter(self.store, prefix)
        inner = (p for p in pages["common_prefixes"] if _PARTITION in p.removeprefix(prefix))
        objects = [*pages["objects"], *(o for p in inner for page in self.obstore.list(self.store, p) for o in page)]
        return {o["path"].removeprefix(prefix): (o["size"], o["last_modified"].timestamp()) for o in objects}

    @override
    def read(self, name: str) -> bytes | None:
        try:
            return bytes(self.obstore.get(self.store, name).bytes())
        except FileNotFoundError:
            return None

    @override
    def open(self, name: str) -> Any:
        import pyarrow as pa

        return pa.PythonFile(_Reader(self.obstore.open_reader(self.store, name)), mode="r")

    @override
    def put(self, name: str, data: bytes) -> bool:
        from obstore.exceptions import AlreadyExistsError

        try:
            self.obstore.put(self.store, name, data, mode="create")
        except AlreadyExistsError:
            # The client repeats a put whose answer was lost, and then finds its own file. No two drivers put the same.
            return self.read(name) == data
        return True

    @override
    def write(self, name: str, data: bytes) -> None:
        self.obstore.put(self.store, name, data)

    replace = write
    """An object appears whole, and is durable when its put returns."""

    @override
    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[Any]:
        buffer = io.BytesIO()
        yield buffer
        self.obstore.put(self.store, name, buffer.getvalue())

    @override
    def move(self, names: Mapping[str, str]) -> None:
        with ThreadPoolExecutor(_COPIES) as pool:
            list(pool.map(lambda pair: self.obstore.copy(self.store, *pair), names.items()))
        if names:
            self.obstore.delete(self.store, list(names))

    @override
    def delete(self, name: str) -> None:
        paths = [found["path"] for page in self.obstore.list(self.store, f"{name}/") for found in page]
        with contextlib.suppress(FileNotFoundError):
            self.obstore.delete(self.store, paths or [name])

    @override
    def settle(self, folder: str, names: Iterable[str] = ()) -> None: ...

    @override
    def table(self, name: str) -> str:
        return f"{self.url.replace('s3a://', 's3://', 1)}/{name}"

    @override
    def for_spark(self, name: str) -> str:
        return f"{self.url.replace('s3://', 's3a://', 1)}/{name}"  # Hadoop's name of its connector


class _Reader(io.RawIOBase):
    """A file of an object store, as Python's files."""

    def __init__(self, reader: Any) -> None:
        self._reader = reader

    @override
    def readable(self) -> bool:
        return True

    @override
    def seekable(self) -> bool:
        return True

    @override
    def read(self, size: int = -1) -> bytes:
        return bytes(self._reader.read() if size < 0 else self._reader.read(size))

    @override
    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._reader.seek(offset, whence))

    @override
    def tell(self) -> int:
        return int(self._reader.tell())


def _in_folder(path: str, act: Callable[[], _T]) -> _T:
    """Make the folder of a file, and call ``act``, again if another process deletes the empty folder meanwhile."""
    for _ in range(_TRIES):
        with contextlib.suppress(FileNotFoundError):
            _make_durable(os.path.dirname(path))
            return act()
    return act()


def _make_durable(folder: str) -> None:
    """Make a folder, and its name durable; also if it is there, for its maker may have died before the sync."""
    if folder not in _durable or not os.path.isdir(folder):  # a fresh start deletes some
        os.makedirs(folder, exist_ok=True)
        sync_names(Path(folder))
        if len(_durable) >= _DURABLE_MAX:
            _durable.clear()
        _durable.add(folder)


def _draft_of(path: str) -> str:
    """The name of a file until it is whole. It is hidden: :meth:`Files.names` leaves it out."""
    folder, last = os.path.split(path)
    return os.path.join(folder, f".{last}.{secrets.token_hex(8)}")


def _sync(path: str) -> None:
    """Sync a file or a folder: after a power cut, a record must not name files that are not there."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sealed_json(record: dict[str, Any]) -> bytes:
    """The bytes of a small file: the record as JSON, whose last field is the checksum of the rest.

    An earlier version reads past that field.
    """
    text = json.dumps(record)
    seal = f'"seal": "{_checksum(text)}"'
    return (f"{text[:-1]}, {seal}}}" if record else f"{{{seal}}}").encode()


def _checksum(text: str) -> str:
    return xxhash.xxh3_64_hexdigest(text.encode())


def parsed(files: Files, name: str, data: bytes, form: sealed.Form) -> dict[str, Any]:
    """The record of a small file, which has a form (:func:`cues.records.sealed.fits`).

    Raises :class:`Diverged` if it is damaged, or has another form. Earlier versions wrote no checksum.
    """
    try:
        found = json.loads(data)
        if isinstance(found, dict):
            # A last field that is the checksum of the rest is one under any name: a bit of the name may have flipped.
            rest = dict(list(found.items())[:-1])
            if data == sealed_json(rest):
                return formed(files, name, rest, form)  # type: ignore[no-any-return]
            if "seal" not in found and list(found.values())[-1:] != [_checksum(json.dumps(rest))]:
                return formed(files, name, found, form)  # type: ignore[no-any-return]
            reason = "its checksum fails"
        else:
            reason = "it is not a JSON object"
    except (ValueError, RecursionError) as error:
        reason = str(error)
    raise damaged(files, name, reason)


def formed(files: Files, name: str, found: Any, form: sealed.Form) -> Any:
    """Return a value of a small file. Raises :class:`Diverged` if it does not have this form."""
    if not sealed.fits(found, form):
        raise damaged(files, name, f"no version of Cues wrote {found!r:.200} there; the form is {form!r:.400}")
    return found


def damaged(files: Files, name: str, reason: str) -> Diverged:
    return Diverged(f"The file {files.url}/{name} is damaged: {reason}.", "restore the directory from a copy.")


ANY_FORM: Final = {str: object}
"""The form of a record whose fields are only shown, or copied."""


def identity_of(files: Files, name: str, data: bytes) -> bytes:
    """The identity in the record of a queue. Raises :class:`Diverged`."""
    found = parsed(files, name, data, {"identity": str})["identity"]
    try:
        return bytes.fromhex(found)
    except ValueError as error:
        raise damaged(files, name, f"the identity {found!r:.80} is not hexadecimal ({error})") from None


def time_of(files: Files, name: str, text: Any) -> datetime:
    """A time in a small file. Raises :class:`Diverged`."""
    try:
        found = datetime.fromisoformat(text)
        return found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    except (ValueError, TypeError) as error:
        raise damaged(files, name, f"the time {text!r:.80} is not one of ISO 8601 ({error})") from None


def form_of(hint: Any) -> sealed.Form:
    """Return the form that a value of this type has in JSON: of a dataclass, a map of its fields.

    A tuple is a list there; a field with a default may be missing.
    """
    if dataclasses.is_dataclass(hint):
        hints = typing.get_type_hints(hint)
        bare = dataclasses.MISSING
        return {
            each.name + ("?" if (each.default, each.default_factory) != (bare, bare) else ""): form_of(hints[each.name])
            for each in dataclasses.fields(hint)
        }
    origin, given = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return tuple({type(each) for each in given})
    if origin in (Union, types.UnionType):
        return tuple(None if each is type(None) else form_of(each) for each in given)
    if origin is dict:
        return {form_of(given[0]): form_of(given[1])}
    if origin is list or (origin is tuple and given[1:] == (...,)):
        return [form_of(given[0]), ...]
    if origin is tuple:
        return [form_of(each) for each in given]
    return object if hint is Any else hint


def folder_of(name: str) -> str:
    """The name of the folder of a queue or processor.

    A percent sign would be decoded by delta-rs. Names that begin with ``_`` or a dot are hidden from readers.
    """
    return re.sub(r"^[_.]|[^A-Za-z0-9_.-]", lambda found: "".join(f"~{byte:02X}" for byte in found[0].encode()), name)


def name_of(folder: str) -> str:
    """The queue or processor of a folder."""
    return unquote(folder.replace("~", "%"))
