"""Build the wheel and the source archive of the last commit: ``python .ci/build.py FOLDER``.

The same commit gives the same bytes: in every directory, at any time, under any umask and for any user. It needs the
versions of ``.ci/requirements.txt``, because the backend writes its own version into a wheel.

    1  tree       the files of the commit, without what is only in the directory of the checkout
    2  build      the time of every file is that of the commit (SOURCE_DATE_EPOCH); the umask is fixed
    3  archive    setuptools keeps times, users and an order of its own in a source archive: it is packed anew

With CUES_COMPILE=1 the core in the wheel is machine code. Then the C compiler belongs to what must be the same.
"""

from __future__ import annotations

import gzip
import importlib.util
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build(root: Path, folder: Path, *kinds: str) -> list[Path]:
    """Build what ``kinds`` names (``"wheel"``, ``"sdist"``; both by default) of the last commit into a folder."""
    epoch = int(git(root, "log", "-1", "--format=%ct"))
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        tree, made = Path(scratch, "tree"), Path(scratch, "made")
        with tarfile.open(fileobj=io.BytesIO(git(root, "archive", "HEAD"))) as archive:
            archive.extractall(tree, filter="tar")
        for path in tree.rglob("*"):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        command = [
            sys.executable,
            "-m",
            "build",
            "--no-isolation",
            *(f"--{kind}" for kind in kinds or ("wheel", "sdist")),
        ]
        environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0", "LC_ALL": "C"}
        # The C of mypyc has the paths of its headers, in the texts of assertions. Each environment has its own.
        mypyc = importlib.util.find_spec("mypyc")
        places = [scratch, *(str(Path(place).parent) for place in (mypyc and mypyc.submodule_search_locations) or ())]
        flags = [os.environ.get("CFLAGS", ""), *(f"-ffile-prefix-map={place}=." for place in places)]
        environment["CFLAGS"] = " ".join(filter(None, flags))
        done = subprocess.run(
            [*command, "--outdir", made, tree], env=environment, umask=0o022, capture_output=True, text=True
        )
        if done.returncode:
            raise SystemExit(f"The build failed.\n{done.stdout}{done.stderr}Try: .ci/locked, and then this again.")
        files = []
        for path in sorted(made.iterdir()):
            data = path.read_bytes()
            files.append(folder / path.name)
            files[-1].write_bytes(repacked(data, epoch) if path.name.endswith(".tar.gz") else data)
    return files


def git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=True).stdout


def repacked(data: bytes, epoch: int) -> bytes:
    """Return a source archive with its files in order of their names, of one time and of no user."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(data)) as old,
        gzip.GzipFile("", "wb", fileobj=packed, mtime=epoch) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    return packed.getvalue()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("Usage: python .ci/build.py FOLDER")
    for made in build(ROOT, Path(sys.argv[1])):
        print(made)
