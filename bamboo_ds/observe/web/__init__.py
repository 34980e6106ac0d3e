"""The web page of a job, from its parts: one self-contained HTML file, without a build step."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent
#: Parts of the script, in the order in which they stand in the page.
SCRIPTS = ("base", "view", "grid", "members", "charts", "losses", "lists", "link")


def page(nonce: str) -> str:
    """The page, whose style and script carry ``nonce`` for a Content-Security-Policy."""
    return _whole().replace("{{nonce}}", nonce)


@cache
def _whole() -> str:
    script = "\n".join((_FOLDER / f"{name}.js").read_text() for name in SCRIPTS)
    text = (_FOLDER / "page.html").read_text().replace("{{style}}", f"\n{(_FOLDER / 'page.css').read_text()}")
    return text.replace("{{script}}", f'\n"use strict";\n\n{script}')
