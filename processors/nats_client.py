"""The client of NATS as ``nats_source.py`` and ``nats_sink.py`` use it: servers, a connection, errors.

The client is nats-py, the extra ``nats``. It is imported on first use, and runs in a thread of its own.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import ssl
import threading
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

from cues.arguments import check_number, options_of, text_of, texts_of
from cues.errors import InvalidArgument
from cues.imported import package

LOG: Final = logging.getLogger("cues.processors.nats")

AT_ONCE: Final = 500
"""Messages of one request of the source, and most messages of the sink that wait for their answers."""
_RETRY_S: Final = 0.05
"""Seconds between two attempts to connect to a server: two are made, and then the engine waits."""
_RESERVED: Final = {
    "servers": "use the first argument.",
    "allow_reconnect": "leave it out: an outage is waited for by outage= of the processor.",
    "max_reconnect_attempts": "leave it out: an outage is waited for by outage= of the processor.",
    "reconnect_time_wait": "leave it out: an outage is waited for by outage= of the processor.",
    "connect_timeout": "use timeout_s=.",
    "error_cb": "leave it out: errors are in the log.",
    "closed_cb": "leave it out: errors are in the log.",
}

T = TypeVar("T")


def library() -> Any:
    """Import nats. Raises :class:`cues.errors.NotInstalled`."""
    return package("NATS needs nats-py", "nats", "nats", "nats.errors", "nats.js.api", "nats.js.errors")


class Servers:
    """The servers as their users here address them: URLs, options of nats-py, the time for which a request may take.

    Raises :class:`InvalidArgument` for what cannot be right.
    """

    def __init__(self, servers: str | Sequence[str], timeout_s: float, config: Mapping[str, Any] | None) -> None:
        self.urls = texts_of("servers", servers)
        self.timeout_s, self.config = timeout_s, options_of("config", config, _RESERVED)
        check_number("timeout_s", timeout_s, 0.001, 1e6)
        if not self.urls or not all(url.startswith(("nats://", "tls://", "ws://", "wss://")) for url in self.urls):
            hosts = ", ".join(url.rpartition("@")[2] for url in self.urls)
            raise InvalidArgument(f"servers={hosts!r:.80} is not a list of URLs.", "use 'nats://host:4222'.")
        addresses = (url.partition("?")[0].rpartition("@")[2].removeprefix("nats://") for url in self.urls)
        self.where = ",".join(addresses)
        """The servers without passwords, for errors."""


class Connection:
    """A connection to one of the servers, in a thread with an event loop. ``call`` waits for a coroutine there."""

    def __init__(self, servers: Servers) -> None:
        self._nats, self._servers = library(), servers
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cues-nats", daemon=True)
        self._thread.start()
        self._client: Any = None
        self._calls: set[asyncio.Task[Any]] = set()
        try:
            self._client = self.call(self._connect())
        except BaseException:
            self.close()
            raise
        self.js = self._client.jetstream(timeout=servers.timeout_s)

    async def _connect(self) -> Any:
        failures: list[Exception] = []

        async def failed(error: Exception) -> None:
            LOG.debug("%s: %s", type(error).__name__, error)
            failures.append(error)

        own = {
            "allow_reconnect": False,
            "max_reconnect_attempts": 1,
            "reconnect_time_wait": _RETRY_S,
            "connect_timeout": self._servers.timeout_s,
            "error_cb": failed,
            "closed_cb": self._closed,
        }
        try:
            return await self._nats.connect(self._servers.urls, **{"name": "cues", **self._servers.config, **own})
        except self._nats.errors.NoServersError:
            # It does not say why. A certificate that is refused is a fault, whatever the other servers are.
            raise next((error for error in failures if isinstance(error, ssl.SSLError)), failures[-1]) from None
        except TypeError as error:
            raise InvalidArgument(f"nats-py refuses the options: {error}.", "correct config=.") from error

    @property
    def is_closed(self) -> bool:
        return bool(self._client.is_closed)

    @property
    def payload_bytes_max(self) -> int:
        return int(self._client.max_payload)

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread; return its result. A connection that is closed meanwhile raises its error."""
        try:
            return asyncio.run_coroutine_threadsafe(self._tracked(coroutine), self._loop).result()
        except concurrent.futures.CancelledError:
            raise self._nats.errors.ConnectionClosedError from None
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            coroutine.close()
            raise self._nats.errors.ConnectionClosedError from None

    def close(self) -> None:
        """Close the connection and end the thread; calls of other threads are cancelled."""
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def stream_info(self, stream: str) -> dict[str, Any]:
        """Return the facts of a stream; nats-py leaves the time of its creation out before 2.16."""
        answer = await self._client.request(f"$JS.API.STREAM.INFO.{stream}", b"", timeout=self._servers.timeout_s)
        info: dict[str, Any] = json.loads(answer.data)
        if "error" in info:
            self._nats.js.errors.APIError.from_error(info["error"])
        return info

    async def _tracked(self, coroutine: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._calls.add(task)
        try:
            return await coroutine
        finally:
            self._calls.discard(task)

    async def _closed(self) -> None:
        """End the calls that wait for answers: nats-py lets them wait for their timeout."""
        for task in self._calls:
            task.cancel()

    async def _end(self) -> None:
        if self._client is not None:
            with suppress(self._nats.errors.Error, OSError):
                await self._client.close()
        own = asyncio.current_task()
        others = [task for task in asyncio.all_tasks() if task is not own]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


def is_away(error: BaseException) -> bool:
    """Return whether an exception of nats-py says that the servers cannot be reached, or JetStream does not answer."""
    nats = library()
    errors, js = nats.errors, nats.js.errors
    return not isinstance(error, ssl.SSLError) and isinstance(
        error,
        (
            OSError, TimeoutError, errors.NoServersError, errors.ConnectionClosedError, errors.StaleConnectionError,
            errors.ConnectionReconnectingError, errors.ConnectionDrainingError, errors.OutboundBufferLimitError,
            errors.NoRespondersError, js.ServiceUnavailableError, js.ServerError, js.NoStreamResponseError,
        ),
    )  # fmt: skip


def named(name: str, value: Any) -> str:
    if not text_of(name, value):
        raise InvalidArgument(f"{name}={value!r}: it is empty.", f"give the {name}.")
    return text_of(name, value)
