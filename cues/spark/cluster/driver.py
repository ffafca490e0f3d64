"""The objects that the threads of one driver share: the session, the directory, and a bell."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import socket
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cues.base import events
from cues.spark.cluster.files import folder_of

if TYPE_CHECKING:
    from cues.spark.cluster.directory import QueueDirectory
    from cues.spark.cluster.files import Files


class Driver:
    """One driver of one graph."""

    def __init__(
        self,
        session: Any,
        files: Files,
        graph: str,
        system: Any,
        emit: Callable[[events.Event], None],
        pause: Callable[[float], bool],
    ) -> None:
        self.session = session
        self.context = session.sparkContext
        self.files = files
        self.graph = graph
        self.system = system
        self.emit = emit
        self.pause = pause
        self.owner = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(6)}"
        self.work = f"_cues/work/{folder_of(graph)}/{folder_of(self.owner)}"
        self.store_id = self._store_id()
        self.queues: dict[str, QueueDirectory] = {}
        self.closed = False
        self.bell = threading.Condition()
        """Rung when there is something new: messages on a queue, a processor that went idle or stopped."""
        self.rings = 0
        self._names = itertools.count()

    def _store_id(self) -> str:
        name = "_cues/id.json"
        if self.files.read(name) is None:
            self.files.put(name, json.dumps({"id": secrets.token_hex(8)}))
        return str(json.loads(self.files.read(name) or "")["id"])

    def scratch(self) -> str:
        """The name of a folder for one job."""
        return f"{self.work}/{next(self._names):08d}"

    def ring(self) -> None:
        """Wake whoever waits."""
        with self.bell:
            self.rings += 1
            self.bell.notify_all()
