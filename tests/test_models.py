"""Models of the protocols, checked by spin; counter-examples of models without a protection, replayed on the code.

A model is a file in tests/models. spin makes a program of it, which visits every state that its processes can reach.
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from mutants import ROOT

SPIN, CC = shutil.which("spin"), shutil.which("gcc")
pytestmark = pytest.mark.skipif(
    SPIN is None or CC is None, reason="spin or gcc is not on this machine: apt-get install spin gcc"
)

STATES = {"delivery": 3_801, "ownership": 733, "handover": 84_264, "forwarding": 157_946, "shared": 5_394}
"""The models, and the number of states of each. docs/proof.md has these numbers too."""


class Variant(NamedTuple):
    """A model without one protection, and the property that must fail then."""

    model: str
    without: str
    fails: str
    protection: str = ""
    """The name of the protection in tests/simulation/protections.py; empty: the counter-example is not replayed."""
    fewer: str = ""
    """Options that leave out other events, so that the counter-example is about one thing."""
    refuses: bool = False
    """Whether the code refuses a commit in the replay. Else it makes another decision at its start."""

    @property
    def options(self) -> list[str]:
        return [f"-D{name}" for name in (self.without, *self.fewer.split())]


VARIANTS = [
    Variant("delivery", "NO_SNAPSHOT", "one_hash", "NO_SNAPSHOT"),
    Variant("delivery", "NO_REWIND", "one_hash", "NO_REWIND"),
    Variant("delivery", "TWO_COMMITS", "exactly_once", "TWO_COMMITS"),
    Variant("delivery", "POSITION_FIRST", "exactly_once", "POSITION_FIRST"),
    Variant("ownership", "NO_FENCE", "exactly_once", "NO_FENCE", "NO_SEEK", refuses=True),
    Variant("ownership", "CHECK_BEFORE", "exactly_once", "CHECK_BEFORE", "NO_SEEK", refuses=True),
    Variant("ownership", "ONLY_OWNER", "exactly_once", "ONLY_OWNER"),
    Variant("ownership", "SEEK_KEEPS_EPOCH", "state_of_now", "SEEK_KEEPS_EPOCH"),
    Variant("handover", "NO_FENCE", "exactly_once", "NO_FENCE of a group", "NO_SEEK NO_REPEAT", refuses=True),
    Variant("handover", "ONLY_OWNER", "exactly_once", "ONLY_OWNER of a group", "NO_REPEAT", refuses=True),
    Variant("handover", "ONLY_EPOCH", "exactly_once", fewer="NO_SEEK"),
    Variant("handover", "CLAIMS_ANYHOW", "held"),
    Variant("forwarding", "NO_ROW", "exactly_once", "NO_ROW", "CUTS=0", refuses=True),
    Variant("forwarding", "ROW_LATER", "exactly_once", fewer="CUTS=0"),
    Variant("forwarding", "NO_SYNC_HOME", "continues"),
    Variant("forwarding", "NO_SYNC_OTHER", "continues"),
    Variant("shared", "PUT_OVERWRITES", "exactly_once", "PUT_OVERWRITES", refuses=True),
    Variant("shared", "CLAIM_FORWARDS_NOTHING", "exactly_once", "CLAIM_FORWARDS_NOTHING", refuses=True),
    Variant("shared", "NO_LATER_LOOK", "exactly_once", "NO_LATER_LOOK", refuses=True),
    Variant("shared", "LOG_OVERWRITES", "exactly_once"),
]
REPLAYED = [variant for variant in VARIANTS if variant.protection]


class Checked(NamedTuple):
    """The result of a check: the number of states, and the lines of the counter-example, if there is one."""

    states: int
    trail: tuple[str, ...]


@functools.cache
def check(place: Path, model: str, *options: str) -> Checked:
    """Visit all states of a model by breadth, so that a counter-example is a shortest one."""
    here = place / "-".join((model, *options))
    here.mkdir()
    name = f"{model}.pml"
    shutil.copy(ROOT / "tests" / "models" / name, here)

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=here, capture_output=True, text=True)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
        return done.stdout

    run(str(SPIN), *options, "-a", name)
    run(str(CC), "-w", "-DBFS", "-DSAFETY", "-DNOFAIR", "-o", "pan", "pan.c")
    output = run("./pan", "-m100000", "-w20")
    states = re.search(r"([0-9]+) states, stored", output)
    errors = re.search(r"errors: (\d+)", output)
    assert states is not None and errors is not None, output
    trail: list[str] = []
    if errors[1] == "0":
        assert "Search not completed" not in output and "max search depth too small" not in output, output
    else:
        assert "invalid end state (" not in output, output  # a mistake of the model: a process waits for ever
        done = subprocess.run([str(SPIN), *options, "-t", "-T", "-B", name], cwd=here, capture_output=True, text=True)
        trail = [line.strip() for line in done.stdout.splitlines() if line and not line.startswith("spin:")]
    return Checked(int(states[1]), tuple(trail))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.slow
@pytest.mark.parametrize("model", STATES)
def test_no_state_of_a_model_breaks_a_property(place: Path, model: str) -> None:
    found = check(place, model)
    print(f"{model}: {found.states:,} states")
    assert found == Checked(STATES[model], ())


def test_the_page_about_proof_has_the_states() -> None:
    page = (ROOT / "docs" / "proof.md").read_text()
    for model, states in STATES.items():
        assert re.search(rf"`{model}\.pml`.*\| {states:,} \|", page), model
    assert f"{sum(STATES.values()):,} states" in page
    assert f"{len(VARIANTS)} variants" in page and f"{len(REPLAYED)} of them are replayed" in page


def test_every_model_and_variant_is_in_the_table() -> None:
    texts = {path.stem: path.read_text() for path in (ROOT / "tests" / "models").glob("*.pml")}
    assert set(texts) == set(STATES)
    switches = {(model, name) for model, text in texts.items() for name in re.findall(r"#ifn?def ([A-Z_]+)", text)}
    used = {(variant.model, variant.without) for variant in VARIANTS}
    fewer = {(variant.model, name.partition("=")[0]) for variant in VARIANTS for name in variant.fewer.split()}
    assert switches == used | fewer


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"{variant.model}-{variant.without}")
def test_a_model_without_a_protection_has_a_counter_example(place: Path, variant: Variant) -> None:
    found = check(place, variant.model, *variant.options)
    assert f"FAILS {variant.fails}" in found.trail, found.trail


@pytest.mark.interpreted
@pytest.mark.slow
def test_counter_examples_replayed_on_the_code(place: Path) -> None:
    """The code makes the results of an undisturbed run; without the same protection it fails as the model does.

    Without ``NO_LATER_LOOK`` a second protection stops a driver before it doubles a message: it finds other messages at
    the indices that its record has committed (Diverged), and the graph cannot be started any more.
    """
    pytest.importorskip("pyspark", reason="pyspark is not installed (pip install 'cues-streams[test]')")
    trails = [(v.model, v.protection, check(place, v.model, *v.options).trail) for v in REPLAYED]
    command = [sys.executable, "-m", "tests.simulation.replays"]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(trails), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    for variant, (_, _, trail), result in zip(REPLAYED, trails, json.loads(done.stdout), strict=True):
        told = f"{variant.model} {variant.without}: {trail} {result}"
        assert not result["as it is"]["problems"], told
        assert bool(result["as it is"]["refused"]) >= variant.refuses, told
        failures = (f"{variant.fails}: ", "Diverged: ")
        assert any(problem.startswith(failures) for problem in result["without"]["problems"]), told
