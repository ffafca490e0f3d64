"""A power cut in two stores: one of them loses its unsynced commits, and the next start reports or repairs this.

The images that a power cut would leave are kept by the run itself: of a "process" store its file at each
sync, of a "disk" store nothing, since every commit of it is durable. A run is killed at every crash
point; then the file of one store, or of both, is put back to its image, and the graph runs to its end.

    home "process" taken back     exact: nothing is forwarded before home is synced
    other "process" taken back    exact, if its messages came through fork queues and were not read;
                                  otherwise exact or detected: a position beyond the end, or after
                                  another batch, is Diverged
    "disk"                        is never taken back
"""

from __future__ import annotations

import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import scenarios
from forks import Forks
from scenarios import PAIRINGS, Stores, copy, find
from test_crashes import judge, template, undisturbed

from cues import testing
from cues.errors import Diverged
from cues.forwarding.forwarder import ForkQueue, Forwarder
from cues.queues.store import Store

WRITERS = [
    "stream abroad",
    "alts to abroad",
    "fork at home and abroad",
    "fork abroad",
    "state abroad",
    "error step abroad",
    "source with an error step abroad",
]
"""The messages in the other store came through fork queues, and no processor reads them."""
READERS = [
    "stream from abroad",
    "stream abroad and back",
    "side effects from abroad",
    "sink from abroad",
    "join across stores",
    "alts across stores with messages on both",
    "batch function abroad",
]
"""The messages in the other store are read as well."""


POINTS = (
    "snapshot.after",
    "commit.after",
    "forward.read",
    "forward.after",
    "trim.synced",
    "trim.inside",
    "mark.inside",
)
"""The points at which the two stores differ most in their durable commits; the long mode takes all."""


# --- in a child ---------------------------------------------------------------------------------


def _keep_images() -> None:
    """From here on each sync of a "process" store leaves its file as a power cut would find it."""
    real = Store.sync

    def sync(self: Store) -> None:
        real(self)
        keep(self)

    Store.sync = sync  # type: ignore[method-assign]


def keep(store: Store) -> None:
    shutil.copyfile(Path(store.path, "data.mdb"), Path(store.path, "image"))


def crash(name: str, path: str, point: str, hit: int, break_it: str = "") -> None:
    """Die at a crash point; images are kept from the state on that the store was closed in."""
    BREAKS[break_it]()
    with Stores(find(name), path) as stores:
        keep(stores.home)
        assert stores.abroad is not None
        keep(stores.abroad)
    _keep_images()
    with testing.crash(point, hit):
        scenarios.drive(name, path)


def crash_cut_and_finish(
    name: str, made: str, cases: list[tuple[str, int]], cut: tuple[str, ...], break_it: str = ""
) -> list[dict[str, Any]]:
    """For each case: die there, take stores back to their images, finish; what is there then, or the error."""
    found: list[dict[str, Any]] = []
    for number, (point, hit) in enumerate(cases):
        path = copy(made, f"case-{number}")
        died = scenarios._in_child(crash, name, path, point, hit, break_it)
        assert died == signal.SIGKILL, (point, hit)
        for where in cut:
            store = Path(path) if where == "home" else Path(path, "abroad")
            shutil.copyfile(store / "image", store / "data.mdb")
        try:
            scenarios.drive(name, path)
            found.append(scenarios.examine(name, path))
        except Diverged as error:
            found.append({"diverged": error.message})
        shutil.rmtree(path)
        Path(path + ".outside").unlink(missing_ok=True)
    return found


def _forward_without_sync() -> None:
    Forwarder.settle = lambda self: None  # type: ignore[method-assign]


def _trim_without_sync() -> None:
    real = Forwarder.trim

    def trim(self: Forwarder, one: ForkQueue, index: int) -> None:
        sync, self.other.sync = self.other.sync, lambda: None  # type: ignore[method-assign]
        try:
            real(self, one, index)
        finally:
            self.other.sync = sync  # type: ignore[method-assign]

    Forwarder.trim = trim  # type: ignore[method-assign]


BREAKS: dict[str, Callable[[], None]] = {
    "": lambda: None,
    "forward before home sync": _forward_without_sync,
    "trim before sync": _trim_without_sync,
}


# --- tests --------------------------------------------------------------------------------------


def first_middle_and_last(sites: list[tuple[str, int]]) -> list[tuple[str, int]]:
    """Of each point three hits: what was not synced there differs between points more than between hits."""
    hits: dict[str, list[int]] = {}
    for point, hit in sites:
        hits.setdefault(point, []).append(hit)
    return [(point, hit) for point, all in hits.items() for hit in sorted({all[0], all[len(all) // 2], all[-1]})]


def by_message(expected: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """The calls by their messages: what is appended after a cut of the home store has hashes of a new timeline.

    No hash names another message than it did before.
    """
    names: dict[tuple[str, str], str] = {}
    for who, what, hash in expected["told"] + found["told"]:
        assert names.setdefault((who, hash), str(what)) == str(what), f"{who}: {hash} names two messages"
    return {**found, "told": [[who, what, str(what)] for who, what, _ in found["told"]]}


def cut_everywhere(
    forks: Forks, tmp_path: Path, name: str, cut: tuple[str, ...], break_it: str = "", every_hit: bool = False
) -> tuple[Counter[str], str]:
    """The numbers of exact and of detected cases, and the error of the first other case."""
    made = template(forks, name, tmp_path)
    sites, expected = undisturbed(forks, name, made)
    if not every_hit:
        sites = [site for site in first_middle_and_last(sites) if site[0] in POINTS]
    found = forks.run("test_power:crash_cut_and_finish", name, made, sites, cut, break_it).value
    outcomes: Counter[str] = Counter()
    for site, after in zip(sites, found, strict=True):
        if "diverged" in after:
            outcomes["detected"] += 1
            continue
        try:
            wanted = expected
            if "home" in cut:
                wanted, after = by_message(expected, expected), by_message(expected, after)
            judge(find(name), wanted, after, f"{name}: {site}")
        except AssertionError as error:
            return outcomes, str(error)
        outcomes["exact"] += 1
    return outcomes, ""


def one_pairing_each() -> list[Any]:
    """Each graph with one pairing in the slow set, and so each pairing with several graphs; the long set has all."""
    names, fast = [*WRITERS, *READERS], ("stream from abroad", *PAIRINGS[0])
    found = []
    for number, name in enumerate(names):
        for at, pairing in enumerate(PAIRINGS):
            mark = pytest.mark.slow if number % len(PAIRINGS) == at else pytest.mark.long
            found.append(pytest.param(name, *pairing, marks=() if (name, *pairing) == fast else mark))
    return found


@pytest.mark.parametrize(("name", "home", "other"), one_pairing_each())
def test_taking_back_what_was_not_synced(name: str, home: str, other: str, forks: Forks, tmp_path: Path) -> None:
    take_back(name, home, other, forks, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", [*WRITERS, *READERS])
@pytest.mark.parametrize(("home", "other"), PAIRINGS)
def test_taking_back_at_every_hit(name: str, home: str, other: str, forks: Forks, tmp_path: Path) -> None:
    take_back(name, home, other, forks, tmp_path, every_hit=True)


def take_back(name: str, home: str, other: str, forks: Forks, tmp_path: Path, every_hit: bool = False) -> None:
    for cut in cuts(home, other):
        paired = f"{name} ({home}, {other})"
        outcomes, wrong = cut_everywhere(forks, tmp_path / "-".join(cut), paired, cut, every_hit=every_hit)
        assert not wrong, f"{cut}: {wrong}"
        if name in WRITERS or cut == ("home",):
            assert set(outcomes) == {"exact"}, f"{cut}: {outcomes}"
        elif name == "stream from abroad":  # only its sender can send its messages again
            assert outcomes["detected"], f"{cut}: {outcomes}"


def cuts(home: str, other: str) -> list[tuple[str, ...]]:
    """The stores that a power cut can take back: only unsynced commits are lost."""
    found: list[tuple[str, ...]] = []
    if home == "process":
        found.append(("home",))
    if other == "process":
        found.append(("abroad",))
    if home == other == "process":
        found.append(("home", "abroad"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("break_it", "name", "cut"),
    [
        ("forward before home sync", "alts to abroad (process, disk)", ("home",)),
        ("trim before sync", "stream abroad (disk, process)", ("abroad",)),
    ],
)
def test_negative_control(break_it: str, name: str, cut: tuple[str, ...], forks: Forks, tmp_path: Path) -> None:
    """Without the sync the same judge finds messages lost or doubled, or the start refuses to continue."""
    outcomes, wrong = cut_everywhere(forks, tmp_path, name, cut, break_it)
    assert wrong or outcomes["detected"], outcomes
