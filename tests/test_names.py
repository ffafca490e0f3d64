"""Names: what may name a queue, what may not, and that the error says why."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

import cues
from cues.base import names
from cues.errors import InvalidName, QueueNotFound


@pytest.mark.parametrize(
    "name", ["orders", "a", "x" * 128, "größe-日本-\U0001f600", "two words", "-", "_", "é" * 64, "a:b"]
)
def test_a_good_name_names_a_queue_and_a_tailer(tmp_path: Path, name: str) -> None:
    with cues.open(tmp_path / "store") as store:
        queue = store.queue(name)
        queue.appender().write({"n": 1})
        assert queue.tailer(name).read() == {"n": 1}
        assert queue.tailer(name).read() is None
        assert store.queues() == [name]


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("", "empty"),
        ("a/b", "a slash"),
        ("/", "a slash"),
        ("a#b", "a '#'"),
        ("x" * 300, "300 characters"),
        ("é" * 65, "65 characters, and at most 128 bytes"),
        ("a\nb", "cannot be printed"),
        ("a\0b", "cannot be printed"),
        ("\x7f", "cannot be printed"),
        ("a\u200bb", "cannot be printed"),
        ("\ud800", "cannot be printed"),
        (" a", "white space"),
        ("a ", "white space"),
        pytest.param(None, "must be a string, not NoneType", marks=pytest.mark.interpreted),
        pytest.param(7, "must be a string, not int", marks=pytest.mark.interpreted),
        pytest.param(b"a", "must be a string, not bytes", marks=pytest.mark.interpreted),
    ],
)
def test_a_bad_name_is_refused_with_the_reason_and_nothing_is_made(tmp_path: Path, name: Any, why: str) -> None:
    with cues.open(tmp_path / "store") as store:
        with pytest.raises(InvalidName, match=why) as caught:
            store.queue(name)
        assert caught.value.hint
        assert pickle.loads(pickle.dumps(caught.value)).name == caught.value.name
        assert store.queues(all=True) == []
        queue = store.queue("q")
        with pytest.raises(InvalidName, match=why):
            if name is not None:
                queue.tailer(name)
            names.check("tailer", name)


@pytest.mark.parametrize("name", ["a.b", "flights.enrich"])
def test_a_dot_means_a_try_log_which_no_user_makes(tmp_path: Path, name: str) -> None:
    with cues.open(tmp_path / "store") as store:
        with pytest.raises(QueueNotFound, match="holds no dot"):
            store.queue(name)
        with pytest.raises(InvalidName, match="a dot"):
            store.queue("q").tailer(name)
        assert store.queues(all=True) == ["q"]


@pytest.mark.parametrize("name", [".", "a.", ".a", "a..b", "a." + "x" * 600, "a.b/c"])
def test_a_bad_part_of_a_dotted_name_is_a_bad_name(tmp_path: Path, name: str) -> None:
    """A long one went down to LMDB and came back as MDB_BAD_VALSIZE."""
    with cues.open(tmp_path / "store") as store, pytest.raises(InvalidName):
        store.queue(name)


def test_ids_can_be_taken_apart_and_keys_never_collide() -> None:
    processor = names.processor_id("flights", "enrich")
    assert processor == "flights.enrich"
    assert names.tailer_id(processor, "priced") == "flights.enrich.priced"
    assert names.tailer_id(processor, "priced", 3) == "flights.enrich.priced/3"
    longest = "x" * names.NAME_BYTES_MAX
    keys = [
        names.FORMAT_KEY,
        names.queue_key(longest),
        names.row_key(longest, 0),
        names.row_key(longest, 3),
        names.processor_key(names.processor_id(longest, longest)),
        names.topology_key(names.processor_id(longest, longest)),
        names.subscription_key(longest, names.processor_id(longest, longest)),
        names.reader_key(longest, 0, longest),
        names.log_database(longest, 0),
        names.log_database(longest, 3),
        names.state_database(names.processor_id(longest, longest)),
    ]
    assert len(set(keys)) == len(keys)
    assert max(map(len, keys)) <= 511, "LMDB's limit"
