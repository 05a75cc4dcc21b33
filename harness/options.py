"""The command line of a run, checked as far as it can be without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import device, host, nvml
from harness.device import Device, Pool
from harness.errors import UsageError, unknown
from harness.launch import ISOLATIONS
from harness.record import STAGES, VIRTUAL_STAGES

REAL_STAGES = STAGES[STAGES.index("warmup") :]
"""How far a real engine can be told to go: vLLM initialises completely or not at all."""

VIRTUAL_TIMEOUT, REAL_TIMEOUT = 120.0, 600.0
"""Seconds a cell may take. A virtual one takes about one, the first of a family more; a real one
3 - 30 s on a CPU, and minutes where kernels are compiled for a GPU the first time."""

MODEL_RUNNERS = ("v1", "v2")


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    pools: tuple[Pool, ...]
    engines: tuple[str, ...]
    depth: str | None
    """None for each device's own default."""
    timeout: float | None
    """Seconds; None for each device's own default."""
    out: Path
    isolation: str = ISOLATIONS[0]
    model_runner: str | None = None

    @property
    def devices(self) -> tuple[Device, ...]:
        """The facets of the matrix."""
        return tuple(pool.device for pool in self.pools)

    def depth_on(self, device: Device) -> str:
        """How far a cell on `device` goes where no case asks for more."""
        return self.depth or (REAL_STAGES if device.real else VIRTUAL_STAGES[::-1])[0]

    def timeout_on(self, device: Device) -> float:
        """Seconds a cell on `device` may take."""
        return self.timeout or (REAL_TIMEOUT if device.real else VIRTUAL_TIMEOUT)


def options(
    devices: Sequence[str],
    engines: Sequence[str],
    depth: str | None = None,
    timeout: str | None = None,
    out: str = "matrix",
    isolation: str = ISOLATIONS[0],
    model_runner: str | None = None,
) -> Options:
    """Check what was passed. UsageError names what is wrong, and what is near it; InfraError where
    devices cannot be seen."""
    if isolation not in ISOLATIONS:
        raise unknown("isolation", isolation, ISOLATIONS, f"one of {', '.join(ISOLATIONS)}")
    if model_runner is not None and model_runner not in MODEL_RUNNERS:
        raise unknown("model runner", model_runner, MODEL_RUNNERS, "one of v1, v2")
    if not devices and engines and all(spec.strip().startswith("cpu:") for spec in engines):
        # The only device that vLLM's CPU build serves.
        devices = ["cpu"]
    pools = device.select(devices, nvml.discover, host.cpu)
    for pool in pools:
        _check_depth(depth, pool.device)
        if model_runner is not None and not pool.device.real:
            raise UsageError(
                f"--model-runner {model_runner} is for real devices: {pool.device.spec} plans "
                "without a model runner"
            )
    try:
        seconds = None if timeout is None else float(timeout)
    except ValueError:
        seconds = 0.0
    if seconds is not None and not 0 < seconds < 86_400:
        raise UsageError(f"--case-timeout {timeout!r} is not a number of seconds above 0")
    folder = Path(out)
    if folder.exists() and not folder.is_dir():
        raise UsageError(f"--matrix-out {out!r} is a file; name a folder")
    specs = tuple(dict.fromkeys(engines or ["current"]))
    return Options(pools, specs, depth, seconds, folder, isolation, model_runner)


def _check_depth(depth: str | None, device: Device) -> None:
    """UsageError where `device` cannot be told to stop there."""
    if depth is None:
        return
    can = REAL_STAGES if device.real else VIRTUAL_STAGES[1:]
    if depth in can:
        return
    if depth not in STAGES:
        raise unknown("depth", depth, STAGES, f"one of {', '.join(can)}")
    if device.real:
        why = f"is not for {device.spec}: a real engine initialises completely"
    else:
        why = "is not for a virtual device: there is no forward pass"
    raise UsageError(f"depth {depth!r} {why}; one of {', '.join(can)}")
