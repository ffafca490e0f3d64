"""A handle on a store, as users have it, without queues: :class:`cues.Store` adds them.

Code of Cues uses :attr:`BaseStore.core` (:mod:`cues.storage.store_core`).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self, TypeVar

from cues.base import names
from cues.base.closing import Closing
from cues.errors import InvalidArgument, Unsupported
from cues.native import mypyc_attr
from cues.overrides import override
from cues.storage import datafile, environment, transaction
from cues.storage.datafile import DURABILITIES
from cues.storage.environment import Environment
from cues.storage.format_record import record_of
from cues.storage.lmdb_map import MAP_BYTES, MAP_BYTES_MIN
from cues.storage.store_core import StoreCore

S = TypeVar("S", bound="BaseStore")

WRITER_TIMEOUT_S: Final = 10.0


@mypyc_attr(allow_interpreted_subclasses=True)
class BaseStore(Closing):
    """A handle on the environment of a store: transactions, databases and rows. :class:`cues.Store` adds its queues."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        durability: str | None = None,
        map_size: int | None = None,
        readonly: bool = False,
        *,
        max_map_size: int | None = None,
        min_free: int | None = None,
        writer_timeout_s: float = WRITER_TIMEOUT_S,
    ) -> None:
        if os.name != "posix":
            raise Unsupported(
                "Cues runs on Linux and macOS; on Windows it runs inside WSL.",
                "install WSL (wsl --install) and run Cues inside it.",
            )
        if durability is not None and durability not in DURABILITIES:
            raise InvalidArgument(f"Unknown durability {durability!r}.", "pass 'disk' or 'process'.")
        if map_size is not None and (not isinstance(map_size, int) or map_size < MAP_BYTES_MIN):
            raise InvalidArgument(
                f"map_size is {map_size!r}.", f"pass a number of bytes, at least {MAP_BYTES_MIN} (1 MiB)."
            )
        least = map_size or MAP_BYTES_MIN
        if max_map_size is not None and (not isinstance(max_map_size, int) or max_map_size < least):
            raise InvalidArgument(
                f"max_map_size is {max_map_size!r}.",
                f"pass a number of bytes, at least {least}, or leave it out: then the disk is the limit.",
            )
        if min_free is not None and (not isinstance(min_free, int) or min_free < 0):
            raise InvalidArgument(
                f"min_free is {min_free!r}.", "pass a number of bytes; 0 uses the disk to its end; None is the default."
            )
        shared = environment.acquire(
            Path(path),
            durability,
            min(MAP_BYTES, max_map_size) if map_size is None and max_map_size is not None else map_size,
            max_map_size,
            readonly,
            writer_timeout_s,
            lambda shared: internal_handle(type(self), shared).check(),
        )
        if min_free is not None and not readonly:
            shared.allocation.min_free = min_free
        self.readonly = readonly
        self.path: str = str(path)
        self.core = StoreCore(shared, self.path, readonly)

    @property
    def durability(self) -> str:
        """The durability with which the store was made: ``"disk"`` or ``"process"``."""
        return self.core.environment.durability

    @property
    def id(self) -> bytes:
        """The id of the store: 64 random bits, drawn when it was made."""
        return self.core.environment.id

    @property
    def directory(self) -> str:
        """The absolute path. :attr:`path` is the path as given, relative to the current directory at the opening."""
        return str(self.core.environment.path)

    @property
    def map_size(self) -> int:
        """The size of the map, in bytes. It grows when it is full."""
        self.core.check_open()
        return int(self.core.environment.info()["map_size"])

    @property
    def max_map_size(self) -> int | None:
        """The size beyond which the map does not grow, in bytes; None if only the disk is the limit."""
        with self.core.view() as txn:
            limit: int | None = record_of(txn).get("max_map_size")
        return limit

    @property
    def closed(self) -> bool:
        return self.core.closed

    # --- queues ---

    def queues(self, all: bool = False) -> list[str]:
        """Return the names of the store's queues, sorted; with ``all`` the try logs of processors too."""
        with self.core.view() as txn:
            return [name for name, *_ in transaction.named_rows(txn, names.queue_key("")) if all or "." not in name]

    def check(self) -> list[str]:
        """Check the whole store and return its problems, one sentence each. A handle without queues finds none."""
        return []

    def info(self) -> dict[str, int]:
        """Sizes in bytes: ``map`` (the bound), ``used`` (pages ever used), ``disk`` (allocated blocks)."""
        self.core.check_open()
        info = self.core.environment.info()
        return {
            "map": int(info["map_size"]),
            "used": (int(info["last_pgno"]) + 1) * datafile.PAGE_BYTES,
            "disk": os.stat(self.core.environment.path / "data.mdb").st_blocks * 512,
        }

    def sync(self) -> None:
        """Make all commits so far durable, whatever the durability of the store."""
        self.core.check_open()
        if self.core.environment.durability != "disk":  # there each commit is durable by itself
            self.core.environment.sync()

    # --- end ---

    @override
    def close(self) -> None:
        """Close this handle; blocked reads through it end with :class:`Closed`. Closing again does nothing."""
        self.core.close()

    @override
    def __enter__(self) -> Self:
        self.core.check_open()
        return self

    @override
    def __repr__(self) -> str:
        state = "closed" if self.closed else self.durability
        return f"<cues.Store {self.path} {state}>"


def internal_handle(kind: type[S], environment: Environment, transact: Callable[..., Any] | None = None) -> S:
    """Return a handle for internal use: it is not counted as a user, and rings no doorbell."""
    handle = kind.__new__(kind)
    handle.path = str(environment.path)
    handle.readonly = transact is None
    handle.core = StoreCore(environment, handle.path, handle.readonly, transact=transact, rings=False)
    return handle
