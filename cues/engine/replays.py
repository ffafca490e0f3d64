"""The note of a replay, in the store that ``cues replay`` fills.

    \\0replay\\0    what is replayed, from which store, and how far it is

Until the replay is done, the store has no positions of its sources: a source would begin again, and its messages would
be there twice. So a start of a graph is refused (:func:`refuse`). A replay of a part (``until``, or some processors) is
for comparison only, and is refused always.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict, field, replace
from typing import Any, Final, Literal

from cues import codec
from cues.base import names
from cues.base.data import dataclass
from cues.base.names import ProcessorKey
from cues.base.texts import quoted
from cues.errors import Diverged
from cues.queues.store import Store
from cues.records import sealed
from cues.storage.transaction import StoreTransaction

Phase = Literal["copying", "running", "done"]

_replaying: Final[set[bytes]] = set()
"""Ids of the stores that a replay of this process runs on."""


_ROWS: Final[list[Any]] = [[bytes, ...], ...]
_FORM: Final[dict[str, Any]] = {
    "source": str, "source_id": bytes, "graph": str, "processors": [str, ...], "until": (str, None), "whole": bool,
    "copied": {str: [[int, int], ...]}, "identities": {str: bytes}, "log_rows": _ROWS, "source_rows": _ROWS,
    "options": {str: dict}, "phase?": str, "state_rows?": {str: _ROWS},
}  # fmt: skip


@dataclass(frozen=True)
class ReplayNote:
    """The origin of a replay, in its store. It is written before the first message, and names every bound."""

    source: str
    """The absolute path of the old store."""
    source_id: bytes
    graph: str
    processors: list[str]
    """The names of the processors that run in it."""
    until: str | None
    whole: bool
    """True if the store can take the place of the old one."""
    copied: dict[str, list[list[int]]]
    """By queue, for each partition the first index and the index after the last that are copied."""
    identities: dict[str, bytes]
    """The identities of these queues."""
    log_rows: list[list[bytes]]
    """Rows about the messages of the logs that are copied: keys and values."""
    source_rows: list[list[bytes]]
    """Rows of sources and of external writers, which are written when the replay is done."""
    options: dict[str, dict[str, Any]]
    """The options of copied queues, which get their retention and bounds when the replay is done."""
    phase: Phase = "copying"
    state_rows: dict[ProcessorKey, list[list[bytes]]] = field(default_factory=dict)
    """By source, the rows of its state, which are written when the replay is done."""

    def put(self, txn: StoreTransaction) -> None:
        sealed.put(txn, names.REPLAY_KEY, codec.pack(asdict(self)))

    def at(self, phase: Phase) -> ReplayNote:
        return replace(self, phase=phase)


def read(store: Store) -> ReplayNote | None:
    """Return the note of a store; None if it is not a replay."""
    with store.core.view() as txn:
        raw = txn.get(names.REPLAY_KEY)
    return None if raw is None else unpack(raw)


def unpack(raw: bytes) -> ReplayNote:
    """Decode the note of a replay. Raises :class:`StoreDamaged`."""
    note = sealed.unseal_value(names.REPLAY_KEY, raw, "note of the replay", _FORM)
    return ReplayNote(**{name: note[name] for name in (each.rstrip("?") for each in _FORM) if name in note})


def refuse(store: Store) -> None:
    """Raise :class:`Diverged` if the store is a replay that is not done, or of a part. The replay itself may run."""
    note = read(store)
    if note is None or store.id in _replaying or (note.whole and note.phase == "done"):
        return
    if note.whole:
        what, hint = (
            "that is not done",
            f"run the command cues replay … --into {quoted(store.path)} again; it continues",
        )
    else:
        what, hint = "of a part of the messages or processors", "replay the whole graph into another store"
    raise Diverged(
        f"The store {store.path} is a replay of {note.source} {what}: its sources have no positions, and would begin"
        " again.",
        f"{hint}.",
        processor="",
    )


@contextlib.contextmanager
def running(store: Store) -> Iterator[None]:
    """Let this process start a graph on a replay that is not done."""
    _replaying.add(store.id)
    try:
        yield
    finally:
        _replaying.discard(store.id)
