"""A processor's steps on a shared filesystem: one record each, and each record is one commit.

    DIR/_cues/steps/<processor id>/<n>.json

    claim      another owner begins here; positions as they were
    taking     what a step with side effects has taken, before its function runs
    step       positions behind what was taken, the files of its outputs by queue, the state's files

Record n is put if absent (files.py). So who commits is who owns: a driver that was stopped and goes on
finds its number taken, by a claim or by what followed it, and is :class:`Fenced`. There is no other
check, and nothing else to keep in step with it: each record says where the processor stands, so the last
one is all that a start reads.

Old records are deleted, and then a number that was taken looks free to a driver that slept for long. So who has
put a record looks whether there are later ones; the last ones always stay.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from cues.base import clock
from cues.errors import Diverged, Fenced
from cues.spark.cluster.files import folder_of

if TYPE_CHECKING:
    from cues.spark.cluster.files import Files

FORMAT: Final = 1
KEEP_RECORDS: Final = 256
"""As a try log keeps its last 256 steps."""
_TRIM_EVERY: Final = 64
Kind = Literal["claim", "taking", "step"]


@dataclass(frozen=True)
class StepRange:
    """The messages [start, stop) that a step takes, by tailer id; cut into parts of ``size`` for batch functions."""

    ranges: dict[str, tuple[int, int]]
    size: int


@dataclass(frozen=True)
class LedgerRecord:
    """One record; it says where the processor stands behind it."""

    number: int
    kind: Kind
    owner: str
    epoch: int
    positions: dict[str, tuple[str, int]]
    """By tailer id: the queue's identity in hex, and the index that is taken next."""
    taking: StepRange | None = None
    """Under way: to be taken again by the next step."""
    hash: str | None = None
    """Of what the step took."""
    files: dict[str, str] = field(default_factory=dict)
    """The data file that the step wrote, by queue."""
    state: tuple[str, ...] = ()
    """Files of the processor's state, oldest first."""
    counts: dict[str, int] = field(default_factory=dict)
    """For who looks: messages taken, written, failed."""
    source: str | None = None
    """Of a source that is a stream: where that is behind this record; msgpack in hex."""
    whole: bool = False
    """The function asks for the processor's state: one task, one call after another."""

    def to_json(self) -> str:
        found = {
            "format": FORMAT,
            "kind": self.kind,
            "owner": self.owner,
            "epoch": self.epoch,
            "time": clock.to_datetime(clock.now_ns()).isoformat(),
            "positions": self.positions,
            "taking": self.taking and {"ranges": self.taking.ranges, "size": self.taking.size},
            "hash": self.hash,
            "files": self.files,
            "state": self.state,
            "counts": self.counts,
            "source": self.source,
            "whole": self.whole,
        }
        return json.dumps({name: value for name, value in found.items() if value not in (None, {}, (), False)})

    @staticmethod
    def of(number: int, text: str) -> LedgerRecord:
        found: dict[str, Any] = json.loads(text)
        if found["format"] != FORMAT:
            raise Diverged(
                f"A processor's record has format {found['format']}; this version reads {FORMAT}.",
                "install a newer version of Cues.",
                processor="",
            )
        taking = found.get("taking")
        return LedgerRecord(
            number,
            found["kind"],
            found["owner"],
            found["epoch"],
            {tailer: (identity, next) for tailer, (identity, next) in found.get("positions", {}).items()},
            taking and StepRange({t: (start, stop) for t, (start, stop) in taking["ranges"].items()}, taking["size"]),
            found.get("hash"),
            found.get("files", {}),
            tuple(found.get("state", ())),
            found.get("counts", {}),
            found.get("source"),
            found.get("whole", False),
        )


class Ledger:
    """The records of one processor, as one owner writes them. Used by one thread at a time."""

    def __init__(self, files: Files, processor: str, owner: str) -> None:
        self._files = files
        self._folder = f"_cues/steps/{folder_of(processor)}"
        self._trimmed = 0
        self.processor = processor
        self.owner = owner
        self.last: LedgerRecord | None = None
        """The last record of the processor."""

    def read(self) -> LedgerRecord | None:
        """The last record that is there; None where nothing ever ran."""
        number = self._newest()
        return None if number < 0 else self._read(number)

    def _newest(self) -> int:
        return max((int(n.removesuffix(".json")) for n in self._files.names(self._folder) if n[0] != "."), default=-1)

    def _read(self, number: int) -> LedgerRecord:
        text = self._files.read(self._name(number))
        if text is None:
            raise Diverged(
                f"Record {number} of {self.processor} in {self._files.url} is missing.",
                "restore the directory from a copy.",
                processor=self.processor,
            )
        return LedgerRecord.of(number, text)

    def _name(self, number: int) -> str:
        return f"{self._folder}/{number:012d}.json"

    def claim(self, before: LedgerRecord | None, positions: dict[str, tuple[str, int]]) -> bool:
        """Own the processor from behind ``before`` on; False where another record came in between."""
        record = LedgerRecord(
            before.number + 1 if before else 0, "claim", self.owner, before.epoch + 1 if before else 1, positions
        )
        if before is not None:
            record = replace(record, taking=before.taking, state=before.state, source=before.source, whole=before.whole)
        return self._put(record)

    def commit(self, kind: Kind, **changes: Any) -> LedgerRecord:
        """Put the next record; what is not said is as before. Raises :class:`Fenced`, and nothing counts then."""
        last = self.last
        assert last is not None
        fresh: dict[str, Any] = {"taking": None, "hash": None, "files": {}, "counts": {}}
        record = replace(last, **{**fresh, **changes, "kind": kind, "number": last.number + 1})
        if not self._put(record):
            raise self._fenced()
        return record

    def check(self) -> None:
        """Raise :class:`Fenced` where somebody else has written the next record."""
        assert self.last is not None
        if self._newest() > self.last.number:
            raise self._fenced()

    def _put(self, record: LedgerRecord) -> bool:
        if not self._files.put(self._name(record.number), record.to_json()) or self._newest() > record.number:
            return False
        self.last = record
        if record.number - self._trimmed > KEEP_RECORDS + _TRIM_EVERY:
            self._trim(record.number - KEEP_RECORDS)
        return True

    def _trim(self, number: int) -> None:
        for name in self._files.names(self._folder):
            if name[0] != "." and int(name.removesuffix(".json")) < number:
                self._files.delete(f"{self._folder}/{name}")
        self._trimmed = number

    def _fenced(self) -> Fenced:
        assert self.last is not None
        found = self._read(self._newest())
        return Fenced(
            f"{self.processor} is run by another driver ({found.owner}, epoch {found.epoch}; record {found.number});"
            f" this one ({self.owner}, epoch {self.last.epoch}) commits nothing more.",
            "do nothing, if the other one is meant to run it.",
            processor=self.processor,
            reason="takeover",
        )
