"""The pause of a processor, as plain data; :mod:`cues.steps.pauses` keeps it in the store."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, Literal

from cues import codec
from cues.base import clock
from cues.base.data import dataclass
from cues.base.names import ProcessorId
from cues.records import sealed

_FORM: Final[dict[str, Any]] = {
    "why": str, "time_ns": int, "next?": [[str, int], ...], "error?": str, "calls?": int, "messages?": int,
    "limit?": str, "by?": str, "reason?": str, "trace?": str,
}  # fmt: skip

Why = Literal["failed", "limit", "asked"]


@dataclass(frozen=True)
class ProcessorPause:
    """The pause of one unit of a processor, with its reason."""

    processor: ProcessorId
    """The id of the unit: ``graph.processor``, or ``graph.processor/3``."""
    why: Why
    time: datetime
    next: tuple[tuple[str, int], ...] = ()
    """The queue and the index of the message that is taken next, for each input; empty if somebody asked for it."""
    error: str = ""
    """Type and text of the exception; empty if somebody asked for the pause."""
    calls: int = 0
    """The number of calls that failed for this message."""
    messages: int = 1
    """The number of messages that failed together; 1 unless the function takes batches."""
    limit: str = ""
    """The value of ``max_errors=`` that was reached."""
    by: str = ""
    """The user and the process that asked for it."""
    reason: str = ""
    """The reason that was given."""
    trace: str = ""
    """The end of the traceback."""

    @property
    def text(self) -> str:
        """The reason as a phrase, such as ``before message 7 of orders, which failed: ValueError: …``."""
        if self.why == "asked":
            return f"by {self.by}" + (f": {self.reason}" if self.reason else "")
        where = " and ".join(f"message {index:,} of {queue}" for queue, index in self.next) or "its next timer"
        if self.why == "limit":
            return f"before {where}, because max_errors={self.limit!r} is reached; the last error: {self.error}"
        many = f", with {self.messages - 1:,} more in its batch" if self.messages > 1 else ""
        calls = f" after {self.calls} calls" if self.calls > 1 else ""
        return f"before {where}{many}, which failed{calls}: {self.error}"

    def pack(self) -> bytes:
        fields = {name: value for name, value in vars(self).items() if name not in ("processor", "time") and value}
        return codec.pack(fields | {"time_ns": clock.to_ns(self.time)})

    @staticmethod
    def unpack(key: bytes, raw: bytes, processor: ProcessorId) -> ProcessorPause:
        stored = sealed.unseal_value(key, raw, f"pause of the processor {processor}", _FORM)
        fields = {name: stored[name] for name in (each.rstrip("?") for each in _FORM) if name in stored}
        fields["next"] = tuple((queue, index) for queue, index in fields.get("next", ()))
        return ProcessorPause(processor, time=clock.to_datetime(fields.pop("time_ns")), **fields)

    def facts(self) -> dict[str, Any]:
        """The pause as JSON."""
        place = [{"queue": queue, "index": index} for queue, index in self.next]
        known = {name: value for name, value in vars(self).items() if value and name != "next"}
        return known | {"next": place, "text": self.text}
