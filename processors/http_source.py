"""A source of the items of a resource that is asked again and again: a feed, a list, the pages of an API.

    graph.add(cues.Source("releases", Poll("https://api.example.com/releases", id="id", interval_s=300)))
    graph.add(cues.Source("events", Poll("https://api.example.com/events", "data.items", next="data.next")))
    graph.add(cues.Source("found", Poll(url, "hits", cursor="next", json=lambda cursor: {"from": cursor or 0})))

A request has ``If-None-Match`` and ``If-Modified-Since``, so a server that knows them answers 304 when nothing is new.

**A list** (without ``next=`` and ``cursor=``). Each answer has all that there is to see. An item is a message if its
``id`` is not among those that were. Without ``id=`` the item itself is the id, so an item that changed is a message
again. The position is ``[version, "list", etag, modified, ids]``, with 8 bytes of a hash for each of the last
:data:`SEEN_MAX` ids. From the first longer answer on, it has a sixth part, True, and all ids are rows of state, which
are committed with the messages. The ids of items that an answer lacks are forgotten when there are more than
``remember=`` of them; such an item may be a message again.

**Pages** (with ``next=``). The items of a page are messages in their order, then those of the page after it, and so on.
A page without a next one is asked again; it may grow at its end, and name a next page later. The position is
``[version, "pages", etag, modified, URL of the page, items, hash of the last item]``. A page that has fewer items than
were read, or another item at that place, stops the source (:class:`cues.errors.Diverged`): it would lose items or
repeat them.

**A cursor** (with ``cursor=``) is what the next request says, in its query (``params=``) or its body (``json=``, which
makes it a POST); both are functions of the cursor, which is None for the first page. Otherwise the same as pages: the
position has ``"cursor"`` and the cursor in the places of ``"pages"`` and the URL.

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

from cues import codec, jsontext
from cues.arguments import check_number
from cues.errors import CodecError, Diverged, InvalidArgument
from cues.processors import SOURCE, checks, foreign, http, takes, waits

if TYPE_CHECKING:
    import httpx

SEEN_MAX: Final = 200
"""Ids in a position. More would make each commit larger than 2,000 bytes."""

URL_CHARACTERS_MAX: Final = 1_200
"""Characters of the URL of a page, which is in the position."""

_VERSION: Final = 1
_LIST_PARTS: Final = 5
"""Parts of the position of a list; there is one more when the ids are in state."""
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
    ``remember``    of a list of more than 200 items: the ids that are kept, besides those of the last answer
    ``next``        the URL of the next page, which must be at the same host: ``"link"``: the header ``Link`` with
                    ``rel="next"``; another text: its place in the JSON; or a function of the answer. No URL, or that of
                    the page itself: this page is the last one
    ``cursor``      what the next request says: a place in the JSON, or a function of the answer; a text or a number. No
                    cursor, 0, or the same one: this page is the last one
    ``params``      names and values for the query of a request, besides those of its URL, which are kept: a dict, or a
                    function of the cursor
    ``json``        the body of a request, which is a POST then: JSON, or a function of the cursor
    ``interval_s``  seconds between two rounds; None: the source ends after one round
    ``headers``     of each request; a function is called for each. :class:`cues.processors.http.OAuth` is one
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
        remember: int = 100_000,
        next: str | Callable[[http.Answer], str | None] | None = None,
        cursor: str | Callable[[http.Answer], Any] | None = None,
        params: Mapping[str, Any] | Callable[[Any], Mapping[str, Any]] | None = None,
        json: Any = None,
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
        self.remember, self.cursor, self._params, self._json = remember, cursor, params, json
        self._headers, self._make_client = http.check_headers(headers), client
        statuses = http.check_statuses("retry_on", retry_on)
        not_modified = frozenset({304})
        self._terms = http.Terms(
            timeout_s, redirects, body_bytes_max, not_modified, statuses, retry_after_s_max
        ).check()
        self.__name__ = "poll"
        http.check_url(url)
        if interval_s is not None:
            check_number("interval_s", interval_s, 0)
        check_number("remember", remember, 1, whole=True)
        given = [f"{name}=" for name, value in (("id", id), ("next", next), ("cursor", cursor)) if value is not None]
        if len(given) > 1:
            raise InvalidArgument(
                f"{' and '.join(given)} are given.", "give id= for a list, and next= or cursor= for pages."
            )
        if cursor is not None and not (callable(params) or callable(json)):
            raise InvalidArgument(
                "cursor= is given, and no request says it.", "give params= or json= a function of the cursor."
            )
        if not (params is None or callable(params) or isinstance(params, Mapping)):
            raise InvalidArgument(f"params={params!r:.60}.", "give a dict, or a function of the cursor.")
        self._form = "cursor" if cursor is not None else "list" if next is None else "pages"
        http.package("httpx")

    def __call__(self, position: Position | None, process: Any = None) -> Iterator[Item]:
        """Yield ``(position, message)`` after ``position``; an Exception in place of a message is a failed one."""
        self._check(position)
        asking = _Asking(self, process)
        try:
            yield from self._list(position, asking) if self._form == "list" else self._pages(position, asking)
        except _Draining:
            return

    # --- a list ---

    def _list(self, position: Position | None, asking: _Asking) -> Iterator[Item]:
        etag, modified, packed = position[2:5] if position else ("", "", b"")
        seen = [packed[at : at + 8] for at in range(0, len(packed), 8)]
        kept: Any = asking.state if position and len(position) > _LIST_PARTS else None
        while True:
            answer = asking.ask(None, etag, modified)
            if answer.status != 304:
                there: dict[bytes, Any] = {}
                for item in self._items_of(answer):
                    there.setdefault(self._id_of(item), item)
                if kept is None and len(there) > SEEN_MAX:
                    kept = asking.state
                    kept.update(dict.fromkeys(seen, True))
                known = set(seen).__contains__ if kept is None else kept.__contains__
                fresh = {identity: item for identity, item in there.items() if not known(identity)}
                if kept is not None and fresh and len(kept) > self.remember:
                    for gone in [identity for identity in kept if identity not in there]:
                        del kept[gone]
                # Those that this answer has are kept longest: none of them may be forgotten while it is there.
                seen.sort(key=there.__contains__)
                for number, (identity, item) in enumerate(fresh.items(), 1):
                    seen = [*seen, identity][-SEEN_MAX:]
                    if kept is not None:
                        kept[identity] = True
                    if number == len(fresh):
                        etag, modified = _validators(answer)
                    found = [_VERSION, "list", etag, modified, b"".join(seen)]
                    yield found if kept is None else [*found, True], self._message(item)
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
        form, first = self._form, self.url if self._form == "pages" else None
        etag, modified, page, count, last = position[2:] if position else ("", "", first, 0, b"")
        visited: dict[Any, bool] = {}
        """The pages of this round, and whether they had items."""
        while True:
            answer = asking.ask(page, etag, modified)
            following: Any = None
            new: list[Any] = []
            if answer.status != 304:
                items = list(self._items_of(answer))
                if len(items) < count or (count and _hash(items[count - 1]) != last):
                    raise Diverged(
                        f"{self._shown(page)} has {len(items)} items, and not those that were read before: {count}"
                        " items, the last of which is not there.",
                        "give the source another id, which begins at the start; or a cursor in next=.",
                    )
                new = items[count:]
                following = self._next_of(answer, page)
                if following is not None and visited.get(following):
                    raise http.failed(
                        http.RequestFailed,
                        f"{self._shown(page)} names a page as its next one whose items were read:"
                        f" {self._shown(following)}.",
                        "correct next= or cursor=: the items would be messages again and again.", answer, body="",
                    )  # fmt: skip
                for number, item in enumerate(new, 1):
                    count, last = count + 1, _hash(item)
                    if number < len(new):
                        yield [_VERSION, form, "", "", page, count, last], self._message(item)
                    elif following is not None:
                        yield [_VERSION, form, "", "", following, 0, b""], self._message(item)
                    else:
                        yield [_VERSION, form, *_validators(answer), page, count, last], self._message(item)
                etag, modified = _validators(answer)
            visited[page] = count > 0
            ends = following is None
            if not ends:
                page, etag, modified, count, last = following, "", "", 0, b""
            if ends or (not new and (page in visited or self.interval_s is not None)):
                asking.wait()
                visited.clear()

    def _shown(self, page: Any) -> str:
        return (
            http.shown_url(page) if self._form == "pages" else f"{http.shown_url(self.url)} at the cursor {page!r:.60}"
        )

    def _next_of(self, answer: http.Answer, page: Any) -> Any:
        """Return the URL or the cursor of the next page, or None if there is none."""
        if self.cursor is not None:
            cursor: Any = self.cursor(answer) if callable(self.cursor) else _at(answer, self.cursor, None)
            if cursor in (None, "", False):
                return None
            if type(cursor) in (str, int, float) and _fits(cursor):
                return None if cursor == page else cursor
            raise http.failed(
                http.RequestFailed, f"The cursor after {http.shown_url(answer.url)} is {cursor!r:.60}; it is a text or"
                f" a number of at most {URL_CHARACTERS_MAX} characters.",
                "name its place with cursor=.", answer, body="",
            )  # fmt: skip
        if callable(self.next):
            found: Any = self.next(answer)
        elif self.next == "link":
            found = _linked(answer.headers.get("link", ""))
        else:
            found = _at(answer, str(self.next), None)
        if not found:
            return None
        httpx = http.package("httpx")
        try:
            following = urljoin(answer.url, str(found))
            httpx.URL(following)
            is_elsewhere = _origin(following) != _origin(self.url)
        except (ValueError, httpx.InvalidURL) as error:
            raise http.failed(
                http.RequestFailed, f"{http.shown_url(answer.url)} names a next page that is not a URL: {error}.",
                "give next= a function that returns the URL.", answer, body="",
            ) from error  # fmt: skip
        if is_elsewhere:
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
        return None if following == page else following

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
        form = self._form
        sizes = {"list": (_LIST_PARTS, _LIST_PARTS + 1), "pages": (7,), "cursor": (7,)}
        if position is None:
            return
        if not isinstance(position, list) or position[:2] != [_VERSION, form] or len(position) not in sizes[form]:
            kind = {"list": "a list", "pages": "pages", "cursor": "a cursor"}[form]
            raise checks.foreign_position(position, f"cues.processors.http_source for {kind}", _VERSION)
        if form == "pages" and _origin(position[4]) != _origin(self.url):
            raise Diverged(
                f"The position is at {http.shown_url(position[4])}, and the source asks {http.shown_url(self.url)}.",
                "give the source another id, which begins at the start.",
            )


class _Asking:
    """The requests of one start of a source."""

    def __init__(self, poll: Poll, process: Any) -> None:
        self._poll, self._process = poll, process

    @property
    def state(self) -> Any:
        """The state of the source, for the ids of a long list."""
        if self._process is None:
            raise InvalidArgument(
                f"{http.shown_url(self._poll.url)} has more than {SEEN_MAX} items, whose ids are in the state of the"
                " source; and Poll was called without process=.",
                "give it to cues.Source(id, Poll(…)); or pass on the process of your own source.",
            )
        return self._process.state

    def ask(self, page: Any, etag: str, modified: str) -> http.Answer:
        """Return an answer, or a 304. Raises :class:`RequestFailed`, and :class:`_Draining`.

        ``page``: the URL of a page, or a cursor; None for the first one.
        """
        poll = self._poll
        url = page if poll._form == "pages" else poll.url
        cursor = None if poll._form == "pages" else page
        body = poll._json(cursor) if callable(poll._json) else poll._json
        params = poll._params(cursor) if callable(poll._params) else poll._params
        conditions = {"If-None-Match": etag, "If-Modified-Since": modified}
        sent = {name: value for name, value in conditions.items() if value}
        for last in (False, True):
            headers = {**sent, **((poll._headers() if callable(poll._headers) else poll._headers) or {})}
            try:
                answer = self._answer(url, headers, params, body)
                break
            except http.RequestFailed as error:
                if last or not http.renewed(poll._headers, error.status, headers):
                    raise
        if answer.status == 304 and not (etag or modified):
            text = f"{http.shown_url(url)} answered 304 to a request without conditions."
            raise http.failed(http.RequestFailed, text, "correct headers=, or the server.", answer)
        return answer

    def _answer(self, url: str, headers: Mapping[str, str], params: Any, body: Any) -> http.Answer:
        """Make a request in a thread, with a connection of its own: so nothing is open while the source waits.

        A drain does not wait for the answer.
        """
        poll, outcome = self._poll, concurrent.futures.Future[http.Answer]()
        given: dict[str, Any] = {"headers": headers}
        if params is not None:  # httpx takes them in place of a query, such as that of the next page
            given["params"] = http.package("httpx").QueryParams(params).merge(urlsplit(url).query)
        if body is not None:
            given["headers"] = {"Content-Type": "application/json", **headers}
            given["content"] = jsontext.encode(body, compact=True).encode()

        async def exchange() -> http.Answer:
            async with (poll._make_client or poll._terms.client)() as client:
                request = client.build_request("GET" if body is None else "POST", url, **given)
                task = asyncio.create_task(http.exchange(client, request, poll._terms))
                while not (await asyncio.wait({task}, timeout=waits.LOOK_S))[0]:
                    if waits.stops(self._process):
                        task.cancel()
                return task.result()

        def run() -> None:
            try:
                outcome.set_result(asyncio.run(exchange()))
            except BaseException as error:
                outcome.set_exception(error)

        threading.Thread(target=run, name="cues poll", daemon=True).start()
        while not concurrent.futures.wait([outcome], waits.LOOK_S).done:
            if waits.stops(self._process):  # the thread may still wait for a name server
                raise _Draining
        return outcome.result()

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


def _fits(cursor: Any) -> bool:
    """Return whether the position holds a cursor; JSON has a larger integer as the nearest float."""
    return len(cursor) <= URL_CHARACTERS_MAX if isinstance(cursor, str) else abs(cursor) < 1 << 63


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
