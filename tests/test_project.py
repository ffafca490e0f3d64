"""The habits of the project: pinned tools, the workflow and its matrix, forms, the release script."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pages import names_of_tests

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_tools_whose_verdict_depends_on_their_version_are_pinned_to_one() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    needed = [line.partition(";")[0].strip() for line in (*extras["test"], *extras["dev"])]
    pinned = dict(line.split("==") for line in needed if "==" in line)
    assert {"ruff", "mypy", "pytest", "pytest-timeout", "pytest-xdist", "pre-commit", "build"} <= pinned.keys()
    assert f"mypy=={pinned['mypy']}" in PROJECT["tool"]["cues"]["compile"]["requires"]
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    assert re.findall(r"repo: (.*)", hooks) == ["local"]  # no second list of versions
    assert all(f"entry: .venv/bin/{tool}" in hooks for tool in ("ruff check", "ruff format", "mypy"))


def test_the_workflow_runs_the_test_line_of_the_readme_on_each_python_and_system() -> None:
    yaml = pytest.importorskip("yaml")
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())["jobs"]
    classifiers = PROJECT["project"]["classifiers"]
    pythons = [found[1] for line in classifiers if (found := re.fullmatch(r".* :: (3\.\d+)", line))]
    assert jobs["fast"]["strategy"]["matrix"] == {"os": ["ubuntu-latest", "macos-latest"], "python": pythons}
    assert PROJECT["project"]["requires-python"] == f">={pythons[0]}"
    line = jobs["fast"]["steps"][-1]["run"]
    assert f"```sh\n{line}\n```" in (ROOT / "README.md").read_text()
    before = [step.get("run", "") for step in jobs["fast"]["steps"][:-1]]
    assert ".ci/locked" in before[-1] and "PIP_NO_INDEX=1" in before[-1], "the lock is installed before that line"
    assert not any("pip install" in each for each in before)
    assert jobs["all"]["steps"][-1]["run"] == ".ci/run"


@pytest.mark.parametrize("form", ["bug", "feature"])
def test_a_form_asks_at_least_one_thing_that_must_be_answered(form: str) -> None:
    yaml = pytest.importorskip("yaml")
    read = yaml.safe_load((ROOT / ".github" / "ISSUE_TEMPLATE" / f"{form}.yml").read_text())
    assert read["name"] and read["description"]
    assert any(field.get("validations", {}).get("required") for field in read["body"])


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"])
def test_files_that_a_page_names_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    named = re.findall(r"`((?:[\w.-]+/)+[\w.-]*)`", text) + re.findall(r"\]\(([^)#:]+)\)", text)
    kept = {name for name in named if not name.startswith(".venv/") and "NAME" not in name}
    for name in kept:
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", ["SECURITY.md", "docs/proof.md"])
def test_each_test_that_a_page_names_is_there(page: str) -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / page).read_text()))
    assert len(named) > 20 and named <= names_of_tests(), named - names_of_tests()


# --- the lock of CI -----------------------------------------------------------------------------------

LOCK = (ROOT / ".ci" / "requirements.txt").read_text()


def locked() -> dict[str, tuple[str, list[str]]]:
    """The version and the hashes of each package of the lock."""
    entries = re.findall(r"^([\w.-]+)==([^\s;]+)[^\\\n]*\\\n((?:    --hash=\S+(?: \\)?\n)+)", LOCK, re.M)
    return {
        canonicalize_name(name): (version, re.findall(r"--hash=sha256:([0-9a-f]{64})\b", hashes))
        for name, version, hashes in entries
    }


def wanted(extra: str) -> list[Requirement]:
    """The requirements of the distribution and of an extra, those of the extras that it names included."""
    found = []
    for line in PROJECT["project"]["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name == PROJECT["project"]["name"]:
            found += [each for name in requirement.extras for each in wanted(name)]
        else:
            found.append(requirement)
    return found


def test_the_lock_has_each_dependency_of_the_tests_with_hashes_and_in_its_range() -> None:
    """Also that of the build backend and of the compiled core, because what builds a package runs as the user."""
    build = [*PROJECT["build-system"]["requires"], *PROJECT["tool"]["cues"]["compile"]["requires"]]
    named = [*map(Requirement, [*PROJECT["project"]["dependencies"], *build]), *wanted("test")]
    assert len(named) > 60
    found = locked()
    for requirement in named:
        name = canonicalize_name(requirement.name)
        assert name in found, f"The lock has no {name}. Try: pip install uv, and the command in the head of the lock."
        version, hashes = found[name]
        assert requirement.specifier.contains(version, prereleases=True), f"{requirement} and not {version}"
        assert hashes, requirement.name


def test_each_line_of_the_lock_is_a_version_or_a_hash() -> None:
    """So it names no index, no file and no option; and each package has a hash."""
    lines = [line for line in LOCK.splitlines() if not line.startswith("#")]
    form = re.compile(r"[\w.-]+==\S+( ; [^\\]+)? \\|    --hash=sha256:[0-9a-f]{64}( \\)?")
    assert [line for line in lines if not form.fullmatch(line)] == []
    assert len(locked()) == sum("==" in line and not line.startswith(" ") for line in lines)
    assert all(hashes for _, hashes in locked().values())


@pytest.mark.skipif("PIP_NO_INDEX" not in os.environ, reason="only .ci/run installs the lock")
def test_the_tests_run_on_the_versions_of_the_lock() -> None:
    """The lock is installed first; the line of the README must not have changed a version after that."""
    installed = {canonicalize_name(each.name): each.version for each in metadata.distributions()}
    here = {name: version for name, (version, _) in locked().items() if name in installed}
    assert len(here) > 180
    assert {name: installed[name] for name in here} == here


def test_ci_installs_the_lock_before_the_test_line_which_then_asks_no_index() -> None:
    run = (ROOT / ".ci" / "run").read_text()
    first, then = run.index(".ci/locked"), run.index("pip install -e '.[test]'")
    assert first < run.index("PIP_NO_INDEX=1") < then
    steps = (ROOT / ".ci" / "locked").read_text().splitlines()
    pips = [line for line in steps if line.startswith(".venv/bin/pip ")]
    assert len(pips) == 3 and all("--require-hashes" in line for line in pips)


# --- the release script -----------------------------------------------------------------------------


def script(name: str) -> ModuleType:
    """A script of .ci as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def release() -> ModuleType:
    return script("release")


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository that is ready for the release 0.1.0."""
    for name in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{name}_NAME", "somebody")
        monkeypatch.setenv(f"GIT_{name}_EMAIL", "somebody@localhost")
    (tmp_path / "pyproject.toml").write_text('[project]\nversion = "0.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 0.1.0 (unreleased)\n")
    (tmp_path / ".gitignore").write_text("build/\n")
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "requirements.txt").write_text(f"setuptools=={metadata.version('setuptools')} \\\n")
    for line in ("init -q -b main", "add .", "commit -q -m begin"):
        subprocess.run(["git", *line.split()], cwd=tmp_path, check=True)
    return tmp_path


def test_a_dry_run_prints_the_commands_and_changes_nothing(
    release: ModuleType, tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = release.git(tree, "rev-parse", "HEAD")
    assert release.main(["0.1.0", "--dry-run"], tree) == 0
    printed = capsys.readouterr()
    assert printed.err == "" and "git tag -a v0.1.0" in printed.out
    order = [printed.out.index(each) for each in ("pip_audit --strict", "git commit", "build.py", "sbom.py", "git tag")]
    assert order == sorted(order)
    assert release.git(tree, "rev-parse", "HEAD") == before
    assert release.git(tree, "status", "--porcelain") == "" and release.git(tree, "tag") == ""


def test_a_release_dates_the_changelog_and_tags_after_the_build(
    release: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the commands of git are run here: the build needs an index."""
    every = release.commands("0.1.0")
    monkeypatch.setattr(release, "commands", lambda version: [line for line in every if line[0] == "git"])
    monkeypatch.setattr(release, "AUDIT", ["git", "--version"])
    assert [line[:2] for line in every if line[0] == "git"] == [["git", "commit"], ["git", "tag"]]
    assert every[-1][1] == "tag"
    assert release.main(["0.1.0"], tree) == 0
    assert re.search(r"^## 0\.1\.0 \(\d{4}-\d\d-\d\d\)$", (tree / "CHANGELOG.md").read_text(), re.M)
    assert release.git(tree, "tag") == "v0.1.0" and release.git(tree, "status", "--porcelain") == ""
    assert release.git(tree, "log", "-1", "--format=%s") == "Release 0.1.0"


def test_an_audit_that_finds_something_or_reaches_no_database_ends_the_release(
    release: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(release, "AUDIT", ["git", "no-such-command"])
    before = release.git(tree, "rev-parse", "HEAD")
    assert release.main(["0.1.0"], tree) == 1
    assert "The audit did not pass" in capsys.readouterr().err
    assert release.git(tree, "rev-parse", "HEAD") == before and release.git(tree, "status", "--porcelain") == ""


def test_each_reason_against_a_release_is_named_and_nothing_is_done(
    release: ModuleType, tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    subprocess.run(["git", "tag", "v0.2"], cwd=tree, check=True)
    subprocess.run(["git", "switch", "-q", "-c", "other"], cwd=tree, check=True)
    (tree / "new").touch()
    monkeypatch.setattr(metadata, "version", lambda name: "1.0")
    assert release.main(["0.2"], tree) == 1
    reasons = capsys.readouterr().err.splitlines()
    assert len(reasons) == 7 and all(". Try: " in reason for reason in reasons)
    assert release.git(tree, "tag") == "v0.2"


# --- the same files for everybody -----------------------------------------------------------------------


def built(folder: Path, umask: int, zone: str, monkeypatch: pytest.MonkeyPatch, *kinds: str) -> dict[str, bytes]:
    """The files that the last commit is built into, from a clone in this folder."""
    monkeypatch.setenv("TZ", zone)
    before = os.umask(umask)
    try:
        subprocess.run(["git", "clone", "-q", ROOT, folder / "clone"], check=True)
        (folder / "clone" / "new.py").touch()  # in no commit, so in no wheel
        return {
            path.name: path.read_bytes() for path in script("build").build(folder / "clone", folder / "out", *kinds)
        }
    finally:
        os.umask(before)


@pytest.mark.slow
def test_a_wheel_and_a_source_archive_are_built_twice_with_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In other directories, some seconds apart, with another umask and in another zone."""
    first = built(tmp_path / "a", 0o022, "UTC", monkeypatch)
    second = built(tmp_path / "another", 0o077, "Asia/Tokyo", monkeypatch)
    assert len(first) == 2 and first == second
    for name, data in first.items():
        if name.endswith(".whl"):
            with zipfile.ZipFile(io.BytesIO(data)) as wheel:
                assert len({info.date_time for info in wheel.infolist()}) == 1
                assert {info.external_attr >> 16 & 0o777 for info in wheel.infolist()} <= {0o644, 0o755, 0o664}
                assert "cues/processors/link.py" in wheel.namelist() and "new.py" not in wheel.namelist()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_compiled_wheel_is_built_twice_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler")
    monkeypatch.setenv("CUES_COMPILE", "1")
    monkeypatch.setenv("CUES_COMPILE_OPT", "0")
    first = built(tmp_path / "a", 0o022, "UTC", monkeypatch, "wheel")
    second = built(tmp_path / "another", 0o077, "Asia/Tokyo", monkeypatch, "wheel")
    assert first.keys() == second.keys()
    parts = [zipfile.ZipFile(io.BytesIO(next(iter(each.values())))) for each in (first, second)]
    assert [name for name in parts[0].namelist() if parts[0].read(name) != parts[1].read(name)] == []
    assert first == second


@pytest.mark.slow
def test_the_list_of_parts_is_valid_and_names_what_the_wheel_needs_twice_with_the_same_bytes(tmp_path: Path) -> None:
    """The environment has the metadata of the real packages; a list of parts reads nothing else."""
    validation = pytest.importorskip("cyclonedx.validation.json")
    schema = pytest.importorskip("cyclonedx.schema")
    needed = {Requirement(line).name for line in PROJECT["project"]["dependencies"]}
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    for name in (*needed, PROJECT["project"]["name"]):
        packages = Path(str(metadata.distribution(name).locate_file("")))
        (found,) = packages.glob(f"{name.replace('-', '_')}-*.dist-info")
        shutil.copytree(found, site / found.name)
    texts = []
    for folder in ("a", "another"):
        wheel = tmp_path / folder / "cues_streams-0.1.0-py3-none-any.whl"
        wheel.parent.mkdir()
        wheel.write_bytes(b"a wheel")
        texts.append(script("sbom").sbom(wheel, tmp_path / "venv" / "bin" / "python").read_text())
    assert texts[0] == texts[1] and str(tmp_path) not in texts[0]
    checked = validation.JsonStrictValidator(schema.SchemaVersion.V1_6)
    assert checked.validate_str(texts[0]) is None
    listed = json.loads(texts[0])
    assert {part["name"]: part["version"] for part in listed["components"]} == {n: metadata.version(n) for n in needed}
    root = listed["metadata"]["component"]
    assert root["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(b"a wheel").hexdigest()}]
    assert checked.validate_str(texts[0].replace('"SHA-256"', '"SHA-257"')) is not None
