"""How fast the page is: `python benchmarks/page.py`; needs playwright and a Chromium.

Makes pages of 1,000 and of 10,000 cells in one facet and of 20,000 in 27 (nine devices, three
engines), opens each in turn, and prints the seconds until it answers a pointer, for one filter, and
until the last row of the first facet is there once scrolled to; and how much longer each takes than
the page of 1,000 cells in the same run, since the seconds alone depend on what else the host does.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from playwright.sync_api import sync_playwright

from harness.report import page
from tests.page.conftest import browser_path, cell, whole

DTYPES, BACKENDS = 20, 5
PAGES = {"1,000 in 1": (1_000, 1, 1), "10,000 in 1": (10_000, 1, 1), "20,000 in 27": (20_000, 9, 3)}
"""Cells, devices, engines."""


def cells(total: int, devices: int, engines: int) -> list[dict[str, Any]]:
    """`total` cells, a third of them ok."""
    found = []
    for number in range(total // (devices * engines)):
        row, dtype = divmod(number, DTYPES)
        model, backend = divmod(row, BACKENDS)
        verdict = "ok" if number % 3 == 0 else "rejected"
        for device in range(devices):
            for engine in range(engines):
                found.append(
                    cell(
                        f"model{model}",
                        f"dtype{dtype}",
                        verdict,
                        f"virtual:device{device}",
                        f"0.{30 + engine}.0",
                        backend=f"BACKEND_{backend}",
                        id=f"cell-{device}-{engine}-{number}",
                    )
                )
    return found


def visit(browser: Any, path: Path) -> Iterator[tuple[str, float]]:
    """Seconds of each step of one visit."""
    tab = browser.new_page(viewport={"width": 1366, "height": 768})
    began = time.perf_counter()
    tab.goto(path.as_uri())
    tab.hover(".c >> nth=0")
    tab.wait_for_selector("#story")
    yield "answers", time.perf_counter() - began
    yield "nodes", tab.evaluate("document.querySelectorAll('*').length")
    began = time.perf_counter()
    tab.click("[data-verdict=ok]")
    tab.wait_for_function("location.hash.includes('verdict')")
    tab.hover(".c >> nth=1")
    yield "filter", time.perf_counter() - began
    tab.click("#clear")
    began = time.perf_counter()
    tab.evaluate("document.querySelector('section').scrollIntoView({ block: 'end' })")
    last = tab.locator("section >> nth=0").locator("tr.d").last
    last.locator(".c").first.wait_for(state="attached")
    yield "last row", time.perf_counter() - began
    tab.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    paths = {}
    for number, (name, size) in enumerate(PAGES.items()):
        matrix = whole(cells(*size))
        began = time.perf_counter()
        text = page.render(matrix)
        print(f"{name}: written in {time.perf_counter() - began:.2f} s, {len(text) / 1e6:.1f} MB")
        paths[name] = folder / f"{number}.html"
        paths[name].write_text(text, encoding="utf-8")
    found: dict[str, dict[str, list[float]]] = {name: {} for name in PAGES}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path(playwright), args=["--no-sandbox"]
        )
        for _ in range(options.rounds):
            for name, path in paths.items():
                for step, value in visit(browser, path):
                    found[name].setdefault(step, []).append(value)
        browser.close()
    least = {step: statistics.median(values) for step, values in next(iter(found.values())).items()}
    for name, steps in found.items():
        for step, values in steps.items():
            median = statistics.median(values)
            ratio = f"{median / least[step]:.1f} times the smallest page's"
            if step == "nodes":
                print(f"{name}: {median:,.0f} nodes once it answers, {ratio}")
            else:
                print(f"{name}: {step}: median {median:.2f} s, most {max(values):.2f} s, {ratio}")


if __name__ == "__main__":
    main()
