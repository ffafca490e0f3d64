"""Builds the core as machine code when CUES_COMPILE is set: ``CUES_COMPILE=1 pip wheel --no-deps -w dist .``

See docs/how-to/compiled.md. What is compiled, and with what, is in pyproject.toml under ``[tool.cues.compile]``.
"""

from __future__ import annotations

import os
import sys
import tomllib
from pathlib import Path
from typing import Any

from setuptools import setup

HERE = Path(__file__).resolve().parent
COMPILE = os.environ.get("CUES_COMPILE", "") not in ("", "0")
PROJECT = tomllib.loads((HERE / "pyproject.toml").read_text(encoding="utf-8"))
SETTINGS: dict[str, Any] = PROJECT["tool"]["cues"]["compile"]


def extensions() -> list[Any]:
    """The modules of the core, compiled by mypyc from the sources that run without it; [] where nothing is built.

    The calls that ask for requirements and metadata build nothing, and an editable installation stays pure Python.
    """
    if not (COMPILE and {"bdist_wheel", "build_ext"} & set(sys.argv)):
        return []
    from mypyc.build import mypycify

    left_out = {HERE / name for name in SETTINGS["pure"]}
    sources = [source for pattern in SETTINGS["modules"] for source in sorted(HERE.glob(pattern))]
    return list(
        mypycify(
            [*SETTINGS["options"], *[str(path.relative_to(HERE)) for path in sources if path not in left_out]],
            opt_level=os.environ.get("CUES_COMPILE_OPT", "3"),
            debug_level="0",
            group_name="cues_core",
            multi_file=True,  # in one file, the C compiler takes five times as long
        )
    )


setup(ext_modules=extensions(), setup_requires=SETTINGS["requires"] if COMPILE else [])
