"""``cues init``: the project that it makes runs, and its tests pass as they are; files that exist are not touched."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import cues, environment

from cues.cli import init as module
from cues.cli.init import FILES, project_name, write


@pytest.mark.slow
def test_the_project_runs_and_its_own_tests_pass(tmp_path: Path) -> None:
    made = cues("init", "My orders", "--json", cwd=tmp_path)
    assert made.code == 0, made.err
    assert json.loads(made.out)["name"] == "my-orders"
    project = tmp_path / "My orders"
    assert sorted(path.name for path in project.iterdir()) == sorted(FILES)
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "cues.testing_plugin", "-p", "no:cacheprovider", "-W", "error"],
        cwd=project,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert tested.returncode == 0 and "5 passed" in tested.stdout, tested.stdout + tested.stderr
    ran = cues("run", "graph.py", "--json", cwd=project)
    assert ran.code == 0, ran.err
    assert json.loads(ran.out.splitlines()[-1])["queues"]["sums"]["messages"] == 6
    sums = [json.loads(line) for line in cues("tail", "graph.py#sums", cwd=project).out.splitlines()]
    assert {line["customer"]: line["sum"] for line in sums} == {"ada": 5740, "grace": 4399, "edsger": 1500}
    assert (project / "data" / "my-orders").is_dir()


@pytest.mark.parametrize("file", FILES)
def test_a_directory_with_one_of_the_files_is_refused_and_nothing_is_written(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text("mine")
    refused = cues("init", tmp_path)
    assert refused.code == 1 and "Try: " in refused.err
    assert f"has {file}; nothing was written" in refused.err
    assert [path.name for path in tmp_path.iterdir()] == [file]
    assert (tmp_path / file).read_text() == "mine"


def test_other_files_do_not_matter_and_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    made = cues("init", "--table", cwd=tmp_path)
    assert made.code == 0 and "Next: cues run graph.py" in made.out
    refused = cues("init", tmp_path / "notes.txt")
    assert refused.code == 1 and "is a file" in refused.err


def test_an_error_leaves_none_of_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process makes the last file between the check and the writing."""
    monkeypatch.setattr(module, "FILES", {**FILES, "last": "x"})
    (tmp_path / "last").write_text("mine")
    with pytest.raises(FileExistsError):
        write(tmp_path, "x")
    assert [path.name for path in tmp_path.iterdir()] == ["last"] and (tmp_path / "last").read_text() == "mine"


@pytest.mark.parametrize(("folder", "name"), [("My orders", "my-orders"), ("日本", "pipeline"), ("-a_b.2-", "a-b-2")])
def test_the_name_of_a_project(folder: str, name: str) -> None:
    assert project_name(Path(folder)) == name
