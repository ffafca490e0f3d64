"""Amazon SQS: a source of the messages of a queue, deleted after their commit, and a sink that sends.

    graph.add(cues.Source("orders", Sqs("https://sqs.eu-west-1.amazonaws.com/123456789012/orders", body="json")))
    graph.add(Sender("https://sqs.eu-west-1.amazonaws.com/123456789012/bills.fifo", group="customer").sink("bills"))

The client is boto3, the extra ``sqs``, with its credentials (environment, profile, role), or that of ``client=``.

**The source.**

    1. receive   by long polling; SQS hides the messages for ``visibility_s``, and a thread extends that while they wait
    2. commit    by the engine: the message, and a row of state with its MessageId
    3. delete    from SQS, in tens; when SQS has confirmed it, the row goes with the next commit

A process that is killed before 2 has the message again after ``visibility_s``. A message that comes again after 2 has
the MessageId of a row: it is deleted, and is not a message again. A row whose confirmation was lost stays for 14 days,
for which SQS keeps a message at most. So each message is on the queue once. At most ``in_flight`` messages are hidden
and not deleted: the others stay at SQS while the queue is full (``max_lag``).

**The sink** sends each message, in tens, and the step commits when SQS has all of them: at least once. On a FIFO queue
each message has a MessageDeduplicationId that is the same at each repetition: a hash of the store, the processor and
the place of the message on its queue. SQS drops a repetition that comes within five minutes, so a message is there once
unless this process was away for longer between the send and the commit.

**Not guaranteed.** SQS may deliver a message of a standard queue again although its deletion was confirmed ("on rare
occasions"); such a message is on the queue twice. A standard queue has no order.

**Failures.** SQS that cannot be reached, throttles or has an internal error is away: the processor waits. A missing
queue, wrong credentials and missing permissions stop the processor.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import os
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlsplit

import cues
from cues import jsontext
from cues.arguments import check_number, text_of
from cues.errors import Away, CuesError, InvalidArgument
from cues.overrides import override
from cues.processors import PUBLISHER, SOURCE, aws, checks, foreign, kafka, takes, waits
from cues.processors.acknowledged import CLOSE_S, VERSION, Acknowledging, Position

AT_ONCE: Final = 10
"""Messages of a request, which SQS fixes."""
REQUEST_BYTES: Final = 262_144
"""Bytes of a request of several messages; a larger message is sent alone."""
RETENTION_S: Final = 14 * 86_400
"""The longest time for which SQS keeps a message."""

_RETRY_S: Final = 1.0
_LOOK_S: Final = 0.05
_BODIES: Final = ("text", "json")

_log = logging.getLogger("cues.processors")

Message = dict[str, Any]


def _checked(url: str, client: Any) -> None:
    """Check what both processors have."""
    parts = urlsplit(text_of("url", url))
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or not parts.path.strip("/"):
        raise InvalidArgument(
            "url= is not the URL of a queue.", "give 'https://sqs.<region>.amazonaws.com/<account>/<queue>'."
        )
    aws.check_library("sqs", client)


def _client(url: str, make: Callable[[], Any] | None) -> Any:
    parts = urlsplit(url)
    named = re.match(r"sqs\.([a-z0-9-]+)\.", str(parts.hostname))
    endpoint = f"{parts.scheme}://{parts.netloc}"
    return aws.client_of("sqs", make, endpoint_url=endpoint, region_name=named and named[1])


# --- the source -----------------------------------------------------------------------------------


@takes(SOURCE)
class Sqs(Acknowledging):
    """A source of the messages of a queue; see the module. Give it to ``cues.Source(id, Sqs(...))``.

    ``url``           the URL of the queue
    ``body``          decoding of bodies: ``"text"`` or ``"json"``. A body that cannot be decoded is a failed message
    ``shape``         ``"record"``: messages ``{"id", "body", "attributes", "group", "sent"}``; ``"value"``: the JSON
                      object of the body, and the rest is ``process.metadata["sqs"]``. ``attributes`` are the message
                      attributes, text or bytes by name; ``group`` is that of a FIFO queue; ``sent`` a datetime
    ``visibility_s``  seconds for which SQS hides a message that this process received, after its end
    ``wait_s``        seconds for which a request waits for messages, at most 20; a drain waits for it
    ``in_flight``     messages that are received and not deleted
    ``idle_exit_s``   end the source after so many seconds without a message; None: never
    ``client``        a function that returns a boto3 client, for credentials, proxies and the like
    ``reserved``      ``"q/type"`` or ``"q/topics"``, which bodies may set then (:mod:`cues.processors.foreign`)

    Kind: source
    Needs: extra `sqs`
    Guarantee: exactly once: each message is on the queue once, also after kill -9, unless SQS delivers it after a confirmed deletion
    Mechanism: deletion after the commit; a row of state with the MessageId, committed with the message, until the deletion is confirmed
    """  # noqa: E501

    def __init__(
        self,
        url: str,
        *,
        body: str = "text",
        shape: str = "record",
        visibility_s: float = 60,
        wait_s: float = 5,
        in_flight: int = 1_000,
        idle_exit_s: float | None = None,
        client: Callable[[], Any] | None = None,
        reserved: Sequence[str] = (),
    ) -> None:
        self.may = foreign.allowed(reserved)
        self.url, self.body, self.shape, self.client = url, body, shape, client
        self.visibility_s, self.wait_s, self.in_flight, self.idle_exit_s = visibility_s, wait_s, in_flight, idle_exit_s
        self.__name__ = "sqs"
        check_number("visibility_s", visibility_s, 1, 43_200)
        check_number("wait_s", wait_s, 0, 20)
        check_number("in_flight", in_flight, 1, whole=True)
        if idle_exit_s is not None:
            check_number("idle_exit_s", idle_exit_s, 0)
        for name, given, known in (("body", body, _BODIES), ("shape", shape, kafka.SHAPES)):
            checks.one_of(name, given, known)
        checks.decoded(shape, "body", body)
        _checked(url, client)

    _module = "cues.processors.sqs"

    @override
    def _needs_process(self, position: Position | None) -> bool:
        return position is not None

    @override
    def _new_reading(self, position: Position | None, process: Any) -> Reading:
        return Reading(self, position, process)


class Reading:
    """One call of a source. A thread deletes messages and extends the time for which others are hidden."""

    def __init__(self, source: Sqs, position: Position | None, process: Any) -> None:
        self._source, self._process = source, process
        self._state: Any = {} if process is None else process.state
        self._number = self._committed = position[1] if position else 0
        self._held: dict[str, tuple[int, str]] = {}
        """The number and the receipt handle of each message that is received and not deleted, by its id."""
        self._deleted: queue.SimpleQueue[str] = queue.SimpleQueue()
        """The ids of messages whose deletion SQS has confirmed."""
        self._changed = threading.Condition()
        self._end_at: float | None = None
        with aws.said(f"The queue {source.url}"):
            self._client = _client(source.url, source.client)
        threading.Thread(target=self._keep, name="cues sqs", daemon=True).start()

    def messages(self) -> Iterator[tuple[Position, Any]]:
        """Yield messages until the graph drains."""
        with aws.said(f"The queue {self._source.url}"):
            yield from self._received()

    def _received(self) -> Iterator[tuple[Position, Any]]:
        source = self._source
        for id, at in list(self._state.items()):
            if at < time.time() - RETENTION_S:
                del self._state[id]
        wait_s = source.wait_s if source.idle_exit_s is None else min(source.wait_s, source.idle_exit_s)
        heard, forgotten = time.monotonic(), False
        while not waits.stops(self._process):
            forgotten |= self._forget()
            received = []
            if len(self._held) < source.in_flight:
                received = self._client.receive_message(
                    QueueUrl=source.url,
                    MaxNumberOfMessages=AT_ONCE,
                    WaitTimeSeconds=round(wait_s),
                    VisibilityTimeout=round(source.visibility_s),
                    MessageAttributeNames=["All"],
                    AttributeNames=["SentTimestamp", "MessageGroupId"],
                ).get("Messages", [])
            for message in received:
                heard = time.monotonic()
                if self._is_new(message["MessageId"], message["ReceiptHandle"]):
                    forgotten = False
                    yield self._next(), self._message(message)
            if received:
                continue
            waits.answered(self._process)
            if forgotten:
                forgotten = False
                yield self._next(), None
            if source.idle_exit_s is not None and time.monotonic() - heard >= source.idle_exit_s:
                return
            if not round(wait_s) or len(self._held) >= source.in_flight:
                waits.wait(self._process, _LOOK_S, new=False)

    def _next(self) -> Position:
        return [VERSION, self._number]

    def _is_new(self, id: str, handle: str) -> bool:
        """Hold a message until it is deleted; return False if it was yielded before, by this or an earlier run."""
        with self._changed:
            number, _ = self._held.get(id, (0, ""))
            known = number > 0 or id in self._state
            if not known:
                self._number += 1
                number = self._number
                self._state[id] = int(time.time())
            self._held[id] = number, handle  # 0: it is committed, and is deleted at once
            self._changed.notify_all()
        return not known

    def _forget(self) -> bool:
        """Remove the rows of deleted messages; return whether there were some, which moves the position."""
        gone = []
        with contextlib.suppress(queue.Empty):
            while True:
                gone.append(self._deleted.get_nowait())
        for id in gone:
            self._state.pop(id, None)
        if gone:
            with self._changed:
                self._number += 1
        return bool(gone)

    def _message(self, raw: dict[str, Any]) -> Any:
        source, given = self._source, raw.get("Attributes", {})
        try:
            fields = {
                "id": raw["MessageId"],
                "attributes": {
                    name: attribute["BinaryValue"] if "BinaryValue" in attribute else attribute["StringValue"]
                    for name, attribute in raw.get("MessageAttributes", {}).items()
                },
                "group": given.get("MessageGroupId"),
                "sent": datetime.fromtimestamp(int(given["SentTimestamp"]) / 1000, UTC),
            }
            body = jsontext.decode(raw["Body"]) if source.body == "json" else raw["Body"]
            return foreign.shaped(source, "sqs", fields, "body", body)
        except (ValueError, RecursionError) as error:
            return InvalidArgument(
                f"The message {raw['MessageId']} of {source.url} cannot be read as body={source.body!r},"
                f" shape={source.shape!r}: {error}.",
                "correct the sender; or read it with body='text', and decode it in a stream.",
            )

    # --- other threads ---

    def committed(self, number: int) -> None:
        """Have the messages up to ``number`` deleted."""
        with self._changed:
            self._committed = number
            self._changed.notify_all()

    def end(self) -> None:
        """End the thread when all that is held is deleted, or after some seconds."""
        with self._changed:
            self._end_at = self._end_at or time.monotonic() + CLOSE_S
            self._changed.notify_all()

    close = end

    def _keep(self) -> None:
        extend_s = self._source.visibility_s / 3
        extend_at = time.monotonic() + extend_s
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._done() or self._committed_ones(), extend_s)
                if self._done():
                    return
                doomed = self._committed_ones()
                waiting = list(self._held.items()) if time.monotonic() >= extend_at else []
            try:
                if doomed:
                    self._delete(doomed)
                for at in range(0, len(waiting), AT_ONCE):
                    self._extend(waiting[at : at + AT_ONCE])
            except Exception as error:  # the request is repeated; the source says what lasts
                _log.warning("%s: %s: %s", self._source.url, type(error).__name__, error)
                time.sleep(_RETRY_S)
            if waiting:
                extend_at = time.monotonic() + extend_s

    def _done(self) -> bool:
        return self._end_at is not None and (not self._held or time.monotonic() > self._end_at)

    def _committed_ones(self) -> list[tuple[str, str]]:
        """Ids and receipt handles of up to ten committed messages."""
        found = ((id, handle) for id, (number, handle) in self._held.items() if number <= self._committed)
        return list(itertools.islice(found, AT_ONCE))

    def _delete(self, messages: list[tuple[str, str]]) -> None:
        entries = [{"Id": str(at), "ReceiptHandle": handle} for at, (_, handle) in enumerate(messages)]
        answer = self._client.delete_message_batch(QueueUrl=self._source.url, Entries=entries)
        with self._changed:
            for done in answer.get("Successful", []):
                id, _ = messages[int(done["Id"])]
                self._held.pop(id, None)
                self._deleted.put(id)
            for failed in answer.get("Failed", []):  # an expired handle: the message comes again, and its row is there
                self._held.pop(messages[int(failed["Id"])][0], None)

    def _extend(self, messages: list[tuple[str, tuple[int, str]]]) -> None:
        hidden_s = round(self._source.visibility_s)
        entries = [
            {"Id": str(at), "ReceiptHandle": handle, "VisibilityTimeout": hidden_s}
            for at, (_, (_, handle)) in enumerate(messages)
        ]
        self._client.change_message_visibility_batch(QueueUrl=self._source.url, Entries=entries)


# --- the sink -------------------------------------------------------------------------------------


@takes(PUBLISHER)
class Sender:
    """A sink that sends messages to a queue; see the module. :meth:`sink` declares it.

    ``url``     the URL of the queue; that of a FIFO queue ends with ``.fifo``
    ``shape``   ``"value"``: the message is the body, as JSON; ``"record"``: messages have ``body`` (text as it is, all
                else as JSON), and perhaps ``attributes``, text or bytes by name
    ``group``   of a FIFO queue: a field, or a function of the message, that gives the MessageGroupId; None: one group
    ``client``  a function that returns a boto3 client, for credentials, proxies and the like

    Kind: sink
    Needs: extra `sqs`
    Guarantee: at least once; exactly once on a FIFO queue, if a repetition comes within five minutes
    Mechanism: the step commits after SQS has all messages; on a FIFO queue one MessageDeduplicationId for each message
    """

    def __init__(
        self,
        url: str,
        *,
        shape: str = "value",
        group: str | Callable[[Message], Any] | None = None,
        client: Callable[[], Any] | None = None,
    ) -> None:
        self.url, self.shape, self.group, self.client = url, shape, group, client
        self._made: tuple[int, Any] = (0, None)
        """The number of the process, and its client."""
        checks.one_of("shape", shape, kafka.SHAPES)
        if group is not None and not callable(group) and not text_of("group", group):
            raise InvalidArgument("group= is empty.", "name a field, or give a function of the message.")
        _checked(url, client)
        self.fifo = url.endswith(".fifo")
        if group is not None and not self.fifo:
            raise InvalidArgument("group= is given, and the queue is not a FIFO queue.", "leave it out.")

    @override
    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_made": (0, None)}

    def sink(self, inputs: Any, **options: Any) -> cues.Sink:
        """Return a sink that sends the messages of ``inputs``; ``options`` are those of ``cues.Sink``."""
        return cues.Sink(self.send, inputs, **{"batch": True, "id": "send", **options})

    @takes(PUBLISHER)
    def send(self, messages: Any, process: cues.Process) -> None:
        """Send a message or a list of messages, and wait until SQS has them: the function of :meth:`sink`.

        Raises :class:`cues.errors.InvalidArgument` for a message that cannot be sent, :class:`cues.errors.Away` if SQS
        is away, and :class:`cues.errors.CheckpointError` if it refuses the request.
        """
        messages = [messages] if isinstance(messages, dict) else list(messages)
        places = identities(process, len(messages))
        entries = [self._entry(message, place, process) for message, place in zip(messages, places, strict=True)]
        with aws.sending(f"The queue {self.url}", self.url):
            if self._made[0] != os.getpid():
                self._made = os.getpid(), _client(self.url, self.client)
            for some in _requests(entries):
                self._sent(self._made[1], some)

    def _entry(self, message: Message, place: str, process: cues.Process) -> dict[str, Any]:
        value = message if self.shape == "value" else message.get("body")
        if value is None:
            raise _misfit("it has no 'body'", "use shape='value', or add the field in a stream")
        try:
            entry: dict[str, Any] = {"MessageBody": value if isinstance(value, str) else jsontext.encode(value)}
        except (TypeError, ValueError) as error:
            raise _misfit(f"JSON cannot hold it ({error})", "return JSON values from a stream") from error
        if not entry["MessageBody"]:
            raise _misfit("its body is empty", "SQS takes no empty message")
        attributes: Mapping[str, Any] = (message.get("attributes") or {}) if self.shape == "record" else {}
        entry["MessageAttributes"] = {
            name: {"DataType": "Binary", "BinaryValue": given}
            if isinstance(given, bytes)
            else {"DataType": "String", "StringValue": str(given)}
            for name, given in attributes.items()
        }
        if self.fifo:
            group: Any = process.id.replace("/", ".")
            if self.group is not None:
                group = self.group(message) if callable(self.group) else message.get(self.group)
                if group is None:
                    raise _misfit(f"its group is None, of group={self.group!r}", "add the field in a stream")
            entry |= {"MessageGroupId": str(group), "MessageDeduplicationId": place}
        return entry

    def _sent(self, client: Any, entries: list[dict[str, Any]]) -> None:
        named = [{"Id": str(at), **entry} for at, entry in enumerate(entries)]
        answer = client.send_message_batch(QueueUrl=self.url, Entries=named)
        for failed in answer.get("Failed", []):
            text = f"{failed.get('Code')}: {failed.get('Message', '')}"
            if not failed.get("SenderFault"):
                raise Away(f"{self.url} did not take a message: {text}.", "send it again later.", what=self.url)
            raise _misfit(f"SQS refuses it ({text})", "correct the message")


def identities(process: cues.Process, count: int) -> list[str]:
    """Return a text for each message of a call: the same on each delivery of a message, and never that of another."""
    delivery, indices = process.delivery, process.indices
    indices = [process.index] if isinstance(indices, int) else indices
    (tailer,) = delivery.start
    if len(indices) != count:
        raise CuesError(f"{process.id} has {count} messages and {len(indices)} places.", "give it one input at a time.")
    begin = f"{delivery.store}\0{process.id}\0{delivery.generation}\0{tailer}\0"
    return [hashlib.blake2b(f"{begin}{index}".encode(), digest_size=16).hexdigest() for index in indices]


def _requests(entries: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the entries of each request: at most ten, and at most so many bytes as SQS takes at once."""
    some: list[dict[str, Any]] = []
    size = 0
    for entry in entries:
        own = len(entry["MessageBody"].encode("utf-8", "surrogatepass")) + sum(
            len(name) + 10 + len(given.get("BinaryValue") or given.get("StringValue", "").encode("utf-8", "replace"))
            for name, given in entry["MessageAttributes"].items()
        )
        if some and (len(some) == AT_ONCE or size + own > REQUEST_BYTES):
            yield some
            some, size = [], 0
        some.append(entry)
        size += own
    if some:
        yield some


def _misfit(problem: str, instead: str) -> InvalidArgument:
    return InvalidArgument(f"The message cannot be sent to SQS: {problem}.", f"{instead}.")
