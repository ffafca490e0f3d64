"""A consumer's checkpoint as text: one JSON object, the same in every kind of checkpoint.

    {"cues": 1,                                              version of this form
     "offsets": {"<log>": 1001},                             the next indices to read
     "producers": [["<log>", "0102…06", 1234, 17]],          id in hex, last clock done, begin of the open span or -1
     "ack_intents": [["<log>", "gqFh…"]]}                    arguments of append_ack_intents, in base64

A text of another version, or with other fields, is refused. Offsets are in the order of their logs, so that one
checkpoint has one text.
"""

from __future__ import annotations

import base64
import json
from typing import Any, Final

from cues.arguments import version_hint
from cues.errors import CheckpointError
from cues.producers.sequencer import AckIntent, Checkpoint, ProducerState
from cues.records.identity import ProducerID

VERSION: Final = 1


def pack(checkpoint: Checkpoint) -> str:
    """Return a checkpoint as text."""
    return json.dumps(to_plain(checkpoint), ensure_ascii=False, separators=(",", ":"))


def unpack(text: str) -> Checkpoint:
    """Read the text of :func:`pack`. Raises :class:`CheckpointError` for any other text."""
    try:
        plain = json.loads(text)
    except ValueError as error:
        raise _foreign(f"is not JSON ({error})") from error
    return from_plain(plain)


def to_plain(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint as data that JSON can hold."""
    return {
        "cues": VERSION,
        "offsets": dict(sorted(checkpoint.offsets.items())),
        "producers": [[p.journal, p.producer.hex(), p.last_ack, p.begin] for p in checkpoint.producers],
        "ack_intents": [[i.journal, base64.b64encode(i.intent).decode()] for i in checkpoint.ack_intents],
    }


def from_plain(plain: Any) -> Checkpoint:
    """Read the data of :func:`to_plain`. Raises :class:`CheckpointError` for any other data."""
    version = plain.get("cues") if isinstance(plain, dict) else None
    if version != VERSION:
        text = f"is of version {version!r}; this version of Cues reads version {VERSION}"
        raise _foreign(text, version_hint(version, VERSION, _WRITER))
    if set(plain) != {"cues", "offsets", "producers", "ack_intents"}:
        raise _foreign(f"holds {', '.join(map(repr, plain))}")
    try:
        return Checkpoint(
            {str(journal): int(offset) for journal, offset in plain["offsets"].items()},
            tuple(
                ProducerState(journal, ProducerID(bytes.fromhex(producer)), last_ack, begin)
                for journal, producer, last_ack, begin in plain["producers"]
            ),
            tuple(
                AckIntent(journal, base64.b64decode(intent, validate=True)) for journal, intent in plain["ack_intents"]
            ),
        )
    except (ValueError, TypeError, AttributeError) as error:
        raise _foreign(f"does not have the form of one ({error})") from error


_WRITER: Final = "use the version of Cues that wrote it."


def _foreign(what: str, hint: str = _WRITER) -> CheckpointError:
    return CheckpointError(f"The stored checkpoint {what}.", hint, where="")
