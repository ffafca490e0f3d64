"""A processor's steps on a shared filesystem: one record each, and each record is one commit.

    DIR/_cues/steps/<processor id>/<n>.json

    claim      another owner begins; the positions do not change
    taking     the range that a step with side effects takes, before its function runs
    step       the positions after the step, the files of its outputs by queue, the files of the state
    seek       an operator has moved the positions; like a claim it fences the owner

Record n is put if absent (files.py). So only the owner can commit. A driver that was stopped and continues finds that
its number is taken, by a claim or by a later record, and is :class:`Fenced`. There is no other check. Each record has
the positions of the processor, so a start reads only the last one.

Old records are deleted. Then a number that was taken looks free to a driver that slept for a long time. So a driver
that has put a record also looks for later ones. The last records always stay.
"""

from __future__ import annotations

import functools
from dataclasses import asdict, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from cues import codec
from cues.arguments import NEWER
from cues.base import clock, names
from cues.base.data import dataclass
from cues.errors import Diverged, Fenced
from cues.records import sealed
from cues.spark.cluster.delays import HeldRun, folder_of_delayed
from cues.spark.cluster.directory import DataFile
from cues.spark.cluster.files import ANY_FORM, folder_of, form_of, parsed, sealed_json
from cues.spark.cluster.state_files import StateRun, folder_of_state

if TYPE_CHECKING:
    from cues.spark.cluster.files import Files

FORMAT: Final = 6
_FORMAT_WITHOUT_TIMES: Final = 5
"""The format of a record of a processor that has held messages, and has no timers, and no values that expire."""
_FORMAT_WITHOUT_DELAYS: Final = 4
"""The format of a record of a processor that has held no message either."""
OLDEST_FORMAT: Final = 2
"""Format 2 has no partitions; an older version would take their files for those of one log. Format 3 has no folders of
partitions: an older version would miss the files in them. Format 4 has no delayed messages: an older version would not
deliver those that are held. Format 5 has no timers, which an older version would not fire, and no times of writes of
values, which it would not change."""
KEEP_RECORDS: Final = 256
"""Number of records that are kept. A try log keeps about as many steps."""
_TRIM_EVERY: Final = 64
BATCH: Final = "batch"
"""The first item of the position of a frame that runs as a query."""
Kind = Literal["claim", "taking", "step", "seek"]


@dataclass(frozen=True)
class StepRange:
    """The messages [start, stop) that a step takes, by tailer id, and the number of messages of a task."""

    ranges: dict[str, tuple[int, int]]
    size: int
    now_ns: int = 0
    """The time by which the step holds messages; 0: of a version that held none."""


@dataclass(frozen=True)
class LedgerRecord:
    """One record: the state of the processor after it."""

    number: int
    kind: Kind
    owner: str
    epoch: int
    positions: dict[str, tuple[str, int]]
    """By tailer id: the queue's identity in hex, and the index that is taken next."""
    taking: StepRange | None = None
    """The range of a step under way. The next step takes it again."""
    hash: str | None = None
    """The delivery hash of the step."""
    files: dict[str, list[DataFile]] = field(default_factory=dict)
    """The data files that the step wrote, by queue, in the order of their messages."""
    ends: dict[str, int] = field(default_factory=dict)
    """By log id: the index after the messages that earlier records wrote. A log that ends before it lacks messages."""
    state: tuple[StateRun, ...] = ()
    """The processor's state, oldest run first."""
    counts: dict[str, int] = field(default_factory=dict)
    """For people who read the record: messages taken, written, failed."""
    source: str | None = None
    """The position in a stream, of a source or of a frame that runs as a query, after this record; msgpack in hex."""
    whole: bool = False
    """True if the function asks for the processor's state. Then one task makes all calls, one after another."""
    store: str | None = None
    """Of a feeder: the id of the store that it copies from; None if another store cannot continue after it."""
    seals: dict[str, str] = field(default_factory=dict)
    """Of a feeder: the checksum of the last record batch that was copied, by queue."""
    sources: dict[str, str] = field(default_factory=dict)
    """Of a feeder: by source, its row in the store after the copied messages and before all others (feeder.py)."""

    held: tuple[HeldRun, ...] = ()
    """The messages that are not due (delays.py)."""
    timers: tuple[HeldRun, ...] = ()
    """The timers that are not due, with some that were replaced or cancelled."""
    due: dict[str, DataFile] = field(default_factory=dict)
    """By tailer id of :class:`MovedLog`: the file of messages or timers that are due and not delivered yet."""
    moved: dict[str, int] = field(default_factory=dict)
    """By the same: the index that is delivered next. It has an entry since the first message was due."""

    @property
    def batch(self) -> tuple[int, str] | None:
        """Of a frame that runs as a query: the number and the checksum of its last batch (batches.py)."""
        kept: list[Any] = codec.unpack(bytes.fromhex(self.source)) if self.source else [None]
        return (kept[1], kept[2]) if kept[0] == BATCH else None

    def needs(self, processor: str) -> dict[str, set[str]]:
        """By folder: the names of the files that the record needs, besides those of queues."""
        held = {name for run in (*self.held, *self.timers) for name in run.files.values()}
        return {
            folder_of_state(processor): {name for run in self.state for name in run.files},
            folder_of_delayed(processor): held | {file.name for file in self.due.values()},
        }

    @property
    def delayed(self) -> tuple[int, int] | None:
        """The number of messages that are held, and the time of the first one in nanoseconds; None without any."""
        if not self.held:
            return None
        return sum(run.left for run in self.held), min(run.next_ns for run in self.held)

    def ends_after(self) -> dict[str, int]:
        """The ends for the next record."""
        files = ((queue, file) for queue, files in self.files.items() for file in files)
        return self.ends | {names.log_id(queue, file.partition): file.next for queue, file in files}

    @property
    def format(self) -> int:
        """The oldest format that has all that is in it."""
        if self.timers or any(map(names.is_timer_queue, self.moved)) or any(run.written_ns for run in self.state):
            return FORMAT
        return _FORMAT_WITHOUT_TIMES if self.held or self.moved else _FORMAT_WITHOUT_DELAYS

    def to_json(self) -> bytes:
        time = clock.to_datetime(clock.now_ns()).isoformat()
        data: dict[str, Any] = {"format": self.format, "kind": self.kind, "owner": self.owner, "epoch": self.epoch}
        data |= {"time": time} | asdict(self)
        data["state"] = [run if run.written_ns else run[:2] for run in self.state]
        del data["number"]  # the name of the file
        return sealed_json({name: value for name, value in data.items() if value not in (None, {}, (), [], False)})

    @staticmethod
    def of(number: int, data: dict[str, Any]) -> LedgerRecord:
        format = data.get("format", 0)
        if not isinstance(format, int):
            raise Diverged(
                f"Record {number} of a processor has the format {format!r}.", "restore the directory from a copy."
            )
        if not OLDEST_FORMAT <= format <= FORMAT:
            older = format < FORMAT
            raise Diverged(
                f"A processor's record has format {format}; this version reads {OLDEST_FORMAT} to {FORMAT}.",
                "start over with --fresh, or with another --queues DIR, which is fed from the store again."
                if older
                else NEWER,
            )
        for name, form in _forms().items():
            if not sealed.fits(data, {name: form}):
                raise Diverged(
                    f"Record {number} of a processor is damaged: no version of Cues wrote"
                    f" {data.get(name.rstrip('?'))!r:.80} as {name.rstrip('?')!r}; the form is {form!r:.300}.",
                    "restore the directory from a copy.",
                )
        try:
            return LedgerRecord._of(number, data)
        except (TypeError, ValueError) as error:  # of a field that no version has, and of a file
            raise Diverged(
                f"Record {number} of a processor is damaged ({type(error).__name__}: {error}).",
                "restore the directory from a copy.",
            ) from None

    @staticmethod
    def _of(number: int, data: dict[str, Any]) -> LedgerRecord:
        taking = data.get("taking")
        return LedgerRecord(
            number,
            data["kind"],
            data["owner"],
            data["epoch"],
            {tailer: (identity, next) for tailer, (identity, next) in data.get("positions", {}).items()},
            taking
            and StepRange(
                {t: (start, stop) for t, (start, stop) in taking["ranges"].items()},
                taking["size"],
                taking.get("now_ns", 0),
            ),
            data.get("hash"),
            {queue: [DataFile(**file) for file in files] for queue, files in data.get("files", {}).items()},
            data.get("ends", {}),
            tuple(StateRun(size, tuple(files), *times) for size, files, *times in data.get("state", ())),
            data.get("counts", {}),
            data.get("source"),
            data.get("whole", False),
            data.get("store"),
            data.get("seals", {}),
            data.get("sources", {}),
            tuple(HeldRun(**run) for run in data.get("held", ())),
            tuple(HeldRun(**run) for run in data.get("timers", ())),
            {tailer: DataFile(**file) for tailer, file in data.get("due", {}).items()},
            data.get("moved", {}),
        )


@functools.cache
def _forms() -> dict[str, sealed.Form]:
    """The form of each field of a record, as the types of the fields say it."""
    forms: dict[str, Any] = form_of(LedgerRecord)
    del forms["number"]  # the name of the file
    forms |= {"positions?": forms.pop("positions"), "state?": [([int, [str, ...]], [int, [str, ...], int]), ...]}
    return forms | {"time?": str}


class Ledger:
    """The records of one processor, as one owner writes them. Used by one thread at a time."""

    def __init__(self, files: Files, processor: str, owner: str) -> None:
        self.files = files
        self._folder = f"_cues/steps/{folder_of(processor)}"
        self._trimmed = 0
        self.processor = processor
        self.owner = owner
        self.last: LedgerRecord | None = None
        """The last record of the processor; None before the first claim."""
        self.store: str | None = None
        """The field ``store`` of a claim."""

    @property
    def now(self) -> LedgerRecord:
        """The last record, after a claim."""
        assert self.last is not None
        return self.last

    def read(self) -> LedgerRecord | None:
        """The last record in the directory; None if the processor never ran.

        It is durable then. Its owner may have died before it synced the name, and a log that has the files of a record
        which is gone is refused.
        """
        number = self.newest()
        if number < 0:
            return None
        found = self.record_at(number)
        self.files.settle(self._folder)
        return found

    def newest(self) -> int:
        return max((int(name.removesuffix(".json")) for name in self.files.names(self._folder)), default=-1)

    def record_at(self, number: int) -> LedgerRecord:
        text = self.files.read(self.name_of(number))
        if text is None:
            raise Diverged(
                f"Record {number} of {self.processor} in {self.files.url} is missing.",
                "restore the directory from a copy.",
                processor=self.processor,
            )
        return LedgerRecord.of(number, parsed(self.files, self.name_of(number), text, ANY_FORM))

    def name_of(self, number: int) -> str:
        return f"{self._folder}/{number:012d}.json"

    def claim(self, before: LedgerRecord | None, positions: dict[str, tuple[str, int]]) -> bool:
        """Own the processor after the record ``before``. Return False if another record came in between."""
        record = LedgerRecord(0, "claim", self.owner, 1, positions)
        if before is not None:
            number, epoch = before.number + 1, before.epoch + 1
            changes: dict[str, Any] = {"kind": "claim", "owner": self.owner, "positions": positions}
            changes |= {"hash": None, "files": {}, "counts": {}, "ends": before.ends_after()}
            record = replace(before, number=number, epoch=epoch, **changes)
        return self._put(replace(record, store=self.store))

    def commit(self, kind: Kind, **changes: Any) -> None:
        """Put the next record, with ``changes`` to the last one. Raises :class:`Fenced`; then nothing is committed."""
        fresh: dict[str, Any] = {"taking": None, "hash": None, "files": {}, "counts": {}, "ends": self.now.ends_after()}
        record = replace(self.now, **{**fresh, **changes, "kind": kind, "number": self.now.number + 1})
        if not self._put(record):
            raise self._fenced()

    def check(self) -> None:
        """Raise :class:`Fenced` if another driver has put the next record."""
        if self.newest() > self.now.number:
            raise self._fenced()

    def _put(self, record: LedgerRecord) -> bool:
        name, data = self.name_of(record.number), record.to_json()
        try:
            put = self.files.put(name, data)
        except OSError:
            put = self.files.read(name) == data  # the answer may be lost, and the record there
            if not put:
                raise
            self.files.settle(self._folder)  # the call that failed may have been the sync
        if not put or self.newest() > record.number:
            return False
        self.last = record
        if record.number - self._trimmed > KEEP_RECORDS + _TRIM_EVERY:
            self._trim(record.number - KEEP_RECORDS)
        return True

    def _trim(self, number: int) -> None:
        for name in self.files.names(self._folder):
            if int(name.removesuffix(".json")) < number:
                self.files.delete(f"{self._folder}/{name}")
        self._trimmed = number

    def _fenced(self) -> Fenced:
        newest = self.record_at(self.newest())
        return Fenced(
            f"{self.processor} is run by another driver ({newest.owner}, epoch {newest.epoch}; record {newest.number});"
            f" this one ({self.owner}, epoch {self.now.epoch}) commits nothing more.",
            "do nothing, if the other one is meant to run it.",
            processor=self.processor,
            reason="takeover",
        )
