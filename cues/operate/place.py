"""A place where messages are, a store or a directory of ``cues run --queues``, and what can be done with either.

    place_of(target)     the StorePlace or DirectoryPlace of a target
    message_at(reader)   one message of a queue or a partition

Both have the same methods, so that a command does not ask which of the two it has. A place refuses by name what it
cannot do (:class:`Refused`, :class:`Unsupported`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeAlias

from cues.base import names
from cues.errors import BatchDamaged, QueueNotFound, StoreNotFound
from cues.operate.reading import FoundMessage, StoreReader
from cues.operate.stores import StorePlace
from cues.operate.target import Target

if TYPE_CHECKING:
    from cues.operate.directories import DirectoryPlace
    from cues.operate.directory_reader import DirectoryReader

Place: TypeAlias = "StorePlace | DirectoryPlace"
Reader: TypeAlias = "StoreReader | DirectoryReader"


def place_of(target: Target, stores: Mapping[str, str] | None = None) -> Place:
    """The place of a target. A URL, and a path with ``_cues/id.json``, is a directory.

    ``stores``: by queue of the graph, the path of its store, if that is another one.
    Raises :class:`StoreNotFound` if there is no directory at a URL, and :class:`NotInstalled` if the packages that
    read directories are missing.
    """
    if not (target.is_url or (target.path / "_cues" / "id.json").exists()):
        return StorePlace(target, stores)
    from cues.spark.installed import require_packages

    require_packages(f"{target.location}, a directory of cues run --queues,", "pyarrow", "deltalake")
    from cues.operate.directories import DirectoryPlace

    place = DirectoryPlace(target)
    if target.is_url and place.files.read("_cues/id.json") is None:
        raise StoreNotFound(
            f"There is no directory of cues run --queues at {target.location}: the file _cues/id.json is missing.",
            "give the URL that cues run --queues has.",
            path=target.location,
        )
    return place


def message_at(reader: Reader, index: int) -> FoundMessage:
    """The message at an index of the only partition. Raises :class:`QueueNotFound` if it is not there."""
    ((partition, (first, next_index)),) = reader.ends().items()
    log = names.log_id(reader.name, partition)
    there = f"it has {first:,} to {next_index - 1:,}" if next_index > first else "it is empty"
    found = None
    if first <= index < next_index:
        reader.go_to({partition: index})
        found = next(reader.forward(), None)
    if isinstance(found, BatchDamaged):
        raise found
    if found is None or found.index != index:
        raise QueueNotFound(f"{log} has no message {index:,}; {there}.", "go to another one.", queue=log)
    return found
