"""The client of RabbitMQ as ``rabbitmq_source.py`` and ``rabbitmq_sink.py`` use it: a broker, its answers, connections.

The client is pika, the extra ``rabbitmq``. It is imported on first use.
"""

from __future__ import annotations

import importlib
import logging
import queue
import ssl
import threading
from collections.abc import Callable, Iterable
from typing import Any, Final, NamedTuple
from urllib.parse import unquote, urlsplit

from cues.arguments import check_number, text_of
from cues.errors import Away, CuesError, InvalidArgument
from cues.imported import package
from cues.overrides import override

IN_FLIGHT_MAX: Final = 65_535
SHORT_BYTES: Final = 255
"""Bytes that a name or a routing key may have."""

_PORTS: Final = {"amqp": 5672, "amqps": 5671}
_CLOSE_S: Final = 2.0
"""Seconds for which the broker may take to confirm the end of a connection."""
_FAULTS: Final = {
    402: "correct the options, or the objects at the broker.",
    403: "correct the permissions of the user at the broker.",
    404: "make it at the broker; or give declare={} to a source.",
    406: "correct declare=, or the queue at the broker.",
    530: "correct the virtual host in url=, or the permissions of the user.",
    540: "use a broker that has it.",
}
"""Reply codes that no wait mends, each with what to try."""
_PASSING: Final = ("in exclusive use", "timed out", "down or inaccessible", "limit")
"""Texts of the same codes for what passes: another consumer, an acknowledgement that took too long, a node, a limit."""
_LOG_IN: Final = frozenset(("AuthenticationError", "ProbableAuthenticationError"))
_LOST_IN_TLS: Final = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError)

_pika_log = logging.getLogger("pika")

Step = Callable[[Any, Callable[..., None]], Any]
"""A method of a channel to call: it gets the channel, and the function that is called with the answer."""
Events = queue.SimpleQueue[tuple[str, Any]]


def library() -> Any:
    found = package("RabbitMQ needs pika", "rabbitmq", "pika")
    if not _pika_log.level:  # each failure is raised here, and pika says it in seven lines more
        _pika_log.setLevel(logging.CRITICAL)
    return found


class Broker(NamedTuple):
    """A broker and how to reach it. Its text shows no secret."""

    shown: str
    host: str
    port: int
    vhost: str
    user: str | None
    password: str | Callable[[], str] | None
    tls: Callable[[], ssl.SSLContext] | None
    heartbeat_s: float
    timeout_s: float

    @override
    def __repr__(self) -> str:
        return f"<broker {self.shown}>"

    def parameters(self, name: str) -> Any:
        """Return the parameters of a connection, which the broker shows by ``name``."""
        lib = library()
        options: dict[str, Any] = {}
        if self.user is not None:
            password = self.password() if callable(self.password) else self.password
            options["credentials"] = lib.PlainCredentials(self.user, password or "")
        if self.tls is not None:
            options["ssl_options"] = lib.SSLOptions(self.tls(), self.host)
        return lib.ConnectionParameters(
            self.host,
            self.port,
            self.vhost,
            heartbeat=round(self.heartbeat_s),
            connection_attempts=1,
            socket_timeout=self.timeout_s,
            stack_timeout=self.timeout_s,
            client_properties={"connection_name": name},
            **options,
        )

    def away(self, text: str) -> Away:
        return Away(
            f"The broker {self.shown} is away: {text}.", "start the graph again when it answers.", what=self.shown
        )

    def failed(self, error: BaseException) -> CuesError:
        """Return the error for an exception of the client: the broker is away, or a fault."""
        error = _innermost(error)
        if isinstance(error, CuesError):
            return error
        kind, code = type(error).__name__, getattr(error, "reply_code", 0)
        text = f"{code} {getattr(error, 'reply_text', '')}" if code else f"{kind}: {error}".rstrip(": ")
        if isinstance(error, ssl.SSLError) and not isinstance(error, _LOST_IN_TLS):
            return CuesError(f"The broker {self.shown} is refused: {error}.", "correct the certificates, or tls=.")
        if kind in _LOG_IN:
            return CuesError(f"The broker {self.shown} refused the log-in.", "correct user= and password=.")
        if kind == "ProbableAccessDeniedError":
            code = 530
        if code in _FAULTS and not any(word in text for word in _PASSING):
            return Refused(f"The broker {self.shown} refused: {text}.", _FAULTS[code], code)
        if isinstance(error, (OSError, library().exceptions.AMQPError)):
            return self.away(text)
        return CuesError(f"The client of {self.shown} failed: {text}.", "correct what it names.")


class Refused(CuesError):
    """The broker refused a method, with a reply code."""

    def __init__(self, message: str, hint: str, code: int) -> None:
        super().__init__(message, hint)
        self.code = code

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.message, self.hint, self.code)


def _innermost(error: BaseException) -> BaseException:
    """Return the exception that those of pika's phases of a connection carry."""
    for _ in range(10):
        carried = [getattr(error, "exception", None), *reversed(getattr(error, "exceptions", ())), *error.args[:1]]
        found = next((one for one in carried if isinstance(one, BaseException)), None)
        if found is None:
            break
        error = found
    return error


def broker_of(
    url: str,
    user: str | None,
    password: str | Callable[[], str] | None,
    tls: Callable[[], ssl.SSLContext] | None,
    heartbeat_s: float,
    timeout_s: float,
) -> Broker:
    """Check the options that both processors have. No error shows ``url``, which may have a password."""
    try:
        parts = urlsplit(text_of("url", url))
        host, port = parts.hostname, parts.port or _PORTS.get(parts.scheme, 0)
    except ValueError:
        raise InvalidArgument("url= is not the address of a broker.", "give 'amqp://host:5672'.") from None
    if parts.username is not None or parts.password is not None:
        raise InvalidArgument("url= has a user or a password.", "give user= and password=.")
    path = parts.path[1:]
    if parts.scheme not in _PORTS or not host or "/" in path or parts.query or parts.fragment:
        raise InvalidArgument("url= is not the address of a broker.", "give 'amqp://host/vhost' or 'amqps://host'.")
    if tls is not None and (parts.scheme != "amqps" or not callable(tls)):
        raise InvalidArgument(
            "tls= is a function for a URL of amqps://.", "give tls=lambda: ssl.create_default_context(…)."
        )
    if user is not None and not text_of("user", user):
        raise InvalidArgument("user= is empty.", "leave it out.")
    if password is not None and (user is None or not (isinstance(password, str) or callable(password))):
        raise InvalidArgument("password= is a text or a function, and needs user=.", "give both.")
    check_number("heartbeat_s", heartbeat_s, 1, 65_535)
    check_number("timeout_s", timeout_s, 0.001)
    if parts.scheme == "amqps" and tls is None:
        tls = ssl.create_default_context
    library()
    shown = f"{parts.scheme}://{f'[{host}]' if ':' in host else host}:{port}{'/' * bool(path)}{path}"
    return Broker(shown, host, port, unquote(path) or "/", user, password, tls, heartbeat_s, timeout_s)


def short_of(name: str, value: str) -> str:
    """Return a text that AMQP can have as a name. Raises :class:`InvalidArgument`."""
    if len(text_of(name, value).encode("utf-8", "surrogatepass")) > SHORT_BYTES or not value.isprintable():
        raise InvalidArgument(f"{name}={value[:60]!r}: AMQP has names of at most {SHORT_BYTES} bytes.", "give another.")
    return value


class Link:
    """A connection with one channel, in a thread of its own, so that heartbeats are answered whatever others do.

    ``steps`` are called one after another when the channel is open. All that happens is put into ``events``, as a pair:

        ("open", None)     all steps are answered
        ("lost", error)    the end of the connection, a :class:`CuesError`; nothing that matters follows
        others             as the steps put them
    """

    def __init__(self, broker: Broker, name: str, steps: Iterable[Step], events: Events) -> None:
        self.events = events
        self.lost = False
        self._broker, self._name, self._steps = broker, name, iter(steps)
        self._channel: Any = None
        self._connection: Any = None
        self._loop = importlib.import_module("pika.adapters.select_connection").IOLoop()
        self._guard, self._ended = threading.Lock(), False
        self._thread = threading.Thread(target=self._run, name="cues-rabbitmq", daemon=True)
        self._thread.start()
        try:
            kind, fact = self.next()
            if kind == "lost":
                raise fact
        except BaseException:
            self.close()
            raise

    def next(self) -> tuple[str, Any]:
        """Return the next event. Raises :class:`Away` if there is none within ``timeout_s``."""
        try:
            return self.events.get(timeout=self._broker.timeout_s)
        except queue.Empty:
            raise self._broker.away(f"no answer within {self._broker.timeout_s:g} s") from None

    def post(self, call: Callable[[Any], Any]) -> None:
        """Call a function with the channel, in the thread; not if the channel has ended."""
        self._post(lambda: call(self._channel) if self._channel is not None and self._channel.is_open else None)

    def close(self) -> None:
        """End the connection, after all that was posted."""
        self._post(self._close)
        self._thread.join(self._broker.timeout_s + _CLOSE_S)

    def _post(self, call: Callable[[], Any]) -> None:
        with self._guard:
            if not self._ended:
                self._loop.add_callback_threadsafe(call)

    # --- in the thread ---

    def _run(self) -> None:
        try:
            self._connection = library().SelectConnection(
                self._broker.parameters(self._name), self._opened, self._over, self._over, custom_ioloop=self._loop
            )
            self._loop.start()
        except BaseException as error:
            self._lose(error)
        with self._guard:
            self._ended = True
        self._loop.close()

    def _opened(self, connection: Any) -> None:
        connection.channel(on_open_callback=self._proceed)

    def _proceed(self, answer: Any) -> None:
        if self._channel is None:
            self._channel = answer
            answer.add_on_close_callback(lambda _, error: self._lose(error))
            answer.add_on_cancel_callback(lambda _: self._lose(self._broker.away("it ended the consumer")))
        step = next(self._steps, None)
        if step is None:
            self.events.put(("open", None))
        else:
            step(self._channel, self._proceed)

    def _over(self, _: Any, error: BaseException) -> None:
        self._lose(error)
        self._loop.stop()

    def _lose(self, error: BaseException) -> None:
        self.lost = True
        self.events.put(("lost", self._broker.failed(error)))

    def _close(self) -> None:
        if self._connection is None or not self._connection.is_open:
            self._loop.stop()
        else:
            self._loop.call_later(_CLOSE_S, self._loop.stop)
            self._connection.close()
