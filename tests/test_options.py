from __future__ import annotations

from typing import Any

import pytest

from harness.errors import UsageError
from harness.options import options
from harness.plan import Axes
from harness.profile import SWEEP


@pytest.mark.parametrize(
    ("message", "given"),
    [
        ("--sweep names the devices itself", {"sweep": True, "devices": ["virtual:h200"]}),
        ("--block-size '0' is not a number of tokens", {"block_sizes": ["0"]}),
        ("--block-size 'x' is not a number of tokens", {"block_sizes": ["x"]}),
        ("--tensor-parallel-size '-2' is not a number", {"tensor_parallel_sizes": ["-2"]}),
        ("unknown model runner 'v3'", {"model_runners": ["v3"]}),
        ("--max-model-len '1e3' is not a number of tokens", {"max_model_len": "1e3"}),
        ("--gpu-memory-utilization '90' is not a share", {"gpu_memory_utilization": "90"}),
        ("--gpu-memory-utilization 'nan' is not a share", {"gpu_memory_utilization": "nan"}),
        ("--shard '3/2' is not I/N", {"shard": "3/2"}),
        (
            "--tensor-parallel-size 2 is for virtual devices",
            {"devices": ["cpu"], "tensor_parallel_sizes": ["2"]},
        ),
    ],
)
def test_what_makes_no_sense_is_named(message: str, given: dict[str, Any]) -> None:
    devices = given.pop("devices", [] if "sweep" in given else ["virtual:h200"])
    with pytest.raises(UsageError, match=message):
        options(devices, [], **given)


def test_a_sweep_is_one_virtual_device_for_each_capability() -> None:
    devices = options([], [], sweep=True).devices
    assert [f"virtual:{name}" for name in SWEEP] == [each.spec for each in devices]


def test_axes_are_as_asked_each_once() -> None:
    given = options(
        ["virtual:h200"], [], block_sizes=["64", "16", "64"], tensor_parallel_sizes=["1", "8"]
    )
    assert Axes((64, 16), (1, 8)) == given.axes


def test_a_model_keeps_the_context_that_it_can_have() -> None:
    given = options(["virtual:h200"], [], max_model_len="8192", gpu_memory_utilization="0.5")
    assert {"max_model_len": 448, "gpu_memory_utilization": 0.5} == given.engine_args(
        {"max_model_len": 448}
    )
    assert 8192 == given.engine_args({})["max_model_len"]
    assert {"runner": "pooling"} == options(["virtual:h200"], []).engine_args({"runner": "pooling"})
