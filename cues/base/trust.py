"""Owners of files: settings that are found by their place count only if no other user can have put them there.

A store that other users may write is opened with a warning.

A file is trusted if it and its directory belong to this user or to root, and no other user may write to either. A
sticky directory (/tmp) is not trusted: others cannot replace a file there, but make one first. A group may write if it
is the user's private group, which has the user's name. A link is trusted if it and what it points to are, each link on
the way too: the owner of a link, or of its directory, chooses the file.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

VARIABLE: Final = "CUES_TRUST"
"""Directories, separated by colons, whose files are trusted whoever owns them: mounts of a container, for example."""


def is_own(path: Path) -> bool:
    """Return whether a file or a link belongs to this user or to root."""
    return path.lstat().st_uid in (0, os.geteuid())


def problem(path: Path) -> str | None:
    """Return why a file is not trusted, as a clause for a sentence; None if it is. It must be there."""
    if any(path.parent == Path(named) for named in os.environ.get(VARIABLE, "").split(os.pathsep) if named):
        return None
    for place in dict.fromkeys(_places(path)):
        found = place.lstat()
        if not is_own(place):
            return f"{place} belongs to {_user(found.st_uid)}"
        if stat.S_ISLNK(found.st_mode):
            continue  # a link has no rights of its own
        if found.st_mode & stat.S_IWOTH:
            return f"anybody may write to {place}"
        if found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid):
            return f"the group {_group(found.st_gid)} may write to {place}"
    return None


def _places(path: Path) -> Iterator[Path]:
    """Yield a file, the links on the way to it, and the directories that these are in."""
    while True:
        directory = path.parent.resolve()
        yield from (path, directory / path.name, path.parent, directory)
        if not path.is_symlink():
            return
        path = directory / os.readlink(path)


def _is_private(group: int) -> bool:
    """Return whether it is the group of this user alone, which has the same name by custom."""
    return group == 0 or _group(group) == _user(os.geteuid())


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"the user {number}"


def _group(number: int) -> str:
    try:
        return grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
