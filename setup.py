"""Builds the core as machine code when CUES_COMPILE is set: ``CUES_COMPILE=1 pip wheel --no-deps -w dist .``"""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from setuptools import setup


def extensions() -> list[object]:
    """The modules that pyproject.toml names, compiled by mypyc from the sources that run without it."""
    if os.environ.get("CUES_COMPILE", "") in ("", "0"):
        return []
    from mypyc.build import mypycify  # in pyproject.toml's list of what a compiled wheel is built with

    here = Path(__file__).resolve().parent
    settings = tomllib.loads((here / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["cues"]["compile"]
    sources = [source for pattern in settings["modules"] for source in sorted(here.glob(pattern))]
    left_out = {here / name for name in settings["pure"]}
    return mypycify(
        [*settings["options"], *[str(path.relative_to(here)) for path in sources if path not in left_out]],
        opt_level="3",
        debug_level="1",
        group_name="cues_core",
        multi_file=True,
    )


setup(ext_modules=extensions())
