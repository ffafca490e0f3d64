"""Types of messages: how a publisher reads and sets a message's UUID, and the fields that a queue stores.

A message on a queue is a dict. A :class:`MessageType` describes messages of another type, such as a dataclass.
"""

from __future__ import annotations

import uuid as uuids
from collections.abc import Callable
from typing import Any, Final

from cues.base import names
from cues.base.data import dataclass
from cues.errors import InvalidArgument
from cues.records.identity import as_uuid


def _fields(message: Any) -> dict[str, Any]:
    return message if isinstance(message, dict) else dict(vars(message))


@dataclass(frozen=True)
class MessageType:
    """Functions for messages of one type.

    get_uuid               its UUID, None when it has none yet. A message with the zero UUID is
                           published without identity, and delivered at least once
    set_uuid               put a UUID into it; called for each message that is read
    new_acknowledgement    an empty message for an acknowledgement in the journal of that name
    new                    a message from the fields that a queue stores
    fields                 the dict that a queue stores; by default the message itself, or its ``vars()``
    """

    get_uuid: Callable[[Any], uuids.UUID | None]
    set_uuid: Callable[[Any, uuids.UUID], object]
    new_acknowledgement: Callable[[str], Any]
    new: Callable[[dict[str, Any]], Any]
    fields: Callable[[Any], dict[str, Any]] = _fields


def dicts(uuid_key: str = names.UUID) -> MessageType:
    """Messages that are dicts and carry their UUID under ``uuid_key``, as a UUID or its text."""

    def get(message: dict[str, Any]) -> uuids.UUID | None:
        if not isinstance(message, dict):
            raise InvalidArgument(
                f"A message is a dict, found {type(message).__name__}.",
                "pass a dict, or define a MessageType for messages of another type.",
            )
        value = message.get(uuid_key)
        return None if value is None else as_uuid(value)

    return MessageType(
        get_uuid=get,
        set_uuid=lambda message, uuid: message.__setitem__(uuid_key, uuid),
        new_acknowledgement=lambda journal: {},
        new=lambda fields: fields,
    )


DICT: Final = dicts()
"""Messages are dicts, with their UUID under ``q/uuid``."""
