"""The web page as text: self-contained, in step with the models that it shows, readable in both colour schemes.

What it does in a browser is in ``tests/real/test_web_page.py``.
"""

from __future__ import annotations

import re
from typing import get_args

import pytest
from pydantic import BaseModel

from bamboo_ds.observe.events import MemberLost
from bamboo_ds.observe.goodput.lives import Category
from bamboo_ds.observe.view import JobState, LiveView, LossView, LostMember, MemberView, RoleState, RoleView
from bamboo_ds.observe.web import page

pytestmark = pytest.mark.claim("guides/observing.md")

PAGE = page()
STYLE = PAGE[PAGE.index("<style") : PAGE.index("</style>")]
SCRIPT = PAGE[PAGE.index("<script") : PAGE.index("</script>")]
MARKUP = PAGE.replace(STYLE, "").replace(SCRIPT, "")


def test_everything_is_in_the_file() -> None:
    """Nothing is loaded from elsewhere; ``{{nonce}}`` is all that is left to fill in, once for each element."""
    assert not re.search(r"(src|href)=\"(?!data:|#)", PAGE)
    assert set(re.findall(r"https?://[\w.]+", PAGE)) == {"http://www.w3.org"}, "the name space of SVG"
    assert re.findall(r"\{\{\w+\}\}", PAGE) == ["{{nonce}}"] * 2
    assert re.findall(r"<(?:style|script|link)[^>]*>", MARKUP + STYLE + SCRIPT)
    assert len(PAGE) < 120_000


def test_nothing_of_a_job_becomes_code_or_markup() -> None:
    """Texts become text nodes; so the page also works under a policy that knows its nonce only."""
    for forbidden in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "srcdoc"):
        assert forbidden not in SCRIPT, forbidden
    assert not re.search(r"\s(on\w+|style)=\"", MARKUP), "no policy with a nonce allows these"
    assert not re.search(r"setAttribute\(\"(style|on\w+|href|src)\"", SCRIPT)
    assert "javascript:" not in PAGE


def test_elements_that_the_script_asks_for_exist() -> None:
    ids = re.findall(r'\sid="([\w-]+)"', MARKUP)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'\$\("([\w-]+)"\)', SCRIPT)) <= set(ids)
    referred = re.findall(r'aria-labelledby="([\w-]+)"', MARKUP)
    assert referred and set(referred) <= set(ids)


def test_every_state_has_a_sign_and_words() -> None:
    """Colour is never the only sign."""
    for name, states in (("JOB", get_args(JobState)), ("ROLE", get_args(RoleState))):
        (text,) = re.findall(rf"const {name} = \{{(.*?)\n\}};", SCRIPT, re.DOTALL)
        assert {*re.findall(r"(\w+): \[", text)} == set(states)
    (text,) = re.findall(r"const HOW = \{(.*?)\n\};", SCRIPT, re.DOTALL)
    reasons = get_args(MemberLost.model_fields["reason"].annotation)
    assert {*re.findall(r"(\w+): \(\w+\) =>", text)} == set(reasons)
    (text,) = re.findall(r"const TIME = \[(.*?)\n\];", SCRIPT, re.DOTALL)
    assert {*re.findall(r'\[\s*"(\w+)"', text)} == {category.value for category in Category}


@pytest.mark.parametrize(
    ("name", "models"),
    [("view", [LiveView]), ("member", [MemberView, LostMember]), ("loss", [LossView]), ("one", [RoleView])],
)
def test_fields_that_the_script_reads_exist(name: str, models: list[type[BaseModel]]) -> None:
    read = set(re.findall(rf"(?<![\w.]){name}\.([a-z_]+)\b(?!\()", SCRIPT))
    known = {field for model in models for field in model.model_fields}
    assert len(read) >= 5 and read <= known, read - known


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """As WCAG defines it."""
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read(scheme: str) -> None:
    """WCAG's contrast for text, 4.5."""
    palettes = re.findall(r":root \{(.*?)\}", STYLE, re.DOTALL)
    colours = dict(re.findall(r"--([\w-]+): (#\w{6})", palettes[scheme == "dark"]))
    pairs = [
        (text, ground) for text in ("ink", "soft", "green", "amber", "red", "blue") for ground in ("card", "ground")
    ]
    pairs += [(tone, f"{tone}-soft") for tone in ("green", "amber", "red", "blue")] + [
        ("soft", "sunk"),
        ("ink", "sunk"),
    ]
    pairs += [("ink", "green-mid"), ("card", "red")]
    weak = [(*pair, contrast(colours[pair[0]], colours[pair[1]])) for pair in pairs]
    assert not [each for each in weak if each[2] < 4.5]
