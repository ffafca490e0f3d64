"""Make a release: ``python .ci/release.py 0.1.0 --dry-run``, then without ``--dry-run``.

    1  check      branch main without changes, the version of pyproject.toml, an open entry in CHANGELOG.md, no such tag
    2  date       the entry gets the date of today, in a commit
    3  build      the files in dist/, from what git has
    4  try        the wheel in an environment of its own: ``cues --version``
    5  tag        v0.1.0

A dry run checks, and prints the commands. If 3 or 4 fails, ``git reset --hard HEAD~1`` takes 2 back. A person pushes
the tag and uploads the files; the last line says how.
"""

from __future__ import annotations

import argparse
import datetime
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path


def git(root: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()


def problems(root: Path, version: str) -> list[str]:
    """Return what must be put right before the release, one sentence each."""
    found = []
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        found.append(f"{version!r} is not a version. Try: MAJOR.MINOR.PATCH, such as 0.1.0.")
    declared = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    if declared != version:
        found.append(f"pyproject.toml has version {declared}, not {version}. Try: change it, and commit.")
    if heading(version) not in (root / "CHANGELOG.md").read_text(encoding="utf-8").splitlines():
        found.append(f"CHANGELOG.md has no line {heading(version)!r}. Try: add it, with a line for each change.")
    if git(root, "branch", "--show-current") != "main":
        found.append("The branch is not main. Try: git switch main.")
    if git(root, "status", "--porcelain"):
        found.append("There are changes that are not committed. Try: git status.")
    if git(root, "tag", "--list", f"v{version}"):
        found.append(f"The tag v{version} exists. Try: raise the version.")
    return found


def heading(version: str) -> str:
    return f"## {version} (unreleased)"


def commands(version: str) -> list[list[str]]:
    """Return the commands after the checks, in order."""
    python, tried = sys.executable, "build/release"
    return [
        ["git", "commit", "-q", "-m", f"Release {version}", "CHANGELOG.md"],
        [python, "-m", "build", "--outdir", "dist", "."],
        [python, "-m", "venv", "--clear", tried],
        [f"{tried}/bin/pip", "install", "-q", f"dist/cues_streams-{version}-py3-none-any.whl"],
        [f"{tried}/bin/cues", "--version"],
        ["git", "tag", "-a", f"v{version}", "-m", f"Release {version}"],
    ]


def main(arguments: list[str], root: Path) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version")
    parser.add_argument("--dry-run", action="store_true", help="check, and print the commands")
    given = parser.parse_args(arguments)
    version = given.version
    found = problems(root, version)
    for problem in found:
        print(problem, file=sys.stderr)
    today = datetime.date.today().isoformat()
    if not given.dry_run and not found:
        page = root / "CHANGELOG.md"
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace(heading(version), f"## {version} ({today})", 1), encoding="utf-8")
    print(f"CHANGELOG.md: {heading(version)} → ## {version} ({today})")
    for command in commands(version):
        print(shlex.join(command), flush=True)
        if not given.dry_run and not found:
            subprocess.run(command, cwd=root, check=True)
    print(f"Then, by hand: git push origin main v{version}; and upload dist/*{version}* to the package index.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).resolve().parent.parent))
