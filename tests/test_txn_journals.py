"""cues import and cues export: files of messages with identities, repeated, cut, damaged, and in every form."""

from __future__ import annotations

import io
import json
import os
import random
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import seeds
from syncs import noted
from terminal import cues
from txn_logs import random_journal

import cues as library
from cues.errors import CuesError, FramingError, InvalidArgument
from cues.queues.queue import Queue
from cues.txn import Flags, ProducerID, Publisher, ReadUncommitted, append_stamped, build_uuid, framing_for
from cues.txn.journals import FIXED, JSON_LINES, MSGPACK_FIXED, Form, bring, stamp, take_out

P = ProducerID(bytes.fromhex("010203040506"))


def contents(queue: Queue) -> list[Any]:
    return [(one.uuid, one.message) for one in ReadUncommitted(queue, message_type=None)]


def exported(queue: Queue, form: Form, **options: Any) -> bytes:
    out = io.BytesIO()
    take_out(queue, out.write, form, **options)
    return out.getvalue()


@pytest.fixture
def store(tmp_path: Path) -> Any:
    with library.open(tmp_path / "s", durability="process") as found:
        yield found


def lines(count: int, key: str = "q/uuid") -> str:
    return "".join(
        json.dumps({"n": n, key: str(build_uuid(P, 160 * n, Flags.OUTSIDE_TXN))}) + "\n" for n in range(1, count + 1)
    )


# --- the library ----------------------------------------------------------------------------------


def test_a_log_with_transactions_goes_out_and_in_again_as_it_was(store: Any) -> None:
    """Pending messages, rollbacks and acknowledgements included; and to do it again changes nothing."""
    seed = seeds.new()
    journal, committed = random_journal(random.Random(seed), "q", 2500, 4)
    first, second = store.queue("first"), store.queue("second")
    append_stamped(first, [(one.uuid, {"n": n}) for n, one in enumerate(journal.log)])
    for form in (Form(JSON_LINES), Form(MSGPACK_FIXED), Form("text/csv", columns=("n",))):
        data = exported(first, form)
        appended, had = bring(second, io.BytesIO(data), form)
        assert appended + had == len(first)
        assert bring(second, io.BytesIO(data), form) == (0, len(first))
        if form.content_type == JSON_LINES:
            assert appended == len(first) and contents(second) == contents(first)
    found = [one["n"] for one in second.tailer(isolation="committed")]
    assert found == [one["n"] for one in first.tailer(isolation="committed")]
    assert len(found) == sum(one.flags != Flags.ACK_TXN for one in committed)


def test_an_import_that_is_cut_off_in_a_transaction_and_repeated_loses_nothing(store: Any) -> None:
    """The acknowledgement of an earlier transaction comes again while the next one is pending.

    Taken for the sign that the producer died, it would drop what is pending, and the messages would be gone when
    their acknowledgement comes.
    """
    seed = seeds.new()
    rng = random.Random(seed)
    form = Form(JSON_LINES)
    for number in range(40):
        journal, _ = random_journal(rng, "q", rng.randrange(5, 60), rng.randrange(1, 4))
        frames = [form.encode(one.uuid, {"n": n}) for n, one in enumerate(journal.log)]
        whole, pieces = store.queue(f"whole-{number}"), store.queue(f"pieces-{number}")
        bring(whole, io.BytesIO(b"".join(frames)), form)
        for _ in range(4):
            bring(pieces, io.BytesIO(b"".join(frames[: rng.randrange(len(frames))])), form)
        bring(pieces, io.BytesIO(b"".join(frames)), form)
        assert contents(pieces) == contents(whole)


def test_messages_without_identity_get_one_of_their_queue_and_index(store: Any) -> None:
    first, second = store.queue("first"), store.queue("second")
    first.appender().write_many([{"n": n} for n in range(5)])
    form = Form(JSON_LINES)
    assert bring(second, io.BytesIO(exported(first, form)), form) == (5, 0)
    first.appender().write_many([{"n": n} for n in range(5, 9)])
    assert bring(second, io.BytesIO(exported(first, form, begin=3)), form) == (4, 3)  # they overlap
    assert [m["n"] for m in second.tailer()] == list(range(9))
    assert exported(second, form) == exported(first, form)


def test_partitions_are_journals_of_their_own(store: Any, tmp_path: Path) -> None:
    """Their messages have other identities, although their indices are the same."""
    views = store.queue("views", partitions=3, key="n")
    views.appender().write_many([{"n": n} for n in range(30)])
    form, together = Form(JSON_LINES), store.queue("together")
    for _ in range(2):
        for partition in store.matching("views/*")():
            bring(together, io.BytesIO(exported(partition, form)), form)
    assert sorted(m["n"] for m in together.tailer()) == list(range(30))
    with pytest.raises(InvalidArgument, match="on one log"):
        exported(views, form)
    refused = cues("export", f"{tmp_path / 's'}#views")
    assert refused.code == 2 and "3 partitions" in refused.err and "#views/0" in refused.err


def test_what_is_committed_is_exported_outside_of_transactions(store: Any) -> None:
    queue = store.queue("q")
    with Publisher() as publisher:
        for n in range(3):
            publisher.publish_uncommitted(lambda message: queue, {"n": n})
        publisher.append_ack_intents(publisher.build_ack_intents())
        publisher.publish_uncommitted(lambda message: queue, {"pending": 1})
    form = Form(JSON_LINES)
    other = store.queue("other")
    assert bring(other, io.BytesIO(exported(queue, form, committed=True)), form) == (3, 0)
    assert list(other.tailer(isolation="committed")) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert {one.flags for one in ReadUncommitted(other)} == {0}


def test_every_type_comes_back_from_msgpack_and_json_says_what_it_cannot_hold(store: Any) -> None:
    rich = {"when": datetime(2026, 1, 2, tzinfo=UTC), "raw": b"\0\xff", "many": (1, {2, 3}), "id": uuid.uuid4()}
    queue, other = store.queue("q"), store.queue("other")
    queue.appender().write(rich)
    form = Form(MSGPACK_FIXED)
    bring(other, io.BytesIO(exported(queue, form)), form)
    assert list(other.tailer()) == [rich]
    with pytest.raises(FramingError, match="a datetime would be read back as another type"):
        exported(queue, Form(JSON_LINES))
    payloads = store.queue("payloads")
    data = framing_for(FIXED).encode(b"\1\2") + framing_for(FIXED).encode(b"")
    with pytest.raises(FramingError, match="Message 1 has no UUID"):
        bring(payloads, io.BytesIO(data), Form(FIXED))
    assert bring(payloads, io.BytesIO(data), Form(FIXED), unstamped=True) == (2, 0)
    assert list(payloads.tailer()) == [{"payload": b"\1\2"}, {"payload": b""}]
    assert exported(payloads, Form(FIXED)) == data


def test_a_damaged_journal_is_reported_with_its_place_and_earlier_messages_are_in_the_queue(store: Any) -> None:
    queue = store.queue("q", max_message_bytes=1000)
    form = Form(JSON_LINES)
    good = lines(1500)
    identity = str(build_uuid(P, 160 * 2000, Flags.OUTSIDE_TXN))
    for bad, text in (
        ("no json\n", "Message 1501, before offset .*is not JSON"),
        ("[1]\n", "Message 1501, .*an object, found list"),
        ('{"q/uuid": 5}\n', "Message 1501, .*UUID of a message is of type int"),
        ('{"n": 1}\n', "Message 1501 has no UUID under 'q/uuid'"),
        (json.dumps({"q/uuid": str(uuid.uuid4())}) + "\n", "Message 1501 cannot be imported: The UUID"),
        (json.dumps({"q/uuid": identity, "x": "x" * 2000}) + "\n", "Message 1501 cannot be imported: .*1,000"),
        ('{"cut":', "Message 1501, before offset .*without a line feed"),
    ):
        with pytest.raises(CuesError, match=text):
            bring(queue, io.BytesIO((good + bad + (lines(3) if bad.endswith("\n") else "")).encode()), form)
        assert len(queue) == 1500
    assert bring(queue, io.BytesIO((good + lines(1501)).encode()), form) == (1, 3000)


def test_stamping_is_whole_or_not_at_all_and_done_once(tmp_path: Path, store: Any) -> None:
    path = tmp_path / "raw.jsonl"
    path.write_text('{"n": 1}\n{"n": 2}\nbroken\n')
    form = Form(JSON_LINES)
    with pytest.raises(FramingError, match="Message 3"):
        stamp(path, form)
    assert [one.name for one in tmp_path.glob("raw*")] == ["raw.jsonl"]
    path.write_text('{"n": 1}\n{"n": 2}\n')
    copy, count = stamp(path, form)
    before = copy.read_bytes()
    assert (copy.name, count) == ("raw.jsonl.stamped", 2)
    assert stamp(path, form) == (copy, 0) and copy.read_bytes() == before
    queue = store.queue("q")
    for expected in ((2, 0), (0, 2)):
        with copy.open("rb") as stream:
            assert bring(queue, stream, form) == expected
    os.utime(path, ns=(copy.stat().st_mtime_ns + 10**9,) * 2)
    with pytest.raises(InvalidArgument, match="has changed since"):
        stamp(path, form)
    with pytest.raises(InvalidArgument, match="stamped already"):
        stamp(copy, form)
    table = tmp_path / "table.csv"
    table.write_text('tea,3\n"rum, brown",4\n')
    copy, _ = stamp(table, Form("text/csv"))
    with copy.open("rb") as stream:
        assert bring(queue, stream, Form("text/csv", columns=("item", "count"))) == (2, 0)
    assert queue.tailer().read_many(9)[2:] == [{"item": "tea", "count": "3"}, {"item": "rum, brown", "count": "4"}]


def test_a_stamped_copy_is_durable_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another copy would have other identities, and an import of it would double the messages. Its name counts too."""
    path, copy = tmp_path / "raw.jsonl", "raw.jsonl.stamped"
    path.write_text('{"n": 1}\n')
    calls = noted(monkeypatch, tmp_path)
    stamp(path, Form(JSON_LINES))
    assert calls.index(("replace", copy)) < calls.index(("fsync", "."))
    calls.clear()
    stamp(path, Form(JSON_LINES))  # the writer of the copy may have died before the sync of its name
    assert calls[:2] == [("fsync", copy), ("fsync", ".")]


def test_forms_that_do_not_fit_are_refused_by_name(store: Any) -> None:
    with pytest.raises(InvalidArgument, match="Unrecognized content type"):
        Form("application/octet-stream")
    queue = store.queue("q")
    queue.appender().write({"a": 1, "b": 2})
    with pytest.raises(FramingError, match="field 'b', which is not a column"):
        exported(queue, Form("text/csv", columns=("a",)))
    with pytest.raises(FramingError, match="names as columns"):
        exported(queue, Form("text/csv"))
    with pytest.raises(FramingError, match="is its payload"):
        exported(queue, Form(FIXED))
    record = f"{build_uuid(P, 160, Flags.OUTSIDE_TXN)},1\n".encode()
    with pytest.raises(FramingError, match="1 fields after its UUID, but 2 columns"):
        bring(queue, io.BytesIO(record), Form("text/csv", columns=("a", "b")))


# --- the command line -----------------------------------------------------------------------------


def test_import_and_export_from_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "orders.jsonl"
    file.write_text(lines(5, "id"))
    target = f"{tmp_path / 'store'}#orders"
    missing = cues("import", target, file, "--uuid-key", "id")
    assert missing.code == 1 and "no store" in missing.err
    done = cues("import", target, file, "--uuid-key", "id", "--create")
    assert json.loads(done.out) == {"file": str(file), "queue": "orders", "imported": 5, "there_already": 0}
    again = cues("import", target, file, "--uuid-key", "id", "--table")
    assert again.out == f"{file}: 0 messages imported to orders, 5 messages were there already\n"
    shown = cues("tail", target, "-n", "1", "--meta")
    assert json.loads(shown.out)["q/meta"]["q/uuid"] == str(build_uuid(P, 800, Flags.OUTSIDE_TXN))

    copy = tmp_path / "copy.msgpack"
    out = cues("export", target, copy)
    assert json.loads(out.out) == {"queue": "orders", "file": str(copy), "exported": 5}
    refused = cues("export", target, copy)
    assert refused.code == 2 and "exists already" in refused.err
    piped = cues("export", target)
    assert [json.loads(line)["n"] for line in piped.out.splitlines()] == [1, 2, 3, 4, 5]
    assert "5 messages of orders exported" in piped.err
    other = f"{tmp_path / 'other'}#orders"
    assert cues("import", other, "-", "--content-type", "application/x-ndjson", "--create", stdin=piped.out).code == 0
    assert json.loads(cues("import", other, copy).out)["there_already"] == 5


def test_import_of_files_without_identities(tmp_path: Path) -> None:
    file = tmp_path / "raw.jsonl"
    file.write_text('{"n": 1}\n{"n": 2}\n')
    target = f"{tmp_path / 'store'}#orders"
    plain = cues("import", target, file, "--create")
    assert plain.code == 1
    assert "Message 1 has no UUID under 'q/uuid'" in plain.err and "Try: stamp the file first (--stamp)" in plain.err
    for expected in (2, 0):
        found = cues("import", target, file, "--stamp")
        assert json.loads(found.out)["imported"] == expected
    assert cues("import", target, file, "--unstamped").code == 0
    assert len(cues("tail", target, "-n", "all").out.splitlines()) == 4
    assert cues("import", target, file, "--stamp", "--unstamped").code == 2
    assert cues("import", target, "-", "--stamp", "--content-type", "text/csv", stdin="").code == 2
    assert cues("import", target, tmp_path / "what.bin").code == 2
    gone = cues("import", target, tmp_path / "gone.jsonl")
    assert gone.code == 1 and "gone.jsonl" in gone.err
    file.write_text('{"n": 1}\nbroken\n')
    broken = cues("import", target, file, "--unstamped")
    assert broken.code == 1 and "Message 2" in broken.err and "(1 new message)" in broken.err
