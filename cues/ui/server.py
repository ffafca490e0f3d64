"""The server of the page: routes, live events, and the address.

    GET  /                 the page            /static/…     its files          POST /login    the token, for a cookie
    GET  /api/overview     processors, queues, groups, workers, problems
    GET  /api/events       the same, sent whenever it was measured again (server-sent events)
    GET  /api/graph        the picture: nodes and edges with their places
    GET  /api/history      ?processor= &span=
    GET  /api/messages     ?queue= &at= &older= &count= &where=
    GET  /api/message      ?queue= &partition= &index= &offset=
    GET  /api/became       ?queue= &partition= &index=
    GET  /api/steps        ?processor= &count=
    GET  /api/state        ?processor= &key= &after= &count=
    GET  /api/errors       ?processor= &count= &settled=
    POST /api/redrive      {"queue", "partition", "index"} or {"processor", "cause"}; with --allow-write, X-Cues: 1
    POST /api/discard      the same, and "reason"

One thread measures the overview, about once a second and only while somebody looks; all clients get that one. A client
that does not read gets the newest overview when it reads again, and nothing is kept for it. The server is a process
of its own (:mod:`cues.ui.process`) when a run has it, so nothing that a client does takes time from the graph.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from importlib import resources
from typing import Any, Final
from urllib.parse import parse_qs, urlencode

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route

from cues import jsontext
from cues.errors import CuesError, InvalidArgument
from cues.processors import serving as guards
from cues.ui import search
from cues.ui.change import Changes
from cues.ui.guard import HEADERS, Guard, Refusal, token_of
from cues.ui.look import Look
from cues.ui.text import safe

EVERY_S: Final = 1.0
"""Seconds between two measurements of the overview."""
_COST: Final = 4
"""A measurement that takes long is followed by an idle time of this many times its length."""
CLIENTS_MAX: Final = 64
"""Most clients of live events."""
_PING_S: Final = 15.0
_BODY_BYTES_MAX: Final = 64 << 10
_BODY_S: Final = 10.0
"""Seconds in which the body of a request must arrive."""
_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


class Hub:
    """Measures the overview while clients wait for it, and gives all of them the newest."""

    def __init__(self, look: Look, can_write: bool) -> None:
        self._look = look
        self._can_write = can_write
        self._guard = threading.Lock()
        self._text = ""
        self._measured_at = -EVERY_S
        self._cost_s = 0.0
        self._version = 0
        self._clients = 0
        self._changed = asyncio.Condition()
        self._task: asyncio.Task[None] | None = None

    def overview(self) -> str:
        """The overview as JSON, at most :data:`EVERY_S` old; measured by one thread at a time."""
        with self._guard:
            began = time.monotonic()
            if began - self._measured_at > EVERY_S * 0.8:
                try:
                    seen = self._look.overview() | {"can_write": self._can_write}
                except CuesError as error:
                    seen = {"failed": safe(error.message), "time": time.time()}
                self._text = encoded(seen)
                self._cost_s = time.monotonic() - began
                self._measured_at = began
            return self._text

    async def follow(self) -> AsyncIterator[str]:
        """The overviews, as server-sent events."""
        if self._clients >= CLIENTS_MAX:
            raise Refusal(503, f"More than {CLIENTS_MAX} pages are open.")
        self._clients += 1
        try:
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._measure())
            known = -1
            yield "retry: 2000\n\n"
            while True:
                async with self._changed:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(_PING_S):
                            await self._changed.wait_for(lambda: self._version != known and self._text != "")
                    version, text = self._version, self._text
                yield f"event: overview\ndata: {text}\n\n" if version != known else ": still here\n\n"
                known = version
        finally:
            self._clients -= 1

    async def _measure(self) -> None:
        while self._clients:
            await run_in_threadpool(self.overview)
            async with self._changed:
                self._version += 1
                self._changed.notify_all()
            await asyncio.sleep(max(EVERY_S, _COST * self._cost_s))


class Application:
    """The ASGI application: the guard, then the routes. The server adds the guard's headers to every answer."""

    def __init__(self, look: Look, guard: Guard, changes: Changes | None = None) -> None:
        self._guard = guard
        self._look = look
        self.searcher = search.Searcher(look.settings(), search.LIMIT_S)
        self.hub = Hub(look, guard.allow_write and changes is not None)
        ask = self._ask
        routes = [
            Route("/", self._page),
            Route("/login", self._login, methods=["POST"]),
            Route("/static/{name}", self._static),
            Route("/api/overview", self._overview),
            Route("/api/events", self._events),
            Route("/api/graph", ask(look.graph)),
            Route("/api/history", ask(look.history, processor=str, span=str)),
            Route("/api/messages", ask(self._messages, queue=str, at=str, older=_flag, count=int, where=str)),
            Route("/api/message", ask(look.message, queue=str, index=int, partition=int, offset=int)),
            Route("/api/became", ask(look.became, queue=str, index=int, partition=int)),
            Route("/api/steps", ask(look.steps, processor=str, count=_page)),
            Route("/api/state", ask(look.state, processor=str, key=str, after=_hex, count=_page)),
            Route("/api/errors", ask(look.errors, processor=str, count=_page, settled=_flag)),
        ]
        if changes is not None:
            routes += [
                Route("/api/redrive", self._change(changes.redrive), methods=["POST"]),
                Route("/api/discard", self._change(changes.discard), methods=["POST"]),
            ]
        self._app = Starlette(routes=routes)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            self._guard.check(scope)
        except Refusal as refusal:
            response: Response = answer_error(refusal.status, refusal.text)
            if refusal.status == 401 and scope["path"] == "/":
                response = _file("login.html", 401)
            await response(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _page(self, request: Request) -> Response:
        if self._guard.token is not None and any(map(self._guard.accepts, token_of(dict(request.scope)))):
            return self._welcome()
        return _file("index.html")

    async def _login(self, request: Request) -> Response:
        try:
            body = await guards.body(request, _BODY_BYTES_MAX, _BODY_S)
        except guards.Refused as refused:
            return _not_taken(refused)
        given = parse_qs(body.decode("latin-1")).get("token", [""])[0].strip()
        if self._guard.token is not None and not self._guard.accepts(given):
            await asyncio.sleep(0.5)
            return _file("login.html", 401)
        return self._welcome()

    def _welcome(self) -> Response:
        response = RedirectResponse("/", 303)
        if self._guard.token is not None:
            response.set_cookie(self._guard.cookie_name, self._guard.cookie, httponly=True, samesite="strict", path="/")
        return response

    async def _static(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC:
            return answer_error(404, "There is no such file.")
        return _file(name)

    async def _overview(self, request: Request) -> Response:
        return Response(await run_in_threadpool(self.hub.overview), media_type="application/json")

    async def _events(self, request: Request) -> Response:
        return StreamingResponse(self.hub.follow(), media_type="text/event-stream")

    def _messages(self, queue: str, where: str = "", **place: Any) -> dict[str, Any]:
        """A page of messages; a search is made in a process that can be ended."""
        if where.strip():
            return self.searcher.messages(queue=queue, where=where, **place)
        return self._look.messages(queue, **place)

    def _ask(self, question: Callable[..., dict[str, Any]], **kinds: Callable[[str], Any]) -> Callable[..., Any]:
        """A route that asks a question with the parameters of the address, in a thread."""

        async def answer(request: Request) -> Response:
            return await _answer(
                question, lambda: {n: _given(n, kinds, text) for n, text in request.query_params.items()}
            )

        return answer

    def _change(self, change: Callable[..., dict[str, Any]]) -> Callable[..., Any]:
        """A route that changes something, with the fields of a JSON object."""

        async def answer(request: Request) -> Response:
            try:
                given = jsontext.decode(await guards.body(request, _BODY_BYTES_MAX, _BODY_S))
            except guards.Refused as refused:
                return _not_taken(refused)
            except ValueError:
                given = None
            if not isinstance(given, dict):
                return answer_error(400, "The question is not a JSON object.")
            return await _answer(change, lambda: given)

        return answer


async def _answer(question: Callable[..., dict[str, Any]], given: Callable[[], dict[str, Any]]) -> Response:
    """Ask in a thread; errors are JSON too, with a status that says whose they are."""
    try:
        result = await run_in_threadpool(question, **given())
        return Response(await run_in_threadpool(encoded, result), media_type="application/json")
    except Exception as error:
        refusal = error if isinstance(error, Refusal) else search.refusal_of(error)
        if refusal is None:
            raise
        return answer_error(refusal.status, refusal.text, refusal.hint)


def _given(name: str, kinds: dict[str, Callable[[str], Any]], text: str) -> Any:
    if name not in kinds:
        raise InvalidArgument(f"There is no parameter {safe(name)!r}.", f"use {', '.join(kinds) or 'none'}.")
    try:
        return kinds[name](text)
    except ValueError:
        raise InvalidArgument(f"{name}={safe(text[:80])!r} is not possible.", "give a number.") from None


def _flag(text: str) -> bool:
    return text not in ("", "0", "false")


def _page(text: str) -> int:
    return max(1, min(200, int(text)))


def _hex(text: str) -> str:
    bytes.fromhex(text)
    return text


def encoded(value: Any) -> str:
    """JSON in ASCII, so that no byte of an answer is read as anything else."""
    return jsontext.show(value, compact=True, ascii_only=True)


def answer_error(status: int, text: str, hint: str = "") -> JSONResponse:
    return JSONResponse({"error": safe(text), "try": safe(hint)}, status)


def _not_taken(refused: guards.Refused) -> JSONResponse:
    answer = answer_error(refused.status, f"{str(refused).capitalize()}.")
    answer.headers["Connection"] = "close"  # the rest of the body is not read
    return answer


_FOLDER: Final = resources.files("cues.ui") / "static"
STATIC: Final = frozenset(each.name for each in _FOLDER.iterdir() if each.name.rpartition(".")[2] in _TYPES)


def _file(name: str, status: int = 200) -> Response:
    kind = _TYPES[name.rpartition(".")[2]]
    return Response((_FOLDER / name).read_bytes(), status, media_type=kind)


# --- serving --------------------------------------------------------------------------------------


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises :class:`InvalidArgument` for an address that cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            hint = "give another port, or --port 0 for a free one."
            raise InvalidArgument(f"Port {port} of {host} is in use.", hint) from None
        raise InvalidArgument(
            f"The page cannot be served at {host}:{port}: {error}.", "give another address."
        ) from None
    return listener


def address_of(listener: socket.socket, guard: Guard) -> str:
    """The address of the page, with its token."""
    host = f"[{guard.host}]" if ":" in guard.host else guard.host
    shown = {"0.0.0.0": socket.gethostname(), "[::]": socket.gethostname()}.get(host, host)
    query = f"?{urlencode({'token': guard.token})}" if guard.token else ""
    return f"http://{shown}:{listener.getsockname()[1]}/{query}"


class Server:
    """A server on a listening socket; ``run`` blocks until :meth:`stop` or a signal."""

    def __init__(self, look: Look, guard: Guard, listener: socket.socket, changes: Changes | None = None) -> None:
        self._look = look
        self._listener = listener
        self._application = Application(look, guard, changes)
        config = uvicorn.Config(
            guards.guarded(self._application, HEADERS),
            http=guards.protocol(guards.HEAD_S),
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            lifespan="off",
            ws="none",
            timeout_graceful_shutdown=1,
            limit_concurrency=4 * CLIENTS_MAX,
        )
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        try:
            self._server.run(sockets=[self._listener])
        finally:
            self._application.searcher.close()
            self._look.close()

    def stop(self) -> None:
        """End the server; called from any thread."""
        self._server.should_exit = True
        self._server.force_exit = True


@contextlib.contextmanager
def serving(look: Look, guard: Guard, listener: socket.socket, changes: Changes | None = None) -> Iterator[Server]:
    """A server in a thread of this process, for tests and notebooks."""
    server = Server(look, guard, listener, changes)
    thread = threading.Thread(target=server.run, name="cues page", daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(30)
