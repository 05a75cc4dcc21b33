"""The pytest plugin: options, one test per cell, live progress, and the matrix at the end.

Cells run in children (`launch.py`) and are judged by pure functions (`verdict.py`); this module
only carries things between pytest and them. Under pytest-xdist each worker runs its share of the
cells, and the controller alone writes and shows.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from harness import durations, host, matrix, output, safe, session
from harness.errors import EXIT_INFRA, EXIT_USAGE, InfraError, UsageError
from harness.launch import ISOLATIONS, Launcher
from harness.matrix import Outcome
from harness.options import REAL_TIMEOUT, VIRTUAL_TIMEOUT, options
from harness.plan import Cell
from harness.progress import Progress, line
from harness.proof import Reductions
from harness.record import dumps, loads
from harness.session import Run
from harness.terminal import render
from harness.workers import Workers, jobs

RUN = pytest.StashKey[Run]()
LAUNCHER = pytest.StashKey[Launcher]()
REDUCTIONS = pytest.StashKey[Reductions]()
BOARD = pytest.StashKey["Board"]()
OUTCOME = pytest.StashKey[Outcome]()

SECONDS_BETWEEN_LINES = 15.0
"""How often progress is printed where it cannot be rewritten in place (a CI log)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvmatrix", "the KV-cache matrix of vLLM")
    group.addoption(
        "--device",
        action="append",
        default=[],
        metavar="SPEC",
        help="where the engine starts: auto (default: every visible GPU or MIG slice, else "
        "virtual:h200), cuda:N, GPU-<uuid>, MIG-<uuid>, cpu, or virtual:<profile>[/<mig profile>] "
        "such as virtual:h200/1g.35gb; repeatable; `kvmatrix devices` lists them",
    )
    group.addoption(
        "--engine",
        action="append",
        default=[],
        metavar="SPEC",
        help="which vLLM: current (default), a release such as 0.27.1 or of the CPU build, "
        "cpu:0.32.0 (installed on demand), or the path of a Python interpreter; repeatable",
    )
    group.addoption(
        "--depth",
        metavar="STAGE",
        help="how far a cell goes (virtual devices: allocate; real ones: warmup, or generate)",
    )
    group.addoption(
        "--case-timeout",
        metavar="S",
        help=f"seconds that a cell may take (virtual devices: {VIRTUAL_TIMEOUT:.0f}; "
        f"real ones: {REAL_TIMEOUT:.0f})",
    )
    group.addoption(
        "--isolation",
        default=ISOLATIONS[0],
        metavar="HOW",
        help="fork (default): one warm child per engine and device, forked per cell; spawn: a "
        "fresh interpreter per cell",
    )
    group.addoption(
        "--model-runner",
        metavar="RUNNER",
        help="v1 or v2, for real devices (vLLM's own choice)",
    )
    group.addoption(
        "--matrix-out",
        default="matrix",
        metavar="DIR",
        help="folder for matrix.json and records.jsonl (matrix/)",
    )


def wants_cells(config: pytest.Config) -> bool:
    """True where the arguments name the matrix: then an engine is needed."""
    cases = (config.rootpath / "cases").resolve()
    for argument in config.args:
        path = Path(os.path.abspath(config.invocation_params.dir / argument.split("::")[0]))
        if path == cases or cases in path.parents or path in cases.parents:
            return True
    return False


def _start(config: pytest.Config) -> None:
    """Check the options and, where cells are wanted, resolve the run."""
    option = config.option
    if not wants_cells(config):
        return
    chosen = options(
        option.device,
        option.engine,
        option.depth,
        option.case_timeout,
        option.matrix_out,
        option.isolation,
        option.model_runner,
    )
    config.stash[RUN] = run = session.resolve(chosen)
    if not hasattr(config, "workerinput"):
        # Here and not later: what is wrong with -n must be one line, before xdist starts anything.
        known = durations.load(run.cache)
        plugin = Workers(run.options.pools, jobs(run.cells, known.estimate))
        config.pluginmanager.register(plugin, "kvmatrix-workers")
        plugin.check(config)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    if config.option.help or config.option.version:
        return None
    try:
        _start(config)
    except UsageError as error:
        print(f"kvmatrix: {safe.printable(str(error))}", file=sys.stderr)
        return EXIT_USAGE
    except InfraError as error:
        print(f"kvmatrix: {safe.printable(str(error))}", file=sys.stderr)
        return EXIT_INFRA
    return None


def _cancelled(number: int, *_: object) -> NoReturn:
    raise KeyboardInterrupt(f"signal {number}")


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        # An xdist worker has no command line of its own; the controller has checked it.
        _start(config)
    run = config.stash.get(RUN, None)
    if run is None:
        return
    if not config.option.collectonly and not _distributes(config):
        config.stash[LAUNCHER] = launcher = _launcher(config, run)
        config.stash[REDUCTIONS] = Reductions(run.cache, launcher.record)
    if not hasattr(config, "workerinput"):
        # A CI job is cancelled by SIGTERM: it must end its children and report like Ctrl-C does.
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGTERM, _cancelled)
        board = Board(config, run)
        config.stash[BOARD] = board
        config.pluginmanager.register(board, "kvmatrix-board")


def pytest_unconfigure(config: pytest.Config) -> None:
    launcher = config.stash.get(LAUNCHER, None)
    if launcher is not None:
        launcher.close()
        del config.stash[LAUNCHER]
    if BOARD in config.stash and signal.getsignal(signal.SIGTERM) is _cancelled:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _distributes(config: pytest.Config) -> bool:
    """True in the controller of an xdist run, which runs no cell itself."""
    return bool(getattr(config.option, "tx", None)) and not hasattr(config, "workerinput")


def _launcher(config: pytest.Config, run: Run) -> Launcher:
    # The host is shared with the other workers of an xdist run.
    workers = int(getattr(config, "workerinput", {}).get("workercount", 1))
    cores, memory = host.cores() // workers, host.memory_bytes() // workers
    return Launcher(
        lambda device: session.jobs(device, cores, memory),
        lambda request: session.launch_environ(run, request),
        lambda request: session.modules_file(run, request),
        isolation=run.options.isolation,
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" not in metafunc.fixturenames:
        return
    run = metafunc.config.stash.get(RUN, None)
    cells = run.cells if run is not None else ()
    metafunc.parametrize("cell", cells, ids=[cell.id for cell in cells])


def _cell(item: pytest.Item) -> Cell | None:
    callspec = getattr(item, "callspec", None)
    cell = callspec.params.get("cell") if callspec is not None else None
    return cell if isinstance(cell, Cell) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Prove the reductions that the selected cells need, before any of them runs."""
    if LAUNCHER not in config.stash or hasattr(config, "workerinput"):
        return  # a worker has no way to end the run: there the cells themselves say what is wrong
    run, reductions = config.stash[RUN], config.stash[REDUCTIONS]
    cells = [cell for item in items if (cell := _cell(item)) is not None]
    try:
        for cell in cells:
            run.need(cell, reductions)
    except UsageError as error:
        pytest.exit(f"kvmatrix: {safe.printable(str(error))}", returncode=EXIT_USAGE)
    except InfraError as error:
        pytest.exit(f"kvmatrix: {safe.printable(str(error))}", returncode=EXIT_INFRA)


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    launcher = session.config.stash.get(LAUNCHER, None)
    if launcher is not None and not hasattr(session.config, "workerinput"):
        run = session.config.stash[RUN]
        launcher.plan(
            run.request(cell) for item in session.items if (cell := _cell(item)) is not None
        )
    return (yield)


@pytest.fixture
def outcome(request: pytest.FixtureRequest, cell: Cell) -> Outcome:
    """The cell's record from its child, judged."""
    run, launcher = request.config.stash[RUN], request.config.stash[LAUNCHER]
    wanted = run.need(cell, request.config.stash[REDUCTIONS])
    lacking = None if wanted is None else wanted.lacking(cell.device)
    if lacking is not None:
        result = run.skipped(cell, lacking)
    else:
        result = run.judge(cell, launcher.record(run.request(cell)))
    if wanted is not None:
        result = replace(result, needs_bytes=wanted.total)
    request.node.stash[OUTCOME] = result
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    outcome = item.stash.get(OUTCOME, None)
    if outcome is not None and report.when == "setup":
        # Plain text: it also travels from an xdist worker to the controller.
        if outcome.record is not None:
            report.kvmatrix_record = dumps(outcome.record)  # type: ignore[attr-defined]
        else:
            report.kvmatrix_skipped = outcome.judgement.reason  # type: ignore[attr-defined]
        report.kvmatrix_needs = outcome.needs_bytes  # type: ignore[attr-defined]
    return report


class Board:
    """Gathers the outcomes of a run, shows its progress, and writes and prints the matrix."""

    def __init__(self, config: pytest.Config, run: Run) -> None:
        self._config = config
        self._run = run
        self._cells = {cell.id: cell for cell in run.cells}
        self._planned: dict[str, Cell] = {}
        self._outcomes: dict[str, Outcome] = {}
        self._records: output.Records | None = None
        self._seconds: dict[durations.Key, float] = {}
        self._trouble: str | None = None
        self._began = time.time()
        self._progress: Progress | None = None
        self._printed = 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._plan([cell.id for item in session.items if (cell := _cell(item)) is not None])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        if not self._planned:
            self._plan([name for nodeid in ids if (name := _id(nodeid)) in self._cells])

    def _plan(self, ids: list[str]) -> None:
        self._planned = {name: self._cells[name] for name in ids}
        if self._planned and not self._config.option.collectonly:
            self._keep(self._open)
            self._progress = Progress.start(len(self._planned), time.monotonic())
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            if terminal is not None and self._config.option.verbose == 0:
                # The progress line stands where pytest would name the file.
                terminal.showfspath = False
                versions = ", ".join(engine.version for engine in self._run.engines)
                terminal.write_line(f"warming up: vLLM {versions} is imported once (10-40 s)")

    def _open(self) -> None:
        self._records = output.Records(self._run.options.out)

    def _keep(self, write: Callable[[], None]) -> None:
        """Write, but let a full disk cost the file alone: the run goes on, and says so."""
        try:
            write()
        except InfraError as error:
            self._trouble = str(error)
            self._records = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cell = self._planned.get(_id(report.nodeid))
        if cell is None:
            return
        if (reason := getattr(report, "kvmatrix_skipped", None)) is not None:
            self._add(self._run.skipped(cell, reason), report)
        if (text := getattr(report, "kvmatrix_record", None)) is not None:
            record = loads(text)
            self._add(self._run.judge(cell, record), report)
            self._seconds |= durations.measured(cell, record)
            records = self._records
            if records is not None:
                self._keep(lambda: records.add(record))

    def _add(self, outcome: Outcome, report: pytest.TestReport) -> None:
        outcome = replace(outcome, needs_bytes=getattr(report, "kvmatrix_needs", None))
        self._outcomes[outcome.cell.id] = outcome
        self._show(outcome)

    def _show(self, outcome: Outcome) -> None:
        if self._progress is None:
            return
        self._progress = self._progress.after(
            "known" if outcome.judgement.known else outcome.judgement.verdict,
            outcome.record.seconds.get("total", 0.0) if outcome.record else 0.0,
            outcome.cell.id,
        )
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if terminal is None or self._config.option.verbose != 0:
            return
        now = time.monotonic()
        in_place = terminal.isatty
        if not in_place and now - self._printed < SECONDS_BETWEEN_LINES and self._left():
            return
        self._printed = now
        text = line(self._progress, now, terminal._tw.fullwidth - 1, unicode=_unicode())
        if in_place:
            terminal.rewrite(text, erase=True)
        else:
            terminal.write_line(text)

    def _left(self) -> int:
        return len(self._planned) - len(self._outcomes)

    def pytest_report_teststatus(self, report: pytest.TestReport) -> tuple[str, str, Any] | None:
        if _id(report.nodeid) not in self._planned or self._config.option.verbose != 0:
            return None
        # The progress line stands where pytest's letters would.
        if report.when in ("setup", "teardown"):
            return ("", "", "") if report.passed else None
        if hasattr(report, "wasxfail"):
            return "xfailed", "", "known"
        return report.outcome, "", report.outcome.upper()

    def outcomes(self) -> list[Outcome]:
        """One outcome per planned cell, in the order of the plan."""
        return [
            self._outcomes.get(name) or self._run.notrun(cell)
            for name, cell in self._planned.items()
        ]

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        if self._config.option.collectonly or not self._planned:
            return
        if self._records is not None:
            self._records.close()
        outcomes = self.outcomes()
        about = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began)),
            "seconds": round(time.time() - self._began, 1),
            "depth": {d.spec: self._run.options.depth_on(d) for d in self._run.options.devices},
            "counts": matrix.counts(outcome.judgement for outcome in outcomes),
        }
        data = matrix.to_json(about, self._run.engines, self._run.options.devices, outcomes)
        text = json.dumps(data, indent=1) + "\n"
        self._keep(lambda: output.write_whole(self._run.options.out / "matrix.json", text))
        with contextlib.suppress(InfraError):  # without them the next run is merely slower
            durations.save(self._run.cache, self._seconds)
        status = _exit_status(int(exitstatus), outcomes)
        session.exitstatus = (
            EXIT_INFRA if self._trouble and status == pytest.ExitCode.OK else status
        )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._config.option.collectonly or not self._planned:
            return
        writer = terminalreporter._tw
        terminalreporter.ensure_newline()
        terminalreporter.write_line("")
        text = render(
            [matrix.view(outcome) for outcome in self.outcomes()],
            width=writer.fullwidth,
            color=writer.hasmarkup,
            unicode=_unicode(),
            titles=self._titles(),
        )
        for row in text.splitlines():
            writer.line(row)
        if self._trouble:
            writer.line(f"kvmatrix: {safe.printable(self._trouble)}", red=True)
        else:
            writer.line(f"matrix.json and records.jsonl are in {self._run.options.out}")

    def _titles(self) -> dict[tuple[str, str], str]:
        titles = {}
        for engine in self._run.engines:
            for device in self._run.options.devices:
                parts = [device.kind] if device.real else ["virtual"]
                if device.capability is not None:
                    parts.insert(0, "SM{}{}".format(*device.capability))
                if device.real:
                    parts.insert(0, device.name)
                titles[engine.version, device.spec] = ", ".join(parts)
        return titles


def _unicode() -> bool:
    """True where the terminal takes more than ASCII."""
    return (sys.stdout.encoding or "").lower().startswith("utf")


def _id(nodeid: str) -> str:
    """The cell's id in a node id; an xdist group may follow it."""
    return nodeid.rpartition("[")[2].partition("]")[0]


def _exit_status(status: int, outcomes: list[Outcome]) -> int:
    """pytest's exit status, or the one that the outcomes ask for."""
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        return status
    failing = {o.judgement.verdict for o in outcomes if not o.judgement.passes} - {"skipped"}
    if failing == {"infra"}:
        return EXIT_INFRA
    return int(pytest.ExitCode.TESTS_FAILED) if failing else status


def finish(outcome: Outcome) -> None:
    """End the running test as the judgement says: pass, fail, skip, or xfail for a known one."""
    judgement = outcome.judgement
    if judgement.verdict == "skipped":
        pytest.skip(judgement.reason)
    if judgement.verdict == "infra":
        raise InfraError(judgement.reason)
    text = f"{judgement.verdict}: {judgement.reason}"
    if judgement.stale:
        pytest.fail(safe.printable(judgement.stale), pytrace=False)
    if judgement.known:
        pytest.xfail(safe.printable(f"known {text}"))
    if not judgement.passes:
        pytest.fail(safe.printable(text), pytrace=False)
