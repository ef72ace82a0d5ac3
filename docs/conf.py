# SPDX-License-Identifier: Apache-2.0
"""How Sphinx builds the documentation site from the Markdown in this folder; scripts/docs runs it."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

from ttft_otel import __version__

project = "ttft-otel"
author = "The ttft-otel authors"
copyright = f"{author}, Apache-2.0"
version = release = __version__

extensions = ["myst_parser"]
myst_heading_anchors = 4
exclude_patterns = ["img"]
nitpicky = True

# Nothing is loaded from elsewhere: the site can be read without a network.
html_theme = "furo"
html_title = f"ttft-otel {version}"
html_show_sourcelink = False

FOLDER = Path(__file__).parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\.[^)\s#]*)(?:#[^)\s]*)?\)")


def remove_repository_links(app: Sphinx, page: str, source: list[str]) -> None:
    """Keep only the text of links to files outside this folder: the site does not hold them.

    page: name of the page that is read, below this folder. source: its text, as the one element.
    """

    def replace_link(found: re.Match[str]) -> str:
        target = (FOLDER / page).parent.joinpath(found[2]).resolve()
        return found[0] if target.is_relative_to(FOLDER) else found[1]

    source[0] = LINK.sub(replace_link, source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx once, before it reads the pages."""
    app.connect("source-read", remove_repository_links)
