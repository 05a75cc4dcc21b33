"""`kvmatrix bisect CELL --good X --bad Y`: the first version in which a cell changed."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.version import Version

from harness import bisect, commits, install, releases
from harness.bisect import Trial
from harness.commands.show import screen
from harness.errors import InfraError, UsageError
from harness.facts import check_supported
from harness.interpreter import say
from harness.report import bisection


def add(commands: Any) -> None:
    """Its parser."""
    command = commands.add_parser(
        "bisect",
        help="find the version in which a cell changed",
        description="Find the first release, or the first commit, in which a cell is no longer "
        "what it is at the older end: whether it passes, else its verdict, dtype, backends or "
        "page, whichever is the first that the ends differ in. --good may be the newer one: then "
        "it is the fix that is found. Releases are installed on demand; what one gave is kept.",
        epilog="example: kvmatrix bisect dsv4-default-unset --bad 0.27.1 --good 0.33.0 --device "
        "virtual:h200; exit code: 0 found, 1 not found (the ends are alike, or a version gave "
        "this once and that another time), 2 usage, 75 host or network not usable",
    )
    command.add_argument("cell", metavar="CELL", help="its id, as pytest shows it")
    command.add_argument("--good", required=True, metavar="VERSION", help="where it was right")
    command.add_argument("--bad", required=True, metavar="VERSION", help="where it was not")
    command.add_argument("--device", help="where it starts (auto)")
    command.add_argument(
        "--versions",
        metavar="LIST",
        help="releases to choose from, with commas between (all of the package index)",
    )
    command.add_argument(
        "--repeat",
        type=int,
        default=1,
        metavar="N",
        help="how often the two neighbours of the change, and both ends, are run again (1)",
    )
    command.add_argument(
        "--install",
        metavar="COMMAND",
        help="search commits of --repo: a shell command that installs $KVMATRIX_COMMIT",
    )
    command.add_argument("--repo", metavar="DIR", help="the checkout of vLLM that has the commits")
    command.add_argument(
        "--python", metavar="PATH", help="the interpreter that --install installs into (this one)"
    )
    command.add_argument("--fresh", action="store_true", help="use nothing that was kept")
    command.add_argument("--json", action="store_true", help="print a JSON object")
    command.set_defaults(command=run)


def run(options: argparse.Namespace) -> int:
    """Search, and tell what was found. The exit code of the epilog."""
    # Here, since what runs cells loads pytest, which `--help` must not wait for.
    from harness import trial

    if options.repeat < 0:
        raise UsageError(f"--repeat {options.repeat}: a number from 0 up is needed")
    plan = _commits(options) if options.install is not None else _releases(options)
    devices = [options.device] if options.device else []

    def attempt(version: str, again: bool) -> Trial:
        try:
            spec, label = plan.engine(version)
        except (InfraError, UsageError) as error:
            found = Trial(None, str(error))
        else:
            fresh = again or options.fresh
            found = trial.run(options.cell, devices, spec, label, fresh=fresh)
        note = " (again)" if again else " (kept)" if found.kept else ""
        say(f"{version[:12]}{note} {found.words}")
        return found

    steps = bisect.steps(len(plan.versions))
    say(
        f"{len(plan.versions)} {plan.kind} from {plan.versions[0][:12]} to "
        f"{plan.versions[-1][:12]}: the ends, and at most {steps} between"
    )
    found = bisect.hunt(options.cell, plan.versions, plan.good, plan.bad, attempt, options.repeat)
    if options.json:
        print(json.dumps(bisection.plain(found), indent=1))
    else:
        print("\n".join(bisection.render(found, screen())))
    return 0 if found.certain else 1


@dataclass(frozen=True)
class Plan:
    """What is searched."""

    kind: str
    versions: list[str]
    """Oldest first."""
    good: str
    bad: str
    engine: Callable[[str], tuple[str, str]]
    """A version's engine SPEC, and a label where builds share an interpreter; installs it."""


def _releases(options: argparse.Namespace) -> Plan:
    for name in ("repo", "python"):
        if getattr(options, name) is not None:
            raise UsageError(f"--{name} is of a search of commits: it goes with --install")
    good, bad = (releases.parse(getattr(options, name), f"--{name}") for name in ("good", "bad"))
    for name, found in (("good", good), ("bad", bad)):
        if len(found) != 1:
            raise UsageError(f"--{name} is one release, such as 0.33.0")
    if Version(good[0]) == Version(bad[0]):
        raise UsageError(f"--good and --bad are both {good[0]}: there is nothing between")
    for each in (*good, *bad):
        check_supported(each)
    cache = install.cache_folder(os.environ)
    listed = releases.parse(options.versions, "--versions") if options.versions else None
    versions = releases.between((good[0], bad[0]), listed or releases.listed(cache))
    return Plan("releases", versions, good[0], bad[0], lambda version: (version, ""))


def _commits(options: argparse.Namespace) -> Plan:
    if options.repo is None:
        raise UsageError("--install searches commits: say of which checkout with --repo DIR")
    if options.versions is not None:
        raise UsageError("--versions is of a search of releases: leave it or --install out")
    repo = Path(options.repo)
    good, bad = (commits.named(repo, getattr(options, name)) for name in ("good", "bad"))
    python = options.python or sys.executable

    def engine(commit: str) -> tuple[str, str]:
        commits.install(options.install, repo, commit)
        return str(Path(python).absolute()), commit

    return Plan("commits", commits.between(repo, good, bad), good, bad, engine)
