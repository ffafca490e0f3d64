"""Messages to bytes and back: msgpack with extension types.

    code    type                         payload
    0–99    the user's, by :func:`register`
    100     datetime                     [isoformat, zone key or nil, fold]
    101     date                         isoformat
    102     time                         isoformat; with a zone or a fold [isoformat, zone key or nil, fold]
    103     timedelta                    [days, seconds, microseconds]
    104     Decimal                      its text
    105     UUID                         16 bytes
    106     tuple                        array
    107     set                          array
    108     frozenset                    array
    109     int beyond 64 bits           two's complement, big-endian
    110     numpy scalar                 [dtype, bytes]
    111     numpy array                  [dtype, shape, bytes in C order]

A decoded value equals the encoded one, and has the same types. There are two exceptions: bytearray and
memoryview become bytes, and subclasses of dict, list, tuple, str, int, float and bytes become their base
class. A value that cannot be encoded raises :class:`~cues.errors.CodecError`, which names the path inside
the message and the type, before anything is written.

:func:`unpack` takes what :func:`pack` writes and nothing else: each decoder of the codes 100 to 111 compares the
payload with the one form that its encoder writes, and raises :class:`~cues.errors.CodecError` for another one. So
the bytes of a foreign message cannot become a numpy array of objects (whose bytes are addresses), or ask for memory
that they do not fill.
"""

from __future__ import annotations

import math
import sys
import uuid
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, tzinfo
from typing import Any, Final

import msgpack

from cues.errors import CodecError, InvalidArgument
from cues.imported import loaded
from cues.native import ThreadPacker

Encoder = Callable[[Any], bytes]
Decoder = Callable[[bytes], Any]

USER_CODE_MAX: Final = 99
NESTING_MAX: Final = 64
"""Most extensions inside one another (tuples in tuples). Reading takes 45 KB of C stack for each, so
without a bound a message could kill every process that reads it."""

_encoders: dict[type, tuple[int, Encoder]] = {}
_decoders: dict[int, Decoder] = {}
_BASES: Final[tuple[tuple[type, Callable[[Any], Any]], ...]] = (
    (dict, dict),
    (list, list),
    (str, str.__str__),
    (int, int.__int__),
    (float, float.__float__),
    (bytes, bytes),
)
"""Subclasses of these types are written as their base: a function for each that does not use ``__str__``."""
_NATIVE: Final = (dict, list, str, int, float, bytes, bytearray, memoryview, bool, type(None))
"""Types that msgpack encodes itself."""
_SIMPLE: Final = frozenset((str, int, float, bytes, bool, type(None)))
"""Types of keys that contain no other values."""


class _Unencodable(Exception):
    """A value that cannot be encoded; the text, if any, is the reason."""


def _default(value: Any) -> Any:
    """Encode a value that msgpack does not know; with strict types that includes every subclass."""
    registered = _encoders.get(type(value))
    if registered is not None:
        code, encode = registered
        holds_others = code <= USER_CODE_MAX or code in _CONTAINERS
        return msgpack.ExtType(code, _inside(encode, value) if holds_others else encode(value))
    if type(value) is int:
        return _encode_int(value)
    if type(value) is loaded("decimal", "Decimal"):
        return msgpack.ExtType(104, str(value).encode())
    generic = loaded("numpy", "generic")
    if generic is not None:
        # Subclasses of arrays have data that is not in their bytes (a mask, a unit), so they are refused.
        if type(value) in (loaded("numpy", "ndarray"), loaded("numpy", "memmap")) and value.dtype.itemsize:
            description = _description(value.dtype)
            _check_texts(value)
            return msgpack.ExtType(111, _nested([description, list(value.shape), value.tobytes()]))
        if isinstance(value, generic):
            description = _description(value.dtype)
            _check_texts(sys.modules["numpy"].asarray(value))
            return msgpack.ExtType(110, _nested([description, value.tobytes()]))
    for base, plain in _BASES:
        if isinstance(value, base):
            # Enum members are refused: the reader would get a plain value.
            if hasattr(type(value), "__members__"):
                break
            value = plain(value)
            return _encode_int(value) if base is int and value.bit_length() > 63 else value
    if isinstance(value, tuple):
        return msgpack.ExtType(106, _inside(_encode_items, value))
    raise _Unencodable


def _inside(encode: Encoder, value: Any) -> bytes:
    """The payload of an extension that may contain others; a user's encoder may call :func:`pack` again."""
    local = _local
    outer = local.pack
    local.depth += 1
    try:
        if local.depth > NESTING_MAX:
            raise _Unencodable(f"more than {NESTING_MAX} tuples, sets or registered types inside one another")
        local.pack = _new_packer()
        return encode(value)
    finally:
        local.depth -= 1
        local.pack = outer


def _encode_items(value: Any) -> bytes:
    return _nested(list(value))


def _encode_set(value: Any) -> bytes:
    """The items in the order of their bytes: a set's own order differs from process to process."""
    packer = msgpack.Packer(default=_default, strict_types=True)
    items = sorted(map(packer.pack, value))
    return b"".join([packer.pack_array_header(len(items)), *items])


def _encode_int(value: int) -> Any:
    size = (value.bit_length() + 8) // 8
    return msgpack.ExtType(109, value.to_bytes(size, "big", signed=True))


_DTYPE_KINDS: Final = frozenset("biufcmMSUV")
"""The kinds of numpy's types whose values are in their bytes: numbers, times, texts, structures."""

_EMPTY_BYTES: Final = {"S": 1, "U": 4, "V": 0}
"""The bytes of a scalar of the size 0."""


def _description(dtype: Any) -> Any:
    """The form in which a dtype is written. Raises :class:`_Unencodable` if its values are not in their bytes."""
    leaves, found = [dtype], 0
    while found < len(leaves):
        leaf = leaves[found].base
        leaves += [field[0] for field in (leaf.fields or {}).values()]
        if leaf.kind not in _DTYPE_KINDS or leaf.type.__module__ != "numpy":
            raise _Unencodable(f"numpy values of the dtype {dtype} are not in their bytes")
        found += 1
    return dtype.str if dtype.fields is None else _numpy().lib.format.dtype_to_descr(dtype)


def _check_texts(array: Any) -> None:
    """Raise :class:`_Unencodable` for a text with a code point that Unicode does not have: numpy fails to read it."""
    dtype = array.dtype
    if dtype.fields is not None:
        for name in dtype.names:
            _check_texts(array[name])
    elif dtype.kind == "U" and array.size and dtype.itemsize:
        points = _numpy().frombuffer(array.tobytes(), f"{dtype.str[0]}u4")
        if int(points.max()) > sys.maxunicode:
            raise _Unencodable("a text of numpy has a code point that Unicode does not have")


def _ext_hook(code: int, data: bytes) -> Any:
    decoder = _decoders.get(code)
    if decoder is None:
        raise CodecError(
            f"The extension type {code} is not registered in this process.",
            f"call cues.codec.register(<type>, {code}, <encode>, <decode>) before reading."
            if code <= USER_CODE_MAX
            else "install a newer version of Cues (pip install -U cues-streams).",
            path="",
            type_name=f"ext {code}",
        )
    if code <= USER_CODE_MAX:
        return _deeper(decoder, data)
    try:
        return _deeper(decoder, data) if code in _CONTAINERS else decoder(data)
    except CodecError:
        raise
    except Exception as error:
        raise _foreign(f"The extension type {code} has bytes that Cues does not write ({error}).", code) from None


def _deeper(decoder: Decoder, data: bytes) -> Any:
    """Decode an extension that may contain others, no more of them inside one another than :func:`pack` writes."""
    _local.reading += 1
    try:
        if _local.reading > NESTING_MAX:
            raise _foreign(f"The message has more than {NESTING_MAX} extension types inside one another.", 106)
        return decoder(data)
    finally:
        _local.reading -= 1


def _foreign(what: str, code: int) -> CodecError:
    return CodecError(
        what,
        "read the message as raw bytes to see its source: cues.codec.pack did not write it.",
        path="",
        type_name=f"ext {code}",
    )


def _expect(is_written: bool) -> None:
    """Refuse a payload in another form than the one that is written."""
    if not is_written:
        raise ValueError("another form of the value, or another size")


def _new_packer() -> Callable[[Any], bytes]:
    packer: Callable[[Any], bytes] = msgpack.Packer(default=_default, strict_types=True).pack
    return packer


_local = ThreadPacker(_new_packer)


def pack(value: Any) -> bytes:
    """Encode a value. Raises :class:`CodecError` with the path and type of a part that cannot be encoded."""
    try:
        return _local.pack(value)
    except Exception as error:
        thread_packer(renew=True)
        cause = None if isinstance(error, (_Unencodable, CodecError)) else error
        explained = _explain(value, error)
        explained.__cause__ = cause  # the compiler does not keep "from"
        raise explained from cause


def thread_packer(renew: bool = False) -> Callable[[Any], bytes]:
    """Return the packer of this thread, for a loop that calls :func:`pack` where it raises.

    ``renew``: after an exception, since its buffer may hold half a value.
    """
    if renew:
        _local.pack = _new_packer()
    return _local.pack


def pack_key(value: Any) -> bytes:
    """Encode a key: dicts that are equal have the same bytes, whatever the order of their fields."""
    packed = pack(value)
    return packed if type(value) in _SIMPLE else pack(_ordered(value))


def _ordered(value: Any) -> Any:
    """The value with the fields of all its dicts in the order of their bytes."""
    if isinstance(value, dict):
        pairs = [(_ordered(key), _ordered(item)) for key, item in value.items()]
        return dict(sorted(pairs, key=lambda pair: pack(pair[0])))
    if type(value) in (list, tuple):
        return type(value)(_ordered(item) for item in value)
    return value


def _nested(value: Any) -> bytes:
    """Encode the payload of an extension; the thread's own packer is in the middle of its message."""
    return _new_packer()(value)


def unpack(data: bytes | memoryview) -> Any:
    """Decode a value that :func:`pack` encoded."""
    return _unpack(data, _ext_hook)


def unpack_known(data: bytes | memoryview) -> Any:
    """Decode like :func:`unpack`, but leave an extension that cannot be decoded here as ``msgpack.ExtType``."""
    return _unpack(data, _known_or_raw)


def _unpack(data: bytes | memoryview, ext_hook: Callable[[int, bytes], Any]) -> Any:
    try:
        return msgpack.unpackb(data, ext_hook=ext_hook, strict_map_key=False)
    except msgpack.StackError:
        return _unpack_deep(data, ext_hook)


def _unpack_deep(data: bytes | memoryview, ext_hook: Callable[[int, bytes], Any]) -> Any:
    """Decode a value of any depth: msgpack writes more levels of lists and dicts inside one another than it reads."""
    unpacker = msgpack.Unpacker(max_buffer_size=0, ext_hook=ext_hook, strict_map_key=False)
    unpacker.feed(data)
    root: list[Any] = []
    open: list[tuple[list[Any], int, bool]] = [(root, 1, False)]
    """A container that is being filled: its items, their number at the end, and whether they are keys and values."""
    while True:
        items, count, is_map = open[-1]
        if len(items) < count:
            lead = data[unpacker.tell()]
            if 0x90 <= lead <= 0x9F or lead in (0xDC, 0xDD):
                open.append(([], unpacker.read_array_header(), False))
            elif 0x80 <= lead <= 0x8F or lead in (0xDE, 0xDF):
                open.append(([], 2 * unpacker.read_map_header(), True))
            else:
                items.append(unpacker.unpack())
        elif len(open) == 1:
            return root[0]
        else:
            open.pop()
            open[-1][0].append(dict(zip(items[::2], items[1::2])) if is_map else items)


def _known_or_raw(code: int, data: bytes) -> Any:
    try:
        return _ext_hook(code, data)
    except Exception:  # any error of a user's decoder
        return msgpack.ExtType(code, data)


def register(type: type, code: int, encode: Encoder, decode: Decoder) -> None:
    """Register a type: ``encode(value) -> bytes`` and ``decode(bytes) -> value``.

    ``code`` is 0 to 99. It is stored in the messages, so it must stay the same as long as they are read.
    A second registration of a code replaces the first if the type is the same (or has the same module and
    name, after a reload of the module). For another type it is refused, because old messages would be
    decoded to that type. Types that msgpack writes itself (dict, str, …) cannot be registered. ``encode``
    may call :func:`pack`.
    """
    if not isinstance(code, int) or isinstance(code, bool) or not 0 <= code <= USER_CODE_MAX:
        raise InvalidArgument(f"The code {code!r} is not one of 0 to {USER_CODE_MAX}.", "choose a code in that range.")
    if type in _NATIVE:
        raise InvalidArgument(f"msgpack writes {type.__qualname__} itself.", "register a class of your own.")
    for known, (other, _) in list(_encoders.items()):
        if other == code and known is not type:
            if (known.__module__, known.__qualname__) != (type.__module__, type.__qualname__):
                raise InvalidArgument(
                    f"The code {code} already belongs to {known.__qualname__}.", "choose a free code."
                )
            del _encoders[known]
    _register(type, code, encode, decode)


def _register(type: type, code: int, encode: Encoder, decode: Decoder) -> None:
    _encoders[type] = (code, encode)
    _decoders[code] = decode


def _zone(zone: tzinfo | None) -> str | None:
    """The name of a time zone of :mod:`zoneinfo`, which is loaded if there is one; None for another zone."""
    kind = None if zone is None else loaded("zoneinfo", "ZoneInfo")
    return zone.key if kind is not None and isinstance(zone, kind) else None


def _named_zone(name: str) -> tzinfo:
    from zoneinfo import ZoneInfo

    return ZoneInfo(name)


def _encode_datetime(value: datetime) -> bytes:
    zone = _zone(value.tzinfo)
    return _nested([value.isoformat(), zone, value.fold])


def _decode_datetime(data: bytes) -> datetime:
    text, zone, fold = unpack(data)
    value = datetime.fromisoformat(text)
    _expect(value.isoformat() == text and type(fold) is int and (zone is None or value.tzinfo is not None))
    if zone is not None:
        value = value.replace(tzinfo=_named_zone(zone))
    return value.replace(fold=fold)


def _encode_time(value: time) -> bytes:
    zone = _zone(value.tzinfo)
    text = value.isoformat()
    return _nested([text, zone, value.fold]) if zone or value.fold else text.encode()


def _decode_time(data: bytes) -> time:
    if data[:1].isdigit():
        return _canonical(time.fromisoformat, time.isoformat, data)  # type: ignore[no-any-return]
    text, zone, fold = unpack(data)
    value = time.fromisoformat(text)
    _expect(value.isoformat() == text and type(fold) is int and (zone is not None or fold == 1))
    return value.replace(tzinfo=_named_zone(zone) if zone else value.tzinfo, fold=fold)


def _canonical(parse: Callable[[str], Any], write: Callable[[Any], str], data: bytes) -> Any:
    """A value that is written as its text, in the one form that is written."""
    text = data.decode()
    value = parse(text)
    _expect(write(value) == text)
    return value


def _decode_decimal(data: bytes) -> Any:
    from decimal import Decimal

    return _canonical(Decimal, str, data)


def _decode_timedelta(data: bytes) -> timedelta:
    parts = unpack(data)
    value = timedelta(*parts)
    _expect([value.days, value.seconds, value.microseconds] == parts and set(map(type, parts)) == {int})
    return value


def _decode_items(data: bytes) -> list[Any]:
    items = unpack(data)
    _expect(type(items) is list)
    return items  # type: ignore[no-any-return]


def _decode_set(kind: type, data: bytes) -> Any:
    """A set. Its items may be in any order: an earlier version wrote them so."""
    items = _decode_items(data)
    value = kind(items)
    _expect(len(value) == len(items))
    return value


def _decode_int(data: bytes) -> int:
    value = int.from_bytes(data, "big", signed=True)
    _expect(value.bit_length() > 63 and len(data) == (value.bit_length() + 8) // 8)
    return value


def _array(shape: Any, description: Any, raw: Any) -> Any:
    """An array of the shape ``()``, for a scalar, or of another one; numpy writes an empty text as one character."""
    numpy = _numpy()
    dtype = numpy.lib.format.descr_to_dtype(description)
    _expect(_description(dtype) == description and type(raw) is bytes)
    _expect(all(type(length) is int and length >= 0 for length in shape))
    size = dtype.itemsize or (0 if shape else _EMPTY_BYTES[dtype.kind])
    _expect(math.prod(shape) * size == len(raw))
    array = numpy.ndarray(shape, dtype, raw)
    _check_texts(array)
    return array


def _decode_scalar(data: bytes) -> Any:
    description, raw = unpack(data)
    return _array((), description, raw)[()]


def _decode_ndarray(data: bytes) -> Any:
    description, shape, raw = unpack(data)
    array = _array(shape, description, raw)
    _expect(array.itemsize > 0)  # such items take memory that their bytes do not show
    return array.copy()


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        raise CodecError(
            "The message has a numpy value, and numpy is not installed in this environment.",
            "install numpy (pip install numpy).",
            path="",
            type_name="numpy",
        ) from None
    return numpy


_register(datetime, 100, _encode_datetime, _decode_datetime)
_register(date, 101, lambda v: v.isoformat().encode(), lambda b: _canonical(date.fromisoformat, date.isoformat, b))
_register(time, 102, _encode_time, _decode_time)
_register(timedelta, 103, lambda v: _nested([v.days, v.seconds, v.microseconds]), _decode_timedelta)
_register(uuid.UUID, 105, lambda v: v.bytes, lambda b: uuid.UUID(bytes=b))
_CONTAINERS: Final = (106, 107, 108)
_register(tuple, 106, _encode_items, lambda b: tuple(_decode_items(b)))
_register(set, 107, _encode_set, lambda b: _decode_set(set, b))
_register(frozenset, 108, _encode_set, lambda b: _decode_set(frozenset, b))
_decoders[104] = _decode_decimal
_decoders[109] = _decode_int
_decoders[110] = _decode_scalar
_decoders[111] = _decode_ndarray


def _explain(value: Any, error: Exception) -> CodecError:
    """Walk to the first part of ``value`` that cannot be encoded, and name it."""
    if isinstance(error, CodecError):
        return error
    path, culprit = _find(value)
    type_name = type(culprit).__qualname__
    where = f" at {path}" if path else ""
    if isinstance(culprit, str):
        return CodecError(
            f"A string{where} has a lone surrogate, so it has no UTF-8 form.",
            "write text.encode('utf-8', 'replace').decode(), or write bytes.",
            path=path,
            type_name=type_name,
        )
    if isinstance(culprit, (dict, list, tuple, set, frozenset)):
        shown = f" at {path[:40]}…" if len(path) > 60 else where
        return CodecError(
            f"The {type_name}{shown} is nested too deeply or contains itself ({error}).",
            f"use at most about 500 levels, {NESTING_MAX} of them tuples, sets or registered types.",
            path=path,
            type_name=type_name,
        )
    why = "" if isinstance(error, _Unencodable) else f" ({type(error).__name__}: {error})"
    return CodecError(
        f"Cannot encode the value of type {type_name}{where}{why}.",
        "use a plain value (numbers, text, bytes, lists, dicts, dates), or register the type (cues.codec.register).",
        path=path,
        type_name=type_name,
    )


LEVELS_MAX: Final = 500
"""Levels of containers below which a message is surely packed; msgpack stops at 511."""

_Way = tuple[Any, str, Any]
"""A way to a part: the way to its container or None, the kind of the part (key, field or item), and which one."""


def _find(value: Any) -> tuple[str, Any]:
    """Return the path and the value of the first part that cannot be encoded; the whole if no part fails alone.

    Each part is tried once, and not in its containers, so the work is linear in the size of the value.
    """
    outer = _local.depth
    parts: list[tuple[_Way | None, Any, int, int]] = [(None, value, 0, outer)]
    try:
        while parts:
            way, part, levels, nested = parts.pop()
            children = _children(part)
            nested += isinstance(part, (tuple, set, frozenset))
            if children is not None and (levels > LEVELS_MAX or nested > NESTING_MAX):
                return _path(way), part
            _local.depth = nested
            if children is None:
                try:
                    _local.pack(part)
                except Exception:
                    _local.pack = _new_packer()
                    return _path(way), part
            else:
                for at in range(len(children) - 1, -1, -1):  # the compiler has no type for an iteration here
                    kind, key, child = children[at]
                    parts.append(((way, kind, key), child, levels + 1, nested))
        return "", value
    finally:
        _local.depth = outer


def _children(part: Any) -> list[tuple[str, Any, Any]] | None:
    """The kind, the name and the value of each part of a container; None for another value."""
    if isinstance(part, dict):
        return [("key", key, key) for key in part] + [("field", key, inner) for key, inner in part.items()]
    if isinstance(part, (list, tuple, set, frozenset)):
        return [("item", number, inner) for number, inner in enumerate(part)]
    return None


def _path(way: _Way | None) -> str:
    steps: list[_Way] = []
    while way is not None:
        steps.append(way)
        way = way[0]
    path = ""
    for at in range(len(steps) - 1, -1, -1):
        _, kind, key = steps[at]
        if kind == "key":
            path += f"[key {key!r}]"
        elif kind == "field" and not path:
            path = str(key)
        else:
            path += f".{key}" if kind == "field" and isinstance(key, str) else f"[{key!r}]"
    return path
