"""The console script `kvmatrix`: what there is to run the matrix with, and the run itself."""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import device, host, install, nvml, plan, safe
from harness.commands import agree, bisect, diff, explain, history, pipeline, report, support
from harness.device import Discovery, Gpu
from harness.errors import EXIT_INFRA, EXIT_USAGE, InfraError, UsageError
from harness.facts import check_supported
from harness.kindname import kind_names
from harness.table import table

EXIT_INTERRUPTED = 130
"""What shells give for a command that was ended by Ctrl-C."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command: 0 done, 1 a cell that fails, 2 usage, 75 host or network not usable."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = _main(arguments)
        sys.stdout.flush()
    except UsageError as error:
        return _complain(error, EXIT_USAGE)
    except InfraError as error:
        return _complain(error, EXIT_INFRA)
    except KeyboardInterrupt:
        # What runs a cell has ended its children by now.
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader (`head`) has what it wants; Python must not complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def _complain(error: Exception, code: int) -> int:
    print(f"kvmatrix: {safe.printable(safe.mask(str(error), os.environ))}", file=sys.stderr)
    return code


def _main(arguments: list[str]) -> int:
    if arguments[:1] == ["run"] and arguments[1:2] not in (["-h"], ["--help"]):
        # All that follows is pytest's: argparse must not read it.
        return run(arguments[1:])
    options = _parser().parse_args(arguments)
    if "command" in options:
        return int(options.command(options))
    rows = options.rows() if options.json else options.shown()
    header, empty = options.header, options.empty
    if options.json:
        print(json.dumps(rows, indent=1))
    elif rows:
        # What a pipe reads is a line for each row.
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        for line in table(header, [options.cells(row) for row in rows], width):
            print(line)
    else:
        print(f"kvmatrix: {safe.printable(empty)}", file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvmatrix",
        description="What vLLM's KV cache really becomes, for every model, attention backend, "
        "kv_cache_dtype and device.",
        epilog="example: kvmatrix run -k dsv4",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    lists = (
        (
            "devices",
            "the devices here and the virtual ones",
            "pytest -k dsv4 --device virtual:h200/1g.35gb",
        ),
        ("engines", "the vLLM here and those in the cache", "pytest -k dsv4 --engine 0.27.1"),
        ("models", "the models that are shipped", "pytest -k dsv4"),
    )
    for name, what, use in lists:
        command = commands.add_parser(
            name,
            help=f"list {what}",
            description=f"List {what}.",
            epilog=f"example: kvmatrix {name} --json; then: {use}; exit code: 0 listed, 2 usage",
        )
        command.add_argument("--json", action="store_true", help="print a JSON list")
        header, rows, cells, empty = _LISTS[name]
        shown = _SHOWN.get(name, rows)
        command.set_defaults(header=header, rows=rows, shown=shown, cells=cells, empty=empty)
    explain.add(commands)
    diff.add(commands)
    agree.add(commands)
    support.add(commands)
    report.add(commands)
    history.add(commands)
    bisect.add(commands)
    pipeline.add(commands)
    commands.add_parser(
        "run",
        help="run the matrix: pytest with the arguments that follow",
        description="Run the matrix: everything behind `run` goes to pytest.",
        epilog="example: kvmatrix run -k dsv4 --device virtual:b200; "
        "pytest's own help: kvmatrix run -- --help; exit code: 0 all as expected, 1 a product "
        "failure, 2 usage, 75 infrastructure only",
        usage="kvmatrix run [pytest arguments]",
    )
    return parser


def run(arguments: list[str]) -> int:
    """Become pytest with these arguments; a leading `--` is dropped."""
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *arguments])


def devices() -> list[dict[str, Any]]:
    """Every GPU and MIG slice that is visible, the CPU and every virtual device, as JSON data."""
    found = _discovered().devices
    return [each.to_json() for each in (*found, host.cpu(), *device.virtual_devices())]


def _device_rows() -> list[dict[str, Any]]:
    others = (host.cpu(), *device.virtual_devices())
    return [*_with_parents(_discovered()), *(each.to_json() for each in others)]


def _discovered() -> Discovery:
    """What NVML shows; its trouble goes to stderr."""
    found = nvml.discover()
    if found.trouble:
        told = safe.printable(safe.mask(found.trouble, os.environ))
        print(f"kvmatrix: {told}", file=sys.stderr)
    return found


def _with_parents(found: Discovery) -> list[dict[str, Any]]:
    """The devices, and before its slices each GPU in MIG mode: what `nvidia-smi -L` lists."""
    parents = {gpu.uuid: gpu for gpu in found.gpus if gpu.mig_mode}
    bare = [gpu for gpu in parents.values() if not gpu.devices]
    rows: list[dict[str, Any]] = []
    above = None
    for each in found.devices:
        while bare and each.index is not None and bare[0].index < each.index:
            rows.append(_parent_row(bare.pop(0)))
        if each.parent in parents and each.parent != above:
            rows.append(_parent_row(parents[each.parent]))
        above = each.parent
        rows.append(each.to_json())
    return rows + [_parent_row(gpu) for gpu in bare]


def _parent_row(gpu: Gpu) -> dict[str, Any]:
    return {
        "spec": gpu.uuid,
        "kind": "gpu (MIG mode)",
        "capability": gpu.capability,
        "memory_bytes": 0,
        "sm_count": 0,
        "name": gpu.name,
    }


def _device_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    capability = ".".join(map(str, row["capability"] or ())) or "-"
    memory = f"{row['memory_bytes'] / device.GIB:.1f} GiB" if row["memory_bytes"] else "-"
    return row["spec"], row["kind"], capability, memory, str(row["sm_count"] or "-"), row["name"]


def engines() -> list[dict[str, Any]]:
    """The vLLM of this environment and those in the cache. No interpreter is started.

    `version` is None where there is no vLLM, and empty where it cannot be told.
    """
    cache = install.cache_folder(os.environ)
    here = install.find(Path(sys.executable))
    found = [("current", here.version if here else None, sys.executable)]
    found += [(e.spec, e.version, str(e.python)) for e in install.known_engines(cache)]
    return [
        {"spec": spec, "version": version, "supported": _supported(version), "python": python}
        for spec, version, python in found
    ]


def _supported(version: str | None) -> bool:
    try:
        check_supported(version or "")
    except UsageError:
        return False
    return True


def _engine_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    version = "none" if row["version"] is None else row["version"] or "unknown"
    note = "" if row["supported"] or row["version"] is None else " (not supported)"
    return row["spec"], version + note, row["python"]


def models() -> list[dict[str, Any]]:
    """The shipped models, as JSON data; `layers` is None where the config has no number, `kv` where
    the oracle does not know the model."""
    return [
        {
            "key": model.key,
            "model_type": model.config.get("model_type"),
            "layers": _layers(model.config),
            "kv": _kinds(model),
            "path": str(model.path),
        }
        for model in plan.models(plan.MODELS)
    ]


def _kinds(model: plan.Model) -> list[str] | None:
    names = kind_names(model.config)
    if names is None:
        return None
    return [*names, *(["MTP layers"] if model.start.drafts else [])]


def _layers(config: Mapping[str, Any]) -> int | None:
    # A model of several modalities keeps its language model's numbers in `text_config`.
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping) and isinstance(part.get("num_hidden_layers"), int):
            return int(part["num_hidden_layers"])
    return None


def _model_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    shown = {**row, "kv": None if row["kv"] is None else ", ".join(row["kv"]) or "none"}
    return tuple("-" if shown[name] is None else str(shown[name]) for name in _MODEL_COLUMNS)


_DEVICE_COLUMNS = ("device", "kind", "capability", "memory", "SMs", "name")
_MODEL_COLUMNS = ("key", "model_type", "layers", "kv")

_LISTS = {
    "devices": (_DEVICE_COLUMNS, devices, _device_cells, ""),
    "engines": (("engine", "vLLM", "python"), engines, _engine_cells, ""),
    "models": (
        _MODEL_COLUMNS,
        models,
        _model_cells,
        f"no models in {plan.MODELS}: they are part of a checkout, so run it from there",
    ),
}

_SHOWN = {"devices": _device_rows}
"""Rows for people, where they are others than those of `--json`."""


if __name__ == "__main__":
    sys.exit(main())
