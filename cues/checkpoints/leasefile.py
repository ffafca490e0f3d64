"""The lease of a checkpoint as a file: replaced as a whole, and not synced, because it need not survive a power cut."""

from __future__ import annotations

import os
import threading
from pathlib import Path


class LeaseFile:
    """The file at ``path``. Safe from any thread and process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> str:
        """Return the text; empty if there is none."""
        try:
            return self._path.read_text()
        except FileNotFoundError:
            return ""

    def write(self, text: str) -> None:
        """Replace the text. An empty text deletes the file."""
        if not text:
            self._path.unlink(missing_ok=True)
            return
        following = self._path.with_name(f"{self._path.name}.{os.getpid()}-{threading.get_ident()}")
        following.write_text(text)
        following.replace(self._path)
