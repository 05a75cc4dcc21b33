from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.agree import BEYOND, CONTRADICTED, UNCOMPARED, Agreement, agree
from harness.cli import main
from harness.errors import UsageError
from tests.results import H200, cache, cell, gpu, matrix, write

B200 = {"spec": "virtual:b200", "kind": "virtual", "name": "NVIDIA B200", "capability": [10, 0]}


def real(verdict: str = "ok", dtype: str = "auto", **more: Any) -> dict[str, Any]:
    """A measured cell. What the depth of a reduced model and a device's memory change differs."""
    found = cell(verdict, dtype, device="GPU-1") | {"num_blocks": 7, "kv_bytes_per_token": 4096}
    if verdict == "ok":
        found |= {"stage": "warmup", "kv": [cache(layers=1)]}
    return found | more


def beside(virtual: dict[str, Any], *measured: dict[str, Any]) -> Agreement:
    return agree(matrix(virtual), matrix(*measured, devices=(gpu(1),)))


def told(virtual: dict[str, Any], measured: dict[str, Any]) -> list[tuple[Any, ...]]:
    found = beside(virtual, measured).changes
    return [(c.kind, f"{c.part} {c.what}".strip(), c.old, c.new) for c in found]


def test_layers_depth_and_capacity_are_no_contradiction() -> None:
    found = beside(cell(), real())
    assert ((), 1, 1, 0) == (found.changes, found.compared, found.agreed, found.exit_code)
    assert (("virtual:h200", "GPU-1"),) == found.pairs


def test_what_was_measured_otherwise_contradicts() -> None:
    other = real(
        kv=[cache(32768, shape=[-1, 2, 16, 4, 128], dtype="uint8", tensor_dtype="uint8")],
        resolved={
            "kv_cache_dtype": "fp8",
            "storage_dtype": "uint8",
            "backends": ["FLASHINFER"],
            "selected": "FLASHINFER",
        },
    )
    assert {
        ("kv_cache_dtype", "auto", "fp8"),
        ("storage_dtype", "bfloat16", "uint8"),
        ("backends", ("FLASH_ATTN",), ("FLASHINFER",)),
        ("selected", "FLASH_ATTN", "FLASHINFER"),
        ("attn page_size_bytes", 65536, 32768),
        ("attn content_bytes", 65536, 32768),
        ("attn dtype", "bfloat16", "uint8"),
        ("attn tensor_dtype", "bfloat16", "uint8"),
        ("attn shape", "(blocks, 2, 16, 8, 128)", "(blocks, 2, 16, 4, 128)"),
    } == {change[1:] for change in told(cell(), other)}
    found = beside(cell(), other)
    assert (1, 0, 1) == (found.compared, found.agreed, found.exit_code)


def test_a_cache_that_one_alone_has_contradicts() -> None:
    two = real(kv=[cache(), cache(64, "indexer")])
    assert [(CONTRADICTED, "caches", (), ("indexer of 64 B",))] == told(cell(), two)


@pytest.mark.parametrize(
    ("virtual", "measured"), [("ok", "rejected"), ("rejected", "ok"), ("rejected", "unclean")]
)
def test_another_verdict_contradicts(virtual: str, measured: str) -> None:
    assert [(CONTRADICTED, "verdict", virtual, measured)] == told(cell(virtual), real(measured))


def test_a_known_failure_is_still_the_same_verdict() -> None:
    assert [] == told(cell("broken"), real("broken", known="https://bug/1"))


@pytest.mark.parametrize(
    ("stage", "more", "kind"),
    [
        ("warmup", {"error": {"type": "E", "message": "", "where": ""}}, BEYOND),
        ("warmup", {"end": "signal"}, BEYOND),
        ("allocate", {"end": "signal"}, CONTRADICTED),
        # It went through, and is not what it must be: that a virtual device would have seen.
        ("warmup", {"end": "finished"}, CONTRADICTED),
    ],
)
def test_what_a_virtual_device_cannot_see_is_told_apart(
    stage: str, more: dict[str, Any], kind: str
) -> None:
    found = beside(cell(), real("crashed", stage=stage, **more))
    assert [(kind, "verdict")] == [(c.kind, c.what) for c in found.changes]
    assert int(kind == CONTRADICTED) == found.exit_code


@pytest.mark.parametrize("verdict", ["notrun", "infra", "skipped"])
def test_without_a_result_nothing_agrees(verdict: str) -> None:
    virtual = matrix(cell(), cell("ok", "fp8"))
    found = agree(virtual, matrix(real(), real(verdict, "fp8"), devices=(gpu(1),)))
    assert [(UNCOMPARED, "ok", verdict)] == [(c.kind, c.old, c.new) for c in found.changes]
    assert (1, 1, 0) == (found.compared, found.agreed, found.exit_code)
    with pytest.raises(UsageError, match="nothing to compare"):
        beside(cell(), real(verdict))


def test_cells_that_one_alone_has_are_counted_and_are_no_agreement() -> None:
    virtual = matrix(cell(), cell("ok", "a"), cell("ok", "b"))
    found = agree(virtual, matrix(real(), real("ok", "c"), devices=(gpu(1),)))
    assert (1, 1, 2) == (found.compared, found.agreed, found.unmeasured)
    assert [(UNCOMPARED, None, "ok", "the virtual run has no such cell")] == [
        (c.kind, c.old, c.new, c.reason) for c in found.changes
    ]


def test_a_device_is_described_by_that_of_its_name_else_of_its_capability() -> None:
    virtual = matrix(cell("rejected", device="virtual:b200"), cell(), devices=(B200, H200))
    named = agree(virtual, matrix(real(), devices=(gpu(1),)))
    assert ((("virtual:h200", "GPU-1"),), ()) == (named.pairs, named.notes)
    alike = agree(virtual, matrix(real(), devices=(gpu(1, "NVIDIA GH200"),)))
    assert (("virtual:h200", "GPU-1"),) == alike.pairs
    assert ("GPU-1 (NVIDIA GH200) is compared with virtual:h200, of its capability",) == alike.notes
    with pytest.raises(UsageError, match="no virtual device is of its kind"):
        agree(virtual, matrix(real(), devices=(gpu(1, "NVIDIA T4", capability=[7, 5]),)))


def test_a_slice_is_described_by_a_slice_of_its_profile() -> None:
    part = {**H200, "spec": "virtual:h200/1g.35gb", "name": "x", "mig": "1g.35gb"}
    virtual = matrix(cell("rejected"), cell(device=part["spec"]), devices=(H200, part))
    found = agree(virtual, matrix(real(), devices=(gpu(1, "y", kind="mig", mig="1g.35gb"),)))
    assert (("virtual:h200/1g.35gb", "GPU-1"),) == found.pairs


def test_the_order_of_the_runs_and_their_vllm_are_checked() -> None:
    virtual, measured = matrix(cell()), matrix(real(), devices=(gpu(1),))
    for runs in ((measured, measured), (virtual, virtual)):
        with pytest.raises(UsageError, match="kvmatrix agree VIRTUAL MEASURED"):
            agree(*runs)
    newer = matrix(real(engine="0.34.0"), devices=(gpu(1),), engines=("0.34.0",))
    with pytest.raises(UsageError, match=r"0\.33\.0 virtual, 0\.34\.0 measured"):
        agree(virtual, newer)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b[31m <script> `x`"
    crashed = real("crashed", "fp8", reason=hostile)
    folders = [
        str(write(tmp_path / "v", matrix(cell(), cell("ok", "fp8")))),
        str(write(tmp_path / "m", matrix(real(), crashed, devices=(gpu(1),)))),
    ]
    assert 1 == main(["agree", *folders])
    out = capsys.readouterr().out
    assert "1 of 2 cells with a result on both agree" in out
    assert "ok -> crashed: llama3-default-fp8\n    \\x1b[31m <script> `x`\n" in out
    assert 1 == main(["agree", *folders, "--markdown"])
    assert "`` \\x1b[31m <script> `x` ``" in capsys.readouterr().out
    assert 1 == main(["agree", *folders, "--json"])
    (row,) = json.loads(capsys.readouterr().out)["changes"]
    assert ("ok", "crashed", hostile) == (row["virtual"], row["measured"], row["reason"])
    assert 2 == main(["agree", *reversed(folders)])
