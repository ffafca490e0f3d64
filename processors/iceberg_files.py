"""Files of Iceberg tables in a local warehouse, written so that they survive a power cut.

pyiceberg syncs nothing. Its catalog does: a catalog in SQLite commits durably. So after a power cut the catalog would
name files that are lost or cut. Here each file is synced when it is closed, with its name, and so before the commit of
the catalog that names it. pyiceberg loads the class by its name (the property ``py-io-impl``, see iceberg.py).
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow.fs import LocalFileSystem
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO

from cues.checkpoints import sync_file
from cues.overrides import override

_BUFFER_BYTES = 1 << 20


class SyncedFileIO(PyArrowFileIO):
    """pyiceberg's files, of which local ones are on the disk when they are closed."""

    @override
    def new_output(self, location: str) -> PyArrowFile:
        made = super().new_output(location)
        scheme, _, path = self.parse_location(location, self.properties)
        return PyArrowFile(location, path, _SyncedFiles()) if scheme == "file" else made


class _SyncedFiles(LocalFileSystem):  # type: ignore[misc]
    def open_output_stream(self, path: str, *_: Any, **__: Any) -> Any:
        return pa.BufferedOutputStream(pa.PythonFile(_SyncedFile(path), "w"), _BUFFER_BYTES)


class _SyncedFile(io.FileIO):
    def __init__(self, path: str) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        super().__init__(path, "wb")

    @override
    def close(self) -> None:
        if not self.closed:
            sync_file(str(self.name))
        super().close()
