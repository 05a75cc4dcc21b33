"""Recorded durations: what a cell is taken to need, and what the file keeps."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from harness import device, durations
from harness.case import Case
from harness.device import Device
from harness.durations import Durations, Key
from harness.errors import InfraError
from harness.facts import EngineFacts
from harness.plan import Cell, Model
from harness.record import Record

H200 = device.parse("virtual:h200")
MIG = Device(
    "MIG-1", "mig", "NVIDIA H200 MIG 1g.35gb", (9, 0), 32 * device.GIB, 26, 0, uuid="MIG-1"
)


def engine(version: str) -> EngineFacts:
    # Only the version tells engines apart here.
    facts = object.__new__(EngineFacts)
    object.__setattr__(facts, "version", version)
    return facts


def cell(case: Case, on: Device = H200, version: str = "0.33.0") -> Cell:
    model = Model(case.model, Path("models"), {})
    return Cell(case.id, case, model, on, engine(version))


def record(seconds: dict[str, float], end: str = "finished") -> Record:
    return Record(
        id="dsv4-default-unset",
        model="dsv4",
        backend="default",
        kv_cache_dtype="unset",
        device="virtual:h200",
        device_kind="virtual",
        capability=(9, 0),
        engine="0.33.0",
        depth="allocate",
        stage="allocate",
        end=end,
        seconds=seconds,
    )


def test_nothing_recorded_depends_on_the_kind_of_device_alone() -> None:
    none = Durations({})
    assert 1.0 == none.estimate(cell(Case("dsv4")))
    assert 10.0 == none.estimate(cell(Case("dsv4"), MIG))
    assert 10.0 == none.estimate(cell(Case("dsv4"), device.cpu()))


def test_the_closest_thing_recorded_counts() -> None:
    known = Durations(
        {
            ("dsv4-default-fp8", H200.id, "0.32.0"): 7.0,
            ("dsv4-default-unset", H200.id, "0.32.0"): 40.0,
            ("dsv4-default-unset", H200.id, "0.33.0"): 3.0,
            ("llama-default-unset", H200.id, "0.33.0"): 90.0,
        }
    )
    assert 3.0 == known.estimate(cell(Case("dsv4")))
    # The same cell with another version, the one recorded last.
    assert 7.0 == known.estimate(cell(Case("dsv4", kv_cache_dtype="fp8")))
    assert 3.0 == known.estimate(cell(Case("dsv4"), version="0.34.0"))
    # The median of 3, 7 and 40.
    assert 7.0 == known.estimate(cell(Case("dsv4", "FLASHMLA_SPARSE")))
    # Neither another model nor another device says anything.
    assert 1.0 == known.estimate(cell(Case("gemma")))
    assert 10.0 == known.estimate(cell(Case("dsv4"), MIG))


def test_a_model_with_a_dash_finds_its_own_median() -> None:
    case = Case("llama-3", kv_cache_dtype="fp8")
    known = Durations({(case.id, H200.id, "0.33.0"): 5.0})
    assert 5.0 == known.estimate(cell(Case("llama-3")))


def test_only_finished_cells_are_measured() -> None:
    one = cell(Case("dsv4"))
    assert {("dsv4-default-unset", "virtual_h200", "0.33.0"): 4.5} == durations.measured(
        one, record({"model": 2.0, "total": 4.5})
    )
    assert {} == durations.measured(one, record({"total": 120.0}, end="timeout"))
    assert {} == durations.measured(one, record({"model": 2.0}))


def test_saving_keeps_what_another_run_saved(tmp_path: Path) -> None:
    a: Key = ("dsv4-default-unset", "virtual_h200", "0.33.0")
    b: Key = ("dsv4-default-fp8", "virtual_h200", "0.33.0")
    durations.save(tmp_path, {a: 1.0, b: 2.0})
    durations.save(tmp_path, {a: 3.0})
    assert {a: 3.0, b: 2.0} == durations.load(tmp_path).seconds
    assert ["durations.json"] == [path.name for path in tmp_path.iterdir()]


def test_saving_nothing_writes_nothing(tmp_path: Path) -> None:
    durations.save(tmp_path / "cache", {})
    assert not (tmp_path / "cache").exists()


def test_a_folder_that_cannot_be_written_is_no_product_failure(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(InfraError, match=r"durations\.json"):
        durations.save(tmp_path / "cache", {("a", "b", "c"): 1.0})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[1, 2]",
        b'{"schema": 2, "engines": {"v": {"d": {"c": 1}}}}',
        b'{"schema": 1}',
        b'{"schema": 1, "engines": ["v"]}',
        b"[" * 100_000,
    ],
)
def test_a_corrupt_file_is_an_empty_one(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "durations.json").write_bytes(content)
    assert {} == durations.load(tmp_path).seconds
    durations.save(tmp_path, {("a", "b", "c"): 1.0})
    assert {("a", "b", "c"): 1.0} == durations.load(tmp_path).seconds


def test_one_bad_number_costs_that_number_alone() -> None:
    cases = {"a": 1, "b": 2.5, "c": "3", "d": True, "e": -1.0, "f": None, "g": 10**400}
    text = json.dumps({"schema": 1, "engines": {"v": {"d": cases, "e": 3}, "w": None}})
    text = text.replace('"f": null', '"f": NaN')
    assert {("a", "d", "v"): 1.0, ("b", "d", "v"): 2.5} == durations.loads(text)


def test_the_versions_recorded_last_are_kept() -> None:
    old = {("c", "d", f"dev{n}"): float(n) for n in range(8)}
    # dev0 is recorded again, so that dev1 is the oldest when a ninth comes.
    again = durations.merged(old, {("c", "d", "dev0"): 50.0})
    kept = durations.merged(again, {("c", "d", "dev8"): 8.0})
    assert {"dev0", *(f"dev{n}" for n in range(2, 9))} == {version for _, _, version in kept}
    assert 50.0 == kept["c", "d", "dev0"]
    # The order outlives the file.
    assert list(kept) == list(durations.loads(durations.dumps(kept)))


def test_a_given_file_has_a_digest(tmp_path: Path) -> None:
    file = tmp_path / "given.json"
    file.write_text(durations.dumps({("a", "d", "v"): 2.0}))
    found = durations.recorded(file)
    assert {("a", "d", "v"): 2.0} == found.durations.seconds
    assert hashlib.sha256(file.read_bytes()).hexdigest() == found.digest
    assert found.trouble is None


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "schema None is not 1"),
        (b'{"schema": 2, "engines": {}}', "schema 2 is not 1"),
        (b'{"schema": true, "engines": {}}', "schema True is not 1"),
    ],
)
def test_a_given_file_that_cannot_be_read_is_named(
    tmp_path: Path, content: bytes, why: str
) -> None:
    (tmp_path / "given.json").write_bytes(content)
    found = durations.recorded(tmp_path / "given.json")
    assert ({}, None) == (found.durations.seconds, found.digest)
    assert found.trouble is not None
    assert found.trouble.startswith(f"cannot use {tmp_path}/given.json: {why}")
    assert "split by estimates" in found.trouble


def test_a_folder_is_no_file_of_durations(tmp_path: Path) -> None:
    assert "Is a directory" in (durations.recorded(tmp_path).trouble or "")


def test_a_matrix_tells_durations_under_the_keys_of_its_cells() -> None:
    """Those of a real device go by its name, which is the same on another machine."""
    gpu = {"spec": "GPU-1", "kind": "gpu", "name": "NVIDIA H200", "uuid": "GPU-1", "label": None}
    cell = {
        "id": "m-default-unset-NVIDIA_H200",
        "model": "m",
        "backend": "default",
        "kv_cache_dtype": "unset",
        "block_size": 64,
        "tensor_parallel_size": 1,
        "device": "GPU-1",
        "engine": "0.33.0",
        "verdict": "ok",
        "end": "finished",
        "seconds": {"model": 1.0, "total": 2.5},
    }
    late = {**cell, "block_size": None, "end": "timeout"}
    none = {**cell, "block_size": None, "end": "finished", "seconds": {}}
    never = {**cell, "block_size": 32, "end": None}
    data = {"devices": [gpu], "cells": [cell, late, none, never]}
    assert {("m-default-unset-block64", "NVIDIA_H200", "0.33.0"): 2.5} == durations.of_matrix(data)
