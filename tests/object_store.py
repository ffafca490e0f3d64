"""An S3 server on loopback, with puts on a condition: moto, as a process of its own."""

from __future__ import annotations

import contextlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from ports import free_port


@contextlib.contextmanager
def running() -> Iterator[dict[str, str]]:
    """The variables for its clients."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 180
        while not _answers(port):
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }
    finally:
        server.kill()
        server.wait()


@contextlib.contextmanager
def bucket(name: str) -> Iterator[dict[str, str]]:
    """A server with one bucket. Its variables are in the environment meanwhile."""
    with running() as variables, pytest.MonkeyPatch.context() as patch:
        for variable, value in variables.items():
            patch.setenv(variable, value)
        make_bucket(name)
        yield variables


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), 1.0).close()
        return True
    return False


def make_bucket(name: str) -> None:
    address = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    client = http.client.HTTPConnection(address, timeout=30)
    client.request("PUT", f"/{name}", headers={"Content-Length": "0"})
    assert client.getresponse().status == 200
    client.close()
