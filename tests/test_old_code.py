"""The code of old commits, each the last one before a feature of the format, over stores of today and of then.

A store that requires a feature which the old code does not know is refused before a byte of it changes. Every other one
is read, written and checked. Needs the history of the repository; a copy without it skips these tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_format import GOLDEN, copied

import cues
from cues.storage import format_record

ROOT = Path(__file__).parent.parent
COMMITS: dict[str, set[str]] = {
    "51f3dfcd": set(),
    "f1a7f9a8": {"seals"},
    "fdf001c3": {"seals", "columns"},
    "654be113": {"seals", "columns", "unread"},
    "61d3d64b": {"seals", "columns", "unread", "blocks"},
}
"""Commits, and the features of the format that their code knows."""

OLD = """
import json, sys
import cues
from cues.errors import StoreVersion

def used(path, readonly):
    try:
        with cues.open(path, readonly=readonly) as store:
            name = sorted(store.queues())[0]
            before = list(store.queue(name).tailer())
            if not readonly:
                store.queue(name).appender().write({"n": 99})
                assert list(store.queue(name).tailer()) == [*before, {"n": 99}]
            problems = store.check()
            return "whole" if not problems else str(problems)
    except StoreVersion as error:
        assert "Try: " in str(error), error
        return "refused"

print(json.dumps([cues.__file__, {path: [used(path, True), used(path, False)] for path in sys.argv[1:]}]))
"""


def stores(place: Path) -> dict[Path, set[str]]:
    """Stores of today, and of earlier formats, with the features that they require."""
    (place / "today").mkdir(parents=True)
    with cues.open(place / "today" / "plain") as store:
        store.queue("q").appender().write({"n": 1})
    with cues.open(place / "today" / "columns") as store:
        pa = pytest.importorskip("pyarrow")
        store.queue("q").appender().write_table(pa.table({"n": [1, 2]}))
    paths = [*(place / "today").iterdir()]
    paths += [copied(GOLDEN / name, place / name) for name in ("v1", "v1-seals", "v1-unread", "v1-keys", "v1-columns")]
    found = {}
    for path in paths:
        with cues.open(path, readonly=True) as store, store.core.view() as txn:
            found[path] = set(format_record.record_of(txn)["requires"])
    return found


@pytest.mark.slow
@pytest.mark.interpreted
@pytest.mark.parametrize("commit", COMMITS)
def test_old_code_refuses_what_it_does_not_know_and_continues_the_rest(commit: str, tmp_path: Path) -> None:
    archive = subprocess.run(["git", "archive", commit, "cues", "processors"], cwd=ROOT, capture_output=True)
    if archive.returncode:
        pytest.skip(f"the history of this copy does not have {commit}")
    (tmp_path / "old").mkdir()
    subprocess.run(["tar", "-x", "-C", tmp_path / "old"], input=archive.stdout, check=True)
    required = stores(tmp_path / "stores")
    before = {path: (path / "data.mdb").read_bytes() for path in required}
    done = subprocess.run(
        [sys.executable, "-c", OLD, *required],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "old")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    code, found = json.loads(done.stdout)
    assert code.startswith(str(tmp_path / "old")), "the old code has run"
    refused = {path for path, features in required.items() if features - COMMITS[commit]}
    assert found == {str(path): ["refused"] * 2 if path in refused else ["whole"] * 2 for path in required}
    for path in set(required) - refused:  # the way back: what the old code wrote last
        with cues.open(path) as store:
            queue = store.queue(sorted(store.queues())[0])
            assert [*queue.tailer()][-1] == {"n": 99}
            queue.appender().write({"n": 100})
            assert store.check() == []
    for path, data in before.items():
        assert ((path / "data.mdb").read_bytes() == data) is (path in refused), path
    assert refused >= {tmp_path / "stores" / "today" / name for name in ("plain", "columns")}
    assert tmp_path / "stores" / "v1" not in refused
