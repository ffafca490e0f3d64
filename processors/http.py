"""The common part of the HTTP processors: answers, failures, rates, ``Retry-After`` and signatures.

    http_sink.py      Requests: a request for each message, as a sink or as a stream
    http_source.py    Poll: items of a resource that is asked again and again
    webhook.py        Webhook: requests of others become messages

    RequestFailed     a request failed for good: its status, and the beginning of the body
    └── TryLater      the same request may succeed later: a status of ``retry_on``, a broken connection, a timeout

They need the extra ``http``: httpx, and starlette and uvicorn for the webhook.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import hmac
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import cues
from cues import imported, jsontext
from cues.arguments import check_number, options_of, path_of, text_of
from cues.checkpoints import sync_names
from cues.errors import Away, InvalidArgument
from cues.overrides import override
from cues.processors.checks import Unshared

RETRY_ON: Final = (408, 425, 429, 500, 502, 503, 504)
"""Statuses after which the same request may succeed later."""

RETRY_AFTER_S_MAX: Final = 300.0
"""Seconds that a ``Retry-After`` of a server can ask for; a longer one counts as this."""

SHOWN_CHARACTERS: Final = 500
"""Characters of a body that an error shows."""

BODY_BYTES_MAX: Final = 16 << 20
"""Bytes of a body that are kept in memory by default."""

SAFE: Final = ("GET", "HEAD")
"""Methods that change nothing: they follow redirects, and have no key."""

_PER_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0}


class RequestFailed(cues.CuesError):
    """Raised for a request that failed, and will not succeed if it is repeated.

    ``url`` is without query, user and password. ``status`` is None if there was no answer; ``body`` is the beginning
    of the answer.
    """

    url: str
    status: int | None
    body: str


class TryLater(RequestFailed, Away):
    """Raised for a request that may succeed later; ``retry_after_s`` is the wait that the server asked for, or 0.

    A processor waits for the server, and makes the request again (``outage=``).
    """


class Answer(NamedTuple):
    """The answer of a server. The names of ``headers`` are in small letters."""

    status: int
    url: str
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The body as text, by the charset of its content type; by UTF-8 if that is missing, unknown or no charset."""
        charset = re.search(r"charset=\"?([\w.:-]+)", self.headers.get("content-type", ""))
        try:
            return self.body.decode(charset[1] if charset else "utf-8", "replace")
        except (LookupError, UnicodeError):  # such as "idna", a codec that replaces nothing
            return self.body.decode("utf-8", "replace")

    def json(self) -> Any:
        """The body as JSON. Raises :class:`RequestFailed` if it is none."""
        try:
            return jsontext.decode(self.body)
        except ValueError as error:
            raise failed(
                RequestFailed, f"{shown_url(self.url)} answered {self.status} with a body that is not JSON: {error}",
                "give a function that reads this body.", self,
            ) from None  # fmt: skip


def package(*names: str) -> Any:
    """Import packages of the extra ``http``, and return the first. Raises :class:`cues.errors.NotInstalled`."""
    return imported.package(f"The HTTP processors need {' and '.join(names)}", "http", *names)


def check_url(url: str) -> None:
    """Raise :class:`InvalidArgument` for a text that is not the whole URL of a resource."""
    if not isinstance(url, str):
        raise InvalidArgument(f"url={url!r:.60} is not the URL of a resource.", "give https://host/path.")
    try:
        parts = urlsplit(url)
        if parts.scheme in ("http", "https") and parts.netloc:
            return
    except (ValueError, AttributeError):
        pass
    raise InvalidArgument(f"{shown_url(url)!r} is not the URL of a resource.", "give https://host/path.")


def shown_url(url: Any) -> str:
    """Return a URL without query, fragment, user and password, which may be secrets."""
    return re.sub(r"//[^/@]*@", "//", re.split(r"[?#]", str(url), maxsplit=1)[0])


def failed(kind: type[RequestFailed], message: str, hint: str, answer: Answer | None, **facts: Any) -> RequestFailed:
    """Return an error with the facts of an answer, which are in the context of an error message too."""
    body = answer.text[:SHOWN_CHARACTERS] if answer else ""
    known = {"url": shown_url(answer.url) if answer else "", "status": answer.status if answer else None, "body": body}
    facts = {**known, **facts}
    error = kind(message, hint, **facts)
    try:
        with cues.error_context(**{name: value for name, value in facts.items() if value not in (None, "")}):
            raise error
    except RequestFailed:
        return error.with_traceback(None)


def refused(method: str, answer: Answer, retry_on: Collection[int], retry_after_s_max: float) -> RequestFailed:
    """Return the error for an answer whose status is not the one that was expected."""
    body = " ".join(answer.text[:SHOWN_CHARACTERS].split())
    place = f" to {shown_url(answer.headers['location'])}" if "location" in answer.headers else ""
    text = f"{method} {shown_url(answer.url)} answered {answer.status}{place}{f': {body!r:.200}' if body else ''}."
    if answer.status in retry_on:
        wait_s = min(retry_after_s(answer.headers), retry_after_s_max)
        return failed(TryLater, text, "send it again later.", answer, retry_after_s=wait_s)
    hint = "correct the request; a failed message can be redriven."
    if place:
        hint = "use that address, or allow redirects=."
    return failed(RequestFailed, text, hint, answer)


def unanswered(method: str, url: Any, error: BaseException) -> TryLater:
    """Return the error for a request without a whole answer."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    facts = {"url": shown_url(url), "retry_after_s": 0.0}
    found = failed(
        TryLater, f"{method} {shown_url(url)} had no whole answer ({text}).", "send it again later.", None, **facts
    )
    assert isinstance(found, TryLater)
    return found


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Return the seconds of a ``Retry-After``: a number, or a date; 0 if it is missing, unreadable or past."""
    value = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,12}", value, re.A):
        return float(value)
    try:
        at = parsedate_to_datetime(value)
    except (ValueError, TypeError, IndexError, OverflowError):
        return 0.0
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())


class Terms(NamedTuple):
    """The terms of a request, as the processors take them."""

    timeout_s: float
    redirects: int
    body_bytes_max: int
    accept: frozenset[int]
    retry_on: frozenset[int]
    retry_after_s_max: float

    def check(self) -> Terms:
        """Raise :class:`InvalidArgument` for a value that is too small, or no number."""
        check_number("timeout_s", self.timeout_s, 0.001)
        check_number("redirects", self.redirects, 0, whole=True)
        check_number("body_bytes_max", self.body_bytes_max, 1, whole=True)
        check_number("retry_after_s_max", self.retry_after_s_max, 0)
        return self

    def client(self) -> Any:
        """Return a new client; the number of its connections is that of the calls."""
        httpx = package("httpx")
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        hops = max(1, self.redirects)
        return httpx.AsyncClient(timeout=self.timeout_s, limits=limits, max_redirects=hops, verify=_certificates())


@functools.cache
def _certificates() -> Any:
    """Return the certificates that clients trust. To read them takes longer than a request."""
    return package("httpx").create_ssl_context()


async def exchange(client: Any, request: Any, terms: Terms, *, whole: bool = True) -> Answer:
    """Send a request, and return an answer whose status is 2xx or accepted.

    ``whole``: an answer above ``body_bytes_max`` is a failure; otherwise the body is cut, and not decoded. Raises
    :class:`TryLater` and :class:`RequestFailed`.
    """
    httpx, method = package("httpx"), request.method
    try:
        async with asyncio.timeout(terms.timeout_s):
            follows = terms.redirects > 0 and method in SAFE
            response = await client.send(request, stream=True, follow_redirects=follows)
            try:
                body, more = bytearray(), False
                async for chunk in response.aiter_bytes() if whole else response.aiter_raw():
                    body += chunk
                    if more := len(body) > terms.body_bytes_max:
                        break
            finally:
                await response.aclose()
    except (httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.TooManyRedirects, httpx.DecodingError) as error:
        text = f"{method} {shown_url(request.url)} failed: {type(error).__name__}: {error}"
        hint = "correct the request; a failed message can be redriven."
        raise failed(RequestFailed, text, hint, None, url=shown_url(request.url)) from error
    except TimeoutError as error:
        raise unanswered(method, request.url, TimeoutError(f"{terms.timeout_s:g} s")) from error
    except httpx.TransportError as error:
        raise unanswered(method, request.url, error) from error
    headers = {name.lower(): value for name, value in response.headers.items()}
    answer = Answer(response.status_code, str(response.url), headers, bytes(body[: terms.body_bytes_max]))
    if not (200 <= answer.status < 300 or answer.status in terms.accept):
        raise refused(method, answer, terms.retry_on, terms.retry_after_s_max)
    if whole and more:
        text = f"{method} {shown_url(answer.url)} answered more than {terms.body_bytes_max} bytes."
        raise failed(RequestFailed, text, "raise body_bytes_max=; a failed message can be redriven.", answer, body="")
    return answer


class OAuth(Unshared):
    """The header with an access token of OAuth 2.0, which is fetched when it is needed and renewed before it ends.

        Poll(url, headers=http.OAuth("https://login.example.com/token", "client", secret, scope="read"))

    ``url``            of the token
    ``client_id``, ``client_secret``   of the application; ``client_secret`` may be a function
    ``refresh_token``  of a user; None: the application has rights of its own (``client_credentials``)
    ``keep``           a file for the refresh token, if each one is valid once: the newest is there, for you alone
    ``scope``          what is asked for; None: what the server gives
    ``form``           more fields of the request, such as ``{"audience": "https://api.example.com"}``
    ``headers``        more headers of the requests that have the token
    ``timeout_s``      seconds for which the answer is awaited

    A server that is away is waited for, as the server of the request is. A refusal is :class:`RequestFailed`. If a
    request with a token is answered 401, the token is renewed once. Not guaranteed: a refresh token that is valid once,
    and whose answer is lost.
    """

    def __init__(
        self,
        url: str,
        client_id: str,
        client_secret: str | Callable[[], str],
        *,
        refresh_token: str | None = None,
        keep: str | os.PathLike[str] | None = None,
        scope: str | None = None,
        form: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        check_url(url)
        check_number("timeout_s", timeout_s, 0.001)
        if keep is not None and refresh_token is None:
            raise InvalidArgument("keep= is given without refresh_token=.", "give the first refresh token too.")
        self.url, self._id, self._secret = url, text_of("client_id", client_id), client_secret
        if not callable(client_secret):
            text_of("client_secret", client_secret)
        self._refresh = None if refresh_token is None else text_of("refresh_token", refresh_token)
        self._keep = None if keep is None else Path(path_of("keep", keep))
        self._form = options_of("form", form or {}) | ({} if scope is None else {"scope": text_of("scope", scope)})
        self._headers, self._timeout_s = options_of("headers", headers or {}), timeout_s
        self._reset()

    @override
    def _reset(self) -> None:
        self._guard = threading.Lock()
        self._token: tuple[str, float, float] | None = None
        """The token, and the times of its receipt and its end on the monotonic clock."""

    def __call__(self, message: Any = None) -> dict[str, str]:
        """Return the headers of a request. Raises :class:`TryLater` and :class:`RequestFailed`."""
        with self._guard:
            if self._token is None or time.monotonic() >= self._token[2]:
                self._token = self._fetched()
            return {**self._headers, "Authorization": f"Bearer {self._token[0]}"}

    def renew(self, refused: Mapping[str, str]) -> bool:
        """Forget the token of headers that a server refused; False if it is so new that another would not help.

        A token that another thread or task has replaced since is not the one that was refused.
        """
        with self._guard:
            if self._token is None or f"Bearer {self._token[0]}" not in refused.values():
                return True
            if old := time.monotonic() - self._token[1] > _TOKEN_NEW_S:
                self._token = None
            return old

    def _fetched(self) -> tuple[str, float, float]:
        httpx = package("httpx")
        refresh = self._refresh
        if self._keep is not None and self._keep.exists():
            refresh = self._keep.read_text()
        asked = {"grant_type": "client_credentials"}
        if refresh is not None:
            asked = {"grant_type": "refresh_token", "refresh_token": refresh}
        secret = self._secret() if callable(self._secret) else self._secret
        now = time.monotonic()
        if self._keep is not None:
            _writable(self._keep)  # the answer ends the old token, and is the only place of the new one
        try:
            response = httpx.post(
                self.url, data={**asked, **self._form}, auth=(self._id, secret), timeout=self._timeout_s,
                headers={"Accept": "application/json"}, verify=_certificates(),
            )  # fmt: skip
        except (httpx.TransportError, httpx.DecodingError) as error:
            raise unanswered("POST", self.url, error) from error
        found = {name.lower(): value for name, value in response.headers.items()}
        answer = Answer(response.status_code, self.url, found, response.content)
        if not response.is_success:
            raise refused("POST", answer, RETRY_ON, RETRY_AFTER_S_MAX)
        try:  # the body may have a token in another form: no error shows it
            given = jsontext.decode(answer.body)
        except ValueError:
            given = None
        if not isinstance(given, dict) or not isinstance(given.get("access_token"), str):
            text = f"{shown_url(self.url)} answered {answer.status} without JSON that has an access_token."
            raise failed(RequestFailed, text, "correct url=.", answer, body="")
        if self._keep is not None and isinstance(given.get("refresh_token"), str):
            _store(self._keep, given["refresh_token"])
        told = str(given.get("expires_in"))
        lasts_s = float(told) if re.fullmatch(r"\d{1,12}(\.\d+)?", told, re.A) else 300.0
        return given["access_token"], now, now + max(lasts_s - _TOKEN_EARLY_S, lasts_s / 2)


def _writable(path: Path) -> None:
    """Raise OSError if no file can be made beside this one."""
    _store(path.with_name(f"{path.name}.try"), "x" * 4096)
    path.with_name(f"{path.name}.try").unlink()


def _store(path: Path, secret: str) -> None:
    """Write a secret into a file that is replaced whole, on the disk."""
    following = path.with_name(f"{path.name}.new")
    following.unlink(missing_ok=True)
    with open(os.open(following, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    os.replace(following, path)
    sync_names(path.parent)


_TOKEN_EARLY_S: Final = 60.0
"""So long before its end a token is renewed."""
_TOKEN_NEW_S: Final = 10.0
"""A token that is refused within this time after its receipt is not renewed."""


def renewed(headers: Any, status: int | None, sent: Mapping[str, str]) -> bool:
    """Return whether ``sent`` had a token that the server refused, and ``headers`` makes another at its next call."""
    return status == 401 and hasattr(headers, "renew") and bool(headers.renew(sent))


def check_statuses(name: str, statuses: Collection[int]) -> frozenset[int]:
    """Return statuses as a set. Raises :class:`InvalidArgument` for a value that is none."""
    fits = isinstance(statuses, Collection) and all(type(status) is int and 200 <= status <= 599 for status in statuses)
    if not fits:
        raise InvalidArgument(f"{name}={statuses!r:.60}.", "give statuses from 200 to 599, such as (429, 503).")
    return frozenset(statuses)


def check_headers(headers: Any) -> Any:
    """Return the headers of requests: a dict, a function or None. Raises :class:`InvalidArgument` for others."""
    if headers is None or callable(headers):
        return headers
    if not isinstance(headers, Mapping):
        raise InvalidArgument(f"headers= is of type {type(headers).__name__}.", "give a dict of texts, or a function.")
    for name, value in headers.items():
        if not all(isinstance(text, str) and text.isascii() and text.isprintable() for text in (name, value)):
            raise InvalidArgument(  # without the value, which may be a secret
                f"The header {name!r:.60} is not text of printable ASCII characters.", "correct headers=."
            )
    return headers


class Rate:
    """Turns at equal distances: at most so many a second, minute or hour, over all threads and tasks of a process."""

    def __init__(self, rate: float | str) -> None:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*/\s*([smh])", rate) if isinstance(rate, str) else None
        per_s = float(match[1]) / _PER_S[match[2]] if match else rate
        if isinstance(per_s, bool) or not isinstance(per_s, (int, float)) or not 0 < per_s < 1e9:
            raise InvalidArgument(f"rate={rate!r}.", "give requests a second, or '10/s', '90/m', '500/h'.")
        self._distance_s = 1.0 / per_s
        self._next_at = 0.0
        self._guard = threading.Lock()

    def wait_s(self) -> float:
        """Take the next turn; return the seconds until it comes."""
        with self._guard:
            now = time.monotonic()
            at = max(now, self._next_at)
            self._next_at = at + self._distance_s
        return at - now

    @override
    def __getstate__(self) -> float:
        return self._distance_s

    def __setstate__(self, distance_s: float) -> None:
        self.__init__(1.0 / distance_s)  # type: ignore[misc]


class _Scheme(NamedTuple):
    """A scheme of signatures: its headers, and the bytes that are signed."""

    names: tuple[str, ...]
    """The accepted names of the header of the signature; requests are signed with the first one."""
    timed: bool
    """True if the time of the signature is signed with the body."""
    key: Callable[[str], bytes]
    """Return the key of the HMAC for a secret that is given as text."""
    text: Callable[[bytes], str]
    """Return a digest as the header has it."""
    write: Callable[[str, str, str, str], dict[str, str]]
    """Return the headers of a request, from the name of the header, the id, the seconds and the digest as text."""
    read: Callable[[str, Mapping[str, str]], _Signed]
    """Return the parts of a signed request, from the name of the header and all headers, in small letters."""


class _Signed(NamedTuple):
    """The parts of a signed request, as its headers have them."""

    seconds: str
    begin: str
    """The text before the body in the signed bytes."""
    digests: list[str]


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()


def _github(name: str, headers: Mapping[str, str]) -> _Signed:
    return _Signed("", "", [headers[name].removeprefix("sha256=")])


def _stripe(name: str, headers: Mapping[str, str]) -> _Signed:
    parts = [part.strip().partition("=") for part in headers[name].split(",")]
    seconds = next((text for key, _, text in parts if key == "t"), "")
    return _Signed(seconds, f"{seconds}.", [text for key, _, text in parts if key == "v1"])


def _slack(name: str, headers: Mapping[str, str]) -> _Signed:
    seconds = headers.get("x-slack-request-timestamp", "")
    return _Signed(seconds, f"v0:{seconds}:", [headers[name].removeprefix("v0=")])


def _standard(name: str, headers: Mapping[str, str]) -> _Signed:
    family = "svix" if name == "svix-signature" else "webhook"
    id, seconds = headers.get(f"{family}-id", ""), headers.get(f"{family}-timestamp", "")
    return _Signed(seconds, f"{id}.{seconds}.", [part[3:] for part in headers[name].split() if part.startswith("v1,")])


def _standard_key(secret: str) -> bytes:
    try:
        return base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except ValueError:
        raise InvalidArgument(
            "The secret of the form 'standard' is not base64.",
            "give the text 'whsec_…' that the sender shows; or the bytes of the key: secret=b'…'.",
        ) from None


_SCHEMES: Final = {
    "github": _Scheme(
        ("X-Hub-Signature-256",), False, str.encode, bytes.hex,
        lambda name, id, seconds, digest: {name: f"sha256={digest}"},
        _github,
    ),
    "stripe": _Scheme(
        ("Stripe-Signature",), True, str.encode, bytes.hex,
        lambda name, id, seconds, digest: {name: f"t={seconds},v1={digest}"},
        _stripe,
    ),
    "shopify": _Scheme(
        ("X-Shopify-Hmac-Sha256",), False, str.encode, _base64,
        lambda name, id, seconds, digest: {name: digest},
        lambda name, headers: _Signed("", "", [headers[name]]),
    ),
    "slack": _Scheme(
        ("X-Slack-Signature",), True, str.encode, bytes.hex,
        lambda name, id, seconds, digest: {"X-Slack-Request-Timestamp": seconds, name: f"v0={digest}"},
        _slack,
    ),
    "standard": _Scheme(
        ("Webhook-Signature", "Svix-Signature"), True, _standard_key, _base64,
        lambda name, id, seconds, digest: {"Webhook-Id": id, "Webhook-Timestamp": seconds, name: f"v1,{digest}"},
        _standard,
    ),
}  # fmt: skip
"""The schemes by the names that :class:`Signature` takes."""


class Signature:
    """Signatures of request bodies with a shared secret (HMAC, SHA-256), to make and to verify.

    ``secret``       text or bytes; a list: any of them is accepted, and the first one signs. Bytes are the key itself
    ``form``         ``"github"``: the header ``X-Hub-Signature-256: sha256=<hex>`` over the body.
                     ``"stripe"``: ``Stripe-Signature: t=<seconds>,v1=<hex>`` over ``<seconds>.<body>``.
                     ``"shopify"``: ``X-Shopify-Hmac-Sha256: <base64>`` over the body.
                     ``"slack"``: ``X-Slack-Signature: v0=<hex>`` over ``v0:<seconds>:<body>``, with the header
                     ``X-Slack-Request-Timestamp``.
                     ``"standard"``: ``Webhook-Signature: v1,<base64>`` over ``<id>.<seconds>.<body>``, with the headers
                     ``Webhook-Id`` and ``Webhook-Timestamp``, as standardwebhooks.com says: the text of the secret is
                     ``whsec_`` and the base64 of the key. The older names ``Svix-Id``, ``Svix-Timestamp`` and
                     ``Svix-Signature`` are accepted too
    ``header``       another name for the header of the signature
    ``tolerance_s``  the most seconds between the time of a signature and the clock. ``"github"`` and ``"shopify"`` have
                     no time

    Raises :class:`InvalidArgument` for an unknown form, an empty secret, and a text that is not base64 in the form
    ``"standard"``.
    """

    def __init__(
        self,
        secret: str | bytes | Sequence[str | bytes],
        form: str = "github",
        *,
        header: str | None = None,
        tolerance_s: float = 300.0,
    ) -> None:
        if header is not None and not (isinstance(header, str) and header.isascii()):
            raise InvalidArgument(f"header={header!r:.60}.", "give the name of a header, or None.")
        check_number("tolerance_s", tolerance_s, 0)
        if not isinstance(form, str) or form not in _SCHEMES:
            raise InvalidArgument(f"form={form!r} is unknown.", f"use one of {', '.join(_SCHEMES)}.")
        scheme = _SCHEMES[form]
        secrets: list[Any] = list(secret) if isinstance(secret, (list, tuple)) else [secret]
        if not secrets or not all(isinstance(part, (str, bytes)) for part in secrets):
            kind = type(secret).__name__
            raise InvalidArgument(f"The secret of a signature is a {kind}.", "give text, bytes, or a list of these.")
        try:
            self._keys: list[bytes] = [scheme.key(part) if isinstance(part, str) else part for part in secrets]
        except UnicodeEncodeError:
            raise InvalidArgument("The secret of a signature has half a surrogate pair.", "give bytes.") from None
        if not all(self._keys):
            raise InvalidArgument("The secret of a signature is empty.", "give the text that both sides know.")
        self.form, self.header, self.tolerance_s = form, header or scheme.names[0], tolerance_s
        self._names = [header.lower()] if header else [name.lower() for name in scheme.names]

    def headers(self, body: bytes, id: str) -> dict[str, str]:
        """Return the headers that sign a body now. ``id`` names the event."""
        scheme, seconds = _SCHEMES[self.form], str(int(time.time()))
        unsigned = {name.lower(): value for name, value in scheme.write(self.header, id, seconds, "").items()}
        begin = scheme.read(self.header.lower(), unsigned).begin
        digest = hmac.digest(self._keys[0], begin.encode() + body, hashlib.sha256)
        return scheme.write(self.header, id, seconds, scheme.text(digest))

    def problem(self, headers: Mapping[str, str], body: bytes) -> str | None:
        """Return None if the signature is right, or what is wrong with it. ``headers`` has names in small letters."""
        scheme = _SCHEMES[self.form]
        name = next((name for name in self._names if headers.get(name)), None)
        if name is None:
            return f"no header {self.header}"
        seconds, begin, digests = scheme.read(name, headers)
        if scheme.timed:
            if not re.fullmatch(r"\d{1,12}", seconds, re.A):
                return "no time in the signature"
            if abs(time.time() - int(seconds)) > self.tolerance_s:
                return f"the time of the signature is not within {self.tolerance_s:g} s of the clock"
        right = False
        for key in self._keys:
            digest = scheme.text(hmac.digest(key, begin.encode() + body, hashlib.sha256)).encode()
            for given in digests:  # each comparison takes the same time, and none ends the search
                right |= hmac.compare_digest(digest, given.encode())
        return None if right else "wrong signature"
