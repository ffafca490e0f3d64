"""Hooks of mkdocs: a link to a file of the repository that is not a page becomes the name of that file."""

from __future__ import annotations

import re
from typing import Any

OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+([\w./-]+\.(?:py|md|yml|toml)|[\w/]+)(?:#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace links that leave the folder of the pages by text."""
    depth = page.file.src_path.count("/")

    def replaced(link: re.Match[str]) -> str:
        return f"{link[1]} (`{link[2]}`)" if link[0].count("../") > depth else link[0]

    return OUTSIDE.sub(replaced, markdown)
