"""Arguments of pytest in a settings file, checked without a device and without an engine. Pure."""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Sequence
from typing import NoReturn

from harness import device
from harness.device import Discovery
from harness.errors import UsageError, unknown
from harness.facts import check_supported
from harness.launch import ISOLATIONS
from harness.options import REAL_STAGES, options

_GIVEN = {
    "--device": "it is `devices` of the step",
    "--engine": "it is `engine` of the step",
    "--shard": "the step's `parallelism` makes the shards",
    "--matrix-out": "ci.shard names the folder",
    "--baseline": "it is `baseline` under `merge`",
    "--sweep": "name the virtual devices in `devices`",
}
"""Options that have a place of their own."""

_FLAGS = ("-v", "--verbose", "-q", "--quiet", "-s")
_PYTEST = ("-k", "-m", "-n", "--tb", "--durations")
_OURS = (
    "--depth",
    "--case-timeout",
    "--isolation",
    "--block-size",
    "--tensor-parallel-size",
    "--model-runner",
    "--max-model-len",
    "--gpu-memory-utilization",
)
_REPEATABLE = ("--block-size", "--tensor-parallel-size", "--model-runner")

_SHELL = re.compile(r"[\"'`$\\]")
_PLAIN = re.compile(r"[A-Za-z0-9_@%+=:,./-]+")


class _RealError(Exception):
    """A device that only the machine which has it can look up."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def split(text: str, where: str) -> tuple[str, ...]:
    """The words of a command line. UsageError where it is none."""
    try:
        return tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"{where}: {error}: {text}") from None


def quote(word: str) -> str:
    """`word` for a shell, in double quotes where it needs any: vLLM's CI makes single ones double.

    It has no character that means anything within them: `check` sees to that.
    """
    return word if _PLAIN.fullmatch(word) else f'"{word}"'


def is_real(spec: str) -> bool:
    """True where a device SPEC names a GPU or a slice of the agent, `auto` too. UsageError where
    it names nothing."""

    def discover() -> Discovery:
        raise _RealError

    try:
        device.select([spec], discover)
    except _RealError:
        return True
    return False


def check_engine(spec: str) -> None:
    """UsageError where no agent could have this engine."""
    if spec == "current" or "/" in spec:
        return
    version = spec.removeprefix("cpu:")
    if not re.fullmatch(r"v?\d[\w.+!-]*", version):
        raise unknown(
            "engine", spec, ["current"], "current, a release such as 0.33.0, or a path of a Python"
        )
    check_supported(version.removeprefix("v"))


def check(devices: Sequence[str], engine: str, arguments: Sequence[str]) -> None:
    """UsageError where pytest or the harness would refuse what a step passes them."""
    for word in (*devices, engine, *arguments):
        if _SHELL.search(word) or not word.isprintable() or not word:
            raise UsageError(f"{word!r} is empty, or has a character that a shell would read")
    given = _parsed(arguments)
    real = [spec for spec in devices or ["auto"] if is_real(spec)]
    check_engine(engine)
    depth = given.depth
    if real and depth is not None:
        if depth not in REAL_STAGES:
            raise unknown("depth", depth, REAL_STAGES, f"one of {', '.join(REAL_STAGES)}")
        depth = None
    if real and any(size != "1" for size in given.tensor_parallel_size):
        raise UsageError(f"--tensor-parallel-size is for virtual devices, and {real[0]} is real")
    options(
        [spec for spec in devices if spec not in real] or [device.DEFAULT],
        [engine],
        depth,
        given.case_timeout,
        ".",
        given.isolation or ISOLATIONS[0],
        block_sizes=given.block_size,
        tensor_parallel_sizes=given.tensor_parallel_size,
        model_runners=given.model_runner,
        max_model_len=given.max_model_len,
        gpu_memory_utilization=given.gpu_memory_utilization,
    )
    for option, text in (("-k", given.k), ("-m", given.m)):
        _check_expression(option, text)
    if given.n is not None and not re.fullmatch(r"auto|logical|[0-9]{1,4}", given.n):
        raise UsageError(f"-n {given.n!r} is neither auto nor a number of workers")


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False, usage="")
    for flag in _FLAGS:
        parser.add_argument(flag, action="store_true")
    for option in (*_PYTEST, *_OURS):
        if option in _REPEATABLE:
            parser.add_argument(option, action="append", default=[])
        else:
            parser.add_argument(option)
    given, rest = parser.parse_known_args(list(arguments))
    for word in rest:
        option = word.partition("=")[0]
        if option in _GIVEN:
            raise UsageError(f"{option} does not belong here: {_GIVEN[option]}")
        if not option.startswith("-"):
            raise UsageError(f"{word!r} is no option: cells are chosen with -k")
        known = (*_FLAGS, *_PYTEST, *_OURS)
        raise unknown("option", option, known, f"a step can have {', '.join(known)}")
    return given


def _check_expression(option: str, text: str | None) -> None:
    if text is None:
        return
    # Here, since pytest is slow to load. It is what pytest reads -k with, and has no public name.
    from _pytest.mark.expression import Expression

    try:
        Expression.compile(text)
    except SyntaxError as error:
        raise UsageError(f"{option} {text!r}: {error.msg}") from None
