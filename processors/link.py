"""A queue of one machine, continued on a queue of another one, exactly once: over HTTP, in batches.

    # the edge
    graph.add(link.Sender("https://central:7411/readings", token=TOKEN).sink("readings"))

    # the center
    receiver = link.Receiver(port=7411, path="/readings", token=TOKEN, cert="server.pem", key="server.key")
    graph.add(cues.Source("readings", receiver))

The sender is the target of a sink that keeps its position at the other side, as a database does
(:func:`cues.checkpoints.write_once`). The receiver is a source with state: a row for each sender, which has the
messages up to it. A step of the sink is two requests:

    1. read     the receiver answers with the row of this sender, when all that it took from it is committed
    2. write    the new messages, the row as it was and the row after them. The receiver compares the first with its
                row, and yields the messages with the second: one commit. Then it answers 200

A sender that gets no answer reads the row again. So it knows whether the messages are there, wherever either side was
killed: nothing is lost, and nothing is there twice. An owner that was replaced is refused (:class:`cues.Fenced`), and
so is a new store under the name that another store had (:class:`cues.errors.Diverged`).

A request is the msgpack of a map, compressed by zlib. Messages keep their types. With ``batch="arrow"`` the rows of
tables go over as columns, and are columns there.

A message that the queue of the receiver refuses (its schema, its size) fails at the sender, alone, as a row that a
database refuses. While the receiver is away, or has no room (``max_lag=``), the sender waits (``outage=``).

Not guaranteed: that the metadata of a message goes over; the order of messages of several senders. A receiver whose
store is set back to an older copy lacks the messages that it got after that copy was made.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import logging
import re
import socket
import ssl
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import cues
from cues import codec
from cues.arguments import NEWER, check_number, text_of, version_hint
from cues.checkpoints import Row, Transaction, held, write_once
from cues.errors import CheckpointError, CuesError, Diverged, InvalidArgument, NotInstalled
from cues.overrides import override
from cues.processors import SINK, SOURCE, checks, columns, foreign, http, takes
from cues.processors import serving as guards
from cues.processors.places import arrow
from cues.processors.source_server import ServedSource, SourceServer

_VERSION: Final = 1
_CONNECTIONS_MAX: Final = 1_000
_SENDER: Final = "Cues-Sender"
_MEDIA_TYPE: Final = "application/vnd.cues.link"
_SMALL_BYTES: Final = 1_000
"""A smaller body is not compressed."""
_TOKEN_MIN: Final = 16
_PROCESSOR_MAX: Final = 600
_NOT_INSTALLED: Final = 501
_OTHER_VERSION: Final = 426
"""A status of its own, so that the sender knows what to install on which side."""
_AWAY: Final = (408, 429)
_RESERVED: Final = foreign.allowed(foreign.MAY_BE_ALLOWED)
"""Both sides are Cues, and the token says who the other one is: it decides the type and the topics of a message."""

LOG = logging.getLogger("cues.processors")

Position = list[Any]
Message = dict[str, Any]


class _Request(NamedTuple):
    """A request, from the thread of the server to the source."""

    sender: str
    processor: str
    """\"\" in a request for the processors of the sender."""
    before: list[Any] | None
    after: list[Any] | None
    """The row after the messages; None in a request to read."""
    messages: Any
    answer: asyncio.Future[_Reply | None]

    @property
    def field(self) -> str:
        """The field of the state that has the row of the processor."""
        return f"{self.sender}\n{self.processor}"


class _Reply(NamedTuple):
    """The answer of the source to a request."""

    number: int
    """The event whose commit the answer waits for."""
    row: list[Any] | None
    processors: list[str]
    fits: bool = True
    """False: the row is not the one that the sender has seen."""


# --- the receiver -------------------------------------------------------------------------------


@takes(SOURCE)
class Receiver(ServedSource):
    """A source of the messages of senders on other machines; see the module. Give it to ``cues.Source(id, …)``.

    ``port``         0: any free one; :attr:`url` has it
    ``path``         the only path that is served
    ``host``         the address to listen on; other machines reach ``"0.0.0.0"``
    ``token``        what senders show: a text of 16 characters or more, or one for each name of a sender
    ``cert``, ``key``   files of the server's certificate (PEM) and its key: it then speaks HTTPS
    ``client_ca``    a file of certificates: a sender must show one that they signed (mutual TLS)
    ``body_bytes_max``   a request has no more bytes than this, also after it is decompressed. Columns may be compressed
                     once more inside of a table: whoever has a token is trusted not to send what has no end
    ``body_s``       seconds in which a request must arrive whole
    ``answer_s``     seconds in which its commit must follow

    Without ``token=`` and ``client_ca=`` it serves this machine only.

    Kind: source
    Needs: extra `http`
    Guarantee: exactly once: each message of a sender is on the queue once, whatever is killed on either side
    Mechanism: row of each sender in the state, committed with its messages; answer after the commit
    """

    def __init__(
        self,
        port: int = 7411,
        path: str = "/",
        *,
        host: str = "127.0.0.1",
        token: str | Mapping[str, str] | None = None,
        cert: str | Path | None = None,
        key: str | Path | None = None,
        client_ca: str | Path | None = None,
        body_bytes_max: int = 64 << 20,
        body_s: float = 60.0,
        answer_s: float = 10.0,
    ) -> None:
        self.port, self.path, self.host = port, path, host
        self._tokens = _tokens(token)
        self.tls = _tls(cert, key, client_ca)
        self.body_bytes_max, self.body_s, self.answer_s = body_bytes_max, body_s, answer_s
        self.__name__ = "receiver"
        if not isinstance(path, str) or not path.startswith("/"):
            raise InvalidArgument(f"path={path!r:.60}.", "give a path such as '/readings'.")
        check_number("body_bytes_max", body_bytes_max, 1_000, whole=True)
        if token is None and client_ca is None and not _is_local(host):
            raise InvalidArgument(
                f"The receiver would take messages from every machine that reaches {host}.",
                "give token=, the same as the sender's; or client_ca=, with certificates on both sides.",
            )
        self._check_server()

    def __call__(self, position: Position | None, process: Any = None) -> Iterator[tuple[Position, Any]]:
        """Yield ``(position, messages)`` for each request with messages, until the graph drains."""
        checks.position_of(position, "cues.processors.link", 2)
        self._begin(process)
        number = position[1] if position else 0
        self._serving = serving = _Serving(self, number, getattr(process, "check", None))
        last: dict[str, int] = {}
        try:
            for request in serving.requests(process):
                row = process.state.get(request.field)
                processors = process.state.get(request.sender, [])
                if request.after is None or request.before != row:
                    reply = _Reply(last.get(request.field, 0), row, processors, request.after is None)
                    serving.reply(request, reply)
                    continue
                number += 1
                last[request.field] = serving.yielded = number
                process.state[request.field] = request.after
                if row is None:
                    process.state[request.sender] = [*processors, request.processor]
                # Before the yield: the answer waits for the commit of this number.
                serving.reply(request, _Reply(number, request.after, []))
                yield [_VERSION, number], request.messages
        finally:
            serving.close()

    def admits(self, sender: str, authorization: str) -> bool:
        """Return whether a sender showed its token; without tokens the certificate is enough."""
        if not self._tokens:
            return True
        token = self._tokens.get(sender, self._tokens.get("", ""))
        return bool(token) and hmac.compare_digest(authorization.encode(), f"Bearer {token}".encode())


class _Serving(SourceServer):
    """The server of one start of a receiver."""

    def __init__(self, receiver: Receiver, number: int, check: Any) -> None:
        self._receiver, self._check = receiver, check
        self._asked: set[asyncio.Future[_Reply | None]] = set()
        """The requests that the source has not answered."""
        super().__init__(receiver, number, _CONNECTIONS_MAX)

    def reply(self, request: _Request, reply: _Reply) -> None:
        """Give the answer of the source to the thread of the server."""
        self.call(lambda: None if request.answer.done() else request.answer.set_result(reply))

    @override
    def end(self) -> None:
        super().end()
        self.call(self._give_up)

    def _give_up(self) -> None:
        for answer in self._asked:
            if not answer.done():
                answer.set_result(None)

    @override
    async def answer(self, request: Any) -> Any:
        from starlette.responses import Response

        def refused(status: int, error: str) -> Any:
            closing = {"Connection": "close"} if status in (401, 408, 413) or self.ending else {}
            again = {"Retry-After": "1"} if status == 503 else {}
            return guards.said(status, closing | again, {"error": error})

        sender = request.headers.get(_SENDER, "")
        if not _is_name(sender) or not self._receiver.admits(sender, request.headers.get("authorization", "")):
            return refused(401, "the token is not the receiver's")
        if self.ending:
            return refused(503, "the receiver ends")
        try:
            body = await self.body(request, self._receiver.body_bytes_max, self._receiver.body_s)
            headers = dict(request.headers)
            # In a thread of its own, because large ones take a while.
            read = asyncio.to_thread(read_request, body, headers, self._receiver.body_bytes_max, self._check)
            asked = _Request(sender, *await read, self._loop.create_future())
        except guards.Refused as error:
            return refused(error.status, str(error))
        except OtherVersion as error:
            text = f"the request has version {error.args[0]!r:.20} of the link, and this receiver version {_VERSION}"
            return guards.said(_OTHER_VERSION, {}, {"error": text, "version": _VERSION})
        except NotInstalled as error:
            return refused(501, f"{error.message} {error.hint}")
        except CuesError as error:  # the queue does not take a message
            return refused(422, error.message[:2000])
        except Exception as error:  # of any kind: the bytes are a stranger's, and Arrow has many
            return refused(400, f"{type(error).__name__}: {error}"[:500])
        if self.has_ended():
            return refused(503, "the receiver ends")
        self.events.put(asked)
        self._asked.add(asked.answer)
        try:
            async with asyncio.timeout(self._receiver.answer_s):
                reply = await asked.answer
        except TimeoutError:
            return refused(503, "the receiver has no room")
        finally:
            self._asked.discard(asked.answer)
        if reply is None:
            return refused(503, "the receiver ends")
        if not await self.wait(reply.number):
            return refused(503, "the messages are not committed yet")
        status = 200 if reply.fits else 409
        return Response(codec.pack({"row": reply.row, "processors": reply.processors}), status, media_type=_MEDIA_TYPE)


def read_request(body: bytes, headers: Mapping[str, str], bytes_max: int, check: Any) -> tuple[str, Any, Any, Any]:
    """Return the processor, the row before, the row after and the messages of a request.

    Raises errors of many kinds, because the bytes are a stranger's; :class:`OtherVersion` is one of them.
    """
    given = codec.unpack(guards.decoded(body, headers, bytes_max))
    if given["version"] != _VERSION:
        raise OtherVersion(given["version"])
    after, messages = given["after"], None
    if after is not None:
        messages = _messages_of(given["messages"], given["table"], check)
        Row.of(*after)
    return _processor(given["processor"]), given["before"], after, messages


def _messages_of(messages: list[Message], table: bytes | None, check: Any) -> Any:
    given: Any = messages
    if table is not None:
        given = table_of(table)
        foreign.check_keys(given.column_names, _RESERVED)
    for message in messages:
        foreign.check(message, _RESERVED)
    return check(given) if len(given) and check is not None else given or None


class OtherVersion(Exception):
    """A request of another version of the link."""


# --- the sender ---------------------------------------------------------------------------------


def send(messages: Any, process: cues.Process) -> None:
    """Send the messages of a step to the receiver of ``checkpoint=``: the function of :meth:`Sender.sink`."""
    process.connection.write(messages)


@takes(SINK)
class Sender(checks.Unshared):
    """A receiver on another machine as the target of sinks (``checkpoint=``); see the module.

    ``url``        of the :class:`Receiver`: ``"https://central:7411/readings"``
    ``token``      the same as the receiver's
    ``name``       of this sender, at the receiver; None: the name of this machine. Each sender has its own
    ``ca``         a file of certificates (PEM), by which the receiver's is known; None: the usual ones
    ``cert``, ``key``   files of a certificate of this side and its key, for a receiver with ``client_ca=``
    ``timeout_s``  seconds for a request and its answer

    Kind: sink
    Needs: extra `http`
    Guarantee: exactly once: each message is on the queue of the receiver once, whatever is killed on either side
    Mechanism: row of delivery at the receiver, committed there with the messages
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None = None,
        name: str | None = None,
        ca: str | Path | None = None,
        cert: str | Path | None = None,
        key: str | Path | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        http.check_url(url)
        check_number("timeout_s", timeout_s, 0.001, 1e6)
        self.url, self.timeout_s = url, timeout_s
        self.name = socket.gethostname() if name is None else text_of("name", name)
        self.where = http.shown_url(url)
        """The receiver, for errors."""
        self._token = next(iter(_tokens(token).values()), None)
        self._tls = None if ca is None else _file("ca", ca), _pair(cert, key)
        self._reset()
        if not _is_name(self.name):
            raise InvalidArgument(f"name={self.name!r:.60}.", "give a name of 1 to 200 ASCII letters, digits, - . _")
        http.package("httpx")

    @override
    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._client: Any = None

    def sink(self, inputs: Any, **options: Any) -> cues.Sink:
        """Return a sink that sends the messages of ``inputs`` as they are; ``options`` are those of ``cues.Sink``."""
        return cues.Sink(send, inputs, **{"batch": True, "checkpoint": self, "id": "send", **options})

    def transaction(self, process: cues.Process) -> AbstractContextManager[Transaction[Connection]]:
        """Run the block, whose messages are sent together, with exactly those that are new to the receiver.

        Raises :class:`cues.Fenced` or :class:`cues.errors.Diverged` before the block runs, and
        :class:`cues.errors.CheckpointError` when the receiver fails.
        """
        return write_once(_Positions(self), process, Transaction)

    def holds(self, processors: Iterable[str]) -> list[str]:
        """Return those of the processors that have a row at the receiver: it refuses them from another store."""
        return held(_Positions(self), processors)

    def __cues_prepare__(self) -> None:
        """Ask the receiver, so that no message meets a wrong token or address."""
        if self._token is not None and self.url.startswith("http:") and not _is_local(urlsplit(self.url).hostname):
            LOG.warning("the token for %s goes over the network in clear: use https://, or a tunnel", self.where)
        self.ask("")

    def ask(self, processor: str, **given: Any) -> dict[str, Any]:
        """Send a request, and return its answer.

        Raises :class:`CheckpointError`, :class:`InvalidArgument`, and :class:`Diverged` for another version.
        """
        httpx = http.package("httpx")
        request = {"version": _VERSION, "processor": processor, "before": None, "after": None, **given}
        body = codec.pack(request)
        headers = {_SENDER: self.name, "Content-Type": _MEDIA_TYPE}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        if request.get("table") is None and len(body) > _SMALL_BYTES:
            body, headers["Content-Encoding"] = zlib.compress(body, 1), "deflate"
        try:
            answer = self._connected().post(self.url, content=body, headers=headers)
        except httpx.RequestError as error:
            closed = isinstance(error, httpx.RemoteProtocolError)  # a server says no more to a client without TLS
            maybe = " Perhaps it wants https://, or a certificate (cert=, key=)." if closed else ""
            raise CheckpointError(
                f"The receiver at {self.where} cannot be reached: {error}{maybe}",
                "start the graph again when it answers; the sink continues at this message."
                if not _is_refused(error)
                else "correct ca= or the certificate of the receiver.",
                where=self.where,
                away=not _is_refused(error),
            ) from error
        if answer.status_code == 200 and answer.headers.get("content-type") == _MEDIA_TYPE:
            return dict(codec.unpack(answer.content))
        raise self._refused(answer)

    def _refused(self, answer: Any) -> CuesError:
        status = answer.status_code
        text, version = " ".join(answer.text.split())[:500], None
        with contextlib.suppress(ValueError, KeyError, TypeError):
            said = answer.json()
            text, version = str(said["error"]), said.get("version")
        if status == _OTHER_VERSION:
            return Diverged(
                f"The receiver at {self.where} refused the request: {text}.",
                version_hint(version, _VERSION, f"there, {NEWER}"),
            )
        if status in (413, 422):
            return InvalidArgument(f"The receiver at {self.where} refused messages: {text}", "correct the messages.")
        if status == 409:
            return CheckpointError(
                f"The row at {self.where} was changed by another request, or its answer was lost.",
                "do nothing: it is tried again, and the row says whether the messages are there.",
                where=self.where,
                again=True,
            )
        away = status in _AWAY or (status >= 500 and status != _NOT_INSTALLED)
        return CheckpointError(
            f"The receiver at {self.where} answered {status}: {text}",
            "wait: it is asked again." if away else "correct url= and token=: they are those of the receiver.",
            where=self.where,
            away=away,
        )

    def _connected(self) -> Any:
        """The client, which is safe for threads."""
        with self._lock:
            if self._client is None:
                httpx = http.package("httpx")
                ca, pair = self._tls
                try:
                    context = httpx.create_ssl_context() if ca is None else ssl.create_default_context(cafile=ca)
                    if pair is not None:
                        context.load_cert_chain(*pair)
                except (OSError, ssl.SSLError) as error:
                    raise CheckpointError(
                        f"The certificates for {self.where} cannot be read: {error}",
                        "correct ca=, cert= and key=.",
                        where=self.where,
                        away=False,
                    ) from error
                self._client = httpx.Client(verify=context, timeout=self.timeout_s)
            return self._client

    def close(self) -> None:
        """Close the connections. The next request opens new ones."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


send.takes_columns = True  # type: ignore[attr-defined]  # its messages are given as they lie on the queue
takes({**SINK, "checkpoint": Sender})(send)


class Connection:
    """The open transaction of a :class:`Sender`: its messages leave at the end of the block, in one request."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._given: list[Any] = []
        """The messages, as one list or one table."""
        self._processor = ""
        self._before: list[Any] | None = None
        self.row: Row | None = None
        """The row after this delivery."""
        self.is_open = True

    def write(self, messages: Any) -> None:
        """Send a message, a list of messages or a table, with the commit."""
        given = [*self._given, *columns.runs_of(messages, joined=True)]
        self._given = given if len(given) < 2 else list(columns.runs_of(_Runs(given), joined=True))

    # What follows is for the target.

    def begin(self, processor: str) -> Row | None:
        """Read the row of a processor."""
        self._processor = processor
        self._before = self._sender.ask(processor)["row"]
        if self._before is None:
            return None
        what, otherwise = f"The row of {processor} at {self._sender.where}", "use another name=."
        return Row.kept(dict(zip(Row._fields, self._before)), what, otherwise)

    def commit(self) -> None:
        """Send the messages with the row."""
        self.is_open = False
        if self.row is None:
            return
        after = list(self.row.columns().values())
        given = self._given[0] if self._given else []
        messages, table = (list(map(_bare, given)), None) if isinstance(given, list) else ([], bytes_of(given))
        if after != self._before or len(given):
            self._sender.ask(self._processor, before=self._before, after=after, messages=messages, table=table)


class _Runs(list[Any]):
    """Several lists and tables, as a step gives them."""

    def runs(self) -> list[Any]:
        return list(self)


class _Positions:
    """The rows of a sender as a table of positions (:class:`cues.checkpoints.PositionTable`)."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self.where = sender.where

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        connection = Connection(self._sender)
        yield connection
        connection.commit()

    def read(self, connection: Connection, processor: str, *, lock: bool) -> Row | None:
        return connection.begin(processor) if lock else connection.row

    def write(self, connection: Connection, processor: str, row: Row, *, insert: bool) -> bool:
        connection.row = row
        return True

    def is_open(self, connection: Connection) -> bool:
        return connection.is_open

    def processors(self, connection: Connection) -> Iterable[str]:
        return list(self._sender.ask("")["processors"])


# --- both sides ---------------------------------------------------------------------------------


def _tokens(token: str | Mapping[str, str] | None) -> dict[str, str]:
    """Return tokens by the name of their sender; "" is for all."""
    tokens = {} if token is None else dict(token) if isinstance(token, Mapping) else {"": token}
    for each in tokens.values():
        if not isinstance(each, str) or len(each) < _TOKEN_MIN or not (each.isascii() and each.isprintable()):
            raise InvalidArgument(  # without the value
                f"The token is not a text of {_TOKEN_MIN} ASCII characters or more.",
                "make one: python -c 'import secrets; print(secrets.token_urlsafe())'",
            )
    return tokens


def _file(name: str, given: Any) -> str:
    if not isinstance(given, (str, Path)) or not str(given):
        raise InvalidArgument(f"{name}={given!r:.60}.", "give the path of a file in PEM format.")
    return str(given)


def _pair(cert: Any, key: Any) -> tuple[str, str | None] | None:
    if cert is None:
        if key is not None:
            raise InvalidArgument("key= is given without cert=.", "give both.")
        return None
    return _file("cert", cert), None if key is None else _file("key", key)


def _tls(cert: Any, key: Any, client_ca: Any) -> dict[str, Any]:
    """Return the options of uvicorn for a server with TLS; none without a certificate."""
    pair = _pair(cert, key)
    if pair is None:
        if client_ca is not None:
            raise InvalidArgument("client_ca= is given without cert=.", "give the server a certificate too.")
        return {}
    # TLS 1.2 and newer, by Python's default; of 1.2 only suites that keep old traffic secret when a key gets known.
    options: dict[str, Any] = {
        "ssl_certfile": pair[0],
        "ssl_keyfile": pair[1],
        "ssl_ciphers": "ECDHE+AESGCM:ECDHE+CHACHA20",
    }
    if client_ca is not None:
        options |= {"ssl_ca_certs": _file("client_ca", client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


def _is_local(host: str | None) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False


def _is_name(name: str) -> bool:
    return re.fullmatch(r"[\w.-]{1,200}", name, re.A) is not None


def bytes_of(table: Any) -> bytes:
    """Return a table as an Arrow IPC stream."""
    pa = arrow()
    import pyarrow.ipc  # noqa: F401  # is not loaded with pyarrow

    table = pa.table(table)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


def table_of(packed: bytes) -> Any:
    """Return the table of :func:`bytes_of`. Raises ValueError for other bytes."""
    pa = arrow()
    import pyarrow.ipc  # noqa: F401  # is not loaded with pyarrow

    with pa.ipc.open_stream(packed) as reader:
        table = reader.read_all()
    table.validate(full=True)  # a buffer that is too short is an error here, and not a crash later
    return table


def _bare(message: Any) -> Any:
    """Return a message without its metadata, which is of the sender's queue."""
    return {name: value for name, value in message.items() if name != "q/meta"} if "q/meta" in message else message


def _processor(name: Any) -> str:
    if not isinstance(name, str) or len(name) > _PROCESSOR_MAX:
        raise ValueError("the processor has no name")
    return name


def _is_refused(error: BaseException | None) -> bool:
    """Return whether TLS was refused: a certificate that is not known does not become known by waiting."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError))
        error = error.__cause__ or error.__context__
    return False
