"""Fuzzing of the decoders, guided by coverage: ``python -m tests.fuzzing --seconds S [DECODER …]``.

    corpus ──mutate──▶ input ──decode──▶ value ──encode, decode──▶ the same value
      ▲                          │
      └──── new lines or branches of the module under test

Each entry of :data:`DECODERS` is a decoder: its modules, some inputs that its encoder made, and what it may raise. An
input that reaches a new pair of lines of these modules is kept, and is mutated further. Inputs of
``tests/corpus/<decoder>/`` are run first: those that found a fault, each in a file of its own, and in the file
``reached`` those that reached lines which no input of the encoder does; ``--keep`` adds to these. Properties: no other
error than those of the entry, no hang (10 s), no memory beyond 1 GiB more than at the start, and a value that was
decoded encodes to bytes that decode to it again. A checksum would stop every mutation, so an entry with ``seal`` writes
a right one.

Not guided on a compiled core, whose lines nothing can trace.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import importlib
import io
import itertools
import json
import random
import resource
import signal
import struct
import sys
import threading
import time
import types
import uuid
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import cues
from cues import codec, jsontext
from cues.base import names
from cues.checkpoints import packing
from cues.errors import CuesError
from cues.forwarding import external_writers, marks, other_stores
from cues.graphs import processor_rows
from cues.groups import claims, group_rows
from cues.processors import event_stream, foreign, http, http_source, link, opened_file, serving, webhook
from cues.producers import clocks
from cues.producers.sequencer import AckIntent, Checkpoint, ProducerState
from cues.queues.base import read_record
from cues.queues.options import QueueOptions
from cues.records import batch, columns, identity, log_row, positions, provenance, sealed
from cues.records.identity import ProducerID
from cues.steps import pending
from cues.storage import datafile, pages
from cues.txn import consumer_rows, framing

HANG_S = 10
MEMORY_BYTES = 1 << 30
CORPUS = Path(__file__).parent / "corpus"
REACHED = "reached"
KEPT_BYTES_MAX = 1_024
"""The length of the largest input that is kept."""


@dataclass(frozen=True)
class Decoder:
    """A decoder, as the driver needs it."""

    modules: tuple[types.ModuleType, ...]
    """Their lines guide the search."""
    seeds: Callable[[], Iterable[bytes]]
    decode: Callable[[bytes], Any]
    errors: tuple[type[BaseException], ...] = (CuesError,)
    encode: Callable[[Any], bytes] | None = None
    seal: Callable[[bytes], bytes] | None = None
    """Gives a mutated input the right checksum; three of four are sealed."""


FOREIGN = (CuesError, ValueError, TypeError, LookupError, AttributeError, struct.error)
"""Of bytes that msgpack cannot decode, or of a row with a right checksum that no version of Cues wrote."""


class Failure(AssertionError):
    """An input that breaks a property."""


# --- decoders -------------------------------------------------------------------------------------


ROW = names.queue_key("in")
"""The key of the rows."""


def _reseal(raw: bytes) -> bytes:
    return sealed.seal(ROW, raw[:-8])


def _record(raw: bytes) -> Any:
    if not batch.intact(raw, 1):
        raise codec.CodecError("", "", path="")
    opened = batch.Batch(1, raw)
    stamps = opened.stamps
    opened.provenance("in", frozenset({"t", "tx"}))
    if opened.head.flags & batch.COLUMNS:  # the log gives the schema, and Arrow reads the rest
        return opened.head.count, None, opened.schema_hash
    return opened.head.count, stamps and stamps.clocks, opened.messages() if opened.is_complete() else None


def _records() -> Iterator[bytes]:
    messages = [{"n": n, "text": "x" * n} for n in range(3)]
    origin = provenance.Provenance(3, {"in": (range(7, 10), 5), "tx/t": ([3, 9, 4], None)})
    for hash in (None, bytes(16)):
        for one in (None, origin):
            for page in batch.build(messages, 1 << 20, hash, one, reserved=True):
                yield batch.seal(page, 1, 17)


def _tables() -> Iterator[Any]:
    """Tables with columns of all layouts of Arrow; the second one has a dictionary."""
    import pyarrow as pa

    at = datetime(2026, 1, 31, tzinfo=UTC)
    yield pa.table({"n": [1, 2, None], "t": ["a", "bé", None], "f": [1.5, 2.0, 0.0], "b": [True, None, False]})
    yield pa.table({"d": pa.array(["x", "y", "x"]).dictionary_encode(), "l": [[1], [2, 3], []], "at": [at, None, at]})
    texts = pa.array(["short", "a text of more than twelve bytes", None], pa.string_view())
    maps = pa.array([[("k", 1)], [], None], pa.map_(pa.string(), pa.int64()))
    yield pa.table({"v": texts, "m": maps, "s": [{"a": 1}, {"a": None}, None], "x": [b"ab", b"", None]})


@functools.cache
def _schemas() -> list[columns.StoredSchema]:
    return [columns.packed_schema(columns.with_small_dictionaries(table).schema) for table in _tables()]


def _column_records() -> Iterator[bytes]:
    import pyarrow as pa

    for table in _tables():
        for compression in (None, "lz4", "zstd"):
            many = pa.concat_tables([table] * (1 if compression is None else 100)).combine_chunks()
            for page in batch.build_table(many, 1 << 20, compression=compression):
                yield batch.seal(page, 1, 17)


def _column_record(raw: bytes) -> Any:
    """Its value is not compared: Arrow may write the same rows in another way."""
    if not batch.intact(raw, 1):
        raise codec.CodecError("", "", path="")
    opened = batch.Batch(1, raw)
    known = {each.hash: each for each in _schemas()}
    if not opened.head.flags & batch.COLUMNS or opened.schema_hash not in known:
        raise codec.CodecError("", "", path="")
    opened.schema = known[opened.schema_hash]
    try:
        return len(opened.messages()) if opened.is_complete() else None
    finally:
        columns.arrow().default_memory_pool().release_unused()


def _arrow_files() -> Iterator[bytes]:
    import pyarrow as pa

    for table in _tables():
        for made in (pa.ipc.new_stream, pa.ipc.new_file):
            for compression in (None, "zstd"):
                sink = pa.BufferOutputStream()
                with made(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
                    writer.write_table(table)
                yield sink.getvalue().to_pybytes()


def _arrow_file(raw: bytes) -> Any:
    try:
        found = opened_file.tables(io.BytesIO(raw), "arrow", 0, None, "a.arrow", 100)
        return sum(len(columns.rows(rows)) for _, rows in found)
    except Exception as error:
        if opened_file.is_damage(error, remote=False):
            raise codec.CodecError("", "", path="") from error
        raise
    finally:
        columns.arrow().default_memory_pool().release_unused()


def _frames(kind: str) -> Callable[[bytes], list[Any]]:
    def decode(raw: bytes) -> list[Any]:
        reader = framing.FrameReader(io.BytesIO(raw), 64)
        found = []
        while True:
            before = reader.offset
            try:
                found.append(framing.framing_for(kind).decode(reader))
            except EOFError:
                return found
            except cues.errors.UnexpectedEOF:
                return found
            except CuesError:
                if reader.offset == before:
                    return found
            if reader.offset <= before:
                raise Failure(f"a frame of no bytes at {before}")

    return decode


def _framed(kind: str, messages: list[Any]) -> Callable[[], Iterator[bytes]]:
    def seeds() -> Iterator[bytes]:
        form = framing.framing_for(kind)
        yield b"".join(form.encode(message) for message in messages)
        yield from (form.encode(message) for message in messages)

    return seeds


def a_graph() -> dict[str, Any]:
    graph = cues.Graph("g", errors="errors", queues={"in": QueueOptions(retention=5, partitions=2)})
    graph.stream("in", "out", id="f", key="k", retries=2)(json.dumps)
    graph.sink("out", id="s", batch_size=7)(json.dumps)
    return graph.to_dict()


def _planned(raw: bytes) -> None:
    data = json.loads(raw)
    if isinstance(data, dict):
        cues.Graph.from_dict(data).plan()


def _settings(raw: bytes) -> Any:
    from cues.cli import settings

    path = Path(_scratch(), "cues.toml")
    path.write_bytes(raw)
    file = settings.find(path.parent)
    assert file is not None
    from cues.cli.app import load

    for command in ("run", "tail"):
        file.options(command, load(command).params)
    return None


def _scratch() -> str:
    import tempfile

    if "at" not in _SCRATCH:
        _SCRATCH["at"] = tempfile.mkdtemp(prefix="fuzz")
    return _SCRATCH["at"]


_SCRATCH: dict[str, str] = {}


class _Files:
    url = "here"


def _directory_record(raw: bytes) -> Any:
    from cues.spark.cluster import files, ledger

    return ledger.LedgerRecord.of(3, files.parsed(_Files(), "3.json", raw, files.ANY_FORM))  # type: ignore[arg-type]


def directory_records() -> Iterator[bytes]:
    from cues.spark.cluster import ledger
    from cues.spark.cluster.directory import DataFile

    file = DataFile("a.parquet", 1, 5, 100, 17, 0)
    yield ledger.LedgerRecord(3, "claim", "me", 1, {"g.f.in": ("ab", 4)}).to_json()
    yield ledger.LedgerRecord(
        3,
        "step",
        "me",
        1,
        {"g.f.in": ("ab", 4)},
        hash="9f",
        files={"out": [file]},
        counts={"out": 5},
        source="9201a178",
    ).to_json()


def _log_entry(raw: bytes) -> Any:
    from cues.spark.cluster.directory import parsed_entry

    return parsed_entry(_Files(), "3.json", raw)  # type: ignore[arg-type]


def log_entries() -> Iterator[bytes]:
    from cues.spark.cluster.directory import sealed_entry

    add = {"path": "a.parquet", "partitionValues": {"partition": "0", "first": "1"}, "size": 9, "modificationTime": 7}
    field = {"name": "n", "type": "long", "nullable": True, "metadata": {"cues.field": "n"}}
    schema = json.dumps({"type": "struct", "fields": [field]})
    yield sealed_entry([{"metaData": {"schemaString": schema, "configuration": {"cues.placing": "{}"}}}])
    yield sealed_entry(
        [
            {"add": {**add, "stats": '{"numRecords": 5}'}},
            {"remove": {"path": "b"}},
            {"txn": {"appId": "g.f", "version": 2}},
        ]
    )


def _seal_entry(raw: bytes) -> bytes:
    from cues.spark.cluster.directory import sealed_entry

    try:
        return sealed_entry([json.loads(line) for line in raw.decode().splitlines()[1:]])
    except (ValueError, RecursionError):
        return raw


def _seal_json(raw: bytes) -> bytes:
    from cues.spark.cluster.files import sealed_json

    try:
        found = json.loads(raw)
        found.pop("seal", None)
        return sealed_json(found)
    except (ValueError, AttributeError, RecursionError):
        return raw


def _form(raw: bytes) -> Any:
    from cues.processors.webhook import Hook

    return Hook("POST", "/", {}, {}, raw).form()


ENCODINGS = ("", "gzip", "deflate")
"""The content encodings of the first byte of an input for "webhook body" and "link request"."""


def _plain(raw: bytes) -> bytes:
    return serving.decoded(raw[1:], {"content-encoding": ENCODINGS[raw[0] % len(ENCODINGS)]}, 1 << 20)


def _packed(bodies: list[bytes]) -> Iterator[bytes]:
    for body in bodies:
        yield from (b"\0" + body, b"\1" + gzip.compress(body, mtime=0), b"\2" + zlib.compress(body))


def _webhook(raw: bytes) -> Any:
    """The message of a request, by the function that a webhook has by default."""
    message = webhook.Webhook(0).message(webhook.Hook("POST", "/", {}, {}, _plain(raw or b"\0")))
    foreign.check(message)  # type: ignore[arg-type]
    return message


def link_requests() -> list[bytes]:
    import pyarrow as pa

    row = [1, "home", 3, "9f" * 16, 4]
    asked = {"version": 1, "processor": "g.send", "before": None, "after": None}
    tables = [
        link.bytes_of(table) for table in (pa.table({"n": [1, None], "t": ["a", "bé"]}), pa.table({"q/type": ["a"]}))
    ]
    given = [
        {"messages": [{"n": 1, "q/type": "a"}], "table": None},
        *({"messages": [], "table": each} for each in tables),
    ]
    return [codec.pack(asked), *(codec.pack({**asked, "after": row, "before": row, **each}) for each in given)]


def _link_request(raw: bytes) -> None:
    headers = {"content-encoding": ENCODINGS[(raw or b"\0")[0] % len(ENCODINGS)]}
    *_, messages = link.read_request(raw[1:], headers, 1 << 20, None)
    if messages is not None and not isinstance(messages, list):
        columns.rows(messages)
    columns.arrow().default_memory_pool().release_unused()


def _transport(headers: dict[str, str], body: bytes) -> Any:
    """A server that answers its first request so, and others with an empty list."""
    import httpx

    answers = iter([functools.partial(httpx.Response, 200, headers=headers, stream=httpx.ByteStream(body))])
    return httpx.MockTransport(lambda request: next(answers, functools.partial(httpx.Response, 200, content=b"[]"))())


def _event_stream(raw: bytes) -> None:
    import httpx

    said = {"content-encoding": ENCODINGS[(raw or b"\0")[0] % 3], "content-type": "text/event-stream; charset=idna"}
    made = functools.partial(httpx.Client, transport=_transport(said, raw[1:]), trust_env=False)
    source = event_stream.EventStream("http://h", data="json", shape="value", client=made)
    connection = event_stream.Connection(source, "")
    try:
        for event in connection.events(None):
            source.message_of(event)
    finally:
        connection.close()


POLLS: list[dict[str, Any]] = [
    {"items": None, "next": "link"},
    {"items": "items", "next": "next"},
    {"items": "items", "next": "of.next"},
    {"items": "items", "cursor": "next", "params": lambda cursor: {}},
    {"items": "items", "id": "n"},
]


def _http_answer(raw: bytes) -> None:
    """An answer to a kind of poll, by the first byte. The first line has ``Link``, a charset and ``Retry-After``."""
    import httpx

    head, _, body = raw[1:].partition(b"\n")
    linked, charset, again, *_ = [*head.split(b"\t"), b"", b"", b""]
    named = {
        b"link": linked,
        b"content-type": b"text/plain; charset=" + charset,
        b"retry-after": again,
        b"etag": linked,
    }
    headers = {name.decode(): value.decode("latin-1") for name, value in named.items()}
    http.retry_after_s(headers)
    http.refused("GET", http.Answer(503, "http://h/items", headers, body), (), 5)
    transport = _transport(named, body)  # type: ignore[arg-type]
    client = functools.partial(httpx.AsyncClient, transport=transport, trust_env=False)
    kind = POLLS[(raw or b"\0")[0] % len(POLLS)]
    poll = http_source.Poll("http://h/items", client=client, interval_s=None, **kind)
    for _ in itertools.islice(poll(None), 100):
        pass


def _pages(raw: bytes) -> Any:
    path = Path(_scratch(), "data.mdb")
    path.write_bytes(raw)
    with path.open("rb") as file:
        data = pages.DataFile(file.fileno())
        for meta in data.metas:
            if meta.last < 1 << 20:
                census = pages.Census(data, meta)
                list(data.walk(meta.main, "", census.claim))
    return None


def _data_files() -> Iterator[bytes]:
    path = Path(_scratch(), "s")
    if not path.exists():
        with cues.open(path, map_size=1 << 20) as store:
            store.queue("in").appender().write_many([{"n": n, "text": "x" * 900} for n in range(9)])
    with cues.open(path, readonly=True) as store:
        used = store.info()["used"]
    yield (path / "data.mdb").read_bytes()[:used]


def _row(unpack: Callable[[bytes], Any], *rows: Any, modules: tuple[types.ModuleType, ...]) -> Decoder:
    """A row with a checksum. Another form than any version wrote is damage, too."""
    seeds = [sealed.seal(ROW, row if isinstance(row, bytes) else row.pack()) for row in rows]
    pack = None if isinstance(rows[0], bytes) else lambda value: sealed.seal(ROW, value.pack())
    return Decoder(modules, lambda: seeds, unpack, encode=pack, seal=_reseal)


VALUES: list[Any] = [
    None,
    [1, -1, 1 << 63, 1.5, "é", b"\x00\xff", True],
    {"a": {"b": [None, {"c": 1}]}},
    datetime(2026, 3, 1, 12, tzinfo=UTC),
    Decimal("1.50"),
    (1, (2, frozenset({3}))),
    1 << 80,
    uuid.UUID(int=5),
]

DECODERS: dict[str, Decoder] = {
    "codec": Decoder((codec,), lambda: map(codec.pack, VALUES), codec.unpack, FOREIGN, codec.pack),
    "record": Decoder(
        (batch, provenance),
        _records,
        _record,
        seal=lambda raw: batch.checksum(memoryview(raw)[8:], seed=1) + raw[8:],
    ),
    "record of columns": Decoder(
        (batch, columns),
        _column_records,
        _column_record,
        (CuesError, MemoryError),  # a compressed buffer says how long it will be, and Arrow asks for that at once
        seal=lambda raw: batch.checksum(memoryview(raw)[8:], seed=1) + raw[8:],
    ),
    "Arrow file": Decoder((opened_file,), _arrow_files, _arrow_file, (CuesError, MemoryError, OverflowError)),
    "provenance": Decoder(
        (provenance,),
        lambda: [
            provenance.Provenance(3, {"in": (range(7, 10), 5), "tx/t": ([3, 9, 4], None)}, {"k": 1}).encode(),
            provenance.Provenance(3, {"in": ([1, 2, 9], [5, 6, 7])}).encode(),
        ],
        lambda raw: provenance.decode(raw, 3) and None,
        FOREIGN,
    ),
    "log row": _row(
        lambda raw: log_row.unpack_row(ROW, raw),
        log_row.ROW.pack(b"identity", 1, 9, 17, 2),
        modules=(log_row, sealed),
    ),
    "processor row": _row(
        lambda raw: processor_rows.ProcessorRow.unpack(ROW, raw),
        processor_rows.ProcessorRow(
            b"ownerownr"[:8], 1, 0, 5, b"bootboot", True, (positions.Position(b"identity", 3, bytes(8)),)
        ),
        modules=(processor_rows, sealed),
    ),
    "topology": _row(
        lambda raw: processor_rows.ProcessorInputs.unpack(ROW, raw),
        processor_rows.ProcessorInputs("stream", ("g.f.in",), ("in",), (b"",)),
        processor_rows.ProcessorInputs("stream", ("g.f.in",), ("in",), (b"storeidx",), names.ProcessorKey("g.e")),
        modules=(processor_rows, sealed),
    ),
    "named tailer": _row(
        lambda raw: positions.unpack_reader(ROW, raw, "in", "r"),
        positions.POSITION.pack(b"identity", 3, bytes(8)),
        modules=(positions, sealed),
    ),
    "queue record": _row(
        lambda raw: read_record(types.SimpleNamespace(path="s"), "in", raw) and None,
        sealed.pack_map(
            {"identity": b"identity", "options": QueueOptions(retention=5).to_dict(), "partitions": 1, "version": 1}
        ),
        modules=(sealed,),
    ),
    "claim": _row(
        lambda raw: claims.Claim.unpack(ROW, raw, "in", "g"),
        claims.Claim(b"identity", bytes(8), 1, 3, bytes(8), False, "me", b"point"),
        modules=(claims, sealed),
    ),
    "member": _row(
        lambda raw: group_rows.MemberRow.unpack(ROW, raw, "me"),
        group_rows.MemberRow(b"identity", 5, b"bootboot", 10.0, True, 0, ("in",), (("in", "out"),), ("p*",)),
        modules=(group_rows, sealed),
    ),
    "low-water mark": _row(lambda raw: marks.Mark.unpack(ROW, raw), marks.Mark(1, 5, True), modules=(marks, sealed)),
    "producer": _row(lambda raw: clocks.Written.unpack(ROW, raw), clocks.Written(5, 4, 3, 2), modules=(clocks, sealed)),
    "consumer": _row(
        lambda raw: consumer_rows.ConsumerRow.unpack(ROW, raw),
        consumer_rows.ConsumerRow("c", "place", 2, {"in": 5}, (b"identity",), 17),
        modules=(consumer_rows, sealed),
    ),
    "pending": _row(
        lambda raw: pending.PendingRow.unpack(ROW, raw) and None, codec.pack([5, []]), modules=(pending, sealed)
    ),
    "other store": _row(
        lambda raw: other_stores.unpack_place("id", ROW, raw) and None,
        sealed.pack_map({"path": "../o", "absolute": "/o"}),
        modules=(other_stores, sealed),
    ),
    "external writer": _row(
        lambda raw: external_writers.SourceRow.unpack(ROW, raw) and None,
        external_writers.SourceRow("in", 4, ["range", 3]).pack(),
        external_writers.SourceRow("in", [4, 2], ["queues", [[b"identity", 3]], b"12345678"]).pack(),
        modules=(external_writers, sealed),
    ),
    "json": Decoder(
        (jsontext,),
        lambda: [b'{"a": [1, 2.5, null, true, "\\u00e9"]}', b"[[[]]]", b'{"$float": "nan"}', b"1e5"],
        jsontext.decode,
        (ValueError,),
        lambda value: jsontext.encode(value).encode(),
    ),
    "json as shown": Decoder(
        (jsontext,),
        lambda: [jsontext.show(value).encode() for value in (*VALUES, float("nan"), b"x")],
        lambda raw: jsontext.decode(raw, shown=True) and None,
        (ValueError,),
    ),
    "frames fixed": Decoder((framing,), _framed(framing.FIXED, []), _frames(framing.FIXED)),
    "frames ndjson": Decoder(
        (framing,), _framed(framing.JSON_LINES, [{"a": 1}, {"b": "é"}]), _frames(framing.JSON_LINES)
    ),
    "frames csv": Decoder(
        (framing,), _framed(framing.CSV, [[str(uuid.UUID(int=5)), "a,b", 'q"\n', ""]]), _frames(framing.CSV)
    ),
    "uuid": Decoder(
        (identity,),
        lambda: [identity.build_uuid(b"\x01producer"[:6], 12345, 2).bytes],
        lambda raw: identity.parse_uuid(uuid.UUID(bytes=raw[:16].ljust(16, b"\0"))),
        (CuesError, ValueError),
    ),
    "uuid as text": Decoder(
        (identity,),
        lambda: [str(uuid.UUID(int=5)).encode()],
        lambda raw: identity.as_uuid(raw.decode("utf-8", "replace")),
        encode=lambda value: str(value).encode(),
    ),
    "checkpoint": Decoder(
        (packing,),
        lambda: [
            packing.pack(
                Checkpoint({"a": 3}, (ProducerState("a", ProducerID(b"\x01bcdef"), 5, 2),), (AckIntent("a", b"xyz"),))
            ).encode()
        ],
        lambda raw: packing.unpack(raw.decode("utf-8", "replace")),
        encode=lambda value: packing.pack(value).encode(),
    ),
    "format record": Decoder(
        (datafile,),
        lambda: [
            codec.pack({"format": 1, "requires": ["seals"], "id": b"identity", "durability": "disk", "map_size": 1})
        ],
        lambda raw: datafile.check_format(Path("s"), raw) and None,
    ),
    "graph": Decoder(
        tuple(importlib.import_module(f"cues.graphs.{name}") for name in ("graph", "processor", "declaration")),
        lambda: [json.dumps(a_graph()).encode()],
        _planned,
        (CuesError, json.JSONDecodeError, UnicodeDecodeError),
    ),
    "settings": Decoder(
        (importlib.import_module("cues.cli.settings"),),
        lambda: [b'store = "data/x"\n[run]\nidle-exit = 5\nquiet = true\n[tail]\n-n = 3\nfollow = false\n'],
        _settings,
        (CuesError, __import__("click").UsageError),
    ),
    "form": Decoder(
        (),
        lambda: [b"a=1&b=%20x&c=", b"payload=%7B%22a%22%3A1%7D"],
        _form,
        (ValueError,),
        lambda value: b"&".join(b"%s=%s" % (_quoted(k), _quoted(v)) for k, v in value.items()),
    ),
    "webhook body": Decoder(
        (webhook, serving, foreign, jsontext),
        lambda: _packed([b'{"n": [1, 2.5, null, "\\u00e9"], "q/type": "a"}', b"{}", b"[1]", b'{"q/uuid": 1}']),
        _webhook,
        (CuesError, ValueError, serving.Refused),
        lambda value: b"\0" + jsontext.encode(value).encode("utf-8", "surrogatepass"),
    ),
    "link request": Decoder(
        (link, serving, foreign),
        lambda: _packed(link_requests()),
        _link_request,
        # The receiver answers 400 to all of these. Not to a crash, a hang or memory without a bound.
        (*FOREIGN, serving.Refused, link.OtherVersion, NotImplementedError, OSError, MemoryError, OverflowError),
    ),
    "event stream": Decoder(
        (event_stream,),
        lambda: _packed(
            [b'id: 1\nevent: a\ndata: {"n": 1}\n\nretry: 5\n:\ndata: 1\n\ndata: {"q/uuid": 1}\n\n', b"data\n\n\n\n"]
        ),
        _event_stream,
    ),
    "HTTP answer": Decoder(
        (http_source, http),
        lambda: [
            b'\0<http://h/items?page=2>; rel="next", <http://h/>; rel="first"\tutf-8\t5\n[{"n": 1}, {"q/uuid": 2}, 3]',
            b"\0<//h/a>; rel=next\tidna\tSat, 31 Jan 2026 00:00:00 GMT\n[",
            *(
                b'%c\n{"items": [{"n": 1}, {"n": 2}], "next": "?page=2", "of": {"next": "http://h:80/b"}}' % kind
                for kind in range(1, len(POLLS))
            ),
            b'\2\n{"items": {"n": 1}, "next": 5, "of": {"next": "http://other/"}}',
        ],
        _http_answer,
    ),
    "directory record": Decoder(
        (importlib.import_module("cues.spark.cluster.ledger"), importlib.import_module("cues.spark.cluster.files")),
        directory_records,
        lambda raw: _directory_record(raw) and None,
        seal=_seal_json,
    ),
    "directory log": Decoder(
        (importlib.import_module("cues.spark.cluster.directory"), importlib.import_module("cues.spark.cluster.typed")),
        log_entries,
        lambda raw: _log_entry(raw) and None,
        seal=_seal_entry,
    ),
    "pages": Decoder((pages,), _data_files, _pages, ()),
}


def _quoted(text: str) -> bytes:
    from urllib.parse import quote_plus

    return quote_plus(text).encode()


# --- the driver -----------------------------------------------------------------------------------


class Coverage:
    """The pairs of lines that were run one after another, of some files."""

    def __init__(self, modules: tuple[types.ModuleType, ...]) -> None:
        self.files = {module.__file__ for module in modules}
        self.seen: set[tuple[str, int, int]] = set()
        self._now: set[tuple[str, int, int]] = set()

    def run(self, call: Callable[[], Any]) -> tuple[Any, bool]:
        """Run ``call``; return its result, and whether it ran a new pair of lines."""
        self._now = set()
        if not self.files:
            return call(), False
        before = sys.gettrace()
        if hasattr(sys, "monitoring") and before is None:
            with self._monitored():
                value = call()
        else:
            sys.settrace(self._enter)
            threading.settrace(self._enter)  # of those that the decoder starts
            try:
                value = call()
            finally:
                sys.settrace(before)
                threading.settrace(before)  # type: ignore[arg-type]
        return value, self.fresh()

    def fresh(self) -> bool:
        """Take over what the last run reached; return whether something of it is new."""
        new = not self._now <= self.seen
        self.seen |= self._now
        return new

    def _enter(self, frame: Any, event: str, _: Any) -> Any:
        name = frame.f_code.co_filename
        if name not in self.files:
            return None
        last = frame.f_lineno

        def step(frame: Any, event: str, _: Any) -> Any:
            nonlocal last
            if event == "line":
                self._now.add((name, last, frame.f_lineno))
                last = frame.f_lineno
            return step

        return step

    @contextlib.contextmanager
    def _monitored(self) -> Iterator[None]:
        monitoring = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
        last = 0

        def line(code: Any, number: int) -> Any:
            nonlocal last
            if code.co_filename not in self.files:
                return monitoring.DISABLE
            self._now.add((code.co_filename, last, number))
            last = number
            return None

        tool = monitoring.PROFILER_ID
        monitoring.use_tool_id(tool, "cues fuzzing")
        monitoring.register_callback(tool, monitoring.events.LINE, line)
        monitoring.set_events(tool, monitoring.events.LINE)
        try:
            yield
        finally:
            monitoring.set_events(tool, 0)
            monitoring.free_tool_id(tool)


_BYTES = (0, 1, 0x7F, 0x80, 0xC1, 0xFF, 0x22, 0x7B, 0x5B, 0x0A)
_NUMBERS = (0, 1, 0x7FFF, 0xFFFF, 1 << 31, (1 << 32) - 1, 1 << 63, (1 << 64) - 1)


def mutated(raw: bytes, corpus: list[bytes], dice: random.Random) -> bytes:
    """Return another input: one to four changes of bits, bytes, numbers, lengths and order."""
    data = bytearray(raw)
    for _ in range(dice.randint(1, 4)):
        at = dice.randrange(len(data) + 1)
        kind = dice.randrange(8)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << dice.randrange(8)
        elif kind == 1 and at < len(data):
            data[at] = dice.choice(_BYTES)
        elif kind == 2:
            data[at:at] = dice.randbytes(dice.randint(1, 8))
        elif kind == 3:
            del data[at : at + dice.randint(1, 16)]
        elif kind == 4:
            size = dice.choice((2, 4, 8))
            order = dice.choice(("big", "little"))
            data[at : at + size] = (dice.choice(_NUMBERS) & ((1 << 8 * size) - 1)).to_bytes(size, order)  # type: ignore[arg-type]
        elif kind == 5:
            other = dice.choice(corpus)
            start = dice.randrange(len(other) + 1)
            data[at : at + dice.randrange(64)] = other[start : start + dice.randrange(64)]
        elif kind == 6:
            data[at:at] = data[at : at + dice.randint(1, 32)] * dice.randint(1, 40)
        else:
            del data[at:]
    return bytes(data[: 1 << 16])


def _alarm(*_: object) -> None:
    raise Failure(f"it took longer than {HANG_S} s")


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """Bound the memory of this process, and let an alarm be a failure."""
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    limit = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, _alarm)
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, limit[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limit)
        signal.signal(signal.SIGALRM, before)


def attempt(decoder: Decoder, raw: bytes) -> Any:
    """Decode one input, and encode and decode it again. Raises :class:`Failure` if a property is broken."""
    signal.setitimer(signal.ITIMER_REAL, HANG_S)
    try:
        try:
            value = decoder.decode(raw)
        except decoder.errors:
            return None
        if decoder.encode is not None:
            again = decoder.decode(decoder.encode(value))
            if again != value and repr(again) != repr(value):  # a nan is not equal to itself
                raise Failure(f"{value!r} is {again!r} after it was encoded and decoded")
        return value
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def is_compiled(name: str) -> bool:
    """Return whether the modules of a decoder are compiled, so that nothing can trace their lines."""
    return not any((module.__file__ or "").endswith(".py") for module in DECODERS[name].modules)


def folder(name: str) -> Path:
    return CORPUS / name.replace(" ", "-").replace("/", "-")


def faults(name: str) -> list[bytes]:
    """The inputs that found a fault of a decoder."""
    return [file.read_bytes() for file in sorted(folder(name).glob("*")) if file.name != REACHED]


def reached(name: str) -> list[bytes]:
    """The inputs that reached lines which no input of the encoder does, the shortest first."""
    file = folder(name) / REACHED
    return codec.unpack(file.read_bytes()) if file.exists() else []


def keep(name: str, found: Iterable[bytes]) -> int:
    """Add inputs to the corpus, as far as they reach a pair of lines that no shorter one does; returns their bytes."""
    decoder = DECODERS[name]
    coverage = Coverage(decoder.modules)

    def is_new(raw: bytes) -> bool:
        return coverage.run(lambda: attempt(decoder, raw))[1]

    for raw in [*decoder.seeds(), *faults(name), b""]:
        is_new(raw)
    candidates = [raw for raw in {*reached(name), *found} if len(raw) <= KEPT_BYTES_MAX]
    kept = [raw for raw in sorted(candidates, key=lambda raw: (len(raw), raw)) if is_new(raw)]
    if not kept:
        return 0
    folder(name).mkdir(exist_ok=True)
    return (folder(name) / REACHED).write_bytes(codec.pack(kept))


def fuzz(
    name: str, seconds: float, seed: int, most: int = sys.maxsize, found: list[bytes] | None = None
) -> tuple[int, int]:
    """Fuzz one decoder, with at most ``most`` inputs; returns their number, and that of the pairs of lines reached.

    ``found`` gets the inputs that reached new ones. Raises :class:`Failure`, whose text has the seed and the input.
    """
    decoder, dice = DECODERS[name], random.Random(f"{seed}/{name}")
    coverage = Coverage(decoder.modules)
    corpus = [*decoder.seeds(), *faults(name), *reached(name), b""]
    end, number = time.monotonic() + seconds, 0
    first = len(corpus)
    with bounded():
        while number < first or (number < most and time.monotonic() < end):
            raw = corpus[number] if number < first else mutated(dice.choice(corpus), corpus, dice)
            if number >= first and decoder.seal is not None and dice.randrange(4):
                raw = decoder.seal(raw)
            number += 1
            try:
                _, is_new = coverage.run(lambda raw=raw: attempt(decoder, raw))  # type: ignore[misc]
            except Exception as error:
                text = f"{name}, seed {seed}: {type(error).__name__}: {error} for the input {raw[:2000]!r}"
                raise Failure(text) from error
            if is_new and number > first:
                corpus.append(raw)
                if found is not None:
                    found.append(raw)
    return number, len(coverage.seen)


def main() -> None:
    arguments = argparse.ArgumentParser(description="Fuzz the decoders, guided by coverage.")
    arguments.add_argument("decoder", nargs="*", help=", ".join(DECODERS))
    arguments.add_argument("--seconds", type=float, default=60, help="for all of them together")
    arguments.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30))
    arguments.add_argument("--keep", action="store_true", help="add what reached new lines to tests/corpus")
    given = arguments.parse_args()
    chosen = given.decoder or list(DECODERS)
    failed = 0
    for name in chosen:
        try:
            found: list[bytes] = []
            inputs, pairs = fuzz(name, given.seconds / len(chosen), given.seed, found=found)
            if given.keep:
                keep(name, found)
            print(f"{name}: {inputs:,} inputs, {pairs} pairs of lines, seed {given.seed}", flush=True)
        except Failure as failure:
            failed += 1
            print(f"FAILED {failure}", flush=True)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
