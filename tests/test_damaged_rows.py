"""A store that is damaged says so: no row is used whose checksum fails, and nothing of Cues's own is called foreign."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cues
from cues.base import names
from cues.forwarding import external_writers
from cues.records import sealed
from cues.records.log_row import put_row
from cues.steps import state as state_module
from cues.testing import run_until_idle


def graph_of(path: Path) -> cues.Graph:
    graph = cues.Graph("g", store=path, queues={"away": cues.QueueOptions(path=path.parent / "other")})
    graph.stream("in", "out", id="f")(lambda message: message)
    graph.stream("away", "back", id="r")(lambda message: message)
    return graph


def run(store: cues.Store) -> None:
    run_until_idle(graph_of(Path(store.path)), store)


def read(store: cues.Store) -> None:
    list(store.queue("in").tailer())


def append(store: cues.Store) -> None:
    store.queue("in").appender().write({"n": 1})


def append_many(store: cues.Store) -> None:
    store.queue("in").appender().write_many([{"n": 1}, {"n": 2}])


pytestmark = pytest.mark.damages_stores

ROWS: list[tuple[str, bytes, tuple[Callable[[cues.Store], Any], ...]]] = [
    ("a processor", names.processor_key("g.f"), (run,)),
    ("a topology", names.topology_key("g.f"), (run,)),
    ("a queue", names.row_key("in", 0), (run, read, append, append_many)),
    ("a queue that is written", names.row_key("out", 0), (run,)),
    ("a try log", names.row_key("g.f", 0), (run,)),
]


def test_an_append_never_replaces_records_that_the_row_does_not_count(path: Path) -> None:
    """The row of the queue is an older one, and sound: messages are there at the next index."""
    with cues.open(path) as store:
        queue = store.queue("in")
        before = list(queue.tailer())
        row = queue.core.row()._replace(next=1)
        store.core.commit(lambda txn: put_row(txn, names.row_key("in", 0), row))
        for use in (append, append_many):
            with pytest.raises(cues.errors.StoreDamaged, match="beyond its next index"):
                use(store)
        row = row._replace(next=len(before) + 1)
        store.core.commit(lambda txn: put_row(txn, names.row_key("in", 0), row))
        assert list(queue.tailer()) == before


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "s"
    with cues.open(tmp_path / "other") as other, cues.open(path, "process", 16 << 20) as store:
        other.queue("away").appender().write({"n": 0})
        append_many(store)
        run(store)
        append(store)
    return path


@pytest.mark.parametrize(
    ("key", "use"),
    [(key, use) for _, key, uses in ROWS for use in uses],
    ids=[f"{w}, {u.__name__}" for w, _, us in ROWS for u in us],
)
def test_a_row_with_one_flipped_bit_is_never_used(path: Path, key: bytes, use: Callable[[cues.Store], Any]) -> None:
    """Whichever bit it is; the error says what is damaged and where, and nothing was written."""
    with cues.open(path) as store, store.core.view() as txn:
        good = bytes(txn.get(key))
    bits = range(0, 8 * len(good), 37) if key != names.topology_key("g.f") else range(1)
    for bit in bits:
        raw = bytearray(good)
        raw[bit // 8] ^= 1 << bit % 8
        with cues.open(path) as store:
            store.core.commit(lambda txn, raw=raw: txn.put(key, bytes(raw)))
        with cues.open(path) as store:
            with pytest.raises(cues.errors.StoreDamaged) as caught:
                use(store)
            assert str(path) in str(caught.value) and " Try: " in str(caught.value), bit
            with store.core.view() as txn:
                assert txn.get(key) == raw
            store.core.commit(lambda txn: txn.put(key, good))
    with cues.open(path) as store:
        use(store)
        assert not store.check()


def test_a_sealed_row_of_any_length_is_refused_when_it_was_cut_or_changed() -> None:
    row = sealed.seal(b"key", b"what it says")
    assert sealed.unseal(b"key", row, "row") == b"what it says"
    for wrong in [b"", row[:-1], row[1:], *(row[:at] + bytes([row[at] ^ 1]) + row[at + 1 :] for at in range(len(row)))]:
        assert not sealed.intact(b"key", wrong)
        with pytest.raises(cues.errors.StoreDamaged, match="The row of x cannot be used"):
            sealed.unseal(b"key", wrong, "row of x")


def test_the_position_of_an_external_writer_is_compared(path: Path) -> None:
    with cues.open(path) as store:
        raw = sealed.seal(names.source_key("job"), external_writers.SourceRow("in", 4, ["range", 3]).pack())
        store.core.commit(lambda txn: txn.put(names.source_key("job"), raw[:-1] + bytes([raw[-1] ^ 1])))
        with pytest.raises(cues.errors.StoreDamaged, match="external writer 'job'"), store.core.view() as txn:
            external_writers.read(txn, "job")


# --- the data file --------------------------------------------------------------------------------


def test_a_store_whose_format_record_cannot_be_found_is_damaged_and_not_foreign(path: Path) -> None:
    data = (path / "data.mdb").read_bytes()
    assert data.count(names.FORMAT_KEY) >= 1
    (path / "data.mdb").write_bytes(data.replace(names.FORMAT_KEY, b"\0bues"))
    with pytest.raises(cues.errors.StoreDamaged, match=r"format record .* cannot be found"):
        cues.open(path)
    for beside in ("locks", "wake"):
        (path / beside).unlink()
    with pytest.raises(cues.errors.StoreForeign):
        cues.open(path)


@pytest.mark.parametrize("at", [16, 20], ids=["magic number", "data version"])
def test_a_store_whose_first_pages_are_wrong_is_damaged_and_not_foreign(path: Path, at: int) -> None:
    data = bytearray((path / "data.mdb").read_bytes())
    data[at] ^= 4
    data[4096 + at] ^= 4
    (path / "data.mdb").write_bytes(data)
    with pytest.raises(cues.errors.StoreDamaged, match="is damaged"):
        cues.open(path)


# --- a store that is deleted ----------------------------------------------------------------------


@pytest.mark.parametrize("anew", [False, True], ids=["gone", "another in its place"])
def test_a_store_that_was_deleted_acknowledges_nothing(tmp_path: Path, anew: bool) -> None:
    with cues.open(tmp_path / "s") as store:
        append(store)
        shutil.rmtree(tmp_path / "s")
        if anew:
            cues.open(tmp_path / "s").close()
        for write in (append, append_many):
            with pytest.raises(cues.errors.StoreNotFound, match="was deleted, or another was put in its place"):
                write(store)
        if not anew:
            with pytest.raises(cues.errors.StoreNotFound):
                run(store)


def test_a_process_store_that_was_deleted_acknowledges_for_a_tenth_of_a_second(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process") as store:
        append(store)
        shutil.rmtree(tmp_path / "s")
        store.core.environment.look_at = 0.0  # that time has passed
        with pytest.raises(cues.errors.StoreNotFound, match="was deleted"):
            append(store)


def delete_while_it_runs(path: Path) -> None:
    """Delete a directory in which threads may still make a file meanwhile."""
    for _ in range(100):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
    raise AssertionError(f"{path} is made again and again: {list(path.iterdir())}")


def test_a_running_graph_stops_when_its_store_is_deleted(path: Path) -> None:
    running = graph_of(path).start()
    try:
        running.wait_idle(10)
        delete_while_it_runs(path)
        with pytest.raises(cues.ProcessorStopped) as caught:
            while running.wait_idle(10):
                pass
        assert isinstance(caught.value.__cause__, cues.errors.StoreNotFound)
    finally:
        running.close()


def counted(message: dict[str, Any], process: Any, catch: str) -> dict[str, Any]:
    """Count a key in the state. The function catches the errors of its state, or raises others in their place."""
    try:
        process.state["n"] = process.state.get("n", 0) + 1
    except BaseException as error:
        if catch == "caught":
            return {"caught": type(error).__name__}
        if catch == "replaced":
            raise ValueError(catch) from None
        raise
    return {"n": process.state["n"]}


@pytest.mark.interpreted  # it sets a constant of the core
@pytest.mark.parametrize("catch", ["not caught", "caught", "replaced"])
@pytest.mark.parametrize("how", ["one", "retried", "many", "async"])
def test_damaged_state_stops_the_processor_and_no_message_is_charged(
    tmp_path: Path, catch: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "VERIFY_ROWS", 0)  # the start would find it

    async def at_once(message: dict[str, Any], process: Any) -> dict[str, Any]:
        return counted(message, process, catch)

    def one(message: dict[str, Any], process: Any) -> dict[str, Any]:
        return counted(message, process, catch)

    graph = cues.Graph("g", store=tmp_path / "s", errors="errors")
    graph.stream(
        "in",
        "out",
        id="f",
        key="k",
        concurrency=3 if how == "many" else 1,
        retries=3 if how == "retried" else 1,
    )(at_once if how == "async" else one)
    with cues.open(tmp_path / "s") as store:
        store.queue("in").appender().write_many([{"k": key} for key in "abb"])
        run_until_idle(graph, store)

        def damage(txn: Any) -> None:
            row, value = next((row, value) for row, value in txn.cursor(state) if b"a" in row[:3])
            txn.put(row, value[:-1] + bytes([value[-1] ^ 1]), db=state)

        state = store.core.database(names.state_database("g.f"))
        store.core.commit(damage)
        store.queue("in").appender().write_many([{"k": key} for key in "bab"])
        with pytest.raises(cues.errors.ProcessorStopped, match=r"StoreDamaged: .* row of state:g.f"):
            run_until_idle(graph, store)
        assert "errors" not in store.queues() or not len(store.queue("errors"))
        assert [m["n"] for m in store.queue("out").tailer()][:3] == [1, 1, 2]
        assert all(set(m) == {"n"} for m in store.queue("out").tailer())


def test_an_error_of_the_store_of_a_processor_is_no_fault_of_a_message(tmp_path: Path) -> None:
    """The user's function writes to the store with a handle of its own, and the disk is full; then it is not."""
    full = [True]
    graph = cues.Graph("g", store=tmp_path / "s", errors="errors")

    @graph.stream("in", "out", id="f")
    def write(message: dict[str, Any]) -> dict[str, Any]:
        if full[0]:
            error = cues.errors.StoreFull("The disk is full.", "free space.", path=str(tmp_path / "s"))
            raise RuntimeError("wrapped") from error
        return message

    with cues.open(tmp_path / "s") as store:
        store.queue("in").appender().write({"n": 1})
        with pytest.raises(cues.errors.ProcessorStopped, match="StoreFull"):
            run_until_idle(graph, store)
        full[0] = False
        run_until_idle(graph, store)
        assert list(store.queue("out").tailer()) == [{"n": 1}]


def test_a_damaged_message_of_an_own_tailer_stops_the_processor(tmp_path: Path) -> None:
    graph = cues.Graph("g", store=tmp_path / "s", errors="errors")

    @graph.stream("in", "out", id="f", tailers={"rates": "rates"})
    def rated(message: dict[str, Any], process: Any) -> dict[str, Any]:
        try:
            return {"rate": process.tailers["rates"].read()}
        except cues.CuesError:
            return {"rate": None}

    with cues.open(tmp_path / "s") as store:
        store.queue("in").appender().write({"n": 1})
        store.queue("rates").appender().write({"rate": 2})

        def damage(txn: Any) -> None:
            key, value = next(iter(txn.cursor(log)))
            txn.put(key, value[:-1] + bytes([value[-1] ^ 1]), db=log)

        log = store.core.database(b"log:rates")
        store.core.commit(damage)
        with pytest.raises(cues.errors.ProcessorStopped, match="BatchDamaged"):
            run_until_idle(graph, store)
        assert not len(store.queue("out"))
