"""Make a release: ``python .ci/release.py 0.1.0 --dry-run``, then without ``--dry-run``.

    1  check      branch main without changes, the version of pyproject.toml, an open entry in CHANGELOG.md, no such
                  tag, the build backend of the lock
    2  audit      the versions of the lock and the known vulnerabilities; it fails too where it reaches no database
    3  date       the entry gets the date of today, in a commit
    4  build      the files in dist/, from what git has: the same bytes for everybody (.ci/build.py)
    5  try        the wheel with the versions of the lock, in an environment of its own: ``cues --version``
    6  list       the parts of the wheel, beside it (.ci/sbom.py)
    7  tag        v0.1.0

A dry run checks, and prints the commands. If 4, 5 or 6 fails, ``git reset --hard HEAD~1`` takes 3 back. A person pushes
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
from importlib import metadata
from pathlib import Path
from typing import Final

LOCK: Final = ".ci/requirements.txt"
TRIED: Final = "build/release"


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
    backend = metadata.version("setuptools")
    if f"setuptools=={backend}" not in constraints(root):
        found.append(f"setuptools {backend} is installed, and the lock has another version. Try: .ci/locked FOLDER.")
    return found


def constraints(root: Path) -> list[str]:
    """Return the versions of the lock, without hashes: pip takes no wheel of this machine beside hashes."""
    return re.findall(r"^([\w.-]+==[^\s;]+)", (root / LOCK).read_text(encoding="utf-8"), re.M)


def heading(version: str) -> str:
    return f"## {version} (unreleased)"


def commands(version: str) -> list[list[str]]:
    """Return the commands after the checks, in order."""
    python, tried, wheel = sys.executable, f"{TRIED}/bin/python", f"dist/cues_streams-{version}-py3-none-any.whl"
    pip = [python, "-m", "pip", "--python", tried]
    return [
        ["git", "commit", "-q", "-m", f"Release {version}", "CHANGELOG.md"],
        [python, ".ci/build.py", "dist"],
        [python, "-m", "venv", "--clear", "--without-pip", TRIED],
        [*pip, "install", "-q", "-c", f"{TRIED}.txt", wheel],
        [f"{TRIED}/bin/cues", "--version"],
        [python, ".ci/sbom.py", wheel, tried],
        ["git", "tag", "-a", f"v{version}", "-m", f"Release {version}"],
    ]


AUDIT: Final = [sys.executable, "-m", "pip_audit", "--strict", "--disable-pip", "--require-hashes", "-r", LOCK]
AUDIT_FAILED: Final = (
    "The audit did not pass: the lines above name a known vulnerability, or say that the database was out of reach, and"
    " then nothing was audited. Try: take a newer version into the lock; or repeat it with a connection."
)


def main(arguments: list[str], root: Path) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("version")
    parser.add_argument("--dry-run", action="store_true", help="check, and print the commands")
    given = parser.parse_args(arguments)
    version = given.version
    found = problems(root, version)
    for problem in found:
        print(problem, file=sys.stderr)
    ready = not given.dry_run and not found

    def ran(command: list[str]) -> bool:
        print(shlex.join(command), flush=True)
        return not ready or subprocess.run(command, cwd=root).returncode == 0

    if not ran(AUDIT):
        print(AUDIT_FAILED, file=sys.stderr)
        return 1
    today = datetime.date.today().isoformat()
    if ready:
        page = root / "CHANGELOG.md"
        text = page.read_text(encoding="utf-8")
        page.write_text(text.replace(heading(version), f"## {version} ({today})", 1), encoding="utf-8")
        (root / TRIED).mkdir(parents=True, exist_ok=True)
        (root / f"{TRIED}.txt").write_text("\n".join(constraints(root)) + "\n", encoding="utf-8")
    print(f"CHANGELOG.md: {heading(version)} → ## {version} ({today})")
    for command in commands(version):
        if not ran(command):
            print(
                "This command failed. Try: git reset --hard HEAD~1, mend the reason, and begin anew.", file=sys.stderr
            )
            return 1
    print(f"Then, by hand: git push origin main v{version}; and upload dist/*{version}* to the package index.")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], Path(__file__).resolve().parent.parent))
