"""A source of the items of a resource that is asked again and again: a feed, a list, the pages of an API.

    graph.add(cues.Source("releases", Poll("https://api.example.com/releases", id="id", interval_s=300)))
    graph.add(cues.Source("events", Poll("https://api.example.com/events", "data.items", next="data.next")))

A request has ``If-None-Match`` and ``If-Modified-Since``, so a server that knows them answers 304 when nothing is new.

**A list** (without ``next=``). Each answer has all that there is to see, at most :data:`SEEN_MAX` items. An item is a
message if its ``id`` is not among the last :data:`SEEN_MAX` that were. Without ``id=`` the item itself is the id, so an
item that changed is a message again. An item that is missing in an answer and comes back later may be a message again.
The position is ``[version, "list", etag, modified, ids]``, with 8 bytes of a hash for each id.

**Pages** (with ``next=``). The items of a page are messages in their order, then those of the page after it, and so on.
A page without a next one is asked again; it may grow at its end, and name a next page later. The position is
``[version, "pages", etag, modified, URL of the page, items, hash of the last item]``. A page that has fewer items than
were read, or another item at that place, stops the source (:class:`cues.errors.Diverged`): it would lose items or
repeat them. A cursor fits too: ``next=lambda answer: answer.json() and f"{url}?after={answer.json()[-1]['id']}"``.

The engine commits the position with the messages, so each item is on the queue once, wherever the run is killed. The
validators of an answer are in the position of its last item: after a crash in the middle, the rest is asked for again.

**Failures.** After a status of ``retry_on``, a broken connection and a timeout the server is away: the source waits for
it, as ``outage=`` says, by default for ever, and at least for its ``Retry-After``. Every other status, and a body that
cannot be read, stop the source (:class:`cues.processors.http.RequestFailed`), which continues there at the next start.
``retries=`` of the source repeats those too.

Not guaranteed: items that come and go between two requests, or that a list has no more after an outage.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urljoin, urlsplit

from cues import codec
from cues.arguments import check_number
from cues.errors import CodecError, Diverged, InvalidArgument
from cues.processors import SOURCE, foreign, http, takes, waits

if TYPE_CHECKING:
    import httpx

SEEN_MAX: Final = 200
"""Ids in a position, and items in an answer without pages. More would make each commit larger than 2,000 bytes."""

URL_CHARACTERS_MAX: Final = 1_200
"""Characters of the URL of a page, which is in the position."""

_VERSION: Final = 1
_VALIDATOR_CHARACTERS_MAX: Final = 150
"""A longer ETag is not kept, and the request then has none."""


Position = list[Any]
Item = tuple[Position, Any]


class _Draining(Exception):
    """Raised when the graph drains."""


@takes(SOURCE)
class Poll:
    """A source of the items of a resource; see the module. Give it to ``cues.Source(id, Poll(...))``.

    ``url``         where the first request goes
    ``items``       the items of an answer, each a dict: None: the body as JSON, a list or one object; a text: the place
                    of the list in the JSON, such as ``"data.items"``; or a function of the
                    :class:`cues.processors.http.Answer`
    ``id``          of a list: a field, or a function of the item; an item without the field is its own id
    ``next``        the URL of the next page, which must be at the same host: ``"link"``: the header ``Link`` with
                    ``rel="next"``; another text: its place in the JSON; or a function of the answer. No URL, or that of
                    the page itself: this page is the last one
    ``interval_s``  seconds between two rounds; None: the source ends after one round
    ``headers``     of each request; a function is called for each
    ``reserved``    ``"q/type"`` or ``"q/topics"``, which items may set then (:mod:`cues.processors.foreign`)
    ``client``      a function that makes an ``httpx.AsyncClient``, for one request
    ``timeout_s``, ``retry_on``, ``retry_after_s_max``, ``redirects``, ``body_bytes_max``   as
                    :class:`cues.processors.http_sink.Requests` has them

    Kind: source
    Needs: extra `http`
    Guarantee: exactly once: each item that an answer has is on the queue once, also after kill -9
    Mechanism: position of the last ids, or of page and item, committed with the messages
    """

    def __init__(
        self,
        url: str,
        items: str | Callable[[http.Answer], Iterable[Any]] | None = None,
        *,
        id: str | Callable[[Any], Any] | None = None,
        next: str | Callable[[http.Answer], str | None] | None = None,
        interval_s: float | None = 60.0,
        headers: Mapping[str, str] | Callable[[], Mapping[str, str]] | None = None,
        timeout_s: float = 30.0,
        retry_on: Sequence[int] = http.RETRY_ON,
        retry_after_s_max: float = http.RETRY_AFTER_S_MAX,
        redirects: int = 0,
        body_bytes_max: int = http.BODY_BYTES_MAX,
        client: Callable[[], httpx.AsyncClient] | None = None,
        reserved: Sequence[str] = (),
    ) -> None:
        self._may = foreign.allowed(reserved)
        self.url, self.items, self.id, self.next, self.interval_s = url, items, id, next, interval_s
        self._headers, self._make_client = headers, client
        statuses = http.check_statuses("retry_on", retry_on)
        not_modified = frozenset({304})
        self._terms = http.Terms(
            timeout_s, redirects, body_bytes_max, not_modified, statuses, retry_after_s_max
        ).check()
        self.__name__ = "poll"
        http.check_url(url)
        if interval_s is not None:
            check_number("interval_s", interval_s, 0)
        if id is not None and next is not None:
            raise InvalidArgument("id= and next= are both given.", "give id= for a list, next= for pages.")
        http.package("httpx")

    def __call__(self, position: Position | None, process: Any = None) -> Iterator[Item]:
        """Yield ``(position, message)`` after ``position``; an Exception in place of a message is a failed one."""
        self._check(position)
        asking = _Asking(self, process)
        try:
            yield from self._list(position, asking) if self.next is None else self._pages(position, asking)
        except _Draining:
            return

    # --- a list ---

    def _list(self, position: Position | None, asking: _Asking) -> Iterator[Item]:
        etag, modified, packed = position[2:] if position else ("", "", b"")
        seen = [packed[at : at + 8] for at in range(0, len(packed), 8)]
        while True:
            answer = asking.ask(self.url, etag, modified)
            if answer.status != 304:
                items = list(self._items_of(answer))
                if len(items) > SEEN_MAX:
                    raise http.failed(
                        http.RequestFailed,
                        f"{http.shown_url(answer.url)} has {len(items)} items; a list has at most {SEEN_MAX}.",
                        "ask for fewer, such as the newest ones, or for pages with next=.", answer, body="",
                    )  # fmt: skip
                there: dict[bytes, Any] = {}
                for item in items:
                    there.setdefault(self._id_of(item), item)
                fresh = {identity: item for identity, item in there.items() if identity not in set(seen)}
                # Those that this answer has are kept longest: none of them may be forgotten while it is there.
                seen.sort(key=there.__contains__)
                for number, (identity, item) in enumerate(fresh.items(), 1):
                    seen = [*seen, identity][-SEEN_MAX:]
                    if number == len(fresh):
                        etag, modified = _validators(answer)
                    yield [_VERSION, "list", etag, modified, b"".join(seen)], self._message(item)
                etag, modified = _validators(answer)
            asking.wait()

    def _id_of(self, item: Any) -> bytes:
        value = item
        if callable(self.id):
            value = self.id(item)
        elif self.id is not None and isinstance(item, dict):
            value = item.get(self.id, item)
        return _hash(value)

    # --- pages ---

    def _pages(self, position: Position | None, asking: _Asking) -> Iterator[Item]:
        etag, modified, url, count, last = position[2:] if position else ("", "", self.url, 0, b"")
        visited: set[str] = set()
        while True:
            answer = asking.ask(url, etag, modified)
            following, items = "", []
            if answer.status != 304:
                items = list(self._items_of(answer))
                if len(items) < count or (count and _hash(items[count - 1]) != last):
                    raise Diverged(
                        f"{http.shown_url(url)} has {len(items)} items, and not those that were read before: {count}"
                        " items, the last of which is not there.",
                        "give the source another id, which begins at the start; or a cursor in next=.",
                    )
                new = items[count:]
                following = self._next_of(answer, url)
                for number, item in enumerate(new, 1):
                    count, last = count + 1, _hash(item)
                    if number < len(new):
                        yield [_VERSION, "pages", "", "", url, count, last], self._message(item)
                    elif following:
                        yield [_VERSION, "pages", "", "", following, 0, b""], self._message(item)
                    else:
                        yield [_VERSION, "pages", *_validators(answer), url, count, last], self._message(item)
                etag, modified = _validators(answer)
            visited.add(url)
            if following:
                url, etag, modified, count, last = following, "", "", 0, b""
            if (not new and (not following or url in visited or self.interval_s is not None)) or not following:
                asking.wait()
                visited.clear()

    def _next_of(self, answer: http.Answer, url: str) -> str:
        """Return the URL of the next page, or "" if there is none."""
        if callable(self.next):
            found: Any = self.next(answer)
        elif self.next == "link":
            found = _linked(answer.headers.get("link", ""))
        else:
            found = _at(answer, str(self.next), None)
        if not found:
            return ""
        following = urljoin(answer.url, str(found))
        if _origin(following) != _origin(self.url):
            raise http.failed(
                http.RequestFailed,
                f"{http.shown_url(answer.url)} names {http.shown_url(following)} as its next page, at another host.",
                "give next= a function, if that host may have the headers of the requests.", answer, body="",
            )  # fmt: skip
        if len(following) > URL_CHARACTERS_MAX or not following.isascii():
            raise http.failed(
                http.RequestFailed, f"The URL of the page after {http.shown_url(answer.url)} has {len(following)}"
                f" characters; the position has room for {URL_CHARACTERS_MAX}, in ASCII.",
                "ask for shorter ones.", answer, body="",
            )  # fmt: skip
        return "" if following == url else following

    # --- both ---

    def _message(self, item: Any) -> Any:
        if isinstance(item, Exception):
            return item
        try:
            if not isinstance(item, dict):
                raise InvalidArgument(f"An item is {type(item).__name__} ({item!r:.60}).", "make dicts with items=.")
            foreign.check(item, self._may)
        except InvalidArgument as error:
            return error
        return item

    def _items_of(self, answer: http.Answer) -> Iterable[Any]:
        if callable(self.items):
            return self.items(answer)
        payload = answer.json() if self.items is None else _at(answer, self.items, ...)
        if isinstance(payload, list):
            return payload
        if isinstance(payload, dict):
            return [payload]
        raise http.failed(
            http.RequestFailed,
            f"{http.shown_url(answer.url)} has {type(payload).__name__} where items should be.",
            "name the place of the list with items=.", answer,
        )  # fmt: skip

    def _check(self, position: Position | None) -> None:
        form = "list" if self.next is None else "pages"
        sizes = {"list": 5, "pages": 7}
        if position is None:
            return
        if not isinstance(position, list) or position[:2] != [_VERSION, form] or len(position) != sizes[form]:
            raise Diverged(
                f"The position {str(position)[:80]} is not one of cues.processors.http_source, version {_VERSION}, for"
                f" {'a list' if form == 'list' else 'pages'}.",
                "give the source another id, which begins at the start.",
            )
        if form == "pages" and _origin(position[4]) != _origin(self.url):
            raise Diverged(
                f"The position is at {http.shown_url(position[4])}, and the source asks {http.shown_url(self.url)}.",
                "give the source another id, which begins at the start.",
            )


class _Asking:
    """The requests of one start of a source."""

    def __init__(self, poll: Poll, process: Any) -> None:
        self._poll, self._process = poll, process

    def ask(self, url: str, etag: str, modified: str) -> http.Answer:
        """Return an answer, or a 304. Raises :class:`RequestFailed`, and :class:`_Draining`."""
        poll = self._poll
        conditions = {"If-None-Match": etag, "If-Modified-Since": modified}
        given = (poll._headers() if callable(poll._headers) else poll._headers) or {}
        answer = self._answer(url, {**{name: value for name, value in conditions.items() if value}, **given})
        if answer.status == 304 and not (etag or modified):
            text = f"{http.shown_url(url)} answered 304 to a request without conditions."
            raise http.failed(http.RequestFailed, text, "correct headers=, or the server.", answer)
        return answer

    def _answer(self, url: str, headers: Mapping[str, str]) -> http.Answer:
        """Make a request in a thread, with a connection of its own: so nothing is open while the source waits.

        A drain does not wait for the answer.
        """
        poll, outcome = self._poll, concurrent.futures.Future[http.Answer]()

        async def exchange() -> http.Answer:
            async with (poll._make_client or poll._terms.client)() as client:
                request = client.build_request("GET", url, headers=headers)
                task = asyncio.create_task(http.exchange(client, request, poll._terms))
                while not (await asyncio.wait({task}, timeout=waits.LOOK_S))[0]:
                    if self._stopping:
                        task.cancel()
                return task.result()

        def run() -> None:
            try:
                outcome.set_result(asyncio.run(exchange()))
            except BaseException as error:
                outcome.set_exception(error)

        threading.Thread(target=run, name="cues poll", daemon=True).start()
        while not concurrent.futures.wait([outcome], waits.LOOK_S).done:
            if self._stopping:  # the thread may still wait for a name server
                raise _Draining
        return outcome.result()

    @property
    def _stopping(self) -> bool:
        return self._process is not None and bool(self._process.stopping)

    def wait(self) -> None:
        """Wait for the next round. Raises :class:`_Draining` if there is none."""
        interval_s = self._poll.interval_s
        if interval_s is None or not waits.wait(self._process, interval_s):
            raise _Draining


def _hash(value: Any) -> bytes:
    try:
        packed = codec.pack(value)
    except CodecError:  # such as an integer of more than 64 bits: a failed message, with a place of its own
        packed = repr(value).encode("utf-8", "replace")
    return hashlib.blake2b(packed, digest_size=8).digest()


def _validators(answer: http.Answer) -> tuple[str, str]:
    etag, modified = answer.headers.get("etag", ""), answer.headers.get("last-modified", "")
    fits = [text if len(text.encode()) <= _VALIDATOR_CHARACTERS_MAX else "" for text in (etag, modified)]
    return fits[0], fits[1]


def _at(answer: http.Answer, place: str, missing: Any) -> Any:
    """Return the value at ``a.b`` of the JSON; ``missing`` if it is not there, or an error if that is ``...``."""
    value = answer.json()
    for name in place.split("."):
        if not isinstance(value, dict) or name not in value:
            if missing is not ...:
                return missing
            text = f"{http.shown_url(answer.url)} answered JSON without {place!r}."
            raise http.failed(http.RequestFailed, text, "name the place of the list with items=.", answer)
        value = value[name]
    return value


def _linked(header: str) -> str:
    """Return the URL with rel="next" of a header ``Link`` (RFC 8288)."""
    from urllib.request import parse_http_list

    for part in parse_http_list(header):
        url, _, rest = part.partition(">")
        for parameter in rest.split(";"):
            name, _, value = parameter.partition("=")
            if name.strip().lower() == "rel" and "next" in value.strip().strip('"').lower().split():
                return url.strip().removeprefix("<")
    return ""


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)
