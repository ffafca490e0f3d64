"""Any Spark stream as the source of a graph: Kafka, files that arrive, a rate, a table.

    graph.add(cues.Source("clicks", cues.spark.Source("kafka", {"subscribe": "clicks", …})))

For graphs whose queues are on a shared filesystem (``queues=DIR``): the stream's rows go there, without the
driver's store. A row is a message, a dict of its columns; a row of the format ``cues`` is its ``value``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from cues.errors import Unsupported


@dataclass(frozen=True)
class Source:
    """The function of a source that is a Spark stream.

    format          as of ``spark.readStream.format``
    options         of that format; what limits a batch (``maxFilesPerTrigger``, ``maxOffsetsPerTrigger``) is useful
    schema          where the format asks for one
    available_now   end with what is there at the start, rather than wait for more

    Exactly once beside its checkpoint, which lies under DIR: each batch is one commit, keyed by the offsets
    that Spark has written down for it. Another or an older checkpoint is refused. The stream must give the
    same rows for the same offsets, as Spark asks of every source that is exact.
    """

    format: str
    options: Mapping[str, str] = field(default_factory=dict)
    schema: str | None = None
    available_now: bool = False

    def __call__(self, position: Any) -> Iterator[Any]:
        """Called by other engines; there is no Spark to read with."""
        raise Unsupported(
            f"A stream of Spark ({self.format}) is a source on a shared filesystem only.",
            "run cues run --engine spark --queues DIR, or graph.start(engine='spark', queues=DIR).",
        )
