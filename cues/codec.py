"""Messages to bytes and back: msgpack with extension types.

    code    type                         payload
    0–99    the user's, by :func:`register`
    100     datetime                     [isoformat, zone key or nil, fold]
    101     date                         isoformat
    102     time                         isoformat
    103     timedelta                    [days, seconds, microseconds]
    104     Decimal                      its text
    105     UUID                         16 bytes
    106     tuple                        array
    107     set                          array
    108     frozenset                    array
    109     int beyond 64 bits           two's complement, big-endian
    110     numpy scalar                 [dtype, bytes]
    111     numpy array                  [dtype, shape, bytes in C order]

What is read equals what was written, types included; the exceptions are bytearray and memoryview
(they come back as bytes) and subclasses of dict, list, str, int, float and bytes (they come back as
those). What cannot be encoded raises :class:`~cues.errors.CodecError`, which names the path inside
the message and the type, before anything is written.
"""

from __future__ import annotations

import sys
import threading
import uuid
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, Final
from zoneinfo import ZoneInfo

import msgpack

from cues.errors import CodecError, InvalidArgument

Encoder = Callable[[Any], bytes]
Decoder = Callable[[bytes], Any]

USER_CODE_MAX: Final = 99

_encoders: dict[type, tuple[int, Encoder]] = {}
_decoders: dict[int, Decoder] = {}
_BASES: Final[tuple[Any, ...]] = (dict, list, str, int, float, bytes)
"""Subclasses of these are written as their base."""


class _Unencodable(Exception):
    pass


def _default(value: Any) -> Any:
    """Called by msgpack for what it does not know; with strict types that includes every subclass."""
    found = _encoders.get(type(value))
    if found is not None:
        if found[0] <= USER_CODE_MAX:
            _local.pack = _new_packer()  # the user's encoder may call pack() in the middle of ours
        return msgpack.ExtType(found[0], found[1](value))
    if type(value) is int:
        size = (value.bit_length() + 8) // 8
        return msgpack.ExtType(109, value.to_bytes(size, "big", signed=True))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
            return msgpack.ExtType(111, _nested([_dtype(value), list(value.shape), value.tobytes()]))
        if isinstance(value, numpy.generic) and not value.dtype.hasobject:
            return msgpack.ExtType(110, _nested([_dtype(value), value.tobytes()]))
    for base in _BASES:
        if isinstance(value, base):
            # Enum members are refused: the reader would not get back what was written.
            if hasattr(type(value), "__members__"):
                break
            return base(value)
    if isinstance(value, tuple):
        return msgpack.ExtType(106, _nested(list(value)))
    raise _Unencodable


def _dtype(value: Any) -> Any:
    return value.dtype.str if value.dtype.fields is None else value.dtype.descr


def _ext_hook(code: int, data: bytes) -> Any:
    decoder = _decoders.get(code)
    if decoder is None:
        raise CodecError(
            f"The extension type {code} is not registered in this process.",
            f"cues.codec.register(<type>, {code}, <encode>, <decode>) before reading."
            if code <= USER_CODE_MAX
            else "a newer version of Cues.",
            path="",
            type_name=f"ext {code}",
        )
    return decoder(data)


class _Local(threading.local):
    """A msgpack Packer may not be used by two threads at once, and making one costs as much as a message."""

    def __init__(self) -> None:
        self.pack: Callable[[Any], bytes] = _new_packer()


def _new_packer() -> Callable[[Any], bytes]:
    packer: Callable[[Any], bytes] = msgpack.Packer(default=_default, strict_types=True).pack
    return packer


_local = _Local()


def pack(value: Any) -> bytes:
    """Encode any encodable value; raises :class:`CodecError` with the path and type of what is not."""
    try:
        return _local.pack(value)
    except Exception as error:
        _local.pack = _new_packer()  # its buffer may hold half a value
        raise _explain(value, error) from None


def _nested(value: Any) -> bytes:
    """Encode the payload of an extension; the thread's own packer is in the middle of its message."""
    return _new_packer()(value)


def unpack(data: bytes | memoryview) -> Any:
    """Decode what :func:`pack` wrote."""
    return msgpack.unpackb(data, ext_hook=_ext_hook, strict_map_key=False)


def register(type: type, code: int, encode: Encoder, decode: Decoder) -> None:
    """Teach the codec a type: ``encode(value) -> bytes`` and ``decode(bytes) -> value``.

    ``code`` is 0 to 99 and is what the bytes on disk name, so it must stay the same for as long as
    messages with it are read. Registering a code again for the same type replaces it; for another
    type it is refused, since old messages would be read as something else.
    """
    if not 0 <= code <= USER_CODE_MAX:
        raise InvalidArgument(f"The code {code!r} is not one of 0 to {USER_CODE_MAX}.", "a code in that range.")
    for known, (other, _) in _encoders.items():
        if other == code and known is not type:
            raise InvalidArgument(f"The code {code} already belongs to {known.__qualname__}.", "a free code.")
    _encoders[type] = (code, encode)
    _decoders[code] = decode


def _builtin(type: type, code: int, encode: Encoder, decode: Decoder) -> None:
    _encoders[type] = (code, encode)
    _decoders[code] = decode


def _encode_datetime(value: datetime) -> bytes:
    zone = value.tzinfo.key if isinstance(value.tzinfo, ZoneInfo) else None
    return _nested([value.isoformat(), zone, value.fold])


def _decode_datetime(data: bytes) -> datetime:
    text, zone, fold = unpack(data)
    value = datetime.fromisoformat(text)
    if zone is not None:
        value = value.replace(tzinfo=ZoneInfo(zone))
    return value.replace(fold=fold)


def _decode_ndarray(data: bytes) -> Any:
    dtype, shape, raw = unpack(data)
    return _numpy().frombuffer(raw, dtype=_read_dtype(dtype)).reshape(shape).copy()


def _decode_generic(data: bytes) -> Any:
    dtype, raw = unpack(data)
    return _numpy().frombuffer(raw, dtype=_read_dtype(dtype))[0]


def _read_dtype(found: Any) -> Any:
    return found if isinstance(found, str) else [tuple(field) for field in found]


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise CodecError(
            "The message holds a numpy value and numpy is not installed here.",
            "pip install numpy.",
            path="",
            type_name="numpy",
        ) from None
    return numpy


_builtin(datetime, 100, _encode_datetime, _decode_datetime)
_builtin(date, 101, lambda v: v.isoformat().encode(), lambda b: date.fromisoformat(b.decode()))
_builtin(time, 102, lambda v: v.isoformat().encode(), lambda b: time.fromisoformat(b.decode()))
_builtin(timedelta, 103, lambda v: _nested([v.days, v.seconds, v.microseconds]), lambda b: timedelta(*unpack(b)))
_builtin(Decimal, 104, lambda v: str(v).encode(), lambda b: Decimal(b.decode()))
_builtin(uuid.UUID, 105, lambda v: v.bytes, lambda b: uuid.UUID(bytes=b))
_builtin(tuple, 106, lambda v: _nested(list(v)), lambda b: tuple(unpack(b)))
_builtin(set, 107, lambda v: _nested(list(v)), lambda b: set(unpack(b)))
_builtin(frozenset, 108, lambda v: _nested(list(v)), lambda b: frozenset(unpack(b)))
_decoders[109] = lambda b: int.from_bytes(b, "big", signed=True)
_decoders[110] = _decode_generic
_decoders[111] = _decode_ndarray


def _explain(value: Any, error: Exception) -> CodecError:
    """Walk to the first part of ``value`` that cannot be encoded, and name it."""
    if isinstance(error, CodecError):
        return error
    path, culprit = _find(value, "", set())
    type_name = type(culprit).__qualname__
    where = f" at {path}" if path else ""
    if isinstance(culprit, str):
        return CodecError(
            f"A string{where} holds a lone surrogate and has no UTF-8 form.",
            "text.encode('utf-8', 'replace').decode(), or bytes.",
            path=path,
            type_name=type_name,
        )
    if isinstance(culprit, (dict, list, tuple)):
        return CodecError(
            f"The {type_name}{where} is nested too deeply or holds itself ({error}).",
            "at most about 500 levels.",
            path=path,
            type_name=type_name,
        )
    return CodecError(
        f"Cannot encode the value of type {type_name}{where}.",
        "a plain value (numbers, text, bytes, lists, dicts, dates), or cues.codec.register(...) for its type.",
        path=path,
        type_name=type_name,
    )


def _find(value: Any, path: str, above: set[int]) -> tuple[str, Any]:
    if id(value) in above or len(above) > 400:
        return path, value
    children: list[tuple[str, Any]]
    if isinstance(value, dict):
        children = [(f"{path}[key {k!r}]", k) for k in value]
        children += [
            (f"{path}.{k}" if path and isinstance(k, str) else str(k) if not path else f"{path}[{k!r}]", v)
            for k, v in value.items()
        ]
    elif isinstance(value, (list, tuple, set, frozenset)):
        children = [(f"{path}[{i}]", v) for i, v in enumerate(value)]
    else:
        return path, value
    for where, child in children:
        try:
            _local.pack(child)
        except Exception:
            _local.pack = _new_packer()
            return _find(child, where, above | {id(value)})
    return path, value
