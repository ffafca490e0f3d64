"""Metrics for Prometheus: names, values, the server; real scrapes of a graph whose workers are killed."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from terminal import Command
from terminal import cues as command

import cues
from cues import groups
from cues.errors import InvalidArgument

pytest.importorskip("prometheus_client")

from prometheus_client.parser import text_string_to_metric_families

from cues.tools import exporter

ROOT = Path(__file__).parent.parent
Values = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Values:
    """The samples of an answer. Every one has a name, kind and labels of the list."""
    values: Values = {}
    for family in text_string_to_metric_families(text):
        kind, labels, help = exporter.METRICS[family.name]
        assert (family.type, family.documentation) == (kind, help)
        for sample in family.samples:
            assert sample.name.removeprefix(family.name) in ("", "_total", "_bucket", "_count", "_sum")
            assert set(sample.labels) - {"le"} == set(labels), sample
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in values, f"{key} twice"
            values[key] = sample.value
    return values


def scrape(url: str) -> Values:
    with urllib.request.urlopen(url, timeout=30) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        return parsed(answer.read().decode())


def value(values: Values, name: str, **labels: str) -> float:
    return values[name, tuple(sorted(labels.items()))]


def until(url: str, holds: Callable[[Values], bool]) -> Values:
    deadline = time.monotonic() + 40
    while not holds(values := scrape(url)):
        assert time.monotonic() < deadline, values
        time.sleep(0.05)
    return values


# --- names ------------------------------------------------------------------------------------------


def test_the_page_has_the_table_of_all_metrics() -> None:
    page = (ROOT / "docs" / "how-to" / "metrics.md").read_text()
    assert exporter.table() in page, "put the result of exporter.table() into docs/how-to/metrics.md"
    for name in re.findall(r"`(cues_\w+)", page):
        known = {f"{name}_total" if kind == "counter" else name for name, (kind, _, _) in exporter.METRICS.items()}
        assert name in known, name


def test_the_dashboard_uses_only_metrics_and_labels_that_exist() -> None:
    board = json.loads((ROOT / "docs" / "grafana.json").read_text())
    samples = {}
    for name, (kind, labels, _) in exporter.METRICS.items():
        for end in {"counter": ["_total"], "gauge": [""], "histogram": ["_bucket", "_sum", "_count"]}[kind]:
            samples[name + end] = {*labels, *(["le"] if end == "_bucket" else []), "instance"}
    targets = [target for panel in board["panels"] for target in panel["targets"]]
    queries = [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    assert len(targets) > 20 and queries
    used = set()
    for target in targets:
        named = re.findall(r"cues_\w+", target["expr"])
        assert named
        used |= set(named)
        labels = set.intersection(*(samples[name] for name in named))  # KeyError: no such metric
        for selected in re.findall(r"[{,] ?(\w+)=~", target["expr"]):
            assert selected in labels, target["expr"]
        for shown in re.findall(r"{{(\w+)}}", target["legendFormat"]):
            assert shown in labels, target
    for query in queries:
        name, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        assert label in samples[name]
    for panel, other in ((a, b) for a in board["panels"] for b in board["panels"] if a["id"] < b["id"]):
        first, second = panel["gridPos"], other["gridPos"]
        apart = first["x"] + first["w"] <= second["x"] or second["x"] + second["w"] <= first["x"]
        assert apart or first["y"] + first["h"] <= second["y"] or second["y"] + second["h"] <= first["y"], panel[
            "title"
        ]
    assert len(used) > 15


# --- values -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_values_of_a_running_graph(tmp_path: Path) -> None:
    options = {"orders": cues.QueueOptions(partitions=2, retention=cues.Retention(count=1000, age="10d"))}
    graph = cues.Graph("g", store=tmp_path / "s", durability="process", errors="errors", queues=options)
    graph.source("orders")

    @graph.stream("orders", "priced", retries=cues.Retry(attempts=2, backoff_s=0.0))
    def price(order: dict[str, int]) -> dict[str, int]:
        return {"total": 10 // order["n"]}

    with graph.start() as running, exporter.serve(running, 0) as server:
        running.store.queue("orders").appender().write_many([{"n": n % 10} for n in range(100)])
        with groups.Member(running.store, "priced", "billing") as member:
            member.read()
            assert running.wait_idle(timeout=30)
            values = until(
                server.url, lambda values: ("cues_process_memory_bytes", (("pid", str(os.getpid())),)) in values
            )
        price_is = {"graph": "g", "processor": "price"}
        for name, expected in {
            "lag": 0, "taken_total": 100, "written_total": 90, "failed_total": 10, "retries_total": 10, "errors": 10,
            "calls_in_flight": 0, "running": 1, "stopped": 0, "latency_seconds_count": 100, "calls_total": 100,
        }.items():  # fmt: skip
            assert value(values, f"cues_processor_{name}", **price_is) == expected, name
        buckets = [v for (name, _), v in values.items() if name == "cues_processor_latency_seconds_bucket"]
        assert buckets == sorted(buckets) and buckets[-1] == 100
        steps = value(values, "cues_processor_steps_total", **price_is)
        assert (
            0 < value(values, "cues_processor_batch_size_count", **price_is) <= steps
        )  # a failure is a part of a step
        for name, expected in {"messages": 100, "appended_total": 100, "removed_total": 0}.items():
            assert value(values, f"cues_queue_{name}", queue="orders") == expected
        assert value(values, "cues_queue_retention", queue="orders", limit="count") == 1000
        assert value(values, "cues_queue_retention", queue="orders", limit="age") == 864_000
        assert value(values, "cues_group_members", group="billing") == 1
        assert value(values, "cues_group_lag", group="billing") == 90
        (member,) = {dict(labels)["member"] for (name, labels) in values if name == "cues_member_lag"}
        assert value(values, "cues_member_lag", group="billing", member=member) == 90
        assert value(values, "cues_member_partitions", group="billing", member=member) == 1
        assert value(values, "cues_store_map_bytes") == running.store.map_size
        before = running.store.core.environment.env.info()["last_txnid"]
        scrape(server.url)
        assert running.store.core.environment.env.info()["last_txnid"] == before  # a scrape writes nothing
        assert scrape(server.url + "?name[]=cues_up")  # answered as a whole
        running.close()
        assert scrape(server.url) == {("cues_up", ()): 0}
    with pytest.raises(OSError):
        scrape(server.url)


def test_counters_go_on_after_a_restart_if_they_are_positions(tmp_path: Path) -> None:
    with cues.open(tmp_path / "s", durability="process") as store:
        graph = cues.Graph("g", [cues.Sink(lambda message: None, "q", id="save")], store=store)
        for expected in (5, 10):
            store.queue("q").appender().write_many([{}] * 5)
            with graph.start() as running:
                assert running.wait_idle(timeout=30)
                values = parsed(exporter.text(store))
                assert value(values, "cues_processor_taken_total", graph="g", processor="save") == expected
        store.queue("q").purge(before=8)
        values = parsed(exporter.text(store))
        assert value(values, "cues_queue_removed_total", queue="q") == 7
        assert value(values, "cues_processor_running", graph="g", processor="save") == 0


def test_messages_for_another_store_and_its_readers(tmp_path: Path) -> None:
    graph = cues.Graph(
        "g", store=tmp_path / "home", durability="process", queues={"out": cues.QueueOptions(path=tmp_path / "away")}
    )
    graph.source("in")
    graph.stream("in", "out", id="p")(lambda message: message)
    graph.sink("out", id="s")(lambda message: None)
    with graph.start() as running:
        running.send("in", {})
        assert running.wait_idle(timeout=30)
        values = parsed(exporter.text(running.store))
        (waiting,) = [v for (name, _), v in values.items() if name == "cues_forward_waiting"]
        assert waiting == 0
    with cues.open(tmp_path / "away", readonly=True) as store:
        names = {name for name, _ in parsed(exporter.text(store))}
    assert "cues_reader_position" in names


# --- the server -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (9464, ("127.0.0.1", 9464)),
        ("9464", ("127.0.0.1", 9464)),
        (":0", ("127.0.0.1", 0)),
        ("0.0.0.0:1", ("0.0.0.0", 1)),
        ("[::1]:7", ("::1", 7)),
        ("host", None),
        ("host:", None),
        ("1:70000", None),
        ("", None),
    ],
)
def test_addresses(address: str | int, expected: tuple[str, int] | None) -> None:
    if expected is not None:
        assert exporter.parse(address) == expected
        return
    with pytest.raises(InvalidArgument, match="is not an address"):
        exporter.parse(address)


GRAPH = """
import cues, os
graph = cues.Graph("g", durability="process")
graph.source("numbers")

@graph.stream("numbers", "doubled")
def double(number):
    return {"n": number["n"] * 2}

@graph.sink("doubled")
def save(number): ...
"""


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    path = tmp_path / "graph.py"
    path.write_text(GRAPH)
    return path


def test_a_port_that_is_in_use_ends_the_run_before_it_begins(graph: Path) -> None:
    store = graph.parent / "data" / "g"
    with cues.open(store) as opened:
        opened.queue("numbers").appender().write({"n": 1})
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        refused = command("run", graph, "--metrics", port, "--fresh", "--yes")
        assert refused.code == 1
        assert f"The metrics cannot be served at 127.0.0.1:{port}: the port is in use." in refused.err
        assert "Try: give another port" in refused.err
        assert command("metrics", store, "--listen", port).code == 1
    with cues.open(store, readonly=True) as opened:
        assert len(opened.queue("numbers")) == 1  # --fresh deleted nothing
    wrong = command("run", graph, "--metrics", "here")
    assert wrong.code == 1 and "'here' is not an address" in wrong.err


@pytest.mark.parametrize("workers", [(), ("--workers", 2)], ids=["one process", "workers"])
def test_a_second_run_with_the_port_of_the_first_says_that_the_graph_runs(graph: Path, workers: Any) -> None:
    """A unit of systemd with --metrics starts a run again that ended with 1, and none that ended with 7."""
    with Command("run", graph, "--metrics", 0, *workers) as first:
        port = re.search(r"metrics: http://[^:]+:(\d+)", first.until(r"metrics: http://\S+/metrics\n"))[1]  # type: ignore[index]
        second = command("run", graph, "--metrics", port, *workers)
        assert second.code == 7 and f"process {first.pid}" in second.err and "Try: wait until it ends" in second.err
        first.signal(signal.SIGTERM)
        first.wait()


def test_without_the_package_the_error_says_what_to_install(graph: Path) -> None:
    code = "import sys; sys.modules['prometheus_client'] = None; from cues.cli import main; main()"
    for arguments in (["run", str(graph), "--metrics", "0"], ["metrics", str(graph.parent / "data" / "g")]):
        with cues.open(graph.parent / "data" / "g"):
            pass
        ended = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60)
        assert ended.returncode == 2, ended.stderr
        assert "pip install 'cues-streams[metrics]'" in ended.stderr


def test_the_metrics_of_a_store_are_printed_or_served(graph: Path) -> None:
    store = graph.parent / "data" / "g"
    with cues.open(store) as opened:
        opened.queue("numbers").appender().write({"n": 1})
    printed = command("metrics", store)
    assert value(parsed(printed.out), "cues_queue_messages", queue="numbers") == 1
    with Command("metrics", store, "--listen", "0") as served:
        url = re.search(r"metrics: (http://127\.0\.0\.1:\d+/metrics)", served.until("/metrics"))
        assert url is not None
        assert value(scrape(url[1]), "cues_queue_messages", queue="numbers") == 1
        served.signal(signal.SIGINT)
        assert served.wait() == 130
    assert "Traceback" not in served.text


@pytest.mark.slow
def test_one_port_answers_for_all_workers_also_when_one_is_killed(graph: Path) -> None:
    """Counters that are positions never go back, and in the end every message is counted once."""
    count = 4000
    store = graph.parent / "data" / "g"
    with Command("run", graph, "--workers", 2, "--metrics", 0) as run:
        found = re.search(r"metrics: (http://127\.0\.0\.1:\d+/metrics)", run.until("/metrics"))
        assert found is not None
        url = found[1]
        ready = until(url, lambda values: sum(name == "cues_worker_cpu_seconds_total" for name, _ in values) == 2)
        assert all(value(ready, "cues_worker_up", graph="g", worker=f"worker-{n}") == 1 for n in (1, 2))
        assert all(value(ready, "cues_worker_restarts_total", graph="g", worker=f"worker-{n}") == 0 for n in (1, 2))
        before: Values = {}
        record: dict[str, Any] = json.loads((store / "workers-g.json").read_text())
        victim = record["workers"]["worker-1"]["pid"]
        with cues.open(store) as opened:
            appender = opened.queue("numbers").appender()
            for start in range(0, count, 100):
                appender.write_many([{"n": n} for n in range(start, start + 100)])
                if start == count // 2:
                    os.kill(victim, signal.SIGKILL)
                values = scrape(url)
                for key, number in values.items():
                    if key[0] in ("cues_processor_taken_total", "cues_queue_appended_total"):
                        assert number >= before.get(key, 0), key
                        before[key] = number

        def done(values: Values) -> bool:
            again = value(values, "cues_worker_restarts_total", graph="g", worker="worker-1") >= 1
            saved = value(values, "cues_processor_taken_total", graph="g", processor="save") == count
            return again and saved and value(values, "cues_worker_up", graph="g", worker="worker-1") == 1

        values = until(url, done)
        assert value(values, "cues_queue_messages", queue="doubled") == count
        assert value(values, "cues_processor_lag", graph="g", processor="save") == 0
        run.signal(signal.SIGINT)
        assert run.wait() == 130
    with pytest.raises(OSError):
        scrape(url)
