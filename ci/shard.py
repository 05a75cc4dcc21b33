"""`python -m ci.shard`: one shard of a run on a CI machine.

Runs pytest, passes cancellation on to it, and uploads what it left, whatever became of it. Without
Buildkite it does the same, and the files stay where they are.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ci.agent import Agent, Told
from harness import safe
from harness.engine.processes import die_with_parent
from harness.errors import EXIT_INFRA, EXIT_USAGE, UsageError
from harness.shard import Shard, parse
from harness.testengine import COLLECTOR

GRACE = 6.0
"""Seconds that pytest has to end when it is cancelled: a Buildkite agent kills the job after 10,
and the upload needs some of them. Records are on disk by then, each since its cell ended."""

CANCELLED_UPLOAD = 60.0
"""Seconds for the upload of a cancelled shard, where it is not killed before."""

TOKEN = "BUILDKITE_ANALYTICS_TOKEN"
ARTIFACTS = "BUILDKITE_ARTIFACT_PATHS"
"""Set where a step has artifact paths: its agent uploads them, even of a job that was killed."""

DURATIONS = "durations.json"

RECORDED = Path(__file__).with_name(DURATIONS)
"""What shards are split by unless told otherwise, where it is: the same file for all, since it is
part of the checkout. ci.merge writes one to put there."""

HELP = f"""\
examples:
  python -m ci.shard --step h200-mig -- -k dsv4 --device auto
  python -m ci.shard --step virtual --shard 2/3 --durations durations.json -- --device virtual:h200
  python -m ci.shard --step h200-mig --durations-step plan     # an artifact of the step `plan`

The files lie in OUT/KEY-INDEX, and are uploaded as artifacts. `--shard` and `--matrix-out` are
added to pytest's arguments. With the extra `buildkite` and {TOKEN}
results are sent to Test Engine, too.

exit code:
  0    as expected, also where there are fewer cells than shards and this one has none
  1    a product failure: some cell is not what it must be
  2    usage, -k that selects nothing at all, or pytest itself failed (its codes 2, 3, 4, 5)
  75   infrastructure only, or pytest was killed by another than this command: may be tried again
  130  cancelled by SIGINT before pytest had a result, 143 by SIGTERM
"""


def main(arguments: Sequence[str] | None = None, agent: Agent | None = None) -> int:
    """Run the shard; its exit code."""
    options = _options(sys.argv[1:] if arguments is None else arguments)
    try:
        shard = shard_of(options.shard, os.environ)
        check(options.step, options.pytest)
        if not 0 <= options.grace <= 3600:
            raise UsageError(f"--grace {options.grace:g} is not a number of seconds up to 3600")
        return run(options, shard, agent or Agent.here())
    except UsageError as error:
        say(str(error), sys.stderr.fileno())
        return EXIT_USAGE


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m ci.shard",
        description="Run one shard of the matrix, and upload what it leaves.",
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--step", required=True, metavar="KEY", help="key of the step")
    parser.add_argument(
        "--shard",
        metavar="I/N",
        help="part I of N (BUILDKITE_PARALLEL_JOB and BUILDKITE_PARALLEL_JOB_COUNT, else all)",
    )
    parser.add_argument("--out", default="shards", metavar="DIR", help="where files go (shards)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--durations", metavar="FILE", help="durations to split by, the same for every shard"
    )
    source.add_argument(
        "--durations-step",
        metavar="KEY",
        help=f"the step that has them as its artifact {DURATIONS}",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=GRACE,
        metavar="S",
        help=f"seconds that pytest has to end when cancelled ({GRACE:g})",
    )
    parser.add_argument("pytest", nargs="*", metavar="-- ARGUMENT", help="pytest's own arguments")
    return parser.parse_args(arguments)


def shard_of(asked: str | None, environ: Mapping[str, str]) -> Shard:
    """The shard that is asked for, or that Buildkite's parallel job is. UsageError where it is
    none."""
    names = ("BUILDKITE_PARALLEL_JOB", "BUILDKITE_PARALLEL_JOB_COUNT")
    job, count = (environ.get(name, "") for name in names)
    if asked is not None or not (job or count):
        return parse(asked)
    try:
        # Buildkite counts jobs from 0.
        return parse(f"{int(job) + 1}/{int(count)}")
    except (ValueError, UsageError):
        raise UsageError(
            f"{names[0]}={job!r} and {names[1]}={count!r} name no job of so many: leave both out, "
            "or pass --shard I/N"
        ) from None


def check(step: str, arguments: Sequence[str]) -> None:
    """UsageError where the step cannot name a folder, or pytest is told twice."""
    if re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.:-]*", step) is None:
        raise UsageError(f"--step {step!r} is not a step's key: letters, digits, _ - . : only")
    for name in ("--shard", "--shard-durations", "--matrix-out"):
        if any(each == name or each.startswith(f"{name}=") for each in arguments):
            raise UsageError(f"{name} is passed to pytest by this command: leave it out behind --")


def run(options: argparse.Namespace, shard: Shard, agent: Agent) -> int:
    """Run pytest and upload; the exit code."""
    out = Path(options.out)
    folder = out / f"{options.step}-{shard.index}"
    clear(folder)
    file = options.durations
    if options.durations_step is not None:
        file = fetched(agent, options.durations_step, out)
    elif file is None and RECORDED.is_file():
        file = str(RECORDED)
    command = [sys.executable, "-m", "pytest", *options.pytest, f"--matrix-out={folder}"]
    if shard.count > 1:
        command.append(f"--shard={shard.index}/{shard.count}")
        command += [] if file is None else [f"--shard-durations={file}"]
    command += collector(os.environ)
    with Cancel() as cancel:
        code = cancel.wait(command, options.grace)
        if not folder.is_dir():
            say(f"pytest left nothing in {folder}")
        elif agent.environ.get(ARTIFACTS):
            say(f"{folder}: the agent uploads it, as the step's artifact_paths")
        else:
            limit = CANCELLED_UPLOAD if cancel.signal else None
            tell(f"{folder}: uploaded", f"the files stay in {folder}", agent, folder, limit)
    found, why = exit_code(code, cancel.signal)
    if why:
        say(why)
    return found


def clear(folder: Path) -> None:
    """Remove what an earlier run left in a checkout that is used again: it would be uploaded as
    this one's, should pytest not come to write its own. UsageError where that cannot be."""
    try:
        for name in ("matrix.json", "records.jsonl"):
            (folder / name).unlink(missing_ok=True)
    except OSError as error:
        raise UsageError(f"cannot write in {folder}: {error.strerror or error}") from None


def tell(well: str, ill: str, agent: Agent, folder: Path, limit: float | None) -> Told:
    """Upload the folder, and say what became of that."""
    told = agent.upload(f"{folder}/**/*", limit)
    say(well if told.ok else f"{told.why}; {ill}")
    return told


def fetched(agent: Agent, step: str, out: Path) -> str | None:
    """The file of durations that `step` has left; None without one. The first nightly has none, so
    that fails nothing: all shards are then split by estimates."""
    folder = out / ".durations"
    told = agent.download(DURATIONS, folder, step)
    if told.ok and (folder / DURATIONS).is_file():
        return str(folder / DURATIONS)
    why = told.why or f"artifact download: step {step} has no {DURATIONS}"
    say(f"{why}; the shard is split by estimates, and fits only shards that are, too")
    return None


def collector(environ: Mapping[str, str]) -> list[str]:
    """pytest's arguments that keep Test Engine's collector out of a run that cannot use it."""
    token = environ.get(TOKEN, "")
    if not token:
        return ["-p", f"no:{COLLECTOR}"]  # it would complain
    if importlib.util.find_spec(COLLECTOR.replace("-", "_")) is None:
        say(f"{TOKEN} is set, but {COLLECTOR} is not installed: nothing is sent to Test Engine")
    elif not re.fullmatch(r"[!-~]+", token):
        # It would be refused as a header, and shown with the reason.
        say(f"{TOKEN} has characters that no token has: nothing is sent to Test Engine")
        return ["-p", f"no:{COLLECTOR}"]
    return []


def exit_code(code: int, cancelled: int | None) -> tuple[int, str]:
    """The exit code for pytest's `code` (below 0: the signal that ended it), and a line that says
    why where it is another."""
    if cancelled and (code < 0 or code == EXIT_USAGE):
        name = signal.Signals(cancelled).name
        return 128 + cancelled, f"cancelled by {name}"
    if code < 0:
        return EXIT_INFRA, f"pytest was ended by {_name(-code)}, which this command did not send"
    if code == 3:
        return EXIT_USAGE, "pytest or the harness failed (its exit code 3): a bug, see above"
    if code == 4:
        return EXIT_USAGE, ""
    if code == 5:
        return EXIT_USAGE, "no cell is selected, in no shard: look at -k and the arguments"
    return code, ""


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


class Cancel:
    """Passes SIGTERM and SIGINT on to pytest, once, and outlives it. Later ones change nothing: an
    agent may send several, and a second one would cut off what pytest writes at its end."""

    def __init__(self) -> None:
        self.signal: int | None = None
        """What cancelled the run."""
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> Cancel:
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._pass_on)
        return self

    def __exit__(self, *_: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]

    def _pass_on(self, number: int, _: object) -> None:
        if self.signal is None:
            self.signal = number
            if self._process is not None:
                self._process.send_signal(number)

    def wait(self, command: Sequence[str], grace: float) -> int:
        """Run `command`; its exit code, below 0 for a signal. A cancelled one that has not ended in
        `grace` seconds is killed."""
        if self.signal is not None:
            return -self.signal
        sys.stdout.flush()
        # In a session of its own: an agent signals the whole group, and pytest would be told twice.
        # Should this process be killed, the kernel tells pytest.
        self._process = process = subprocess.Popen(
            command,
            start_new_session=True,
            preexec_fn=_ends_with_parent,
        )
        if self.signal is not None:  # it came before there was a process to tell
            process.send_signal(self.signal)
        while self.signal is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.wait(0.2)
        try:
            return process.wait(grace)
        except subprocess.TimeoutExpired:
            say(f"pytest has not ended {grace:g} s after {_name(self.signal)}: it is killed")
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            return process.wait()


def _ends_with_parent() -> None:
    die_with_parent(signal.SIGTERM)


def say(text: str, file: int = 1) -> None:
    """A line of this command, between those of pytest; secrets masked."""
    line = f"kvmatrix: {safe.printable(safe.mask(text, os.environ))}\n"
    with contextlib.suppress(OSError):  # nobody may be listening any more
        os.write(file, line.encode("utf-8", errors="replace"))


if __name__ == "__main__":
    sys.exit(main())
