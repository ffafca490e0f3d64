"""The manifest of a backup: one JSON object with its stores, their sizes and checksums (tools/backup.py makes it)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final

import xxhash

from cues.base.data import dataclass
from cues.errors import StoreDamaged, StoreVersion
from cues.storage.retirement import MANIFEST

FORMAT: Final = 1


@dataclass(frozen=True)
class StoredStore:
    """A store in a backup."""

    id: str
    """In hex."""
    name: str
    """The name of its directory; the names of its files."""
    path: str
    """Its absolute path when the backup was made."""
    relative: str
    """The same, relative to the first store."""
    bytes: int
    checksum: str
    cut_bytes: int
    cut_checksum: str
    is_whole: bool
    """True if its file has the complete store; False if it has the changes since an earlier backup."""
    records: int


@dataclass(frozen=True)
class Backup:
    """A complete backup, as its manifest says."""

    number: int
    since: int | None
    """The number of the backup that this one has the changes of; None: it has everything."""
    since_checksum: str
    time: datetime
    """The moment that it has: every commit before it, none after it."""
    stores: tuple[StoredStore, ...]
    """The first one is the store that was given."""
    checksum: str = ""

    @property
    def bytes(self) -> int:
        return sum(store.bytes + store.cut_bytes for store in self.stores)

    def to_dict(self) -> dict[str, Any]:
        stores = [vars(store) for store in self.stores]
        return {
            "format": FORMAT,
            "backup": self.number,
            "since": self.since,
            "since_checksum": self.since_checksum,
            "time": self.time.isoformat(),
            "stores": stores,
        }

    @staticmethod
    def load(directory: Path) -> Backup:
        """Read the manifest of a backup. Raises :class:`StoreDamaged`."""
        file = directory / MANIFEST
        try:
            data = json.loads(file.read_text())
            checksum = data.pop("checksum")
            if data["format"] != FORMAT:
                raise StoreVersion(
                    f"The backup {directory} has format {data['format']}; this version of Cues reads {FORMAT}.",
                    "install a newer version of Cues (pip install -U cues-streams).",
                    path=str(directory),
                    found=data["format"],
                    supported=FORMAT,
                )
            if checksum != manifest_checksum(data):
                raise ValueError("its checksum fails")
            stores = tuple(StoredStore(**store) for store in data["stores"])
            when = datetime.fromisoformat(data["time"])
            return Backup(data["backup"], data["since"], data["since_checksum"], when, stores, checksum)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise StoreDamaged(
                f"The manifest {file} cannot be used: {error}.", "use another backup.", path=str(directory)
            ) from error


def manifest_checksum(data: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(data, sort_keys=True).encode())
