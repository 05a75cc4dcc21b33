"""Commits of a checkout of vLLM: which lie between two, and how one of them is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness import safe
from harness.errors import InfraError, UsageError
from harness.interpreter import last_line, sanitised, say

INSTALL_SECONDS = 7200.0
"""A build of vLLM with its kernels takes an hour on few cores."""


def between(repo: Path, one: str, other: str) -> list[str]:
    """The full names of the commits from the older to the newer, both among them, along the first
    parents. UsageError where the folder has no such commits, or neither descends from the other."""
    first, second = named(repo, one), named(repo, other)
    for older, newer in ((first, second), (second, first)):
        if (
            older != newer
            and _run(repo, "merge-base", "--is-ancestor", older, newer).returncode == 0
        ):
            span = f"{older}..{newer}"
            return [older, *_git(repo, "rev-list", "--reverse", "--first-parent", span)]
    raise UsageError(f"of {one} and {other} neither descends from the other in {repo}")


def named(repo: Path, name: str) -> str:
    """The full name of a commit. UsageError where the checkout has none of this name."""
    quiet = ("rev-parse", "--verify", "--quiet", "--end-of-options")
    found = _git(repo, *quiet, f"{name}^{{commit}}")
    if not found:
        raise UsageError(f"{repo} has no commit {name!r}: name one that `git log` there shows")
    return found[-1]


def _git(repo: Path, *arguments: str) -> list[str]:
    done = _run(repo, *arguments)
    return done.stdout.decode("utf-8", "replace").split() if done.returncode == 0 else []


def _run(repo: Path, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    if not repo.is_dir():
        raise UsageError(f"--repo {repo} is not a folder; name a checkout of vLLM")
    try:
        return subprocess.run(
            ["git", "-C", str(repo), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
    except OSError as error:
        raise UsageError(f"git cannot be run: {error.strerror or error}") from None


def install(command: str, repo: Path, commit: str) -> None:
    """Run the user's shell command in the checkout, with `KVMATRIX_COMMIT` set to the commit; what
    it writes goes to stderr. InfraError where it fails."""
    say(f"installing commit {commit[:12]}: {command}")
    try:
        done = subprocess.run(
            ["sh", "-c", command],
            cwd=repo,
            env={**os.environ, "KVMATRIX_COMMIT": commit},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=INSTALL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise InfraError(f"{commit[:12]}: not installed after {INSTALL_SECONDS:.0f} s") from None
    text = done.stdout.decode("utf-8", "replace")
    if done.returncode:
        print(safe.printable(safe.mask(text[-4000:], os.environ), lines=True), file=sys.stderr)
        why = sanitised(last_line(text))
        raise InfraError(f"{commit[:12]}: --install exits {done.returncode}: {why}")
