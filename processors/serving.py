"""Guards of servers that strangers reach: the webhook, the receiver of a link, and the page of ``cues ui``.

    protocol      uvicorn's protocol with a limit of time for the head of a request, which uvicorn does not have
    body          the body of a request, whole, or refused: too large, too slow, broken off
    decoded       the body without its compression, or refused: a small one may become a large one
    guarded       an application whose answers have headers, and that refuses a request with two lengths
    from_browser  whether a page in a browser sends a request
    said          an answer in JSON, whatever texts of strangers are in it

A length that a client announces is a hint: it may lie, and a chunked body has none. So the bytes are counted.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Mapping
from typing import Any, Final

from cues import jsontext
from cues.overrides import override

HEAD_S: Final = 5.0
"""Seconds in which the head of a request must arrive, for a page."""


_WINDOWS: Final = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""The argument of zlib for each content encoding."""


HEADERS: Final = {"x-content-type-options": "nosniff", "cache-control": "no-store"}
"""Headers of every answer of a server of a source."""


class Refused(Exception):
    """Raised for a body that is not taken: ``status`` is that of the answer, after which the connection is closed."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


async def body(request: Any, bytes_max: int, within_s: float) -> bytes:
    """Return the body of a starlette request; no more than ``bytes_max`` and a piece of it is ever in memory."""
    from starlette.requests import ClientDisconnect

    announced = request.headers.get("content-length", "")
    kept = bytearray()
    try:
        async with asyncio.timeout(within_s):
            if not (announced.isdecimal() and int(announced) > bytes_max):
                async for piece in request.stream():
                    kept += piece
                    if len(kept) > bytes_max:
                        break
                else:
                    return bytes(kept)
    except TimeoutError:
        raise Refused(408, f"the request took longer than {within_s:g} s") from None
    except ClientDisconnect:
        raise Refused(400, "the connection was closed") from None
    raise Refused(413, f"the body has more than {bytes_max} bytes")


def decoded(body: bytes, headers: Mapping[str, str], bytes_max: int) -> bytes:
    """Return a body without its ``Content-Encoding``; ``headers`` has names in small letters.

    Raises :class:`Refused` for one that is not known here, that is damaged, or that is larger than ``bytes_max``.
    """
    encoding = headers.get("content-encoding", "").strip().lower() or "identity"
    if encoding == "identity":
        return body
    if encoding not in _WINDOWS:
        raise Refused(415, f"the content encoding {encoding[:40]!r} is not known here; use gzip or deflate")
    unpacker = zlib.decompressobj(_WINDOWS[encoding])
    try:
        plain = unpacker.decompress(body, bytes_max + 1)
    except zlib.error as error:
        raise Refused(400, f"the body is not {encoding}: {error}") from None
    if len(plain) > bytes_max:
        raise Refused(413, f"the body has more than {bytes_max} bytes")
    if not unpacker.eof or unpacker.unused_data:
        raise Refused(400, f"the body is not {encoding}, whole and alone")
    return plain


def guarded(application: Any, headers: Mapping[str, str]) -> Any:
    """Return an ASGI application all of whose answers have these headers, and that answers 400 to two lengths.

    A request with ``Content-Length`` and ``Transfer-Encoding`` is read to the end of the second one here. A proxy that
    believes the first one would take the rest for a request of its own (request smuggling).
    """
    from starlette.responses import PlainTextResponse

    raw = {name.encode(): value.encode() for name, value in headers.items()}

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def send_with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [pair for pair in message["headers"] if pair[0] not in raw] + [*raw.items()]
            await send(message)

        if {b"content-length", b"transfer-encoding"} <= {name for name, _ in scope["headers"]}:
            text = "The request has Content-Length and Transfer-Encoding."
            await PlainTextResponse(text, 400, {"Connection": "close"})(scope, receive, send_with_headers)
        else:
            await application(scope, receive, send_with_headers)

    return answer


def said(status: int, headers: Mapping[str, str], facts: Mapping[str, Any]) -> Any:
    """Return an answer of starlette in JSON. It is ASCII, because UTF-8 has no form for a lone surrogate."""
    from starlette.responses import Response

    text = jsontext.show(facts, compact=True, ascii_only=True)
    return Response(text, status, dict(headers), media_type="application/json")


def from_browser(headers: Mapping[str, str]) -> bool:
    """Return whether a page in a browser sends the request: it says so itself, and no page can prevent it."""
    return "origin" in headers or headers.get("sec-fetch-site", "none") != "none"


def protocol(limit_s: float) -> Any:
    """Return a class for ``uvicorn.Config(http=…)`` that closes a connection whose next head takes longer."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        _head_timer: asyncio.TimerHandle | None = None

        @override
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.access_log = False  # whatever a program does to uvicorn's loggers: a query may have a token
            self._watch()

        @override
        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        @override
        def connection_lost(self, error: Exception | None) -> None:
            self._stop()
            super().connection_lost(error)

        def _watch(self) -> None:
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop()
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(limit_s, self.transport.close)

        def _stop(self) -> None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None

    return Protocol
