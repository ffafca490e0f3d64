"""A real MariaDB on loopback that tests start, stop, kill and start again on its data.

It is the server of the system, if it is installed (Debian: apt-get install mariadb-server); no package of PyPI has it.
The service that Debian starts is not used: each server here has its own directory and port.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ports import free_port

MARIADB = shutil.which("mariadbd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin:/usr/libexec")
_INSTALL = shutil.which("mariadb-install-db")
MISSING = "MariaDB is not on this machine: apt-get install mariadb-server"

BINLOG: Final = (
    "log-bin=binlog", "binlog-format=ROW", "binlog-row-image=FULL", "binlog-row-metadata=FULL", "server-id=1",
)  # fmt: skip
"""Options of a server whose changes can be read."""
START_TIMEOUT_S: Final = 180


class MariaDB:
    """A server in a directory; ``options`` are those of mariadbd, without their hyphens: ``"sql-mode="``."""

    def __init__(self, directory: Path, *options: str) -> None:
        assert MARIADB is not None and _INSTALL is not None
        self.directory, self.options = directory, options
        self.port = free_port()
        self._made = 0
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            os.chown(directory, nobody.pw_uid, nobody.pw_gid)
        done = subprocess.run(
            [
                _INSTALL, "--no-defaults", f"--datadir={directory}/data", "--auth-root-authentication-method=normal",
                "--skip-test-db", "--innodb-log-file-size=16M",
            ],
            capture_output=True, text=True, cwd=directory, env={**os.environ, "TMPDIR": str(directory)}, **self._as,
        )  # fmt: skip
        assert done.returncode == 0, f"{done.stdout}{done.stderr}"
        self.start()
        with self.connect() as session:
            session.cursor().execute("create user cues@localhost ")
            session.cursor().execute("grant all on *.* to cues@localhost with grant option")

    def start(self, *options: str) -> None:
        """Start the server, again on the same port with the data that is on the disk, and wait until it answers."""
        with open(self.directory / "log", "ab") as log:
            self._process = subprocess.Popen(
                [
                    str(MARIADB), "--no-defaults", f"--datadir={self.directory}/data", f"--port={self.port}",
                    "--bind-address=127.0.0.1", f"--socket={self.directory}/s", f"--tmpdir={self.directory}",
                    "--innodb-log-file-size=16M",
                    "--innodb-buffer-pool-size=64M", "--innodb-flush-method=nosync", "--sync-binlog=0",
                    # A server that starts removes the temporary tables of others in its tmpdir.
                    # What a killed process leaves is what the tests are about; the disk of the machine is not.
                    f"--pid-file={self.directory}/pid",
                    *(f"--{option}" for option in (*self.options, *options)),
                ],
                stdout=log, stderr=log, cwd=self.directory, **self._as,
            )  # fmt: skip
        import pymysql

        deadline = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.connect().close()
                return
            except pymysql.err.OperationalError:
                told = (self.directory / "log").read_text(errors="replace")
                assert self._process.poll() is None and time.monotonic() < deadline, f"MariaDB did not start:\n{told}"
                time.sleep(0.05)

    def end(self, signal_number: int = signal.SIGTERM) -> None:
        """End the server: SIGTERM stops it in order, SIGKILL does not."""
        self._process.send_signal(signal_number)
        self._process.wait(60)

    def connect(self, database: str | None = None, **options: Any) -> Any:
        """A connection of the administrator, which commits each statement."""
        import pymysql

        return pymysql.connect(
            unix_socket=f"{self.directory}/s", user="root", database=database, autocommit=True, **options
        )

    def database(self, options: str = "character set utf8mb4") -> str:
        """Make a database; return a URL for SQLAlchemy."""
        self._made += 1
        name = f"test_{self._made}"
        with self.connect() as session:
            session.cursor().execute(f"create database {name} {options}")
        return f"mysql+pymysql://cues@127.0.0.1:{self.port}/{name}"


@contextmanager
def running(*options: str) -> Iterator[MariaDB]:
    """A server for the length of the block."""
    directory = Path(tempfile.mkdtemp(prefix="cues-my-", dir="/tmp"))  # short: a socket's path has 107 characters
    server = None
    try:
        server = MariaDB(directory, *options)
        yield server
    finally:
        if server is not None:
            server.end(signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)
