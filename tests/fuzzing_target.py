"""A decoder that fails after three branches, each of which only one byte in 256 passes. For test_fuzzing.py."""


def decode(raw: bytes) -> None:
    if raw[:1] != b"\x80":
        return
    if raw[1:2] != b"\xff":
        return
    if raw[2:3] == b"\x7f":
        raise RuntimeError("found it")
