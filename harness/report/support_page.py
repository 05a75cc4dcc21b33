"""The table of what is supported since which release, as a page that needs nothing but itself.
Pure.
"""

from __future__ import annotations

from markupsafe import Markup

from harness.report import page
from harness.report.support_sheet import sheet
from harness.support import Support


def render(support: Support) -> str:
    """The page."""
    templates = page.templates()
    style = page.style(templates)
    return templates.get_template("support.html.j2").render(
        policy=page.policy(style), style=Markup(style), support=sheet(support)
    )
