"""A browser for the page, and a small matrix to show in it. Without Chromium the tests skip; where
the environment variable CI is set they fail."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from harness.report import page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def cell(
    model: str = "llama3",
    dtype: str = "unset",
    verdict: str = "ok",
    device: str = "virtual:h200",
    engine: str = "0.33.0",
    backend: str = "default",
    **facts: Any,
) -> dict[str, Any]:
    """A cell as in matrix.json; one that is `ok` has 32 layers of 65,536 bytes."""
    kv = {
        "kind": "FullAttentionSpec", "role": "self_attn.attn", "layers": 32, "block_size": 16,
        "page_size_bytes": 2 * 16 * 8 * 128 * 2, "content_bytes": 2 * 16 * 8 * 128 * 2,
        "dtype": "bfloat16", "cache_dtype": None, "compress_ratio": 1, "draft": False,
        "alignment": None, "backend": "FLASH_ATTN", "shape": [-1, 8, 16, 256],
        "tensor_dtype": "bfloat16", "stride": None, "window": None, "grows": True,
        "state_mode": None,
    }  # fmt: skip
    ok = verdict == "ok"
    return {
        "id": f"{model}-{backend}-{dtype}", "model": model, "backend": backend,
        "kv_cache_dtype": dtype, "block_size": None, "tensor_parallel_size": 1,
        "device": device, "engine": engine, "verdict": verdict, "expected": "ok",
        "known": None, "stale": None, "reason": "confirmed by oracle" if ok else "it failed",
        "remarks": [], "vouched": ["oracle"] if ok else [], "stage": "allocate",
        "resolved": {"kv_cache_dtype": "auto" if ok else None, "storage_dtype": "bfloat16",
                     "cache_config": "auto", "backends": ["FLASH_ATTN"],
                     "selected": "FLASH_ATTN"},
        "kv": [kv] if ok else [], "groups": [], "num_blocks": 100 if ok else None,
        "kv_bytes_per_token": 32 * kv["page_size_bytes"] // 16 if ok else None,  # type: ignore[operator]
        "capacity": {"tokens": 1600, "concurrency": 1.5, "request_bytes": 1, "max_model_len": 4096,
                     "gpu_memory_utilization": 0.92} if ok else None,
        "candidates": [
            {"backend": "FLASH_ATTN", "reasons": [], "selected": True, "asked": ""},
            {"backend": "FLEX_ATTENTION", "reasons": ["too slow for this"], "selected": False,
             "asked": ""},
        ],
        "declared": [{"backend": "FLASH_ATTN", "reasons": [], "kv_cache_dtypes": ["auto"]}],
        "memory": None, "needs_bytes": None, "error": None, "seconds": {"total": 0.2},
        "end": "finished", "tail": "", "exit_code": None, "retried": False,
        "settings": {}, "leaked_bytes": None,
        **facts,
    }  # fmt: skip


def whole(cells: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """The dict of a matrix.json with these cells, and `more` of its parts."""
    specs = dict.fromkeys(c["device"] for c in cells)
    return {
        "schema": 1,
        "run": {"started": "2026-12-02T16:05:30Z", "depth": {}, "counts": {}},
        "engines": [{"version": v} for v in dict.fromkeys(c["engine"] for c in cells)],
        "devices": [
            {"spec": spec, "kind": "virtual" if spec.startswith("virtual") else "gpu",
             "name": "NVIDIA H200", "capability": [9, 0], "memory_bytes": 150754820096}
            for spec in specs
        ],
        "differences": [],
        "cells": cells,
        **more,
    }  # fmt: skip


PARTS = ("baseline", "differences", "history")
"""Parts of a matrix.json that `show` takes beside options of the browser."""


class Opened:
    """A page in the browser, and what went wrong with it."""

    def __init__(self, tab: Any, path: Path) -> None:
        self.tab, self._path = tab, path
        self.trouble: list[str] = []
        self.asked: list[str] = []
        tab.on("console", lambda message: self.trouble.append(message.text))
        tab.on("pageerror", lambda error: self.trouble.append(str(error)))
        tab.on("dialog", lambda dialog: (self.trouble.append(dialog.message), dialog.dismiss()))
        tab.on("request", lambda request: self.asked.append(request.url))

    def at(self, fragment: str = "") -> Any:
        """Open it anew at a fragment."""
        self.tab.goto("about:blank")
        self.tab.goto(f"{self._path.as_uri()}#{fragment}")
        self.tab.wait_for_selector("html[data-ready]", state="attached")
        return self.tab


def browser_path(playwright: Any) -> str | None:
    """Chromium's path: playwright's own, else one on PATH; None where there is none."""
    own = Path(playwright.chromium.executable_path)
    return str(own) if own.exists() else next(filter(None, map(shutil.which, NAMES)), None)


def absent(what: str) -> NoReturn:
    """Skip where a developer lacks a browser; fail where CI does, which would test nothing."""
    if os.environ.get("CI"):
        pytest.fail(f"{what}, and CI is set: install it", pytrace=False)
    pytest.skip(what)


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    try:
        from playwright import sync_api as api
    except ImportError:
        absent("playwright is not installed")
    with api.sync_playwright() as playwright:
        found = browser_path(playwright)
        if found is None:
            absent("no Chromium: neither playwright's own nor one on PATH")
        # Where all is root, as in containers, Chromium has no sandbox of its own.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def show(chromium: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    contexts, opened = [], []

    def open_page(cells: list[dict[str, Any]], records: Any = (), **how: Any) -> Opened:
        more = {name: how.pop(name) for name in PARTS if name in how}
        path = tmp_path / "matrix.html"
        path.write_text(page.render(whole(cells, **more), records), encoding="utf-8")
        contexts.append(chromium.new_context(**how))
        opened.append(Opened(contexts[-1].new_page(), path))
        return opened[-1]

    yield open_page
    for context in contexts:
        context.close()
    for one in opened:
        assert [] == one.trouble
        assert [] == [url for url in one.asked if not url.startswith(("file:", "data:"))]
