"""The page's own files: that a wheel has them, and that their colours can be read."""

from __future__ import annotations

import re
import tomllib
from importlib import resources
from pathlib import Path

import pytest

from harness.report import page

ROOT = Path(__file__).parents[2]
ASSETS = resources.files("harness.report") / "assets"
CSS = (ASSETS / "page.css").read_text(encoding="utf-8")


def test_every_file_of_the_page_is_package_data_and_none_is_left_over():
    there = {each.name for each in ASSETS.iterdir()}
    templates = {name for name in there if name.endswith(".j2")}
    assert {*page.SCRIPTS, *page.STYLES} == there - templates
    assert "matrix.html.j2" in templates


def test_a_wheel_takes_the_whole_package():
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    assert ["harness"] == built["targets"]["wheel"]["packages"]
    # What git ignores hatchling leaves out.
    assert not re.search(r"assets|\.js|\.css|\.j2", (ROOT / ".gitignore").read_text())


def colours(block):
    return dict(re.findall(r"--([a-z-]+): (#[0-9a-f]{3,6});", block))


LIGHT = colours(CSS[: CSS.index("}")])
DARK = LIGHT | colours(re.findall(r':root\[data-theme="dark"\] \{(.*?)\}', CSS, re.S)[0])
CHOSEN = LIGHT | colours(re.findall(r':root:not\(\[data-theme="light"\]\) \{(.*?)\}', CSS, re.S)[0])


def luminance(colour):
    """WCAG 2's relative luminance of `#rgb` or `#rrggbb`."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


TONES = ("good", "bad", "known", "skip")
TEXTS = [
    *((text, back) for text in ("text", "soft", "link", "dim") for back in ("back", "raised")),
    *((tone, back) for tone in TONES for back in ("back", "raised")),
    *((text, f"{tone}-back") for tone in TONES for text in (tone, "text", "soft")),
]
"""Every colour that text has, and what it can stand on."""


def test_contrast_is_as_wcag_computes_it():
    assert 21 == contrast("#000", "#ffffff")
    # The grey that is known to be the lightest with 4.5 on white.
    assert 4.54 == pytest.approx(contrast("#767676", "#fff"), abs=0.01)


@pytest.mark.parametrize("theme", [LIGHT, DARK, CHOSEN], ids=["light", "dark", "system"])
@pytest.mark.parametrize(("text", "back"), TEXTS)
def test_text_can_be_read(theme, text, back):
    assert 4.5 <= contrast(theme[text], theme[back])


def test_a_dark_system_and_the_dark_choice_are_alike():
    assert DARK == CHOSEN != LIGHT
