"""The lease of a checkpoint as a file: a rename replaces it. No sync: a lease need not survive a power cut."""

from __future__ import annotations

from pathlib import Path

from cues.storage import door


class LeaseFile:
    """The file at ``path``. Safe from any thread and process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self) -> str:
        """Return the text; empty if there is none."""
        try:
            return door.read_text(self._path)
        except FileNotFoundError:
            return ""

    def write(self, text: str) -> None:
        """Replace the text. An empty text deletes the file."""
        if not text:
            self._path.unlink(missing_ok=True)
            return
        door.replace(self._path, text)
