"""vLLM's releases, as the package index lists them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

from harness import install
from harness.errors import InfraError, UsageError
from harness.facts import SUPPORTED
from harness.interpreter import last_line, sanitised

SECONDS = 120.0
"""Deadline of one question to the index."""


def between(ends: tuple[str, str], listed: list[str]) -> list[str]:
    """The supported ones of the `listed` releases from one end to the other, both ends among them,
    oldest first."""
    low, high = sorted(map(Version, ends))
    within = SpecifierSet(SUPPORTED)
    found = {str(v) for v in map(_version, listed) if v is not None and low < v < high}
    inner = sorted(filter(within.contains, found), key=Version)
    return [str(low), *inner, str(high)]


def listed(cache: Path) -> list[str]:
    """All releases that the index has. InfraError where it cannot be asked."""
    # pip alone can list them, and a virtual environment that uv made has none of its own.
    command = [*install.uv("releases of vLLM"), "tool", "run", "pip", "index", "versions"]
    try:
        done = subprocess.run(
            [*command, "vllm", "--json"],
            cwd=cache if cache.is_dir() else None,
            env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=SECONDS,
            check=False,
        )
        return [str(version) for version in json.loads(done.stdout)["versions"]]
    except subprocess.TimeoutExpired:
        why = f"no answer in {SECONDS:.0f} s"
    except OSError as error:
        why = str(error.strerror or error)
    except (ValueError, KeyError, TypeError):
        why = sanitised(last_line(done.stderr.decode("utf-8", "replace"))) or "no list"
    raise InfraError(f"cannot list the releases of vLLM: {why}; name them with --versions")


def parse(text: str, option: str) -> list[str]:
    """Releases with commas between them. UsageError names the option, and one that is none."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if _version(name) is None:
            raise UsageError(f"{option}: {name!r} is no release such as 0.33.0")
    return names


def _version(text: str) -> Version | None:
    try:
        found = Version(text)
    except InvalidVersion:
        return None
    return None if found.is_prerelease else found
