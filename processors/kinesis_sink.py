"""A sink that puts records to a Kinesis stream; ``kinesis.py`` has the protocol."""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import cues
from cues import arguments
from cues.errors import Away, InvalidArgument
from cues.overrides import override
from cues.processors import PUBLISHER, aws, checks, kafka, takes
from cues.processors.kinesis_source import Kinesis
from cues.processors.sqs import identities

AT_ONCE: Final = 500
"""Records of a request, which Kinesis fixes."""
REQUEST_BYTES: Final = 5 * 1024 * 1024
"""Bytes of a request of several records; a larger record is put alone."""
KEY_CHARACTERS: Final = 256

_FIRST_PAUSE_S: Final = 0.1
_PAUSE_MAX_S: Final = 5.0
_PATIENCE_S: Final = 30.0
"""Seconds for which Kinesis may take no record of a step before the sink says that it is away."""
_ORDERS: Final = ("key", "none")

Message = dict[str, Any]


class _Entry(NamedTuple):
    identity: str
    record: dict[str, Any]
    size: int


@takes(PUBLISHER)
class KinesisSender(checks.Unshared):
    """A sink that puts records; see ``kinesis.py``. :meth:`sink` declares it.

    ``stream``   its name, or its ARN
    ``shape``    ``"value"``: the message is the data, as JSON; ``"record"``: messages have ``data`` (bytes and text as
                 they are, all else as JSON), and perhaps ``key``, the partition key, and ``hash_key``, a number that
                 decides about the shard instead; the other fields of a source's record are allowed and ignored
    ``key``      the partition key: a field, or a function of the message. None: the ``key`` of a record; otherwise the
                 identity of the message, so that messages are spread over the shards
    ``id``       the field of ``shape="value"`` in which each object gets the identity of its message; None: no field
    ``order``    ``"key"``: records of a partition key are put one after another; ``"none"``: at once, so that a record
                 that is put again comes after later ones
    ``timeout_s``, ``endpoint_url``, ``region``, ``client``   as :class:`KinesisStream` has them

    Kind: sink
    Needs: extra `kinesis`
    Guarantee: at least once, in order for each partition key; each message has an identity by which a consumer can drop repetitions
    Mechanism: the step commits after Kinesis has all records; one that was not taken is put again before later ones of its key
    """  # noqa: E501

    def __init__(
        self,
        stream: str,
        *,
        shape: str = "value",
        key: str | Callable[[Message], Any] | None = None,
        id: str | None = None,
        order: str = "key",
        timeout_s: float = 30.0,
        endpoint_url: str | None = None,
        region: str | None = None,
        client: Callable[[], Any] | None = None,
    ) -> None:
        self.kinesis = Kinesis(stream, timeout_s, endpoint_url, region, client)
        self.stream, self.shape, self.key, self.id, self.order = stream, shape, key, id, order
        self._reset()
        for name, given, known in (("shape", shape, kafka.SHAPES), ("order", order, _ORDERS)):
            checks.one_of(name, given, known)
        if key is not None and not callable(key) and not arguments.text_of("key", key):
            raise InvalidArgument("key= is empty.", "name a field, or give a function of the message.")
        if id is not None and (not arguments.text_of("id", id) or shape != "value"):
            raise InvalidArgument(
                f"id={id!r:.60} with shape={shape!r}: it is the name of a field of the object that is put.",
                "leave it out, or use shape='value'.",
            )

    @override
    def _reset(self) -> None:
        self._made: tuple[int, Any] = (0, None)
        """The number of the process, and its client."""
        self._taken: set[str] = set()
        """Identities of the messages that Kinesis has taken of steps that failed, and are to be repeated."""

    def sink(self, inputs: Any, **options: Any) -> cues.Sink:
        """Return a sink that puts the messages of ``inputs``; ``options`` are those of ``cues.Sink``."""
        return cues.Sink(self.put, inputs, **{"batch": True, "id": "put", **options})

    def __cues_prepare__(self) -> None:
        """Look for the stream, so that no message meets a mistake of the declaration."""
        with aws.sending(self.kinesis.what, self.stream):
            try:
                self._client().describe_stream_summary(**self.kinesis.named)
            except Exception as error:
                if aws.code_of(error) != "AccessDeniedException":  # a writer may have no other permission than to put
                    raise

    @takes(PUBLISHER)
    def put(self, messages: Any, process: cues.Process) -> None:
        """Put a message or a list of messages, and wait until Kinesis has them: the function of :meth:`sink`.

        Raises :class:`cues.errors.InvalidArgument` for a message that cannot be put, :class:`cues.errors.Away` if
        Kinesis is away or takes nothing for 30 s, and :class:`cues.errors.CheckpointError` if it refuses the request.
        """
        messages = [messages] if isinstance(messages, dict) else list(messages)
        places = identities(process, len(messages))
        entries = [self._entry(message, place) for message, place in zip(messages, places, strict=True)]
        with aws.sending(self.kinesis.what, self.stream):
            self._put([entry for entry in entries if entry.identity not in self._taken])
        self._taken.difference_update(places)

    def _client(self) -> Any:
        if self._made[0] != os.getpid():  # a connection cannot be used after a fork
            self._made = os.getpid(), self.kinesis.client()
        return self._made[1]

    def _entry(self, message: Message, identity: str) -> _Entry:
        if self.shape == "value":
            value: Any = message if self.id is None else {**message, self.id: identity}
        elif "data" in message:
            value = message["data"]
        else:
            raise _misfit("it has no 'data'", "use shape='value', or add the field in a stream")
        try:
            data = kafka.encoded(value)
        except (TypeError, ValueError) as error:
            raise _misfit(f"JSON cannot hold it ({error})", "return JSON values from a stream") from error
        if data is None:
            raise _misfit("its 'data' is None", "give bytes, text or JSON values")
        given: Mapping[str, Any] = message if self.shape == "record" else {}
        if self.key is None:
            key = given.get("key", identity)
        else:
            key = self.key(message) if callable(self.key) else message.get(self.key)
        text = "" if key is None else str(key)
        if not 1 <= len(text) <= KEY_CHARACTERS:
            raise _misfit(f"its partition key is {key!r:.60}", f"give text of 1 to {KEY_CHARACTERS} characters")
        record = {"Data": data, "PartitionKey": text}
        hash_key = given.get("hash_key")
        if hash_key is not None:
            if not str(hash_key).isdecimal() or int(hash_key) >= 1 << 128:
                raise _misfit(f"its hash_key is {hash_key!r:.60}", "give an integer from 0 to 2**128 - 1")
            record["ExplicitHashKey"] = str(int(hash_key))
        return _Entry(identity, record, len(data) + len(text.encode("utf-8", "surrogatepass")))

    def _put(self, entries: list[_Entry]) -> None:
        """Put the entries in requests; of each group, the entries of a key, only the first one is in a request."""
        groups: dict[Any, deque[_Entry]] = {}
        for n, entry in enumerate(entries):
            groups.setdefault(entry.record["PartitionKey"] if self.order == "key" else n, deque()).append(entry)
        pause_s, heard = _FIRST_PAUSE_S, time.monotonic()
        while groups:
            chosen = _request(groups)
            failures = self._request([groups[name][0] for name in chosen])
            for name, failure in zip(chosen, failures, strict=True):
                group = groups.pop(name)
                if not failure:
                    self._taken.add(group.popleft().identity)
                    heard = time.monotonic()
                if group:
                    groups[name] = group  # at the end: the others first
            refused = next(filter(None, failures), "")
            if not refused:
                pause_s = _FIRST_PAUSE_S
                continue
            if time.monotonic() - heard > _PATIENCE_S:
                what = self.kinesis.what
                raise Away(f"{what} takes no record: {refused}.", "give it more shards, or wait.", what=what)
            time.sleep(pause_s * (0.5 + random.random() / 2))
            pause_s = min(pause_s * 2, _PAUSE_MAX_S)

    def _request(self, entries: list[_Entry]) -> list[str]:
        """Put records in one request; return for each an empty text, or why it was not taken."""
        client = self._client()
        try:
            answer = client.put_records(Records=[entry.record for entry in entries], **self.kinesis.named)
        except Exception as error:
            if aws.code_of(error) not in ("ValidationException", "InvalidArgumentException"):
                raise
            raise _misfit(f"Kinesis refuses it ({error})", "correct the message") from error
        return [
            f"{one['ErrorCode']}: {one.get('ErrorMessage', '')}" if one.get("ErrorCode") else ""
            for one in answer["Records"]
        ]


def _request(groups: Mapping[Any, deque[_Entry]]) -> list[Any]:
    """Return the groups whose first entries fit into one request."""
    chosen: list[Any] = []
    size = 0
    for name, group in groups.items():
        size += group[0].size
        if chosen and (len(chosen) == AT_ONCE or size > REQUEST_BYTES):
            break
        chosen.append(name)
    return chosen


def _misfit(problem: str, instead: str) -> InvalidArgument:
    return InvalidArgument(f"The message cannot be put to Kinesis: {problem}.", f"{instead}.")
