"""Secrets while a graph runs: an error of a server, or of a connection to it, shows none of them.

The table is that of :mod:`test_secrets`: each ready-made source and sink that takes a secret gets one, and the address
of nobody, or of a server that answers each request with a refusal. No log record, error, status or failed message of
the run has the secret in it.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_processors_docs import declared, loaded
from test_raw_errors import DECLARATIONS
from test_secrets import SECRET, cases

import cues
from cues import processors
from cues.cli import app
from cues.errors import CuesError

REFUSAL = b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
READY_MADE = {
    name
    for place in declared().values()
    if processors.facts_of(loaded(place))["Kind"] != "stream"
    for name, (make, _) in DECLARATIONS.items()
    if make is loaded(place)
}
NO_SERVER = {"Webhook", "Receiver"}
"""Servers themselves: they connect to nothing."""
RUNNING = [case for case in cases() if case[0] in READY_MADE - NO_SERVER]


@contextlib.contextmanager
def address(is_there: bool) -> Iterator[str]:
    """An address of this machine: nothing listens there, or a server that refuses whatever it is sent."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{server.getsockname()[1]}"
        if not is_there:
            yield place
            return
        server.listen(50)

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(1)
                    connection.recv(1 << 16)
                    connection.sendall(REFUSAL)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield place
        finally:
            with contextlib.suppress(OSError):
                server.shutdown(socket.SHUT_RDWR)
            server.close()
            thread.join(30)


def aimed(value: Any, place: str) -> Any:
    """A parameter with the address in the place of the host of its URL."""
    if isinstance(value, str) and "://" in value:
        return re.sub(r"(://(?:[^/@]*@)?)[^/?]*", rf"\g<1>{place}", value, count=1)
    return place if value == "s:1" else value


def run(made: Any, store: Path) -> list[str]:
    """Run a source, or a sink with a message, until it stops; return what people are told of it."""
    graph = cues.Graph("g", store=store, durability="process", errors="errors")
    if callable(getattr(made, "sink", None)):
        graph.add(cues.Source("a"))
        graph.add(made.sink("a", outage="stop"))
    else:
        graph.add(cues.Source("a", made, outage="stop"))
    found = []
    try:
        with graph.start() as running:
            if callable(getattr(made, "sink", None)):
                running.send("a", {"a": "x", "k": "k", "id": "i", "g": "g"})
                running.wait_idle(30)
            else:
                running.wait_done(30)
    except CuesError as error:
        found.append("".join(traceback.format_exception(error)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("is_there", [False, pytest.param(True, marks=pytest.mark.long)], ids=["away", "refuses"])
@pytest.mark.parametrize(("name", "parameter", "secret"), RUNNING)
def test_an_error_of_a_run_shows_no_secret(
    name: str, parameter: str, secret: Any, is_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    caplog.set_level(logging.WARNING)
    caplog.set_level(logging.DEBUG, "cues")
    make, given = DECLARATIONS[name]
    with address(is_there) as place:
        options = {key: aimed(value, place) for key, value in {**given, parameter: secret}.items()}
        if "timeout_s" in options:
            options["timeout_s"] = 1
        try:
            made = make(**options)
        except CuesError:  # a place for secrets that the processor refuses: test_secrets.py has its text
            return
        found = run(made, tmp_path / "s")
    for command in ("status", "errors"):
        assert app.run([command, str(tmp_path / "s"), "--json"]) == 0
    printed = capsys.readouterr()
    texts = {"error": "".join(found), "log": caplog.text, "printed": printed.out, "told": printed.err}
    assert texts["error"] or "away" in printed.out, texts
    assert [where for where, text in texts.items() if SECRET in text] == []
