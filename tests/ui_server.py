"""A real server of the page on loopback, and requests to it."""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from cues.operate.shape import Shape
from cues.ui.change import Changes
from cues.ui.guard import Guard
from cues.ui.look import look_of, settings_of
from cues.ui.server import listen, serving


class Page:
    """The address of a server."""

    def __init__(self, port: int) -> None:
        self.port = port
        self.url = f"http://127.0.0.1:{port}/"

    def request(
        self, path: str, method: str = "GET", body: str | None = None, **headers: str
    ) -> tuple[int, dict[str, str], str]:
        """Status, headers in lower case and body; an underscore in a header's name stands for a hyphen."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            given = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body, given)
            answer = connection.getresponse()
            text = answer.read().decode()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, text
        finally:
            connection.close()

    def ask(self, what: str, **given: Any) -> Any:
        status, _, text = self.request(f"/api/{what}?{urlencode(given)}")
        assert status == 200, text
        return json.loads(text)

    def refusal(self, what: str, **given: Any) -> tuple[int, str]:
        status, _, text = self.request(f"/api/{what}?{urlencode(given)}")
        return status, json.loads(text)["error"]


@contextlib.contextmanager
def page_of(
    store: Path, shape: Shape | None = None, token: str | None = None, target: str | None = None
) -> Iterator[Page]:
    """Serve a store; with a ``target``, changes are allowed."""
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    guard = Guard.of("127.0.0.1", port, token, target is not None)
    changes = None if target is None else Changes(target, None)
    with serving(look_of(settings_of(str(store), shape, "a store")), guard, listener, changes):
        yield Page(port)
