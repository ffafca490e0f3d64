"""Sources that keep a connection in their object: one object is the function of one processor."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cues
from cues.errors import InvalidArgument, ProcessorStopped
from cues.processors.checks import Owned


def mqtt() -> Any:
    pytest.importorskip("paho.mqtt.client")
    from cues.processors.mqtt import Mqtt

    return Mqtt("mqtt://127.0.0.1:9", "t", timeout_s=1)


def rabbitmq() -> Any:
    pytest.importorskip("pika")
    from cues.processors.rabbitmq import RabbitQueue

    return RabbitQueue("amqp://127.0.0.1:9", "q", timeout_s=1)


def no_client() -> SimpleNamespace:
    return SimpleNamespace()


def sqs() -> Any:
    pytest.importorskip("boto3")
    from cues.processors.sqs import Sqs

    return Sqs("http://127.0.0.1:9/1/q", client=no_client)


def webhook() -> Any:
    pytest.importorskip("uvicorn")
    from cues.processors.webhook import Webhook

    return Webhook(port=0)


def receiver() -> Any:
    pytest.importorskip("uvicorn")
    from cues.processors.link import Receiver

    return Receiver(0)


def postgres() -> Any:
    pytest.importorskip("psycopg")
    from cues.processors.postgres_changes import Changes

    return Changes("postgresql://127.0.0.1:9/none", "t", timeout_s=1)


def mysql() -> Any:
    pytest.importorskip("pymysql")
    from cues.processors.mysql_changes import Changes

    return Changes("mysql+pymysql://127.0.0.1:9/none", "t", timeout_s=1)


def rows() -> Any:
    pytest.importorskip("sqlalchemy")
    from cues.processors.sql_source import Rows

    return Rows("no.db", "t", "id")


def run_of(id: str) -> Any:
    return SimpleNamespace(id=id, state={}, stopping=True)


@pytest.mark.parametrize("make", [mqtt, rabbitmq, sqs, webhook, receiver, postgres, mysql, rows])
def test_a_second_processor_of_one_object_is_refused(make: Callable[[], Any]) -> None:
    source = make()
    for _ in range(2):  # the engine calls a source anew, for example after an outage
        with contextlib.suppress(Exception):
            list(source(None, run_of("g.a")))
    with pytest.raises(InvalidArgument, match=r"is the function of g.a and of g.b(.|\n)*an object of its own"):
        list(source(None, run_of("g.b")))
    for other in (copy.copy(source), pickle.loads(pickle.dumps(source))):
        other.own(run_of("g.b"))


def test_two_sources_of_a_graph_do_not_share_an_object(tmp_path: Path) -> None:
    source = webhook()
    graph = cues.Graph("g", [cues.Source("a", source), cues.Source("b", source)], durability="process")
    with pytest.raises(ProcessorStopped, match="is the function of g"), graph.start(store=tmp_path / "s") as running:
        running.wait_done(10)


def test_two_sources_of_rows_with_one_object_do_not_interrupt_each_other(tmp_path: Path) -> None:
    """The end of the first would have interrupted the query of the second, which then lacks rows."""
    sa = pytest.importorskip("sqlalchemy")
    from cues.processors.sql_source import Rows

    url = f"sqlite:///{tmp_path}/rows.db"
    with sa.create_engine(url).begin() as sql:
        sql.exec_driver_sql("create table t (id integer primary key)")
        sql.exec_driver_sql("insert into t values (1), (2)")
    one = Rows(url, "t", "id")
    graph = cues.Graph("g", [cues.Source("a", one), cues.Source("b", one)], durability="process")
    with pytest.raises(ProcessorStopped, match="would interrupt the other"), graph.start(store=tmp_path / "s") as ran:
        ran.wait_done(10)
    one = pickle.loads(pickle.dumps(one))
    graph = cues.Graph("h", [cues.Source("a", one), cues.Source("b", Rows(url, "t", "id"))], durability="process")
    with graph.start(store=tmp_path / "two") as ran:
        ran.wait_done(10)
        assert [len(ran.store.queue(name)) for name in "ab"] == [2, 2]


def test_each_source_that_can_be_interrupted_has_one_processor() -> None:
    """The engine interrupts a source by its object: an object of two processors would end the query of the other."""
    interrupted = []
    for entry in entry_points(group="cues.processors"):
        with contextlib.suppress(ImportError):  # an extra is missing
            interrupted += [kind] if hasattr(kind := entry.load(), "interrupt") else []
    assert len(interrupted) >= 3 and all(issubclass(kind, Owned) for kind in interrupted)
