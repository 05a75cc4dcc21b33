"""Before a server forks: its lists of modules grow, and its memory stays what it is."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from harness import device
from harness.engine import hugepages, warm


def test_names_are_added_in_order_and_once(tmp_path: Path) -> None:
    path = tmp_path / "modules"
    warm.add_names(path, ["b", "a"])
    warm.add_names(path, ["a", "c"])
    assert ["b", "a", "c"] == json.loads(path.read_text())
    assert [path] == list(tmp_path.iterdir())


def test_nothing_new_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "modules"
    warm.add_names(path, ["a"])
    before = path.stat().st_ino
    warm.add_names(path, ["a"])
    assert before == path.stat().st_ino


@pytest.mark.parametrize("text", ["", "[", '{"a"', "\0"])
def test_a_list_cut_short_is_learned_anew(text: str, tmp_path: Path) -> None:
    path = tmp_path / "modules"
    path.write_text(text)
    warm.add_names(path, ["a"])
    assert ["a"] == warm.kept_names(path)


def test_what_a_later_cell_adds_is_imported_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list learned behind another model's cells lacked what those had imported, and each cell
    of a run of its own imported that again."""
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("kvm_first", "kvm_second"):
        (tmp_path / f"{name}.py").touch()
        monkeypatch.delitem(sys.modules, name, raising=False)
    path = tmp_path / "modules"
    before = warm.learner(device.parse("virtual:h200"), "0.33.0")
    warm.add_names(path, ["kvm_first"])
    before({"modules": str(path)})
    assert "kvm_first" in sys.modules
    assert "kvm_second" not in sys.modules
    warm.add_names(path, ["kvm_second"])
    before({"modules": str(path)})
    assert "kvm_second" in sys.modules


def test_collapsed_memory_keeps_what_it_holds() -> None:
    block = bytearray(range(256)) * (4 * hugepages.HUGE // 256)
    copy = bytes(block)
    hugepages.collapse()
    assert copy == block
