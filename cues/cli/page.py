"""The page in the browser, for the commands that serve it: its address, its settings, and the page of a run.

Its packages are an extra, and a run without a page loads none of it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

import click

from cues.cli.options import WrongUsage
from cues.errors import NotInstalled
from cues.overrides import override

if TYPE_CHECKING:
    from cues.graphs.graph import Graph

HOST: Final = "127.0.0.1"
PORT: Final = 8420


class Address(click.ParamType):  # type: ignore[type-arg]
    """The address of a page: ``PORT``, ``HOST`` or ``HOST:PORT``."""

    name = "ADDRESS"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        text = str(value)
        host, colon, port = text.rpartition(":")
        if text.isdecimal():
            host, port = HOST, text
        elif not colon or text.endswith("]"):
            host, port = text, str(PORT)
        if text.endswith(".py") or "/" in text or not port.isdecimal() or int(port) > 65535:
            raise WrongUsage(f"--ui {text}: that is not an address.", "cues run graph.py --ui, or --ui 127.0.0.1:8420")
        return host.strip("[]") or HOST, int(port)


def need() -> None:
    """Raise :class:`NotInstalled` if the packages of the page are missing."""
    missing = [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]
    if missing:
        raise NotInstalled(f"The page needs {' and '.join(missing)}.", "run pip install 'cues-streams[ui]'.")


def settings_of(graph: Graph | None, place: str, title: str) -> dict[str, Any]:
    """The settings of a page, as plain data for its process: the store or directory, and the shape of the graph."""
    shape = importlib.import_module("cues.operate.shape").shape_of_graph(graph) if graph is not None else None
    looks = importlib.import_module("cues.ui.look")
    settings: dict[str, Any] = looks.settings_of(place, shape, graph.id if graph is not None else title)
    return settings


def access(host: str, port: int, allow_write: bool, token: str | None) -> dict[str, Any]:
    """The settings of a page that say who may use it; a token is made where one is needed and none is given."""
    guard = importlib.import_module("cues.ui.guard")
    if token is not None:
        guard.check_token(token)
    elif not guard.is_loopback(host):
        token = guard.new_token()
    return {"host": host, "port": port, "token": token, "allow_write": allow_write}


@contextlib.contextmanager
def of_run(graph: Graph, place: str, at: tuple[str, int], say: Callable[[str], None]) -> Iterator[None]:
    """Serve the page of a run from a process of its own, until the block ends."""
    process = importlib.import_module("cues.ui.process")
    token = os.environ.get("CUES_UI_TOKEN")
    page = process.PageProcess(settings_of(graph, place, "") | access(*at, False, token), say)
    try:
        yield
    finally:
        page.close()
