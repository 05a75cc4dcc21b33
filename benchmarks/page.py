"""How fast the page is: `python benchmarks/page.py [--cells N]`; needs playwright and a Chromium.

Makes a page of N cells (10,000 in four facets), opens it, and prints the seconds to write it, until
it answers, until all of the first facet is drawn, and for one filter.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from playwright.sync_api import sync_playwright

from harness.report import page
from tests.page.conftest import browser_path, cell, whole

ROUNDS = 5
DTYPES, BACKENDS = 20, 5


def cells(total: int, facets: int) -> list[dict]:
    """`total` cells in `facets` facets, a third of them ok."""
    found = []
    for number in range(total // facets):
        row, dtype = divmod(number, DTYPES)
        model, backend = divmod(row, BACKENDS)
        verdict = "ok" if number % 3 == 0 else "rejected"
        for facet in range(facets):
            names = f"model{model}", f"dtype{dtype}", verdict, f"virtual:device{facet}"
            found.append(cell(*names, backend=f"BACKEND_{backend}", id=f"cell-{facet}-{number}"))
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=10_000)
    parser.add_argument("--facets", type=int, default=4)
    options = parser.parse_args()
    matrix = whole(cells(options.cells, options.facets))
    began = time.perf_counter()
    text = page.render(matrix)
    print(f"write: {time.perf_counter() - began:.2f} s, {len(text) / 1e6:.1f} MB")
    path = Path(tempfile.mkdtemp()) / "matrix.html"
    path.write_text(text, encoding="utf-8")
    steps: dict[str, list[float]] = {"answers": [], "first facet whole": [], "filter": []}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=browser_path(playwright), args=["--no-sandbox"]
        )
        for _ in range(ROUNDS):
            tab = browser.new_page(viewport={"width": 1366, "height": 768})
            began = time.perf_counter()
            tab.goto(path.as_uri())
            tab.hover(".c >> nth=0")
            tab.wait_for_selector("#story")
            steps["answers"].append(time.perf_counter() - began)
            last = options.cells // options.facets - 1
            tab.locator("section >> nth=0").locator(".c").nth(last).wait_for(state="attached")
            steps["first facet whole"].append(time.perf_counter() - began)
            began = time.perf_counter()
            tab.click("[data-verdict=ok]")
            tab.locator("#shown", has_text="of").wait_for()
            steps["filter"].append(time.perf_counter() - began)
            tab.close()
        browser.close()
    for name, seconds in steps.items():
        print(f"{name}: median {statistics.median(seconds):.2f} s, most {max(seconds):.2f} s")


if __name__ == "__main__":
    main()
