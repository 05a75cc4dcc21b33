"""The scratch folder: gone with its process, or with the next one where that was killed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from harness.scratch import LOCK, PREFIX, Scratch


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def left_behind(parent: Path, name: str, age: float) -> Path:
    folder = parent / f"{PREFIX}{name}"
    folder.mkdir()
    (folder / "cell.log").write_text("x")
    (folder / LOCK).touch()
    then = (folder / LOCK).stat().st_mtime - age
    os.utime(folder / LOCK, (then, then))
    return folder


def test_it_is_gone_when_closed(parent: Path) -> None:
    scratch = Scratch()
    (scratch.path / "cell.log").write_text("x")
    scratch.close()
    assert [] == list(parent.iterdir())


def test_what_a_killed_process_left_is_removed(parent: Path) -> None:
    folder = left_behind(parent, "old", 3600)
    Scratch().close()
    assert not folder.exists()


def test_a_folder_in_use_is_left_alone(parent: Path) -> None:
    other = Scratch()
    then = 1_000_000_000.0
    os.utime(other.path / LOCK, (then, then))
    Scratch().close()
    assert other.path.is_dir()
    other.close()


def test_a_folder_that_may_be_about_to_be_locked_is_left_alone(parent: Path) -> None:
    folder = left_behind(parent, "new", 0)
    Scratch().close()
    assert folder.is_dir()


def test_other_folders_are_none_of_its_business(parent: Path) -> None:
    (parent / f"{PREFIX}locks").mkdir()
    Scratch().close()
    assert (parent / f"{PREFIX}locks").is_dir()
