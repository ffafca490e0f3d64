"""Log records of Cues have facts as attributes, whoever wrote them."""

from __future__ import annotations

import ast
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from terminal import cues as command

import cues
from cues.base import events, logs

ROOT = Path(cues.__file__).parent


@pytest.mark.interpreted
def test_every_logger_of_cues_is_one_whose_records_have_facts() -> None:
    """``logging.getLogger`` gives loggers whose records have none."""
    makers = {}
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "getLogger":
                makers[path.relative_to(ROOT).as_posix()] = ast.get_source_segment(text, node)
    assert makers.pop("base/logs.py") == "logging.getLogger(name)"
    assert makers == {"spark/session.py": 'logging.getLogger("SQLQueryContextLogger")'}  # pyspark's, made silent


def facts(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    for record in caplog.records:
        assert all(hasattr(record, name) for name in logs.FACTS), record
    return [logs.facts_of(record) for record in caplog.records]


def test_records_of_a_graph_name_processor_partition_and_queue(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "cues")

    def fail(message: dict[str, Any]) -> None:
        raise ValueError("no")

    with cues.open(tmp_path / "s", durability="process") as store:
        store.queue("q", partitions=2).appender().write_many([{}] * 4)
        graph = cues.Graph("g", [cues.Sink(fail, "q", id="save")], errors="errors", store=store)
        with graph.start() as running:
            assert running.wait_idle(timeout=30)
    found = facts(caplog)
    known = {"graph": "g", "processor": "save"}
    assert {**known} in found  # its recovery
    assert {**known, "queue": "errors"} in found or {**known, "partition": 1, "queue": "errors"} in found
    format = logging.Formatter("%(levelname)s %(graph)s.%(processor)s %(queue)s %(store)s")
    assert "WARNING g.save errors None" in map(format.format, caplog.records)


def test_records_of_queues_name_queue_and_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with cues.open(tmp_path / "s") as store:
        queue = store.queue("q", retention="read")
        queue.appender().write({})
        queue.tailer("slow")
        log = logs.logger("cues")
        log.warning("%s: skipped", queue.id, queue=queue.id, index=7, extra={"mine": 1})
    (record,) = caplog.records
    assert (record.getMessage(), record.__dict__["mine"]) == ("q: skipped", 1)
    assert facts(caplog) == [{"queue": "q", "index": 7}]


@pytest.mark.parametrize(
    ("id", "expected"),
    [
        ("g", {"graph": "g", "processor": None}),
        ("", {"graph": None, "processor": None}),
        ("g.save", {"graph": "g", "processor": "save"}),
        ("g.save/12", {"graph": "g", "processor": "save", "partition": 12}),
    ],
)
def test_the_facts_in_an_id(id: str, expected: dict[str, Any]) -> None:
    assert logs.of_processor(id) == expected
    assert events.Event(id, "text").facts == expected
    assert logs.of_log("q/3") == {"queue": "q", "partition": 3}
    assert logs.of_log("q") == {"queue": "q"}


def test_records_of_a_worker_keep_their_facts_and_name_the_worker(tmp_path: Path) -> None:
    path = tmp_path / "graph.py"
    path.write_text(
        """
import json, logging, cues
from cues.base import logs

class Facts(logging.Handler):
    def emit(self, record):
        print(json.dumps(logs.facts_of(record) | {"text": record.getMessage()}))

if __name__ != "nothing" and not cues.graphs.graph.importing_for_worker:
    logging.getLogger("cues").addHandler(Facts())
graph = cues.Graph("g", durability="process", errors="errors")

@graph.source("q", resume="skip")
def numbers():
    yield {"n": 1}

@graph.sink("q")
def save(message):
    logs.logger("cues").warning("from a worker", queue="q", index=1)
    raise ValueError("no")
"""
    )
    ended = command("run", path, "--workers", 1, "--quiet")
    assert ended.code == 0, ended.err
    told = [json.loads(line) for line in ended.out.splitlines()[:-1]]
    assert {"worker": "worker-1", "queue": "q", "index": 1, "text": "worker-1: from a worker"} in told
    (failed,) = [record for record in told if "to 'errors'" in record["text"]]
    assert (failed["graph"], failed["processor"], failed["queue"]) == ("g", "save", "errors")
