"""The command line of a run, checked as far as it can be without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness import device, host, nvml
from harness.case import RUNNERS
from harness.device import Device, Pool
from harness.durations import Recorded, recorded
from harness.errors import UsageError, unknown
from harness.launch import ISOLATIONS
from harness.plan import Axes
from harness.profile import SWEEP
from harness.record import STAGES, VIRTUAL_STAGES
from harness.shard import Shard
from harness.shard import parse as parse_shard

REAL_STAGES = STAGES[STAGES.index("warmup") :]
"""How far a real engine can be told to go: vLLM initialises completely or not at all."""

VIRTUAL_TIMEOUT, REAL_TIMEOUT = 120.0, 600.0
"""Seconds a cell may take. A virtual one takes about one, the first of a family more; a real one
3 - 30 s on a CPU, and minutes where kernels are compiled for a GPU the first time."""


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
    axes: Axes = field(default_factory=Axes)
    max_model_len: int | None = None
    """Tokens; None for `arguments.MAX_MODEL_LEN`."""
    gpu_memory_utilization: float | None = None
    """Share of a device's memory; None for vLLM's own default."""
    shard: Shard = field(default_factory=Shard)
    recorded: Recorded = field(default_factory=Recorded)
    """What the shards are split by."""

    def engine_args(self, own: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments of vLLM's `EngineArgs` for a model that has these of its own: a context that it
        cannot have is not asked of it."""
        given = dict(own)
        if self.max_model_len is not None:
            given["max_model_len"] = min(
                self.max_model_len, own.get("max_model_len", self.max_model_len)
            )
        if self.gpu_memory_utilization is not None:
            given["gpu_memory_utilization"] = self.gpu_memory_utilization
        return given

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
    *,
    sweep: bool = False,
    shard: str | None = None,
    shard_durations: str | None = None,
    block_sizes: Sequence[str] = (),
    tensor_parallel_sizes: Sequence[str] = (),
    model_runners: Sequence[str] = (),
    max_model_len: str | None = None,
    gpu_memory_utilization: str | None = None,
) -> Options:
    """Check what was passed. UsageError names what is wrong, and what is near it; InfraError where
    devices cannot be seen."""
    if isolation not in ISOLATIONS:
        raise unknown("isolation", isolation, ISOLATIONS, f"one of {', '.join(ISOLATIONS)}")
    axes = _axes(block_sizes, tensor_parallel_sizes, model_runners)
    if sweep:
        if devices:
            raise UsageError("--sweep names the devices itself: leave --device out")
        devices = [f"virtual:{name}" for name in SWEEP]
    if not devices and engines and all(spec.strip().startswith("cpu:") for spec in engines):
        # The only device that vLLM's CPU build serves.
        devices = ["cpu"]
    pools = device.select(devices, nvml.discover, host.cpu)
    for pool in pools:
        _check_depth(depth, pool.device)
        _check_axes(axes, pool.device)
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
    return Options(
        pools,
        specs,
        depth,
        seconds,
        folder,
        isolation,
        axes,
        None if max_model_len is None else _whole("--max-model-len", max_model_len, "tokens"),
        _share(gpu_memory_utilization),
        parse_shard(shard),
        Recorded() if shard_durations is None else recorded(Path(shard_durations)),
    )


def _axes(
    block_sizes: Sequence[str], tensor_parallel_sizes: Sequence[str], model_runners: Sequence[str]
) -> Axes:
    for runner in model_runners:
        if runner not in RUNNERS:
            raise unknown("model runner", runner, RUNNERS, "one of v1, v2")

    def sizes(option: str, given: Sequence[str], unit: str) -> tuple[int, ...]:
        return tuple(dict.fromkeys(_whole(option, text, unit) for text in given))

    usual = Axes()
    return Axes(
        sizes("--block-size", block_sizes, "tokens") or usual.block_sizes,
        sizes("--tensor-parallel-size", tensor_parallel_sizes, "GPUs")
        or usual.tensor_parallel_sizes,
        tuple(dict.fromkeys(model_runners)) or usual.model_runners,
    )


def _whole(option: str, text: str, unit: str) -> int:
    """A whole number above 0, below any that makes sense. UsageError names what is none."""
    if not text.isdecimal() or not 0 < int(text) < 1 << 31:
        raise UsageError(f"{option} {text!r} is not a number of {unit} above 0")
    return int(text)


def _share(text: str | None) -> float | None:
    try:
        share = None if text is None else float(text)
    except ValueError:
        share = 0.0
    if share is not None and not 0 < share <= 1:
        raise UsageError(f"--gpu-memory-utilization {text!r} is not a share such as 0.9")
    return share


def _check_axes(axes: Axes, device: Device) -> None:
    """UsageError where `device` cannot have what was asked for."""
    more = [size for size in axes.tensor_parallel_sizes if size > 1]
    if more and device.real:
        raise UsageError(
            f"--tensor-parallel-size {more[0]} is for virtual devices: a cell has one device, and "
            f"{device.spec} is real"
        )


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
