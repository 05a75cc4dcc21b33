"""The board: gathers the outcomes of a run, shows its progress, writes and prints the matrix.

Under pytest-xdist it stands in the controller alone; records come to it as text in reports.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import diff, durations, matrix, nights, output, safe, summary, versus
from harness.errors import EXIT_INFRA, InfraError, UsageError
from harness.matrix import Outcome
from harness.plan import Cell
from harness.progress import Progress, line
from harness.record import loads, to_json
from harness.report import differences as report
from harness.report import files
from harness.report.changes import Sheet
from harness.session import Run
from harness.view import Screen

SECONDS_BETWEEN_LINES = 15.0
"""How often progress is printed where it cannot be rewritten in place (a CI log)."""


def cell_of(item: pytest.Item) -> Cell | None:
    """The cell that a test stands for; None for any other test."""
    callspec = getattr(item, "callspec", None)
    cell = callspec.params.get("cell") if callspec is not None else None
    return cell if isinstance(cell, Cell) else None


BASELINE = pytest.StashKey[dict[str, Any]]()
"""The matrix.json of the run to compare with."""


class Board:
    """The plugin object of one run."""

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
        self._since: Sheet | None = None
        self._history: dict[str, Any] | None = None
        self._unread: list[str] = []
        """What of the history cannot be read."""
        self.others = 0
        """Tests that were selected and are in other shards."""

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._plan([cell.id for item in session.items if (cell := cell_of(item)) is not None])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        if not self._planned:
            self._plan([name for nodeid in ids if (name := _id(nodeid)) in self._cells])

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        output = getattr(node, "workeroutput", None) or {}
        self.others = max(self.others, output.get("kvmatrix_others", 0))

    def _plan(self, ids: list[str]) -> None:
        self._planned = {name: self._cells[name] for name in ids}
        if self._config.option.collectonly:
            return
        # A shard says that it has nothing to do: without a word it would be taken for lost.
        if self._planned or (self._run.options.shard.count > 1 and self._records is None):
            self._keep(self._open)
        if self._planned:
            self._progress = Progress.start(len(self._planned), time.monotonic())
            terminal = self._config.pluginmanager.get_plugin("terminalreporter")
            if terminal is not None and self._config.option.verbose == 0:
                # The progress line stands where pytest would name the file.
                terminal.showfspath = False
                versions = ", ".join(engine.version for engine in self._run.engines)
                terminal.write_line(f"warming up: vLLM {versions} is imported once (10-40 s)")
                for text in self._idle():
                    terminal.write_line(text)

    def _idle(self) -> list[str]:
        """What is to be said of devices that one process leaves idle."""
        if getattr(self._config.option, "tx", None):
            return []
        return [
            f"{len(pool.members)} devices are {pool.device.name}: one is used, -n auto uses all"
            for pool in self._run.options.pools
            if len(pool.members) > 1
        ]

    def _open(self) -> None:
        out = self._run.options.out
        self._records = output.Records(out)
        # Nothing of an earlier run may be read as this one's, should it be cut off: until it ends,
        # every cell that was planned is one that never reported.
        files.remove(out)
        self._write(self._data(self.outcomes()))

    def _write(self, data: dict[str, Any]) -> None:
        path = self._run.options.out / "matrix.json"
        output.write_whole(path, json.dumps(data, indent=1) + "\n")

    def _keep(self, write: Callable[[], None]) -> None:
        """Write, but let a full disk cost the file alone: the run goes on, and says so."""
        try:
            write()
        except (InfraError, UsageError) as error:
            self._trouble = str(error)
            self._records = None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        cell = self._planned.get(_id(report.nodeid))
        if cell is None:
            return
        if (reason := getattr(report, "kvmatrix_skipped", None)) is not None:
            self._add(self._run.skipped(cell, reason), report)
        if (reason := getattr(report, "kvmatrix_notrun", None)) is not None:
            self._add(self._run.notrun(cell, reason), report)
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
        if self._config.option.collectonly:
            return
        if not self._planned and self.others and exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            # There is something to do, but not for so many shards.
            session.exitstatus = pytest.ExitCode.OK
        if self._records is not None:
            self._records.close()
        if not self._planned:
            return
        outcomes = self.outcomes()
        data = self._data(outcomes)
        if (baseline := self._config.stash.get(BASELINE, None)) is not None:
            found = diff.diff(baseline, data, self._unselected())
            self._since = report.sheet(found, baseline, data)
            data["baseline"] = found.to_json()
        if (folder := self._config.option.history) is not None:
            self._keep(lambda: self._remember(Path(folder), data))
        self._keep(lambda: self._write(data))
        records = [to_json(outcome.record) for outcome in outcomes if outcome.record is not None]
        self._keep(lambda: files.write(self._run.options.out, data, records))
        with contextlib.suppress(InfraError):  # without them the next run is merely slower
            durations.save(self._run.cache, self._seconds)
        status = _exit_status(int(exitstatus), outcomes)
        session.exitstatus = (
            EXIT_INFRA if self._trouble and status == pytest.ExitCode.OK else status
        )

    def _remember(self, folder: Path, data: dict[str, Any]) -> None:
        """Put what earlier runs tell into `data`, and this run beside them."""
        try:
            found, self._unread = nights.tell(folder, data, self._unselected())
        except UsageError as error:
            # It was a folder when the run began; that it is none by now must cost nothing else.
            raise InfraError(str(error)) from None
        data["history"] = self._history = found.to_json()
        nights.append(folder, data)

    def _data(self, outcomes: list[Outcome]) -> dict[str, Any]:
        """matrix.json as of now."""
        about = {
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began)),
            "seconds": round(time.time() - self._began, 1),
            "depth": {d.spec: self._run.options.depth_on(d) for d in self._run.options.devices},
            "unselected": len(self._cells) - len(self._planned),
            "counts": matrix.counts(outcome.judgement for outcome in outcomes),
            "vouched": matrix.vouched(outcome.judgement for outcome in outcomes),
        }
        if (shard := self._run.options.shard).count > 1:
            digest = self._run.options.recorded.digest
            about["shard"] = {"index": shard.index, "count": shard.count, "durations": digest}
        return matrix.to_json(
            about,
            self._run.engines,
            self._run.options.devices,
            outcomes,
            [difference.to_json() for difference in versus.differences(outcomes)],
        )

    def _unselected(self) -> set[diff.Key]:
        cells = (cell for name, cell in self._cells.items() if name not in self._planned)
        return {(cell.case, cell.device.spec, cell.engine.version) for cell in cells}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self._config.option.collectonly or not self._planned:
            return
        writer = terminalreporter._tw
        terminalreporter.ensure_newline()
        terminalreporter.write_line("")
        screen = Screen(writer.fullwidth, writer.hasmarkup, _unicode())
        rows = summary.rows(self._run, self.outcomes(), screen, self._since, self._history)
        for row in rows:
            writer.line(row)
        for fault in self._unread:
            writer.line(f"kvmatrix: {safe.printable(fault)}", yellow=True)
        if self._trouble:
            writer.line(f"kvmatrix: {safe.printable(self._trouble)}", red=True)
        else:
            names = ", ".join(("matrix.json", *files.NAMES))
            writer.line(f"{names} and records.jsonl are in {self._run.options.out}")


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
