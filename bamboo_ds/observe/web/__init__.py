"""The web page of a job, from its parts: one self-contained HTML file, without a build step."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

#: Parts of the script, in the order in which they stand in the page.
SCRIPTS = ("base", "view", "grid", "members", "chosen", "charts", "losses", "lists", "link")


@cache
def page() -> str:
    """The page. ``{{nonce}}`` stands for what its style and its script carry for a Content-Security-Policy."""
    folder = files(__name__)
    style = folder.joinpath("page.css").read_text(encoding="utf-8")
    script = "\n".join(folder.joinpath(f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS)
    text = folder.joinpath("page.html").read_text(encoding="utf-8")
    return text.replace("{{style}}", f"\n{style}").replace("{{script}}", f'\n"use strict";\n\n{script}')
