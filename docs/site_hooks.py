"""Hooks of mkdocs: the pages of the reference, and links to files of the repository that are not pages.

The pages of the reference are made from the code (make_reference.py) when the site is built; no file has them. A link
to a file outside of docs/ becomes the name of that file.
"""

from __future__ import annotations

import re
from typing import Any

from make_reference import pages  # mkdocs loads this module with its folder on the path
from mkdocs.structure.files import File, Files

REFERENCE = {f"reference/{name}": text for name, text in pages().items()}
"""The text of each page of the reference, by its path."""

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([\w./-]+\.(?:py|md|yml|toml)|[\w/]+)(?:#[^)]*)?\)")


def on_config(config: Any, **_: Any) -> Any:
    """List the pages of the reference in the navigation."""
    section = next(entry for entry in config.nav if "Reference" in entry)
    section["Reference"] = sorted(REFERENCE, key=lambda path: not path.endswith("/index.md"))
    return config


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add the pages of the reference."""
    for path, text in REFERENCE.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links that leave the folder of the pages by text."""
    depth = page.file.src_path.count("/")

    def replaced(link: re.Match[str]) -> str:
        return f"{link[1]} (`{link[2]}`)" if link[0].count("../") > depth else link[0]

    return OUTSIDE.sub(replaced, markdown)
