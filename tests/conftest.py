"""What all tests share: every store that a test opened is checked on the way out.

A test that damages a store on purpose says so with ``@pytest.mark.damages_stores``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from forks import Forks

import cues
from cues import faults
from cues.store import Store

if TYPE_CHECKING:
    from postgres import Postgres
    from pyspark.sql import SparkSession


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "damages_stores: the test leaves damaged stores, which are not checked")


def problems_of(path: str | Path) -> list[str]:
    """What the integrity check says of a store, opened read-only."""
    with cues.open(path, readonly=True) as store:
        return store.check()


@pytest.fixture(autouse=True)
def stores_are_checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Remember the stores that this test opens in this process, and check those that are left."""
    opened: dict[str, None] = {}
    real = Store.__init__

    def remember(self: Store, path: object, *arguments: object, **keywords: object) -> None:
        real(self, path, *arguments, **keywords)  # type: ignore[arg-type]
        opened.setdefault(str(Path(self.path).resolve()))

    monkeypatch.setattr(Store, "__init__", remember)
    yield
    monkeypatch.undo()
    faults.disarm()
    if request.node.get_closest_marker("damages_stores"):
        return
    for path in opened:
        if Path(path, "data.mdb").exists():
            problems = problems_of(path)
            assert not problems, f"{path}: {problems}"


@pytest.fixture
def checked() -> Callable[[str | Path], None]:
    """Check a store that another process wrote."""

    def check(path: str | Path) -> None:
        problems = problems_of(path)
        assert not problems, f"{path}: {problems}"

    return check


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Processes to kill (see forks.py)."""
    found = Forks()
    yield found
    found.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A PostgreSQL of the tests' own; ``database()`` makes a new one in it."""
    import postgres

    if postgres.programs() is None:
        pytest.skip(
            "no PostgreSQL that may be run here (pip install 'cues-streams[test]'; as root, where nobody sees it)"
        )
    with postgres.running() as found:
        yield found


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One session for all tests; a start takes longer than most of them."""
    pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
    import cues.spark

    with cues.spark.session("local[2]", conf={"spark.driver.memory": "1g"}) as found:
        yield found
