"""Engines: from an engine SPEC to an interpreter with a vLLM and its facts.

Releases are installed on demand with uv, each into a virtual environment of its own in the cache,
outside the checkout. Facts are read by the engine's own interpreter once and cached; finding them
again starts no interpreter and imports no vLLM.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from urllib.parse import unquote, urlsplit

from packaging.version import InvalidVersion, Version

from harness import facts, output, safe
from harness.errors import InfraError, UsageError, unknown
from harness.facts import EngineFacts, check_supported

ENGINE = Path(__file__).resolve().parent / "engine"

FACTS_SECONDS = 300.0
"""Importing vLLM takes 10-40 s; a cold disk more."""
ASK_SECONDS = 60.0

Environ = Callable[[Path], Mapping[str, str]]
"""The environment in which the facts of an interpreter are read."""

_FORMS = "current, a release such as 0.33.0, or the path of a Python interpreter"
_LISTS = "`kvmatrix engines` lists those here"
_URL = re.compile(r"\s*\(?\bhttps?://\S+")

_ASK = """
import importlib.metadata as m, importlib.util as u, json
spec = u.find_spec("vllm")
try:
    version = m.version("vllm")
except m.PackageNotFoundError:
    version = ""
print(json.dumps([version, spec and spec.origin]))
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


@dataclass(frozen=True)
class Installed:
    """A release in the cache."""

    version: str
    python: Path


def cache_folder(environ: Mapping[str, str]) -> Path:
    """`$KVMATRIX_CACHE`, else `$XDG_CACHE_HOME/kvmatrix`, else `~/.cache/kvmatrix`."""
    if own := environ.get("KVMATRIX_CACHE"):
        return Path(own).expanduser().absolute()
    shared = Path(environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification: a path that is not absolute counts as unset.
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "kvmatrix"


def resolve(spec: str, cache: Path, environ: Environ) -> EngineFacts:
    """The facts of the engine that `spec` names, installed first where it is a release.

    UsageError for an unknown or unsupported engine, or one without a vLLM; InfraError where disk
    or network do not let it be installed or read.
    """
    return facts_for(interpreter(spec, cache), cache, environ)


def interpreter(spec: str, cache: Path) -> Path:
    """The interpreter that `spec` names, installed first where needed. Errors as `resolve`."""
    text = spec.strip()
    if text == "current":
        return Path(sys.executable)
    if text.startswith("cpu:"):
        raise UsageError(f"engine {spec!r}: vLLM's CPU build is not supported yet; use {_FORMS}")
    with suppress(InvalidVersion):
        return _release(str(Version(text)), cache)
    try:
        if "/" in text or (text and Path(text).exists()):
            # Not resolved: the target of a virtual environment's link lies outside of it.
            return _named(spec, Path(text).expanduser().absolute())
    except (OSError, RuntimeError) as error:  # a name that is too long; the home of nobody
        raise UsageError(f"engine {spec!r} cannot be used: {error}") from None
    known = ["current", *(engine.version for engine in known_engines(cache))]
    raise unknown("engine", spec, known, f"name {_FORMS}; {_LISTS}")


def _named(spec: str, path: Path) -> Path:
    if path.is_dir():
        wrong = "is a folder; name its interpreter, such as bin/python"
    elif not path.exists():
        wrong = "does not exist; name the path of a Python interpreter"
    elif not os.access(path, os.X_OK):
        wrong = "is not executable, so it is no Python interpreter"
    else:
        return path
    raise UsageError(f"engine {spec!r} {wrong}")


def known_engines(cache: Path) -> tuple[Installed, ...]:
    """The releases that are completely installed in `cache`, oldest first."""
    found = []
    for marker in (cache / "engines").glob("vllm-*-py*/.complete"):
        version = marker.parent.name.removeprefix("vllm-").rpartition("-py")[0]
        with suppress(InvalidVersion):
            found.append((Version(version), Installed(version, marker.parent / "bin" / "python")))
    return tuple(engine for _, engine in sorted(found, key=lambda item: (item[0], item[1].python)))


# --- a release, installed on demand ---


def _release(version: str, cache: Path) -> Path:
    """The interpreter of a virtual environment that has this vLLM."""
    check_supported(version)
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache / "engines" / f"vllm-{version}-py{minor}"
    if _complete(folder):
        return folder / "bin" / "python"
    uv = _uv(version)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Workers of one run, or two runs, must not build the same environment at once.
        with _locked(folder.with_name(f".{folder.name}.lock"), version):
            if not _complete(folder):
                _build(uv, version, folder)
    except OSError as error:
        raise InfraError(f"cannot install vLLM {version} into {folder}: {error}") from None
    return folder / "bin" / "python"


def _complete(folder: Path) -> bool:
    # A link to an interpreter that is gone does not exist.
    return (folder / ".complete").is_file() and (folder / "bin" / "python").exists()


def _uv(version: str) -> list[str]:
    if path := shutil.which("uv"):
        return [path]
    if importlib.util.find_spec("uv"):
        return [sys.executable, "-m", "uv"]
    raise UsageError(f"installing vLLM {version} needs uv, which is not here: `pip install uv`")


@contextmanager
def _locked(path: Path, version: str) -> Iterator[None]:
    with path.open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"waiting for another run that installs vLLM {version}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(uv: Sequence[str], version: str, folder: Path) -> None:
    """Make the environment in place: it cannot be moved, so a marker tells a whole one."""
    shutil.rmtree(folder, ignore_errors=True)
    _say(f"installing vLLM {version} with uv into {folder} (about 9 GB)")
    began = time.monotonic()
    venv = [*uv, "venv", "--python", sys.executable, str(folder)]
    install = [*uv, "pip", "install", "--python", str(folder / "bin" / "python")]
    install.append(f"vllm=={version}")
    shown = sys.stderr.isatty()
    try:
        failed, text = _run_uv(venv, folder.parent)
        if not failed:
            failed, text = _run_uv(install, folder.parent, shown=shown)
            if failed and shown:
                # uv told only the terminal; to resolve again is quick, and tells why if it fails.
                again, text = _run_uv([*install, "--dry-run"], folder.parent)
                text = text if again else ""
        if failed:
            raise _failure(version, text)
        (folder / ".complete").touch()
    finally:
        if not (folder / ".complete").is_file():
            shutil.rmtree(folder, ignore_errors=True)
    _say(f"installed vLLM {version} in {time.monotonic() - began:.0f} s")


def _run_uv(command: Sequence[str], folder: Path, *, shown: bool = False) -> tuple[int, str]:
    """uv's exit status, and what it wrote to stderr unless it was shown. The folder lies outside
    any project, so that no project's settings apply."""
    done = subprocess.run(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=None if shown else subprocess.PIPE,
        check=False,
    )
    return done.returncode, (done.stderr or b"").decode("utf-8", "replace")


def _failure(version: str, text: str) -> UsageError | InfraError:
    reason = _sanitised(_reason(text))
    if "No solution found" in text and "network was disabled" not in text:
        return UsageError(f"cannot install vLLM {version}: {reason}")
    return InfraError(f"cannot install vLLM {version}: {reason or 'uv failed, see above'}")


def _reason(text: str) -> str:
    """The last thing that uv says, hints left out, its wrapped lines joined."""
    reason: list[str] = []
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith("hint:"):
            if reason:
                break
        elif line.startswith(("error:", "cause:", "╰─▶")):
            reason = [re.sub(r"^(error:|cause:|╰─▶)\s*", "", line)]
        elif reason:
            reason.append(line)
    return " ".join(reason) or _last_line(text)


def _say(text: str) -> None:
    print(f"kvmatrix: {safe.printable(text)}", file=sys.stderr, flush=True)


# --- the facts of an interpreter ---


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
        for info in sorted(prefix.glob("lib/python*/site-packages/vllm-*.dist-info")):
            package = _package(info)
            if package is not None:
                return _found(info.name[len("vllm-") : -len(".dist-info")], package, info)
    return _ask(python)


def _find_here() -> Found | None:
    try:
        # Finds a top-level package without importing it.
        spec = importlib.util.find_spec("vllm")
    except ValueError:  # a stand-in in sys.modules
        spec = None
    if spec is None or spec.origin is None:
        return None
    package = Path(spec.origin).parent
    try:
        distribution = importlib.metadata.distribution("vllm")
    except importlib.metadata.PackageNotFoundError:
        return _found("", package, None)
    info = next(Path(str(distribution.locate_file(""))).glob("vllm-*.dist-info"), None)
    return _found(distribution.version, package, info)


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
            [str(python), "-I", "-c", _ASK],
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
    _say(f"reading what vLLM {found.version or found.package} knows (10-40 s, once)")
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
        reason = _sanitised(_last_line(done.stderr.decode("utf-8", "replace")))
        reason = reason or f"exit status {done.returncode}"
        raise UsageError(f"the vLLM of {python} cannot be used: {reason}")
    try:
        # The child runs this very tree, so its schema is the one here.
        told = {"schema": facts.SCHEMA, **json.loads(_last_line(text))}
        return replace(EngineFacts.from_json(told), python=str(python))
    except (ValueError, TypeError) as error:
        reason = _sanitised(str(error))
        raise UsageError(f"the facts of {python} cannot be read: {reason}") from None


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")


def _sanitised(text: str) -> str:
    """One line of another program's text, fit for a message."""
    return safe.clip(safe.printable(safe.mask(_URL.sub("", text), os.environ)), 500)
