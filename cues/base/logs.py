"""The loggers of Cues: each record has the facts of its text as attributes, for handlers that write JSON.

    log = logger("cues.txn")
    log.warning("%s: messages were skipped", queue.id, queue=queue.id, index=7)

A record has every name of :data:`FACTS` as an attribute, None if it does not apply. So a format such as
``"%(levelname)s %(graph)s %(processor)s %(message)s"`` works for all records of the logger ``cues``.
"""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import TYPE_CHECKING, Any, Final

from cues.overrides import override

FACTS: Final = ("graph", "processor", "partition", "queue", "index", "store", "worker", "group", "member", "producer")
"""The attributes of a record: names without the graph's, paths of stores, indices of messages."""

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class Logger(_Adapter):
    """A logger whose calls take the facts of a record as keyword arguments."""

    @override
    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        given = {name: kwargs.pop(name) for name in FACTS if name in kwargs}
        kwargs["extra"] = dict.fromkeys(FACTS) | given | (kwargs.get("extra") or {})
        return msg, kwargs


def logger(name: str) -> Logger:
    return Logger(logging.getLogger(name), {})


def facts_of(record: logging.LogRecord) -> dict[str, Any]:
    """The facts of a record that are not None."""
    return {name: value for name in FACTS if (value := getattr(record, name, None)) is not None}


def of_processor(id: str) -> dict[str, Any]:
    """The facts in the id of a processor or of one of its units; of a graph without a processor, only that."""
    graph, _, rest = id.partition(".")
    name, slash, partition = rest.partition("/")
    number = {"partition": int(partition)} if slash and partition.isdecimal() else {}
    return {"graph": graph or None, "processor": name or None, **number}


def of_log(id: str) -> dict[str, Any]:
    """The facts in the id of a queue or of one of its partitions."""
    name, slash, partition = id.partition("/")
    return {"queue": name, **({"partition": int(partition)} if slash and partition.isdecimal() else {})}
