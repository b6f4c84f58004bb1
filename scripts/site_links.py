"""A hook of mkdocs: what a page says of the repository's other files stays, without a link.

The pages are read in the repository, too, where links lead to code. The site has the pages alone.
`tests/test_readme.py` checks that every link leads somewhere.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **rest: Any) -> str:
    """Return the page's text with links out of `docs` as plain words."""
    folder = posixpath.dirname(page.file.src_uri)

    def plain(match: re.Match[str]) -> str:
        image, words, target = match.groups()
        if "://" in target or target.startswith("#"):
            return match[0]
        inside = not posixpath.normpath(posixpath.join(folder, target)).startswith("..")
        of_site = target.partition("#")[0].endswith((".md", ".svg", ".png"))
        return match[0] if inside and of_site else words

    return _LINK.sub(plain, markdown)
