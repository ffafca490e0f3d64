"""Every decoder refuses what it cannot read, and encodes what it has read to the same value (fuzzing.py)."""

from __future__ import annotations

import fuzzing
import pytest
from forks import Forks

INPUTS = 400
"""For each decoder, always the same ones; ``python -m tests.fuzzing`` looks for others."""


def run(name: str) -> tuple[int, int]:
    return fuzzing.fuzz(name, 60, 1, INPUTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", fuzzing.DECODERS)
def test_a_decoder_refuses_foreign_bytes_and_nothing_else(name: str, forks: Forks) -> None:
    """In a process of its own, whose memory is bounded, and which a decoder may end."""
    outcome = forks.run("test_fuzzing:run", name)
    inputs, pairs = outcome.value
    assert inputs > 20
    assert pairs or not fuzzing.DECODERS[name].modules or fuzzing.is_compiled(name)


def test_the_corpus_is_of_known_decoders_and_small() -> None:
    files = [file for file in fuzzing.CORPUS.rglob("*") if file.is_file()]
    assert {file.parent for file in files} <= {fuzzing.folder(name) for name in fuzzing.DECODERS}
    assert sum(file.stat().st_size for file in files) < 300_000
    assert sum(map(len, map(fuzzing.reached, fuzzing.DECODERS))) > 50


def test_a_decoder_that_misreads_or_hangs_or_fails_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The controls: another error, another value, and a loop."""

    def misread(raw: bytes) -> bytes:
        return raw if len(raw) < 4 else raw[:-1]

    def endless(raw: bytes) -> None:
        while len(raw) > 4:
            pass

    monkeypatch.setattr(fuzzing, "HANG_S", 0.2)
    for decode, encode, what in (
        (lambda raw: raw.decode(), None, "UnicodeDecodeError"),
        (misread, lambda value: value, "after it was encoded"),
        (endless, None, "took longer"),
    ):
        broken = fuzzing.Decoder((), lambda: [b"abcdef"], decode, (), encode)
        monkeypatch.setitem(fuzzing.DECODERS, "broken", broken)
        with pytest.raises(fuzzing.Failure, match=what):
            fuzzing.fuzz("broken", 5, 1)


def test_coverage_finds_an_input_that_chance_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four bytes in a row, each a branch of its own: 2 ** 32 inputs without the guide."""
    import fuzzing_target

    decoder = fuzzing.Decoder((fuzzing_target,), lambda: [b"0000"], fuzzing_target.decode, ())
    monkeypatch.setitem(fuzzing.DECODERS, "target", decoder)
    with pytest.raises(fuzzing.Failure, match="found it"):
        fuzzing.fuzz("target", 60, 7)
