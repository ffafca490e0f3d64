"""Listings of a pattern at each look of a source: of objects in a store, only the names after those that are known.

    a whole listing     at the start, once in a minute, when an object is gone, and always for a directory of a machine
    one from a name     at all other looks, with ``order="name"``, where the store can do it: StartAfter of S3

S3 and its like list names in ascending order, 1,000 with a call, and begin at any name. s3fs and obstore pass that on;
of other filesystems of fsspec, each listing is whole. A whole listing asks only for names that begin as the pattern
does up to its first wildcard, and steps over folders that it cannot match.

An object whose name comes before others that are known is found by the next whole listing. Then names do not ascend,
so all listings are whole for ten minutes. S3's buckets for one zone have no order, and are always listed whole.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Final, NamedTuple

from cues.processors import places

WHOLE_S: Final = 60.0
"""Seconds between two whole listings: the delay of an object that comes with a name before others."""
MIXED_S: Final = 600.0
"""Seconds for which all listings are whole after such an object."""
_STEP_NAMES: Final = 1_000
"""Names of a folder that does not match are read over so often, then stepped over: as many as one call returns."""
_LAST: Final = "\U0010ffff"
_ZONAL: Final = "--x-s3"
"""The end of the names of buckets for one zone."""


class Object(NamedTuple):
    """One object of a listing; its name is without the bucket."""

    name: str
    stat: places.Stat


Pages = Callable[[Any, str, str, str, bool], Iterator[Object]]
"""Lists the objects of a bucket whose names begin with a prefix and come after a name, in the order of the names.

It may begin before, and list more after them. The last argument: also those in folders below that of the prefix.
"""


class Looks:
    """The files of a pattern as a source knows them. A file that is gone stays until the next whole listing."""

    def __init__(self, where: places.Place, pattern: str, by_name: bool) -> None:
        """``by_name``: they are read in the order of their names, so later ones may be found alone."""
        self.where, self._path, self._by_name = where, pattern, by_name
        self._pages: Pages | None = None
        self._entries: dict[str, places.Stat] = {}
        self._last = ""
        self._whole_at = self._mixed_until = 0.0

    def entries(self, again: Collection[str] = ()) -> dict[str, places.Stat]:
        """Return the files by name; the caller removes those that it has deleted. ``again``: these are listed again."""
        where, known = self.where, self._entries
        if not isinstance(where, places.Remote):
            return where.entries(self._path)
        if self._pages is None:
            self._path = where.path(self._path)
            self._pages = pages_of(where.system, self._path)
        now = time.monotonic()
        after = max((name for name in known if not again or name < min(again)), default="")
        is_whole = not self._by_name or not after or now >= self._whole_at or now < self._mixed_until
        if self._pages is None:
            self._entries = where.entries(self._path)
        elif is_whole:
            self._entries = matching(where.system, self._pages, self._path, "")
            if any(name < self._last and name not in known for name in self._entries):
                self._mixed_until = now + MIXED_S
            self._whole_at = time.monotonic() + WHOLE_S
        else:
            later = matching(where.system, self._pages, self._path, after)
            self._entries = {name: stat for name, stat in known.items() if name <= after} | later
        self._last = max((self._last, *self._entries))
        return self._entries

    def whole(self) -> None:
        """Have the next listing whole: a file is not as it was listed."""
        self._whole_at = 0.0


def pages_of(system: Any, path: str) -> Pages | None:
    """Return the function that lists from a name on; None for a path without wildcards, and if there is none."""
    bucket = path.partition("/")[0]
    if not places.MAGIC.search(path) or places.MAGIC.search(bucket) or bucket.endswith(_ZONAL) or ":" in bucket:
        return None
    if hasattr(system, "call_s3"):
        return _of_s3fs
    return _of_obstore if hasattr(system, "_construct_store") else None


def matching(system: Any, pages: Pages, path: str, after: str) -> dict[str, places.Stat]:
    """Return the objects of a pattern whose names come after one, in the order of their names."""
    from fsspec.utils import glob_translate

    bucket, _, path = path.partition("/")
    prefix = re.split(places.MAGIC, path, maxsplit=1)[0]
    is_match = re.compile(glob_translate(path)).match
    depth = None if "**" in path else path.count("/")
    is_flat = depth is None or prefix.rpartition("/")[0] != path.rpartition("/")[0]
    found: dict[str, places.Stat] = {}
    last: str | None = after.partition("/")[2]
    while last is not None:
        begin, last, skipped = last, None, 0
        for name, stat in pages(system, bucket, prefix, begin, is_flat):
            if not name.startswith(prefix):
                if name > prefix:
                    break
            elif depth is not None and name.count("/") > depth:
                skipped += 1
                if skipped == _STEP_NAMES:
                    last = "/".join([*name.split("/")[: depth + 1], _LAST])
                    break
            elif name > begin and is_match(name) and not name.endswith("/") and places.is_complete(name):
                found[f"{bucket}/{name}"] = stat
    return found


def _of_s3fs(system: Any, bucket: str, prefix: str, after: str, is_flat: bool) -> Iterator[Object]:
    options = {"Bucket": bucket, "Prefix": prefix, "StartAfter": after, "Delimiter": "" if is_flat else "/"}
    options = {name: value for name, value in options.items() if value}
    while True:
        page = system.call_s3("list_objects_v2", **options)
        for entry in page.get("Contents", ()):
            yield Object(entry["Key"], places.stat_of_object({**entry, "size": entry["Size"]}))
        if not page.get("IsTruncated"):
            return
        options["ContinuationToken"] = page["NextContinuationToken"]


def _of_obstore(system: Any, bucket: str, prefix: str, after: str, is_flat: bool) -> Iterator[Object]:
    import obstore

    store = system._construct_store(bucket)
    folder, last = prefix.rpartition("/")[0] or None, prefix[-1:]
    if not after and not is_flat and last in ("", "/"):
        pages: Iterable[Any] = [sorted(obstore.list_with_delimiter(store, folder)["objects"], key=_path_of)]
    else:
        # It takes only whole folders as a prefix, so the listing begins at a name shortly before the others.
        if "0" < last <= "~":
            after = max(after, f"{prefix[:-1]}{chr(ord(last) - 1)}{_LAST}")
        pages = obstore.list(store, folder, offset=after or None, chunk_size=_STEP_NAMES)
    for page in pages:
        for entry in page:
            yield Object(entry["path"], places.stat_of_object(entry))


def _path_of(entry: Any) -> str:
    return str(entry["path"])
