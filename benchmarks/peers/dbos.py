"""DBOS on SQLite: one workflow with one step a message; the results are in its database."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from dbos import DBOS
from harness import Room, Work
from work import messages, must_be, total


@contextmanager
def step(room: Room) -> Iterator[Work]:
    url = f"sqlite:///{room.path}/dbos.sqlite"
    DBOS(config={"name": "bench", "system_database_url": url, "log_level": "ERROR", "run_admin_server": False})

    @DBOS.step()
    def totals(order: Any) -> Any:
        return total(order)

    @DBOS.workflow()
    def one(order: Any) -> Any:
        return totals(order)

    DBOS.launch()
    handles: list[Any] = []

    def work() -> None:
        for message in messages(room.count):
            handles.append(DBOS.start_workflow(one, message))
            handles[-1].get_result()

    yield work
    must_be(
        (DBOS.retrieve_workflow(h.get_workflow_id()).get_result() for h in handles), map(total, messages(room.count))
    )
    DBOS.destroy()


CONTENDERS = {"step-one": {"DBOS, a workflow of one step": step}}
