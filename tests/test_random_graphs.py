"""Random graphs, crashed at random points, changed at random between the starts, against a model in plain Python.

The model applies the functions to whole lists. Whatever the batch sizes, the order of turns, the
crashes and restarts, the queues must hold what the model says, and the state too. Messages come as dicts and as
tables, from outside or from a source, some functions take and return tables, and a sink writes files. The seed is
printed; ``CUES_TEST_SEED=n`` runs that one alone.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import seeds

from cues import Graph, Source, Stream, faults, testing
from cues.processors.file_sink import FileSink

Message = dict[str, Any]
SEEDS = seeds.among(range(120), fast=20)

RATES = [{"n": 1000 * n} for n in range(1, 30)]
"""The messages that an imperative stage reads by itself, one for each message that does not fail."""


BATCHES = ("batch", "table", "chosen", "table that fails", "split")
KINDS = (
    "map",
    "some",
    "sum",
    "fork",
    "fail",
    "batch",
    "filter",
    "look",
    "table",
    "chosen",
    "table that fails",
    "split",
)


class Stage:
    """A stream from q<i> to q<i+1>, as a function for the graph and as one over a whole list."""

    def __init__(self, chance: random.Random, number: int) -> None:
        self.number = number
        self.kind = chance.choice(KINDS)
        self.modulus = chance.randint(2, 5)

    def model(self, messages: list[Message]) -> tuple[list[Message], list[Message], list[Message]]:
        """The outputs, the messages for the other queue, and the failures."""
        k, on, aside, failed = self.modulus, [], [], []
        sums: dict[int, int] = {}
        rates = iter(RATES)
        for message in messages:
            n = message["n"]
            if self.kind in ("map", "batch", "table"):
                on.append({"n": n + 1})
            elif self.kind == "some":
                on += [{"n": n}] * (n % k)
            elif self.kind == "sum":
                sums[n % k] = sums.get(n % k, 0) + n
                on.append({"n": sums[n % k]})
            elif self.kind == "chosen":
                on += [message] * (n > 3 * k)
            elif self.kind in ("fork", "split"):
                (aside if n % k == 0 else on).append(message)
            elif self.kind in ("fail", "table that fails"):
                (failed if n % k == 0 else on).append(message)
            elif self.kind == "look":
                if n % k == 0:
                    failed.append(message)  # and its rate is left for the next
                else:
                    on.append({"n": n + next(rates, {"n": 0})["n"]})
                    aside.append(message)
            elif n % k:
                on.append(message)
        return on, aside, failed

    def stream(self, chance: random.Random) -> Stream:
        k = self.modulus
        options: dict[str, Any] = {
            "id": f"s{self.number}",
            "batch_size": chance.choice([1, 2, 3, 7, 1000]),
            "side_effects": chance.random() < 0.3,
            "retries": chance.choice([0, 0, 1]),
            "concurrency": 1 if self.kind in (*BATCHES, "look") else chance.choice([1, 1, 4]),
        }
        here, there = f"q{self.number}", f"q{self.number + 1}"

        def mapped(message: Message) -> Message:
            message["n"] += 1
            return message

        def some(message: Message) -> list[Message]:
            return [{"n": message["n"]}] * (message["n"] % k)

        def summed(message: Message, process: Any) -> Message:
            process.state["sum"] = process.state.get("sum", 0) + message["n"]
            return {"n": process.state["sum"]}

        def by_message(message: Message) -> dict[str, Any]:
            return {"aside" if message["n"] % k == 0 else "on": message}

        def fails(message: Message) -> Message:
            if message["n"] % k == 0:
                raise ValueError(message["n"])
            return message

        def batched(messages: list[Message]) -> list[Message]:
            return [{"n": message["n"] + 1} for message in messages]

        def added(table: Any) -> Any:
            if isinstance(table, pa.Table):
                return table.set_column(0, "n", pc.add(table["n"], 1))
            return table.with_columns(n=table["n"] + 1)

        def table_fails(table: Any) -> Any:
            numbers = table["n"].to_pylist() if isinstance(table, pa.Table) else table["n"].to_list()
            if not all(n % k for n in numbers):
                raise ValueError(numbers)
            return table

        def split(table: Any) -> dict[str, Any]:
            frame = polars.from_arrow(table) if isinstance(table, pa.Table) else table
            aside = frame["n"] % k == 0
            return {"aside": frame.filter(aside), "on": frame.filter(~aside)}

        def looks(message: Message, process: Any) -> Message:
            rate = process.tailers["rate"].read() or {"n": 0}
            process.appenders["log"].write(message)
            return {"n": fails(message)["n"] + rate["n"]}

        if self.kind == "look":
            by_itself = {"tailers": {"rate": f"rates{self.number}"}, "appenders": {"log": f"aside{self.number}"}}
            return Stream(looks, here, there, **by_itself, **options)
        kind = chance.choice(["arrow", "polars"])
        if self.kind == "fork":
            return Stream(by_message, here, {"on": there, "aside": f"aside{self.number}"}, **options)
        if self.kind == "split":
            return Stream(split, here, {"on": there, "aside": f"aside{self.number}"}, batch=kind, **options)
        if self.kind == "sum":
            return Stream(summed, here, there, key=lambda message: message["n"] % k, **options)
        if self.kind == "filter":
            return Stream(lambda message: message, here, there, where=lambda message: message["n"] % k, **options)
        if self.kind == "chosen":
            return Stream(lambda table: table, here, there, where=pc.field("n") > 3 * k, batch=kind, **options)
        if self.kind in ("table", "table that fails"):
            return Stream(added if self.kind == "table" else table_fails, here, there, batch=kind, **options)
        functions: dict[str, Callable[..., Any]] = {"map": mapped, "some": some, "fail": fails, "batch": batched}
        return Stream(functions[self.kind], here, there, batch=self.kind == "batch", **options)


def source_of(messages: list[Message], chance: random.Random) -> Callable[..., Iterator[tuple[int, Any]]]:
    """A source of all messages, in tables and one by one."""

    def source(position: int | None, process: Any) -> Iterator[tuple[int, Any]]:
        at = position or 0
        while at < len(messages):
            size = min(chance.choice([1, 1, 2, 9]), len(messages) - at)
            process.state["at"] = at
            some = messages[at : at + size]
            at += size
            yield at, some[0] if size == 1 else pa.Table.from_pylist(some)

    return source


def rows_of(path: str) -> list[Message]:
    if path.endswith(".parquet"):
        return pq.read_table(path).to_pylist()  # type: ignore[no-any-return]
    return [{"n": int(line)} for line in Path(path).read_text().split()[1:]]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_graph_agrees_with_the_model(seed: int, tmp_path: Path) -> None:
    print(f"CUES_TEST_SEED={seed}")
    chance = random.Random(seed)
    stages = [Stage(chance, number) for number in range(chance.randint(1, 4))]
    messages = [{"n": chance.randint(0, 30)} for _ in range(chance.randint(1, 40))]

    has_source, out = chance.random() < 0.4, None
    if chance.random() < 0.4:
        out = FileSink(
            tmp_path, chance.choice(["csv", "parquet"]), durability="process", roll_bytes=chance.choice([9, 999])
        )

    def graph() -> Graph:
        streams: list[Any] = [stage.stream(chance) for stage in stages]
        if has_source:
            streams.append(Source("q0", source_of(messages, chance), batch_size=chance.choice([1, 3, 1000])))
        if out is not None:
            streams.append(out.sink(f"q{len(stages)}", batch_size=chance.choice([1, 3, 1000]), retries=0))
        chance.shuffle(streams)
        return Graph("g", streams, errors="errors", queues={"*": {"metadata": chance.choice([True, False, ["t"]])}})

    with testing.temporary_store(chance.choice(["process", "process", "disk"])) as store:
        for stage in stages:
            if stage.kind == "look":
                store.queue(f"rates{stage.number}").appender().write_many(RATES)
        fed = 0

        def feed(more: list[Message]) -> None:
            if has_source or not more:
                return
            if chance.random() < 0.5:
                store.queue("q0").appender().write_table(pa.Table.from_pylist(more))
            else:
                store.queue("q0").appender().write_many(more)

        for _ in range(chance.randint(1, 6)):
            more = messages[fed : fed + chance.randint(0, 15)]
            feed(more)
            fed += len(more)
            point, hit = chance.choice(list(faults.STEP_POINTS)), chance.randint(1, 12)
            with testing.crash(point, hit, how="raise"), contextlib.suppress(testing.Crashed):
                testing.run_until_idle(graph(), store, seed=chance.randrange(100))
        feed(messages[fed:])
        testing.run_until_idle(graph(), store)
        series, failures = messages, []
        for stage in stages:
            series, aside, failed = stage.model(series)
            failures += [(f"g.s{stage.number}", message) for message in failed]
            testing.check_history(series, testing.messages(store, f"q{stage.number + 1}")).expect_exact()
            if stage.kind in ("fork", "look", "split"):
                testing.check_history(aside, testing.messages(store, f"aside{stage.number}")).expect_exact()
        if out is not None:
            written = [row for path in out.finish() for row in rows_of(path)]
            testing.check_history([{"n": message["n"]} for message in series], written).expect_exact()
        errors = [
            (error["err.proc/config"]["id"], message)
            for error in testing.messages(store, "errors")
            for message in next(iter(error["err.proc/messages"].values()))
        ]
        testing.check_history(failures, errors, ordered=False).expect_exact()
        assert not testing.check_attempts(store)
