"""The pytest plugin: options, one test per cell, live progress, and the matrix at the end.

Cells run in children (`launch.py`) and are judged by pure functions (`verdict.py`); this module
only carries things between pytest and them. Under pytest-xdist each worker runs its share of the
cells, and the controller alone writes and shows.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import NoReturn

import pytest

from harness import durations, nights, result, safe, session, split, testengine
from harness.board import BASELINE, Board, cell_of
from harness.errors import EXIT_INFRA, EXIT_USAGE, InfraError, UsageError
from harness.launch import ISOLATIONS, Launcher
from harness.matrix import Outcome
from harness.options import REAL_TIMEOUT, VIRTUAL_TIMEOUT, options
from harness.plan import Cell
from harness.proof import Reductions
from harness.record import dumps
from harness.session import Run
from harness.workers import Workers, jobs

RUN = pytest.StashKey[Run]()
LAUNCHER = pytest.StashKey[Launcher]()
REDUCTIONS = pytest.StashKey[Reductions]()
BOARD = pytest.StashKey[Board]()
OUTCOME = pytest.StashKey[Outcome]()


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
        "--sweep",
        action="store_true",
        help="one virtual device for each compute capability, in place of --device",
    )
    group.addoption(
        "--shard",
        metavar="I/N",
        help="part I of N of the selected cells; each is in exactly one part",
    )
    group.addoption(
        "--shard-durations",
        metavar="FILE",
        help="split by the seconds that this file tells, longest first (durations.json of an "
        "earlier run); every shard must be given the same file",
    )
    group.addoption(
        "--block-size",
        action="append",
        default=[],
        metavar="TOKENS",
        help="pass this block size, in cells of their own; repeatable",
    )
    group.addoption(
        "--tensor-parallel-size",
        action="append",
        default=[],
        metavar="N",
        help="the KV cache of one of N GPUs, in cells of their own, on virtual devices; repeatable",
    )
    group.addoption(
        "--model-runner",
        action="append",
        default=[],
        metavar="RUNNER",
        help="v1 or v2, in cells of their own, for real devices (vLLM's own choice); repeatable",
    )
    group.addoption(
        "--max-model-len",
        metavar="TOKENS",
        help="context that the KV cache is planned for (4096, or what the model can have)",
    )
    group.addoption(
        "--gpu-memory-utilization",
        metavar="SHARE",
        help="share of a device's memory that vLLM may use (vLLM's own default)",
    )
    group.addoption(
        "--matrix-out",
        default="matrix",
        metavar="DIR",
        help="folder for matrix.html, .json and .md, junit.xml and records.jsonl (matrix/)",
    )
    group.addoption(
        "--baseline",
        metavar="PATH",
        help="matrix.json of an earlier run, or its folder: tell what has changed since (as "
        "`kvmatrix diff`; the exit code stays that of this run)",
    )
    group.addoption(
        "--history",
        metavar="DIR",
        help="folder to which each run adds a file: tell of each cell since when it is what it is, "
        "and which are flaky or missing (`kvmatrix history DIR` shows it)",
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
    if option.baseline is not None and not hasattr(config, "workerinput"):
        # Before anything starts: this run may write its own to the same place.
        config.stash[BASELINE] = result.load(Path(option.baseline))
    if option.history is not None:
        nights.check(Path(option.history))
    chosen = options(
        option.device,
        option.engine,
        option.depth,
        option.case_timeout,
        option.matrix_out,
        option.isolation,
        sweep=option.sweep,
        shard=option.shard,
        shard_durations=option.shard_durations,
        block_sizes=option.block_size,
        tensor_parallel_sizes=option.tensor_parallel_size,
        model_runners=option.model_runner,
        max_model_len=option.max_model_len,
        gpu_memory_utilization=option.gpu_memory_utilization,
    )
    if chosen.recorded.trouble and not hasattr(config, "workerinput"):
        print(f"kvmatrix: {safe.printable(chosen.recorded.trouble)}", file=sys.stderr)
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
        # The host is shared with the other workers of an xdist run.
        workers = int(getattr(config, "workerinput", {}).get("workercount", 1))
        config.stash[LAUNCHER] = launcher = session.launcher(run, workers)
        config.stash[REDUCTIONS] = Reductions(
            run.cache, launcher.record, lambda text: _say(config, text)
        )
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


def _say(config: pytest.Config, text: str) -> None:
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None:
        if terminal.isatty:
            terminal.rewrite("", erase=True)  # pytest's "collecting ..." stands there
        terminal.write_line(safe.printable(text))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "cell" not in metafunc.fixturenames:
        return
    run = metafunc.config.stash.get(RUN, None)
    cells = run.cells if run is not None else ()
    metafunc.parametrize("cell", cells, ids=[cell.id for cell in cells])


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep this shard's cells, and prove the reductions that they need, before any of them runs."""
    if RUN in config.stash:
        _deselect(config, items)
    if LAUNCHER not in config.stash or hasattr(config, "workerinput"):
        return  # a worker has no way to end the run: there the cells themselves say what is wrong
    run, reductions = config.stash[RUN], config.stash[REDUCTIONS]
    cells = [c for item in items if (c := cell_of(item)) is not None and not c.lacks]
    try:
        # Planned side by side, as far as there is room.
        launcher = config.stash[LAUNCHER]
        launcher.plan(reductions.requests(cell for cell in cells if cell.device.real))
        for cell in cells:
            # A model that cannot be proven fails its own cells, when their turn comes.
            run.runs(cell, reductions)
    except InfraError as error:
        pytest.exit(f"kvmatrix: {safe.printable(str(error))}", returncode=EXIT_INFRA)


def _deselect(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take out of `items` what is in other shards. Before -k has had its say would split more
    evenly, but leave parts with nothing to do."""
    chosen = config.stash[RUN].options

    def piece(item: pytest.Item) -> split.Piece:
        cell = cell_of(item)
        if cell is None:
            return split.Piece(item.nodeid, split.OTHER_SECONDS)
        return split.piece(cell, chosen.recorded.durations.estimate(cell))

    kept = set(split.members(items, chosen.shard, piece))
    others = [item for item in items if item not in kept]
    if hasattr(config, "workerinput"):
        # The controller collects nothing itself.
        config.workeroutput["kvmatrix_others"] = len(others)  # type: ignore[attr-defined]
    else:
        config.stash[BOARD].others = len(others)
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item in kept]


@pytest.hookimpl(wrapper=True)
def pytest_runtestloop(session: pytest.Session) -> Generator[None, object, object]:
    launcher = session.config.stash.get(LAUNCHER, None)
    if launcher is not None and not hasattr(session.config, "workerinput"):
        run, reductions = session.config.stash[RUN], session.config.stash[REDUCTIONS]
        launcher.plan(
            run.request(cell)
            for item in session.items
            if (cell := cell_of(item)) is not None and run.runs(cell, reductions)
        )
    return (yield)


@pytest.fixture
def outcome(request: pytest.FixtureRequest, cell: Cell) -> Outcome:
    """The cell's record from its child, judged."""
    run, launcher = request.config.stash[RUN], request.config.stash[LAUNCHER]
    result = run.outcome(cell, launcher, request.config.stash[REDUCTIONS])
    request.node.stash[OUTCOME] = result
    testengine.tag(request.config, request.node, result.judgement)
    if result.judgement.verdict == "infra":
        # In a fixture, so that pytest counts it as an error and not as a failure of the cell.
        pytest.fail(safe.printable(result.judgement.reason), pytrace=False)
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
        elif outcome.judgement.verdict == "notrun":
            report.kvmatrix_notrun = outcome.judgement.reason  # type: ignore[attr-defined]
        else:
            report.kvmatrix_skipped = outcome.judgement.reason  # type: ignore[attr-defined]
        report.kvmatrix_needs = outcome.needs_bytes  # type: ignore[attr-defined]
    return report


def finish(outcome: Outcome) -> None:
    """End the running test as the judgement says: pass, fail, skip, or xfail for a known one."""
    judgement = outcome.judgement
    if judgement.verdict == "skipped":
        pytest.skip(judgement.reason)
    text = f"{judgement.verdict}: {judgement.reason}"
    if judgement.stale:
        pytest.fail(safe.printable(judgement.stale), pytrace=False)
    if judgement.known:
        pytest.xfail(safe.printable(f"known {text}"))
    if not judgement.passes:
        pytest.fail(safe.printable(text), pytrace=False)
