"""The guard of the page: token, host and origin of a request, and the headers of every answer.

A request is refused

1.  with 403, if its ``Host`` is not an address or a name of this machine: a page of another site whose name was pointed
    here (DNS rebinding) sends its own name;
2.  with 403, if a browser says that another site sends it (``Sec-Fetch-Site``, ``Origin``). Only the page itself may be
    opened by a link from another site; it holds no data;
3.  with 401, if there is a token and the request has neither the token nor the cookie that stands for it;
4.  with 403, if it writes, and writing is not allowed, or the header ``X-Cues`` is missing: a form or a script of
    another site cannot send it without being asked for permission first, which is refused.

The token is compared in constant time. The cookie is derived from the token, so it is void when the token changes. It
is HttpOnly and SameSite=Strict.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from dataclasses import field
from http.cookies import CookieError, SimpleCookie
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

from cues.base.data import dataclass
from cues.base.hosts import is_loopback, is_ours
from cues.errors import InvalidArgument

TOKEN_CHARACTERS_MIN: Final = 16
_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Final = {
    "content-security-policy": _POLICY,
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",  # with no-referrer the origin of the form of the token would be null
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}
_OPEN: Final = ("/static/", "/login")
"""Paths that need no token: they hold no data."""


class Refusal(Exception):
    """A refused request: its status, and a sentence for the person who sent it."""

    def __init__(self, status: int, text: str, hint: str = "") -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.hint = hint


def new_token() -> str:
    return secrets.token_urlsafe(24)


def check_token(token: str) -> str:
    """Return a token that a user chose. Raises :class:`InvalidArgument` if it is short enough to be guessed."""
    if len(token) < TOKEN_CHARACTERS_MIN or not token.isascii() or not token.isprintable() or " " in token:
        raise InvalidArgument(
            f"The token has {len(token)} characters; at least {TOKEN_CHARACTERS_MIN} are needed, ASCII without spaces.",
            "give a longer one, or none: then one is made and printed.",
        )
    return token


@dataclass(frozen=True)
class Guard:
    """The rules of one server."""

    host: str
    """The address that it listens on."""
    port: int
    token: str | None
    allow_write: bool = False
    names: frozenset[str] = field(default_factory=frozenset)
    """Names of this machine, in lower case, besides its addresses."""

    @staticmethod
    def of(host: str, port: int, token: str | None, allow_write: bool) -> Guard:
        names = {"localhost", host.lower()} if is_loopback(host) else {host.lower(), socket.gethostname().lower()}
        return Guard(host, port, token, allow_write, frozenset(names))

    @property
    def cookie_name(self) -> str:
        """Cookies of a host are shared by its ports, so the name has the port."""
        return f"cues_{self.port}"

    @property
    def cookie(self) -> str:
        assert self.token is not None
        return hmac.new(self.token.encode(), b"cues page cookie", hashlib.sha256).hexdigest()

    def accepts(self, token: str) -> bool:
        """Compare a token in constant time."""
        return self.token is not None and hmac.compare_digest(token.encode(), self.token.encode())

    def check(self, scope: dict[str, Any]) -> None:
        """Raise :class:`Refusal` if the request may not be answered."""
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        path, method = scope["path"], scope["method"]
        host = headers.get("host", "")
        if not is_ours(host, self.names):
            raise Refusal(403, "The page was asked for under a name that is not this machine's.")
        opens_page = (
            method == "GET"
            and path == "/"
            and headers.get("sec-fetch-mode") == "navigate"
            and headers.get("sec-fetch-dest") == "document"
        )
        if headers.get("sec-fetch-site", "none") not in ("same-origin", "none") and not opens_page:
            raise Refusal(403, "Another site sent this request.")
        origin = headers.get("origin")
        if origin is not None and urlsplit(origin).netloc.lower() != host.lower():
            raise Refusal(403, "Another site sent this request.")
        if method not in ("GET", "HEAD") and path != "/login":
            if not self.allow_write:
                raise Refusal(403, "The page is read-only: start it with --allow-write.")
            if "x-cues" not in headers:
                raise Refusal(403, "A request that changes something needs the header X-Cues.")
        if self.token is not None and not path.startswith(_OPEN) and not self._known(headers, scope):
            raise Refusal(401, "A token is needed: the command that serves the page has printed it.")

    def _known(self, headers: dict[str, str], scope: dict[str, Any]) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.accepts(given.strip()):
            return True
        if scope["path"] == "/" and any(self.accepts(token) for token in token_of(scope)):
            return True
        try:
            cookies = SimpleCookie(headers.get("cookie", ""))
        except CookieError:
            return False
        mine = cookies.get(self.cookie_name)
        return mine is not None and hmac.compare_digest(mine.value.encode(), self.cookie.encode())


def token_of(scope: dict[str, Any]) -> list[str]:
    """The token in the address of the page."""
    return parse_qs(scope["query_string"].decode("latin-1")).get("token", [])[:1]
