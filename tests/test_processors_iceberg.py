"""Iceberg tables as targets: appended, upserted and deleted exactly once; values of each type; other writers; kill -9.

The contracts of all sinks (test_contracts_sinks.py) run over an Iceberg table, too.
"""

from __future__ import annotations

import os
import random
import shutil
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any
from uuid import UUID

import mirrors
import object_store
import pyarrow as pa
import pytest
from contracts_sinks import iceberg_rows
from mirrors import deliver, run
from sets import bounded

import cues
from cues import testing
from cues.base.away import is_away
from cues.errors import CheckpointError, Diverged, Fenced, InvalidArgument
from cues.processors import waits
from cues.processors.iceberg import IcebergTarget

pytest.importorskip("pyiceberg")

N = pa.schema({"n": pa.int64()})


def catalog(path: Path) -> dict[str, str]:
    path.mkdir(parents=True, exist_ok=True)
    return {"type": "sql", "uri": f"sqlite:///{path}/catalog.db", "warehouse": f"file://{path}"}


def target_at(path: Path, name: str = "lake.t", **options: Any) -> IcebergTarget:
    return IcebergTarget(name, catalog=catalog(path), **options)


def rows(target: IcebergTarget) -> list[dict[str, Any]]:
    return sorted(iceberg_rows(target), key=repr)


def numbers(target: IcebergTarget) -> list[int]:
    return sorted(row["n"] for row in iceberg_rows(target))


# --- rows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("tables", [False, True], ids=["dicts", "tables"])
def test_messages_are_added_as_rows(tmp_path: Path, store: cues.Store, tables: bool) -> None:
    target = target_at(tmp_path, schema=pa.schema({"n": pa.int64(), "s": pa.string()}))
    given = [{"n": n, "s": str(n)} for n in range(50)]
    assert run(target, pa.Table.from_pylist(given) if tables else given, store) == []
    assert sorted(rows(target), key=lambda row: row["n"]) == given
    summary = target.open().current_snapshot().summary.additional_properties
    assert summary["cues.processor"] == "g.save" and len(summary["cues.delivery"]) == 32


@pytest.mark.slow
@pytest.mark.parametrize("tables", [False, True], ids=["dicts", "tables"])
@pytest.mark.parametrize("batch_size", [3, 1000])
def test_upserts_and_deletes_leave_what_a_dict_has(
    tmp_path: Path, store: cues.Store, tables: bool, batch_size: int
) -> None:
    dice = random.Random(batch_size)
    schema = pa.schema({"Some Key": pa.string(), "b": pa.int64(), "v": pa.float64()})
    upserts = target_at(tmp_path, schema=schema, mode="upsert", key=["Some Key", "b"])
    given = [{"Some Key": dice.choice("xyz'"), "b": dice.randrange(3), "v": dice.random()} for _ in range(20)]
    wanted = {(row["Some Key"], row["b"]): row for row in given}
    assert run(upserts, pa.Table.from_pylist(given) if tables else given, store, batch_size=batch_size) == []
    assert rows(upserts) == sorted(wanted.values(), key=repr)

    deletes = target_at(tmp_path, mode="delete", key=["Some Key", "b"])
    gone = [{"Some Key": key, "b": b, "more": 1} for key, b in list(wanted)[::2]] + [{"Some Key": "none", "b": 1}]
    with testing.temporary_store() as other:
        given_too = [{**row, "more": 1} for row in gone] if tables else gone
        run(deletes, pa.Table.from_pylist(given_too) if tables else given_too, other, batch_size=batch_size, id="away")
    left = [row for at, row in wanted.items() if at not in {(row["Some Key"], row["b"]) for row in gone}]
    assert rows(deletes) == sorted(left, key=repr)


KEYS = [
    (pa.bool_(), [True, False]), (pa.int32(), [1, -(1 << 31)]), (pa.int64(), [(1 << 63) - 1, 0]),
    (pa.string(), ["", "'\"`é\0", "x"]), (pa.binary(), [b"", b"\0\xff"]),
    (pa.date32(), [date(1, 1, 1), date(2024, 2, 29)]),
    (pa.timestamp("us"), [datetime(2024, 1, 1, 1, 2, 3, 4), datetime(1, 1, 1)]),
    (pa.time64("us"), [time(1, 2, 3, 4), time()]),
    (pa.timestamp("us", "UTC"), [datetime(2024, 1, 1, 1, 2, 3, 4, UTC), datetime(9999, 1, 1, tzinfo=UTC)]),
    (pa.decimal128(20, 3), [Decimal("-1.500"), Decimal("0.001")]), (pa.binary(2), [b"\0\1", b"zz"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "keys"), KEYS, ids=lambda each: str(each)[:20])
def test_rows_are_found_by_keys_of_each_type(tmp_path: Path, store: cues.Store, kind: Any, keys: list[Any]) -> None:
    schema = pa.schema({"k": kind, "v": pa.int64()})
    target = target_at(tmp_path, schema=schema, mode="upsert", key="k")
    assert run(target, [{"k": key, "v": v} for v in range(2) for key in keys], store, batch_size=len(keys)) == []
    assert sorted(iceberg_rows(target), key=lambda row: row["k"]) == [{"k": key, "v": 1} for key in sorted(keys)]
    deletes = target_at(tmp_path, mode="delete", key="k")
    with testing.temporary_store() as other:
        assert run(deletes, [{"k": keys[0]}], other, id="away") == []
    assert iceberg_rows(target) == [{"k": key, "v": 1} for key in keys[1:]]


VALUES = [
    (pa.int8(), -5), (pa.int64(), -(1 << 63)), (pa.uint32(), (1 << 32) - 1), (pa.uint64(), (1 << 64) - 1),
    (pa.float64(), 0.1), (pa.float64(), float("inf")), (pa.bool_(), True), (pa.string(), "é\0"),
    (pa.binary(), b"\0\xff"), (pa.time64("us"), time(1, 2, 3, 4)), (pa.binary(3), b"abc"),
    (pa.date32(), date(1, 1, 1)), (pa.timestamp("us"), datetime(2024, 2, 29, 1, 2, 3, 4)),
    (pa.timestamp("us", "UTC"), datetime(2024, 2, 29, 1, 2, 3, 4, timezone(timedelta(hours=2)))),
    (pa.decimal128(38, 4), Decimal("123456789.1234")), (pa.list_(pa.int32()), [1, None]), (pa.list_(pa.int32()), []),
    (pa.struct({"x": pa.string()}), {"x": None}), (pa.string(), None),
]  # fmt: skip


def test_a_value_is_the_same_in_the_table(tmp_path: Path) -> None:
    """In a column for each type: one table costs as much as a table of one type."""
    schema = pa.schema([("n", pa.int64()), *((f"v{n}", kind) for n, (kind, _) in enumerate(VALUES))])
    values = {f"v{n}": value for n, (_, value) in enumerate(VALUES)}
    given = [{"n": n, **values} for n in (1, 2)]
    for name, messages in (("dicts", given), ("tables", pa.Table.from_pylist(given, schema))):
        target = target_at(tmp_path / name, schema=schema)
        with testing.temporary_store() as own:
            assert run(target, messages, own) == []
        assert sorted(rows(target), key=lambda row: row["n"]) == given


def test_a_value_that_the_column_does_not_hold_fails_its_message_alone(tmp_path: Path, store: cues.Store) -> None:
    target = target_at(tmp_path, schema=pa.schema({"n": pa.int32(), "s": pa.string()}))
    given = [{"n": 1}, {"n": 1 << 31}, {"n": "2"}, {"n": 3, "s": "x"}, {"n": 4, "other": 1}, {"n": 5.5}, {"n": 6.0}]
    failed = run(target, given, store)
    assert [row["n"] for row in rows(target)] == [1, 3, 6]
    assert [message["n"] for record in failed for message in record["err.proc/messages"]["q"]] == [1 << 31, "2", 4, 5.5]
    assert "evolve=True" in failed[2]["err/cause"][0]["message"]


def test_a_table_gets_the_columns_of_new_fields(tmp_path: Path, store: cues.Store) -> None:
    target = target_at(tmp_path, evolve=True)
    given: list[Any] = [{"n": 1, "later": None}, {"n": 2, "t": date(2024, 1, 1)}, {"n": 3, "later": {"x": "x"}}]
    assert run(target, given, store, batch_size=1) == []
    table = pa.table({"n": [4], "kind": pa.array(["y"]).dictionary_encode(), "nothing": pa.nulls(1)})
    assert run(target, table, store) == []
    names = {"n": None, "t": None, "later": None, "kind": None}
    wanted = [{**names, **{k: v for k, v in row.items() if v is not None}} for row in [*given, {"n": 4, "kind": "y"}]]
    assert sorted(rows(target), key=lambda row: row["n"]) == wanted
    failed = run(target, [{"n": 5, "w": timedelta(1)}, {"n": 6, "v": UUID(int=7)}, {"n": 7, "N": 1}], store)
    assert [record["err.proc/messages"]["q"][0]["n"] for record in failed] == [5, 7]
    assert "Iceberg has no such type" in failed[0]["err/cause"][0]["message"]
    assert {row["n"]: row.get("v") for row in rows(target)}[6] == str(UUID(int=7))


def test_a_table_is_divided_by_transforms(tmp_path: Path, store: cues.Store) -> None:
    by = ["city", "day(at)", "bucket(4, n)", "truncate(2, s)"]
    schema = pa.schema({"n": pa.int64(), "s": pa.string(), "city": pa.string(), "at": pa.timestamp("us", "UTC")})
    target = target_at(tmp_path, schema=schema, partition_by=by)
    given = [
        {"n": n, "s": str(n), "city": ["", "a/b=c ü", None][n % 3], "at": datetime(2024, 1, n % 5 + 1, tzinfo=UTC)}
        for n in range(30)
    ]
    assert run(target, given, store, batch_size=10) == []
    assert sorted(rows(target), key=lambda row: row["n"]) == given
    assert [str(field.transform) for field in target.open().spec().fields] == [
        "identity", "day", "bucket[4]", "truncate[2]",
    ]  # fmt: skip
    target.__cues_prepare__()
    with pytest.raises(CheckpointError, match="its partitions are"):
        target_at(tmp_path, partition_by="city").__cues_prepare__()
    upserts = target_at(tmp_path, mode="upsert", key="n")
    with testing.temporary_store() as other:
        run(upserts, [{**row, "city": "new"} for row in given[::2]], other, id="again")
    assert [row["city"] for row in sorted(rows(target), key=lambda row: row["n"])[::2]] == ["new"] * 15


# --- deliveries ---------------------------------------------------------------------------------


def test_a_delivery_again_adds_what_is_new(tmp_path: Path) -> None:
    target = target_at(tmp_path, schema=N)
    target.__cues_prepare__()
    deliver(target, 1, 4)
    deliver(target, 1, 4)
    deliver(target, 2, 6)
    assert numbers(target) == [1, 2, 3, 4, 5]
    deliver(target, 4, 8, epoch=2)
    with pytest.raises(Fenced):
        deliver(target, 8, 9, epoch=1)
    deliver(target, 1, 3, epoch=2, generation=1)  # asked for again
    assert numbers(target) == [1, 1, 2, 2, 3, 4, 5, 6, 7]
    assert target.holds(["g.save", "g.other"]) == ["g.save"]
    with pytest.raises(Diverged):
        deliver(target, 8, 9, store="ff" * 8)


def test_an_owner_that_was_overtaken_between_read_and_commit_adds_nothing(tmp_path: Path) -> None:
    """pyiceberg would put the rows and the property of the old owner upon the snapshot of the new one.

    Each mode is refused, also where the step of the new owner adds no row.
    """
    for mode in ("append", "upsert", "delete"):
        path = tmp_path / mode
        target = target_at(path, schema=N, mode=mode, key=() if mode == "append" else "n")
        other, gone = target_at(path), target_at(path, mode="delete", key="n")
        target.__cues_prepare__()

        def overtaken(connection: Any, fresh: Any, other: IcebergTarget = other) -> None:
            deliver(other, 1, 4, epoch=2)
            connection.write(fresh)

        with pytest.raises(CheckpointError) as error:
            deliver(target, 1, 4, inside=overtaken)
        assert error.value.again and is_away(error.value)
        assert numbers(target) == [1, 2, 3]
        with pytest.raises(Fenced):
            deliver(target, 1, 4)

        def emptied(connection: Any, fresh: Any, gone: IcebergTarget = gone) -> None:
            deliver(gone, 7, 8, epoch=4)  # it finds no row
            connection.write(fresh)

        with pytest.raises(CheckpointError) as error:
            deliver(target, 5, 7, epoch=3, inside=emptied)
        assert error.value.again and numbers(target) == [1, 2, 3]


def test_a_sink_that_loses_its_commits_gets_a_turn(tmp_path: Path) -> None:
    """Another graph with faster steps would overtake a large step again and again."""
    large, fast = target_at(tmp_path, schema=N, mode="upsert", key="n"), target_at(tmp_path)
    large.__cues_prepare__()
    numbers_of = iter(range(100, 200))

    def overtaken(connection: Any, fresh: Any) -> None:
        n = next(numbers_of)
        deliver(fast, n, n + 1, id="g.fast")
        connection.write(fresh)

    for _ in range(2):
        assert "cues.turn" not in large.open().properties
        with pytest.raises(CheckpointError) as error:
            deliver(large, 1, 4, inside=overtaken)
        assert error.value.again
    assert large.open().properties["cues.turn"].startswith("g.save ")
    with large.open().transaction() as change:
        change.set_properties({"cues.turn": "g.save 60 9999999999"})  # however slow this machine is
    fast.open()  # as the next commit of the other graph does
    with ThreadPoolExecutor() as pool:
        waits = pool.submit(deliver, fast, 200, 201, id="g.fast")
        deliver(large, 1, 4)
        waits.result()
    assert numbers(large) == [1, 2, 3, 100, 101, 200] and "cues.turn" not in large.open().properties
    writers = [each.summary.additional_properties["cues.processor"] for each in large.open().snapshots()]
    assert writers[-1] == "g.fast" and writers[-2] == "g.save"


@pytest.mark.parametrize("turn", ["g.dead 0.5 9999999999", "g.dead 60 1", "by hand", "g.save 60 9999999999"])
def test_a_turn_ends_by_itself(tmp_path: Path, turn: str) -> None:
    """Its sink has died, is the reader, or has a clock of another time."""
    target = target_at(tmp_path, schema=N)
    target.__cues_prepare__()
    with target.open().transaction() as change:
        change.set_properties({"cues.turn": turn})
    started = monotonic()
    for n in range(2):
        deliver(target, n, n + 1)
    assert numbers(target) == [0, 1] and monotonic() - started < 55
    assert (turn.split()[0] == "g.save") == ("cues.turn" not in target.open().properties)


@pytest.mark.parametrize("end", ["drain", "halt"])
def test_a_wait_for_a_turn_ends_with_the_run(
    tmp_path: Path, store: cues.Store, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Another sink has a turn of a minute. A drain does not wait for it, and neither does a stop."""
    target, waiting, wait = target_at(tmp_path, schema=N), Event(), waits.wait
    target.__cues_prepare__()
    with target.open().transaction() as change:
        change.set_properties({"cues.turn": "g.other 60 9999999999"})

    def seen(*args: Any, **options: Any) -> bool:
        waiting.set()
        return wait(*args, **options)

    monkeypatch.setattr(waits, "wait", seen)
    with cues.Graph("g", [cues.Source("q"), target.sink("q")]).start(store=store) as running:
        running.send("q", {"n": 1})
        assert waiting.wait(60)
        began = monotonic()
        running.drain() if end == "drain" else running.halt()
        running.close()
        assert monotonic() - began < 50
    assert numbers(target) == [1]


def test_two_owners_that_make_the_table_make_one(tmp_path: Path) -> None:
    target, other = target_at(tmp_path, evolve=True), target_at(tmp_path, evolve=True)

    def overtaken(connection: Any, fresh: Any) -> None:
        deliver(other, 1, 4)
        connection.write(fresh)

    with pytest.raises(CheckpointError) as error:
        deliver(target, 1, 4, inside=overtaken)
    assert error.value.again
    deliver(target, 1, 4)
    assert numbers(target) == [1, 2, 3]


def test_many_targets_make_one_catalog(tmp_path: Path) -> None:
    """The catalog in a database has two tables, which each of them makes unless they are there."""
    for again in range(5):
        place = catalog(tmp_path / str(again))
        targets = [IcebergTarget(f"lake.t{n}", catalog=place, schema=N) for n in range(4)]
        with ThreadPoolExecutor() as pool:
            for future in [pool.submit(target.__cues_prepare__) for target in targets]:
                future.result()


def test_a_foreign_writer_that_commits_in_the_middle_of_a_step_is_no_loss(tmp_path: Path, store: cues.Store) -> None:
    """The step is repeated upon the snapshot, the column or the overwrite of the other one."""
    target = target_at(tmp_path, schema=N)
    target.__cues_prepare__()
    acts = iter([
        lambda: target.open().append(pa.table({"n": [-1]})),
        lambda: target.open().update_schema().union_by_name(pa.schema({"more": pa.string()})).commit(),
        lambda: target.open().overwrite(pa.table({"n": [-2]})),
    ])  # fmt: skip

    def save(messages: list[Any], process: cues.Process) -> None:
        next(acts, lambda: None)()
        process.connection.write(messages)

    graph = cues.Graph("g", [cues.Source("q"), cues.Sink(save, "q", id="save", checkpoint=target, batch=True)])
    for n in range(3):
        store.queue("q").appender().write({"n": n})
        with testing.Clock() as clock:
            for _ in range(5):
                testing.run_until_idle(graph, store)
                clock.advance(100)
    assert numbers(target)[0] == -2 and numbers(target)[-1] == 2 and len(numbers(target)) == len({*numbers(target)})
    assert next(acts, None) is None


def test_the_position_outlives_expired_snapshots(tmp_path: Path, store: cues.Store) -> None:
    target = target_at(tmp_path, schema=N)
    run(target, [{"n": n} for n in range(10)], store, batch_size=1)
    table = target.open()
    last = table.current_snapshot().snapshot_id
    ids = [each.snapshot_id for each in table.snapshots() if each.snapshot_id != last]
    table.maintenance.expire_snapshots().by_ids(ids).commit()
    assert [each.snapshot_id for each in target.open().snapshots()] == [last]
    assert target.holds(["g.save"]) == ["g.save"]
    run(target, [{"n": n} for n in range(10, 14)], store)
    assert numbers(target) == list(range(14))


def test_partitions_of_a_sink_write_one_table_at_the_same_time(tmp_path: Path, store: cues.Store) -> None:
    store.queue("q", partitions=4, key="n").appender().write_many([{"n": n} for n in range(100)])
    target = target_at(tmp_path, schema=N)
    graph = cues.Graph("g", [cues.Source("q"), target.sink("q", batch_size=20)])
    testing.run_until_idle(graph, store)
    assert numbers(target) == list(range(100))
    assert target.holds(["g.save"]) == ["g.save"]


# --- declarations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"mode": "replace"}, "unknown"),
        ({"mode": "upsert"}, "key="),
        ({"key": "n"}, "key="),
        ({"schema": {"n": "int64"}}, "pyarrow.Schema"),
        ({"schema": pa.schema({"n": pa.duration("us")})}, "has no such type"),
        ({"schema": N, "mode": "upsert", "key": "id"}, "'id' is not a column"),
        ({"schema": N, "partition_by": "day(at)"}, "'at' is not a column"),
        ({"schema": N, "partition_by": "week(n)"}, "is unknown"),
        ({"schema": N, "partition_by": "bucket(n)"}, "is unknown"),
        ({"schema": pa.schema({"f": pa.float64()}), "mode": "upsert", "key": "f"}, "NaN"),
        ({"schema": pa.schema({"f": pa.list_(pa.int8())}), "mode": "upsert", "key": "f"}, "no single value"),
        ({"evolve": 1}, "True or False"),
    ],
)
def test_a_mistake_is_told_before_anything_is_made(tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        target_at(tmp_path, **options)
    for name, place in (("t", {"type": "sql"}), ("a..t", {"type": "sql"}), ("a.t", {})):
        with pytest.raises(InvalidArgument):
            IcebergTarget(name, catalog=place)
    assert not (tmp_path / "catalog.db").exists()


def test_a_table_that_does_not_fit_is_told_before_the_first_message(tmp_path: Path) -> None:
    for target in (target_at(tmp_path), target_at(tmp_path, mode="delete", key="n", evolve=True)):
        with pytest.raises(CheckpointError, match="is not there"):
            target.__cues_prepare__()
    target_at(tmp_path, schema=N).__cues_prepare__()
    for options, text in [
        ({"schema": pa.schema({"n": pa.string()})}, "n is int64, not string"),
        ({"schema": pa.schema({"n": pa.int64(), "m": pa.int64()})}, "m is missing"),
        ({"mode": "upsert", "key": "id"}, "id of key= is missing"),
    ]:
        with pytest.raises(CheckpointError, match=text):
            target_at(tmp_path, **options).__cues_prepare__()  # type: ignore[arg-type]
    from pyiceberg.types import UUIDType

    target_at(tmp_path).open().update_schema().add_column("u", UUIDType()).commit()
    with pytest.raises(CheckpointError, match="u is uuid, which the sink does not write"):
        target_at(tmp_path).__cues_prepare__()


def test_a_table_that_is_removed_stops_the_sink(tmp_path: Path) -> None:
    target = target_at(tmp_path, schema=N)
    target.__cues_prepare__()
    target.open().catalog.drop_table("lake.t")
    with pytest.raises(CheckpointError, match="not there any more"):
        deliver(target_at(tmp_path), 1, 4)
    deliver(target, 1, 4)  # schema= makes it
    assert numbers(target) == [1, 2, 3]
    shutil.rmtree(tmp_path / "lake")  # the files, but not the row of the catalog
    with pytest.raises(CheckpointError, match="was not read or written: FileNotFoundError"):
        deliver(target, 4, 5)


# --- readers ------------------------------------------------------------------------------------


@pytest.mark.slow
def test_duckdb_and_polars_read_the_table(tmp_path: Path, store: cues.Store) -> None:
    polars, duckdb = pytest.importorskip("polars"), pytest.importorskip("duckdb")
    target = target_at(tmp_path, schema=N)
    run(target, [{"n": n} for n in range(50)], store, batch_size=20)
    scanned = polars.scan_iceberg(target.open().metadata_location).collect()
    assert sorted(scanned["n"].to_list()) == list(range(50))
    with duckdb.connect() as connection:
        assert connection.from_arrow(target.open().scan().to_arrow()).aggregate("sum(n)").fetchall() == [(1225,)]
        try:
            connection.execute("load iceberg")
        except duckdb.Error:
            return  # the extension is not installed; its download is not a matter of a test
        found = connection.execute(f"select sum(n) from iceberg_scan('{target.open().metadata_location}')").fetchall()
        assert found == [(1225,)]


# --- an object store, and kill -9 ---------------------------------------------------------------


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with object_store.bucket("lake") as variables:
        yield {
            "warehouse": "s3://lake/warehouse", "s3.endpoint": variables["AWS_ENDPOINT_URL"], "s3.region": "us-east-1",
            "s3.access-key-id": "test", "s3.secret-access-key": "test",
        }  # fmt: skip


@pytest.mark.slow
def test_a_table_in_an_object_store(s3: dict[str, str], tmp_path: Path, store: cues.Store) -> None:
    target = IcebergTarget("lake.t", catalog={**catalog(tmp_path), **s3}, schema=N)
    assert run(target, [{"n": n} for n in range(20)], store, batch_size=5) == []
    assert numbers(target) == list(range(20))
    away = {**catalog(tmp_path), **s3, "s3.endpoint": "http://127.0.0.1:9", "s3.connect-timeout": "0.1"}
    with pytest.raises(CheckpointError) as error:
        deliver(IcebergTarget("lake.t", catalog=away), 1, 2)
    assert is_away(error.value)


def test_a_catalog_that_does_not_answer_is_away(tmp_path: Path) -> None:
    target = IcebergTarget("lake.t", catalog={"type": "rest", "uri": "http://127.0.0.1:9"}, schema=N)
    with pytest.raises(CheckpointError) as error:
        target.__cues_prepare__()
    assert is_away(error.value)


def mirror(path: str, mode: str, count: str) -> None:
    """Write numbers into the table in this process; a test kills it on the way."""
    warnings.simplefilter("ignore")

    def count_up(position: int | None) -> Iterator[Any]:
        for n in range(position or 0, int(count)):
            yield n + 1, {"n": n, "twice": 2 * n}

    target = target_at(Path(path), evolve=True, mode=mode, key="n" if mode == "upsert" else ())
    graph = cues.Graph("g", [cues.Source("q", count_up, batch_size=20), target.sink("q", batch_size=10)])
    graph.add(cues.Sink(lambda message: print(".", flush=True) if message["n"] % 10 == 0 else None, "q", id="tell"))
    with cues.open(Path(path, "store"), durability="process") as store:
        testing.run_until_idle(graph, store)
    os._exit(0)


CODE = "import sys; from test_processors_iceberg import mirror; mirror(*sys.argv[1:])"


@bounded("rounds", 5, 25)
@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_table_whose_writer_is_killed_at_any_time_has_each_row_once(rounds: int, tmp_path: Path, mode: str) -> None:
    mirrors.killed(CODE, tmp_path, mode, 600, rounds=rounds)
    assert numbers(target_at(tmp_path)) == list(range(600))


@pytest.mark.slow
@pytest.mark.parametrize("point", ["checkpoint.inside", "checkpoint.after", "commit.inside", "commit.after"])
def test_a_writer_that_is_killed_at_a_point_leaves_each_row_once(tmp_path: Path, point: str) -> None:
    mirrors.killed_at(point, CODE, tmp_path, "append", 60, hits=(1,))
    assert numbers(target_at(tmp_path)) == list(range(60))


@pytest.mark.slow
def test_100_000_messages(tmp_path: Path, store: cues.Store) -> None:
    target = target_at(tmp_path, schema=N)
    run(target, [{"n": n} for n in range(100_000)], store)
    assert numbers(target) == list(range(100_000))
    upserts = target_at(tmp_path, schema=N, mode="upsert", key="n")
    with testing.temporary_store() as other:
        run(upserts, [{"n": n} for n in range(50_000, 150_000)], other, id="again", batch_size=50_000)
    assert numbers(target) == list(range(150_000))
