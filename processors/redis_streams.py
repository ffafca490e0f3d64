"""Redis Streams, exactly once: a source of the entries of a stream, and the target of sinks that write into Redis.

    graph.add(cues.Source("orders", RedisStream("redis://localhost:6379", "orders", follow=True)))
    graph.add(RedisTarget("redis://localhost:6379", "priced").sink("prices"))

    @graph.sink("prices", checkpoint=RedisTarget("redis://localhost:6379"))
    def total(price, process):
        process.connection.hincrby("totals", price["shop"], price["cents"])

The client is redis-py, the extra ``redis``. It is imported on first use.

**The source** keeps its position in Cues, in the commit of the messages; it is in no consumer group, and changes
nothing in Redis. Each read is one transaction: the facts of the stream (``XINFO STREAM``), and the entries after the
position. The position is ``[version, id, number, deleted]``: the id of the last entry; how many entries were ever added
up to it, where the server counts them (Redis 7), or None; the highest id of a removed entry that was already told.

**Lost entries.** If entries after the position were removed before they were read (``MAXLEN``, ``XTRIM``, ``XDEL``),
the source stops with :class:`cues.MessagesPurged`; its ``first`` and ``last`` are times of ids in milliseconds. With
``on_gap="fail"`` this error is a failed message, and the source continues after the gap. Redis 7 counts entries, so the
error is exact. Redis 6 does not: if the entry of the position is gone too, the error says that entries *may* be lost,
and an entry that XDEL removed is not noticed. A stream that ends before the position, or is not there any more, is
:class:`cues.errors.Diverged`.

**The sink** follows :mod:`cues.checkpoints.deliveries`. The row of the processor is the hash
``cues:position:<processor>``.

    1. read      WATCH the row and read it
    2. admit     accept the delivery or refuse it; find the messages that are new
    3. queue     the row after this delivery, and the commands of the step
    4. commit    MULTI, all of them, EXEC: Redis does all, or none if another client has changed the row since 1

An answer to 4 that is lost leaves no doubt: the row is read again, and 2 finds no new messages, or all of them.

Not guaranteed: more than the server keeps. A Redis that loses writes (no ``appendonly yes``, an ``appendfsync`` that is
not ``always``, a replica that is promoted without the last writes) loses messages and positions of a sink that Cues has
committed, and a source does not see it if newer entries follow. Redis does not roll back: if a command fails inside
EXEC (such as INCR of a text), the others are done. The sink then stops with an error that names the command, and a
later start continues after that step. A cluster is not supported. A field that is twice in an entry is read once.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit

import cues
from cues import MessagesPurged, jsontext
from cues.arguments import check_number, options_of, text_of
from cues.checkpoints import Row, Transaction, held, write_once
from cues.errors import Away, CheckpointError, CuesError, Diverged, InvalidArgument
from cues.imported import package
from cues.overrides import override
from cues.processors import SINK, SOURCE, checks, foreign, takes, waits

LOG: Final = logging.getLogger("cues.processors.redis")

_VERSION: Final = 1
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_AT_ONCE: Final = 500
"""Entries of one read: more are not faster, and each read has them in memory."""

_SCHEMES: Final = ("redis", "rediss", "unix")
_RESERVED: Final = {
    "decode_responses": "leave it out: fields= decodes.",
    "protocol": "leave it out.",
    "retry": "leave it out: an outage is waited for by outage= of the processor.",
    "socket_timeout": "use timeout_s=.",
    "socket_connect_timeout": "use timeout_s=.",
}
_ENDS: Final = frozenset(("execute", "reset", "close", "watch", "unwatch", "multi", "discard", "transaction"))
"""Names of a pipeline that begin or end a transaction."""

Position = list[Any]
Id = tuple[int, int]


def library() -> Any:
    """Import redis. Raises :class:`cues.errors.NotInstalled`."""
    return package("Redis needs redis-py", "redis", "redis")


class Server:
    """A Redis server as its users here address it: URL, options of redis-py, and the time for which a request may take.

    Raises :class:`InvalidArgument` for a URL or an option that cannot be right.
    """

    def __init__(self, url: str, timeout_s: float, config: Mapping[str, Any] | None) -> None:
        self.url, self.timeout_s = text_of("url", url), timeout_s
        self.config = options_of("config", config, _RESERVED)
        check_number("timeout_s", timeout_s, 0.001, 1e6)
        try:
            parts = urlsplit(url)
            if parts.scheme not in _SCHEMES or not (parts.path if parts.scheme == "unix" else parts.hostname):
                raise ValueError("expected redis://host:port/database")
            host = parts.path if parts.scheme == "unix" else f"{parts.hostname}:{parts.port or 6379}"
            database = "" if parts.scheme == "unix" else parts.path.strip("/")
        except ValueError as error:
            raise InvalidArgument(
                f"url={url.rpartition('@')[2]!r:.80}: {error}.", "give it as 'redis://host:6379/0'."
            ) from None
        self.where = f"{host}/{database}" if database else host
        """The server without its password, for errors."""

    def client(self) -> Any:
        """Return a client, not connected yet. Raises :class:`InvalidArgument` for an option that redis-py refuses."""
        redis = library()
        try:
            found = redis.Redis.from_url(
                self.url,
                **{"health_check_interval": 30, **self.config},
                protocol=2,
                retry=redis.retry.Retry(redis.backoff.NoBackoff(), 0),
                socket_timeout=self.timeout_s,
                socket_connect_timeout=self.timeout_s,
            )
            pool = found.connection_pool
            pool.connection_class(**pool.connection_kwargs)  # checks the options, and connects nothing
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"redis-py refuses the options for {self.where}: {error}.", "correct them.") from None
        return found


# --- the source ---------------------------------------------------------------------------------


class Extent(NamedTuple):
    """The facts of a stream at one moment. ``first`` is None if it is empty; ``added`` is None before Redis 7."""

    length: int
    first: Id | None
    last: Id
    added: int | None
    deleted: Id

    @staticmethod
    def of(info: Mapping[str, Any]) -> Extent:
        """Read the answer to XINFO STREAM."""
        first, added = info.get("first-entry"), info.get("entries-added")
        return Extent(
            info["length"],
            None if not first else id_of(first[0]),
            id_of(info["last-generated-id"]),
            None if added is None else int(added),
            id_of(info.get("max-deleted-entry-id") or b"0-0"),
        )

    def before_first(self) -> Mark:
        """Return the mark after which all entries follow that are there."""
        if self.first is None:
            return Mark(self.last, self.added, self.deleted)
        (ms, seq), number = self.first, None
        if self.added is not None and self.deleted < self.first:  # otherwise one between the others may be removed
            number = self.added - self.length
        return Mark((ms, seq - 1) if seq else (ms - 1, (1 << 64) - 1), number, self.deleted)


class Mark(NamedTuple):
    """A place in a stream: after the entry ``id``, the ``number``-th that was ever added; see the module."""

    id: Id
    number: int | None
    told: Id

    @property
    def position(self) -> Position:
        return [_VERSION, text_of_id(self.id), self.number, text_of_id(self.told)]

    @staticmethod
    def of(position: Any) -> Mark:
        """Read a position. Raises :class:`Diverged` for one of another source."""
        try:
            version, id, number, told = position
            if version != _VERSION or not isinstance(number, int | None):
                raise ValueError(version)
            return Mark(id_of(id), number, id_of(told))
        except (TypeError, ValueError, AttributeError) as error:
            raise checks.foreign_position(position, "cues.processors.redis_streams", _VERSION) from error

    def gap(self, extent: Extent) -> tuple[str, Mark] | None:
        """Return what was removed after this mark, and the mark after the gap; None if nothing was.

        Only the facts of the stream decide. Trimming removes entries from the front. So if an entry up to this mark is
        there, none after it was trimmed. If none is there, the counts decide; without them nothing is certain.
        """
        if extent.first is not None and extent.first <= self.id:
            if extent.deleted <= max(self.id, self.told):
                return None
            told = self._replace(number=None, told=extent.deleted)
            return f"The entry {text_of_id(extent.deleted)}, and perhaps others before it, were removed (XDEL)", told
        after = extent.before_first()
        if extent.last == self.id or after.id == self.id:  # at the end; or no id is between
            return None
        if self.number is None or extent.added is None:
            return f"Entries between {text_of_id(self.id)} and {text_of_id(after.id)} may have been removed", after
        count = extent.added - self.number - extent.length
        if count == 0:
            return None
        return f"{count:,} entries between {text_of_id(self.id)} and {text_of_id(extent.last)} were removed", after

    def after(self, id: Id, extent: Extent) -> Mark:
        """Return the mark after the next entry that was read."""
        counted = self.number is not None and extent.deleted <= self.id
        number = self.number + 1 if counted and self.number is not None else None
        return Mark(id, extent.added if id == extent.last else number, self.told)


def id_of(id: bytes | str) -> Id:
    """Return an id as a pair, so that ids can be compared."""
    ms, _, seq = (id.decode() if isinstance(id, bytes) else id).partition("-")
    return int(ms), int(seq)


def text_of_id(id: Id) -> str:
    return f"{id[0]}-{id[1]}"


def _after(id: Id) -> str:
    """Return the least id after an id: XRANGE includes it, in every version of Redis."""
    ms, seq = id
    return f"{ms}-{seq + 1}" if seq + 1 < 1 << 64 else f"{ms + 1}-0"


DECODERS: Final[dict[str, Callable[[bytes], Any]]] = {
    "text": lambda value: value.decode(),
    "bytes": lambda value: value,
    "json": jsontext.decode,
}
"""The choices of ``fields=`` of a source."""


@takes(SOURCE)
class RedisStream:
    """A source of the entries of a stream; see the module. Give it to ``cues.Source(id, RedisStream(...))``.

    A message has the fields of its entry. ``process.metadata["redis"]`` has its ``id``, ``time`` and ``stream``.

    ``url``        ``"redis://user:password@host:6379/0"``, ``rediss://`` or ``unix://``
    ``stream``     the key of the stream
    ``fields``     decoding of values: ``"text"`` (UTF-8), ``"bytes"``, or ``"json"``: each value is JSON
    ``field``      a name: the message is the JSON object in this field; None: all fields
    ``follow``     True: wait for new entries; otherwise the source ends at the end of the stream
    ``start``      of a first start: ``"oldest"`` or ``"newest"`` (until the first message was committed)
    ``on_gap``     entries that were removed unread: ``"raise"`` stops the source; ``"fail"`` is a failed message
    ``timeout_s``  seconds for which a request may take
    ``config``     more options of redis-py, such as ``ssl_ca_certs``
    ``reserved``   reserved keys that an entry may set: ``"q/type"``, ``"q/topics"``

    Kind: source
    Needs: extra `redis`
    Guarantee: exactly once: each entry that the server keeps is on the queue once, also after kill -9
    Mechanism: position of the entry id, committed with the messages
    """

    def __init__(
        self,
        url: str,
        stream: str,
        *,
        fields: str = "text",
        field: str | None = None,
        follow: bool = False,
        start: str = "oldest",
        on_gap: str = "raise",
        timeout_s: float = 30.0,
        config: Mapping[str, Any] | None = None,
        reserved: Sequence[str] = (),
    ) -> None:
        self.may = foreign.allowed(reserved)
        self.server = Server(url, timeout_s, config)
        self.stream, self.fields, self.field = _named("stream", stream), fields, field
        self.follow, self.start, self.on_gap = follow, start, on_gap
        self.__name__ = "redis_stream"
        _check_field(fields, field, tuple(DECODERS))
        checks.one_of("follow", follow, (True, False))
        checks.one_of("start", start, ("oldest", "newest"))
        checks.one_of("on_gap", on_gap, ("raise", "fail"))

    def __call__(self, position: Position | None, process: Any = None) -> Iterator[tuple[Position, Any]]:
        """Yield ``(position, message)`` after ``position``."""
        redis = library()
        mark = None if position is None else Mark.of(position)
        client = self.server.client()
        try:
            yield from self._items(client, mark, process)
        except redis.exceptions.RedisError as error:
            text = f"The stream {self.stream!r} at {self.server.where} cannot be read: {error}."
            hint = "start the graph again when the server answers; the source continues at its position."
            if _is_away(error):
                raise Away(text, hint, what=f"{self.stream} at {self.server.where}") from error
            raise CuesError(text, "correct the URL, the log-in or the name of the stream.") from error
        finally:
            client.close()

    def _items(self, client: Any, mark: Mark | None, process: Any) -> Iterator[tuple[Position, Any]]:
        while not waits.stops(process):
            extent, entries = self._read(client, mark)
            if extent is not None and extent.last < (mark.id if mark else extent.last):
                assert mark is not None
                raise self._diverged(f"ends at {text_of_id(extent.last)}, before the position {text_of_id(mark.id)}")
            if extent is None:
                if mark is not None:
                    raise self._diverged(f"is not there, and the position is {text_of_id(mark.id)}")
            elif mark is None:
                mark = (
                    extent.before_first() if self.start == "oldest" else Mark(extent.last, extent.added, extent.deleted)
                )
                continue  # its entries are read with their facts
            else:
                if (gap := mark.gap(extent)) is not None:
                    error, mark = self._gap(mark, *gap)
                    if self.on_gap == "raise":
                        raise error
                    yield mark.position, error
                for id, fields in entries:
                    mark = mark.after(id_of(id), extent)
                    yield mark.position, self._message(id.decode(), fields)
            if not entries:
                if not self.follow:
                    return
                waits.answered(process)
                # It only waits: what it returns is read again, with the facts of that moment.
                last = "0-0" if mark is None else text_of_id(mark.id)
                client.xread({self.stream: last}, count=1, block=int(waits.LOOK_S * 1000))

    def _read(self, client: Any, mark: Mark | None) -> tuple[Extent | None, list[Any]]:
        """Return the facts of the stream, None if there is none, and the entries after the mark, of one moment."""
        with client.pipeline() as pipe:
            pipe.xinfo_stream(self.stream)
            if mark is not None:
                pipe.xrange(self.stream, min=_after(mark.id), count=_AT_ONCE)
            info, *rest = pipe.execute(raise_on_error=False)
        if isinstance(info, Exception):
            if "no such key" in str(info):
                return None, []
            raise info
        return Extent.of(info), rest[0] if rest else []

    def _gap(self, before: Mark, text: str, after: Mark) -> tuple[MessagesPurged, Mark]:
        return MessagesPurged(
            f"{text} from the stream {self.stream!r} at {self.server.where} before they were read.",
            "let the stream keep more (MAXLEN, MINID). To continue without these entries: on_gap='fail', which writes"
            " this error to the error queue.",
            queue=self.stream,
            first=before.id[0],
            last=after.id[0],
        ), after

    def _diverged(self, problem: str) -> Diverged:
        return Diverged(
            f"The stream {self.stream!r} at {self.server.where} {problem}: it was deleted, or the server lost writes.",
            "give the source another id, which begins at the start; or restore the stream.",
        )

    def _message(self, id: str, fields: Mapping[bytes, bytes]) -> Any:
        try:
            if self.field is None:
                message = {name.decode(): DECODERS[self.fields](value) for name, value in fields.items()}
            else:
                message = jsontext.decode(fields[self.field.encode()])
                if not isinstance(message, dict):
                    raise ValueError(f"the field {self.field!r} has {type(message).__name__}, not an object")
            foreign.check(message, self.may)
        except (ValueError, KeyError) as error:
            missing = f"it has no field {self.field!r}"
            return InvalidArgument(
                f"The entry {id} of the stream {self.stream!r} cannot be read as fields={self.fields!r},"
                f" field={self.field!r}: {missing if isinstance(error, KeyError) else error}.",
                "correct the writer of the stream; or read it with fields='bytes', and decode it in a stream.",
            )
        return {**message, "q/meta": {"redis": {"stream": self.stream, "id": id, "time": _time_of(id)}}}


def _time_of(id: str) -> datetime | None:
    """Return the time in an id; None if the writer chose another number."""
    try:
        return _EPOCH + timedelta(milliseconds=id_of(id)[0])
    except OverflowError:
        return None


# --- the target of sinks ------------------------------------------------------------------------


def write(messages: Any, process: cues.Process) -> None:
    """Write the messages of a step to the stream of ``checkpoint=``: the function of :meth:`RedisTarget.sink`."""
    process.connection.write(messages)


@takes(SINK)
class RedisTarget(checks.Unshared):
    """A Redis database as the target of sinks (``checkpoint=``); see the module.

    In a function of yours, ``process.connection`` takes every command of redis-py; they are done at the commit, in one
    transaction with the position. So they return no result, and nothing can be read there.

    ``url``        ``"redis://user:password@host:6379/0"``, ``rediss://`` or ``unix://``
    ``stream``     the key of the stream for ``connection.write(messages)`` and :meth:`sink`; None: only commands
    ``fields``     ``"text"``: text and bytes as they are, other values as JSON; ``"json"``: each value as JSON
    ``field``      a name: the message is one JSON object in this field; None: a field for each key
    ``maxlen``     about how many entries the stream keeps (``MAXLEN ~``); None: all
    ``prefix``     of the keys of the positions, for access rules
    ``timeout_s``  seconds for which a request may take
    ``config``     more options of redis-py, such as ``ssl_ca_certs``

    Kind: sink
    Needs: extra `redis`
    Guarantee: exactly once: each message's entry or commands are in Redis once, also after kill -9
    Mechanism: row of delivery in a hash, in the MULTI/EXEC transaction of the commands; WATCH on the row
    """

    def __init__(
        self,
        url: str,
        stream: str | None = None,
        *,
        fields: str = "text",
        field: str | None = None,
        maxlen: int | None = None,
        prefix: str = "cues",
        timeout_s: float = 30.0,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self.server = Server(url, timeout_s, config)
        self.stream = None if stream is None else _named("stream", stream)
        self.fields, self.field, self.maxlen, self.prefix = fields, field, maxlen, text_of("prefix", prefix)
        _check_field(fields, field, ("text", "json"))
        if maxlen is not None:
            check_number("maxlen", maxlen, 1, whole=True)
        self.where = f"{self.stream} at {self.server.where}" if self.stream else self.server.where
        """The stream and its server, for errors."""
        self._reset()

    @override
    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._client: Any = None

    def sink(self, inputs: Any, **options: Any) -> cues.Sink:
        """Return a sink that writes the messages of ``inputs`` as they are; ``options`` are those of ``cues.Sink``."""
        if self.stream is None:
            raise InvalidArgument("The target has no stream.", "give it one: RedisTarget(url, 'name').")
        return cues.Sink(write, inputs, **{"batch": True, "checkpoint": self, "id": "save", **options})

    def transaction(self, process: cues.Process) -> AbstractContextManager[Transaction[Connection]]:
        """Run the block, whose commands are done in one transaction, with exactly the messages that are new to Redis.

        Raises :class:`cues.Fenced` or :class:`cues.errors.Diverged` before the block runs, and
        :class:`cues.errors.CheckpointError` when Redis fails.
        """
        return write_once(_Positions(self), process, Transaction)

    def holds(self, processors: Iterable[str]) -> list[str]:
        """Return those of the processors that have a position in Redis: it refuses them from another store."""
        return held(_Positions(self), processors)

    @property
    def client(self) -> Any:
        """The client of redis-py, to read from Redis. It is safe for threads and forks."""
        with self._lock:
            if self._client is None:
                self._client = self.server.client()
            return self._client

    def key(self, processor: str) -> str:
        """Return the key of a processor's row."""
        return f"{self.prefix}:position:{processor}"

    def __cues_prepare__(self) -> None:
        """Connect, and check the type of the stream, so that no message meets a mistake of the declaration."""
        with self.failures():
            kind = b"none" if self.stream is None else self.client.type(self.stream)
            if kind not in (b"none", b"stream"):
                raise CheckpointError(
                    f"The key {self.stream!r} at {self.server.where} is a {kind.decode()}, not a stream.",
                    "use another key.",
                    where=self.where,
                    away=False,
                )
            if not self.client.info("persistence").get("aof_enabled", 1):
                LOG.warning(
                    "Redis at %s keeps no append-only file: if it ends, messages that were written since its last"
                    " snapshot are lost, and are not written again (appendonly yes, appendfsync always)",
                    self.server.where,
                )

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Raise failures of Redis as CheckpointError. Its cause decides whether the server is away."""
        errors = library().exceptions
        try:
            yield
        except errors.WatchError as error:  # also for a connection that was lost after WATCH
            raise CheckpointError(
                f"The transaction in Redis at {self.where} was not done, or its answer was lost: {error}",
                "do nothing: it is tried again, and the position says whether it was done.",
                where=self.where,
                again=True,
            ) from error
        except (errors.ConnectionError, errors.TimeoutError, errors.ResponseError) as error:
            raise CheckpointError(
                f"Redis failed for {self.where}: {error}",
                "start the graph again when the server answers and takes the command; the sink continues at this"
                " message.",
                where=self.where,
            ) from error

    def close(self) -> None:
        """Close the connections. The next transaction opens new ones."""
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


takes({**SINK, "checkpoint": RedisTarget})(write)


class Connection:
    """The open transaction of a :class:`RedisTarget`: the commands of redis-py, done at the end of its block.

    Use it inside its block, in one thread.
    """

    def __init__(self, target: RedisTarget, pipe: Any) -> None:
        self._target, self._pipe = target, pipe
        self.row: Row | None = None
        """The row after this delivery."""

    def write(self, messages: Any) -> None:
        """Add one message or a list of messages to the stream.

        Raises :class:`cues.errors.InvalidArgument` for a message that is not an entry.
        """
        target = self._target
        if target.stream is None:
            raise InvalidArgument("The target has no stream.", "give it one: RedisTarget(url, 'name').")
        entries = [self._entry(message) for message in ([messages] if isinstance(messages, dict) else messages)]
        for entry in entries:
            self._pipe.xadd(target.stream, entry, maxlen=target.maxlen)

    def _entry(self, message: dict[str, Any]) -> dict[str, bytes]:
        target = self._target
        try:
            if target.field is not None:
                return {target.field: jsontext.encode(message).encode()}
            if not message:
                raise ValueError("it has no field")
            return {name: _encoded(value, target.fields) for name, value in message.items()}
        except (TypeError, ValueError) as error:
            raise InvalidArgument(
                f"The message is not an entry for {target.where}, fields={target.fields!r}: {error}.",
                "add a stream before the sink that returns text, bytes or JSON values.",
            ) from error

    def __getattr__(self, name: str) -> Any:
        if name in _ENDS or name.startswith("_"):
            raise AttributeError(f"{name}: the sink begins and ends the transaction. Try: give commands only.")
        return getattr(self._pipe, name)

    # What follows is for the target.

    def begin(self, key: str) -> dict[bytes, bytes]:
        """Watch a row, and return it as it is; the commands that follow are queued."""
        with self._target.failures():
            self._pipe.watch(key)
            found: dict[bytes, bytes] = self._pipe.hgetall(key)
            self._pipe.multi()
        return found

    @property
    def is_open(self) -> bool:
        return bool(self._pipe.explicit_transaction)

    def commit(self) -> None:
        """Do the commands. Raises :class:`CheckpointError` if one fails, or another client changed the row."""
        if not self.is_open:
            return
        with self._target.failures():
            results = self._pipe.execute(raise_on_error=False)
        failed = [result for result in results if isinstance(result, Exception)]
        if failed:
            raise CheckpointError(
                f"A command of the transaction failed inside Redis at {self._target.where}: {failed[0]} Redis does not"
                " roll back: the other commands of the step and its position are written.",
                "correct the function or the key; mend in Redis what the command did not do. A later start continues"
                " after this step.",
                where=self._target.where,
                away=False,
            )


class _Positions:
    """The rows of a target as a table of positions (:class:`cues.checkpoints.PositionTable`)."""

    def __init__(self, target: RedisTarget) -> None:
        self._target = target
        self.where = target.where

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        with self._target.client.pipeline() as pipe:
            connection = Connection(self._target, pipe)
            yield connection
            connection.commit()

    def read(self, connection: Connection, processor: str, *, lock: bool) -> Row | None:
        if not lock:
            return connection.row
        found = {name.decode(): value.decode() for name, value in connection.begin(self._target.key(processor)).items()}
        if not found:
            return None
        what = f"The key {self._target.key(processor)!r} at {self.where}"
        return Row.kept(found, what, "use another prefix=, or delete the key if it is of another program.")

    def write(self, connection: Connection, processor: str, row: Row, *, insert: bool) -> bool:
        connection.row = row
        connection.hset(self._target.key(processor), mapping=row.columns())
        if insert:
            connection.sadd(f"{self._target.prefix}:processors", processor)
        return True

    def is_open(self, connection: Connection) -> bool:
        return connection.is_open

    def processors(self, connection: Connection) -> Iterable[str]:
        with self._target.failures():
            return [id.decode() for id in self._target.client.smembers(f"{self._target.prefix}:processors")]


def _is_away(error: Exception) -> bool:
    errors = library().exceptions
    return isinstance(error, (errors.ConnectionError, errors.TimeoutError)) and not isinstance(
        error, (errors.AuthenticationError, errors.AuthorizationError)
    )


def _encoded(value: Any, form: str) -> bytes:
    if form == "text":
        if isinstance(value, bytes):
            return value
        if isinstance(value, str):
            return value.encode()
        if value is None:
            raise ValueError("Redis has no null; leave the field out, or use fields='json'")
    return jsontext.encode(value).encode()


def _named(name: str, value: Any) -> str:
    if not text_of(name, value):
        raise InvalidArgument(f"{name}={value!r}: it is empty.", "give the key of a stream.")
    return text_of(name, value)


def _check_field(fields: Any, field: Any, known: tuple[str, ...]) -> None:
    checks.one_of("fields", fields, known)
    if field is not None and (not text_of("field", field) or fields not in ("text", "json")):
        raise InvalidArgument(
            f"field={field!r} with fields={fields!r}.", "give the name of a field that has JSON, and leave fields= out."
        )
