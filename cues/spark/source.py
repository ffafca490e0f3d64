"""Any Spark stream as the source of a graph: Kafka, files that arrive, a rate, a table.

    graph.add(cues.Source("clicks", cues.spark.Source("kafka", {"subscribe": "clicks", …})))

It is for graphs whose queues are on a shared filesystem (``queues=DIR``). The rows of the stream are written there, and
not into the driver's store. A row is a message, a dict of its columns. A row of the format ``cues`` is its ``value``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field
from typing import Any

from cues.base.data import dataclass
from cues.errors import Unsupported


@dataclass(frozen=True)
class Source:
    """The function of a source that is a Spark stream.

    format          as of ``spark.readStream.format``
    options         of that format; a limit of a batch is useful (``maxFilesPerTrigger``, ``maxOffsetsPerTrigger``)
    schema          if the format needs one
    available_now   end with the rows that are there at the start, and do not wait for more

    It is exactly-once together with its checkpoint, which is in DIR: each batch is one commit, with the offsets
    that Spark has recorded for it as the key. Another or an older checkpoint is refused. The stream must give the
    same rows for the same offsets, as Spark demands of every exact source.
    """

    format: str
    options: Mapping[str, str] = field(default_factory=dict)
    schema: str | None = None
    available_now: bool = False

    def __call__(self, position: Any) -> Iterator[Any]:
        """Refuse the other engines, which have no Spark to read the stream with."""
        raise Unsupported(
            f"A stream of Spark ({self.format}) is a source on a shared filesystem only.",
            "run cues run --engine spark --queues DIR, or call graph.start(engine='spark', queues=DIR).",
        )
